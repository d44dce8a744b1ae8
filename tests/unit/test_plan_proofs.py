"""Plans cover exactly the allowed pairs, move only what is needed, and the simulator that proves them can fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from burst_attention import Layout, Mask, Plan, blocks, causal, documents, full, plan, prefix, window
from burst_attention.geometry import (
    Band,
    Piece,
    Rows,
    Run,
    contains_rows,
    count_rows,
    cut,
    floor_sum,
    full_piece,
    intersect,
    join_pieces,
    make_piece,
    row_offset,
    subtract,
    tighten,
    unite_rows,
)
from burst_attention.schedule import PhasePlan, PlanError, Round, Transfer, simulate

Dense = NDArray[np.bool_]

DIRECTIONS = ("kv", "query")
PHASES = ("forward", "backward")


# Dense tables of small pieces and bands.


def piece_table(piece: Piece | None, rows: int, cols: int) -> Dense:
    """The pairs of a piece as a table of local rows, straight from its definition."""
    table = np.zeros((rows, cols), bool)
    if piece is not None:
        x, y = np.indices((piece.q_count, piece.k_count))
        difference = piece.q_stride * x - piece.k_stride * y
        inside = (piece.low <= difference) & (difference < piece.high)
        table[piece.q_first : piece.q_first + piece.q_count, piece.k_first : piece.k_first + piece.k_count] = inside
    return table


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
    q_stride: int
    k_stride: int


SPAN = 14
STRIDES = st.sampled_from([1, 1, 1, 2, 3, 5])
RECTANGLES = st.builds(
    Rectangle,
    st.integers(0, 4),
    st.integers(0, 9),
    st.integers(0, 4),
    st.integers(0, 9),
    st.integers(-30, 30),
    st.integers(-30, 40),
    STRIDES,
    STRIDES,
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
    if piece.q_stride == piece.k_stride:
        assert piece.q_stride == 1, "equal strides are divided out"
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
        (Piece(0, 4, 0, 10, -27, 10, 3, 3), 40),
        (Piece(0, 3, 0, 7, 0, 13, 6, 2), 12),
        (Piece(0, 10**6, 0, 10**6, 0, 10**6), 10**6 * (10**6 + 1) // 2),
    ],
    ids=["full", "causal", "band", "below-a-diagonal", "strided-full", "strided-causal", "large"],
)
def test_pairs_of_known_pieces(piece: Piece, pairs: int) -> None:
    assert piece.pairs == pairs


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.integers(-2, 20), st.integers(0, 12), st.integers(-40, 40), st.integers(1, 9))
def test_floor_sum_is_the_sum_of_floors(count: int, step: int, offset: int, divisor: int) -> None:
    assert floor_sum(count, step, offset, divisor) == sum((step * i + offset) // divisor for i in range(count))


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
@given(
    bands(),
    st.builds(Run, st.integers(0, 6), st.sampled_from([1, 1, 2, 3]), st.integers(1, 6)),
    st.builds(Run, st.integers(0, 6), st.sampled_from([1, 1, 2, 3]), st.integers(1, 6)),
)
def test_cutting_a_band_along_two_runs_finds_its_pairs_there(band: Band, q_run: Run, k_run: Run) -> None:
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
            kind = draw(st.sampled_from(["full", "full", "strided", "causal", "band", "empty"]))
            rows, cols = q1 - q0, k1 - k0
            if kind == "full":
                pieces.append(full_piece(q0, rows, k0, cols))
            elif kind == "strided":
                pieces.append(make_piece(q0, rows, k0, cols, -99, 99, 2, 3))
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
    assert [row_offset(outer, row) for row in sorted(rows)] == list(range(len(rows)))


def row_list(rows: Rows) -> list[int]:
    return [row for first, last in rows for row in range(first, last)]


# Random plans.


@st.composite
def simple_masks(draw: st.DrawFn, size: int) -> tuple[Mask, Dense]:
    """A mask that covers `size` positions, and its table of pairs written down apart from the package."""
    i, j = np.indices((size, size))
    kind = draw(st.sampled_from(["full", "causal", "window", "documents", "prefix", "blocks"]))
    if kind == "causal":
        return causal(), j <= i
    if kind == "window":
        width = draw(st.integers(1, size + 1))
        return window(width), np.abs(i - j) < width
    if kind == "documents":
        lengths = draw(st.lists(st.integers(1, max(size // 2, 1)), max_size=5))
        lengths.append(max(size - sum(lengths), 1))
        owner = np.repeat(np.arange(len(lengths)), lengths)
        return documents(lengths), owner[i] == owner[j]
    if kind == "prefix":
        length = draw(st.integers(0, size + 1))
        return prefix(length), j < length
    if kind == "blocks":
        block = draw(st.integers(max(size // 6, 1), size))
        count = -(-size // block)
        cells = np.array(draw(st.lists(st.booleans(), min_size=count * count, max_size=count * count)))
        matrix = cells.reshape(count, count)
        return blocks(matrix, block), matrix[i // block, j // block]
    return full(), np.ones((size, size), bool)


@st.composite
def masks(draw: st.DrawFn, size: int) -> tuple[Mask, Dense]:
    mask, allowed = draw(simple_masks(size))
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        other, others = draw(simple_masks(size))
        kind = draw(st.sampled_from(["and", "or", "and-from-left"]))
        if kind == "or":
            mask, allowed = mask | other, allowed | others
        else:
            mask, allowed = (mask & other if kind == "and" else other & mask), allowed & others
    return mask, allowed


class Case(NamedTuple):
    """Layouts of queries and keys, a mask, and the pairs it allows by global positions."""

    mask: Mask
    allowed: Dense
    layout: Layout
    key_layout: Layout

    def plan(self, direction: str, requires_grad: str = "qkv") -> Plan:
        return plan(
            self.layout.tokens,
            self.layout.ring_size,
            heads=2,
            head_dim=8,
            mask=self.mask,
            layout=self.layout,
            key_layout=self.key_layout,
            direction=direction,
            forward_direction=direction,
            requires_grad=requires_grad,
        )


@st.composite
def layouts(draw: st.DrawFn, tokens: int, start: int, ring_size: int, mask: Mask) -> Layout:
    name = draw(st.sampled_from(["contiguous", "zigzag", "striped", "balanced"]))
    if name == "balanced":
        return Layout.balanced(tokens, ring_size, mask, start)
    return Layout(name, tokens, ring_size, start)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Self-attention, or cross-attention with other lengths, starts and layouts; shards may be empty."""
    ring_size = draw(st.integers(1, 6))
    lengths = st.one_of(st.integers(0, 8), st.integers(6, 40))
    tokens, start = draw(lengths), draw(st.sampled_from([0, 0, 3]))
    crossed = draw(st.booleans())
    key_tokens, key_start = (draw(lengths), draw(st.sampled_from([0, 0, 4]))) if crossed else (tokens, start)
    size = max(start + tokens, key_start + key_tokens, 1)
    mask, allowed = draw(masks(size))
    layout = draw(layouts(tokens, start, ring_size, mask))
    key_layout = draw(layouts(key_tokens, key_start, ring_size, mask)) if crossed else layout
    return Case(mask, allowed, layout, key_layout)


