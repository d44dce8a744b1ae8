"""A ring between hosts and one inside each: every pair once, fewest bytes between hosts, and no buffer used twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burst_attention import blocks, causal, full, plan
from burst_attention.schedule import PhasePlan, PlanError, Transfer, simulate
from burst_attention.topology import BETWEEN, INSIDE, DoubleRing, Stop
from tests.unit.plan_changes import exchanged, later, placed
from tests.unit.plan_steps import DIRECTIONS, Case, cases, phases, require_each_pair_once, sent, shard_tables, steps

FACTORS = [(hosts, size // hosts) for size in range(1, 17) for hosts in range(1, size + 1) if size % hosts == 0]
SHARD = 8


def ring_plan(hosts: int, per_host: int, direction: str = "kv", mask: object = None) -> tuple[PhasePlan, PhasePlan]:
    ring_size = hosts * per_host
    made = plan(
        SHARD * ring_size, ring_size, heads=2, head_dim=8, mask=mask, layout="zigzag", direction=direction,
        forward_direction=direction, ranks_per_host=per_host,
    )  # type: ignore[arg-type]  # fmt: skip
    return phases(made)


@pytest.mark.parametrize(("hosts", "per_host"), FACTORS)
@pytest.mark.parametrize("way", [1, -1])
def test_a_block_visits_every_rank_once_host_by_host(hosts: int, per_host: int, way: int) -> None:
    ring = DoubleRing(hosts * per_host, per_host, way)
    for block in range(ring.size):
        turns = [ring.distances(turn, block) for turn in range(ring.turns)]
        visits = [Stop(d, inner) for distances in turns for inner in range(per_host) for d in distances]
        order = [ring.rank_at(block, stop) for stop in visits]
        assert sorted(order) == list(range(ring.size)) and order[0] == block
        assert [rank // per_host for rank in order[::per_host]] == [
            (block // per_host + way * d) % hosts for d in range(hosts)
        ]
    stops = [Stop(d, inner) for d in range(hosts) for inner in range(per_host)]
    assert all(ring.block_at(ring.rank_at(b, stop), stop) == b for b in range(ring.size) for stop in stops)


@pytest.mark.parametrize(("hosts", "per_host"), FACTORS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_each_rank_sends_one_shard_less_than_there_are_hosts_to_other_hosts(
    hosts: int, per_host: int, direction: str
) -> None:
    for phase in ring_plan(hosts, per_host, direction, full()):
        simulate(phase)
        flat = phase.topology.per_host == 1
        crossings = hosts * per_host - 1 if flat else hosts - 1
        shard = SHARD * (phase.operands.row_bytes + phase.results.row_bytes)
        assert phase.bytes_between_hosts == crossings * shard * hosts * per_host
        for transfer in (*sent(phase, "operand"), *sent(phase, "result")):
            assert transfer.link == (
                BETWEEN if flat or transfer.source // per_host != transfer.target // per_host else INSIDE
            )


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (3, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_goes_to_another_host_has_a_whole_turn(hosts: int, per_host: int, direction: str) -> None:
    """All but what ends the phase: the last host's results have the round that home ends with."""
    for phase in ring_plan(hosts, per_host, direction, causal()):
        last = len(phase.rounds[0]) - 1
        for transfer in (*sent(phase, "operand"), *sent(phase, "result")):
            rounds = transfer.due - transfer.round + 1
            if transfer.link == INSIDE:
                assert rounds == 1
            else:
                assert rounds == per_host or transfer.due == last, transfer


@settings(deadline=None, derandomize=True, max_examples=150)
@given(cases(), st.sampled_from(DIRECTIONS), st.data())
def test_pieces_cover_each_allowed_pair_once_and_the_plan_can_run(
    case: Case, direction: str, data: st.DataObject
) -> None:
    size = case.layout.ring_size
    per_host = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    case = case._replace(coalesce=1, per_host=per_host)
    tables = shard_tables(case)
    for phase in phases(case.plan(direction)):
        require_each_pair_once(phase, tables)
        simulate(phase)


def spanning(phase: PhasePlan, channel: str) -> list[Transfer]:
    return [t for t in sent(phase, channel) if t.spans]


def moved_later(phase: PhasePlan) -> Iterator[PhasePlan]:
    """Due a round later: then its buffer is still read or written when the next turn needs it, or it comes too late."""
    for channel in ("operand", "result"):
        yield from (placed(exchanged(phase, t), replace(t, due=t.due + 1)) for t in spanning(phase, channel))


def sent_later(phase: PhasePlan) -> Iterator[PhasePlan]:
    """Sent in the middle of a turn: its block, or its result, has gone on by then."""
    for channel in ("operand", "result"):
        passed = [t for t in spanning(phase, channel) if channel == "result" or t.source != t.block]
        yield from (placed(exchanged(phase, t), replace(t, round=t.round + 1)) for t in passed)


def due_early(phase: PhasePlan) -> Iterator[PhasePlan]:
    yield from (placed(exchanged(phase, t), replace(t, due=t.round)) for t in spanning(phase, "operand"))


def a_turn_early(phase: PhasePlan) -> Iterator[PhasePlan]:
    whole = [t for t in spanning(phase, "operand") if t.round >= phase.topology.per_host]
    yield from (placed(exchanged(phase, t), later(t, -phase.topology.per_host)) for t in whole)


@pytest.mark.parametrize("change", [moved_later, sent_later, due_early, a_turn_early])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_simulator_refuses_transfers_between_hosts_at_other_times(change: object, direction: str) -> None:
    tried = 0
    for phase in ring_plan(3, 2, direction, full()):
        for wrong in change(phase):  # type: ignore[operator]
            tried += 1
            with pytest.raises((PlanError, IndexError)):
                simulate(wrong)
    assert tried


def test_memory_does_not_grow_with_hosts() -> None:
    sizes = [[phase.slot_rows for phase in ring_plan(hosts, 4, "query", full())] for hosts in (3, 4)]
    assert sizes[0] == sizes[1]
    results = [[phase.result_slot_rows for phase in ring_plan(hosts, 4, "query", full())] for hosts in (3, 4)]
    assert results[0] == results[1]


def test_a_rank_passes_on_what_only_others_of_its_host_need() -> None:
    """Rank 3 needs keys of rank 0, which come by way of rank 2, whatever it needs itself."""
    mask = blocks([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]], 16)
    made = plan(64, 4, heads=2, head_dim=8, mask=mask, forward_direction="kv", ranks_per_host=2)
    passing = [rank for rank, step in steps(made.forward) if step.row_count and not step.pieces]
    assert passing == [2]
    simulate(made.forward)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks_per_host": 3}, "ring_size 4 is no multiple of ranks_per_host 3"),
        ({"ranks_per_host": 0}, "ranks_per_host must be a whole number of at least 1, got 0"),
        ({"ranks_per_host": 2, "coalesce": 2}, "coalesce=2 needs topology='flat'"),
    ],
)
def test_plans_that_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(64, 4, heads=2, head_dim=8, **options)  # type: ignore[arg-type]
