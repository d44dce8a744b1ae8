"""The simulator that proves plans refuses those that cannot run, with every mutation tried wherever it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from burst_attention import blocks, causal, plan
from burst_attention.schedule import PhasePlan, PlanError, Round, Transfer, simulate
from tests.unit.plan_steps import phases, sent, steps

FULL_KV = plan(12, 4, heads=1, head_dim=8, direction="kv", forward_direction="kv")
FULL_QUERY = plan(12, 4, heads=1, head_dim=8, direction="query", forward_direction="query")
CAUSAL_KV = plan(16, 4, heads=1, head_dim=8, mask=causal(), layout="zigzag", direction="kv", forward_direction="kv")
SUBJECTS = {
    "forward-kv": phases(FULL_KV)[0],
    "forward-query": phases(FULL_QUERY)[0],
    "backward-kv": phases(FULL_KV)[1],
    "backward-query": phases(FULL_QUERY)[1],
    "backward-kv-causal-zigzag": phases(CAUSAL_KV)[1],
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


def edited(phase: PhasePlan, edit: Callable[[int, Round], Round]) -> PhasePlan:
    """The plan with every round of every rank passed through `edit`."""
    rounds = tuple(tuple(edit(rank, step) for step in rounds) for rank, rounds in enumerate(phase.rounds))
    return replace(phase, rounds=rounds)


def changed(phase: PhasePlan, step: Round, **fields: object) -> PhasePlan:
    """The plan with some fields of one round replaced."""
    return edited(phase, lambda _, at: replace(at, **fields) if at is step else at)  # type: ignore[arg-type]


def exchanged(phase: PhasePlan, old: Transfer, *new: Transfer, ends: str = "both") -> PhasePlan:
    """The plan with none, one or several transfers in one's place: at its sender, its receiver or both."""

    def edit(_: int, step: Round) -> Round:
        sends = [new if ends != "receiver" and t is old else (t,) for t in step.sends]
        receives = [new if ends != "sender" and t is old else (t,) for t in step.receives]
        return replace(step, sends=sum(sends, ()), receives=sum(receives, ()))

    return edited(phase, edit)


def placed(phase: PhasePlan, transfer: Transfer) -> PhasePlan:
    """The plan with one more transfer, listed where it says it belongs."""

    def edit(rank: int, step: Round) -> Round:
        sends = step.sends + (transfer,) * ((rank, step.index) == (transfer.source, transfer.round))
        receives = step.receives + (transfer,) * ((rank, step.index) == (transfer.target, transfer.round))
        return replace(step, sends=sends, receives=receives)

    return edited(phase, edit)


def both(phase: PhasePlan) -> list[Transfer]:
    return [*sent(phase, "operand"), *sent(phase, "result")]


def fewer(transfer: Transfer) -> Transfer:
    return replace(transfer, rows=((0, transfer.row_count - 1),))


def other_rank(*ranks: int) -> int:
    return next(rank for rank in range(4) if rank not in ranks)


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
        yield exchanged(exchanged(phase, t, t, fewer(t), ends="sender"), t, fewer(t), t, ends="receiver")


@refused(r"into one slot|no such result")
def transfer_made_twice(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, t, t) for t in both(phase))


@refused(r"into one slot|its rows are|no such result")
def transfer_in_two_parts(phase: PhasePlan) -> Iterator[PhasePlan]:
    """Listed in the same order at both ends, so that order is not what is refused."""
    for t in both(phase):
        last = replace(t, rows=((t.row_count - 1, t.row_count),))
        yield exchanged(phase, t, fewer(t), last)


@refused(r"lacks block|not held")
def operand_that_never_travels(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t) for t in sent(phase, "operand"))


@refused(r"receives its own block")
def operand_sent_back_home(phase: PhasePlan) -> Iterator[PhasePlan]:
    """In round 3, when the last visitors compute and nothing else is sent out."""
    for rank, step in steps(phase):
        if step.index == 3:
            yield placed(phase, Transfer("operand", step.block, step.held, rank, step.block, "ring", 3))


@refused(r"still waiting to be sent")
def result_overwritten_by_the_next(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t) for t in sent(phase, "result") if t.round < 4)


@refused(r"never sent")
def result_kept_at_the_end(phase: PhasePlan) -> Iterator[PhasePlan]:
    """Ranks are looked at in order, so the keeper is found before the home that waits for it."""
    return (exchanged(phase, t) for t in sent(phase, "result") if t.round == 4 and t.source < t.block)


@refused(r"did not get every contribution exactly once")
def result_missing_at_home(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t) for t in sent(phase, "result") if t.round == 4 and t.block < t.source)


@refused(r"sender holds only")
def rows_that_home_does_not_have(phase: PhasePlan) -> Iterator[PhasePlan]:
    for t in sent(phase, "operand"):
        yield exchanged(phase, t, replace(t, rows=((0, phase.local_rows[t.block] + 1),)))


@refused(r"sender holds only")
def rows_that_a_visitor_was_not_sent(phase: PhasePlan) -> Iterator[PhasePlan]:
    """A hop gets one row and computes nothing, so that only handing its rows on is at fault."""
    for t in sent(phase, "operand"):
        step = phase.rounds[t.target][t.round + 1]
        if any(onward.channel == "operand" and onward.block == t.block for onward in step.sends):
            idle = changed(phase, step, pieces=(), held=((0, 1),))
            yield exchanged(idle, t, replace(t, rows=((0, 1),)))


