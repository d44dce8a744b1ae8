"""The simulator that proves plans refuses those that cannot run, with every mutation tried wherever it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from burst_attention import Mask, blocks, causal, full, plan, prefix, window
from burst_attention.schedule import PhasePlan, PlanError, Round, Transfer, Visit, simulate
from tests.unit.plan_changes import both, changed, edited, exchanged, fewer, later, part, placed, revisited
from tests.unit.plan_steps import PHASES, away, phases, sent, steps, visits


def subject(phase: str, side: str, mask: Mask | None = None, layout: str = "contiguous", **options: int) -> PhasePlan:
    made = plan(
        16,
        4,
        heads=1,
        head_dim=8,
        mask=mask or full(),
        layout=layout,
        direction=side,
        forward_direction=side,
        **options,
    )
    return phases(made)[PHASES.index(phase)]


SUBJECTS = {
    "forward-kv": subject("forward", "kv"),
    "forward-query": subject("forward", "query"),
    "backward-kv": subject("backward", "kv"),
    "backward-query": subject("backward", "query"),
    "forward-query-coalesced": subject("forward", "query", coalesce=2),
    "backward-kv-coalesced": subject("backward", "kv", coalesce=2),
    "backward-kv-causal-zigzag": subject("backward", "kv", causal(), "zigzag"),
    "backward-query-causal-zigzag-coalesced": subject("backward", "query", causal(), "zigzag", coalesce=2),
}

Mutation = Callable[[PhasePlan], Iterator[PhasePlan]]
MUTATIONS: dict[str, tuple[Mutation, str]] = {}
"""By name: all ways to break a plan in one manner, and what the simulator says about it."""


def refused(message: str) -> Callable[[Mutation], Mutation]:
    """Register a mutation with the message, as a pattern, that each of its plans must be refused with."""

    def register(mutation: Mutation) -> Mutation:
        MUTATIONS[mutation.__name__.replace("_", "-")] = mutation, message
        return mutation

    return register


def other_rank(*ranks: int) -> int:
    return next(rank for rank in range(4) if rank not in ranks)


def onward(phase: PhasePlan, transfer: Transfer) -> bool:
    """Whether the rank that gets these operands hands on some of their block."""
    return any(
        (t.channel, t.block, t.round, t.source) == ("operand", transfer.block, transfer.round + 1, transfer.target)
        for t in sent(phase, "operand")
    )


@refused(r"sends and receives differ")
def dropped_receive(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, ends="receiver") for t in both(phase))


@refused(r"sends and receives differ")
def dropped_send(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, ends="sender") for t in both(phase))


@refused(r"sends and receives differ")
def duplicated_send(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, t, t, ends="sender") for t in both(phase))


@refused(r"sends and receives differ")
def ends_that_disagree_on_rows(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, fewer(t), ends="receiver") for t in both(phase))


@refused(r"sends and receives differ")
def ends_in_another_order(phase: PhasePlan) -> Iterator[PhasePlan]:
    for t in both(phase):
        parts = part(t, None, 1), part(t, 1, None)
        yield exchanged(exchanged(phase, t, *parts, ends="sender"), t, *reversed(parts), ends="receiver")


@refused(r"arrive twice|no such result|not all of its rows are waiting")
def transfer_made_twice(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, t, t) for t in both(phase))


@refused(r"arrive twice|no such result|not all of its rows are waiting")
def transfer_in_two_parts_that_overlap(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (
        exchanged(phase, t, *parts) for t in both(phase) for parts in ((fewer(t), part(t, -2, None)), (t, fewer(t)))
    )


@refused(r"arrive twice")
def rows_from_the_visitor_before_and_from_home(phase: PhasePlan) -> Iterator[PhasePlan]:
    for t in sent(phase, "operand"):
        if t.source != t.block:
            yield placed(phase, replace(part(t, None, 1), source=t.block))


@refused(r"not all of its rows are waiting|no such result")
def result_rows_sent_onward_and_home(phase: PhasePlan) -> Iterator[PhasePlan]:
    for t in sent(phase, "result"):
        if t.target != t.block:
            yield placed(phase, replace(part(t, None, 1), target=t.block))


@refused(r"lacks block|not held|held rows are|sender holds only")
def operand_that_never_travels(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t) for t in sent(phase, "operand"))


@refused(r"receives its own block")
def operand_sent_back_home(phase: PhasePlan) -> Iterator[PhasePlan]:
    for rank, step, visit in away(phase):
        rounds = step.index, step.index
        yield placed(phase, Transfer("operand", visit.block, visit.rows, rank, visit.block, "between", *rounds))


@refused(r"still waiting to be sent")
def result_that_waits(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t) for t in sent(phase, "result"))


@refused(r"still waiting to be sent")
def result_rows_left_behind(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, fewer(t)) for t in sent(phase, "result"))


@refused(r"never sent")
def result_kept_at_the_end(phase: PhasePlan) -> Iterator[PhasePlan]:
    """Without the last round, in which nobody visits, what was computed just before stays where it is."""
    yield replace(phase, rounds=tuple(rounds[:-1] for rounds in phase.rounds))


@refused(r"sender holds only")
def rows_that_home_does_not_have(phase: PhasePlan) -> Iterator[PhasePlan]:
    for t in sent(phase, "operand"):
        yield exchanged(phase, t, replace(t, rows=((0, phase.local_rows[t.block] + 1),)))


@refused(r"pieces touch")
def rows_that_a_visitor_was_not_sent(phase: PhasePlan) -> Iterator[PhasePlan]:
    """A hop gets one row and computes nothing, so that only handing its rows on is at fault."""
    for t in (t for t in sent(phase, "operand") if onward(phase, t)):
        step = phase.rounds[t.target][t.round + 1]
        visit = next(visit for visit in step.visits if visit.block == t.block)
        if visit.rows == t.rows:
            idle = Visit(t.block, part(t, None, 1).rows, ())
            yield exchanged(revisited(phase, step, visit, idle), t, part(t, None, 1))


@refused(r"held rows are|sender holds only")
def rows_that_a_piece_needs_left_behind(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, fewer(t)) for t in sent(phase, "operand"))


@refused(r"no such result|not all of its rows are waiting")
def result_of_another_block(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, replace(t, block=(t.block + 1) % 4)) for t in sent(phase, "result"))


@refused(r"nothing to add it to")
def result_handed_to_a_stranger(phase: PhasePlan) -> Iterator[PhasePlan]:
    for t in sent(phase, "result"):
        # Another rank that computes with the block in this round would be a good way too.
        visited = {rank for rank, step, visit in away(phase) if (step.index, visit.block) == (t.round, t.block)}
        for stranger in {0, 1, 2, 3} - visited - {t.source, t.block}:
            yield placed(exchanged(phase, t), replace(t, target=stranger))


@refused(r"is listed in round")
def another_round_named(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, later(t, 1)) for t in both(phase))


@refused(r"lacks block|not held|still waiting|held rows are|sender holds only")
def round_late(phase: PhasePlan) -> Iterator[PhasePlan]:
    last = len(phase.rounds[0]) - 1
    return (placed(exchanged(phase, t), later(t, 1)) for t in both(phase) if t.round < last)


@refused(r"lacks block|not held|no such result|held rows are|sender holds only|nobody computes with")
def round_early(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (placed(exchanged(phase, t), later(t, -1)) for t in both(phase) if t.round > 0)


@refused(r"has index")
def rounds_in_another_order(phase: PhasePlan) -> Iterator[PhasePlan]:
    for rank, rounds in enumerate(phase.rounds):
        for first in range(len(rounds) - 1):
            swapped = (*rounds[:first], rounds[first + 1], rounds[first], *rounds[first + 2 :])
            yield replace(phase, rounds=(*phase.rounds[:rank], swapped, *phase.rounds[rank + 1 :]))


@refused(r"rank \d lists")
def ranks_that_are_not_the_ends(phase: PhasePlan) -> Iterator[PhasePlan]:
    for t in both(phase):
        yield exchanged(phase, t, replace(t, target=other_rank(t.source, t.target)))
        yield exchanged(phase, t, replace(t, source=other_rank(t.source, t.target)))


@refused(r"goes to its own sender")
def transfer_to_oneself(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, replace(t, target=t.source)) for t in both(phase))


@refused(r"lacks block|nobody computes with")
def pieces_of_a_block_that_is_elsewhere(phase: PhasePlan) -> Iterator[PhasePlan]:
    for rank, step, visit in away(phase):
        elsewhere = other_rank(rank, *(other.block for other in step.visits))
        yield revisited(phase, step, visit, replace(visit, block=elsewhere))


@refused(r"lacks rows")
def pieces_outside_of_home(phase: PhasePlan) -> Iterator[PhasePlan]:
    side = "k_first" if phase.direction == "kv" else "q_first"
    for rank, step, visit in visits(phase):
        if visit.block == rank and visit.pieces:
            moved = tuple(piece._replace(**{side: getattr(piece, side) + 1}) for piece in visit.pieces)
            yield revisited(phase, step, visit, replace(visit, pieces=moved))


@refused(r"pieces touch")
def visit_of_more_rows_than_arrived(phase: PhasePlan) -> Iterator[PhasePlan]:
    for _, step, visit in away(phase):
        ((first, last),) = visit.rows
        yield revisited(phase, step, visit, replace(visit, rows=((first, last + 1),)))
        yield revisited(phase, step, visit, replace(visit, rows=(*visit.rows, (98, 99))))


@refused(r"round \d: (kv|query) moves")
def round_in_which_the_other_side_moves(phase: PhasePlan) -> Iterator[PhasePlan]:
    other = {"kv": "query", "query": "kv"}
    return (changed(phase, step, moving=other[step.moving]) for _, step in steps(phase))


@refused("pieces touch")
def visit_without_its_pieces(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (revisited(phase, step, visit, replace(visit, pieces=())) for _, step, visit in away(phase))


@pytest.mark.parametrize("name", SUBJECTS)
def test_simulator_passes_the_plans_before_they_are_broken(name: str) -> None:
    phase = SUBJECTS[name]
    simulate(phase)
    assert edited(phase, lambda _, step: step) == phase
    for channel in ("operand", "result") if phase.results.fields else ("operand",):
        assert len({(t.block, t.source if channel == "result" else t.target) for t in sent(phase, channel)}) == 12


@pytest.mark.parametrize(
    ("name", "on"),
    [(n, s) for n in MUTATIONS for s in SUBJECTS if SUBJECTS[s].results.fields or not n.startswith("result")],
)
def test_simulator_refuses(name: str, on: str) -> None:
    mutation, message = MUTATIONS[name]
    phase = SUBJECTS[on]
    broken = list(mutation(phase))
    assert broken
    for plan_of_one in broken:
        assert plan_of_one != phase
        with pytest.raises(PlanError, match=message):
            simulate(plan_of_one)


@pytest.mark.parametrize("name", SUBJECTS)
def test_simulator_passes_a_transfer_in_two_parts(name: str) -> None:
    """Several transfers between two ranks are one plan like another, as long as both ends list them alike."""
    phase = SUBJECTS[name]
    for t in both(phase):
        simulate(exchanged(phase, t, part(t, None, 1), part(t, 1, None)))


def test_simulator_refuses_a_result_row_where_nobody_adds_to_it() -> None:
    """Rank 1 has results of rank 0's rows 0, 1, 4 and 5, rank 2 of 0 and 1 only: the others must go home."""
    mask = causal() & (window(3) | prefix(2))
    phase = phases(plan(24, 4, heads=1, head_dim=8, mask=mask, direction="kv"))[1]
    simulate(phase)
    (home,) = (t for t in sent(phase, "result") if t.rows == ((4, 6),) and (t.source, t.target) == (1, 0))
    with pytest.raises(PlanError, match="nothing to add some of its rows to"):
        simulate(placed(exchanged(phase, home), replace(home, target=2)))
    with pytest.raises(PlanError, match=r"not all of its rows are waiting|no such result"):
        simulate(placed(phase, replace(home, target=2)))


