"""What kernels ask of a plan to say how many parts of gradients they leave to wait, to be taken in later."""

from __future__ import annotations

from burst_attention.schedule import PhasePlan, Round
from burst_attention.schedule.bundles import Heads


def rounds_before(phase: PhasePlan, step: Round) -> tuple[Round, ...]:
    """Those of the rank that a round is of."""
    return next(rounds[: step.index] for rounds in phase.rounds if rounds[step.index] == step)


def in_heads_of(phase: PhasePlan, heads: Heads | None, rows: int) -> int:
    """Rows of some heads, or of all, as rows of those heads that the phase's shapes have.

    Home's own work is done in two parts of the heads, which are halves where key heads are evenly many.
    """
    count = heads[1] - heads[0] if heads else phase.all_heads
    return -(-rows * count // phase.shapes.heads)
