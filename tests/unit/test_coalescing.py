"""Computing several blocks in a round changes rounds and memory as stated, and neither pairs nor bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from burst_attention import Mask, Plan, causal, full, plan, window
from burst_attention.geometry import Piece, full_piece
from burst_attention.schedule import PhasePlan, simulate
from burst_attention.topology import DoubleRing, Stop
from tests.unit.oracle import piece_table
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
    sent,
    steps,
    visits,
)

SHARD = 16


def ring_plan(ring_size: int, coalesce: int, direction: str, mask: Mask, layout: str = "zigzag") -> Plan:
    """A plan with the same shard on every rank, whatever the ring's size."""
    return plan(
        SHARD * ring_size, ring_size, heads=2, head_dim=8, mask=mask, layout=layout,
        direction=direction, forward_direction=direction, coalesce=coalesce,
    )  # fmt: skip


@pytest.mark.parametrize("ring_size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("coalesce", [1, 2, 3, 4, 8])
def test_rounds_are_home_then_groups_of_blocks_then_home_where_results_return(ring_size: int, coalesce: int) -> None:
    made = ring_plan(ring_size, coalesce, "kv", full())
    groups = [min(coalesce, ring_size - first) for first in range(1, ring_size, coalesce)]
    for phase, returns in zip(phases(made), (False, ring_size > 1), strict=True):
        for rank, rounds in enumerate(phase.rounds):
            assert [step.index for step in rounds] == list(range(1 + len(groups) + returns))
            assert [len(step.visits) for step in rounds] == [1, *groups, *[1] * returns]
            at_home = [step.index for step in rounds if [visit.block for visit in step.visits] == [rank]]
            assert at_home == [0, *[1 + len(groups)] * returns]
            assert all(visit.rows == () for index in at_home for visit in rounds[index].visits)


@pytest.mark.parametrize("ring_size", [4, 6, 8])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_other_block_begins_alone_where_that_joins_more(ring_size: int, direction: str) -> None:
    """In causal zigzag rings each rank begins with one block or two, and then has those that belong together."""
    for phase in phases(ring_plan(ring_size, 2, direction, causal())):
        assert phase.topology.staggered
        for rank, rounds in enumerate(phase.rounds):
            visiting = [tuple(sorted(visit.block for visit in step.visits)) for step in rounds if step.row_count]
            pairs = {(first, first + 1) for first in range(0, ring_size, 2) if rank not in (first, first + 1)}
            alone = (rank ^ 1,)
            assert set(visiting) == {*pairs, alone} and len(visiting) == ring_size // 2
            assert visiting.index(alone) in (0, len(visiting) - 1)
        for other in (full(), causal() & window(SHARD)):
            assert not any(each.topology.staggered for each in phases(ring_plan(ring_size, 2, direction, other)))
    assert not any(each.topology.staggered for each in phases(ring_plan(ring_size + 1, 2, direction, causal())))


def test_blocks_do_not_begin_alone_in_rings_where_that_would_take_a_round_more() -> None:
    for size, coalesce in ((5, 2), (6, 3), (6, 1)):
        with pytest.raises(ValueError, match="blocks begin alone only where two are computed at once"):
            DoubleRing(size, coalesce=coalesce, staggered=True)


RINGS = [(size, coalesce, False) for size in range(1, 10) for coalesce in (1, 2, 3, 4)]
RINGS += [(size, 2, True) for size in (2, 4, 6, 8)]


@pytest.mark.parametrize(("ring_size", "coalesce", "staggered"), RINGS)
@pytest.mark.parametrize("way", [1, -1])
def test_every_distance_has_one_round_and_every_pair_of_ranks_one_distance(
    ring_size: int, coalesce: int, staggered: bool, way: int
) -> None:
    ring = DoubleRing(ring_size, 1, way, coalesce, staggered)
    visiting = range(1, ring.visiting_rounds + 1)
    for block in range(ring_size):
        assert list(ring.distances(0, block)) == [0]
        listed = [(d, index) for index in visiting for d in ring.distances(index, block)]
        assert [d for d, _ in listed] == list(range(1, ring_size))
        assert all(ring.first_round(d, block) == index for d, index in listed)
        for d, index in listed:
            assert (block, Stop(d, 0)) in ring.visitors(index, ring.rank_at(block, Stop(d, 0)))
            # It comes from home, or from where it was in the round before.
            before = ring.before(d, block)
            assert before == 0 if index == 1 else before in ring.distances(index - 1, block)
        stops = [Stop(d, 0) for d in range(ring_size)]
        assert sorted(ring.rank_at(block, stop) for stop in stops) == list(range(ring_size))
        assert all(ring.block_at(ring.rank_at(block, stop), stop) == block for stop in stops)


def slots(phase: PhasePlan) -> tuple[int, int]:
    """Rows of all operand buffers and of all result buffers."""
    return sum(phase.slot_rows), sum(phase.result_slot_rows)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("coalesce", COALESCE)
@pytest.mark.parametrize(
    ("mask", "layout"),
    [(full(), "zigzag"), (causal(), "zigzag"), (causal(), "contiguous")],
    ids=["full", "causal-zigzag", "causal"],
)
def test_memory_does_not_grow_with_the_ring(mask: Mask, layout: str, coalesce: int, direction: str) -> None:
    """It is the same from the ring on that has three whole groups; a smaller ring has slots that it never fills.

    Of oddly many ranks it may be more than of evenly many, where fewer results may come home in one round.
    """
    whole = 3 * coalesce + 1
    for last in (15, 16):
        plans = {size: ring_plan(size, coalesce, direction, mask, layout) for size in range(last, 3, -2)}
        for name in PHASES:
            held = {size: slots(made.phase(name)) for size, made in plans.items()}
            assert {held[size] for size in held if size >= whole} == {held[last]}
            assert all(rows <= most for size in held for rows, most in zip(held[size], held[last], strict=True))
        peaks = [max(made.peak_bytes(rank) for rank in range(size)) for size, made in plans.items() if size >= whole]
        assert len(set(peaks)) == 1


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("mask", [full(), causal()], ids=str)
def test_what_vendors_kernels_let_wait_does_not_grow_with_the_ring(mask: Mask, kv_heads: int) -> None:
    """From 8 ranks on; a smaller ring has less to wait."""
    pytest.importorskip("triton")
    peaks = {}
    for size in (4, 8, 11, 16, 24):
        made = plan(
            SHARD * size, size, heads=8, kv_heads=kv_heads, head_dim=8, mask=mask, layout="zigzag", coalesce=2,
            device="cuda",
        )  # fmt: skip
        peaks[size] = max(made.peak_bytes(rank) for rank in range(size))
    assert peaks[4] < peaks[8] == peaks[11] == peaks[16] == peaks[24]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(cases(), st.sampled_from(DIRECTIONS))
def test_memory_is_bounded_by_shards(case: Case, direction: str) -> None:
    """Two groups of visitors and one own block; results of one group, those that reach it, and those for home."""
    for phase in phases(case.plan(direction)):
        most = max(phase.local_rows)
        first, second, *inside, own = phase.slot_rows
        assert inside == [0, 0]
        assert max(first, second) <= case.coalesce * most and own <= most
        computed, held, received, received_long = phase.result_slot_rows
        assert held == received_long == 0
        assert computed <= case.coalesce * most and received <= 2 * case.coalesce * most


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("coalesce", COALESCE)
def test_full_attention_holds_two_groups_of_shards_and_two_of_results(coalesce: int, direction: str) -> None:
    for phase in phases(ring_plan(16, coalesce, direction, full())):
        group = coalesce * SHARD
        assert phase.slot_rows == (group, group, 0, 0, 0)
        assert phase.result_slot_rows == ((group, 0, group, 0) if phase.results.fields else (0, 0, 0, 0))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(cases(), st.sampled_from(DIRECTIONS))
def test_bytes_do_not_depend_on_how_many_blocks_share_a_round(case: Case, direction: str) -> None:
    one, several = (phases(each.plan(direction, batch=WIDE)) for each in (case._replace(coalesce=1), case))
    for alone, together in zip(one, several, strict=True):
        assert together.total_bytes == alone.total_bytes
        assert [together.flops(rank) for rank in range(case.layout.ring_size)] == [
            alone.flops(rank) for rank in range(case.layout.ring_size)
        ]


@pytest.mark.parametrize("ring_size", [4, 5, 8])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_two_blocks_of_one_side_of_the_diagonal_are_one_full_piece(direction: str, ring_size: int) -> None:
    """Causal zigzag: an earlier rank's keys are half needed, by all queries; a later one's all, by half of them.

    So two blocks from the same side of the diagonal have the same staying rows, and the packed ones touch.
    """
    seen = set()
    half = SHARD // 2
    for phase in phases(ring_plan(ring_size, 2, direction, causal())):
        for rank, step in steps(phase):
            blocks = [visit.block for visit in step.visits]
            if rank in blocks:
                continue
            assert all(len(visit.pieces) == 1 for visit in step.visits)
            lower = {rank > block if direction == "kv" else block > rank for block in blocks}
            seen.add((len(blocks), *sorted(lower)))
            assert len(lower) == 1 or ring_size % 2, "the first block of the ring and the last are never together"
            if len(lower) == 2:
                assert len(step.pieces) == 2 and all(piece.is_full for piece in step.pieces)
                continue
            # Below the diagonal all queries meet the early half of the keys; above it late queries meet all keys.
            below = lower == {True}
            queries, keys = ((0, SHARD), (0, half)) if below else ((half, half), (0, SHARD))
            if direction == "kv":
                expected = full_piece(*queries, 0, keys[1] * len(blocks))
            else:
                expected = full_piece(0, queries[1] * len(blocks), *keys)
            assert step.pieces == (expected,)
    assert seen >= {(2, False), (2, True)}
    assert ((2, False, True) in seen) == (ring_size % 2 == 1)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(cases(), st.sampled_from(DIRECTIONS))
def test_packed_pieces_are_the_pieces_of_the_visits(case: Case, direction: str) -> None:
    """Row by row: every place of the buffer, or of home's own block, has the pairs that its visit gives it."""
    stays = case.layout if direction == "kv" else case.key_layout
    for phase in phases(case.plan(direction)):
        staying = [stays.local_tokens(rank) for rank in range(stays.ring_size)]
        for rank, step in steps(phase):
            own = [visit.block for visit in step.visits] == [rank]
            places = [(rank, row) for row in range(phase.local_rows[rank])] if own else buffer_of(step)
            packed = table(phase, step.pieces, staying[rank], len(places))
            for visit in step.visits:
                apart = table(phase, visit.pieces, staying[rank], phase.local_rows[visit.block])
                at = [place for place, (block, _) in enumerate(places) if block == visit.block]
                np.testing.assert_array_equal(packed[:, at], apart[:, [places[place][1] for place in at]])
                assert apart.sum() == packed[:, at].sum(), "the visit has no pair outside of its rows"
            assert step.row_count == (0 if own else len(places))


def table(phase: PhasePlan, pieces: tuple[Piece, ...], staying: int, moving: int) -> NDArray[np.int_]:
    """How often pieces hold each (staying row, moving row)."""
    shape = (staying, moving) if phase.direction == "kv" else (moving, staying)
    count = sum((piece_table(piece, *shape).astype(int) for piece in pieces), np.zeros(shape, int))
    return count if phase.direction == "kv" else count.T


@settings(deadline=None, derandomize=True, max_examples=60)
@given(cases(), st.sampled_from(DIRECTIONS))
def test_offsets_point_at_every_row_of_the_buffer(case: Case, direction: str) -> None:
    for phase in phases(case.plan(direction)):
        for _, step, visit in away(phase):
            assert buffer_of(step).count((visit.block, visit.rows[0][0])) == 1
            for place, (block, row) in enumerate(buffer_of(step)):
                assert step.offset(block, row) == place


def test_more_blocks_than_there_are_others_come_in_one_round() -> None:
    made = ring_plan(3, 8, "kv", causal())
    for phase in phases(made):
        simulate(phase)
        assert {step.index for _, step, _ in away(phase)} == {1}
        assert {len(step.visits) for rank, step in steps(phase)} == {1, 2}
        assert {t.source for t in sent(phase, "operand") if t.source != t.block} == set()
    assert sum(1 for _ in visits(made.forward)) == 9