def test_simulator_refuses_a_result_that_would_have_to_wait() -> None:
    """Keys of rank 0 visit ranks 1 and 2; idle rank 1 keeps its result and brings it home together with rank 2's."""
    mask = blocks([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]], 4)
    phase = phases(plan(16, 4, heads=1, head_dim=8, mask=mask, direction="kv"))[1]
    simulate(phase)
    first, last = sorted(sent(phase, "result"), key=lambda t: t.round)
    assert first.target == last.source and last.target == 0
    with pytest.raises(PlanError, match="still waiting to be sent"):
        simulate(placed(exchanged(phase, first), replace(first, target=0, round=last.round, due=last.due)))
    simulate(placed(exchanged(phase, first), replace(first, target=0)))  # Each on its own way home is a plan too.


def test_simulator_refuses_an_operand_that_would_have_to_wait() -> None:
    """Keys of rank 0 visit ranks 1 and 3; sent to rank 3 a round early, they are gone when it computes with them."""
    mask = blocks([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]], 4)
    phase = plan(16, 4, heads=1, head_dim=8, mask=mask, forward_direction="kv").forward
    simulate(phase)
    last = max(sent(phase, "operand"), key=lambda t: t.round)
    with pytest.raises(PlanError, match="nobody computes with a block at hand"):
        simulate(placed(exchanged(phase, last), later(last, -1)))


@pytest.mark.parametrize("name", SUBJECTS)
def test_simulator_compares_transfers_by_value(name: str) -> None:
    """An equal plan passes even where the two ends of a transfer are not one object."""

    def copied(_: int, step: Round) -> Round:
        sends, receives = (tuple(replace(t) for t in ends) for ends in (step.sends, step.receives))
        return replace(step, sends=sends, receives=receives)

    again = edited(SUBJECTS[name], copied)
    assert again == SUBJECTS[name]
    simulate(again)
