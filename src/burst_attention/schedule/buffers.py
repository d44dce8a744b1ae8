"""Proof that no buffer of a plan is written while it is still read: who uses which buffer in which rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from burst_attention.schedule.plan import OPERAND, RESULT, PhasePlan


class PlanError(AssertionError):
    """A plan that cannot run, or would compute something else."""


class Use(NamedTuple):
    """A buffer in use from one round to another; `data` tells uses of the same contents from others."""

    slot: int
    first: int
    last: int
    data: tuple[str, int]
    what: str


def require_memory(plan: PhasePlan, rank: int) -> None:
    """Raise PlanError where a rank's plan writes a buffer whose other contents are in use."""
    for uses in (list(operand_uses(plan, rank)), list(result_uses(plan, rank))):
        for index, one in enumerate(uses):
            for other in uses[:index]:
                apart = one.last < other.first or other.last < one.first
                if one.slot == other.slot and one.data != other.data and not apart:
                    raise PlanError(f"rank {rank}: one buffer holds {other.what} and {one.what} at once")


def operand_uses(plan: PhasePlan, rank: int) -> Iterator[Use]:
    """Operand buffers: received into until the round before a visit, then computed with and sent from."""
    for step in plan.rounds[rank]:
        own = [t for t in step.sends if t.channel == OPERAND and t.block == rank]
        passed = [t for t in step.sends if t.channel == OPERAND and t.block != rank]
        if step.row_count:
            last = max((t.due for t in passed), default=step.index)
            what = f"blocks of round {step.index}"
            yield Use(plan.slot_of(step.index), step.index, last, ("visit", step.index), what)
        if own:
            last = max(t.due for t in own)
            what = f"its own block, sent in round {step.index}"
            yield Use(plan.packing_slot(step.index), step.index, last, ("packed", step.index), what)
        for transfer in (t for t in step.receives if t.channel == OPERAND):
            used = transfer.due + 1
            what = f"what arrives from round {step.index} for round {used}"
            yield Use(plan.slot_of(used), step.index, transfer.due, ("visit", used), what)


SENDING, HELD, RECEIVING_LONG, RECEIVING = range(4)
"""The last is the first of one or several."""


def result_uses(plan: PhasePlan, rank: int) -> Iterator[Use]:
    """Result buffers: what was computed in the round before is sent, what arrives waits until it is due.

    Results that a turn ends with have a buffer of their own; the others are sent from one that changes every round.
    """
    for step in plan.rounds[rank]:
        ends_turn = plan.topology.ends_turn(step.index - 1)
        for transfer in (t for t in step.sends if t.channel == RESULT):
            what = f"results of round {step.index - 1} until round {transfer.due}"
            slot = HELD if ends_turn else SENDING
            yield Use(slot, step.index, transfer.due, ("sent", step.index), what)
            if not ends_turn and transfer.spans:
                raise PlanError(f"{transfer}: only what ends a turn may be sent for more than a round")
        for transfer in (t for t in step.receives if t.channel == RESULT):
            what = f"results that arrive from round {step.index} until {transfer.due}"
            slot, last = RECEIVING_LONG, transfer.due
            if not transfer.spans:
                # They may wait until the first of these buffers is written again.
                nth = plan.arrival_slot(step.index)
                slot, last = RECEIVING + nth, step.index + plan.arrival_slots - 1 - nth
            yield Use(slot, step.index, last, ("received", step.index), what)
