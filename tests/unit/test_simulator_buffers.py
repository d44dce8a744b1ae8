"""The simulator refuses plans whose rows do not lie in buffers as the engine reads and writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from burst_attention import blocks, plan
from burst_attention.geometry import full_piece
from burst_attention.schedule import PhasePlan, PlanError, Transfer, simulate
from tests.unit.plan_changes import both, changed, exchanged, placed, revisited
from tests.unit.plan_steps import WIDE, away, phases, sent, steps, visits

FULL = plan(12, 3, heads=2, head_dim=8, direction="kv", forward_direction="kv")
COALESCED = plan(12, 3, heads=2, head_dim=8, direction="kv", forward_direction="kv", coalesce=2)

# Of four parts of rank 0's keys rank 1 wants all but the third, and rank 2 all but the second.
wanted = np.eye(12, dtype=bool)
wanted[4:8, [0, 1, 3]] = wanted[8:12, [0, 2, 3]] = True
GAPPED = plan(24, 3, heads=1, head_dim=8, batch=WIDE, mask=blocks(wanted, 2), direction="kv", forward_direction="kv")

SUBJECTS = {
    "forward": FULL.forward,
    "backward": phases(FULL)[1],
    "forward-coalesced": COALESCED.forward,
    "backward-coalesced": phases(COALESCED)[1],
}

Broken = Callable[[PhasePlan], Iterator[PhasePlan]]
BROKEN: list[Broken] = []


def broken(make: Broken) -> Broken:
    BROKEN.append(make)
    return make


@broken
def operand_that_nobody_computes_with(phase: PhasePlan) -> Iterator[PhasePlan]:
    """It has no place in the buffer of the next round, or there is no next round."""
    for rank, step in steps(phase):
        after = phase.rounds[rank][step.index + 1 : step.index + 2]
        used = {visit.block for following in after for visit in following.visits}
        for block in {0, 1, 2} - used - {rank}:
            yield placed(phase, Transfer("operand", block, ((0, 4),), block, rank, "between", step.index, step.index))


@broken
def visit_with_rows_that_no_piece_needs(phase: PhasePlan) -> Iterator[PhasePlan]:
    """Only where no results travel: a row without a result would be missed on its way back."""
    for _, _, wasted in () if phase.results.fields else away(phase):
        broken = phase
        for _, step, visit in away(phase):
            if visit.block == wasted.block:
                first_key = tuple(full_piece(p.q_first, p.q_count, p.k_first, 1) for p in visit.pieces)
                broken = revisited(broken, step, visit, replace(visit, pieces=first_key))
        yield broken


@broken
def rows_listed_twice(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, replace(t, rows=t.rows * 2)) for t in both(phase))


@broken
def rows_in_another_order(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, replace(t, rows=((2, 4), (0, 2)))) for t in both(phase))


@broken
def transfer_of_no_rows(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, t, replace(t, rows=())) for t in sent(phase, "operand"))


@broken
def home_in_the_buffer_of_visitors(phase: PhasePlan) -> Iterator[PhasePlan]:
    for rank, step, visit in visits(phase):
        if rank == visit.block:
            yield revisited(phase, step, visit, replace(visit, rows=((0, 4),)))


@broken
def some_heads_of_home_twice_or_never(phase: PhasePlan) -> Iterator[PhasePlan]:
    for rank, step, visit in visits(phase):
        if rank == visit.block:
            for heads in ((0, 0), (0, 1), (0, 2), (1, 2), None):
                if heads != visit.heads and (heads or (0, 2)) != (visit.heads or (0, 2)):
                    yield revisited(phase, step, visit, replace(visit, heads=heads))


@broken
def some_heads_of_a_visitor(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (revisited(phase, step, visit, replace(visit, heads=(0, 1))) for _, step, visit in away(phase))


@broken
def home_together_with_visitors(phase: PhasePlan) -> Iterator[PhasePlan]:
    for rank, step, visit in away(phase):
        home = phase.rounds[rank][0].visits[0]
        yield revisited(phase, step, visit, visit, home)


@broken
def block_that_visits_twice_in_a_round(phase: PhasePlan) -> Iterator[PhasePlan]:
    for _, step, visit in away(phase):
        yield revisited(phase, step, visit, visit, visit)


@broken
def round_with_the_index_of_another(phase: PhasePlan) -> Iterator[PhasePlan]:
    """The index says which buffer is read, also where nothing is sent or received."""
    return (changed(phase, step, index=step.index - 1) for _, step in steps(phase) if step.index)


@broken
def piece_outside_of_the_rows_that_visit(phase: PhasePlan) -> Iterator[PhasePlan]:
    for _, step, visit in away(phase):
        for shift in (1, 99):
            moved = tuple(piece._replace(k_first=piece.k_first + shift) for piece in visit.pieces)
            yield revisited(phase, step, visit, replace(visit, pieces=moved))


def passes(phase: PhasePlan) -> bool:
    try:
        simulate(phase)
    except PlanError:
        return False
    return True


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__.replace("_", "-"))
def test_simulator_refuses(make: Broken) -> None:
    assert all(passes(phase) for phase in SUBJECTS.values())
    made = [(name, plan_of_one) for name, phase in SUBJECTS.items() for plan_of_one in make(phase)]
    assert made and all(plan_of_one != SUBJECTS[name] for name, plan_of_one in made)
    assert [name for name, plan_of_one in made if passes(plan_of_one)] == []


@pytest.mark.parametrize("channel", ["operand", "result"])
def test_simulator_refuses_a_transfer_of_rows_that_do_not_lie_together(channel: str) -> None:
    """Ranks 1 and 2 share the first and the last part, each with another between them: they must go one by one."""
    phase = phases(GAPPED)[1]
    simulate(phase)
    first, last = sorted((t for t in sent(phase, channel) if (t.source, t.target) == (1, 2)), key=lambda t: t.rows)
    assert (first.rows, last.rows) == (((0, 2),), ((6, 8),))
    with pytest.raises(PlanError):
        simulate(exchanged(exchanged(phase, last), first, replace(first, rows=(*first.rows, *last.rows))))
