"""A wrong call, or calls that differ between ranks, raise one clear error on every rank before anything moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention import (
    Layout,
    Mask,
    Ring,
    RingError,
    blocks,
    burst_attention,
    causal,
    documents,
    full,
    parse_mask,
    plan,
    prefix,
    run_ranks,
    window,
)
from burst_attention.agreement import LocalCall
from burst_attention.launch import run_processes
from burst_attention.reference import allowed_pairs, reference_attention
from burst_attention.ring.base import RECORD_BYTES

SIZE, TOKENS = 3, 12
LOCAL = TOKENS // SIZE
TIMEOUT = 6.0
QUICK = 3.0
"""Seconds in which a refusal must have reached every rank; far below the time that a wait would take."""

WRONG = 1
"""The rank that is called differently."""


def inputs(rank: int) -> list[Tensor]:
    """q (1, 4, 4, 8), k and v (1, 2, 4, 8) of one rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(1, heads, LOCAL, 8, generator=generator) for heads in (4, 2, 2)]


def attempt(ring: Ring, call: Callable[[], Any]) -> str:
    """The error of a call as "Type: text", after proving that it came soon."""
    started, text = time.monotonic(), "no error"
    try:
        call()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    assert time.monotonic() - started < QUICK, f"rank {ring.rank} was told late: {text}"
    return text


def correct_call(ring: Ring) -> None:
    """A call that must work on a ring whose last call was refused."""
    q, k, v = (torch.cat(parts, 2) for parts in zip(*(inputs(rank) for rank in range(ring.size)), strict=True))
    positions = torch.arange(q.shape[2])
    expected, _ = reference_attention(q, k, v, allowed_pairs(causal(), positions, positions))
    found = burst_attention(*inputs(ring.rank), ring=ring, mask=causal())
    torch.testing.assert_close(found.double(), expected.chunk(ring.size, 2)[ring.rank], rtol=1e-4, atol=1e-5)


def refused_everywhere(call: Callable[[Ring], Any], size: int = SIZE) -> str:
    """The one text with which every rank refuses a call, after proving that nothing moved and the ring still works."""

    def body(ring: Ring) -> str:
        text = attempt(ring, lambda: call(ring))
        assert ring.bytes_sent == 0, "blocks moved before the refusal"
        correct_call(ring)
        assert ring.size == 1 or ring.bytes_sent > 0 or ring.rank == size - 1
        return text

    texts = run_ranks(body, size, timeout=TIMEOUT)
    assert len(set(texts)) == 1, f"ranks say different things: {texts}"
    kind, _, text = texts[0].partition(": ")
    assert kind == "ValueError", texts[0]
    return text


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


def wanting(letters: str) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda qkv: [x.requires_grad_(name in letters) for name, x in zip("qkv", qkv, strict=True)]


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
    Difference("check", both("check", "always", "first"), {"check": "first"}),
    Difference(
        "query-tokens",
        ("rank 1 holds 3 query tokens, but layout contiguous(11, 3) gives it 4", "Layout.shard"),
        change=lambda x: [x[0][:, :, :3], *x[1:]],
    ),
    Difference(
        "key-tokens",
        ("rank 1 holds 3 key tokens, but layout contiguous(11, 3) gives it 4", "Layout.shard", "pass the layout"),
        change=lambda x: [x[0], *(y[:, :, :3] for y in x[1:])],
    ),
    Difference(
        "tokens-of-a-given-layout",
        ("rank 1 holds 5 query tokens, but layout zigzag(12, 3) gives it 4; shard with Layout.shard",),
        everywhere={"layout": Layout.zigzag(TOKENS, SIZE)},
        change=lambda x: [torch.cat([y, y[:, :, :1]], 2) for y in x],
    ),
]


@pytest.mark.parametrize("case", DIFFERENCES, ids=lambda case: case.name)
def test_ranks_that_differ_are_all_told(case: Difference) -> None:
    text = refused_everywhere(case.call)
    for part in case.says:
        assert part in text


@pytest.mark.parametrize("needs", ["qkv", ""], ids=["training", "inference"])
def test_return_lse_that_differs_is_told(needs: str) -> None:
    """It decides which gradients exist and which kernel serves, so it must be the same."""

    def call(ring: Ring) -> Any:
        return burst_attention(*wanting(needs)(inputs(ring.rank)), ring=ring, return_lse=ring.rank == WRONG)

    text = refused_everywhere(call)
    for part in ("ranks disagree on options", "return_lse=False", "rank 1 has", "return_lse=True", "the same call"):
        assert part in text


