"""Vendor kernels through torch's own operators, for pieces that are a full rectangle or a square causal triangle.

Shapes: B batch, H query heads, G key heads, S query rows, K key rows, D head dim, E value head dim.

A piece gives a normalised partial, which waits in the state until a few can be merged in one pass (fused.py). Backward
wants `out` but uses only its row sums with dout, so visiting queries bring delta and get a stand-in for out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from burst_attention.geometry import Piece, moved_rows
from burst_attention.lanes import begins
from burst_attention.merge import MAX_PARTS, MAX_SHARES, Partial, State
from burst_attention.schedule import Bundle, PhasePlan, Round
from burst_attention.tiles import flash4
from burst_attention.tiles.fused import stand_in_for_out
from burst_attention.tiles.gpu import DeferringKernel, add_partial, make_room, partials_bytes
from burst_attention.tiles.protocol import BackwardInputs, Gradients
from burst_attention.tiles.split import rectangle_and_triangle
from burst_attention.tiles.start import start
from burst_attention.tiles.waiting import in_heads_of, rounds_before


class VendorKernel(DeferringKernel):
    """Full and causal pieces by one of torch's operators."""

    copies_out = False
    """Whether backward copies out and dout where their rows are not dense."""

    def serves(self, piece: Piece) -> bool:
        return piece.is_full or (piece.is_causal and piece.q_count == piece.k_count)

    def gives_parts(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        return True

    def workspace_bytes(self, phase: PhasePlan, step: Round, visiting: Bundle | None) -> int:
        """Partials that wait, or backward's gradients, before they are added and while they wait, and its own sums.

        Those are of dq in fp32 and, where query heads share a key head, of dk and dv: what FA4 and cuDNN were seen to
        hold (docs/benchmarks.md). And the stand-in for out, and copies.
        """
        shapes = phase.shapes
        size = shapes.dtype.itemsize
        queries = max(piece.q_count for piece in step.pieces) * shapes.batch * shapes.heads
        keys = max(piece.k_count for piece in step.pieces) * shapes.batch * shapes.kv_heads
        if phase.phase == "forward":
            rounds = *rounds_before(phase, step), step
            pieces = (piece for other in rounds for piece in other.pieces)
            return partials_bytes(phase, [part.q_count for piece in pieces for part in rectangle_and_triangle(piece)])
        made_up = visiting is not None and phase.direction == "query"
        taken = queries * shapes.value_dim * (made_up + self.copies_out * (1 if made_up else 2))
        # Of the side that is at home gradients wait.
        outputs = queries * shapes.head_dim, keys * (shapes.head_dim + shapes.value_dim)
        taken += outputs[phase.direction == "kv"]
        inside = queries * shapes.head_dim
        if shapes.kv_heads < shapes.heads:
            inside += keys * (shapes.head_dim + shapes.value_dim)
        return taken * size + waiting_bytes(phase) + inside * 4

    def forward(self, pieces: Sequence[Piece], q: Tensor, k: Tensor, v: Tensor, state: State, scale: float) -> None:
        for piece in pieces:
            queries, keys = rows_of(piece)
            make_room(state)
            begins(q)
            out, lse = self.attend(q[:, :, queries], k[:, :, keys], v[:, :, keys], not piece.is_full, scale)
            add_partial(state, Partial(piece.q_first, out, lse))

    def backward(self, pieces: Sequence[Piece], x: BackwardInputs, gradients: Gradients, scale: float) -> None:
        for piece in pieces:
            queries, keys = rows_of(piece)
            dout, q, lse = (part[:, :, queries] for part in (x.dout, x.q, x.lse))
            out = stand_in_for_out(dout, x.delta[:, :, queries]) if x.out is None else x.out[:, :, queries]
            for total, where in zip(gradients, (queries, keys, keys), strict=True):
                if total is not None:
                    total.make_room(where.stop - where.start)
            begins(q)
            parts = self.gradients(
                dout, q, x.k[:, :, keys], x.v[:, :, keys], out, lse.contiguous(), not piece.is_full, scale
            )
            for total, part, where in zip(gradients, parts, (queries, keys, keys), strict=True):
                if total is not None:
                    total.add(where.start, part)

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """(out, lse) of one piece."""

    @abstractmethod
    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of one piece, from the lse of the whole rows."""


class CudnnKernel(VendorKernel):
    """cuDNN's attention, as torch's operators call it."""

    name = "cudnn"
    copies_out = True

    def leaves_room(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        """A block for every core, each of which computes until all is done."""
        return False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return out, lse.reshape(lse.shape[:3])

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The operator ignores the strides of out and dout: anything but (B, H, S, D) in memory gives wrong gradients.
        dout, out = dout.contiguous(), out.contiguous()
        # Without dropout it is not read: nothing is launched to fill it.
        seed = torch.empty((), dtype=torch.int64, device=q.device)
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
            scale=scale,
        )  # fmt: skip
        return found


class FlashKernel(VendorKernel):
    """The flash operator: FlashAttention-2 as torch ships it, or what `activate_flash_attention_impl` put under it."""

    name = "flash"

    def workspace_bytes(self, phase: PhasePlan, step: Round, visiting: Bundle | None) -> int:
        if phase.phase == "forward" or not flash4.serves_backward(phase.shapes):
            return super().workspace_bytes(phase, step, visiting)
        per_key = phase.shapes.heads // phase.shapes.kv_heads
        waiting = waiting_bytes(phase, per_key) if phase.direction == "query" else 0
        return flash4.workspace_bytes(phase, step, visiting) + waiting

    def backward(self, pieces: Sequence[Piece], x: BackwardInputs, gradients: Gradients, scale: float) -> None:
        by_itself = [piece for piece in pieces if flash4.serves(piece, x, scale)]
        for piece in by_itself:
            flash4.add_gradients(piece, x, gradients, scale)
        super().backward([piece for piece in pieces if piece not in by_itself], x, gradients, scale)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        if flash4.serves_forward(q, k, v):
            return flash4.attend(q, k, v, causal, scale)
        out, lse, *_ = start(torch.ops.aten._scaled_dot_product_flash_attention)(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        found: tuple[Tensor, Tensor, Tensor] = start(torch.ops.aten._scaled_dot_product_flash_attention_backward)(
            dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[0], scale=scale
        )
        return found


def waiting_bytes(phase: PhasePlan, per_key: int = 1) -> int:
    """Parts of the gradients at home that wait to be added, `per_key` of dk and dv for each piece."""
    shapes = phase.shapes
    row_size = shapes.heads * shapes.head_dim
    if phase.direction == "query":
        row_size = shapes.kv_heads * (shapes.head_dim + shapes.value_dim)
    else:
        per_key = 1
    return _waiting_rows(phase, per_key) * shapes.batch * row_size * shapes.dtype.itemsize


def _waiting_rows(phase: PhasePlan, per_key: int) -> int:
    """The most rows of the side at home for which parts of gradients wait on any rank."""
    home = "query" if phase.direction == "kv" else "kv"
    most = 0
    for rounds in phase.rounds:
        parts = [(*moved_rows(piece, home), step.heads) for step in rounds for piece in step.pieces]
        every = sum(in_heads_of(phase, heads, last - first) for first, last, heads in parts)
        longest = max((last - first for first, last, _ in parts), default=0)
        shard = max((last for _, last, _ in parts), default=0)
        most = max(most, min(per_key * every, MAX_PARTS * longest, MAX_SHARES * shard))
    return most


def rows_of(piece: Piece) -> tuple[slice, slice]:
    """A piece's query rows and key rows."""
    return (
        slice(piece.q_first, piece.q_first + piece.q_count),
        slice(piece.k_first, piece.k_first + piece.k_count),
    )