def sides(phase: PhasePlan, rank: int, step: Round) -> tuple[int, int]:
    """(query rank, key rank) of a round's pieces."""
    return (rank, step.block) if phase.direction == "kv" else (step.block, rank)


def moving(phase: PhasePlan, piece: Piece) -> tuple[int, int]:
    """The rows [first, last) of the moving side that a piece touches."""
    if phase.direction == "kv":
        return piece.k_first, piece.k_first + piece.k_count
    return piece.q_first, piece.q_first + piece.q_count


def phases(made: Plan) -> tuple[PhasePlan, PhasePlan]:
    assert made.backward is not None
    return made.forward, made.backward


def steps(phase: PhasePlan) -> Iterator[tuple[int, Round]]:
    return ((rank, step) for rank, rounds in enumerate(phase.rounds) for step in rounds)


def sent(phase: PhasePlan, channel: str) -> list[Transfer]:
    return [transfer for _, step in steps(phase) for transfer in step.sends if transfer.channel == channel]


def shard_tables(case: Case) -> list[list[Dense]]:
    """The allowed pairs in local rows, by query rank and key rank."""
    ranks = range(case.layout.ring_size)
    return [
        [case.allowed[np.ix_(case.layout.positions(q), case.key_layout.positions(k))] for k in ranks] for q in ranks
    ]


