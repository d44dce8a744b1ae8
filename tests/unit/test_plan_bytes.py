"""Plans state bytes and operations exactly, and "auto" moves the side that costs fewer bytes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burst_attention import Layout, Mask, Plan, blocks, causal, documents, full, plan, prefix, window
from tests.unit.plan_steps import COALESCE, DIRECTIONS, PHASES, WIDE

query, key = np.indices((48, 48))
document = np.repeat([0, 1, 2], [20, 9, 19])
MASKS: list[tuple[Mask, np.ndarray]] = [
    (full(), np.ones((48, 48), bool)),
    (causal(), key <= query),
    (causal() & window(7), (key <= query) & (query - key < 7)),
    (causal() & (window(5) | prefix(3)), (key <= query) & ((query - key < 5) | (key < 3))),
    (causal() & documents([20, 9, 19]), (key <= query) & (document[query] == document[key])),
    (blocks([[1, 0], [1, 0]], 24), key < 24),
    (prefix(0), np.zeros((48, 48), bool)),
]
"""Masks and their tables of allowed pairs."""


def sent(made: Plan, phase: str) -> list[int]:
    return [made.bytes_sent(rank, phase) for rank in range(made.layout.ring_size)]


def forced(direction: str, *args: Any, **options: Any) -> Plan:
    """A plan with one side moving in both phases."""
    return plan(*args, **options, direction=direction, forward_direction=direction)


# What moving queries saves.


@pytest.mark.parametrize("ring_size", [2, 4, 8])
@pytest.mark.parametrize(
    ("wire_dtype", "ratio"), [(None, 0.672), (torch.float32, 0.672), (torch.bfloat16, 0.758)], ids=str
)
def test_moving_queries_in_backward_costs_two_thirds(
    ring_size: int, wire_dtype: torch.dtype | None, ratio: float
) -> None:
    options = {"heads": 8, "head_dim": 128, "wire_dtype": wire_dtype}
    kv, queries = (sum(sent(forced(side, 512, ring_size, **options), "backward")) for side in DIRECTIONS)
    assert queries / kv == pytest.approx(ratio, abs=0.002)


@pytest.mark.parametrize(
    ("kv_heads", "direction"), [(32, "query"), (16, "kv"), (8, "kv"), (1, "kv")], ids=["mha", "gqa2", "gqa4", "mqa"]
)
def test_auto_moves_queries_for_mha_and_keys_for_gqa_in_backward(kv_heads: int, direction: str) -> None:
    made = plan(512, 4, heads=32, kv_heads=kv_heads, head_dim=128)
    assert made.direction("backward") == direction
    assert made.direction("forward") == "kv"


def test_auto_moves_few_queries_to_many_keys_in_forward() -> None:
    made = plan(16, 4, heads=8, head_dim=64, key_tokens=1024)
    assert made.direction("forward") == made.direction("backward") == "query"
    assert plan(1024, 4, heads=8, head_dim=64, key_tokens=16).direction("forward") == "kv"


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Random shapes of up to 48 query and key tokens."""
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return {
        "tokens": draw(st.integers(0, 48)),
        "ring_size": draw(st.integers(1, 6)),
        "key_tokens": draw(st.none() | st.integers(0, 48)),
        "heads": kv_heads * draw(st.sampled_from([1, 2, 4])),
        "kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([1, 3, 8, 40])),
        "value_dim": draw(st.sampled_from([None, 1, 5, 64])),
        "batch": draw(st.sampled_from([1, 2])),
        "dtype": draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])),
        "wire_dtype": draw(st.sampled_from([None, torch.bfloat16, torch.float32])),
        "layout": draw(st.sampled_from(["contiguous", "zigzag", "striped"])),
        "key_layout": draw(st.sampled_from([None, "contiguous", "zigzag", "striped"])),
        "coalesce": draw(st.sampled_from(COALESCE)),
    }


