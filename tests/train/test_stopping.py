"""A signal to one rank stops all of them at the same step."""

from __future__ import annotations

import os
import signal

import pytest

from burst_attention import Ring
from burst_attention.launch import run_processes
from burst_attention.train.checkpoint import Stopper


def test_a_signal_to_one_rank_stops_all_at_the_same_step() -> None:
    def body(ring: Ring) -> tuple[int, bool]:
        before = signal.getsignal(signal.SIGTERM)
        with Stopper() as stopper:
            for step in range(10):
                if ring.rank == 1 and step == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                if stopper.requested():
                    break
        return step, signal.getsignal(signal.SIGTERM) == before

    assert run_processes(body, 3) == [(3, True)] * 3


def test_the_second_interrupt_interrupts() -> None:
    with Stopper() as stopper:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopper.requested()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
