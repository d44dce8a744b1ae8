"""Results that go straight home: what a plan with them sends, and where buffers are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burst_attention import causal, full, plan
from burst_attention.schedule import PlanError, simulate
from burst_attention.schedule.buffers import require_memory
from burst_attention.schedule.plan import MOST_ARRIVALS, RESULT
from tests.unit.plan_steps import DIRECTIONS, WIDE, Case, cases, phases, steps


@settings(deadline=None, derandomize=True, max_examples=80)
@given(cases(), st.sampled_from(DIRECTIONS))
def test_every_part_goes_home_and_as_many_bytes_as_by_a_chain(case: Case, direction: str) -> None:
    straight = case.plan(direction, batch=WIDE, results="straight")
    for phase, chain in zip(phases(straight), phases(case.plan(direction, batch=WIDE)), strict=True):
        simulate(phase)
        assert all(t.target == t.block for _, step in steps(phase) for t in step.sends if t.channel == RESULT)
        assert phase.total_bytes == chain.total_bytes


@pytest.mark.parametrize("coalesce", [1, 2, 3])
@pytest.mark.parametrize("ring_size", [1, 2, 5, 16])
def test_a_few_rounds_of_arrivals_have_buffers_whatever_the_ring(ring_size: int, coalesce: int) -> None:
    made = plan(
        16 * ring_size, ring_size, heads=2, head_dim=8, mask=full(), direction="query", coalesce=coalesce,
        results="straight",
    )  # fmt: skip
    phase = made.phase("backward")
    assert phase.arrival_slots == min(MOST_ARRIVALS, max(-(-(ring_size - 1) // coalesce), 1))
    assert [phase.arrival_slot(2 + index) for index in range(phase.arrival_slots)] == list(range(phase.arrival_slots))
    assert made.forward.straight and made.forward.arrival_slots == 1, "states are merged when they arrive"


def test_the_proof_of_memory_sees_a_buffer_that_is_written_too_early() -> None:
    made = plan(16 * 8, 8, heads=2, head_dim=8, mask=causal(), layout="zigzag", direction="query", results="straight")
    phase = made.phase("backward")
    require_memory(phase, 0)

    steps_of = phase.rounds[0]
    late = [
        replace(step, receives=tuple(replace(t, due=t.round + 1) if t.channel == RESULT else t for t in step.receives))
        for step in steps_of
    ]
    with pytest.raises(PlanError, match="one buffer holds"):
        require_memory(replace(phase, rounds=(tuple(late), *phase.rounds[1:])), 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"results": "home"}, "results must be one of 'auto', 'chain', 'straight', got 'home'"),
        ({"results": "straight", "ranks_per_host": 2}, "results='straight' needs a flat ring"),
    ],
)
def test_what_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(64, 4, heads=2, head_dim=8, **changes)  # type: ignore[arg-type]
