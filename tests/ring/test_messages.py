"""Masks, layouts and plans that cannot be made are refused with a message that names the value and the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from burst_attention import Layout, Mask, RingError, blocks, causal, documents, parse_mask, plan, prefix, window
from tests.ring.refusals import SIZE, TOKENS, inputs
from tests.ring.wrong_calls import ONE_OF_LAYOUTS, ONE_OF_SIDES, SUPPORTED

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
    ("batch", {"batch": 0}, "batch must be a whole number of at least 1, got 0"),
    ("heads", {"heads": 0}, "heads must be a whole number of at least 1, got 0"),
    ("kv-heads", {"kv_heads": 0}, "kv_heads must be a whole number of at least 1, got 0"),
    ("head-dim", {"head_dim": 0}, "head_dim must be a whole number of at least 1, got 0"),
    ("value-dim", {"value_dim": -4}, "value_dim must be a whole number of at least 1, got -4"),
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
    ("blocks", {"mask": blocks([[1]], 5)}, "5 queries and 5 keys, but positions go up to 12; give a larger"),
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
