"""Cutting a piece into tiles of bounded size that a simple kernel can compute: full, causal, or masked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from burst_attention.geometry import Piece, full_piece

FULL, CAUSAL, MASKED = "full", "causal", "masked"

MAX_BLOCK = 1024
"""No mask or score block has more rows or columns than this."""


class Tile(NamedTuple):
    """Local query rows [q0, q1) against local key rows [k0, k1); `piece` says which pairs of a masked one exist."""

    q0: int
    q1: int
    k0: int
    k1: int
    kind: str
    piece: Piece

    @property
    def queries(self) -> slice:
        return slice(self.q0, self.q1)

    @property
    def keys(self) -> slice:
        return slice(self.k0, self.k1)


def split_piece(piece: Piece, rows: int, cols: int, masked: int = MAX_BLOCK) -> Iterator[Tile]:
    """Tiles that cover the piece's allowed pairs once: full and causal ones up to rows x cols, masked ones smaller.

    A block of query rows sees one range of keys: in the middle those that all its rows see (full), at either end
    those that some do (causal where the shape fits, else masked).

        window, one block of rows:      . . m # # # m . .
                                        . . . m # # # m .
    """
    height = rows if piece.is_lower else min(rows, masked)
    for x0 in range(0, piece.q_count, height):
        x1 = min(x0 + height, piece.q_count)
        yield from _split_block_row(piece, x0, x1, cols, masked)


def _split_block_row(piece: Piece, x0: int, x1: int, cols: int, masked: int) -> Iterator[Tile]:
    some = piece.key_range(x0)[0], piece.key_range(x1 - 1)[1]
    every = piece.key_range(x1 - 1)[0], piece.key_range(x0)[1]
    if piece.is_lower and not piece.is_full:
        # Leave row x0's last key to the end part: that makes it exactly a causal triangle.
        every = every[0], min(every[1], max(x0 - piece.low, 0))
    if every[0] >= every[1]:
        every = some[0], some[0]
    yield from _tiles(piece, x0, x1, some[0], every[0], MASKED, masked)
    yield from _tiles(piece, x0, x1, every[0], every[1], FULL, cols)
    triangle = piece.is_lower and every[1] == x0 - piece.low and some[1] - every[1] <= x1 - x0
    if triangle and some[1] > every[1]:
        yield _tile(piece, x0, x1, every[1], some[1], CAUSAL)
    else:
        yield from _tiles(piece, x0, x1, every[1], some[1], MASKED, masked)


def _tiles(piece: Piece, x0: int, x1: int, y0: int, y1: int, kind: str, cols: int) -> Iterator[Tile]:
    height = x1 - x0 if kind == FULL else min(x1 - x0, cols)
    for left in range(y0, y1, cols):
        for top in range(x0, x1, height):
            tile = _tile(piece, top, min(top + height, x1), left, min(left + cols, y1), kind)
            if tile.kind == FULL or tile.piece.pairs:
                yield tile


def _tile(piece: Piece, x0: int, x1: int, y0: int, y1: int, kind: str) -> Tile:
    shift = x0 - y0
    part = Piece(piece.q_first + x0, x1 - x0, piece.k_first + y0, y1 - y0, piece.low - shift, piece.high - shift)
    kind = FULL if part.is_full else kind
    return Tile(part.q_first, part.q_first + part.q_count, part.k_first, part.k_first + part.k_count, kind, part)


def allowed_block(tile: Tile, device: torch.device) -> Tensor:
    """(queries, keys) bool: the pairs of a tile that exist."""
    x = torch.arange(tile.piece.q_count, device=device, dtype=torch.int32)
    y = torch.arange(tile.piece.k_count, device=device, dtype=torch.int32)
    distance = x[:, None] - y[None, :]
    return (distance >= tile.piece.low) & (distance < tile.piece.high)


def rows_without_keys(tile: Tile, device: torch.device) -> Tensor | None:
    """(queries,) bool: rows of a masked tile that see none of its keys; None when every row sees one."""
    if tile.kind != MASKED:
        return None
    x = torch.arange(tile.piece.q_count, device=device)
    first, last = x - tile.piece.high + 1, x - tile.piece.low + 1
    empty = last.clamp(max=tile.piece.k_count) <= first.clamp(min=0)
    return empty if bool(empty.any()) else None


def rectangle_and_triangle(piece: Piece) -> list[Piece]:
    """A piece below a diagonal, as a cut through a causal one leaves it, in two parts that vendor kernels serve."""
    if piece.is_full or not piece.is_lower:
        return [piece]
    tiles = split_piece(piece, piece.q_count, piece.k_count)
    return [
        full_piece(t.q0, t.q1 - t.q0, t.k0, t.k1 - t.k0) if t.kind == FULL else t.piece._replace(low=0) for t in tiles
    ]
