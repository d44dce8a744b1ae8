"""Calls that differ between ranks raise one clear error on every rank before anything moves."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from burst_attention import Ring, burst_attention, run_ranks
from burst_attention.agreement import LocalCall
from tests.ring.refusals import SIZE, TIMEOUT, WRONG, attempt, correct_call, inputs, refused_everywhere, wanting
from tests.ring.wrong_calls import DIFFERENCES, Difference, both


@pytest.mark.parametrize("case", DIFFERENCES, ids=lambda case: case.name)
def test_ranks_that_differ_are_all_told(case: Difference) -> None:
    text = refused_everywhere(case.call)
    for part in case.says:
        assert part in text


@pytest.mark.parametrize("needs", ["qkv", ""], ids=["training", "inference"])
def test_return_lse_that_differs_is_told(needs: str) -> None:
    """It decides which gradients exist and which kernel serves, so it must be the same."""

    def call(ring: Ring) -> Any:
        return burst_attention(*wanting(needs)(inputs(ring.rank)), ring=ring, return_lse=ring.rank == WRONG)

    text = refused_everywhere(call)
    for part in ("ranks disagree on options", "return_lse=False", "rank 1 has", "return_lse=True", "the same call"):
        assert part in text


def test_grad_mode_that_differs_is_told() -> None:
    def call(ring: Ring) -> Any:
        with torch.set_grad_enabled(ring.rank != WRONG):
            return burst_attention(*wanting("qkv")(inputs(ring.rank)), ring=ring)

    assert refused_everywhere(call) == both("requires_grad", "qkv", "")[0]


def test_device_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be one kind of device here, so the record of one rank is made to name another."""
    original = LocalCall.record

    def record(self: LocalCall) -> dict[str, Any]:
        wrong = threading.current_thread().name == f"ring-rank-{WRONG}" and self.options.scale == 0.5
        return original(self) | ({"device": "cuda"} if wrong else {})

    monkeypatch.setattr(LocalCall, "record", record)
    text = refused_everywhere(lambda ring: burst_attention(*inputs(ring.rank), ring=ring, scale=0.5))
    assert text == both("device", "cpu", "cuda")[0]


def test_a_rank_on_the_meta_device_is_told() -> None:
    def call(ring: Ring) -> Any:
        device = "meta" if ring.rank == WRONG else "cpu"
        return burst_attention(*(x.to(device) for x in inputs(ring.rank)), ring=ring)

    assert "meta" in refused_everywhere(call)


@pytest.mark.parametrize("phase_of_rank_1", ["forward", "backward"])
def test_ranks_in_different_phases_are_told(phase_of_rank_1: str) -> None:
    def body(ring: Ring) -> str:
        qkv = wanting("qkv")(inputs(ring.rank))
        out = burst_attention(*qkv, ring=ring)
        moved = ring.bytes_sent
        backward = (phase_of_rank_1 == "backward") == (ring.rank == WRONG)
        call = out.sum().backward if backward else lambda: burst_attention(*qkv, ring=ring)
        text = attempt(ring, call)
        assert ring.bytes_sent == moved
        correct_call(ring)
        return text

    other = "forward" if phase_of_rank_1 == "backward" else "backward"
    expected = f"ValueError: {both('phase', other, phase_of_rank_1)[0]}"
    assert run_ranks(body, SIZE, timeout=TIMEOUT) == [expected] * SIZE
