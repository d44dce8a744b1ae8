"""A fault is put here into one rank of a training step, and what each rank says of it is caught."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention import Ring, burst_attention
from burst_attention.tiles.cpu_flash import CpuFlashKernel
from burst_attention.tiles.plain import PlainKernel

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


def fail_at_call(phase: str, call: int, fault: Callable[[], None]) -> None:
    """Make this process fail at its n-th kernel call of a phase from now on, where the kernel is the CPU's own."""
    inner, count = getattr(CpuFlashKernel, phase), [0]

    def failing(*args: Any) -> None:
        count[0] += 1
        if count[0] == call:
            fault()
        inner(*args)

    setattr(CpuFlashKernel, phase, failing)
