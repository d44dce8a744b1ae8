"""What is told when a call fails outside its rounds, and what a failed ring says afterwards."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_attention import Ring, RingError, burst_attention, ops, plan, run_ranks
from burst_attention.engine import PhaseRun
from burst_attention.launch import RankFailedError, run_processes


def attend(ring: Ring) -> None:
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    burst_attention(q, k, v, ring=ring).sum().backward()


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("what", ["buffers", "rounds"])
def test_a_rank_without_memory_is_told(what: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its buffers, or for what its rounds will allocate, which is asked for before them."""
    place: Any = {"buffers": (PhaseRun, "_buffer"), "rounds": (ops, "ask_for_room")}[what]
    inner = getattr(*place)

    def failing(first: Any, *rest: Any) -> Any:
        run: PhaseRun = first if what == "buffers" else rest[0][0]
        if run.ring.rank == 1 and run.plan.phase == phase:
            raise MemoryError("no room")
        return inner(first, *rest)

    monkeypatch.setattr(*place, failing)
    started = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        run_processes(attend, 3, timeout=40, ring_timeout=30)
    assert time.monotonic() - started < 20
    errors = caught.value.errors
    assert errors.pop(1) == "MemoryError: no room"
    assert set(errors) == {0, 2}
    for text in errors.values():
        assert f"rank 1 failed in {phase}, outside its rounds: MemoryError: no room" in text


def test_a_failed_group_wants_a_new_one() -> None:
    def body(ring: Ring) -> tuple[str, str, bool]:
        if ring.rank == 0:
            ring.abort("rank 0 gave up")
        time.sleep(0.5)
        with pytest.raises(RingError) as used:
            attend(ring)
        with pytest.raises(RuntimeError) as asked:
            Ring.from_group()
        other = Ring.from_group(dist.new_group())
        attend(other)
        return str(used.value), str(asked.value), other is not ring

    for used, asked, different in run_processes(body, 2, timeout=60):
        assert "this ring failed earlier and cannot be used again" in used and "rank 0 gave up" in used
        assert "make a new group with torch.distributed.new_group()" in asked and different


def test_asking_for_a_ring_again_keeps_it_and_its_timeout() -> None:
    def body(ring: Ring) -> tuple[bool, float, float]:
        same, kept = Ring.from_group() is ring, ring.timeout
        return same, kept, Ring.from_group(timeout=7.0).timeout

    assert run_processes(body, 2, ring_timeout=5.0, timeout=60) == [(True, 5.0, 7.0)] * 2


def test_only_members_make_a_ring() -> None:
    def body(ring: Ring) -> str:
        group = dist.new_group([0])
        try:
            return f"ring of {Ring.from_group(group).size}"
        except ValueError as error:
            return str(error)

    first, second = run_processes(body, 2, timeout=60)
    assert first == "ring of 1"
    assert second == "this process is not a member of the group; only members make a ring over it"


def test_a_sparse_input_is_refused_on_every_rank() -> None:
    def body(ring: Ring) -> str:
        q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
        try:
            burst_attention(q.to_sparse() if ring.rank == 1 else q, k, v, ring=ring)
        except ValueError as error:
            return str(error)
        return "no error"

    expected = "rank 1 was called wrongly: q has layout torch.sparse_coo; make it dense with .to_dense()"
    assert run_ranks(body, 3, timeout=20) == [expected] * 3


def test_plans_refuse_what_is_not_a_number_of_heads_or_a_rank() -> None:
    with pytest.raises(ValueError, match=r"heads must be a whole number of at least 1, got 1\.5"):
        plan(8, 2, heads=1.5, head_dim=4)  # type: ignore[arg-type]
    made = plan(8, 2, heads=2, head_dim=4)
    for rank in (-1, 2):
        for ask in (lambda r: made.bytes_sent(r, "forward"), lambda r: made.flops(r, "backward"), made.peak_bytes):
            with pytest.raises(ValueError, match=f"rank {rank} is outside a ring of 2"):
                ask(rank)