def test_grad_mode_that_differs_is_told() -> None:
    def call(ring: Ring) -> Any:
        with torch.set_grad_enabled(ring.rank != WRONG):
            return burst_attention(*wanting("qkv")(inputs(ring.rank)), ring=ring)

    assert refused_everywhere(call) == both("requires_grad", "qkv", "")[0]


def test_device_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be one kind of device here, so the record of one rank is made to name another."""
    original = LocalCall.record

    def record(self: LocalCall) -> dict[str, Any]:
        wrong = threading.current_thread().name == f"ring-rank-{WRONG}" and self.options.scale == 0.5
        return original(self) | ({"device": "cuda"} if wrong else {})

    monkeypatch.setattr(LocalCall, "record", record)
    text = refused_everywhere(lambda ring: burst_attention(*inputs(ring.rank), ring=ring, scale=0.5))
    assert text == both("device", "cpu", "cuda")[0]


def test_a_rank_on_the_meta_device_is_told() -> None:
    def call(ring: Ring) -> Any:
        device = "meta" if ring.rank == WRONG else "cpu"
        return burst_attention(*(x.to(device) for x in inputs(ring.rank)), ring=ring)

    assert "meta" in refused_everywhere(call)


@pytest.mark.parametrize("phase_of_rank_1", ["forward", "backward"])
def test_ranks_in_different_phases_are_told(phase_of_rank_1: str) -> None:
    def body(ring: Ring) -> str:
        qkv = wanting("qkv")(inputs(ring.rank))
        out = burst_attention(*qkv, ring=ring)
        moved = ring.bytes_sent
        backward = (phase_of_rank_1 == "backward") == (ring.rank == WRONG)
        call = out.sum().backward if backward else lambda: burst_attention(*qkv, ring=ring)
        text = attempt(ring, call)
        assert ring.bytes_sent == moved
        correct_call(ring)
        return text

    other = "forward" if phase_of_rank_1 == "backward" else "backward"
    expected = f"ValueError: {both('phase', other, phase_of_rank_1)[0]}"
    assert run_ranks(body, SIZE, timeout=TIMEOUT) == [expected] * SIZE


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
    Bad("kernel", ("there is no kernel 'fast'; use one of auto, flash, plain",), {"kernel": "fast"}),
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
        ("rank 0 holds 4 query tokens, but layout contiguous(15, 3) gives it 5; shard with Layout.shard, or pass",),
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
        (SHORT_BLOCKS, "but positions go up to 12 and 12; give a larger matrix"),
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


@pytest.mark.parametrize("case", [case for case in BAD if case.names_rank], ids=lambda case: case.name)
def test_one_wrong_argument_is_told_to_every_rank(case: Bad) -> None:
    text = refused_everywhere(lambda ring: case.call(ring, wrong=ring.rank == WRONG))
    assert text.startswith("rank 1 was called wrongly: ")
    for part in case.says:
        assert part in text


@pytest.mark.parametrize("case", [case for case in BAD if not case.names_rank], ids=lambda case: case.name)
def test_what_only_all_lengths_show_is_told_to_every_rank(case: Bad) -> None:
    text = refused_everywhere(lambda ring: case.call(ring, wrong=True))
    for part in case.says:
        assert part in text


@pytest.mark.parametrize(
    "case", [case for case in BAD if case.names_rank and "12" not in case.says[0]], ids=lambda case: case.name
)
def test_a_wrong_argument_on_a_ring_of_one(case: Bad) -> None:
    """No other rank to blame: the message alone. Those that speak of the length of three shards are left out."""
    text = refused_everywhere(lambda ring: case.call(ring, wrong=True), size=1)
    assert text.startswith(case.says[0].split(" ")[0]) or case.says[0].startswith("'flash'")
    for part in case.says:
        assert part in text


def test_the_lowest_wrong_rank_is_named_when_several_are_wrong() -> None:
    def call(ring: Ring) -> Any:
        direction, scale = {0: ("auto", None), 1: ("sideways", None), 2: ("auto", float("nan"))}[ring.rank]
        return burst_attention(*inputs(ring.rank), ring=ring, direction=direction, scale=scale)

    assert refused_everywhere(call).startswith("rank 1 was called wrongly: direction must be")


@pytest.mark.parametrize(
    "value",
    [torch.arange(900.0).view(30, 30), "x" * 3000, "é" * 300, '"' * 1500],
    ids=["large-tensor", "long-text", "text-beyond-ascii", "quotes"],
)
def test_a_long_message_is_the_same_on_every_rank(value: Any) -> None:
    """A record has a fixed size; what does not fit must be cut alike where it was sent and where it arrived."""
    text = refused_everywhere(
        lambda ring: burst_attention(*inputs(ring.rank), ring=ring, **({"bias": value} if ring.rank == WRONG else {}))
    )
    assert text.startswith("rank 1 was called wrongly: bias=")


def test_calls_with_the_longest_texts_still_agree() -> None:
    mask = documents([1] * TOKENS) | window(3) | prefix(2) | blocks([[1, 0] * 30] * 60, 4)
    layout = Layout.balanced(TOKENS, SIZE, mask)

    def body(ring: Ring) -> float:
        q, k, v = (layout.shard(torch.ones(1, 2, TOKENS, 8), ring.rank, 2) for _ in range(3))
        out = burst_attention(
            q, k, v, ring=ring, mask=mask, layout=layout, key_layout=layout, wire_dtype=torch.bfloat16, scale=1 / 3,
            direction="query", forward_direction="query", kernel="plain", return_lse=True,
        )[0]  # fmt: skip
        return (out - 1).abs().max().item()

    assert max(run_ranks(body, SIZE, timeout=TIMEOUT)) < 1e-2


@pytest.mark.parametrize(
    "harmless",
    [
        {"softcap": None}, {"softcap": 0.0}, {"dropout_p": 0.0}, {"dropout": 0}, {"is_causal": False},
        {"attn_mask": None}, {"bias": None}, {"window_size": None},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)  # fmt: skip
def test_harmless_values_of_refused_arguments_pass(harmless: dict[str, Any]) -> None:
    def body(ring: Ring) -> tuple[Tensor, Tensor]:
        qkv = inputs(ring.rank)
        return burst_attention(*qkv, ring=ring, **harmless), burst_attention(*qkv, ring=ring)

    for found, expected in run_ranks(body, SIZE, timeout=TIMEOUT):
        assert torch.equal(found, expected)


NOT_CHECKED = [
    ("first", {"direction": "sideways"}, "direction must be one of 'auto', 'kv', 'query', got 'sideways'"),
    ("off", {}, "check='off' needs Layout objects, e.g. layout=Layout.contiguous(tokens, ring_size)"),
    ("off", {"layout": "zigzag"}, "without a check no rank learns the whole length"),
    ("off", {"layout": Layout.zigzag(TOKENS, SIZE), "key_layout": "zigzag"}, "check='off' needs Layout objects"),
]
not_checked = pytest.mark.parametrize(
    ("check", "options", "says"), NOT_CHECKED, ids=["first", "off", "off-with-name", "off-with-key-name"]
)


@not_checked
def test_one_wrong_rank_without_a_check_stops_all(check: str, options: dict[str, Any], says: str) -> None:
    """The others may not be listening for records, so they are told as of a failure, and the ring ends."""
    given = {"check": check, "layout": Layout.zigzag(TOKENS, SIZE)}

    def body(ring: Ring) -> str:
        own = {"check": check, **options} if ring.rank == WRONG else given
        return attempt(ring, lambda: burst_attention(*inputs(ring.rank), ring=ring, forward_direction="kv", **own))

    texts = run_ranks(body, SIZE, timeout=TIMEOUT)
    for rank, text in enumerate(texts):
        assert says in text
        assert text.startswith("ValueError: " if rank == WRONG else "RingError: ")
        assert rank == WRONG or "rank 1 was called wrongly" in text


@not_checked
def test_the_same_wrong_call_without_a_check_is_a_value_error_on_every_rank(
    check: str, options: dict[str, Any], says: str
) -> None:
    def body(ring: Ring) -> str:
        return attempt(ring, lambda: burst_attention(*inputs(ring.rank), ring=ring, check=check, **options))

    texts = run_ranks(body, SIZE, timeout=TIMEOUT)
    for text in texts:
        assert text.startswith("ValueError: ") and says in text


def control_bytes(ring: Ring, call: Callable[[], Any]) -> int:
    before = ring.control_bytes
    call()
    return ring.control_bytes - before


@pytest.mark.parametrize(
    ("check", "first", "second"), [("always", 1, 1), ("first", 1, 0), ("off", 0, 0)], ids=["always", "first", "off"]
)
def test_when_records_are_exchanged(check: str, first: int, second: int) -> None:
    layout = Layout.zigzag(TOKENS, SIZE)

    def body(ring: Ring) -> list[int]:
        counts = []
        for _ in range(2):
            q, k, v = wanting("qkv")(inputs(ring.rank))
            outs: list[Tensor] = []

            def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v, outs: list[Tensor] = outs) -> None:
                outs.append(burst_attention(q, k, v, ring=ring, mask=causal(), layout=layout, check=check))

            counts.append(control_bytes(ring, forward))
            counts.append(control_bytes(ring, outs[0].sum().backward))
        # A call that was not seen before: other tokens.
        other = [x[:, :, :0] for x in inputs(ring.rank)]
        empty = Layout.zigzag(0, SIZE)
        counts.append(control_bytes(ring, lambda: burst_attention(*other, ring=ring, layout=empty, check=check)))
        return counts

    record = RECORD_BYTES * (SIZE - 1)
    expected = [record * first] * 2 + [record * second] * 2 + [record * first]
    assert run_ranks(body, SIZE, timeout=TIMEOUT) == [expected] * SIZE


@pytest.mark.parametrize("forward_direction", ["kv", "query"])
@pytest.mark.parametrize(
    "changed", [{"mask": causal()}, {"scale": 0.5}, {"mask": "causal"}], ids=["mask", "scale", "bad-argument"]
)
def test_a_rank_that_leaves_an_agreed_call_stops_all(changed: dict[str, Any], forward_direction: str) -> None:
    # One that fails ends the ring for those still in the call before, so all come out of it first.
    agreed = threading.Barrier(SIZE, timeout=TIMEOUT)

    def body(ring: Ring) -> str:
        options: dict[str, Any] = {"check": "first", "forward_direction": forward_direction}
        for _ in range(2):
            burst_attention(*inputs(ring.rank), ring=ring, **options)
        agreed.wait()
        if ring.rank == WRONG:
            options |= changed
        return attempt(ring, lambda: burst_attention(*inputs(ring.rank), ring=ring, **options))

    texts = run_ranks(body, SIZE, timeout=TIMEOUT)
    bad = isinstance(changed.get("mask"), str)
    for rank, text in enumerate(texts):
        if bad and rank == WRONG:
            assert text.startswith("ValueError: mask must be")
        else:
            # In the call, or before it when another rank was quicker to find out.
            assert text.startswith((f"RingError: rank {rank}, ", "RingError: this ring failed earlier"))
    others = [text for rank, text in enumerate(texts) if rank != WRONG]
    assert any("rank 1 does not follow" in text or "rank 1 was called wrongly" in text for text in others)


@pytest.mark.parametrize("check", ["first", "off"])
def test_a_rank_that_checks_alone_stops_all(check: str) -> None:
    """One rank exchanges records, the others do not: both kinds hear of it at once."""
    layout = Layout.contiguous(TOKENS, SIZE)
    agreed = threading.Barrier(SIZE, timeout=TIMEOUT)

    def body(ring: Ring) -> str:
        burst_attention(*inputs(ring.rank), ring=ring, layout=layout, check=check)
        agreed.wait()
        own = "always" if ring.rank == WRONG else check
        return attempt(ring, lambda: burst_attention(*inputs(ring.rank), ring=ring, layout=layout, check=own))

    for text in run_ranks(body, SIZE, timeout=TIMEOUT):
        assert text.startswith("RingError: ") and "rank 1 does not follow" in text


def test_a_rank_that_changes_its_mask_in_training_stops_all() -> None:
    """After steps whose forward and backward were agreed on: no rank is left waiting."""

    def step_once(ring: Ring, qkv: list[Tensor], mask: Mask) -> None:
        burst_attention(*qkv, ring=ring, mask=mask, check="first").sum().backward()

    agreed = threading.Barrier(SIZE, timeout=TIMEOUT)

    def body(ring: Ring) -> list[str]:
        texts = []
        for step in range(3):
            agreed.wait()
            mask = causal() if step == 2 and ring.rank == WRONG else full()
            qkv = wanting("qkv")(inputs(ring.rank))
            texts.append(attempt(ring, partial(step_once, ring, qkv, mask)))
        return texts

    for texts in run_ranks(body, SIZE, timeout=TIMEOUT):
        assert texts[:2] == ["no error", "no error"]
        assert texts[2].startswith("RingError: ") and "rank 1" in texts[2]


def test_refusals_between_processes() -> None:
    """Mask, shapes and an argument, one after the other on the same ring, with a correct call after each."""
    narrow = [case for case in DIFFERENCES if case.name in ("mask", "head-dim", "query-tokens")]
    bad = [case for case in BAD if case.name in ("direction", "q-is-a-list", "layout-for-another-ring")]

    def body(ring: Ring) -> list[str]:
        texts = []
        for case in narrow + bad:
            before = ring.bytes_sent
            wrong = () if isinstance(case, Difference) else (ring.rank == WRONG,)
            texts.append(attempt(ring, partial(case.call, ring, *wrong)))
            assert ring.bytes_sent == before
            correct_call(ring)
        return texts

    found = run_processes(body, SIZE, timeout=50, ring_timeout=TIMEOUT)
    assert found[0] == found[1] == found[2]
    for case, text in zip(narrow + bad, found[0], strict=True):
        disagree = case.name in ("mask", "head-dim")
        assert text.startswith("ValueError: ranks disagree" if disagree else "ValueError: rank 1 ")
        for part in case.says:
            assert part in text


def test_a_rank_that_leaves_an_agreed_call_stops_all_processes() -> None:
    def body(ring: Ring) -> tuple[int, str]:
        burst_attention(*inputs(ring.rank), ring=ring, check="first")
        second = control_bytes(ring, lambda: burst_attention(*inputs(ring.rank), ring=ring, check="first"))
        torch.distributed.barrier()
        mask = causal() if ring.rank == WRONG else None
        return second, attempt(ring, lambda: burst_attention(*inputs(ring.rank), ring=ring, mask=mask, check="first"))

    for rank, (second, text) in enumerate(run_processes(body, SIZE, timeout=50, ring_timeout=TIMEOUT)):
        assert second == 0
        assert text.startswith((f"RingError: rank {rank}, ", "RingError: this ring failed earlier"))


@pytest.mark.parametrize("ring", [None, 3, "world"], ids=["none", "number", "text"])
def test_ring_must_be_a_ring(ring: Any) -> None:
    expected = rf"ring must be a Ring, got {type(ring).__name__}; use Ring\.from_group\(\) or run_ranks\(\)"
    with pytest.raises(ValueError, match=expected):
        burst_attention(*inputs(0), ring=ring)


def test_from_group_needs_an_initialised_process_group() -> None:
    remedy = r"needs torch\.distributed: call .*init_process_group\(\) first, or use run_ranks"
    with pytest.raises(RuntimeError, match=remedy):
        Ring.from_group()


def test_from_mesh_needs_one_dimension() -> None:
    mesh = SimpleNamespace(ndim=2, mesh_dim_names=("dp", "cp"))
    says = r"a mesh of one dimension, got 2 \(\('dp', 'cp'\)\); choose the axis, .*mesh\['cp'\]"
    with pytest.raises(ValueError, match=says):
        Ring.from_mesh(mesh)


@pytest.mark.parametrize("size", [0, -2])
def test_run_ranks_needs_a_rank(size: int) -> None:
    with pytest.raises(ValueError, match=f"ring_size must be at least 1, got {size}"):
        run_ranks(lambda ring: ring.rank, size)


MASK_MESSAGES: list[tuple[str, Callable[[], Mask], str]] = [
    ("window-0", lambda: window(0), r"window\(size\) takes whole numbers of at least 1, got 0"),
    ("window-float", lambda: window(2.5), r"window\(size\) takes whole numbers of at least 1, got 2\.5"),  # type: ignore[arg-type]
    ("window-bool", lambda: window(True), r"window\(size\) takes whole numbers of at least 1, got True"),
    ("prefix-negative", lambda: prefix(-1), r"prefix\(length\) takes whole numbers of at least 0, got -1"),
    ("documents-empty", lambda: documents([]), r"documents\(lengths\) needs at least one document, got an empty list"),
    ("documents-0", lambda: documents([3, 0]), r"documents\(lengths\) takes whole numbers of at least 1, got 0"),
    (
        "documents-per-row",
        lambda: documents([[1, 2], [3]]),  # type: ignore[list-item]
        r"one list of lengths for the whole batch, not one per batch row; pack the rows into B = 1",
    ),
    ("blocks-empty", lambda: blocks([], 2), r"blocks\(matrix, block\) needs a 2-D matrix with at least one row"),
    ("blocks-ragged", lambda: blocks([[1, 0], [1]], 2), r"needs a 2-D matrix .* rows of equal length"),
    ("blocks-1-d", lambda: blocks(torch.ones(4), 2), r"needs a 2-D matrix"),
    ("blocks-size-0", lambda: blocks([[1]], 0), r"blocks\(matrix, block\) takes whole numbers of at least 1, got 0"),
    ("parse-unknown", lambda: parse_mask("spiral()"), r"cannot read mask 'spiral\(\)': .*; use full, causal, window,"),
    ("parse-syntax", lambda: parse_mask("causal() &"), r"cannot read mask 'causal\(\) &': .* composed with & and \|"),
    ("parse-keyword", lambda: parse_mask("window(size=3)"), r"cannot read mask .*: arguments go by position"),
]


@pytest.mark.parametrize(("make", "says"), [m[1:] for m in MASK_MESSAGES], ids=[m[0] for m in MASK_MESSAGES])
def test_messages_of_masks(make: Callable[[], Mask], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize("operator", ["&", "|"])
def test_masks_compose_with_masks_only(operator: str) -> None:
    with pytest.raises(TypeError, match=rf"a mask composes by [{operator}] with another mask, not with int"):
        causal() & 3 if operator == "&" else causal() | 3  # type: ignore[operator]


WHOLE = torch.zeros(1, 8)
LAYOUT_MESSAGES: list[tuple[str, Callable[[], Any], str]] = [
    ("tokens", lambda: Layout("zigzag", -1, 2), "Layout tokens must be a whole number of at least 0, got -1"),
    ("tokens-float", lambda: Layout.striped(8.0, 2), r"Layout tokens must be a whole number .*, got 8\.0"),  # type: ignore[arg-type]
    ("ring-size", lambda: Layout.contiguous(8, 0), "Layout ring_size must be a whole number of at least 1, got 0"),
    ("start", lambda: Layout.contiguous(8, 2, -3), "Layout start must be a whole number of at least 0, got -3"),
    ("name", lambda: Layout("spiral", 8, 2).runs(0), "there is no layout 'spiral'; use contiguous, .* or balanced"),
    ("balanced-without-mask", lambda: Layout("balanced", 8, 2).runs(0), "balanced.*[Mm]ask"),
    ("balanced-none", lambda: Layout.balanced(8, 2, None), r"needs a Mask to balance for, got None; .* use full\(\)"),  # type: ignore[arg-type]
    ("balanced-short", lambda: Layout.balanced(8, 2, documents([4])), r"covers 4 tokens but positions go up to 8"),
    ("parse", lambda: Layout.parse("zigzag"), r"cannot read layout 'zigzag': it is not of the form name\(tokens"),
    ("parse-name", lambda: Layout.parse("spiral(8, 2)"), r"cannot read layout 'spiral\(8, 2\)': there is no layout"),
    ("rank", lambda: Layout.zigzag(8, 2).runs(2), "rank 2 is outside a ring of 2"),
    ("shard", lambda: Layout.zigzag(9, 2).shard(WHOLE, 0, 1), r"dim 1 has 8 tokens, zigzag\(9, 2\) holds 9; give"),
    ("unshard-count", lambda: Layout.zigzag(8, 2).unshard([WHOLE], 1), "unshard needs 2 shards, one per rank, got 1"),
    (
        "unshard-length",
        lambda: Layout.zigzag(8, 2).unshard([WHOLE[:, :4], WHOLE], 1),
        r"shard of rank 1 has 8 tokens along dim 1, zigzag\(8, 2\) gives it 4",
    ),
    (
        "labels",
        lambda: Layout.zigzag(8, 2).labels(torch.zeros(1, 8, dtype=torch.long), 0, [3, 4]),
        "documents sum to 7 tokens, the layout holds 8",
    ),
]


@pytest.mark.parametrize(("make", "says"), [m[1:] for m in LAYOUT_MESSAGES], ids=[m[0] for m in LAYOUT_MESSAGES])
def test_messages_of_layouts(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


PLAN_MESSAGES: list[tuple[str, dict[str, Any], str]] = [
    ("tokens", {"tokens": -1}, "Layout tokens must be a whole number of at least 0, got -1"),
    ("ring-size", {"ring_size": 0}, "Layout ring_size must be a whole number of at least 1, got 0"),
    ("batch", {"batch": 0}, "batch must be at least 1, got 0"),
    ("heads", {"heads": 0}, "heads must be at least 1, got 0"),
    ("kv-heads", {"kv_heads": 0}, "kv_heads must be at least 1, got 0"),
    ("head-dim", {"head_dim": 0}, "head_dim must be at least 1, got 0"),
    ("value-dim", {"value_dim": -4}, "value_dim must be at least 1, got -4"),
    ("groups", {"kv_heads": 3}, "q has 4 heads, k and v have 3: query heads must be a multiple of key heads"),
    ("dtype", {"dtype": torch.int8}, f"dtype torch.int8 {SUPPORTED}"),
    ("mask", {"mask": "causal"}, r"mask must be a Mask such as causal\(\)"),
    ("layout-name", {"layout": "spiral"}, f"layout {ONE_OF_LAYOUTS}, got 'spiral'"),
    ("balanced-by-name", {"layout": "balanced"}, r"pass Layout\.balanced\(tokens, ring_size, mask\)"),
    ("layout-ring", {"layout": Layout.zigzag(12, 2)}, r"zigzag\(12, 2\) is for a ring of 2, this ring has 3 ranks"),
    ("layout-tokens", {"layout": Layout.zigzag(15, 3)}, r"tokens 12 differs from the layout's 15 \(zigzag\(15, 3\)\)"),
    (
        "key-tokens",
        {"layout": Layout.zigzag(12, 3), "key_tokens": 15},
        "key_tokens 15 differs from tokens 12: give key_layout too",
    ),
    (
        "key-layout-tokens",
        {"key_layout": Layout.zigzag(15, 3), "key_tokens": 12},
        r"key_tokens 12 differs from the layout's 15",
    ),
    ("direction", {"direction": "sideways"}, f"direction {ONE_OF_SIDES}, got 'sideways'"),
    ("forward-direction", {"forward_direction": 1}, f"forward_direction {ONE_OF_SIDES}, got 1"),
    ("wire-dtype", {"wire_dtype": "bf16"}, "wire_dtype must be None or one of float32, bfloat16, .*got 'bf16'"),
    ("requires-grad", {"requires_grad": "qx"}, "requires_grad takes letters of 'qkv', got 'qx'"),
    ("requires-grad-type", {"requires_grad": True}, "requires_grad takes letters of 'qkv', got True"),
    ("documents", {"mask": documents([5])}, r"covers 5 tokens but positions go up to 12; give every token"),
    ("blocks", {"mask": blocks([[1]], 5)}, "5 queries and 5 keys, but positions go up to 12 and 12; give a larger"),
]


@pytest.mark.parametrize(("options", "says"), [m[1:] for m in PLAN_MESSAGES], ids=[m[0] for m in PLAN_MESSAGES])
def test_messages_of_plan(options: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"tokens": TOKENS, "ring_size": SIZE, "heads": 4, "kv_heads": 2, "head_dim": 8}
    plan(**given)
    with pytest.raises(ValueError, match=says):
        plan(**(given | options))


@pytest.mark.parametrize(
    ("phase", "says"),
    [
        ("backward", "there is no backward: no input requires a gradient"),
        ("sideways", "must be 'forward' or 'backward'"),
    ],
)
def test_messages_of_a_plan_about_phases(phase: str, says: str) -> None:
    found = plan(TOKENS, SIZE, heads=2, head_dim=8, requires_grad="")
    with pytest.raises(ValueError, match=says):
        found.bytes_sent(0, phase)


def test_a_lost_ring_is_named() -> None:
    """RingError is for what happens on a ring; a name without a ring is a plain mistake of the caller."""
    q, k, v = inputs(0)
    with pytest.raises(RuntimeError, match="ring 'nowhere' no longer exists; keep the ring alive") as caught:
        torch.ops.burst_attention.forward(q, k, v, "{}", "nowhere")
    assert not isinstance(caught.value, RingError)
