"""Plans cover exactly the allowed pairs, once each, and move only what is needed."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burst_attention import Layout, blocks, causal, documents, plan, prefix, window
from burst_attention.geometry import Piece
from burst_attention.schedule import PhasePlan, Transfer, simulate
from tests.unit.oracle import row_list
from tests.unit.plan_steps import (
    COALESCE,
    DIRECTIONS,
    PHASES,
    WIDE,
    Case,
    away,
    buffer_of,
    cases,
    phases,
    require_each_pair_once,
    sent,
    shard_tables,
    sides,
    steps,
    touched,
    visits,
)

Needs = dict[tuple[int, int], set[int]]
"""needs[block, rank]: the rows of a block that a rank, not its home, computes with."""


def needs_of(phase: PhasePlan) -> Needs:
    return {(visit.block, rank): touched(phase, visit) for rank, _, visit in away(phase)}


def neighbour(phase: PhasePlan, block: int, rank: int, rounds: int) -> int | None:
    """The rank that has a block some rounds after this rank, or before it; None where that would be home or beyond.

    A block goes round the ring `coalesce` ranks per round, so each of its visitors has one before and one after it. One
    that was alone at its first goes on to two, of which the nearer would else be `coalesce` beyond home.
    """
    ring = phase.topology
    at = (rank - block) * ring.step % ring.size
    alone = ring.staggered and block % 2 == (ring.step == 1)
    distance = 1 if alone and (at, rounds) == (2, -1) else at + rounds * ring.coalesce
    return (block + ring.step * distance) % ring.size if 0 < distance < ring.size else None


@settings(deadline=None, derandomize=True, max_examples=250)
@given(cases(), st.sampled_from(DIRECTIONS))
def test_pieces_cover_each_allowed_pair_once_and_the_plan_can_run(case: Case, direction: str) -> None:
    tables = shard_tables(case)
    for phase in phases(case.plan(direction)):
        assert phase.direction == direction
        require_each_pair_once(phase, tables)
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
def test_no_piece_or_visit_is_needless(case: Case, direction: str) -> None:
    for phase in phases(case.plan(direction, batch=WIDE)):
        seen = Counter((visit.block, rank) for rank, _, visit in away(phase))
        assert set(seen.values()) <= {1}, "a block visits a rank once"
        for rank, step, visit in visits(phase):
            if visit.block == rank:
                assert visit.rows == () and len(step.visits) == 1
                assert step.index in (0, len(phase.rounds[rank]) - 1)
            else:
                distance = (rank - visit.block) * phase.topology.step % phase.topology.size
                assert visit.pieces and distance in phase.topology.distances(step.index, visit.block)
                assert row_list(visit.rows) == sorted(touched(phase, visit))
            for piece in visit.pieces:
                assert piece.pairs > 0
                x, y = np.indices((piece.q_count, piece.k_count))
                inside = (piece.low <= x - y) & (x - y < piece.high)
                assert inside.any(0).all() and inside.any(1).all()


@settings(deadline=None, derandomize=True, max_examples=200)
@given(cases(), st.sampled_from(DIRECTIONS))
def test_operands_are_exactly_the_rows_that_pieces_touch(case: Case, direction: str) -> None:
    """From the visitor of the round before where that has the row, else straight from home, one round ahead."""
    for phase in phases(case.plan(direction, batch=WIDE)):
        needs, sources = needs_of(phase), defaultdict(list)
        arrival = {(visit.block, rank): step.index - 1 for rank, step, visit in away(phase)}
        for transfer in sent(phase, "operand"):
            at = transfer.block, transfer.target
            assert transfer.rows and transfer.round == arrival[at]
            sources[at] += [(row, transfer.source) for row in row_list(transfer.rows)]
        expected = {}
        for (block, rank), rows in needs.items():
            before = neighbour(phase, block, rank, -1)
            held = needs.get((block, before), set()) if before is not None else set()
            expected[block, rank] = [(row, before if row in held else block) for row in sorted(rows)]
        assert {at: sorted(rows) for at, rows in sources.items()} == expected


@settings(deadline=None, derandomize=True, max_examples=200)
@given(cases(), st.sampled_from(DIRECTIONS))
def test_results_are_exactly_the_rows_that_pieces_touch(case: Case, direction: str) -> None:
    """Each visitor sends each row once: on to the visitor of the next round where that adds to it, else home."""
    for phase in phases(case.plan(direction, batch=WIDE)):
        if not phase.results.fields:
            assert sent(phase, "result") == []
            continue
        needs, targets = needs_of(phase), defaultdict(list)
        leaving = {(visit.block, rank): step.index + 1 for rank, step, visit in away(phase)}
        for transfer in sent(phase, "result"):
            at = transfer.block, transfer.source
            assert transfer.rows and transfer.round == leaving[at]
            targets[at] += [(row, transfer.target) for row in row_list(transfer.rows)]
        expected = {}
        for (block, rank), rows in needs.items():
            after = neighbour(phase, block, rank, 1)
            adds = needs.get((block, after), set()) if after is not None else set()
            expected[block, rank] = [(row, after if row in adds else block) for row in sorted(rows)]
        assert {at: sorted(rows) for at, rows in targets.items()} == expected


@settings(deadline=None, derandomize=True, max_examples=150)
@given(cases(), st.sampled_from(DIRECTIONS))
def test_a_visitor_gets_the_rows_it_needs_or_those_that_any_needs(case: Case, direction: str) -> None:
    for phase in phases(case.plan(direction)):
        needs, anywhere = needs_of(phase), defaultdict(set)
        for (block, _), rows in needs.items():
            anywhere[block] |= rows
        alike = dict.fromkeys(anywhere, True)
        exact = dict(alike)
        for rank, _, visit in away(phase):
            exact[visit.block] &= row_list(visit.rows) == sorted(needs[visit.block, rank])
            alike[visit.block] &= row_list(visit.rows) == sorted(anywhere[visit.block])
        assert all(exact[block] or alike[block] for block in anywhere)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_striped_documents_travel_in_one_message_a_hop(direction: str, ranks_per_host: int) -> None:
    """Ranks before a block's home need all rows but each document's last: exactly these would be a message each."""
    lengths = [16] * 40
    same = {
        "heads": 2, "head_dim": 8, "mask": documents(lengths) & causal(), "layout": "striped", "direction": direction,
        "forward_direction": direction, "ranks_per_host": ranks_per_host,
    }  # fmt: skip
    few, exact = plan(sum(lengths), 4, **same), plan(sum(lengths), 4, batch=WIDE, **same)
    for phase in PHASES:
        sends = [t for _, step in steps(few.phase(phase)) for t in step.sends]
        hops = Counter((t.channel, t.block, t.source, t.target, t.round) for t in sends)
        assert set(hops.values()) == {1}
        assert exact.phase(phase).total_messages > len(hops) + len(lengths)
        needed = sum(t.row_count for _, step in steps(exact.phase(phase)) for t in step.sends)
        assert needed < sum(t.row_count for t in sends) < 1.35 * needed


@settings(deadline=None, derandomize=True, max_examples=100)
@given(cases(), st.sampled_from(DIRECTIONS))
def test_total_bytes_are_those_of_the_rows_needed(case: Case, direction: str) -> None:
    """A row travels to a rank where the dense table has a pair for it there, and else does not."""
    tables = shard_tables(case)
    ranks = range(case.layout.ring_size)
    for phase in phases(case.plan(direction, batch=WIDE)):
        needs = needs_of(phase)
        used = {
            (block, rank): set(np.flatnonzero(tables[q][k].any(0 if direction == "kv" else 1)).tolist())
            for block in ranks
            for rank in ranks
            if block != rank
            for q, k in (sides(phase, rank, block),)
        }
        for at, rows in used.items():
            assert rows == needs.get(at, set())
        count = sum(len(rows) for rows in needs.values())
        assert phase.total_bytes == count * (phase.operands.row_bytes + phase.results.row_bytes)
        assert phase.total_bytes == sum(phase.nbytes(t) for _, step in steps(phase) for t in step.receives)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(cases(), st.sampled_from(DIRECTIONS))
def test_a_transfer_is_one_stretch_of_memory_at_both_ends_and_no_two_could_be_one(case: Case, direction: str) -> None:
    """Operands lie in the sender's buffer or among what home packs, and in the receiver's next buffer.

    Results lie in the sender's buffer of the round before; they are received apart, and then added row by row.
    """
    for phase in phases(case.plan(direction)):
        stretches: dict[tuple[str, int, int, int], list[list[int]]] = defaultdict(list)
        for transfer in (*sent(phase, "operand"), *sent(phase, "result")):
            at = [(transfer.block, row) for row in row_list(transfer.rows)]
            memories = memories_of(phase, transfer)
            firsts = [memory.index(at[0]) for memory in memories]
            for memory, first in zip(memories, firsts, strict=True):
                assert memory[first : first + len(at)] == at
            between = transfer.channel, transfer.block, transfer.source, transfer.target
            stretches[between].append([value for first in firsts for value in (first, first + len(at))])
        for parts in stretches.values():
            ends = {tuple(part[1::2]) for part in parts}
            assert not ends & {tuple(part[0::2]) for part in parts}


def memories_of(phase: PhasePlan, transfer: Transfer) -> list[list[tuple[int, int]]]:
    """(block, row) in each place of the buffers that a transfer is one part of."""
    rounds = phase.rounds[transfer.source]
    if transfer.channel == "result":
        return [buffer_of(rounds[transfer.round - 1])]
    source = buffer_of(rounds[transfer.round])
    if transfer.source == transfer.block:
        own = [t for t in rounds[transfer.round].sends if t.channel == "operand" and t.block == t.source]
        source = [(transfer.block, row) for row in sorted({row for t in own for row in row_list(t.rows)})]
    return [source, buffer_of(phase.rounds[transfer.target][transfer.round + 1])]


@pytest.mark.parametrize("coalesce", COALESCE)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("width", "back"), [(2, 1), (5, 4), (8, 7), (9, 8)], ids=lambda value: str(value))
@pytest.mark.parametrize("ring_size", [2, 3, 5])
def test_a_window_inside_a_shard_moves_rows_between_neighbours_only(
    direction: str, width: int, back: int, ring_size: int, coalesce: int
) -> None:
    made = plan(
        8 * ring_size, ring_size, heads=1, head_dim=16, mask=causal() & window(width),
        direction=direction, forward_direction=direction, coalesce=coalesce,
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


@pytest.mark.parametrize(("coalesce", "through"), [(1, 1), (2, 2), (3, 2)])
def test_a_window_past_a_shard_reaches_two_ranks_back(coalesce: int, through: int) -> None:
    """The one row that is wanted two ranks on comes through the rank between, unless both have it in one round."""
    made = plan(32, 4, heads=1, head_dim=16, mask=causal() & window(10), forward_direction="kv", coalesce=coalesce)
    got = Counter((t.target - t.block, t.target - t.source, t.rows) for t in sent(made.forward, "operand"))
    assert got == {(1, 1, ((0, 8),)): 3, (2, through, ((7, 8),)): 2}


@pytest.mark.parametrize("coalesce", COALESCE)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("lengths", [[8] * 4, [4, 4, 1, 7, 8, 3, 5], [16, 16]], ids=str)
def test_documents_inside_shards_move_nothing(direction: str, lengths: list[int], coalesce: int) -> None:
    inside = all(length <= 8 for length in lengths)
    made = plan(
        32, 4, heads=1, head_dim=16, mask=causal() & documents(lengths),
        direction=direction, forward_direction=direction, coalesce=coalesce,
    )  # fmt: skip
    for name in PHASES:
        total = sum(made.bytes_sent(rank, name) for rank in range(4))
        assert (total == 0) == inside
        assert (sent(made.phase(name), "operand") == []) == inside


@pytest.mark.parametrize("coalesce", COALESCE)
def test_documents_across_one_shard_edge_move_over_that_edge_only(coalesce: int) -> None:
    made = plan(
        32, 4, heads=1, head_dim=16, mask=documents([5, 6, 13, 8]),
        direction="kv", forward_direction="kv", coalesce=coalesce,
    )  # fmt: skip
    for phase in phases(made):
        assert sorted((t.source, t.target, t.rows) for t in sent(phase, "operand")) == [
            (0, 1, ((5, 8),)),
            (1, 0, ((0, 3),)),
            (1, 2, ((3, 8),)),
            (2, 1, ((0, 8),)),
        ]


@pytest.mark.parametrize("coalesce", COALESCE)
def test_ranks_that_need_nothing_are_skipped_over(coalesce: int) -> None:
    """Keys of rank 0 are wanted by ranks 1 and 3: rank 3 gets them from no rank that does not want them itself.

    With two blocks in a round rank 1 is the visitor before rank 3, whichever way round, and hands them on.
    """
    mask = blocks([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]], 8)
    made = plan(32, 4, heads=1, head_dim=16, mask=mask, forward_direction="kv", coalesce=coalesce)
    way = sorted((t.block, t.source, t.target) for t in sent(made.forward, "operand"))
    assert way == ([(0, 0, 1), (0, 1, 3)] if coalesce == 2 else [(0, 0, 1), (0, 0, 3)])
    simulate(made.forward)


def test_rows_that_the_visitor_before_does_not_need_come_from_home_and_go_home() -> None:
    """Of three parts of rank 0's keys rank 1 wants the first two and rank 2 the last two."""
    wanted = np.eye(9, dtype=bool)
    wanted[3:6, 0:2] = wanted[6:9, 1:3] = True
    made = plan(36, 3, heads=1, head_dim=16, mask=blocks(wanted, 4), direction="kv", forward_direction="kv")
    for phase in phases(made):
        assert sorted((t.round, t.source, t.target, t.rows) for t in sent(phase, "operand")) == [
            (0, 0, 1, ((0, 8),)),
            (1, 0, 2, ((8, 12),)),
            (1, 1, 2, ((4, 8),)),
        ]
    assert sorted((t.round, t.source, t.target, t.rows) for t in sent(phases(made)[1], "result")) == [
        (2, 1, 0, ((0, 4),)),
        (2, 1, 2, ((4, 8),)),
        (3, 2, 0, ((4, 12),)),
    ]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_zigzag_causal_rounds_are_single_pieces(direction: str) -> None:
    """The two runs of a shard join: one triangle at home, and one rectangle for every visiting block."""
    layout = Layout.zigzag(64, 4)
    made = plan(64, 4, heads=1, head_dim=16, mask=causal(), layout=layout, forward_direction=direction)
    for rank, step, visit in visits(made.forward):
        if rank != visit.block:
            assert [piece.is_full for piece in visit.pieces] == [True]
            assert [piece.is_full for piece in step.pieces] == [True]
        elif visit.pieces:
            assert visit.pieces == step.pieces == (Piece(0, 16, 0, 16, 0, 16),)


