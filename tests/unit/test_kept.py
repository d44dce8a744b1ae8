"""What is kept is computed once, by whichever thread asks first, and a forked process waits for no thread it lacks."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from burst_attention import Layout, causal, plan
from burst_attention.kept import kept
from burst_attention.schedule import build


def test_threads_that_ask_together_compute_once() -> None:
    calls = []

    @kept(4)
    def square(number: int) -> int:
        calls.append(number)
        time.sleep(0.05)
        return number**2

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(square, [3] * 8)) == [9] * 8
    assert calls == [3]


def test_the_least_used_are_dropped() -> None:
    calls = []

    @kept(2)
    def square(number: int) -> int:
        calls.append(number)
        return number**2

    assert [square(number) for number in (1, 2, 1, 3, 2)] == [1, 4, 1, 9, 4]
    assert calls == [1, 2, 3, 2]


def test_a_plan_is_built_once_for_all_threads(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    built = []
    plain = build._choose
    monkeypatch.setattr(build, "_choose", lambda *asked: built.append(asked[4]) or plain(*asked))
    options = {"heads": 2, "head_dim": 16, "mask": causal(), "layout": Layout.zigzag(1237, 4)}
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: plan(1237, 4, **options), range(4)))  # type: ignore[arg-type]
    assert built == ["forward", "backward"]


def test_a_process_forked_while_a_thread_computes_is_not_stuck() -> None:
    begun, may_end = threading.Event(), threading.Event()

    @kept(1)
    def slow() -> int:
        begun.set()
        may_end.wait(10)
        return 1

    @kept(1)
    def quick() -> int:
        return 2

    thread = threading.Thread(target=slow)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        # Asked by this thread: a new one may get the number of the thread that is gone, and with it the lock.
        signal.alarm(5)
        os._exit(0 if quick() == 2 else 1)
    may_end.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
