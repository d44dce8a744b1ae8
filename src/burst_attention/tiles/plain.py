"""The plain kernel: every piece, dtype and device that torch has matmul for. Twin and fallback of all other kernels.

Shapes: B batch, H query heads, G key heads, g = H / G, S query rows, K key rows, D head dim, E value head dim.

Scores are built in bounded blocks, in fp32 (fp64 for fp64 inputs). The g query heads that share a key head are folded
into its rows, so keys and values are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from burst_attention.geometry import Piece
from burst_attention.merge import State
from burst_attention.schedule import Bundle, PhasePlan, Round
from burst_attention.tiles.protocol import BackwardInputs, Gradients, TileKernel
from burst_attention.tiles.split import FULL, MAX_BLOCK, Tile, allowed_block, split_piece

SCORE_ELEMENTS = MAX_BLOCK * MAX_BLOCK
"""Elements of a block of scores, all heads together."""


class PlainKernel(TileKernel):
    """Attention in blocks of torch matmuls."""

    name = "plain"

    def workspace_bytes(self, phase: PhasePlan, step: Round, visiting: Bundle | None) -> int:
        shapes, size = phase.shapes, phase.shapes.accumulate_dtype.itemsize
        block = block_size(shapes.batch * shapes.heads)
        rows = min(block, max(p.q_count for p in step.pieces))
        cols = min(block, max(p.k_count for p in step.pieces))
        scores = shapes.batch * shapes.heads * rows * cols
        query = rows * shapes.batch * shapes.heads * (shapes.head_dim + shapes.value_dim)
        key = cols * shapes.batch * shapes.kv_heads * (shapes.head_dim + shapes.value_dim)
        # A block in fp64 and what it is rounded to exist together for a moment; in backward beside the weights.
        blocks = (1 if size == 8 else 3) + (phase.phase == "backward")
        return (blocks * scores + query + key) * size

    def forward(self, pieces: Sequence[Piece], q: Tensor, k: Tensor, v: Tensor, state: State, scale: float) -> None:
        block = block_size(q.shape[0] * q.shape[1])
        for piece in pieces:
            for tile in split_piece(piece, block, block, block):
                self._forward_tile(tile, q, k, v, state.rows(tile.q0, tile.q1), scale)

    def _forward_tile(self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, state: State, scale: float) -> None:
        compute = state.acc.dtype
        kv_heads = k.shape[1]
        # Scores rounded to fp32 cost lse up to 4 ulp where products nearly cancel or a score is far from lse. So they
        # stay in fp64 until the peak, a number of fp32, is taken from them.
        precise = score_dtype(q.device, compute)
        q_BGSD = fold_heads(q[:, :, tile.queries].to(precise), kv_heads)
        scores_BGSK = scaled_scores(tile, q_BGSD, k[:, :, tile.keys].to(precise), scale)
        acc_BGSE, peak_BGS, total_BGS = (fold_heads(part, kv_heads) for part in state[:3])
        peak = torch.maximum(peak_BGS, scores_BGSK.amax(-1).to(compute))
        # Rows without keys so far: any finite shift keeps exp(-inf) at 0.
        shift = peak.masked_fill(peak == float("-inf"), 0.0)
        weights_BGSK = scores_BGSK.sub_(shift.unsqueeze(-1)).to(compute).exp_()
        carried = torch.exp(peak_BGS - shift)
        total = total_BGS * carried + weights_BGSK.sum(-1)
        acc = acc_BGSE * carried.unsqueeze(-1) + weights_BGSK @ v[:, :, tile.keys].to(compute)
        for part, value in zip(state[:3], (acc, peak, total), strict=True):
            part.copy_(unfold_heads(value, part))

    def backward(self, pieces: Sequence[Piece], x: BackwardInputs, gradients: Gradients, scale: float) -> None:
        totals = tuple(None if total is None else total.settle() for total in gradients)
        block = block_size(x.q.shape[0] * x.q.shape[1])
        for piece in pieces:
            for tile in split_piece(piece, block, block, block):
                rows = tuple(part[:, :, tile.queries] for part in (x.dout, x.q, x.lse, x.delta))
                self._backward_tile(tile, rows, x.k[:, :, tile.keys], x.v[:, :, tile.keys], totals, scale)

    def _backward_tile(
        self,
        tile: Tile,
        rows: tuple[Tensor, ...],
        k: Tensor,
        v: Tensor,
        totals: tuple[Tensor | None, ...],
        scale: float,
    ) -> None:
        dout, q, lse, delta = rows
        dq, dk, dv = totals
        compute, kv_heads = lse.dtype, k.shape[1]
        precise = score_dtype(q.device, compute)
        # Rounded as lse and delta are, so that a row's only key has a weight of exactly 1 and a gradient of exactly 0.
        scores_BGSK = scaled_scores(tile, fold_heads(q.to(precise), kv_heads), k.to(precise), scale).to(compute)
        dout_BGSE, q_BGSD = (fold_heads(x.to(compute), kv_heads) for x in (dout, q))
        lse_BGS, delta_BGS = (fold_heads(x, kv_heads) for x in (lse, delta))
        k_BGKD = k.to(compute)
        # A row without keys has lse = -inf; +inf makes its weights 0 instead of NaN.
        lse_BGS = lse_BGS.masked_fill(lse_BGS == float("-inf"), float("inf"))
        weights_BGSK = scores_BGSK.sub_(lse_BGS.unsqueeze(-1)).exp_()
        if dv is not None:
            dv[:, :, tile.keys].add_(weights_BGSK.transpose(-1, -2) @ dout_BGSE)
        if dq is None and dk is None:
            return
        dweights_BGSK = fold_heads(dout.to(precise), kv_heads) @ v.to(precise).transpose(-1, -2)
        dscores_BGSK = dweights_BGSK.to(compute).sub_(delta_BGS.unsqueeze(-1)).mul_(weights_BGSK).mul_(scale)
        del dweights_BGSK
        if dk is not None:
            dk[:, :, tile.keys].add_(dscores_BGSK.transpose(-1, -2) @ q_BGSD)
        if dq is not None:
            dq_rows = dq[:, :, tile.queries]
            dq_rows.add_(unfold_heads(dscores_BGSK @ k_BGKD, dq_rows))


def block_size(heads: int) -> int:
    """Rows and columns of a block, so that the scores of all heads of the batch stay within SCORE_ELEMENTS."""
    return max(1, min(MAX_BLOCK, math.isqrt(SCORE_ELEMENTS // heads)))


def score_dtype(device: torch.device, compute: torch.dtype) -> torch.dtype:
    """What scores are computed in before they are rounded."""
    return torch.float64 if device.type == "cpu" else compute


def scaled_scores(tile: Tile, q_BGSD: Tensor, k_BGKD: Tensor, scale: float) -> Tensor:
    """(B, G, g * S, K) scores of a tile, -inf where a pair does not exist."""
    scores = (q_BGSD @ k_BGKD.transpose(-1, -2)).mul_(scale)
    if tile.kind != FULL:
        forbidden = allowed_block(tile, q_BGSD.device).logical_not_()
        groups = q_BGSD.shape[2] // tile.piece.q_count
        scores.masked_fill_(forbidden.repeat(groups, 1), float("-inf"))
    return scores


def fold_heads(x: Tensor, kv_heads: int) -> Tensor:
    """(B, H, S, ...) as (B, G, g * S, ...): query heads that share a key head become its rows."""
    batch, _, _, *rest = x.shape
    return x.reshape(batch, kv_heads, -1, *rest)


def unfold_heads(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `fold_heads`, in the shape of `like`."""
    return x.reshape(like.shape)
