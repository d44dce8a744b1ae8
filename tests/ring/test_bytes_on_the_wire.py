"""Calls move the bytes that plan predicts, in the dtype that was asked for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from burst_attention import Layout, Mask, Ring, burst_attention, causal, documents, full, prefix, run_ranks, window
from burst_attention.launch import run_processes
from burst_attention.ring.base import RECORD_BYTES
from tests.ring.call_variants import each_direction, each_forward_direction
from tests.ring.problems import TIMEOUT, Problem, check, local_leaves, oracle, ranks_results


@each_direction
@each_forward_direction
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_on_the_wire(wire: torch.dtype, forward_direction: str, direction: str) -> None:
    problem = Problem(tokens=24, size=4, kv_heads=4)
    options: dict[str, Any] = {"direction": direction, "forward_direction": forward_direction}
    found = check(problem, tolerance=2e-2, wire_dtype=wire, **options)
    exact = ranks_results(problem, **options)
    expected = oracle(problem)
    for name in ("out", "dq", "dk", "dv"):
        travels = {"out": forward_direction == "query", "dq": direction == "query"}.get(name, direction == "kv")
        # A gradient that stays at home is made from what the same operands and statistics say.
        if not travels and forward_direction == "kv":
            assert torch.equal(found[name], exact[name])
        if travels:
            assert (found[name] - expected[name]).abs().max() > 10 * (exact[name] - expected[name]).abs().max()


@pytest.mark.parametrize(
    ("wire", "itemsize"), [(None, 4), (torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2), (torch.float64, 8)]
)
@each_direction
@each_forward_direction
def test_bytes_of_results_follow_the_wire_dtype(
    wire: torch.dtype | None, itemsize: int, forward_direction: str, direction: str
) -> None:
    problem = Problem(tokens=24, size=4, kv_heads=2)
    options: dict[str, Any] = {"direction": direction, "forward_direction": forward_direction, "wire_dtype": wire}

    def body(ring: Ring) -> tuple[int, int]:
        q, k, v, dout = local_leaves(problem, ring.rank, "qkv")
        out = burst_attention(q, k, v, ring=ring, **options)
        forward = ring.bytes_sent
        out.backward(dout)
        return forward, ring.bytes_sent - forward

    # Three hops of six tokens: four query heads and two key heads of 16 numbers, statistics in fp32.
    query, keys, statistics = 4 * 16, 2 * 2 * 16, 2 * 4 * 4
    forward = keys * 4 if forward_direction == "kv" else query * 4 + query * itemsize + statistics
    backward = keys * 4 + keys * itemsize if direction == "kv" else 2 * query * 4 + statistics + query * itemsize
    assert run_ranks(body, 4, timeout=TIMEOUT) == [(3 * 6 * forward, 3 * 6 * backward)] * 4


MASKS = {
    "full": full(),
    "causal": causal(),
    "window": causal() & window(7),
    "documents": documents([9, 3, 18, 5]) & causal(),
    "prefix": causal() | prefix(6),
}
CHOICES = (("kv", "kv"), ("query", "query"), ("kv", "query"), ("auto", "auto"))


def counted(ring: Ring, problem: Problem, **options: Any) -> list[int]:
    """Bytes of forward and of backward, of data and of records."""
    q, k, v, dout = local_leaves(problem, ring.rank, "qkv")
    marks = [(ring.bytes_sent, ring.control_bytes)]
    out = burst_attention(q, k, v, ring=ring, **problem.options(), **options)
    marks.append((ring.bytes_sent, ring.control_bytes))
    out.backward(dout)
    marks.append((ring.bytes_sent, ring.control_bytes))
    return [later[kind] - earlier[kind] for kind in (0, 1) for earlier, later in itertools.pairwise(marks)]


def predicted(rank: int, problem: Problem, **options: Any) -> list[int]:
    """What `plan` says of them, and one record to each other rank in either phase."""
    found = problem.predict(**options)
    return [found.bytes_sent(rank, phase) for phase in ("forward", "backward")] + [
        RECORD_BYTES * (problem.size - 1)
    ] * 2


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
@pytest.mark.parametrize(("size", "dtype"), [(3, torch.float32), (4, torch.bfloat16)], ids=["3-fp32", "4-bf16"])
def test_bytes_are_as_predicted(mask: Mask, layout: str, size: int, dtype: torch.dtype) -> None:
    given = Layout.balanced(35, size, mask) if layout == "balanced" else layout
    # Three heads of five numbers leave padding in every row.
    problem = Problem(tokens=35, size=size, heads=6, kv_heads=3, dim=5, dtype=dtype, mask=mask, layout=given)
    options = [{"forward_direction": forward, "direction": backward} for forward, backward in CHOICES]

    def body(ring: Ring) -> list[list[int]]:
        return [counted(ring, problem, **choice) for choice in options]

    found = run_ranks(body, size, timeout=TIMEOUT)
    for rank in range(size):
        assert found[rank] == [predicted(rank, problem, **choice) for choice in options]
    assert sum(data for rank in found for data, *_ in rank) > 0


def test_auto_moves_the_side_with_fewer_bytes() -> None:
    """Few key heads: keys move. Many keys for few queries: queries move."""
    for problem, side in (
        (Problem(heads=8, kv_heads=1, tokens=24), "kv"),
        (Problem(heads=2, kv_heads=2, tokens=6, key_tokens=90), "query"),
    ):
        found = run_ranks(lambda ring, problem=problem: counted(ring, problem), 3, timeout=TIMEOUT)
        both = [
            run_ranks(
                lambda ring, problem=problem, moving=moving: counted(
                    ring, problem, direction=moving, forward_direction=moving
                ),
                3,
                timeout=TIMEOUT,
            )
            for moving in (side, "query" if side == "kv" else "kv")
        ]
        assert found == both[0]
        for phase in (0, 1):
            assert sum(counts[phase] for counts in both[0]) < sum(counts[phase] for counts in both[1])


def test_bytes_between_processes_are_as_predicted() -> None:
    problem = Problem(tokens=35, size=2, heads=6, kv_heads=3, dim=5, mask=causal(), layout="zigzag")
    options = [{"forward_direction": forward, "direction": backward} for forward, backward in CHOICES]

    def body(ring: Ring) -> list[list[int]]:
        return [counted(ring, problem, **choice) for choice in options]

    found = run_processes(body, 2, timeout=50, ring_timeout=TIMEOUT)
    for rank in range(2):
        assert found[rank] == [predicted(rank, problem, **choice) for choice in options]
        assert all(count > 0 for counts in found[rank] for count in counts)


def test_a_call_without_gradients_moves_forward_bytes_only() -> None:
    problem = replace(Problem(), mask=causal(), layout="zigzag")

    def body(ring: Ring) -> int:
        q, k, v, _ = local_leaves(problem, ring.rank, "")
        burst_attention(q, k, v, ring=ring, **problem.options())
        return ring.bytes_sent

    expected = problem.predict(requires_grad="")
    assert expected.backward is None
    assert run_ranks(body, 3, timeout=TIMEOUT) == [expected.bytes_sent(rank, "forward") for rank in range(3)]
