"""What does not change from hop to hop and from run to run on a GPU: memory, and bits where they are promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention import burst_attention
from burst_attention.bench_tax import TaxCase, made_inputs, made_up_blocks
from burst_attention.ring.base import Pending
from burst_attention.ring.lone import LoneRing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASE = TaxCase(ranks=8, tokens_per_rank=2048, heads=4, kv_heads=4)


class WatchedRing(LoneRing):
    """Notes the allocator's device allocations and the peak after every round."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.device_allocations: list[int] = []
        self.peaks: list[int] = []

    def _finish(self, pending: Pending) -> None:
        super()._finish(pending)
        self.device_allocations.append(torch.cuda.memory_stats()["num_device_alloc"])
        self.peaks.append(torch.cuda.max_memory_allocated())


def forward_and_backward(ring: LoneRing, leaves: tuple[Tensor, ...], dout: Tensor, kernel: str) -> tuple[Tensor, ...]:
    out = burst_attention(*leaves, ring=ring, check="off", kernel=kernel, **CASE.options)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def watched(kernel: str) -> tuple[WatchedRing, tuple[Tensor, ...], Tensor]:
    """A ring that has run once, and what it ran on."""
    q, k, v, dout = made_inputs(CASE, CASE.tokens_per_rank)
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    ring = WatchedRing(3, CASE.ranks, made_up_blocks(CASE, CASE.plan(), "cuda"))
    forward_and_backward(ring, leaves, dout, kernel)
    torch.cuda.synchronize()
    ring.device_allocations.clear()
    torch.cuda.reset_peak_memory_stats()
    ring.peaks.clear()
    return ring, leaves, dout


@pytest.mark.parametrize("kernel", ["auto", "triton"])
def test_rounds_ask_the_device_for_no_memory(kernel: str) -> None:
    ring, leaves, dout = watched(kernel)
    forward_and_backward(ring, leaves, dout, kernel)
    assert len(set(ring.device_allocations)) == 1, ring.device_allocations


def test_after_the_first_hop_our_kernels_do_not_raise_the_peak() -> None:
    ring, leaves, dout = watched("triton")
    out = burst_attention(*leaves, ring=ring, check="off", kernel="triton", **CASE.options)
    forward = len(ring.peaks)
    assert len(set(ring.peaks[1:forward])) == 1, ring.peaks
    torch.autograd.grad(out, leaves, dout)
    assert len(set(ring.peaks[forward + 1 :])) == 1, ring.peaks


@pytest.mark.parametrize("kernel", ["auto", "triton"])
def test_forward_gives_the_same_bits_twice(kernel: str) -> None:
    ring, leaves, dout = watched(kernel)
    first, second = (forward_and_backward(ring, leaves, dout, kernel)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_backward_gives_the_same_bits_twice_where_torch_is_asked_to() -> None:
    ring, leaves, dout = watched("auto")
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (forward_and_backward(ring, leaves, dout, "auto") for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_queries_whose_gradient_is_zero_give_no_nan() -> None:
    """Masked labels: whole rows of dout are 0, also in what visits."""
    for kernel in ("auto", "triton"):
        ring, leaves, dout = watched(kernel)
        dout[:, :, ::3] = 0.0
        for result in forward_and_backward(ring, leaves, dout, kernel):
            assert result.isfinite().all()
