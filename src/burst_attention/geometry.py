"""Integer geometry of attention: runs of positions, bands of allowed pairs, and the pieces where they meet.

A **run** is positions start, start + stride, ...; a shard is a few runs. A **band** is a set of (query, key)
pairs with i in [i0, i1), j in [j0, j1) and low <= i - j < high; every mask is a few disjoint bands. A **piece** is
a band seen from inside one query run and one key run of the same stride, in local rows, which is what a kernel is
asked to compute:

    causal band, queries 4..7, keys 2..5        the piece: 4 x 4, -2 <= x - y
        j  2 3 4 5                                  y  0 1 2 3
    i 4    # # # .                              x 0    # # # .
      5    # # # #                                1    # # # #
      6    # # # #                                2    # # # #
      7    # # # #                                3    # # # #
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

UNBOUNDED = 1 << 62

Rows = tuple[tuple[int, int], ...]
"""Sorted, disjoint, non-touching ranges [first, last) of local rows."""


class Run(NamedTuple):
    """Positions start, start + stride, ..., `length` of them."""

    start: int
    stride: int
    length: int

    @property
    def last(self) -> int:
        return self.start + self.stride * (self.length - 1)

    def between(self, first: int, end: int) -> Run:
        """Those of the positions that are not before `first` and before `end`."""
        begin = max(-((self.start - first) // self.stride), 0)
        stop = min(-((self.start - end) // self.stride), self.length)
        return Run(self.start + begin * self.stride, self.stride, max(stop - begin, 0))

    def by_remainder(self, stride: int) -> tuple[Run, ...]:
        """The same positions as runs of a larger stride: 3, 4, 5, 6, 7 by two are 3, 5, 7 and 4, 6."""
        if stride == self.stride:
            return (self,)
        assert self.stride == 1, f"{self} cannot be split by {stride}"
        firsts = range(min(stride, self.length))
        return tuple(Run(self.start + first, stride, -((first - self.length) // stride)) for first in firsts)


class Band(NamedTuple):
    """Pairs with i in [i0, i1), j in [j0, j1), low <= i - j < high."""

    i0: int
    i1: int
    j0: int
    j1: int
    low: int = -UNBOUNDED
    high: int = UNBOUNDED


class Piece(NamedTuple):
    """A rectangle of local rows with the pairs low <= x - y < high in it.

    x and y count from the rectangle's corner (q_first, k_first). `low` and `high` are clipped to what the
    rectangle can reach, so equal pieces compare equal and a full one is recognised by its bounds.
    """

    q_first: int
    q_count: int
    k_first: int
    k_count: int
    low: int
    high: int

    @property
    def is_full(self) -> bool:
        """Whether every pair of the rectangle is allowed."""
        return self.low <= 1 - self.k_count and self.high >= self.q_count

    @property
    def is_lower(self) -> bool:
        """Whether only `low` binds: a triangle or trapezoid below a diagonal."""
        return self.high >= self.q_count

    @property
    def is_causal(self) -> bool:
        """Whether the pairs are exactly y <= x, as a kernel's causal flag counts them."""
        return self.is_lower and self.low == 0

    def key_range(self, x: int) -> tuple[int, int]:
        """The keys [first, last) that row x of the rectangle may see."""
        return max(x - self.high + 1, 0), min(x - self.low + 1, self.k_count)

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs are allowed."""
        return _pairs_below(self, self.low) - _pairs_below(self, self.high)

    def crop(self, q0: int, q1: int, k0: int, k1: int) -> Piece | None:
        """The part with local query rows in [q0, q1) and key rows in [k0, k1), or None when it is empty."""
        q_first, k_first = max(q0, self.q_first), max(k0, self.k_first)
        q_last = min(q1, self.q_first + self.q_count)
        k_last = min(k1, self.k_first + self.k_count)
        shift = (q_first - self.q_first) - (k_first - self.k_first)
        return make_piece(q_first, q_last - q_first, k_first, k_last - k_first, self.low - shift, self.high - shift)


def _pairs_below(piece: Piece, low: int) -> int:
    """Pairs of the rectangle with x - y >= low: row x has x - low + 1 of them, clamped to [0, k_count]."""
    rows, cols = piece.q_count, piece.k_count
    first = min(max(low, 0), rows)
    full = min(max(low + cols - 1, first), rows)
    growing = (full - first) * (first + full + 1 - 2 * low) // 2
    return growing + (rows - full) * cols


def make_piece(q_first: int, q_count: int, k_first: int, k_count: int, low: int, high: int) -> Piece | None:
    """Shrink a rectangle to the rows and keys that its band reaches; None when it reaches none."""
    # The rows that reach a key of the whole rectangle, and the keys that reach a row of it.
    x0, x1 = max(0, low), min(q_count, high + k_count - 1)
    y0, y1 = max(0, 1 - high), min(k_count, q_count - low)
    if q_count <= 0 or k_count <= 0 or high <= low or x1 <= x0 or y1 <= y0:
        return None
    shift = x0 - y0
    rows, cols = x1 - x0, y1 - y0
    return Piece(q_first + x0, rows, k_first + y0, cols, max(low - shift, 1 - cols), min(high - shift, rows))


def cut(band: Band, q_run: Run, q_first: int, k_run: Run, k_first: int) -> Piece | None:
    """The part of a band inside a query run and a key run whose local rows start at q_first and k_first.

    Both have one stride, so that rows are apart by distance over stride and no row between two that meet is idle.
    """
    stride = q_run.stride
    assert k_run.stride == stride, f"{q_run} and {k_run} have different strides"
    x0, x1 = _index_range(q_run, band.i0, band.i1)
    y0, y1 = _index_range(k_run, band.j0, band.j1)
    if x0 >= x1 or y0 >= y1:
        return None
    shift = (q_run.start + q_run.stride * x0) - (k_run.start + k_run.stride * y0)
    low, high = -((shift - band.low) // stride), -((shift - band.high) // stride)
    return make_piece(q_first + x0, x1 - x0, k_first + y0, y1 - y0, low, high)


def moved_rows(piece: Piece, direction: str) -> tuple[int, int]:
    """The rows [first, last) of the moving side, "kv" or "query", that a piece touches."""
    if direction == "kv":
        return piece.k_first, piece.k_first + piece.k_count
    return piece.q_first, piece.q_first + piece.q_count


def _index_range(run: Run, first: int, last: int) -> tuple[int, int]:
    """Indices into the run whose positions lie in [first, last)."""
    low = max(0, -(-(first - run.start) // run.stride))
    high = min(run.length, -(-(last - run.start) // run.stride))
    return low, high


def tighten(band: Band) -> Band | None:
    """The same pairs with every bound as tight as the others allow, or None when there are none."""
    i0, i1, j0, j1, low, high = band
    low, high = max(low, i0 - j1 + 1), min(high, i1 - j0)
    i0, i1 = max(i0, j0 + low), min(i1, j1 + high - 1)
    j0, j1 = max(j0, i0 - high + 1), min(j1, i1 - low)
    if i0 >= i1 or j0 >= j1 or low >= high:
        return None
    return Band(i0, i1, j0, j1, low, high)


def intersect(a: Band, b: Band) -> Band | None:
    """Pairs in both bands."""
    if a.i0 >= b.i1 or b.i0 >= a.i1 or a.j0 >= b.j1 or b.j0 >= a.j1:
        return None
    return tighten(
        Band(
            max(a.i0, b.i0), min(a.i1, b.i1), max(a.j0, b.j0), min(a.j1, b.j1),
            max(a.low, b.low), min(a.high, b.high),
        )
    )  # fmt: skip


def subtract(a: Band, b: Band) -> list[Band]:
    """Pairs of a that are not in b, as disjoint bands: above, below, left, right, and either side of the diagonal."""
    if intersect(a, b) is None:
        return [a]
    i0, i1 = max(a.i0, b.i0), min(a.i1, b.i1)
    j0, j1 = max(a.j0, b.j0), min(a.j1, b.j1)
    parts = (
        Band(a.i0, b.i0, a.j0, a.j1, a.low, a.high),
        Band(b.i1, a.i1, a.j0, a.j1, a.low, a.high),
        Band(i0, i1, a.j0, b.j0, a.low, a.high),
        Band(i0, i1, b.j1, a.j1, a.low, a.high),
        Band(i0, i1, j0, j1, a.low, b.low),
        Band(i0, i1, j0, j1, max(a.low, b.high), a.high),
    )
    return [tight for part in parts if part.i0 < part.i1 and part.j0 < part.j1 and (tight := tighten(part))]


def unite_rows(ranges: Iterable[tuple[int, int]]) -> Rows:
    """Sort ranges and join those that overlap or touch."""
    united: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if first >= last:
            continue
        if united and first <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], last))
        else:
            united.append((first, last))
    return tuple(united)


def cover_rows(pieces: Iterable[Piece], rows: int, keys: bool = False) -> bool:
    """Whether pieces touch each of so many query rows, or key rows."""
    spans = ((p.k_first, p.k_count) if keys else (p.q_first, p.q_count) for p in pieces)
    return unite_rows((first, first + count) for first, count in spans) == ((0, rows),)


def intersect_rows(a: Rows, b: Rows) -> Rows:
    """Rows in both."""
    both, at, beside = [], 0, 0
    while at < len(a) and beside < len(b):
        both.append((max(a[at][0], b[beside][0]), min(a[at][1], b[beside][1])))
        if a[at][1] < b[beside][1]:
            at += 1
        else:
            beside += 1
    return unite_rows(both)


def subtract_rows(a: Rows, b: Rows) -> Rows:
    """Rows of a that are not in b."""
    if not a or not b:
        return a
    edges = [min(a[0][0], b[0][0]), *itertools.chain.from_iterable(b), max(a[-1][1], b[-1][1])]
    return intersect_rows(a, tuple(zip(edges[::2], edges[1::2], strict=True)))


def stretches(rows: Rows, *memories: Rows) -> list[Rows]:
    """Rows in groups whose ranges lie next to each other in each of some buffers that hold their rows packed."""
    held = unite_rows(itertools.chain.from_iterable(memories))
    between = intersect_rows(tuple((a[1], b[0]) for a, b in itertools.pairwise(rows)), held)
    ends = [0, *(bisect_right(rows, (first, first)) for first, _ in between), len(rows)]
    return [rows[begin:end] for begin, end in itertools.pairwise(sorted(set(ends)))]


def count_rows(rows: Rows) -> int:
    """How many rows the ranges hold."""
    return sum(last - first for first, last in rows)


def contains_rows(outer: Rows, inner: Rows) -> bool:
    """Whether every row of inner is in outer."""
    return unite_rows((*outer, *inner)) == outer


class Packed:
    """A buffer that holds exactly some rows, one range after the other."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self._before = list(itertools.accumulate((last - first for first, last in rows), initial=0))

    def offset(self, row: int) -> int:
        """Where a row lies."""
        at = bisect_right(self.rows, (row, UNBOUNDED)) - 1
        if at < 0 or row >= self.rows[at][1]:
            raise AssertionError(f"row {row} is not among {self.rows}")
        return self._before[at] + row - self.rows[at][0]