@settings(deadline=None, derandomize=True, max_examples=120)
@given(calls(), st.sampled_from(MASKS), st.sampled_from(["qkv", "q", "k", "kv", "v"]))
def test_auto_never_moves_more_than_either_forced_side(
    call: dict[str, Any], case: tuple[Mask, np.ndarray], requires_grad: str
) -> None:
    call |= {"mask": case[0], "requires_grad": requires_grad}
    chosen = plan(**call)
    kv, queries = forced("kv", **call), forced("query", **call)
    for phase in PHASES:
        costs = {"kv": sum(sent(kv, phase)), "query": sum(sent(queries, phase))}
        assert sum(sent(chosen, phase)) == min(costs.values())
        assert costs[chosen.direction(phase)] == min(costs.values())
        assert (kv.direction(phase), queries.direction(phase)) == ("kv", "query")


@pytest.mark.parametrize("forward", DIRECTIONS)
@pytest.mark.parametrize("backward", DIRECTIONS)
def test_the_two_phases_are_forced_apart(forward: str, backward: str) -> None:
    made = plan(16, 2, heads=1, head_dim=8, direction=backward, forward_direction=forward)
    assert (made.direction("forward"), made.direction("backward")) == (forward, backward)


# Bytes counted by hand.

PADDED = {
    "tokens": 8,
    "ring_size": 2,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 4,
    "value_dim": 6,
    "dtype": torch.bfloat16,
}
"""4 rows each way. k 8 -> 16 bytes, v 12 -> 16; q 16, dout 24 -> 32, lse and delta 8 -> 16 each; dk 16, dv 24 -> 32,
dq 32; acc 48, peak and total 8 -> 16 each."""


@pytest.mark.parametrize(
    ("direction", "wire_dtype", "forward", "backward"),
    [
        ("kv", None, 4 * (16 + 16), 4 * (16 + 16 + 16 + 32)),
        ("query", None, 4 * (16 + 48 + 16 + 16), 4 * (16 + 32 + 16 + 16 + 32)),
        ("kv", torch.bfloat16, 4 * (16 + 16), 4 * (16 + 16 + 16 + 16)),
        ("query", torch.bfloat16, 4 * (16 + 32 + 16 + 16), 4 * (16 + 32 + 16 + 16 + 16)),
    ],
    ids=["kv", "query", "kv-narrow-wire", "query-narrow-wire"],
)
def test_every_field_of_a_row_is_padded_to_16_bytes(
    direction: str, wire_dtype: torch.dtype | None, forward: int, backward: int
) -> None:
    made = forced(direction, **PADDED, wire_dtype=wire_dtype)
    assert sent(made, "forward") == [forward, forward]
    assert sent(made, "backward") == [backward, backward]


@pytest.mark.parametrize(
    ("direction", "forward", "backward"),
    [("kv", 9 * (32 + 32), 9 * (32 + 32 + 32 + 32)), ("query", 5 * (32 + 32 + 16 + 16), 5 * (32 + 32 + 16 + 16 + 32))],
    ids=DIRECTIONS,
)
def test_bytes_of_an_uneven_causal_ring(direction: str, forward: int, backward: int) -> None:
    """Shards of 3, 3 and 1 tokens. Keys: 3 rows of rank 0 hop twice, 3 of rank 1 once; queries: 3 once, 1 twice.

    Two rows of the batch, one head, D = E = 4 in fp32: 32 bytes for each of k, v, q, dout and their like; row
    statistics are 8 bytes, padded to 16.
    """
    made = forced(direction, 7, 3, heads=1, head_dim=4, batch=2, dtype=torch.float32, mask=causal())
    assert sum(sent(made, "forward")) == forward
    assert sum(sent(made, "backward")) == backward
    auto = plan(7, 3, heads=1, head_dim=4, batch=2, dtype=torch.float32, mask=causal())
    assert auto.direction("forward") == auto.direction("backward") == "query"


