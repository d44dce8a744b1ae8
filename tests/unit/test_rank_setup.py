"""What the engine works out of a plan is kept with it, and made anew where kernels would choose otherwise."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from burst_attention import causal, plan
from burst_attention.rank_setup import setup_of
from burst_attention.schedule import PhasePlan, Round
from burst_attention.tiles.plain import PlainKernel

CPU = torch.device("cpu")


class FickleKernel(PlainKernel):
    """Gives parts, or does not: what that hangs on is among its facts, or the sign of the scale."""

    parts = False

    def facts(self, device: torch.device | None = None) -> tuple[Hashable, ...]:
        return (self.parts,)

    def gives_parts(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        return self.parts and scale > 0


def test_it_is_worked_out_once_for_each_rank() -> None:
    phase, kernel = plan(64, 4, heads=2, head_dim=8, mask=causal(), layout="zigzag").forward, PlainKernel()
    first = setup_of(phase, 1, kernel, 1.0, CPU)
    assert setup_of(phase, 1, kernel, 1.0, CPU) is first
    other = setup_of(phase, 2, kernel, 1.0, CPU)
    assert other is not first and other.last_computed != first.last_computed


def test_it_follows_what_the_kernel_chooses_by() -> None:
    phase, kernel = plan(64, 4, heads=2, head_dim=8, mask=causal(), layout="zigzag").forward, FickleKernel()
    assert not setup_of(phase, 1, kernel, 1.0, CPU).in_parts
    kernel.parts = True
    assert setup_of(phase, 1, kernel, 1.0, CPU).in_parts
    assert not setup_of(phase, 1, kernel, -1.0, CPU).in_parts


def test_a_new_scale_with_every_call_leaves_nothing_behind() -> None:
    phase, kernel = plan(64, 4, heads=2, head_dim=8, mask=causal(), layout="zigzag").forward, PlainKernel()
    setups = {id(setup_of(phase, 1, kernel, 1.0 / scale, CPU)) for scale in range(1, 5)}
    assert len(setups) == 1


def test_kernels_that_know_the_same_may_choose_otherwise() -> None:
    class Plain(FickleKernel):
        def gives_parts(self, phase: PhasePlan, step: Round, scale: float) -> bool:
            return False

    phase, kernel, other = (
        plan(64, 4, heads=2, head_dim=8, mask=causal(), layout="zigzag").forward,
        FickleKernel(),
        Plain(),
    )
    kernel.parts = other.parts = True
    assert kernel.facts(CPU) == other.facts(CPU)
    assert setup_of(phase, 1, kernel, 1.0, CPU).in_parts and not setup_of(phase, 1, other, 1.0, CPU).in_parts
