"""Calls that must be refused are listed here, with what the message must say: ranks that differ, and bad arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from burst_attention import Layout, Ring, blocks, burst_attention, causal, documents, window
from tests.ring.refusals import SIZE, TOKENS, WRONG, inputs, wanting


@dataclass(frozen=True)
class Difference:
    """A call in which one rank differs from the others, and what every rank must say about it."""

    name: str
    says: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    everywhere: dict[str, Any] = field(default_factory=dict)
    change: Callable[[list[Tensor]], list[Tensor]] = list

    def call(self, ring: Ring) -> Tensor | tuple[Tensor, Tensor]:
        wrong = ring.rank == WRONG
        qkv = self.change(inputs(ring.rank)) if wrong else inputs(ring.rank)
        return burst_attention(*qkv, ring=ring, **(self.everywhere | (self.options if wrong else {})))


def both(field_name: str, usual: object, wrong: object) -> tuple[str, ...]:
    """The whole sentence about a field on which rank 1 of 3 differs."""
    return (
        f"ranks disagree on {field_name}: ranks 0, 2 have {usual!r}, rank 1 has {wrong!r}; "
        "every rank must make the same call",
    )


LONG = [5, *[1] * 60, 7]

DIFFERENCES = [
    Difference("batch", both("batch", 1, 2), change=lambda x: [y.repeat(2, 1, 1, 1) for y in x]),
    Difference("heads", both("heads", 4, 2), change=lambda x: [x[0][:, :2], *x[1:]]),
    Difference("kv-heads", both("kv_heads", 2, 1), change=lambda x: [x[0], x[1][:, :1], x[2][:, :1]]),
    Difference("head-dim", both("head_dim", 8, 4), change=lambda x: [x[0][..., :4], x[1][..., :4], x[2]]),
    Difference("value-dim", both("value_dim", 8, 4), change=lambda x: [x[0], x[1], x[2][..., :4]]),
    Difference("dtype", both("dtype", "float32", "float64"), change=lambda x: [y.double() for y in x]),
    Difference("requires-grad", both("requires_grad", "", "kv"), change=wanting("kv")),
    Difference("mask", both("mask", "full()", "causal()"), {"mask": causal()}),
    Difference("window", both("mask", "window(3)", "window(4)"), {"mask": window(4)}, {"mask": window(3)}),
    Difference(
        "tail-of-a-long-mask",
        ("ranks disagree on mask: ranks 0, 2 have 'documents([5, 1, 1", "rank 1 has 'documents([5, 1, 1", "same call"),
        {"mask": documents([*LONG[:-1], 8])},
        {"mask": documents(LONG)},
    ),
    Difference("layout", both("layout", "contiguous", "zigzag"), {"layout": "zigzag"}),
    Difference(
        "layout-start",
        both("layout", "contiguous(12, 3)", "contiguous(12, 3, 4)"),
        {"layout": Layout.contiguous(TOKENS, SIZE, 4)},
        {"layout": Layout.contiguous(TOKENS, SIZE)},
    ),
    Difference("key-layout", both("key_layout", "None", "striped"), {"key_layout": "striped"}),
    Difference("scale", both("scale", 0.5, 0.25), {"scale": 0.25}, {"scale": 0.5}),
    Difference("direction", both("direction", "auto, forward auto", "kv, forward auto"), {"direction": "kv"}),
    Difference(
        "forward-direction",
        both("direction", "auto, forward kv", "auto, forward query"),
        {"forward_direction": "query"},
        {"forward_direction": "kv"},
    ),
    Difference(
        "kernel",
        ("ranks disagree on options: ranks 0, 2 have 'kernel=auto", "rank 1 has 'kernel=plain", "the same call"),
        {"kernel": "plain"},
    ),
    Difference(
        "wire-dtype",
        ("ranks disagree on options", "wire_dtype=None", "rank 1 has", "wire_dtype=bfloat16", "the same call"),
        {"wire_dtype": torch.bfloat16},
    ),
    Difference(
        "coalesce",
        ("ranks disagree on options", "coalesce=1", "rank 1 has", "coalesce=2", "the same call"),
        {"coalesce": 2},
    ),
    Difference(
        "results",
        ("ranks disagree on options", "results=chain", "rank 1 has", "results=straight", "the same call"),
        {"results": "straight"},
    ),
    Difference("check", both("check", "always", "first"), {"check": "first"}),
    Difference(
        "query-tokens",
        ("rank 1 holds 3 query tokens, but layout contiguous(12, 3) gives it 4", "Layout.shard"),
        change=lambda x: [x[0][:, :, :3], *x[1:]],
    ),
    Difference(
        "many-query-tokens",
        ("rank 1 holds 8 query tokens, but layout contiguous(12, 3) gives it 4", "(ranks hold 4, 8, 4)"),
        change=lambda x: [torch.cat([x[0]] * 2, 2), *x[1:]],
    ),
    Difference(
        "key-tokens",
        ("rank 1 holds 3 key tokens, but layout contiguous(12, 3) gives it 4", "Layout.shard", "pass the layout"),
        change=lambda x: [x[0], *(y[:, :, :3] for y in x[1:])],
    ),
    Difference(
        "tokens-of-a-given-layout",
        ("rank 1 holds 5 query tokens, but layout zigzag(12, 3) gives it 4; shard with Layout.shard",),
        everywhere={"layout": Layout.zigzag(TOKENS, SIZE)},
        change=lambda x: [torch.cat([y, y[:, :, :1]], 2) for y in x],
    ),
]


@dataclass(frozen=True)
class Bad:
    """A wrong argument, and what the message must say: the value or rule, and where it is not obvious the remedy."""

    name: str
    says: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    change: Callable[[list[Any]], list[Any]] = list
    names_rank: bool = True
    """Whether one rank alone can know; the rest is found once all lengths are known, and says the same everywhere."""

    def call(self, ring: Ring, wrong: bool) -> Any:
        qkv = self.change(inputs(ring.rank)) if wrong else inputs(ring.rank)
        return burst_attention(*qkv, ring=ring, **(self.options if wrong else {}))


ONE_OF_SIDES = "must be one of 'auto', 'kv', 'query'"
SUPPORTED = "is not supported; use float32, bfloat16, float16 or float64"
ONE_OF_LAYOUTS = "must be a Layout or one of 'contiguous', 'zigzag', 'striped'"
SHORT_BLOCKS = "blocks(...) of 2 x 2 blocks of 2 covers 4 queries and 4 keys"

BAD = [
    Bad("q-is-a-list", ("q must be a tensor, got list",), change=lambda x: [[1.0], *x[1:]]),
    Bad("k-is-none", ("k must be a tensor, got NoneType",), change=lambda x: [x[0], None, x[2]]),
    Bad(
        "q-of-3-dims",
        ("q must have 4 dimensions (batch, heads, tokens, head_dim), got shape (4, 4, 8)",),
        change=lambda x: [x[0][0], *x[1:]],
    ),
    Bad(
        "v-of-5-dims",
        ("v must have 4 dimensions (batch, heads, tokens, head_dim), got shape (1, 1, 2, 4, 8)",),
        change=lambda x: [*x[:2], x[2][None]],
    ),
    Bad("integer-dtype", (f"q torch.int64 {SUPPORTED}",), change=lambda x: [y.long() for y in x]),
    Bad("complex-dtype", (f"k torch.complex64 {SUPPORTED}",), change=lambda x: [x[0], x[1].to(torch.complex64), x[2]]),
    Bad(
        "mixed-dtypes",
        (
            "q, k and v must have one dtype, got torch.float32, torch.bfloat16, torch.float32;",
            "cast them, or use autocast",
        ),
        change=lambda x: [x[0], x[1].bfloat16(), x[2]],
    ),
    Bad(
        "mixed-devices",
        ("q is on cpu but v on meta; put all inputs on one device",),
        change=lambda x: [x[0], x[1], x[2].to("meta")],
    ),
    Bad("batch", ("q has batch 1 but k has 2",), change=lambda x: [x[0], x[1].repeat(2, 1, 1, 1), x[2]]),
    Bad(
        "no-batch", ("q has shape (0, 4, 4, 8); only the number of tokens may be",), change=lambda x: [y[:0] for y in x]
    ),
    Bad(
        "heads-not-a-multiple",
        ("q has 4 heads, k and v have 3: query heads must be a multiple of key heads",),
        change=lambda x: [x[0], x[0][:, :3], x[0][:, :3]],
    ),
    Bad("head-dim", ("q has head_dim 8 but k has 4",), change=lambda x: [x[0], x[1][..., :4], x[2]]),
    Bad(
        "key-and-value-tokens",
        ("k (1, 2, 3, 8) and v (1, 2, 4, 8) must agree in batch, heads and tokens",),
        change=lambda x: [x[0], x[1][:, :, :3], x[2]],
    ),
    Bad(
        "key-and-value-heads",
        ("k (1, 2, 4, 8) and v (1, 1, 4, 8) must agree in batch, heads and tokens",),
        change=lambda x: [x[0], x[1], x[2][:, :1]],
    ),
    Bad("direction", (f"direction {ONE_OF_SIDES}, got 'sideways'",), {"direction": "sideways"}),
    Bad("forward-direction", (f"forward_direction {ONE_OF_SIDES}, got None",), {"forward_direction": None}),
    Bad("check", ("check must be one of 'always', 'first', 'off', got 'sometimes'",), {"check": "sometimes"}),
    Bad(
        "kernel",
        ("there is no kernel 'fast'; use one of auto, flash, cuda, triton, hopper, cudnn, plain",),
        {"kernel": "fast"},
    ),
    *(
        Bad(
            f"{name}-on-cpu",
            (f"kernel '{name}' cannot serve this call: it runs on a GPU, the tensors are on cpu; use kernel='auto'",),
            {"kernel": name},
        )
        for name in ("cuda", "triton", "cudnn")
    ),
    *(
        Bad(
            f"coalesce-{value}",
            (f"coalesce must be 'auto' or a whole number from 1 to 8, got {value!r}",),
            {"coalesce": value},
        )
        for value in (0, 9, True, "two", 1.5)
    ),
    Bad("return-lse-type", ("return_lse must be True or False, got 'no'",), {"return_lse": "no"}),
    Bad(
        "flash-in-fp16",
        ("kernel 'flash' cannot serve this call: it serves float32 and bfloat16", "torch.float16", "use kernel='auto'"),
        {"kernel": "flash"},
        change=lambda x: [y.half() for y in x],
    ),
    Bad(
        "flash-with-other-value-dim",
        ("'flash' cannot serve this call: it needs equal head dims, got 8 for q, k and 4 for v; use kernel='auto'",),
        {"kernel": "flash"},
        change=lambda x: [x[0], x[1], x[2][..., :4]],
    ),
    Bad(
        "flash-with-lse",
        ("kernel 'flash' cannot serve this call: its lse", "return_lse=True", "use kernel='auto'"),
        {"kernel": "flash", "return_lse": True},
    ),
    Bad("layout-name", (f"layout {ONE_OF_LAYOUTS}, got 'spiral'",), {"layout": "spiral"}),
    Bad("layout-type", (f"layout {ONE_OF_LAYOUTS}, got 7",), {"layout": 7}),
    Bad("key-layout-name", (f"key_layout {ONE_OF_LAYOUTS}, got 'spiral'",), {"key_layout": "spiral"}),
    Bad(
        "balanced-by-name",
        ("layout 'balanced' depends on", "mask; pass Layout.balanced(tokens, ring_size, mask)"),
        {"layout": "balanced"},
    ),
    Bad(
        "layout-for-another-ring",
        ("layout striped(12, 4) is for a ring of 4, this ring has 3 ranks",),
        {"layout": Layout.striped(TOKENS, 4)},
    ),
    Bad(
        "key-layout-for-another-ring",
        ("layout zigzag(12, 2) is for a ring of 2, this ring has 3 ranks",),
        {"key_layout": Layout.zigzag(TOKENS, 2)},
    ),
    Bad(
        "layout-of-another-length",
        (
            "rank 0 holds 4 query tokens, but layout contiguous(15, 3) gives it 5; shard with Layout.shard, or pass",
            "(ranks hold 4, ",
        ),
        {"layout": Layout.contiguous(15, SIZE)},
        names_rank=False,
    ),
    Bad(
        "key-layout-of-another-length",
        ("rank 0 holds 4 key tokens, but key_layout striped(15, 3) gives it 5", "pass the key_layout that the data"),
        {"key_layout": Layout.striped(15, SIZE)},
        names_rank=False,
    ),
    Bad("mask-as-text", ("mask must be a Mask such as causal() or None for full", "got str"), {"mask": "causal"}),
    Bad("mask-as-function", ("mask must be a Mask such as causal()", "got function"), {"mask": causal}),
    Bad("mask-as-tensor", ("mask must be a Mask", "got Tensor"), {"mask": torch.ones(4, 4, dtype=torch.bool)}),
    Bad(
        "short-documents",
        ("documents(...) covers 8 tokens but positions go up to 12", "(the rest can be one more document)"),
        {"mask": documents([5, 3])},
        names_rank=False,
    ),
    Bad(
        "short-documents-inside-a-composition",
        ("documents(...) covers 8 tokens but positions go up to 12",),
        {"mask": causal() & (window(3) | documents([5, 3]))},
        names_rank=False,
    ),
    Bad(
        "short-documents-known-by-one-rank",
        ("documents(...) covers 8 tokens but positions go up to 12; give every token a document",),
        {"mask": documents([5, 3]), "layout": Layout.zigzag(TOKENS, SIZE)},
    ),
    Bad(
        "short-blocks",
        (SHORT_BLOCKS, "but positions go up to 12; give a larger matrix"),
        {"mask": blocks([[1, 0], [1, 1]], 2)},
        names_rank=False,
    ),
    Bad("scale-nan", ("scale must be a finite number or None for 1/sqrt(head_dim), got nan",), {"scale": float("nan")}),
    Bad("scale-infinite", ("scale must be a finite number", "got -inf"), {"scale": float("-inf")}),
    Bad("scale-text", ("scale must be a finite number or None", "got '0.5'"), {"scale": "0.5"}),
    Bad("scale-bool", ("scale must be a finite number or None", "got True"), {"scale": True}),
    Bad(
        "wire-dtype-text",
        ("wire_dtype must be None or one of float32, bfloat16, float16, float64, got 'bfloat16'",),
        {"wire_dtype": "bfloat16"},
    ),
    Bad("wire-dtype-integer", ("wire_dtype must be None or one of", "got torch.int8"), {"wire_dtype": torch.int8}),
    Bad("results", ("results must be one of 'auto', 'chain', 'straight', got 'home'",), {"results": "home"}),
    Bad("softcap", ("softcap=30.0 is refused: a cap on the scores is not implemented",), {"softcap": 30.0}),
    Bad("dropout-p", ("dropout_p=0.1 is refused: dropout on the weights is not implemented",), {"dropout_p": 0.1}),
    Bad("dropout", ("dropout=0.5 is refused: dropout on the weights is not implemented",), {"dropout": 0.5}),
    Bad("bias", ("bias=", "is refused: an additive bias on the scores is not"), {"bias": torch.zeros(2, 2)}),
    Bad("alibi", ("alibi_slopes=[1] is refused: an additive bias on the scores",), {"alibi_slopes": [1]}),
    Bad(
        "attn-mask",
        ("attn_mask=", "is refused: a dense mask is not taken; write it as", "causal(), window(n), documents([...])"),
        {"attn_mask": torch.ones(2, 2, dtype=torch.bool)},
    ),
    Bad("is-causal", ("is_causal=True is refused: say mask=causal() instead",), {"is_causal": True}),
    Bad(
        "window-size",
        ("window_size=(4, 0) is refused: say mask=causal() & window(size) instead",),
        {"window_size": (4, 0)},
    ),
    Bad("sinks", ("sinks=[0.0] is refused: learned sinks are written on top of return_lse=True",), {"sinks": [0.0]}),
    Bad("unknown-argument", ("burst_attention takes no argument 'masks'",), {"masks": causal()}),
]
