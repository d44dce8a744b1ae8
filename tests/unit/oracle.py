"""Masks, pieces and rows are written down here in full, apart from the package, for tests to compare with."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from burst_attention import Mask, blocks, causal, documents, full, prefix, window
from burst_attention.geometry import Piece, Rows

Dense = NDArray[np.bool_]
MaskCase = tuple[Mask, Dense]
"""A mask, and the pairs it must allow between the first positions."""


@st.composite
def simple_masks(draw: st.DrawFn, size: int) -> MaskCase:
    """A mask that covers `size` positions."""
    i, j = np.indices((size, size))
    kind = draw(st.sampled_from(["full", "causal", "window", "documents", "prefix", "blocks"]))
    if kind == "causal":
        return causal(), j <= i
    if kind == "window":
        width = draw(st.integers(1, size + 2))
        return window(width), np.abs(i - j) < width
    if kind == "documents":
        lengths = draw(st.lists(st.integers(1, max(size // 2, 1)), max_size=6))
        lengths.append(max(size - sum(lengths), 1))
        owner = np.repeat(np.arange(len(lengths)), lengths)
        return documents(lengths), owner[i] == owner[j]
    if kind == "prefix":
        length = draw(st.integers(0, size + 2))
        return prefix(length), j < length
    if kind == "blocks":
        smallest = max(size // 6, 1)
        block = draw(st.integers(smallest, max(3 * size // 8, 1)) | st.integers(smallest, size))
        count = -(-size // block)
        cells = np.array(draw(st.lists(st.booleans(), min_size=count * count, max_size=count * count)))
        matrix = cells.reshape(count, count)
        return blocks(matrix, block), matrix[i // block, j // block]
    return full(), np.ones((size, size), bool)


def compose(left: MaskCase, right: MaskCase, both: bool) -> MaskCase:
    if both:
        return left[0] & right[0], left[1] & right[1]
    return left[0] | right[0], left[1] | right[1]


def masks(size: int) -> st.SearchStrategy[MaskCase]:
    """Masks that cover `size` positions, alone and composed in any nesting."""
    return st.recursive(simple_masks(size), lambda inner: st.builds(compose, inner, inner, st.booleans()), max_leaves=5)


def piece_table(piece: Piece | None, rows: int, cols: int) -> Dense:
    """The pairs of a piece as a table of local rows, straight from its definition."""
    table = np.zeros((rows, cols), bool)
    if piece is not None:
        x, y = np.indices((piece.q_count, piece.k_count))
        inside = (piece.low <= x - y) & (x - y < piece.high)
        table[piece.q_first : piece.q_first + piece.q_count, piece.k_first : piece.k_first + piece.k_count] = inside
    return table


def row_list(rows: Rows) -> list[int]:
    return [row for first, last in rows for row in range(first, last)]
