"""What all kernels on a GPU share: fused passes over memory in place of torch's own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from burst_attention.lanes import hurried
from burst_attention.merge import MAX_PARTIALS, Partial, State
from burst_attention.schedule import PhasePlan
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

    def open_heads(self, state: State, count: int, dtype: torch.dtype, coming: int) -> None:
        assert state.deferred is not None
        if len(state.deferred.partials) + coming > MAX_PARTIALS:
            settle(state)
        state.deferred.results, state.deferred.ended = room_for_results(state, dtype), count

    def finish_heads(self, state: State) -> None:
        finish_heads(state)


class DeferringKernel(GpuKernel):
    """Lets parts of gradients wait too, and takes in several in one pass."""

    sum_parts = staticmethod(sum_parts)


def settle(state: State) -> None:
    """Bring a state's tensors up to date, for a kernel that continues them."""
    if state.deferred is None:
        return
    assert state.deferred.results is None, "some heads are finished already"
    if state.deferred.untouched or state.deferred.partials:
        with state.deferred.alone():
            merge_partials(state, state.deferred.partials, load=not state.deferred.untouched)
    state.deferred.untouched = False
    state.deferred.partials.clear()


def waiting(state: State) -> int:
    """How many partials wait for some of its heads."""
    assert state.deferred is not None
    last = state.head + state.acc.shape[1]
    return sum(state.head < p.head + p.out.shape[1] and p.head < last for p in state.deferred.partials)


def add_partial(state: State, partial: Partial) -> None:
    """Leave a partial to be merged with others, or merge it now into a state that does not defer."""
    if state.deferred is None:
        rows = state.rows(partial.first, partial.first + partial.out.shape[2])
        merge_partials(rows, [partial._replace(first=0)], load=True)
        return
    make_room(state)
    state.deferred.partials.append(partial._replace(head=state.head))


def make_room(state: State) -> None:
    """For another partial, before it is computed."""
    if state.deferred is not None and waiting(state) == MAX_PARTIALS:
        settle(state)


def partials_bytes(phase: PhasePlan, rows: Iterable[int]) -> int:
    """Of partials of so many rows each, as many as may wait."""
    shapes = phase.shapes
    row = shapes.batch * shapes.heads * (shapes.value_dim * shapes.dtype.itemsize + 4)
    return sum(sorted(rows)[-MAX_PARTIALS:]) * row


def partials_of(state: State) -> list[Partial]:
    """Those that wait for its heads."""
    assert state.deferred is not None
    last = state.head + state.acc.shape[1]
    return [part for partial in state.deferred.partials if (part := partial.heads(state.head, last)) is not None]


def room_for_results(state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """For (out, lse)."""
    return torch.empty(state.acc.shape, dtype=dtype, device=state.acc.device), torch.empty_like(state.peak)


def finish_heads(state: State) -> None:
    """Write (out, lse) of a state that is some heads, for which no more comes, in their place. Allocates nothing."""
    assert state.deferred is not None and state.deferred.results is not None
    out, lse = (x[:, state.head : state.head + state.acc.shape[1]] for x in state.deferred.results)
    with hurried(out):
        merge_partials(state, partials_of(state), load=not state.deferred.untouched, finished=(out, lse))


def finish_deferred(state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out, lse), with what was deferred merged in the same pass; of all heads, or those not finished before."""
    if state.deferred and state.deferred.finished:
        return state.deferred.finished
    if state.deferred is None:
        out, lse = room_for_results(state, dtype)
        merge_partials(state, [], load=True, finished=(out, lse))
        return out, lse
    with state.deferred.alone():
        if state.deferred.results is None:
            state.deferred.results = room_for_results(state, dtype)
            finish_heads(state)
        else:
            finish_heads(state.heads(state.deferred.ended, state.acc.shape[1]))
    return state.deferred.results
