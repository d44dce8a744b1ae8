"""A process that dies, raises or stays silent is named by every survivor, soon, and none is left behind."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_attention import Ring, RingError
from burst_attention.launch import RankFailedError, run_processes
from tests.ring.fault_injection import attempt, fail, inject, step


def survivors(
    body: Callable[[Ring], Any], size: int, *, timeout: float = 40.0, ring_timeout: float = 15.0
) -> dict[int, str]:
    """What every rank of a run of processes that fails had to say; none of the processes is left."""
    with pytest.raises(RankFailedError) as caught:
        run_processes(body, size, timeout=timeout, ring_timeout=ring_timeout)
    assert multiprocessing.active_children() == []
    return caught.value.errors


def in_process(rank: int) -> Callable[[], bool]:
    return lambda: torch.distributed.get_rank() == rank


@pytest.mark.parametrize(("size", "direction"), [(3, "kv"), (4, "query")])
def test_a_killed_process_is_noticed_by_every_survivor(
    size: int, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second round of backward: gradients of visiting blocks are on their way."""
    inject(monkeypatch, "backward", 2, lambda: os.kill(os.getpid(), signal.SIGKILL), in_process(1))
    started = time.monotonic()
    errors = survivors(lambda ring: step(ring, direction=direction), size)
    assert time.monotonic() - started < 10
    assert sorted(errors) == list(range(size))
    assert errors.pop(1) == "died with exit code -9"
    for rank, text in errors.items():
        assert re.match(rf"RingError: rank {rank}, backward round \d: .*\brank [^{rank}]", text), text
    assert any("rank 1" in text for text in errors.values())


@pytest.mark.parametrize("direction", ["kv", "query"])
def test_a_process_killed_while_the_others_compute_is_named(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet a closed connection when they post the next round's transfers."""

    def die_or_compute_long() -> None:
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.5)

    inject(monkeypatch, "forward", 2, die_or_compute_long, lambda: True)
    errors = survivors(lambda ring: step(ring, forward_direction=direction), 4)
    assert errors.pop(1) == "died with exit code -9"
    assert sorted(errors) == [0, 2, 3]
    for rank, text in errors.items():
        assert re.match(rf"RingError: rank {rank}, forward round \d: .*\brank [^{rank}]", text), text


def test_a_process_killed_before_the_call_is_named() -> None:
    def body(ring: Ring) -> None:
        ring.exchange({}, "start")
        if ring.rank == 1:
            # By now the others are past the exchange, which proves that every ring is complete.
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        step(ring)

    started = time.monotonic()
    errors = survivors(body, 3)
    assert time.monotonic() - started < 10
    assert errors.pop(1) == "died with exit code -9"
    assert sorted(errors) == [0, 2]
    for rank, text in errors.items():
        assert text.startswith(f"RingError: rank {rank}, forward agreement: no record of call 1 from rank 1: ")


def test_a_process_that_raises_is_named_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "backward", 2, fail, in_process(1))
    started = time.monotonic()
    errors = survivors(step, 3)
    assert time.monotonic() - started < 10
    assert errors[1] == "InjectedError: injected"
    for rank in (0, 2):
        assert errors[rank].startswith(f"RingError: rank {rank}, backward round ")
        assert errors[rank].endswith("rank 1 failed in backward round 1: InjectedError: injected")


def test_a_silent_process_is_named_within_the_timeout() -> None:
    def body(ring: Ring) -> tuple[str, float]:
        if ring.rank == 1:
            time.sleep(2.5)
            return "slept", 0.0
        result = attempt(ring, lambda: step(ring))
        # Stay until all have given up: a rank that left would be noticed at once.
        time.sleep(0.5)
        return result

    results = run_processes(body, 3, timeout=40, ring_timeout=1.0)
    assert multiprocessing.active_children() == []
    for rank in (0, 2):
        text, seconds = results[rank]
        assert text == f"RingError: rank {rank}, forward agreement: no record of call 1 from rank 1 within 1 s"
        assert 0.9 < seconds < 3


def test_processes_that_take_too_long_are_ended_and_named() -> None:
    def body(ring: Ring) -> int:
        if ring.rank == 1:
            time.sleep(60)
        return ring.rank

    started = time.monotonic()
    errors = survivors(body, 2, timeout=2.0)
    assert time.monotonic() - started < 10
    assert errors == {1: "not done after 2 s"}


def test_a_ring_that_a_rank_does_not_make_is_an_error_within_the_timeout() -> None:
    def body(ring: Ring) -> str:
        group = dist.new_group([0, 1])
        if ring.rank == 1:
            time.sleep(4.0)
            return "absent"
        started = time.monotonic()
        with pytest.raises(RingError) as caught:
            Ring.from_group(group, timeout=1.5)
        assert time.monotonic() - started < 10
        return str(caught.value)

    text, _ = run_processes(body, 2, timeout=60)
    assert text == "rank 0: no ring of 2 ranks within 1.5 s: rank 1 did not come"
