"""What all kernels on a GPU share: fused passes over memory in place of torch's own."""

from __future__ import annotations

import torch
from torch import Tensor

from burst_attention.merge import State
from burst_attention.tiles.fused import copy_on_gpu, fused_delta, merge_partials, sum_parts
from burst_attention.tiles.protocol import TileKernel


class GpuKernel(TileKernel):
    """Copies and deltas in one pass; a state is begun and ended in one, or by the kernel itself."""

    defers = True

    def copy(self, target: Tensor, source: Tensor, beside: bool = False) -> None:
        copy_on_gpu(target, source, beside)

    def row_delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
        return fused_delta(out, dout, dlse)

    def finish(self, state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return finish_deferred(state, dtype)


class DeferringKernel(GpuKernel):
    """Lets parts of gradients wait too, and takes in several in one pass."""

    sum_parts = staticmethod(sum_parts)


def settle(state: State) -> None:
    """Bring a state's tensors up to date, for a kernel that continues them."""
    if state.deferred is None:
        return
    if state.deferred.untouched or state.deferred.partials:
        with state.deferred.alone():
            merge_partials(state, state.deferred.partials, load=not state.deferred.untouched)
    state.deferred.untouched = False
    state.deferred.partials.clear()


def finish_deferred(state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out, lse), with what was deferred merged in the same pass."""
    if state.deferred and state.deferred.finished:
        return state.deferred.finished
    out = torch.empty(state.acc.shape, dtype=dtype, device=state.acc.device)
    lse = torch.empty_like(state.peak)
    if state.deferred is None:
        merge_partials(state, [], load=True, finished=(out, lse))
        return out, lse
    with state.deferred.alone():
        waiting = state.deferred.partials
        merge_partials(state, waiting, load=not state.deferred.untouched, finished=(out, lse))
    return out, lse
