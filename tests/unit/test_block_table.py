"""The table that GPU kernels walk lists every allowed pair once, and masks only where pairs are missing."""

from __future__ import annotations

import heapq
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burst_attention.geometry import Piece, full_piece, make_piece
from burst_attention.tiles import block_table as block_tables
from burst_attention.tiles.block_table import ENTRY_FIELDS, BlockTable, block_table

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


def begun(table: BlockTable, pairs: int, walked: tuple[torch.Tensor, ...]) -> list[tuple[int, int]]:
    """(head, steps of a block) of every program, in the order that a chip begins them."""
    order = []
    for (together, blocks, groups), lines in table.launches(pairs, walked):
        assert blocks == len(lines) <= block_tables.MOST_BLOCKS
        for group, line, head in itertools.product(range(groups), lines.tolist(), range(together)):
            steps = sum(entry[3] - entry[0] for entry in table.entries[line[1] : line[2]].tolist())
            order.append((group * together + head, steps))
    return order


@pytest.mark.parametrize(
    ("pairs", "most", "cache", "together"), [(6, 99, 99, 6), (6, 99, 4, 3), (7, 99, 4, 1), (6, 2, 99, 6)]
)
def test_heads_take_turns_where_blocks_differ(
    monkeypatch: pytest.MonkeyPatch, pairs: int, most: int, cache: int, together: int
) -> None:
    """As many as fit the cache and divide all; every block of every head is begun once, however many launches."""
    walked = (torch.zeros(1, pairs, 10, 10),)
    monkeypatch.setattr(block_tables, "INTERPRETED", cache * 400)
    monkeypatch.setattr(block_tables, "MOST_BLOCKS", most)
    block_tables._cache_bytes.cache_clear()
    triangle = make_piece(0, 60, 0, 60, 0, 60)
    assert triangle is not None
    table = block_table((triangle,), False, 16, 16, torch.device("cpu"))
    found = begun(table, pairs, walked)
    block_tables._cache_bytes.cache_clear()
    steps = [60, 48, 32, 16]
    assert sorted(found) == sorted(itertools.product(range(pairs), steps))
    if most > len(steps):
        groups = itertools.product(range(0, pairs, together), steps, range(together))
        assert found == [(group + head, step) for group, step, head in groups]


@pytest.mark.parametrize(
    ("rows", "heads", "group", "one_by_one", "most"),
    [(4096, 16, 1, 82, 64), (8192, 32, 1, 534, 505), (8192, 8, 4, 624, 508), (4096, 8, 4, 204, 128)],
)
def test_no_core_has_much_more_of_a_triangle_than_its_share(
    monkeypatch: pytest.MonkeyPatch, rows: int, heads: int, group: int, one_by_one: int, most: int
) -> None:
    """Blocks of 128 x 128 on 132 cores, backward in 16 bits: a share is 64, 504.2 twice, and 128."""
    table = block_table((Piece(0, rows, 0, rows, 0, rows),), True, 128, 128, torch.device("cpu"))
    walked = (torch.empty(1, heads * group, rows, 512, dtype=torch.bfloat16, device="meta"),)
    assert slowest_core(begun(table, heads, walked), group) == most
    assert slowest_core(begun(table._replace(uneven=False), heads, walked), group) == one_by_one


@pytest.mark.parametrize(
    ("rows", "heads", "group", "parts"),
    [
        (4096, 8, 4, 1),
        (4096, 4, 4, 2),
        (8192, 4, 4, 1),
        (2048, 8, 4, 2),
        (2048, 4, 4, 4),
        (1024, 2, 16, 4),
        (4096, 4, 3, 3),
    ],
)
def test_query_heads_are_cut_where_the_heaviest_program_had_more_than_its_share(
    rows: int, heads: int, group: int, parts: int
) -> None:
    """Of a triangle and key heads of a group. In as few parts as will do, in no more than four."""
    table = block_table((Piece(0, rows, 0, rows, 0, rows),), True, 128, 64, torch.device("cpu"))
    assert block_tables.parts_of_heads(table, heads, group, torch.device("cpu")) == parts


def slowest_core(programs: list[tuple[int, int]], group: int) -> int:
    busy = [0] * 132
    for _, steps in programs:
        heapq.heappush(busy, heapq.heappop(busy) + steps // 128 * group)
    return max(busy)


def test_blocks_that_are_alike_go_head_by_head() -> None:
    """The order in which full pieces were measured, and windows, of which few blocks are lighter."""
    for piece in (full_piece(0, 64, 0, 64), Piece(0, 256, 0, 256, 0, 64)):
        table = block_table((piece,), False, 16, 16, torch.device("cpu"))
        ((grid, _),) = table.launches(6, (torch.zeros(1, 6, 64, 16),))
        assert grid == (1, piece.q_count // 16, 6)
        ((grid, _),) = table.launches(70000, (torch.zeros(1, 70000, 1, 1),))
        assert grid == (2, piece.q_count // 16, 35000), "a grid has no room for so many groups"
