"""Ranks started as threads or processes give results in order, raise the first error, and inherit torch modes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention import Ring, burst_attention, causal, launch, run_ranks
from burst_attention.launch import run_processes
from tests.ring.fault_injection import TIMEOUT, InjectedError, inputs, step


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
