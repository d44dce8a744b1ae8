"""What the engine works out of a plan is kept with it, and made anew where kernels would choose otherwise."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from burst_attention import causal, plan
from burst_attention.engine import setup_of
from burst_attention.schedule import PhasePlan, Round
from burst_attention.tiles.plain import PlainKernel

CPU = torch.device("cpu")


class FickleKernel(PlainKernel):
    """Gives parts, or does not: what that hangs on is among its facts."""

    parts = False

    def facts(self, device: torch.device | None = None) -> tuple[Hashable, ...]:
        return (self.parts,)

    def gives_parts(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        return self.parts


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