@pytest.mark.parametrize(
    ("direction", "forward", "backward"),
    [
        ("kv", [2 * 128, 4 * 128], [2 * 128 + 4 * 128, 4 * 128 + 2 * 128]),
        ("query", [2 * 48 + 4 * 112, 4 * 48 + 2 * 112], [2 * 160 + 4 * 48, 4 * 160 + 2 * 48]),
    ],
    ids=DIRECTIONS,
)
def test_bytes_of_a_zigzag_causal_pair_in_fp64(direction: str, forward: list[int], backward: list[int]) -> None:
    """Rank 0 holds 0, 1, 6, 7 and rank 1 holds 2 to 5: 2 rows of rank 0 and 4 of rank 1 are wanted on either side.

    Two heads, D = 3, E = 5, everything in fp64: k, q, dq, dk are 48 bytes; v, dout, acc, dv 80; statistics 16.
    """
    made = forced(
        direction, 8, 2, heads=2, head_dim=3, value_dim=5, dtype=torch.float64, mask=causal(), layout="zigzag"
    )
    assert sent(made, "forward") == forward
    assert sent(made, "backward") == backward


@pytest.mark.parametrize("coalesce", COALESCE)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("ring_size", [2, 4, 8])
def test_causal_zigzag_needs_three_quarters_of_the_full_bytes(ring_size: int, direction: str, coalesce: int) -> None:
    """On one side of the diagonal a rank needs half of a block, on the other all of it, and gets no row more."""
    options = {"heads": 4, "head_dim": 64, "layout": "zigzag", "coalesce": coalesce}
    whole = forced(direction, 64 * ring_size, ring_size, **options)
    lower = forced(direction, 64 * ring_size, ring_size, mask=causal(), **options)
    for phase in PHASES:
        assert sum(sent(lower, phase)) == 0.75 * sum(sent(whole, phase))
    assert direction == "query" or sum(sent(whole, "forward")) == ring_size * (ring_size - 1) * 64 * 2 * 4 * 64 * 2


def padded(size: int) -> int:
    return (size + 15) // 16 * 16


def row_bytes(call: dict[str, Any], requires_grad: str) -> dict[tuple[str, str, str], int]:
    """Bytes of a row by phase, direction and channel, from the list of what travels."""
    batch, heads, kv_heads, dim = call["batch"], call["heads"], call["kv_heads"], call["head_dim"]
    value_dim = call["value_dim"] or dim
    size = call["dtype"].itemsize
    exact = 8 if call["dtype"] == torch.float64 else 4
    wire = call["wire_dtype"].itemsize if call["wire_dtype"] else exact
    k, v = batch * kv_heads * dim, batch * kv_heads * value_dim
    q, dout, statistic = batch * heads * dim, batch * heads * value_dim, padded(batch * heads * exact)
    keys = padded(k * size) + padded(v * size)
    return {
        ("forward", "kv", "operand"): keys,
        ("forward", "kv", "result"): 0,
        ("forward", "query", "operand"): padded(q * size),
        ("forward", "query", "result"): padded(dout * wire) + 2 * statistic,
        ("backward", "kv", "operand"): keys,
        ("backward", "kv", "result"): padded(k * wire) * ("k" in requires_grad)
        + padded(v * wire) * ("v" in requires_grad),
        ("backward", "query", "operand"): padded(q * size) + padded(dout * size) + 2 * statistic,
        ("backward", "query", "result"): padded(q * wire) * ("q" in requires_grad),
    }


@settings(deadline=None, derandomize=True, max_examples=120)
@given(calls(), st.sampled_from(MASKS), st.sampled_from(["qkv", "q", "k", "kv", "v"]), st.sampled_from(DIRECTIONS))
def test_bytes_are_rows_times_padded_fields(
    call: dict[str, Any], case: tuple[Mask, np.ndarray], requires_grad: str, direction: str
) -> None:
    made = forced(direction, **call, mask=case[0], requires_grad=requires_grad)
    per_row = row_bytes(call, requires_grad)
    for phase in PHASES:
        for rank, rounds in enumerate(made.phase(phase).rounds):
            expected = 0
            for transfer in (t for step in rounds for t in step.sends):
                rows = sum(last - first for first, last in transfer.rows)
                expected += rows * per_row[phase, direction, transfer.channel]
            assert made.bytes_sent(rank, phase) == expected


