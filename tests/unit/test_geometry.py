"""Pieces, bands and rows hold, cut, join and count exactly the pairs of their dense tables."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burst_attention.geometry import (
    Band,
    Piece,
    Run,
    contains_rows,
    count_rows,
    cut,
    full_piece,
    intersect,
    intersect_rows,
    join_pieces,
    make_piece,
    row_offset,
    subtract,
    subtract_rows,
    tighten,
    unite_rows,
)
from tests.unit.oracle import Dense, piece_table, row_list


def band_table(band: Band | None, size: int) -> Dense:
    """The pairs of a band among the first positions."""
    i, j = np.indices((size, size))
    if band is None:
        return np.zeros((size, size), bool)
    inside = (band.i0 <= i) & (i < band.i1) & (band.j0 <= j) & (j < band.j1)
    return inside & (band.low <= i - j) & (i - j < band.high)


class Rectangle(NamedTuple):
    """The arguments of a piece before it is shrunk."""

    q_first: int
    q_count: int
    k_first: int
    k_count: int
    low: int
    high: int


SPAN = 14
RECTANGLES = st.builds(
    Rectangle,
    st.integers(0, 4),
    st.integers(0, 9),
    st.integers(0, 4),
    st.integers(0, 9),
    st.integers(-30, 30),
    st.integers(-30, 40),
)


@settings(deadline=None, derandomize=True, max_examples=250)
@given(RECTANGLES)
def test_making_a_piece_keeps_its_pairs_and_sheds_empty_rows(rectangle: Rectangle) -> None:
    expected = piece_table(Piece(*rectangle), SPAN, SPAN)
    piece = make_piece(*rectangle)
    np.testing.assert_array_equal(piece_table(piece, SPAN, SPAN), expected)
    assert (piece is None) == (not expected.any())
    if piece is None:
        return
    assert piece.pairs == expected.sum()
    inside = piece_table(piece, SPAN, SPAN)[
        piece.q_first : piece.q_first + piece.q_count, piece.k_first : piece.k_first + piece.k_count
    ]
    assert piece.is_full == inside.all()
    assert inside.any(1).all() and inside.any(0).all()
    for x, row in enumerate(inside):
        first, last = piece.key_range(x)
        assert [first <= y < last for y in range(piece.k_count)] == row.tolist()


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(-12, 12), st.integers(-12, 12))
def test_kernel_flags_of_a_piece_mean_what_they_say(rows: int, cols: int, low: int, high: int) -> None:
    piece = make_piece(0, rows, 0, cols, low, high)
    if piece is None:
        return
    x, y = np.indices((piece.q_count, piece.k_count))
    inside = piece_table(piece, SPAN, SPAN)[piece.q_first :, piece.k_first :][: piece.q_count, : piece.k_count]
    if piece.is_causal:
        np.testing.assert_array_equal(inside, y <= x)
    if piece.is_lower:
        np.testing.assert_array_equal(inside, x - y >= piece.low)
    assert piece.is_lower == bool((inside == (x - y >= piece.low)).all())


@settings(deadline=None, derandomize=True, max_examples=250)
@given(RECTANGLES, st.tuples(*[st.integers(0, SPAN)] * 4))
def test_crop_keeps_the_pairs_of_its_window(rectangle: Rectangle, edges: tuple[int, int, int, int]) -> None:
    piece = make_piece(*rectangle)
    if piece is None:
        return
    q0, q1, k0, k1 = edges
    expected = np.zeros((SPAN, SPAN), bool)
    expected[q0:q1, k0:k1] = piece_table(piece, SPAN, SPAN)[q0:q1, k0:k1]
    part = piece.crop(q0, q1, k0, k1)
    np.testing.assert_array_equal(piece_table(part, SPAN, SPAN), expected)
    assert (part is None) == (not expected.any())
    assert part is None or part.pairs == expected.sum()


@pytest.mark.parametrize(
    ("piece", "pairs"),
    [
        (full_piece(0, 4, 0, 6), 24),
        (Piece(0, 5, 0, 5, 0, 5), 15),
        (Piece(0, 5, 0, 5, 0, 2), 9),
        (Piece(0, 4, 0, 4, -2, 4), 15),
        (Piece(0, 10**6, 0, 10**6, 0, 10**6), 10**6 * (10**6 + 1) // 2),
    ],
    ids=["full", "causal", "band", "below-a-diagonal", "large"],
)
def test_pairs_of_known_pieces(piece: Piece, pairs: int) -> None:
    assert piece.pairs == pairs


@pytest.mark.parametrize("stride", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 10])
def test_a_run_by_remainder_is_the_same_positions_a_stride_apart(length: int, stride: int) -> None:
    parts = Run(4, 1, length).by_remainder(stride)
    held = [[part.start + part.stride * at for at in range(part.length)] for part in parts]
    assert held == [list(range(4 + first, 4 + length, stride)) for first in range(min(stride, length))]
    assert {part.stride for part in parts} == {stride}
    assert Run(4, stride, length).by_remainder(stride) == (Run(4, stride, length),)


BAND_SIZE = 12


@st.composite
def bands(draw: st.DrawFn) -> Band:
    """A band of the first positions that allows at least one pair; bounds are often far out."""
    ranges = []
    for _ in range(2):
        first = draw(st.integers(0, BAND_SIZE - 1))
        ranges += [first, draw(st.one_of(st.integers(first + 1, BAND_SIZE), st.just(1 << 62)))]
    low = draw(st.one_of(st.just(-(1 << 62)), st.integers(-BAND_SIZE, BAND_SIZE - 1)))
    high = draw(st.one_of(st.just(1 << 62), st.integers(max(low, -BAND_SIZE) + 1, BAND_SIZE + 1)))
    return Band(*ranges, low, high)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(bands(), bands())
def test_intersecting_bands_keeps_their_common_pairs(a: Band, b: Band) -> None:
    both = intersect(a, b)
    np.testing.assert_array_equal(band_table(both, BAND_SIZE), band_table(a, BAND_SIZE) & band_table(b, BAND_SIZE))


@settings(deadline=None, derandomize=True, max_examples=150)
@given(bands(), bands())
def test_subtracting_a_band_leaves_disjoint_bands_of_the_rest(a: Band, b: Band) -> None:
    counts = sum((band_table(part, BAND_SIZE).astype(int) for part in subtract(a, b)), np.zeros(1, int))
    rest = band_table(a, BAND_SIZE) & ~band_table(b, BAND_SIZE)
    np.testing.assert_array_equal(np.broadcast_to(counts, rest.shape), rest.astype(int))


@settings(deadline=None, derandomize=True, max_examples=150)
@given(bands())
def test_tightened_bands_have_no_empty_row_column_or_diagonal(band: Band) -> None:
    band = band._replace(i1=min(band.i1, BAND_SIZE), j1=min(band.j1, BAND_SIZE))
    table, tight = band_table(band, BAND_SIZE), tighten(band)
    np.testing.assert_array_equal(band_table(tight, BAND_SIZE), table)
    assert (tight is None) == (not table.any())
    if tight is not None:
        i, j = np.nonzero(table)
        exact = Band(min(i), max(i) + 1, min(j), max(j) + 1, min(i - j), max(i - j) + 1)
        assert tight == tuple(map(int, exact))


@settings(deadline=None, derandomize=True, max_examples=150)
@given(bands(), st.integers(0, 6), st.integers(1, 6), st.integers(0, 6), st.integers(1, 6), st.sampled_from([1, 2, 3]))
def test_cutting_a_band_along_two_runs_finds_its_pairs_there(
    band: Band, q_start: int, q_length: int, k_start: int, k_length: int, stride: int
) -> None:
    q_run, k_run = Run(q_start, stride, q_length), Run(k_start, stride, k_length)
    i = q_run.start + q_run.stride * np.arange(q_run.length)
    j = k_run.start + k_run.stride * np.arange(k_run.length)
    expected = np.zeros((SPAN, SPAN), bool)
    expected[2 : 2 + q_run.length, 5 : 5 + k_run.length] = band_table(band, 30)[np.ix_(i, j)]
    piece = cut(band, q_run, 2, k_run, 5)
    np.testing.assert_array_equal(piece_table(piece, SPAN, SPAN), expected)
    assert (piece is None) == (not expected.any())


def test_a_cut_causal_band_is_the_piece_of_its_picture() -> None:
    assert cut(Band(0, 99, 0, 99, low=0), Run(4, 1, 4), 0, Run(2, 1, 4), 0) == Piece(0, 4, 0, 4, -2, 4)


@st.composite
def tilings(draw: st.DrawFn) -> list[Piece]:
    """Disjoint pieces: a grid with full, banded and empty cells."""
    q_edges = sorted(draw(st.sets(st.integers(0, SPAN), min_size=2, max_size=4)))
    k_edges = sorted(draw(st.sets(st.integers(0, SPAN), min_size=2, max_size=4)))
    pieces = []
    for q0, q1 in pairwise(q_edges):
        for k0, k1 in pairwise(k_edges):
            kind = draw(st.sampled_from(["full", "full", "causal", "band", "empty"]))
            rows, cols = q1 - q0, k1 - k0
            if kind == "full":
                pieces.append(full_piece(q0, rows, k0, cols))
            elif kind == "causal":
                pieces.append(make_piece(q0, rows, k0, cols, k0 - q0, 99))
            elif kind == "band":
                low = draw(st.integers(-5, 5))
                pieces.append(make_piece(q0, rows, k0, cols, low, low + draw(st.integers(1, 6))))
    return [piece for piece in draw(st.permutations(pieces)) if piece is not None]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(tilings())
def test_joining_pieces_keeps_each_pair_once(pieces: list[Piece]) -> None:
    joined = join_pieces(pieces)
    before = sum((piece_table(piece, SPAN, SPAN) for piece in pieces), np.zeros((SPAN, SPAN), int))
    after = sum((piece_table(piece, SPAN, SPAN) for piece in joined), np.zeros((SPAN, SPAN), int))
    np.testing.assert_array_equal(after, before)
    assert len(joined) <= len(pieces)


@pytest.mark.parametrize(
    ("pieces", "joined"),
    [
        ([full_piece(0, 2, 0, 3), full_piece(2, 4, 0, 3)], [full_piece(0, 6, 0, 3)]),
        ([full_piece(0, 2, 3, 3), full_piece(0, 2, 0, 3)], [full_piece(0, 2, 0, 6)]),
        ([full_piece(q, 2, k, 3) for q in (0, 2) for k in (0, 3)], [full_piece(0, 4, 0, 6)]),
        ([full_piece(0, 2, 0, 3), full_piece(3, 2, 0, 3)], [full_piece(0, 2, 0, 3), full_piece(3, 2, 0, 3)]),
        ([Piece(0, 3, 0, 3, 0, 3), full_piece(3, 2, 0, 3), Piece(3, 2, 3, 2, 0, 2)], [Piece(0, 5, 0, 5, 0, 5)]),
        ([Piece(0, 3, 0, 3, 0, 3), Piece(3, 2, 3, 2, 0, 2)], [Piece(0, 3, 0, 3, 0, 3), Piece(3, 2, 3, 2, 0, 2)]),
        ([], []),
    ],
    ids=["rows", "columns", "grid", "apart", "triangle", "two-triangles", "none"],
)
def test_known_joins(pieces: list[Piece], joined: list[Piece]) -> None:
    assert list(join_pieces(pieces)) == joined


@settings(deadline=None, derandomize=True, max_examples=150)
@given(*[st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=5)] * 2)
def test_rows_unite_count_and_contain_as_sets_do(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    outer, inner = unite_rows(a), unite_rows(b)
    rows = {row for first, last in a for row in range(first, last)}
    assert row_list(outer) == sorted(rows)
    assert all(earlier[1] < later[0] for earlier, later in pairwise(outer))
    assert count_rows(outer) == len(rows)
    assert contains_rows(outer, inner) == (set(row_list(inner)) <= rows)
    assert row_list(intersect_rows(outer, inner)) == sorted(rows & set(row_list(inner)))
    assert row_list(subtract_rows(outer, inner)) == sorted(rows - set(row_list(inner)))
    assert [row_offset(outer, row) for row in sorted(rows)] == list(range(len(rows)))


def test_many_ranges_are_subtracted_as_few_are() -> None:
    """As short documents of a striped layout make them."""
    all_of_them = tuple((at, at + 3) for at in range(0, 40_000, 5))
    first_rows = tuple((at, at + 1) for at in range(0, 40_000, 5))
    assert subtract_rows(all_of_them, first_rows) == tuple((at + 1, at + 3) for at in range(0, 40_000, 5))
