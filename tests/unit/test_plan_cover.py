"""Plans cover exactly the allowed pairs, once each, and move only what is needed."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burst_attention import Layout, Mask, Plan, blocks, causal, documents, plan, prefix, window
from burst_attention.geometry import Piece, Rows, unite_rows
from burst_attention.schedule import PhasePlan, Round, Transfer, simulate
from tests.unit.oracle import Dense, masks, piece_table, row_list
from tests.unit.plan_steps import DIRECTIONS, PHASES, phases, sent, steps


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