@settings(deadline=None, derandomize=True, max_examples=250)
@given(cases(), st.sampled_from(DIRECTIONS))
def test_pieces_cover_each_allowed_pair_once_and_the_plan_can_run(case: Case, direction: str) -> None:
    tables = shard_tables(case)
    for phase in phases(case.plan(direction)):
        assert phase.direction == direction
        counts = [[np.zeros(table.shape, int) for table in row] for row in tables]
        for rank, step in steps(phase):
            q_rank, k_rank = sides(phase, rank, step)
            for piece in step.pieces:
                counts[q_rank][k_rank] += piece_table(piece, *counts[q_rank][k_rank].shape)
        for count_row, table_row in zip(counts, tables, strict=True):
            for count, table in zip(count_row, table_row, strict=True):
                np.testing.assert_array_equal(count, table.astype(int))
        simulate(phase)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(cases(), st.sampled_from(DIRECTIONS), st.sampled_from(["q", "k", "v", "kv", "qv"]))
def test_plans_of_some_gradients_can_run(case: Case, direction: str, requires_grad: str) -> None:
    made = case.plan(direction, requires_grad)
    assert made.backward is not None
    simulate(made.backward)
    names = {"kv": {"k": "dk", "v": "dv"}, "query": {"q": "dq"}}[direction]
    assert made.backward.results.names == tuple(names[letter] for letter in requires_grad if letter in names)
    assert bool(sent(made.backward, "result")) == bool(sent(made.backward, "operand") and made.backward.results.names)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(cases(), st.sampled_from(DIRECTIONS))
def test_no_piece_row_or_hop_is_needless(case: Case, direction: str) -> None:
    for phase in phases(case.plan(direction)):
        visits = Counter()
        for rank, step in steps(phase):
            visits[rank, step.block] += bool(step.pieces) and rank != step.block
            for piece in step.pieces:
                assert piece.pairs > 0
                if piece.q_stride == piece.k_stride == 1:
                    x, y = np.indices((piece.q_count, piece.k_count))
                    inside = (piece.low <= x - y) & (x - y < piece.high)
                    assert inside.any(0).all() and inside.any(1).all()
        hops = Counter((transfer.target, transfer.block) for transfer in sent(phase, "operand"))
        assert hops == +visits, "every operand that arrives is computed with, and arrives once"
        for transfer in sent(phase, "operand"):
            assert transfer.rows == needed_from_here(phase, transfer)
            assert transfer.row_count > 0


def needed_from_here(phase: PhasePlan, transfer: Transfer) -> Rows:
    """Rows that a transfer's receiver computes with, and later receivers that it is handed on to."""
    rank, block, index = transfer.target, transfer.block, transfer.round + 1
    ranges: list[tuple[int, int]] = []
    while True:
        step = phase.rounds[rank][index]
        assert step.block == block
        ranges += [moving(phase, piece) for piece in step.pieces]
        onward = [t for t in step.sends if t.channel == "operand" and t.block == block]
        assert len(onward) <= 1
        if not onward:
            return unite_rows(ranges)
        rank, index = onward[0].target, index + 1


@settings(deadline=None, derandomize=True, max_examples=100)
@given(cases(), st.sampled_from(DIRECTIONS))
def test_rows_of_the_last_hop_are_those_with_allowed_pairs(case: Case, direction: str) -> None:
    """Unit strides leave no row without a pair, so what the last visitor gets is read off the dense table."""
    striped = {case.layout.name, case.key_layout.name} & {"striped"}
    if striped and case.layout.name != case.key_layout.name and case.layout.ring_size > 1:
        return
    tables = shard_tables(case)
    for phase in phases(case.plan(direction)):
        for transfer in sent(phase, "operand"):
            last = phase.rounds[transfer.target][transfer.round + 1]
            if any(t.channel == "operand" and t.block == transfer.block for t in last.sends):
                continue
            q_rank, k_rank = sides(phase, transfer.target, last)
            used = tables[q_rank][k_rank].any(0 if direction == "kv" else 1)
            assert row_list(transfer.rows) == np.flatnonzero(used).tolist()


