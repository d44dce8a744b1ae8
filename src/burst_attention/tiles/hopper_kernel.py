"""Our kernels for Hopper behind the tile-kernel protocol, where rounds on a GPU run side by side.

Shapes: B batch, H query heads, G key heads, S query rows, K key rows, D head dim, E value head dim.

Elsewhere it is the kernel of triton_kernel.py, which continues a state and adds to gradients. Side by side that would
go wrong. So forward gives a round's partial, which waits to be merged. In backward dk and dv are written, those of
visitors where they are sent from, those of home's keys as parts that wait; dq is added to by all rounds at once, for
the copy engine's additions are atomic.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from burst_attention.geometry import Piece, cover_rows
from burst_attention.lanes import begins
from burst_attention.merge import Partial, State
from burst_attention.schedule import Bundle, PhasePlan, Round
from burst_attention.tiles.accumulator import Accumulator
from burst_attention.tiles.block_table import block_table, parts_of_heads
from burst_attention.tiles.gpu import DeferringKernel, add_partial, make_room, partials_bytes
from burst_attention.tiles.hopper import (
    BACKWARD_BLOCK_K,
    BACKWARD_BLOCK_Q,
    DIMS,
    launch_hopper_backward,
    launch_hopper_forward,
    loadable,
)
from burst_attention.tiles.protocol import BackwardInputs, Gradients
from burst_attention.tiles.triton_kernel import TritonKernel, opened
from burst_attention.tiles.waiting import in_heads_of, rounds_before


class HopperKernel(DeferringKernel, TritonKernel):
    """Any pieces, in 16 bits and with head dims 64 and 128: what the kernel in hopper_backward.py takes."""

    name = "hopper"
    backward_dims = DIMS

    def facts(self, device: torch.device | None = None) -> tuple[Hashable, ...]:
        return (torch.are_deterministic_algorithms_enabled(),)

    def gives_parts(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        """Where keys move: forward, and backward of all three gradients.

        For some gradients, and in one order, the plain kernels serve, which add; and dq is added to in fp32 alone.
        """
        if phase.phase == "forward" or phase.direction == "query":
            return phase.direction == "kv"
        return phase.needs == "qkv" and not torch.are_deterministic_algorithms_enabled()

    def one_launch(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        return True

    def partials(self, phase: PhasePlan, step: Round, scale: float) -> int:
        return 1

    def workspace_bytes(self, phase: PhasePlan, step: Round, visiting: Bundle | None) -> int:
        """Partials, or parts of dk and dv at home, where they wait."""
        if phase.phase == "forward" and phase.direction == "kv" and phase.topology.size > 1:
            reached = [query_rows(other.pieces) for other in (*rounds_before(phase, step), step) if other.pieces]
            return partials_bytes(phase, [last - first for first, last in reached])
        rounds = (*rounds_before(phase, step), step) if phase.phase == "backward" else ()
        if not self._lays_aside(phase, rounds):
            return super().workspace_bytes(phase, step, visiting)
        shapes, on_cpu = phase.shapes, torch.device("cpu")
        chip = torch.device("cuda") if torch.cuda.is_available() else on_cpu
        rows = 0
        for other in rounds:
            if other.pieces and not other.row_count:
                table = block_table(other.pieces, True, BACKWARD_BLOCK_K, BACKWARD_BLOCK_Q, on_cpu)
                parts = parts_of_heads(table, shapes.batch * shapes.kv_heads, shapes.heads // shapes.kv_heads, chip)
                keys = max(piece.k_first + piece.k_count for piece in other.pieces)
                rows += in_heads_of(phase, other.heads, parts * keys)
        row = shapes.batch * shapes.kv_heads * (shapes.head_dim + shapes.value_dim) * shapes.dtype.itemsize
        return rows * row

    def _lays_aside(self, phase: PhasePlan, rounds: Sequence[Round]) -> bool:
        """Whether rounds may run side by side, as the engine has it: results travel as they are computed."""
        if not rounds or not phase.straight or not phase.results.fields or phase.topology.size == 1:
            return False
        precise = all(field.dtype == phase.shapes.accumulate_dtype for field in phase.results.fields)
        # Of all heads: the phase may be that of half of them.
        whole = replace(phase.shapes, heads=phase.all_heads, kv_heads=phase.results.fields[0].heads)
        alone = precise or replace(phase, shapes=whole).rounds_alone(self, rounds, 1.0)
        return alone and all(self.gives_parts(phase, step, 1.0) for step in rounds)

    def forward(self, pieces: Sequence[Piece], q: Tensor, k: Tensor, v: Tensor, state: State, scale: float) -> None:
        if state.deferred is None or not state.deferred.side_by_side:
            super().forward(pieces, q, k, v, state, scale)
            return
        first, last = query_rows(pieces)
        q, k, v = (as_loaded(x) for x in (q[:, :, first:last], k, v))
        pieces = tuple(piece._replace(q_first=piece.q_first - first) for piece in pieces)
        make_room(state)
        out, lse = new_partial(q, v.shape[3], cover_rows(pieces, last - first))
        begins(q)
        launch_hopper_forward(pieces, q, k, v, State(out, lse, lse), scale, load=False, finished=(out, lse))
        add_partial(state, Partial(first, out, lse))

    def backward(self, pieces: Sequence[Piece], x: BackwardInputs, gradients: Gradients, scale: float) -> None:
        dq, dk, dv = gradients
        if dq is None or dk is None or dv is None or not dq.side_by_side:
            super().backward(pieces, x, gradients, scale)
            return
        x = x._replace(**{name: as_loaded(getattr(x, name)) for name in ("dout", "q", "k", "v")})
        pieces, covered = tuple(pieces), cover_rows(pieces, x.k.shape[2], keys=True)
        sums = dq.shared()
        if not dk.side_by_side:
            (to_dk, to_dv), add = opened((dk, dv), covered)
            begins(x.q)
            launch_hopper_backward(pieces, x, (sums, to_dk, to_dv), scale, add=add)
            return
        table = block_table(pieces, True, BACKWARD_BLOCK_K, BACKWARD_BLOCK_Q, x.k.device)
        batch, kv_heads = x.k.shape[:2]
        parts = parts_of_heads(table, batch * kv_heads, x.q.shape[1] // kv_heads, x.k.device)
        to_dk, to_dv = (new_parts(total, like, parts, covered) for total, like in ((dk, x.k), (dv, x.v)))
        begins(x.q)
        launch_hopper_backward(pieces, x, (sums, to_dk, to_dv), scale, add=False)
        for total, given in ((dk, to_dk), (dv, to_dv)):
            for part in range(parts):
                total.add(0, given[:, part::parts])


def as_loaded(x: Tensor) -> Tensor:
    """The same tensor where the copy engine can load it."""
    return x if loadable(x) else x.clone(memory_format=torch.contiguous_format)


def query_rows(pieces: Sequence[Piece]) -> tuple[int, int]:
    """The rows [first, last) that pieces reach from end to end."""
    return min(piece.q_first for piece in pieces), max(piece.q_first + piece.q_count for piece in pieces)


def new_partial(q: Tensor, value_dim: int, covered: bool) -> tuple[Tensor, Tensor]:
    """Room for (out, lse) of queries; those without keys where a kernel does not write every row."""
    out = torch.empty(*q.shape[:3], value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return (out, lse) if covered else (out.zero_(), lse.fill_(-torch.inf))


def new_parts(total: Accumulator, like: Tensor, parts: int, covered: bool) -> Tensor:
    """Room for parts of a gradient, those of a key head one after the other, in the dtype of the inputs.

    Zeros where a kernel does not write every row.
    """
    batch, heads, rows, dim = like.shape
    total.make_room(parts * rows)
    make = torch.empty if covered else torch.zeros
    return make(batch, heads * parts, rows, dim, dtype=like.dtype, device=like.device)
