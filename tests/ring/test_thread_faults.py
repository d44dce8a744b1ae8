"""A rank in a thread that fails, leaves or stays silent is named on every other rank, soon, and nobody hangs."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch

from burst_attention import Ring, RingError, burst_attention, run_ranks
from tests.ring.call_variants import SIDES
from tests.ring.fault_injection import QUICK, TIMEOUT, InjectedError, attempt, fail, inject, inputs, on_thread, step


@pytest.mark.parametrize("direction", SIDES)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    ("size", "bad", "number"),
    [(3, 1, 2), (4, 0, 1), (4, 2, 2)],
    ids=["3-ranks-round-1", "4-ranks-round-0", "4-ranks-round-1"],
)
def test_every_rank_names_the_one_that_failed(
    size: int, bad: int, number: int, phase: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, phase, number, fail, on_thread(bad))

    def body(ring: Ring) -> tuple[str, float]:
        sides = {"direction": direction, "forward_direction": direction}
        return attempt(ring, lambda: step(ring, **sides))

    results = run_ranks(body, size, timeout=TIMEOUT)
    origin = rf"rank {bad} failed in {phase} round {number - 1}: InjectedError: injected"
    waited = 0
    for rank, (text, seconds) in enumerate(results):
        assert seconds < QUICK
        if rank == bad:
            assert text == "InjectedError: injected"
            continue
        # Its own place, the peer it waited for, and who failed, where and why.
        peer = r"(?:no \w+ block \d from rank (\d)|rank (\d) does not take \w+ block \d)"
        found = re.fullmatch(rf"RingError: rank {rank}, {phase} round \d: {peer}: {origin}", text)
        if found:
            assert int(found[1] or found[2]) != rank
            waited += 1
        else:
            # It had all it needed of that phase, and hears of it in its next call.
            assert phase == "forward"
            later = rf"rank {rank}, backward agreement: no record of call 2 from rank \d: {origin}"
            advice = "make a new one, over a new group"
            earlier = rf"rank {rank}: this ring failed earlier and cannot be used again; {advice} \({origin}\)"
            assert re.fullmatch(f"RingError: (?:{later}|{earlier})", text), text
    assert waited >= 1


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_run_ranks_raises_the_first_error(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, phase, 1, fail, on_thread(1))
    started = time.monotonic()
    with pytest.raises(InjectedError, match="injected"):
        run_ranks(step, 3, timeout=TIMEOUT)
    assert time.monotonic() - started < QUICK


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_run_ranks_raises_the_first_error_however_threads_are_scheduled(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others hear of the failure before the failing rank has left the call; theirs are not the first errors."""
    original = Ring.abort

    def slow_abort(self: Ring, message: str) -> None:
        original(self, message)
        if self.rank == 1:
            time.sleep(0.1)

    monkeypatch.setattr(Ring, "abort", slow_abort)
    inject(monkeypatch, phase, 1, fail, on_thread(1))
    with pytest.raises(InjectedError, match="injected"):
        run_ranks(step, 3, timeout=TIMEOUT)


