"""Ways to change a plan that is data: rounds, visits and transfers replaced, added or left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from burst_attention.geometry import Rows
from burst_attention.schedule import PhasePlan, Round, Transfer, Visit
from tests.unit.oracle import row_list
from tests.unit.plan_steps import sent


def edited(phase: PhasePlan, edit: Callable[[int, Round], Round]) -> PhasePlan:
    """The plan with every round of every rank passed through `edit`."""
    rounds = tuple(tuple(edit(rank, step) for step in rounds) for rank, rounds in enumerate(phase.rounds))
    return replace(phase, rounds=rounds)


def changed(phase: PhasePlan, step: Round, **fields: object) -> PhasePlan:
    """The plan with some fields of one round replaced."""
    return edited(phase, lambda _, at: replace(at, **fields) if at is step else at)  # type: ignore[arg-type]


def revisited(phase: PhasePlan, step: Round, old: Visit, *new: Visit) -> PhasePlan:
    """The plan with none, one or several visits in one's place, packed again."""
    listed = sum((new if visit is old else (visit,) for visit in step.visits), ())
    return changed(phase, step, visits=listed)


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


def part(transfer: Transfer, first: int | None, last: int | None) -> Transfer:
    """Some of a transfer's rows, by their places in it."""
    return replace(transfer, rows=as_rows(row_list(transfer.rows)[first:last]))


def as_rows(rows: list[int]) -> Rows:
    """Consecutive rows as one range; the rows of every transfer of these plans are consecutive."""
    assert rows == list(range(rows[0], rows[-1] + 1))
    return ((rows[0], rows[-1] + 1),)


def fewer(transfer: Transfer) -> Transfer:
    return part(transfer, None, -1)


def later(transfer: Transfer, rounds: int) -> Transfer:
    """The transfer some rounds later, or earlier."""
    return replace(transfer, round=transfer.round + rounds, due=transfer.due + rounds)