@refused(r"lacks rows|sender holds only")
def rows_that_a_piece_needs_left_behind(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, fewer(t)) for t in sent(phase, "operand"))


@refused(r"its rows are")
def result_rows_left_behind(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, fewer(t)) for t in sent(phase, "result"))


@refused(r"no such result")
def result_of_another_block(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, replace(t, block=(t.block + 1) % 4)) for t in sent(phase, "result"))


@refused(r"nothing to add it to")
def result_handed_to_a_stranger(phase: PhasePlan) -> Iterator[PhasePlan]:
    for t in sent(phase, "result"):
        yield placed(exchanged(phase, t), replace(t, target=other_rank(t.source, t.target, t.block)))


@refused(r"is listed in round")
def another_round_named(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, replace(t, round=t.round + 1)) for t in both(phase))


@refused(r"lacks block|not held|still waiting|no such result|its rows are|into one")
def round_late(phase: PhasePlan) -> Iterator[PhasePlan]:
    last = len(phase.rounds[0]) - 1
    return (placed(exchanged(phase, t), replace(t, round=t.round + 1)) for t in both(phase) if t.round < last)


@refused(r"lacks block|not held|no such result|into one")
def round_early(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (placed(exchanged(phase, t), replace(t, round=t.round - 1)) for t in both(phase) if t.round > 0)


@refused(r"is listed in round|sends and receives differ")
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


@refused(r"lacks block")
def pieces_of_a_block_that_is_elsewhere(phase: PhasePlan) -> Iterator[PhasePlan]:
    for rank, step in steps(phase):
        if rank != step.block:
            yield changed(phase, step, block=other_rank(rank, step.block))


@refused(r"lacks rows")
def pieces_outside_the_rows_at_hand(phase: PhasePlan) -> Iterator[PhasePlan]:
    side = "k_first" if phase.direction == "kv" else "q_first"
    for _, step in steps(phase):
        if step.pieces:
            yield changed(phase, step, pieces=tuple(p._replace(**{side: getattr(p, side) + 99}) for p in step.pieces))


@refused(r"held rows are")
def wrong_list_of_held_rows(phase: PhasePlan) -> Iterator[PhasePlan]:
    for rank, step in steps(phase):
        if rank != step.block:
            yield changed(phase, step, held=((0, 99),))


@pytest.mark.parametrize("subject", SUBJECTS)
def test_simulator_passes_the_plans_before_they_are_broken(subject: str) -> None:
    phase = SUBJECTS[subject]
    simulate(phase)
    assert edited(phase, lambda _, step: step) == phase
    assert len(sent(phase, "operand")) == 12
    assert len(sent(phase, "result")) == 12 * bool(phase.results.fields)


@pytest.mark.parametrize(
    ("name", "subject"),
    [(n, s) for n in MUTATIONS for s in SUBJECTS if SUBJECTS[s].results.fields or not n.startswith("result")],
)
def test_simulator_refuses(name: str, subject: str) -> None:
    mutation, message = MUTATIONS[name]
    phase = SUBJECTS[subject]
    broken = list(mutation(phase))
    assert broken
    for plan_of_one in broken:
        assert plan_of_one != phase
        with pytest.raises(PlanError, match=message):
            simulate(plan_of_one)


def test_simulator_refuses_two_results_into_one_buffer() -> None:
    """Keys of rank 0 visit ranks 1 and 2; idle rank 1 keeps its result and brings it home together with rank 2's."""
    mask = blocks([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]], 4)
    phase = phases(plan(16, 4, heads=1, head_dim=8, mask=mask, direction="kv"))[1]
    simulate(phase)
    first, last = sorted(sent(phase, "result"), key=lambda t: t.round)
    assert first.target == last.source and last.target == 0
    with pytest.raises(PlanError, match="into one buffer"):
        simulate(placed(exchanged(phase, first), replace(first, target=0, round=last.round)))
    simulate(placed(exchanged(phase, first), replace(first, target=0)))  # Each on its own way home is a plan too.


def test_simulator_refuses_an_operand_that_would_have_to_wait() -> None:
    """Keys of rank 0 visit ranks 1 and 3; sent to rank 3 a round early, they are gone when it computes with them."""
    mask = blocks([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]], 4)
    phase = plan(16, 4, heads=1, head_dim=8, mask=mask, forward_direction="kv").forward
    simulate(phase)
    last = max(sent(phase, "operand"), key=lambda t: t.round)
    with pytest.raises(PlanError, match="lacks block 0"):
        simulate(placed(exchanged(phase, last), replace(last, round=last.round - 1)))


@pytest.mark.parametrize("subject", SUBJECTS)
def test_simulator_compares_transfers_by_value(subject: str) -> None:
    """An equal plan passes even where the two ends of a transfer are not one object."""

    def copied(_: int, step: Round) -> Round:
        sends, receives = (tuple(replace(t) for t in ends) for ends in (step.sends, step.receives))
        return replace(step, sends=sends, receives=receives)

    again = edited(SUBJECTS[subject], copied)
    assert again == SUBJECTS[subject]
    simulate(again)
