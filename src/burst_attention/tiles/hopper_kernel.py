"""Our backward for Hopper behind the tile-kernel protocol, where rounds on a GPU run side by side.

Shapes: B batch, H query heads, G key heads, S query rows, K key rows, D head dim.

Elsewhere it is the kernel of triton_kernel.py, which adds to what is there. Side by side that would go wrong for dk and
dv, which passes over memory add to as well: so they are written, those of visitors where they are sent from, those of
home's keys as parts that wait. dq is added to by all rounds at once, for the copy engine's additions are atomic.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from burst_attention.geometry import Piece, cover_rows
from burst_attention.lanes import begins
from burst_attention.schedule import Bundle, PhasePlan, Round
from burst_attention.tiles.gpu import DeferringKernel
from burst_attention.tiles.hopper import launch_hopper_backward, loadable
from burst_attention.tiles.protocol import Accumulator, BackwardInputs, Gradients
from burst_attention.tiles.triton_kernel import TritonKernel, opened
from burst_attention.tiles.waiting import home_key_rows, rounds_before


class HopperKernel(DeferringKernel, TritonKernel):
    """Any pieces, in 16 bits and with head dim 128: what the kernel in hopper_backward.py takes."""

    name = "hopper"

    def facts(self, device: torch.device | None = None) -> tuple[Hashable, ...]:
        return (torch.are_deterministic_algorithms_enabled(),)

    def gives_parts(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        """Backward of all three gradients: for some of them, and in one order, the plain kernels serve, which add."""
        return phase.phase == "backward" and phase.needs == "qkv" and not torch.are_deterministic_algorithms_enabled()

    def workspace_bytes(self, phase: PhasePlan, step: Round, visiting: Bundle | None) -> int:
        """Parts of dk and dv at home, where they wait."""
        if phase.phase == "forward" or phase.direction == "query" or not phase.straight:
            return super().workspace_bytes(phase, step, visiting)
        shapes = phase.shapes
        row = shapes.batch * shapes.kv_heads * (shapes.head_dim + shapes.value_dim) * shapes.dtype.itemsize
        return home_key_rows((*rounds_before(phase, step), step), step) * row

    def backward(self, pieces: Sequence[Piece], x: BackwardInputs, gradients: Gradients, scale: float) -> None:
        dq, dk, dv = gradients
        if dq is None or dk is None or dv is None or not dq.side_by_side:
            super().backward(pieces, x, gradients, scale)
            return
        x = x._replace(**{name: as_loaded(getattr(x, name)) for name in ("dout", "q", "k", "v")})
        covered = cover_rows(pieces, x.k.shape[2], keys=True)
        sums = dq.shared()
        at_home = dk.side_by_side
        if at_home:
            keys, add = [new_part(total, like, covered) for total, like in ((dk, x.k), (dv, x.v))], False
        else:
            keys, add = opened((dk, dv), covered)
        begins(x.q)
        launch_hopper_backward(tuple(pieces), x, (sums, keys[0], keys[1]), scale, add=add)
        if at_home:
            dk.add(0, keys[0])
            dv.add(0, keys[1])


def as_loaded(x: Tensor) -> Tensor:
    """The same tensor where the copy engine can load it."""
    return x if loadable(x) else x.contiguous()


def new_part(total: Accumulator, like: Tensor, covered: bool) -> Tensor:
    """Room for a part of a gradient, in the dtype of the inputs: zeros where a kernel does not write every row."""
    total.make_room(like.shape[2])
    return torch.empty(like.shape, dtype=like.dtype, device=like.device) if covered else torch.zeros_like(like)
