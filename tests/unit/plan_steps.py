"""Every step and transfer of a plan is listed here, for tests that look at all of them."""

from __future__ import annotations

from collections.abc import Iterator

from burst_attention import Plan
from burst_attention.schedule import PhasePlan, Round, Transfer

DIRECTIONS = ("kv", "query")
PHASES = ("forward", "backward")


def phases(made: Plan) -> tuple[PhasePlan, PhasePlan]:
    assert made.backward is not None
    return made.forward, made.backward


def steps(phase: PhasePlan) -> Iterator[tuple[int, Round]]:
    return ((rank, step) for rank, rounds in enumerate(phase.rounds) for step in rounds)


def sent(phase: PhasePlan, channel: str) -> list[Transfer]:
    return [transfer for _, step in steps(phase) for transfer in step.sends if transfer.channel == channel]