@settings(deadline=None, derandomize=True, max_examples=150)
@given(cases(), st.sampled_from(DIRECTIONS))
def test_results_carry_the_rows_gathered_so_far(case: Case, direction: str) -> None:
    for phase in phases(case.plan(direction)):
        if not phase.results.fields:
            assert all(step.result_rows == () for _, step in steps(phase))
            assert sent(phase, "result") == []
            continue
        for rank, step in steps(phase):
            arrived = [t for t in step.receives if t.channel == "result" and t.block == step.block != rank]
            rows = [moving(phase, piece) for piece in step.pieces] if step.block != rank else []
            assert step.result_rows == unite_rows([*rows, *(pair for t in arrived for pair in t.rows)])
        leaving = [(t.source, t.round - 1, t.block, t.rows) for t in sent(phase, "result")]
        born = [(rank, step.index, step.block, step.result_rows) for rank, step in steps(phase) if step.result_rows]
        assert sorted(leaving) == sorted(born), "each result leaves in the round after it was computed"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("width", "back"), [(2, 1), (5, 4), (8, 7), (9, 8)], ids=lambda value: str(value))
@pytest.mark.parametrize("ring_size", [2, 3, 5])
def test_a_window_inside_a_shard_moves_rows_between_neighbours_only(
    direction: str, width: int, back: int, ring_size: int
) -> None:
    made = plan(
        8 * ring_size, ring_size, heads=1, head_dim=16, mask=causal() & window(width),
        direction=direction, forward_direction=direction,
    )  # fmt: skip
    pairs = [(rank, rank + 1) for rank in range(ring_size - 1)]
    forth = pairs if direction == "kv" else [(target, source) for source, target in pairs]
    rows = ((8 - back, 8),) if direction == "kv" else ((0, back),)
    for phase in phases(made):
        operands, results = sent(phase, "operand"), sent(phase, "result")
        assert sorted((t.source, t.target) for t in operands) == sorted(forth)
        assert {t.rows for t in operands} == {rows}
        if phase.results.fields:
            assert sorted((t.target, t.source) for t in results) == sorted(forth)
            assert {t.rows for t in results} == {rows}
        else:
            assert results == []


def test_a_window_past_a_shard_reaches_two_ranks_back() -> None:
    made = plan(32, 4, heads=1, head_dim=16, mask=causal() & window(10), forward_direction="kv")
    got = Counter(t.block - t.target for t in sent(made.forward, "operand"))
    assert got == {-1: 3, -2: 2}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("lengths", [[8] * 4, [4, 4, 1, 7, 8, 3, 5], [16, 16]], ids=str)
def test_documents_inside_shards_move_nothing(direction: str, lengths: list[int]) -> None:
    inside = all(length <= 8 for length in lengths)
    made = plan(
        32, 4, heads=1, head_dim=16, mask=causal() & documents(lengths),
        direction=direction, forward_direction=direction,
    )  # fmt: skip
    for name in PHASES:
        total = sum(made.bytes_sent(rank, name) for rank in range(4))
        assert (total == 0) == inside
        assert (sent(made.phase(name), "operand") == []) == inside


def test_documents_across_one_shard_edge_move_over_that_edge_only() -> None:
    made = plan(32, 4, heads=1, head_dim=16, mask=documents([5, 6, 13, 8]), direction="kv", forward_direction="kv")
    for phase in phases(made):
        assert sorted((t.source, t.target, t.rows) for t in sent(phase, "operand")) == [
            (0, 1, ((5, 8),)),
            (1, 0, ((0, 3),)),
            (1, 2, ((3, 8),)),
            (2, 1, ((0, 8),)),
        ]


def test_ranks_that_need_nothing_are_skipped_over() -> None:
    """Keys of rank 0 are wanted by ranks 1 and 3: rank 3 gets them from their home, not through rank 2."""
    mask = blocks([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]], 8)
    made = plan(32, 4, heads=1, head_dim=16, mask=mask, forward_direction="kv")
    assert sorted((t.block, t.source, t.target) for t in sent(made.forward, "operand")) == [(0, 0, 1), (0, 0, 3)]
    simulate(made.forward)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_zigzag_causal_rounds_are_single_pieces(direction: str) -> None:
    """The two runs of a shard join: one triangle at home, and one rectangle for every visiting block."""
    layout = Layout.zigzag(64, 4)
    made = plan(64, 4, heads=1, head_dim=16, mask=causal(), layout=layout, forward_direction=direction)
    for rank, step in steps(made.forward):
        if rank != step.block:
            assert [piece.is_full for piece in step.pieces] == [True]
        elif step.pieces:
            assert step.pieces == (Piece(0, 16, 0, 16, 0, 16),)


# The simulator must refuse plans that cannot run. Every mutation is tried at every place where it fits.