@settings(deadline=None, derandomize=True, max_examples=120)
@given(calls(), st.sampled_from(MASKS), st.sampled_from(["qkv", "q", "k", "kv", "v"]), st.sampled_from(DIRECTIONS))
def test_bytes_are_those_of_rows_with_allowed_pairs(
    call: dict[str, Any], case: tuple[Mask, np.ndarray], requires_grad: str, direction: str
) -> None:
    """From the mask's table alone: each rank gets, and gives back, the rows of every other that its own rows meet."""
    call["batch"] = WIDE
    made = forced(direction, **call, mask=case[0], requires_grad=requires_grad)
    rows = 0
    for q_rank, k_rank in itertools.permutations(range(call["ring_size"]), 2):
        meets = case[1][np.ix_(made.layout.positions(q_rank), made.key_layout.positions(k_rank))]
        rows += int(meets.any(0 if direction == "kv" else 1).sum())
    per_row = row_bytes(call, requires_grad)
    for phase in PHASES:
        expected = rows * (per_row[phase, direction, "operand"] + per_row[phase, direction, "result"])
        assert sum(sent(made, phase)) == expected


@pytest.mark.parametrize("coalesce", COALESCE)
def test_full_attention_sends_every_block_once_round_the_ring(coalesce: int) -> None:
    """Each rank sends W - 1 blocks of 16 rows; in backward as many results."""
    for ring_size in (1, 2, 3, 5):
        made = forced("kv", 16 * ring_size, ring_size, heads=1, head_dim=16, dtype=torch.float32, coalesce=coalesce)
        assert sent(made, "forward") == [(ring_size - 1) * 16 * 128] * ring_size
        assert sent(made, "backward") == [(ring_size - 1) * 16 * 256] * ring_size


# Gradients that nobody wants.


@pytest.mark.parametrize("mask", [mask for mask, _ in MASKS], ids=str)
def test_only_keys_and_values_move_when_only_queries_want_gradients(mask: Mask) -> None:
    made = forced("kv", 48, 4, heads=2, head_dim=16, mask=mask, requires_grad="q")
    assert sent(made, "backward") == sent(made, "forward")
    assert made.phase("backward").results.names == ()


def test_no_gradients_means_no_backward() -> None:
    made = plan(48, 4, heads=2, head_dim=16, requires_grad="")
    assert made.backward is None
    assert made.direction("forward") == "kv" and min(sent(made, "forward")) > 0
    for question in (
        lambda: made.bytes_sent(0, "backward"),
        lambda: made.flops(0, "backward"),
        lambda: made.direction("backward"),
    ):
        with pytest.raises(ValueError, match="no backward"):
            question()
    assert made.imbalance == 0


@pytest.mark.parametrize(
    ("requires_grad", "direction", "results"),
    [
        ("qkv", "kv", ("dk", "dv")),
        ("vk", "kv", ("dk", "dv")),
        ("v", "kv", ("dv",)),
        ("kq", "kv", ("dk",)),
        ("q", "kv", ()),
        ("qkv", "query", ("dq",)),
        ("kv", "query", ()),
    ],
)
def test_only_wanted_gradients_travel(requires_grad: str, direction: str, results: tuple[str, ...]) -> None:
    made = forced(direction, 16, 2, heads=2, head_dim=16, requires_grad=requires_grad)
    assert made.phase("backward").results.names == results
    channels = {t.channel for rounds in made.phase("backward").rounds for step in rounds for t in step.sends}
    assert channels == ({"operand", "result"} if results else {"operand"})


# Operations and balance.


@settings(deadline=None, derandomize=True, max_examples=120)
@given(calls(), st.sampled_from(MASKS), st.sampled_from(["auto", *DIRECTIONS]))
def test_operations_count_the_allowed_pairs(
    call: dict[str, Any], case: tuple[Mask, np.ndarray], direction: str
) -> None:
    mask, allowed = case
    made = forced(direction, **call, mask=mask)
    keys = call["tokens"] if call["key_tokens"] is None else call["key_tokens"]
    pairs = int(allowed[: call["tokens"], :keys].sum())
    dim, value_dim = call["head_dim"], call["value_dim"] or call["head_dim"]
    size = call["heads"] * call["batch"]
    totals = [sum(made.flops(rank, phase) for rank in range(call["ring_size"])) for phase in PHASES]
    assert totals == [pairs * (2 * dim + 2 * value_dim) * size, pairs * (6 * dim + 4 * value_dim) * size]


