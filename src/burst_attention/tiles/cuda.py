"""The kernel for NVIDIA and AMD GPUs: each piece goes to the implementation that was measured fastest for it.

policy.py chooses; pieces that it gives to our own kernel go in one launch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from burst_attention.geometry import Piece
from burst_attention.merge import State
from burst_attention.schedule import Bundle, PhasePlan, Round
from burst_attention.schedule.plan import sign_of
from burst_attention.tiles.gpu import DeferringKernel, GpuKernel
from burst_attention.tiles.hopper import has_async_add, has_gluon
from burst_attention.tiles.hopper_kernel import HopperKernel
from burst_attention.tiles.policy import PLANNED_FOR, Case, active_flash, capability_of, choose
from burst_attention.tiles.protocol import BackwardInputs, Gradients
from burst_attention.tiles.split import rectangle_and_triangle
from burst_attention.tiles.triton_kernel import TritonKernel
from burst_attention.tiles.vendor import CudnnKernel, FlashKernel


class CudaKernel(DeferringKernel):
    """Pieces by the policy; the state is continued by our own kernel, or takes in partials of vendor kernels."""

    name = "cuda"

    def __init__(self) -> None:
        kernels: tuple[GpuKernel, ...] = (TritonKernel(), HopperKernel(), CudnnKernel(), FlashKernel())
        self.kernels = {kernel.name: kernel for kernel in kernels}
        """By name. Our own first: then nothing waits to be settled when they add."""

    def workspace_bytes(self, phase: PhasePlan, step: Round, visiting: Bundle | None) -> int:
        """Of those who would compute the round's pieces on this GPU; where there is none, of FlashAttention."""
        names = {"flash"}
        if torch.cuda.is_available():
            dims = phase.shapes.head_dim, phase.shapes.value_dim
            ask = partial(chosen_for, phase.phase, dims=dims, dtype=phase.shapes.dtype, device=None, scale=1.0)
            names = {name for piece in step.pieces for name in ask(piece).values()}
        return max(self.kernels[name].workspace_bytes(phase, step, visiting) for name in names)

    def facts(self, device: torch.device | None = None) -> tuple[Hashable, ...]:
        return facts(device)

    def gives_parts(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        """What our kernel for Hopper writes for a visitor's keys is rounded: nobody may add to it then."""
        names = self._names(phase, step, scale)
        alone = phase.phase == "forward" or "hopper" not in names or len(names) == 1
        return alone and all(self.kernels[name].gives_parts(phase, step, scale) for name in names)

    def one_launch(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        names = self._names(phase, step, scale)
        return len(names) == 1 and all(self.kernels[name].one_launch(phase, step, scale) for name in names)

    def partials(self, phase: PhasePlan, step: Round, scale: float) -> int:
        names = [name for found in self._chosen(phase, step, scale) for name in found.values()]
        # All of a round's pieces that ours computes are one.
        return len([name for name in names if name != "hopper"]) + ("hopper" in names)

    def leaves_room(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        names = self._names(phase, step, scale)
        return all(self.kernels[name].leaves_room(phase, step, scale) for name in names)

    def _names(self, phase: PhasePlan, step: Round, scale: float) -> set[str]:
        """Of those who compute a round's pieces."""
        return {name for found in self._chosen(phase, step, scale) for name in found.values()}

    def _chosen(self, phase: PhasePlan, step: Round, scale: float) -> list[dict[Piece, str]]:
        """The parts of each of a round's pieces, and who computes them."""
        dims = phase.shapes.head_dim, phase.shapes.value_dim
        return [chosen_for(phase.phase, piece, dims, phase.shapes.dtype, None, scale) for piece in step.pieces]

    def forward(self, pieces: Sequence[Piece], q: Tensor, k: Tensor, v: Tensor, state: State, scale: float) -> None:
        groups = self._groups("forward", pieces, q, v, scale)
        if state.deferred:
            state.deferred.last &= len(groups) == 1
        for name, group in groups:
            self.kernels[name].forward(group, q, k, v, state, scale)

    def backward(self, pieces: Sequence[Piece], x: BackwardInputs, gradients: Gradients, scale: float) -> None:
        for name, group in self._groups("backward", pieces, x.q, x.v, scale):
            self.kernels[name].backward(group, x, gradients, scale)

    def _groups(
        self, phase: str, pieces: Sequence[Piece], q: Tensor, v: Tensor, scale: float
    ) -> list[tuple[str, list[Piece]]]:
        """Pieces by who computes them, our own kernels' together."""
        groups: dict[str, list[Piece]] = {name: [] for name in self.kernels}
        for piece in pieces:
            parts = chosen_for(phase, piece, (q.shape[3], v.shape[3]), q.dtype, q.device, scale)
            for part, name in parts.items():
                groups[name].append(part)
        return [(name, group) for name, group in groups.items() if group]


def facts(device: torch.device | None) -> tuple[tuple[int, int], str, bool, bool]:
    """A chip's capability, who is under torch's flash operator, and two that `Case` explains.

    Where there is no GPU: those that are planned for.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    capability = capability_of(device)
    if capability is None:
        return *PLANNED_FOR, deterministic, True
    capability = (0, 0) if torch.version.hip else capability
    return capability, active_flash(), deterministic, has_gluon() and has_async_add()


def chosen_for(
    phase: str, piece: Piece, dims: tuple[int, int], dtype: torch.dtype, device: torch.device | None, scale: float
) -> dict[Piece, str]:
    """Who computes a piece's parts on a device, or on the current one; `dims` are those of heads, and of values.

    What is not for vendors' kernels alone is ours as a whole: cut in parts it would be begun twice.
    """
    return _chosen_by(facts(device), phase, piece, dims, dtype, sign_of(scale))


@lru_cache(maxsize=1024)
def _chosen_by(
    known: tuple[tuple[int, int], str, bool, bool],
    phase: str,
    piece: Piece,
    dims: tuple[int, int],
    dtype: torch.dtype,
    scale: float,
) -> dict[Piece, str]:
    """Kept, for a call asks it of each round several times."""
    capability, flash, deterministic, gluon = known
    chosen = {}
    for part in rectangle_and_triangle(piece):
        square = part.is_causal and part.q_count == part.k_count
        kind = "full" if part.is_full else "causal" if square else "masked"
        case = Case(
            phase, kind, part.q_count, part.k_count, dims[0], dims[1], dtype, capability, flash, scale,
            deterministic, gluon,
        )  # fmt: skip
        chosen[part] = choose(case).name
    return next(({piece: name} for name in ("triton", "hopper") if name in chosen.values()), chosen)