FULL_KV = plan(12, 4, heads=1, head_dim=8, direction="kv", forward_direction="kv")
FULL_QUERY = plan(12, 4, heads=1, head_dim=8, direction="query", forward_direction="query")
CAUSAL_KV = plan(16, 4, heads=1, head_dim=8, mask=causal(), layout="zigzag", direction="kv", forward_direction="kv")
SUBJECTS = {
    "forward-kv": phases(FULL_KV)[0],
    "forward-query": phases(FULL_QUERY)[0],
    "backward-kv": phases(FULL_KV)[1],
    "backward-query": phases(FULL_QUERY)[1],
    "backward-kv-causal-zigzag": phases(CAUSAL_KV)[1],
}

Mutation = Callable[[PhasePlan], Iterator[PhasePlan]]
MUTATIONS: dict[str, tuple[Mutation, str]] = {}
"""By name: all ways to break a plan in one manner, and what the simulator says about it."""


def refused(message: str) -> Callable[[Mutation], Mutation]:
    """Register a mutation with the message, as a pattern, that each of its plans must be refused with."""

    def register(mutation: Mutation) -> Mutation:
        MUTATIONS[mutation.__name__.replace("_", "-")] = mutation, message
        return mutation

    return register


def edited(phase: PhasePlan, edit: Callable[[int, Round], Round]) -> PhasePlan:
    """The plan with every round of every rank passed through `edit`."""
    rounds = tuple(tuple(edit(rank, step) for step in rounds) for rank, rounds in enumerate(phase.rounds))
    return replace(phase, rounds=rounds)


def changed(phase: PhasePlan, step: Round, **fields: object) -> PhasePlan:
    """The plan with some fields of one round replaced."""
    return edited(phase, lambda _, at: replace(at, **fields) if at is step else at)  # type: ignore[arg-type]


def exchanged(phase: PhasePlan, old: Transfer, *new: Transfer, ends: str = "both") -> PhasePlan:
    """The plan with none, one or several transfers in one's place: at its sender, its receiver or both."""

    def edit(_: int, step: Round) -> Round:
        sends = [new if ends != "receiver" and t is old else (t,) for t in step.sends]
        receives = [new if ends != "sender" and t is old else (t,) for t in step.receives]
        return replace(step, sends=sum(sends, ()), receives=sum(receives, ()))

    return edited(phase, edit)


def placed(phase: PhasePlan, transfer: Transfer) -> PhasePlan:
    """The plan with one more transfer, listed where it says it belongs."""

    def edit(rank: int, step: Round) -> Round:
        sends = step.sends + (transfer,) * ((rank, step.index) == (transfer.source, transfer.round))
        receives = step.receives + (transfer,) * ((rank, step.index) == (transfer.target, transfer.round))
        return replace(step, sends=sends, receives=receives)

    return edited(phase, edit)


def both(phase: PhasePlan) -> list[Transfer]:
    return [*sent(phase, "operand"), *sent(phase, "result")]


def fewer(transfer: Transfer) -> Transfer:
    return replace(transfer, rows=((0, transfer.row_count - 1),))


def other_rank(*ranks: int) -> int:
    return next(rank for rank in range(4) if rank not in ranks)


@refused(r"sends and receives differ")
def dropped_receive(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, ends="receiver") for t in both(phase))


@refused(r"sends and receives differ")
def dropped_send(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, ends="sender") for t in both(phase))


@refused(r"sends and receives differ")
def duplicated_send(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, t, t, ends="sender") for t in both(phase))


@refused(r"sends and receives differ")
def ends_that_disagree_on_rows(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, fewer(t), ends="receiver") for t in both(phase))


@refused(r"sends and receives differ")
def ends_in_another_order(phase: PhasePlan) -> Iterator[PhasePlan]:
    for t in both(phase):
        yield exchanged(exchanged(phase, t, t, fewer(t), ends="sender"), t, fewer(t), t, ends="receiver")


@refused(r"into one slot|no such result")
def transfer_made_twice(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, t, t) for t in both(phase))


@refused(r"into one slot|its rows are|no such result")
def transfer_in_two_parts(phase: PhasePlan) -> Iterator[PhasePlan]:
    """Listed in the same order at both ends, so that order is not what is refused."""
    for t in both(phase):
        last = replace(t, rows=((t.row_count - 1, t.row_count),))
        yield exchanged(phase, t, fewer(t), last)


@refused(r"lacks block|not held")
def operand_that_never_travels(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t) for t in sent(phase, "operand"))