def test_operations_of_one_rank_are_those_of_its_own_pairs() -> None:
    """Causal over 4 + 4 tokens: rank 0 has 10 pairs and rank 1 has 26 by queries; by keys it is the other way."""
    per_pair = {"forward": (2 * 8 + 2 * 8) * 2, "backward": (6 * 8 + 4 * 8) * 2}
    for direction, pairs in (("kv", [10, 26]), ("query", [26, 10])):
        made = forced(direction, 8, 2, heads=2, head_dim=8, mask=causal())
        for phase in PHASES:
            assert [made.flops(rank, phase) for rank in range(2)] == [count * per_pair[phase] for count in pairs]
        assert made.imbalance == pytest.approx(26 / 18 - 1)


@pytest.mark.parametrize(
    ("requires_grad", "per_pair"),
    [("qkv", 6 * 8 + 4 * 16), ("q", 4 * 8 + 2 * 16), ("kv", 4 * 8 + 4 * 16), ("v", 2 * 8 + 4 * 16)],
)
def test_operations_of_unwanted_gradients_are_not_counted(requires_grad: str, per_pair: int) -> None:
    made = plan(16, 2, heads=1, head_dim=8, value_dim=16, requires_grad=requires_grad)
    assert made.flops(0, "backward") == 16 * 8 * per_pair


def test_imbalance_is_that_of_the_worse_phase() -> None:
    """Keys of rank 0 alone are seen by all: even by queries, all on one rank by keys."""
    made = plan(16, 2, heads=1, head_dim=8, mask=prefix(8), forward_direction="kv", direction="query")
    assert made.forward.imbalance == 0
    assert made.imbalance == made.phase("backward").imbalance == 1
    assert plan(16, 2, heads=1, head_dim=8, mask=prefix(0)).imbalance == 0


# Questions that have no answer.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 6, "kv_heads": 4}, "multiple"),
        ({"heads": 0}, "heads must be a whole number of at least 1"),
        ({"head_dim": 0}, "head_dim must be a whole number of at least 1"),
        ({"value_dim": 0}, "value_dim must be a whole number of at least 1"),
        ({"batch": 0}, "batch must be a whole number of at least 1"),
        ({"kv_heads": 0}, "kv_heads must be a whole number of at least 1"),
        ({"dtype": torch.int32}, "dtype"),
        ({"wire_dtype": torch.int8}, "wire_dtype"),
        ({"direction": "keys"}, "direction"),
        ({"forward_direction": "both"}, "forward_direction"),
        ({"requires_grad": "qx"}, "requires_grad"),
        ({"requires_grad": True}, "requires_grad"),
        ({"coalesce": 0}, "coalesce"),
        ({"coalesce": 9}, "coalesce"),
        ({"mask": "causal"}, "mask"),
        ({"layout": "diagonal"}, "layout"),
        ({"layout": "balanced"}, "Layout.balanced"),
        ({"layout": Layout.zigzag(16, 4)}, "ring of 4"),
        ({"layout": Layout.zigzag(12, 2)}, "tokens 16"),
        ({"layout": Layout.zigzag(16, 2), "key_tokens": 32}, "key_layout"),
        ({"key_layout": Layout.zigzag(16, 2), "key_tokens": 32}, "key_tokens 32"),
        ({"tokens": -1}, "tokens"),
        ({"ring_size": 0}, "ring_size"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_bad_calls_are_refused_with_a_message_that_says_which(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**{"tokens": 16, "ring_size": 2, "heads": 2, "head_dim": 8, **options})


def test_unknown_phases_are_refused() -> None:
    made = plan(16, 2, heads=1, head_dim=8)
    for question in (made.direction, lambda phase: made.bytes_sent(0, phase), lambda phase: made.flops(0, phase)):
        with pytest.raises(ValueError, match="sideways"):
            question("sideways")
