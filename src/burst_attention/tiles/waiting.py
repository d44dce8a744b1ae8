"""What kernels ask of a plan to say how many parts of gradients they leave to wait, to be taken in later."""

from __future__ import annotations

from burst_attention.schedule import PhasePlan, Round
from burst_attention.schedule.bundles import Heads


def rounds_before(phase: PhasePlan, step: Round) -> tuple[Round, ...]:
    """Those of the rank that a round is of."""
    return next(rounds[: step.index] for rounds in phase.rounds if rounds[step.index] == step)


def in_heads_of(step: Round, heads: Heads | None, rows: int) -> int:
    """Rows of some heads, or of all, as rows of a round's heads: home's own work is done in two halves of them."""
    if (step.heads is None) == (heads is None):
        return rows
    return 2 * rows if heads is None else -(-rows // 2)