@pytest.mark.parametrize("coalesce", COALESCE)
@pytest.mark.parametrize("phase_name", PHASES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_plan_with_home_in_two_parts_can_run(phase_name: str, direction: str, coalesce: int) -> None:
    """Where results travel, home's pieces are computed for half of the heads first and for the others last."""
    mask = causal() & (window(300) | prefix(64)) & documents([700, 324])
    made = plan(
        1024, 4, heads=4, head_dim=64, dtype=torch.float32, mask=mask, layout="zigzag",
        direction=direction, forward_direction=direction, coalesce=coalesce,
    )  # fmt: skip
    phase = made.phase(phase_name)
    simulate(phase)
    i, j = np.indices((1024, 1024))
    allowed = (j <= i) & ((i - j < 300) | (j < 64)) & ((i < 700) == (j < 700))
    assert sum(phase.pairs(rank) for rank in range(4)) == phase.shapes.heads * allowed.sum()
    at_home = [
        [visit.heads for step in rounds for visit in step.visits if visit.block == rank and visit.pieces]
        for rank, rounds in enumerate(phase.rounds)
    ]
    assert at_home == ([[(0, 2), (2, 4)]] * 4 if phase.results.fields else [[None]] * 4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "halves", "key_halves"),
    [
        (4, 4, ((0, 2), (2, 4)), ((0, 2), (2, 4))),
        (8, 2, ((0, 4), (4, 8)), ((0, 1), (1, 2))),
        (6, 3, ((0, 4), (4, 6)), ((0, 2), (2, 3))),
        (5, 1, ((0, 2), (2, 5)), ((0, 1), (0, 1))),
        (1, 1, None, None),
    ],
    ids=["mha", "gqa", "odd", "mqa", "one"],
)
def test_halves_of_heads_keep_groups_together(heads: int, kv_heads: int, halves: object, key_halves: object) -> None:
    shapes = plan(16, 2, heads=heads, kv_heads=kv_heads, head_dim=8).forward.shapes
    found = shapes.halves()
    assert found == halves
    if found is not None:
        assert tuple(shapes.key_heads(half) for half in found) == key_halves
        parts = [shapes.of_heads(half) for half in found]
        assert sum(part.heads for part in parts) == heads
        assert [part.kv_heads for part in parts] == [last - first for first, last in map(shapes.key_heads, found)]
        assert all(part.heads % part.kv_heads == 0 for part in parts)
