"""How many rows kernels leave to wait, for the plan's memory: parts of gradients that are taken in later."""

from __future__ import annotations

from collections.abc import Iterable

from burst_attention.schedule import PhasePlan, Round
from burst_attention.schedule.bundles import Heads


def rounds_before(phase: PhasePlan, step: Round) -> tuple[Round, ...]:
    """Those of the rank that a round is of."""
    return next(rounds[: step.index] for rounds in phase.rounds if rounds[step.index] == step)


def home_key_rows(rounds: Iterable[Round], step: Round) -> int:
    """Rows of home's keys that its own queries were computed with."""
    at_home = (other for other in rounds if not other.row_count)
    return sum(in_heads_of(step, other.heads, p.k_count) for other in at_home for p in other.pieces)


def in_heads_of(step: Round, heads: Heads | None, rows: int) -> int:
    """Rows of some heads, or of all, as rows of a round's heads: home's own work is done in two halves of them."""
    if (step.heads is None) == (heads is None):
        return rows
    return 2 * rows if heads is None else -(-rows // 2)
