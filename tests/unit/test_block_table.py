"""The table that GPU kernels walk lists every allowed pair once, and masks only where pairs are missing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burst_attention.geometry import Piece, make_piece
from burst_attention.tiles.block_table import ENTRY_FIELDS, block_table

SIZE = 60
pieces = st.builds(
    make_piece,
    st.integers(0, 9), st.integers(1, 50), st.integers(0, 9), st.integers(1, 50),
    st.integers(-55, 30), st.integers(-30, 55),
).filter(lambda piece: piece is not None)  # fmt: skip


def dense(piece: Piece) -> torch.Tensor:
    """The piece's pairs, from its definition."""
    found = torch.zeros(SIZE, SIZE, dtype=torch.int64)
    for x in range(piece.q_count):
        for y in range(piece.k_count):
            found[piece.q_first + x, piece.k_first + y] = piece.low <= x - y < piece.high
    return found


@pytest.mark.parametrize("by_keys", [False, True])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    chosen=st.lists(pieces, min_size=1, max_size=3), row_block=st.sampled_from([4, 16]), col_block=st.integers(1, 20)
)
def test_pairs_are_visited_once(by_keys: bool, chosen: list[Piece], row_block: int, col_block: int) -> None:
    table = block_table(tuple(chosen), by_keys, row_block, col_block, torch.device("cpu"))
    assert table.entries.shape[1] == ENTRY_FIELDS
    visited = torch.zeros(SIZE + row_block, SIZE + col_block, dtype=torch.int64)
    blocks = table.blocks.tolist()
    assert len({block for block, _, _ in blocks}) == len(blocks), "a block of rows has one line"
    for block, first, last in blocks:
        assert first < last
        rows = torch.arange(block * row_block, (block + 1) * row_block)
        for entry in table.entries[first:last].tolist():
            some_first, every_first, every_last, some_last, *_ = entry
            assert some_first <= every_first <= every_last <= some_last
            assert (every_last - every_first) % col_block == 0
            cols = torch.arange(some_first, some_last)
            allowed = by_position(entry, rows, cols)
            middle = (cols >= every_first) & (cols < every_last)
            assert allowed[:, middle].all(), "what is not masked exists for every row of the block"
            visited[rows[:, None], cols[None, :]] += allowed
    expected = sum((dense(piece) for piece in chosen), torch.zeros(SIZE, SIZE, dtype=torch.int64))
    visited = visited[:SIZE, :SIZE]
    assert torch.equal(visited.T if by_keys else visited, expected)


def by_position(entry: list[int], rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """What the kernels compute for a masked block."""
    row0, count, col0, low, high = entry[4:]
    x, y = rows - row0, cols - col0
    distance = x[:, None] - y[None, :]
    return (distance >= low) & (distance < high) & ((x >= 0) & (x < count))[:, None]


def test_the_heaviest_blocks_come_first() -> None:
    causal = make_piece(0, 60, 0, 60, 0, 60)
    assert causal is not None
    table = block_table((causal,), False, 16, 16, torch.device("cpu"))
    assert table.blocks[:, 0].tolist() == [3, 2, 1, 0]
