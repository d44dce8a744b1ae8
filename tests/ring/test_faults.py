"""A rank that fails, dies or stays silent is named on every other rank, soon, and nobody hangs."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention import Ring, RingError, burst_attention, causal, launch, run_ranks
from burst_attention.launch import RankFailedError, run_processes
from burst_attention.tiles.plain import PlainKernel

SIDES = ("kv", "query")
TIMEOUT = 20.0
QUICK = 4.0
"""Seconds in which a failure must be heard everywhere; no wait would end by itself so early."""


class InjectedError(Exception):
    """What the tests raise inside a kernel."""


def inputs(rank: int, tokens: int = 4, seed: int = 0) -> list[Tensor]:
    """q, k, v of one rank, which want gradients."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randn(1, 2, tokens, 8, generator=generator).requires_grad_() for _ in range(3)]


def step(ring: Ring, **options: Any) -> Tensor:
    """Forward and backward over full attention, so that every rank hears from every other."""
    options = {"kernel": "plain", **options}
    out = burst_attention(*inputs(ring.rank), ring=ring, **options)
    out.sum().backward()
    return out.detach()


def attempt(ring: Ring, call: Callable[[], Any]) -> tuple[str, float]:
    """("Type: text" of the error, or "no error", and the seconds until it came)."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "no error", time.monotonic() - started


def inject(
    monkeypatch: pytest.MonkeyPatch, phase: str, number: int, act: Callable[[], None], at: Callable[[], bool]
) -> None:
    """Do `act` instead of a kernel's call of that number in a phase, on the rank where `at` holds."""
    original = getattr(PlainKernel, phase)
    seen = {"calls": 0}

    def patched(*args: Any, **kwargs: Any) -> None:
        if at():
            seen["calls"] += 1
            if seen["calls"] == number:
                act()
        original(*args, **kwargs)

    monkeypatch.setattr(PlainKernel, phase, patched)


def on_thread(rank: int) -> Callable[[], bool]:
    return lambda: threading.current_thread().name == f"ring-rank-{rank}"


def fail() -> None:
    raise InjectedError("injected")


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
            earlier = rf"this ring failed earlier and cannot be used again; make a new one \({origin}\)"
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
        assert again.startswith("RingError: this ring failed earlier and cannot be used again; make a new one (")
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

    for text in run_ranks(body, 3, timeout=TIMEOUT):
        assert text == ("RingError: this ring failed earlier and cannot be used again; make a new one (rank 1 gave up)")


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


RECORDS = {
    "text": b"garbage",
    "nothing": b"",
    "zeros": bytes(1024),
    "beyond-utf-8": b"\xff\xfe\x00",
    "a-list": b"[1, 2]",
    "a-number": b"7",
    "no-call": b'{"kind": "call"}',
    "no-kind": b'{"call": 1}',
    "call-is-text": b'{"kind": "call", "call": "first"}',
    "call-is-null": b'{"kind": "call", "call": null}',
    "call-is-infinite": b'{"kind": "call", "call": Infinity}',
    "nested-too-deep": b"[" * 1024,
}


def after_record(data: bytes, source: int) -> str:
    """What a rank of two says in its first call when the other's record was `data`."""
    done = threading.Event()

    def body(ring: Ring) -> str:
        if ring.rank == source:
            done.wait(TIMEOUT)
            return "sent it"
        try:
            ring._inbox.deliver(source, data)
            return attempt(ring, lambda: burst_attention(*inputs(ring.rank), ring=ring))[0]
        finally:
            done.set()

    return run_ranks(body, 2, timeout=QUICK)[1 - source]


@pytest.mark.parametrize("data", RECORDS.values(), ids=RECORDS.keys())
@pytest.mark.parametrize("source", [0, 1], ids=["from-0", "from-1"])
def test_a_control_record_that_cannot_be_read(data: bytes, source: int) -> None:
    text = after_record(data, source)
    assert text.startswith("RingError: ") and f"rank {source} sent a control record that cannot be read" in text


