"""The CPU kernel: torch's flash operator, tile by tile, forward with lse and backward from (lse, delta).

Shapes: B batch, H query heads, G key heads, S query rows, K key rows, D head dim (values have the same).

The operator wants `out` in backward but uses only its row sums with dout. Where queries visit from another rank it is
given a stand-in with the same row sums, made from dout and delta, so that out itself need not travel. That serves rows
whose gradient comes through out alone; a gradient on lse takes the plain kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from burst_attention.geometry import Piece
from burst_attention.merge import State, merge_partial
from burst_attention.schedule import Bundle, PhasePlan, Round, Shapes
from burst_attention.tiles.plain import PlainKernel
from burst_attention.tiles.protocol import BackwardInputs, Gradients, TileKernel
from burst_attention.tiles.split import CAUSAL, MASKED, Tile, allowed_block, rows_without_keys, split_piece

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

FORWARD_ROWS, FORWARD_COLS = 2048, 8192
BACKWARD_ROWS, BACKWARD_COLS = 2048, 2048


STAND_IN_TERMS = 3
"""Entries of the stand-in for out: each gives bf16's 8 bits of delta, three give fp32's 24."""

MASK_BUILDING = 7
"""Bytes per element while a mask is built: a distance and three flags."""


PLAIN = PlainKernel()


class CpuFlashKernel(TileKernel):
    """torch's CPU flash attention for fp32 and bf16, with equal head dims of q, k and v."""

    name = "flash"

    def workspace_bytes(self, phase: PhasePlan, step: Round, visiting: Bundle | None) -> int:
        moved = phase.direction if visiting else "nothing"
        if phase.phase == "forward":
            tiles = [tile for piece in step.pieces for tile in split_piece(piece, FORWARD_ROWS, FORWARD_COLS)]
            return max(_forward_bytes(tile, phase.shapes, moved) for tile in tiles)
        tiles = [tile for piece in step.pieces for tile in split_piece(piece, BACKWARD_ROWS, BACKWARD_COLS)]
        return max(_backward_bytes(tile, phase.shapes, moved) for tile in tiles)

    def forward(self, pieces: Sequence[Piece], q: Tensor, k: Tensor, v: Tensor, state: State, scale: float) -> None:
        for piece in pieces:
            for tile in split_piece(piece, FORWARD_ROWS, FORWARD_COLS):
                self._forward_tile(tile, q, k, v, state.rows(tile.q0, tile.q1), scale)

    def _forward_tile(self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, state: State, scale: float) -> None:
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
            out.masked_fill_(empty[:, None], 0.0)
            lse.masked_fill_(empty, float("-inf"))
        merge_partial(state, out, lse)

    def backward(self, pieces: Sequence[Piece], x: BackwardInputs, gradients: Gradients, scale: float) -> None:
        lone = [piece for piece in pieces if piece.pairs == 1]
        if lone:
            # A lone key's dq and dk are what is left of two sums that cancel, and on some processors the operator takes
            # them in different orders. Its weights, for dv, round as its forward's do.
            PLAIN.backward(lone, x, gradients._replace(dv=None), scale)
            self._backward(lone, x, gradients._replace(dq=None, dk=None), scale)
        self._backward([piece for piece in pieces if piece.pairs > 1], x, gradients, scale)

    def _backward(self, pieces: Sequence[Piece], x: BackwardInputs, gradients: Gradients, scale: float) -> None:
        tiles = (tile for piece in pieces for tile in split_piece(piece, BACKWARD_ROWS, BACKWARD_COLS))
        dtype = backward_dtype(x.q.dtype)
        for _, neighbours in groupby(tiles, key=lambda tile: (tile.q0, tile.q1)):
            first, *rest = neighbours
            rows = _prepare_rows(first.queries, x, dtype)
            for tile in (first, *rest):
                self._backward_tile(tile, rows, x.k, x.v, gradients, scale)
            del rows

    def _backward_tile(
        self, tile: Tile, rows: QueryRows, k: Tensor, v: Tensor, gradients: Gradients, scale: float
    ) -> None:
        parts = FLASH_BACKWARD(
            rows.dout,
            rows.q,
            dense_rows(k[:, :, tile.keys], rows.q.dtype),
            dense_rows(v[:, :, tile.keys], rows.q.dtype),
            rows.out,
            rows.lse,
            dropout_p=0.0,
            is_causal=tile.kind == CAUSAL,
            attn_mask=additive_mask(tile, rows.q),
            scale=scale,
        )
        for total, part, first in zip(gradients, parts, (tile.q0, tile.k0, tile.k0), strict=True):
            if total is not None:
                total.add(first, part)


class QueryRows(NamedTuple):
    """The query side of a row of tiles, as the operator's backward wants it."""

    dout: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor


