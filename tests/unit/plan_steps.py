"""Random cases to plan, and what a plan's rounds hold, listed row by row with sets for tests that look at all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from burst_attention import Layout, Mask, Plan, blocks, plan
from burst_attention.geometry import Piece
from burst_attention.schedule import PhasePlan, Round, Transfer, Visit
from tests.unit.oracle import Dense, MaskCase, masks, piece_table, row_list

DIRECTIONS = ("kv", "query")
PHASES = ("forward", "backward")
COALESCE = (1, 2, 3)


WIDE = 1 << 20
"""A batch whose rows are so large that none travels without being needed, however many messages it would save."""


class Case(NamedTuple):
    """Layouts of queries and keys, a mask, the pairs it allows by global positions, and the ring."""

    mask: Mask
    allowed: Dense
    layout: Layout
    key_layout: Layout
    coalesce: int
    per_host: int = 1

    def plan(self, direction: str, requires_grad: str = "qkv", batch: int = 1, results: str = "chain") -> Plan:
        return plan(
            self.layout.tokens,
            self.layout.ring_size,
            heads=2,
            head_dim=8,
            batch=batch,
            mask=self.mask,
            layout=self.layout,
            key_layout=self.key_layout,
            direction=direction,
            forward_direction=direction,
            requires_grad=requires_grad,
            coalesce=self.coalesce,
            ranks_per_host=self.per_host,
            results=results,
        )


@st.composite
def layouts(draw: st.DrawFn, tokens: int, start: int, ring_size: int, mask: Mask) -> Layout:
    name = draw(st.sampled_from(["contiguous", "zigzag", "striped", "balanced"]))
    if name == "balanced":
        return Layout.balanced(tokens, ring_size, mask, start)
    return Layout(name, tokens, ring_size, start)


@st.composite
def patchy_masks(draw: st.DrawFn, size: int) -> MaskCase:
    """Few and small blocks, so that a rank needs rows of another here and there."""
    count = -(-size // 2)
    matrix = np.random.default_rng(draw(st.integers(0, 999))).random((count, count)) < 0.2
    i, j = np.indices((size, size))
    return blocks(matrix, 2), matrix[i // 2, j // 2]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Self-attention, or cross-attention with other lengths, starts and layouts; shards may be empty."""
    ring_size = draw(st.integers(1, 7))
    patchy = draw(st.integers(0, 2)) == 0
    lengths = st.integers(30, 60) if patchy else st.one_of(st.integers(0, 8), st.integers(6, 40))
    tokens, start = draw(lengths), draw(st.sampled_from([0, 0, 3]))
    crossed = draw(st.booleans())
    key_tokens, key_start = (draw(lengths), draw(st.sampled_from([0, 0, 4]))) if crossed else (tokens, start)
    size = max(start + tokens, key_start + key_tokens, 1)
    mask, allowed = draw(patchy_masks(size) if patchy else masks(size))
    layout = draw(layouts(tokens, start, ring_size, mask))
    key_layout = draw(layouts(key_tokens, key_start, ring_size, mask)) if crossed else layout
    return Case(mask, allowed, layout, key_layout, draw(st.sampled_from(COALESCE)))


def shard_tables(case: Case) -> list[list[Dense]]:
    """The allowed pairs in local rows, as a plan counts them, by query rank and key rank."""
    made = case.plan("kv")
    queries = [positions_in_order(made, "query", rank) for rank in range(case.layout.ring_size)]
    keys = [positions_in_order(made, "kv", rank) for rank in range(case.layout.ring_size)]
    return [[case.allowed[np.ix_(q, k)] for k in keys] for q in queries]


def positions_in_order(made: Plan, side: str, rank: int) -> list[int]:
    """The global position of each local row, as a plan counts them."""
    positions = (made.layout if side == "query" else made.key_layout).positions(rank).tolist()
    order = made.row_order(rank, side)
    if order is None:
        return positions
    assert sorted(order.tolist()) == list(range(len(positions))), "every row of the shard has one place"
    return [positions[row] for row in order.tolist()]


def phases(made: Plan) -> tuple[PhasePlan, PhasePlan]:
    assert made.backward is not None
    return made.forward, made.backward


def steps(phase: PhasePlan) -> Iterator[tuple[int, Round]]:
    return ((rank, step) for rank, rounds in enumerate(phase.rounds) for step in rounds)


def visits(phase: PhasePlan) -> Iterator[tuple[int, Round, Visit]]:
    return ((rank, step, visit) for rank, step in steps(phase) for visit in step.visits)


def away(phase: PhasePlan) -> Iterator[tuple[int, Round, Visit]]:
    """Visits of blocks to ranks that are not their home."""
    return ((rank, step, visit) for rank, step, visit in visits(phase) if visit.block != rank)


def sent(phase: PhasePlan, channel: str) -> list[Transfer]:
    return [transfer for _, step in steps(phase) for transfer in step.sends if transfer.channel == channel]


def sides(phase: PhasePlan, rank: int, block: int) -> tuple[int, int]:
    """(query rank, key rank) of the pieces that a rank computes with a block."""
    return (rank, block) if phase.direction == "kv" else (block, rank)


def moving(phase: PhasePlan, piece: Piece) -> range:
    """The rows of the moving side that a piece touches."""
    if phase.direction == "kv":
        return range(piece.k_first, piece.k_first + piece.k_count)
    return range(piece.q_first, piece.q_first + piece.q_count)


def touched(phase: PhasePlan, visit: Visit) -> set[int]:
    """The rows of a block that a visit's pieces compute with."""
    return {row for piece in visit.pieces for row in moving(phase, piece)}


def buffer_of(step: Round) -> list[tuple[int, int]]:
    """(block, row) in every place of the buffer of visiting blocks."""
    return [(visit.block, row) for visit in step.visits for row in row_list(visit.rows)]


def require_each_pair_once(phase: PhasePlan, tables: list[list[Dense]]) -> None:
    """Pieces compute each allowed pair once, for every head."""
    counts = [[np.zeros((phase.shapes.heads, *table.shape), int) for table in row] for row in tables]
    for rank, _, visit in visits(phase):
        q_rank, k_rank = sides(phase, rank, visit.block)
        heads = slice(*(visit.heads or (0, phase.shapes.heads)))
        for piece in visit.pieces:
            counts[q_rank][k_rank][heads] += piece_table(piece, *counts[q_rank][k_rank].shape[1:])
    for count_row, table_row in zip(counts, tables, strict=True):
        for count, table in zip(count_row, table_row, strict=True):
            np.testing.assert_array_equal(count, np.broadcast_to(table.astype(int), count.shape))