@pytest.mark.parametrize("source", [0, 1], ids=["from-0", "from-1"])
@pytest.mark.parametrize(
    "data",
    [b'{"kind": "call", "call": 1}', b'{"kind": "call", "call": 1, "phase": ["forward"]}'],
    ids=["no-fields", "field-of-another-type"],
)
def test_a_control_record_that_lacks_what_a_call_has(data: bytes, source: int) -> None:
    """It can be read, so it is a disagreement at least; a KeyError or TypeError would say nothing to anybody."""
    assert after_record(data, source).startswith(("RingError: ", "ValueError: "))


def test_results_come_in_rank_order() -> None:
    def body(ring: Ring) -> tuple[int, int, str]:
        time.sleep(0.05 * (3 - ring.rank))
        return ring.rank, ring.size, threading.current_thread().name

    assert run_ranks(body, 4) == [(rank, 4, f"ring-rank-{rank}") for rank in range(4)]


def test_the_first_error_is_raised_not_that_of_the_lowest_rank() -> None:
    def body(ring: Ring) -> None:
        time.sleep(0.1 * (2 - ring.rank))
        raise InjectedError(f"rank {ring.rank}")

    with pytest.raises(InjectedError, match="rank 2"):
        run_ranks(body, 3)


@pytest.mark.parametrize("enabled", [True, False], ids=["grad", "no-grad"])
def test_grad_mode_carries_over(enabled: bool) -> None:
    def body(ring: Ring) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), burst_attention(*inputs(ring.rank), ring=ring).requires_grad

    with torch.set_grad_enabled(enabled):
        assert run_ranks(body, 2, timeout=TIMEOUT) == [(enabled, enabled)] * 2
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("enabled", [True, False], ids=["inference", "normal"])
def test_inference_mode_carries_over(enabled: bool) -> None:
    def body(ring: Ring) -> tuple[bool, bool]:
        q, k, v = (x.detach() for x in inputs(ring.rank))
        return torch.is_inference_mode_enabled(), burst_attention(q, k, v, ring=ring).is_inference()

    with torch.inference_mode(enabled):
        assert run_ranks(body, 2, timeout=TIMEOUT) == [(enabled, enabled)] * 2


@pytest.mark.parametrize(
    ("enabled", "dtype"),
    [(True, torch.bfloat16), (True, torch.float16), (False, torch.float32)],
    ids=["bf16", "fp16", "off"],
)
def test_autocast_carries_over(enabled: bool, dtype: torch.dtype) -> None:
    def body(ring: Ring) -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled("cpu"), burst_attention(*inputs(ring.rank), ring=ring).dtype

    with torch.autocast("cpu", dtype if enabled else torch.bfloat16, enabled=enabled):
        assert run_ranks(body, 2, timeout=TIMEOUT) == [(enabled, dtype)] * 2


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


def test_what_processes_return_outlives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors too, and when nobody looks at them before the process has ended."""
    original = launch.wait

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return original(*args, **kwargs)

    monkeypatch.setattr(launch, "wait", late)

    def body(ring: Ring) -> tuple[int, Tensor]:
        return ring.rank, torch.full((1000,), float(ring.rank))

    for expected, (rank, values) in enumerate(run_processes(body, 2, timeout=40)):
        assert rank == expected
        assert torch.equal(values, torch.full((1000,), float(rank)))


def test_processes_agree_with_threads() -> None:
    """The same engine over both transports, bit for bit."""

    def body(ring: Ring) -> list[float]:
        return step(ring, mask=causal(), layout="zigzag").flatten().tolist()

    assert run_processes(body, 3, timeout=40) == run_ranks(body, 3, timeout=TIMEOUT)


def test_backward_stays_in_the_rank_s_own_thread() -> None:
    """On a GPU autograd would else run all ranks' backwards in one device thread, where the first blocks the others."""
    assert run_ranks(lambda ring: torch._C._is_multithreading_enabled(), 2) == [False, False]
