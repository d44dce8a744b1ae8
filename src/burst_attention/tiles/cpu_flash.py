"""The CPU kernel: torch's flash operator, tile by tile, forward with lse and backward from (lse, delta).

Shapes: B batch, H query heads, G key heads, S query rows, K key rows, D head dim (values have the same).

The operator wants `out` in backward but uses only its row sums with dout. Where queries visit from another rank it is
given the projection of out on dout, dout * delta / |dout|^2: its row sum with dout is delta, and out itself need not
travel. That serves rows whose gradient comes through out alone; a gradient on lse takes the plain kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from burst_attention.geometry import Piece
from burst_attention.merge import State, merge_partial
from burst_attention.tiles.protocol import Gradients, TileKernel
from burst_attention.tiles.split import CAUSAL, MASKED, Tile, allowed_block, rows_without_keys, split_piece

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

FORWARD_ROWS, FORWARD_COLS = 2048, 8192
BACKWARD_ROWS, BACKWARD_COLS = 2048, 2048


class CpuFlashKernel(TileKernel):
    """torch's CPU flash attention for fp32 and bf16, with equal head dims of q, k and v."""

    name = "flash"

    def forward(self, pieces: Sequence[Piece], q: Tensor, k: Tensor, v: Tensor, state: State, scale: float) -> None:
        for piece in pieces:
            for tile in split_piece(piece, FORWARD_ROWS, FORWARD_COLS):
                out, lse = FLASH(
                    dense_rows(q[:, :, tile.queries]),
                    dense_rows(k[:, :, tile.keys]),
                    dense_rows(v[:, :, tile.keys]),
                    is_causal=tile.kind == CAUSAL,
                    attn_mask=additive_mask(tile, q),
                    scale=scale,
                )
                empty = rows_without_keys(tile, q.device)
                if empty is not None:
                    # The operator gives such rows lse 0 and an average of all values.
                    out = out.masked_fill(empty[:, None], 0.0)
                    lse = lse.masked_fill(empty, float("-inf"))
                merge_partial(state.rows(tile.q0, tile.q1), out, lse)

    def backward(
        self,
        pieces: Sequence[Piece],
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        out: Tensor | None,
        gradients: Gradients,
        scale: float,
    ) -> None:
        rows: tuple[int, int] | None = None
        for piece in pieces:
            for tile in split_piece(piece, BACKWARD_ROWS, BACKWARD_COLS):
                if rows != (tile.q0, tile.q1):
                    rows = tile.q0, tile.q1
                    dout_rows, q_rows = (dense_rows(x[:, :, tile.queries]) for x in (dout, q))
                    if out is None:
                        out_rows = projection(dout_rows, delta[:, :, tile.queries])
                    else:
                        out_rows = dense_rows(out[:, :, tile.queries])
                    lse_rows = lse[:, :, tile.queries]
                    # A row without keys has lse = -inf; +inf makes its weights 0 instead of NaN.
                    lse_rows = lse_rows.masked_fill(lse_rows == float("-inf"), float("inf")).contiguous()
                dq, dk, dv = FLASH_BACKWARD(
                    dout_rows,
                    q_rows,
                    dense_rows(k[:, :, tile.keys]),
                    dense_rows(v[:, :, tile.keys]),
                    out_rows,
                    lse_rows,
                    dropout_p=0.0,
                    is_causal=tile.kind == CAUSAL,
                    attn_mask=additive_mask(tile, q),
                    scale=scale,
                )
                for total, part, where in zip(gradients, (dq, dk, dv), (tile.queries, tile.keys, tile.keys), strict=True):
                    if total is not None:
                        total[:, :, where] += part


def dense_rows(x: Tensor) -> Tensor:
    """The same tensor with each head's rows next to each other: the operator is a third slower on scattered ones."""
    return x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous()


def additive_mask(tile: Tile, q: Tensor) -> Tensor | None:
    """(queries, keys) of 0 and -inf in q's dtype, which is the only form of mask that the operator takes."""
    if tile.kind != MASKED:
        return None
    allowed = allowed_block(tile, q.device)
    return torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill_(allowed.logical_not_(), float("-inf"))


def projection(dout: Tensor, delta: Tensor) -> Tensor:
    """(B, H, S, D) in dout's dtype whose row sums with dout are delta; 0 where dout is 0.

    Rows are scaled by their largest entry first, so that |dout|^2 cannot underflow.
    """
    precise = dout.to(delta.dtype)
    largest = precise.abs().amax(-1, keepdim=True)
    unit = precise / largest.masked_fill(largest == 0, 1.0)
    squares = unit.square().sum(-1, keepdim=True)
    ratio = delta.unsqueeze(-1) / (squares * largest)
    return (unit * ratio.masked_fill(largest == 0, 0.0)).to(dout.dtype)