def _prepare_rows(queries: slice, x: BackwardInputs, dtype: torch.dtype) -> QueryRows:
    dout = dense_rows(x.dout[:, :, queries], dtype)
    out = stand_in_for_out(dout, x.delta[:, :, queries]) if x.out is None else dense_rows(x.out[:, :, queries], dtype)
    # A row without keys has lse = -inf; +inf makes its weights 0 instead of NaN.
    lse = x.lse[:, :, queries]
    lse = lse.masked_fill(lse == float("-inf"), float("inf")).contiguous()
    return QueryRows(dout, dense_rows(x.q[:, :, queries], dtype), out, lse)


@lru_cache(maxsize=1)
def multiplies_bf16() -> bool:
    """Whether this processor has instructions for bf16, so that the operator's backward is not slow in it."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    found = ask() if ask is not None else {}
    return found.get("architecture") != "x86_64" or any(found.get(name) for name in ("avx512_bf16", "amx_bf16"))


def backward_dtype(dtype: torch.dtype) -> torch.dtype:
    """What backward computes in: without such instructions bf16 takes over twice as long as fp32 with its casts."""
    return torch.float32 if dtype == torch.bfloat16 and not multiplies_bf16() else dtype


def _forward_bytes(tile: Tile, shapes: Shapes, moved: str) -> int:
    """Most bytes at once while one tile is computed: inputs made dense, mask and output, then the merge's cast."""
    query, key, mask, cast = _tile_bytes(tile, shapes)
    dense = {"kv": 2 * key, "query": query}.get(moved, 0)
    return max(
        dense + MASK_BUILDING * mask, dense + mask * shapes.dtype.itemsize + query + _score_bytes(tile), query + cast
    )


def _backward_bytes(tile: Tile, shapes: Shapes, moved: str) -> int:
    """The same for backward, where the operator also makes a copy of its queries and a second block of scores."""
    dtype = backward_dtype(shapes.dtype)
    # Another dtype is a copy of everything.
    moved = moved if dtype == shapes.dtype else "all"
    query, key, mask, cast = _tile_bytes(tile, replace(shapes, dtype=dtype))
    kept = 3 * query if moved in ("query", "all") else 0
    preparing = query + 2 * max(query, cast) if moved in ("query", "all") else 0
    dense = 2 * key if moved in ("kv", "all") else 0
    results = query + 2 * key
    inside = mask * dtype.itemsize + results + query + 2 * _score_bytes(tile)
    return max(preparing, kept + max(dense + MASK_BUILDING * mask, dense + inside, results + cast))


def _score_bytes(tile: Tile) -> int:
    """A block of scores inside the operator, in one thread: it takes 32 to 256 rows at a time, and up to 512 keys."""
    rows = tile.q1 - tile.q0
    height = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return min(rows, height) * min(tile.k1 - tile.k0, 512) * 4


def _tile_bytes(tile: Tile, shapes: Shapes) -> tuple[int, int, int, int]:
    """Bytes of a tile's rows on either side, elements of its mask, and bytes of a cast to fp32."""
    size = shapes.dtype.itemsize
    query = (tile.q1 - tile.q0) * shapes.batch * shapes.heads * shapes.head_dim * size
    key = (tile.k1 - tile.k0) * shapes.batch * shapes.kv_heads * shapes.head_dim * size
    mask = (tile.q1 - tile.q0) * (tile.k1 - tile.k0) if tile.kind == MASKED else 0
    return query, key, mask, 0 if size == 4 else max(query, key) * 4 // size


def dense_rows(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The same tensor with each head's rows next to each other: the operator is slower on scattered ones."""
    if dtype not in (None, x.dtype):
        return x.to(dtype, memory_format=torch.contiguous_format)
    return x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous()


def additive_mask(tile: Tile, q: Tensor) -> Tensor | None:
    """(queries, keys) of 0 and -inf in q's dtype, which is the only form of mask that the operator takes."""
    if tile.kind != MASKED:
        return None
    allowed = allowed_block(tile, q.device)
    return torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill_(
        allowed.logical_not_(), float("-inf")
    )


def stand_in_for_out(dout: Tensor, delta: Tensor) -> Tensor:
    """(B, H, S, D) in dout's dtype whose row sums with dout are delta; 0 where dout is 0.

    A few entries are enough: delta / dout at the largest |dout|, and what rounding lost at the next largest ones. So
    delta keeps fp32's precision in bf16, which the projection of out on dout, rounded everywhere, does not.

    Example: dout = [4, 2, 0], delta = 6 gives [1.5, 0, 0].
    """
    precise = dout.to(delta.dtype)
    places = precise.abs().topk(min(STAND_IN_TERMS, dout.shape[-1]), -1).indices
    rest, terms = delta, []
    for value in precise.gather(-1, places).unbind(-1):
        terms.append((rest / value).masked_fill_(value == 0, 0.0).to(dout.dtype))
        rest = rest - terms[-1].to(delta.dtype) * value
    return torch.zeros_like(dout).scatter_(-1, places, torch.stack(terms, -1))