@refused(r"receives its own block")
def operand_sent_back_home(phase: PhasePlan) -> Iterator[PhasePlan]:
    """In round 3, when the last visitors compute and nothing else is sent out."""
    for rank, step in steps(phase):
        if step.index == 3:
            yield placed(phase, Transfer("operand", step.block, step.held, rank, step.block, "ring", 3))


@refused(r"still waiting to be sent")
def result_overwritten_by_the_next(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t) for t in sent(phase, "result") if t.round < 4)


@refused(r"never sent")
def result_kept_at_the_end(phase: PhasePlan) -> Iterator[PhasePlan]:
    """Ranks are looked at in order, so the keeper is found before the home that waits for it."""
    return (exchanged(phase, t) for t in sent(phase, "result") if t.round == 4 and t.source < t.block)


@refused(r"did not get every contribution exactly once")
def result_missing_at_home(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t) for t in sent(phase, "result") if t.round == 4 and t.block < t.source)


@refused(r"sender holds only")
def rows_that_home_does_not_have(phase: PhasePlan) -> Iterator[PhasePlan]:
    for t in sent(phase, "operand"):
        yield exchanged(phase, t, replace(t, rows=((0, phase.local_rows[t.block] + 1),)))


@refused(r"sender holds only")
def rows_that_a_visitor_was_not_sent(phase: PhasePlan) -> Iterator[PhasePlan]:
    """A hop gets one row and computes nothing, so that only handing its rows on is at fault."""
    for t in sent(phase, "operand"):
        step = phase.rounds[t.target][t.round + 1]
        if any(onward.channel == "operand" and onward.block == t.block for onward in step.sends):
            idle = changed(phase, step, pieces=(), held=((0, 1),))
            yield exchanged(idle, t, replace(t, rows=((0, 1),)))


@refused(r"lacks rows|sender holds only")
def rows_that_a_piece_needs_left_behind(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, fewer(t)) for t in sent(phase, "operand"))


@refused(r"its rows are")
def result_rows_left_behind(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, fewer(t)) for t in sent(phase, "result"))


@refused(r"no such result")
def result_of_another_block(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, replace(t, block=(t.block + 1) % 4)) for t in sent(phase, "result"))


@refused(r"nothing to add it to")
def result_handed_to_a_stranger(phase: PhasePlan) -> Iterator[PhasePlan]:
    for t in sent(phase, "result"):
        yield placed(exchanged(phase, t), replace(t, target=other_rank(t.source, t.target, t.block)))


@refused(r"is listed in round")
def another_round_named(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, replace(t, round=t.round + 1)) for t in both(phase))


@refused(r"lacks block|not held|still waiting|no such result|its rows are|into one")
def round_late(phase: PhasePlan) -> Iterator[PhasePlan]:
    last = len(phase.rounds[0]) - 1
    return (placed(exchanged(phase, t), replace(t, round=t.round + 1)) for t in both(phase) if t.round < last)