@pytest.mark.parametrize(
    "message", ["x" * 3000, "é" * 400, '"' * 1500, "line\n" * 400], ids=["long", "beyond-ascii", "quotes", "lines"]
)
def test_a_failure_with_any_message_is_told(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record has a fixed size; what does not fit is cut, and never hides the error or its origin."""

    def fail_at_length() -> None:
        raise InjectedError(message)

    inject(monkeypatch, "forward", 2, fail_at_length, on_thread(1))
    results = run_ranks(lambda ring: attempt(ring, lambda: step(ring)), 3, timeout=TIMEOUT)
    for rank, (text, seconds) in enumerate(results):
        assert seconds < QUICK
        if rank == 1:
            assert text == f"InjectedError: {message}"
        else:
            assert f"rank 1 failed in forward round 1: InjectedError: {message[:4]}" in text


def test_a_failed_ring_says_that_it_cannot_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "forward", 2, fail, on_thread(1))

    def body(ring: Ring) -> tuple[str, str]:
        first, _ = attempt(ring, lambda: step(ring))
        moved = ring.bytes_sent
        again, seconds = attempt(ring, lambda: step(ring))
        assert seconds < QUICK and ring.bytes_sent == moved
        return first, again

    for rank, (first, again) in enumerate(run_ranks(body, 3, timeout=TIMEOUT)):
        assert first.startswith("InjectedError" if rank == 1 else "RingError")
        assert ": this ring failed earlier and cannot be used again; make a new one, over a new group (" in again
        assert "rank 1 failed in forward round 1: InjectedError: injected" in again


def test_backward_on_a_ring_that_failed_since_forward() -> None:
    forward_done = threading.Barrier(3, timeout=TIMEOUT)

    def body(ring: Ring) -> str:
        out = burst_attention(*inputs(ring.rank), ring=ring)
        forward_done.wait()
        if ring.rank == 1:
            ring.abort("rank 1 gave up")
        else:
            while ring._inbox.failure is None:
                time.sleep(0.01)
        return attempt(ring, lambda: out.sum().backward())[0]

    for rank, text in enumerate(run_ranks(body, 3, timeout=TIMEOUT)):
        assert text.startswith(f"RingError: rank {rank}: this ring failed earlier and cannot be used again; ")
        assert text.endswith("make a new one, over a new group (rank 1 gave up)")


def test_other_rings_outlive_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_ranks(step, 3, timeout=TIMEOUT)
    inject(monkeypatch, "backward", 1, fail, on_thread(1))
    with pytest.raises((InjectedError, RingError)):
        run_ranks(step, 3, timeout=TIMEOUT)
    for found, other in zip(run_ranks(step, 3, timeout=TIMEOUT), expected, strict=True):
        assert torch.equal(found, other)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_rank_that_returned_is_named(phase: str) -> None:
    def body(ring: Ring) -> tuple[str, float]:
        def call() -> None:
            if phase == "forward" and ring.rank == 2:
                return
            out = burst_attention(*inputs(ring.rank), ring=ring)
            if phase == "backward" and ring.rank == 2:
                return
            out.sum().backward()

        return attempt(ring, call)

    results = run_ranks(body, 3, timeout=TIMEOUT)
    number = 1 if phase == "forward" else 2
    for rank, (text, seconds) in enumerate(results[:2]):
        missing = f"no record of call {number} from rank 2: rank 2 has returned"
        assert text == f"RingError: rank {rank}, {phase} agreement: {missing}"
        assert seconds < QUICK
    assert results[2][0] == "no error"


def test_a_rank_that_raised_outside_the_ring_is_named() -> None:
    texts: dict[int, str] = {}

    def body(ring: Ring) -> None:
        if ring.rank == 2:
            raise InjectedError("before the call")
        texts[ring.rank], _ = attempt(ring, lambda: step(ring))

    with pytest.raises(InjectedError, match="before the call"):
        run_ranks(body, 3, timeout=TIMEOUT)
    for rank in (0, 1):
        missing = "no record of call 1 from rank 2: rank 2 raised InjectedError: before the call"
        assert texts[rank] == f"RingError: rank {rank}, forward agreement: {missing}"


def test_a_rank_that_never_enters_is_named_within_the_timeout() -> None:
    timeout, done = 1.0, threading.Barrier(3, timeout=TIMEOUT)

    def body(ring: Ring) -> tuple[str, float]:
        result = ("slept", 0.0) if ring.rank == 1 else attempt(ring, lambda: step(ring))
        # Silent until the others have given up, not gone: a rank that left would be noticed at once.
        done.wait()
        return result

    results = run_ranks(body, 3, timeout=timeout)
    for rank in (0, 2):
        text, seconds = results[rank]
        assert text == f"RingError: rank {rank}, forward agreement: no record of call 1 from rank 1 within 1 s"
        assert timeout * 0.9 < seconds < timeout + 2


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_rank_that_stops_between_rounds_is_named_within_the_timeout(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout = 1.0
    inject(monkeypatch, phase, 2, lambda: time.sleep(2 * timeout), on_thread(1))
    results = run_ranks(lambda ring: attempt(ring, lambda: step(ring, direction="kv")), 3, timeout=timeout)
    assert any(
        re.search(
            rf"{phase} round \d: (no \w+ block \d from rank 1|rank 1 does not take \w+ block \d) within 1 s", text
        )
        for text, _ in results
    ), results
    for rank, (text, seconds) in enumerate(results):
        assert text.startswith("RingError: ")
        assert rank == 1 or timeout * 0.9 < seconds < timeout + 2
