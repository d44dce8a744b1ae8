"""A rank's part in a plan, as far as it is known before it runs: worked out once, and kept with the plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch

from burst_attention.geometry import Rows
from burst_attention.schedule import Bundle, PhasePlan, Round, Transfer
from burst_attention.schedule.bundles import Heads
from burst_attention.schedule.plan import RESULT, sign_of
from burst_attention.tiles import TileKernel

Made = TypeVar("Made")


@dataclass(frozen=True)
class RankSetup:
    """A rank's part in a phase, as far as it is known before it runs."""

    last_computed: Round | None
    results_due: dict[int, list[Transfer]]
    computed: Bundle
    """What results are computed in."""
    packed: tuple[Rows, ...]
    """By round, the rows of its own block that it packs and sends."""
    in_parts: bool
    """Whether on a GPU no round waits for what another has written, if parts at home wait.

    Our own kernel continues a state, or adds to a gradient; so does a visitor to what comes from another. (All rounds
    may add at once to one that is `Accumulator.shared`.) Row statistics that travel are laid out for every round in one
    place.
    """
    one_launch: bool
    """Whether a round's pieces need no turns of their own."""
    leaves_room: bool
    last_halves: tuple[Heads, Heads] | None
    """Of the last visitors, where what they leave is ended beside them."""
    last_partials: int
    """That the last round leaves for a head."""


def setup_of(plan: PhasePlan, rank: int, kernel: TileKernel, scale: float, device: torch.device) -> RankSetup:
    """Worked out once for a plan, and kept with it."""
    return kept_with(
        plan, "setup", rank, kernel, scale, device, lambda: _make_setup(plan, rank, kernel, sign_of(scale))
    )


def kept_with(
    plan: PhasePlan,
    what: Hashable,
    rank: int,
    kernel: TileKernel,
    scale: float,
    device: torch.device,
    make: Callable[[], Made],
) -> Made:
    """What is made once for a plan and all that kernels choose by.

    A call on a GPU should not take the host longer than the device.
    """
    key = what, rank, kernel, sign_of(scale), kernel.facts(device)
    if key not in plan.setups:
        plan.setups[key] = make()
    found: Made = plan.setups[key]
    return found


def _make_setup(plan: PhasePlan, rank: int, kernel: TileKernel, scale: float) -> RankSetup:
    rounds = plan.rounds[rank]
    steps = [step for step in rounds if step.pieces]
    due: dict[int, list[Transfer]] = {}
    for transfer in (t for step in rounds for t in step.receives if t.channel == RESULT):
        due.setdefault(transfer.due, []).append(transfer)
    computed = plan.computed_results(rank, kernel, scale)
    alone = not plan.results.fields or (plan.straight and computed == plan.results)
    apart = alone and not plan.operands.statistics and len(steps) > 1
    return RankSetup(
        last_computed=steps[-1] if steps else None,
        results_due=due,
        computed=computed,
        packed=tuple(plan.packed_at_home(rank, step) for step in rounds),
        in_parts=apart and all(kernel.gives_parts(plan, step, scale) for step in steps),
        one_launch=all(kernel.one_launch(plan, step, scale) for step in steps),
        leaves_room=all(kernel.leaves_room(plan, step, scale) for step in steps),
        last_halves=plan.last_halves(rank, kernel, scale) if apart else None,
        last_partials=kernel.partials(plan, steps[-1], scale) if steps else 0,
    )