@refused(r"lacks block|not held|no such result|into one")
def round_early(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (placed(exchanged(phase, t), replace(t, round=t.round - 1)) for t in both(phase) if t.round > 0)


@refused(r"is listed in round|sends and receives differ")
def rounds_in_another_order(phase: PhasePlan) -> Iterator[PhasePlan]:
    for rank, rounds in enumerate(phase.rounds):
        for first in range(len(rounds) - 1):
            swapped = (*rounds[:first], rounds[first + 1], rounds[first], *rounds[first + 2 :])
            yield replace(phase, rounds=(*phase.rounds[:rank], swapped, *phase.rounds[rank + 1 :]))


@refused(r"rank \d lists")
def ranks_that_are_not_the_ends(phase: PhasePlan) -> Iterator[PhasePlan]:
    for t in both(phase):
        yield exchanged(phase, t, replace(t, target=other_rank(t.source, t.target)))
        yield exchanged(phase, t, replace(t, source=other_rank(t.source, t.target)))


@refused(r"goes to its own sender")
def transfer_to_oneself(phase: PhasePlan) -> Iterator[PhasePlan]:
    return (exchanged(phase, t, replace(t, target=t.source)) for t in both(phase))


@refused(r"lacks block")
def pieces_of_a_block_that_is_elsewhere(phase: PhasePlan) -> Iterator[PhasePlan]:
    for rank, step in steps(phase):
        if rank != step.block:
            yield changed(phase, step, block=other_rank(rank, step.block))


@refused(r"lacks rows")
def pieces_outside_the_rows_at_hand(phase: PhasePlan) -> Iterator[PhasePlan]:
    side = "k_first" if phase.direction == "kv" else "q_first"
    for _, step in steps(phase):
        if step.pieces:
            yield changed(phase, step, pieces=tuple(p._replace(**{side: getattr(p, side) + 99}) for p in step.pieces))


@refused(r"held rows are")
def wrong_list_of_held_rows(phase: PhasePlan) -> Iterator[PhasePlan]:
    for rank, step in steps(phase):
        if rank != step.block:
            yield changed(phase, step, held=((0, 99),))


@pytest.mark.parametrize("subject", SUBJECTS)
def test_simulator_passes_the_plans_before_they_are_broken(subject: str) -> None:
    phase = SUBJECTS[subject]
    simulate(phase)
    assert edited(phase, lambda _, step: step) == phase
    assert len(sent(phase, "operand")) == 12
    assert len(sent(phase, "result")) == 12 * bool(phase.results.fields)


@pytest.mark.parametrize(
    ("name", "subject"),
    [(n, s) for n in MUTATIONS for s in SUBJECTS if SUBJECTS[s].results.fields or not n.startswith("result")],
)
def test_simulator_refuses(name: str, subject: str) -> None:
    mutation, message = MUTATIONS[name]
    phase = SUBJECTS[subject]
    broken = list(mutation(phase))
    assert broken
    for plan_of_one in broken:
        assert plan_of_one != phase
        with pytest.raises(PlanError, match=message):
            simulate(plan_of_one)


def test_simulator_refuses_two_results_into_one_buffer() -> None:
    """Keys of rank 0 visit ranks 1 and 2; idle rank 1 keeps its result and brings it home together with rank 2's."""
    mask = blocks([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]], 4)
    phase = phases(plan(16, 4, heads=1, head_dim=8, mask=mask, direction="kv"))[1]
    simulate(phase)
    first, last = sorted(sent(phase, "result"), key=lambda t: t.round)
    assert first.target == last.source and last.target == 0
    with pytest.raises(PlanError, match="into one buffer"):
        simulate(placed(exchanged(phase, first), replace(first, target=0, round=last.round)))
    simulate(placed(exchanged(phase, first), replace(first, target=0)))  # Each on its own way home is a plan too.


def test_simulator_refuses_an_operand_that_would_have_to_wait() -> None:
    """Keys of rank 0 visit ranks 1 and 3; sent to rank 3 a round early, they are gone when it computes with them."""
    mask = blocks([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]], 4)
    phase = plan(16, 4, heads=1, head_dim=8, mask=mask, forward_direction="kv").forward
    simulate(phase)
    last = max(sent(phase, "operand"), key=lambda t: t.round)
    with pytest.raises(PlanError, match="lacks block 0"):
        simulate(placed(exchanged(phase, last), replace(last, round=last.round - 1)))


@pytest.mark.parametrize("subject", SUBJECTS)
def test_simulator_compares_transfers_by_value(subject: str) -> None:
    """An equal plan passes even where the two ends of a transfer are not one object."""

    def copied(_: int, step: Round) -> Round:
        sends, receives = (tuple(replace(t) for t in ends) for ends in (step.sends, step.receives))
        return replace(step, sends=sends, receives=receives)

    again = edited(SUBJECTS[subject], copied)
    assert again == SUBJECTS[subject]
    simulate(again)


@pytest.mark.parametrize("phase_name", PHASES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_plan_with_home_in_two_parts_can_run(phase_name: str, direction: str) -> None:
    """Where results travel, home's pieces of 128 rows or more are computed half first and half last."""
    mask = causal() & (window(300) | prefix(64)) & documents([700, 324])
    made = plan(
        1024, 4, heads=4, head_dim=64, dtype=torch.float32, mask=mask, layout="zigzag",
        direction=direction, forward_direction=direction,
    )  # fmt: skip
    phase = made.phase(phase_name)
    simulate(phase)
    i, j = np.indices((1024, 1024))
    allowed = (j <= i) & ((i - j < 300) | (j < 64)) & ((i < 700) == (j < 700))
    assert sum(phase.pairs(rank) for rank in range(4)) == allowed.sum()
    at_home = [[bool(step.pieces) for step in rounds if step.block == rank] for rank, rounds in enumerate(phase.rounds)]
    assert at_home == ([[True, True]] * 4 if phase.results.fields else [[True]] * 4)
