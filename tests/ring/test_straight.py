"""Results that go straight home: the same output and gradients, each part rounded once where the wire is narrow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention import Ring, burst_attention, causal, documents, full, ops, run_ranks, window
from burst_attention.geometry import Piece
from burst_attention.launch import run_processes
from burst_attention.merge import Part
from burst_attention.schedule import PhasePlan, Round
from burst_attention.schedule.plan import MOST_ARRIVALS
from burst_attention.tiles import Accumulator, BackwardInputs, Gradients
from burst_attention.tiles.plain import PlainKernel
from tests.ring.problems import TIMEOUT, Problem, check, local_leaves, oracle, ranks_results
from tests.unit.gpu_kernels_in_torch import sum_parts

MASKS = {"full": full(), "causal": causal(), "window": causal() & window(5), "documents": documents([10, 1, 12])}
SIDES: dict[str, Any] = {"kv": {"direction": "kv"}, "query": {"direction": "query", "forward_direction": "query"}}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("size", "layout", "coalesce"), [(1, "contiguous", 1), (3, "striped", 1), (4, "zigzag", 2), (7, "zigzag", 3)]
)
def test_output_and_gradients(size: int, layout: str, coalesce: int, mask: str, side: str) -> None:
    problem = Problem(tokens=23, size=size, mask=MASKS[mask], layout=layout)
    check(problem, results="straight", coalesce=coalesce, **SIDES[side])


def attend_on(ring: Ring, problem: Problem, options: dict[str, Any]) -> list[Tensor]:
    q, k, v, dout = local_leaves(problem, ring.rank, "qkv")
    out = burst_attention(q, k, v, ring=ring, **problem.options(), **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize("side", SIDES)
def test_processes_and_threads_give_the_same(side: str) -> None:
    problem = Problem(tokens=23, size=3, mask=causal(), layout="zigzag")
    body = partial(attend_on, problem=problem, options={"results": "straight", **SIDES[side]})
    by_processes, by_threads = run_processes(body, 3, timeout=60), run_ranks(body, 3, timeout=TIMEOUT)
    for one, other in zip(by_processes, by_threads, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("side", SIDES)
def test_each_part_is_rounded_once(side: str) -> None:
    """Seven hops round seven times what a chain sums."""
    problem = Problem(tokens=64, size=8, kv_heads=4)
    exact, names = oracle(problem), ("dq",) if side == "query" else ("dk", "dv")
    options = {"wire_dtype": torch.bfloat16, "direction": side}
    straight, chain = (ranks_results(problem, results=way, **options) for way in ("straight", "chain"))
    for name in names:
        errors = [float((found[name] - exact[name]).norm()) for found in (straight, chain)]
        assert errors[0] < 0.8 * errors[1], name


class InParts(PlainKernel):
    """Gives gradients as parts in the dtype of the inputs, as vendors' kernels do: in place, growing, or added."""

    def gives_parts(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        return True

    @staticmethod
    def sum_parts(
        target: Tensor, parts: Sequence[Part], load: bool, out: Tensor | None = None, beside: bool = False
    ) -> None:
        SUMMED.append(len(parts))
        sum_parts(target, parts, load, out, beside)

    def backward(self, pieces: Sequence[Piece], x: BackwardInputs, gradients: Gradients, scale: float) -> None:
        for piece in pieces:
            alone = [Accumulator(torch.zeros(y.shape), untouched=False) for y in (x.q, x.k, x.v)]
            super().backward([piece], x, Gradients(*alone), scale)
            queries = piece.q_first, piece.q_first + piece.q_count
            keys = piece.k_first, piece.k_first + piece.k_count
            for total, found, (first, last) in zip(gradients, alone, (queries, keys, keys), strict=True):
                assert total is not None
                part = found.tensor[:, :, first:last].to(x.q.dtype)
                place = total.place(first, last - first, x.q.dtype)
                if place is not None:
                    PLACED.append(place.shape[2])
                    place.copy_(part)
                else:
                    total.add(first, part)


PLACED: list[int] = []
SUMMED: list[int] = []


@pytest.mark.parametrize("coalesce", [1, 2])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("mask", ["full", "causal", "documents"])
def test_a_kernel_writes_what_is_sent(monkeypatch: pytest.MonkeyPatch, mask: str, side: str, coalesce: int) -> None:
    monkeypatch.setattr(ops, "pick_kernel", lambda name, request: InParts())
    PLACED.clear()
    SUMMED.clear()
    masks = MASKS | {"documents": documents([20, 2, 24])}
    problem = Problem(tokens=46, size=6, mask=masks[mask], layout="zigzag", dtype=torch.bfloat16)
    check(problem, results="straight", wire_dtype=torch.bfloat16, coalesce=coalesce, **SIDES[side])
    assert PLACED, "some parts go where they are sent from"
    if mask == "full":
        # What two of three rounds, or of five, bring home is added up there in one pass; parts of what stays at home in
        # one or two.
        passes, travelling = -(-(3 if coalesce == 2 else 5) // MOST_ARRIVALS), 2 if side == "kv" else 1
        staying = (3 - travelling) * (1 if coalesce == 2 else 2)
        assert len([count for count in SUMMED if count > 1]) <= 6 * (travelling * passes + staying)
    PLACED.clear()
    check(problem, results="chain", wire_dtype=torch.bfloat16, coalesce=coalesce, **SIDES[side])
    assert not PLACED, "what others add to is kept in fp32"