def row_offset(rows: Rows, row: int) -> int:
    """Where a row lies in a buffer that holds exactly `rows`."""
    return Packed(rows).offset(row)


def join_pieces(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Join full rectangles that touch, and a triangle that was cut along runs, into fewer and larger pieces.

    Positions do not matter inside a full rectangle, so the two runs of a zigzag shard become one call.
    """
    full = [p for p in pieces if p.is_full]
    banded = [p for p in pieces if not p.is_full]
    full = _join_along(full, "q_first", "q_count", "k_first", "k_count")
    full = _join_along(full, "k_first", "k_count", "q_first", "q_count")
    joined = tuple(sorted(full + banded))
    return _as_triangle(joined) or joined


def _join_along(pieces: list[Piece], first: str, count: str, fixed_first: str, fixed_count: str) -> list[Piece]:
    """Join full pieces that are neighbours along one side and equal on the other."""
    ordered = sorted(pieces, key=lambda p: (getattr(p, fixed_first), getattr(p, fixed_count), getattr(p, first)))
    joined: list[Piece] = []
    for piece in ordered:
        last = joined[-1] if joined else None
        if (
            last is not None
            and getattr(last, fixed_first) == getattr(piece, fixed_first)
            and getattr(last, fixed_count) == getattr(piece, fixed_count)
            and getattr(last, first) + getattr(last, count) == getattr(piece, first)
        ):
            sides = {first: getattr(last, first), count: getattr(last, count) + getattr(piece, count)}
            sides |= {fixed_first: getattr(last, fixed_first), fixed_count: getattr(last, fixed_count)}
            joined[-1] = full_piece(**sides)
        else:
            joined.append(full_piece(piece.q_first, piece.q_count, piece.k_first, piece.k_count))
    return joined


def full_piece(q_first: int, q_count: int, k_first: int, k_count: int) -> Piece:
    """A rectangle with every pair allowed."""
    return Piece(q_first, q_count, k_first, k_count, -(k_count - 1), q_count)


def _as_triangle(pieces: tuple[Piece, ...]) -> tuple[Piece, ...] | None:
    """One causal piece when together these are exactly the rows' lower triangle, as on every diagonal block."""
    if len(pieces) < 2:
        return None
    first = min(p.q_first for p in pieces)
    rows = max(p.q_first + p.q_count for p in pieces) - first
    if any(p.q_first - p.k_first + p.low < 0 or p.k_first < first for p in pieces):
        return None
    if sum(p.pairs for p in pieces) != rows * (rows + 1) // 2:
        return None
    return (Piece(first, rows, first, rows, 0, rows),)
