"""What does not change from hop to hop and from run to run on a GPU: memory, and bits where they are promised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention

from burst_attention import Layout, Ring, burst_attention, causal, run_ranks
from burst_attention.bench_tax import TaxCase, as_agreed, made_inputs, made_up_blocks
from burst_attention.ring.base import Pending
from burst_attention.ring.lone import LoneRing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOKENS = 8192
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


def attend(ring: LoneRing, leaves: tuple[Tensor, ...], kernel: str) -> Tensor:
    options = as_agreed(CASE.plan(kernel=kernel), {"kernel": kernel})
    out: Tensor = burst_attention(*leaves, ring=ring, check="off", **options, **CASE.options)
    return out


def forward_and_backward(ring: LoneRing, leaves: tuple[Tensor, ...], dout: Tensor, kernel: str) -> tuple[Tensor, ...]:
    out = attend(ring, leaves, kernel)
    # In this thread: another one may let go of its tensors later than this one goes on, where cores are short.
    with torch.autograd.set_multithreading_enabled(False):
        return out.detach(), *torch.autograd.grad(out, leaves, dout)


def watched(kernel: str) -> tuple[WatchedRing, tuple[Tensor, ...], Tensor]:
    """A ring that has run until blocks were made up for every buffer, and what it ran on."""
    q, k, v, dout = made_inputs(CASE, CASE.tokens_per_rank)
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    ring = WatchedRing(3, CASE.ranks, made_up_blocks(CASE, CASE.plan(kernel=kernel), "cuda"))
    for _ in range(3):
        forward_and_backward(ring, leaves, dout, kernel)
    torch.cuda.synchronize()
    ring.device_allocations.clear()
    torch.cuda.reset_peak_memory_stats()
    ring.peaks.clear()
    return ring, leaves, dout


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """A kernel's name, or FA4 for "auto" with it under torch's flash operator."""
    if request.param != "FA4":
        yield request.param
        return
    try:
        attention.activate_flash_attention_impl("FA4")
    except ImportError as error:
        pytest.skip(f"FA4 is not installed: {str(error).splitlines()[0]}")
    yield "auto"
    attention.restore_flash_attention_impl()


@pytest.mark.parametrize("kernel", ["auto", "triton", "hopper", "cudnn", "FA4"], indirect=True)
def test_rounds_ask_the_device_for_no_memory(kernel: str) -> None:
    ring, leaves, dout = watched(kernel)
    forward_and_backward(ring, leaves, dout, kernel)
    assert len(set(ring.device_allocations)) == 1, ring.device_allocations


@pytest.mark.parametrize("kernel", ["auto", "triton", "hopper", "cudnn", "FA4"], indirect=True)
def test_after_the_first_hop_the_peak_is_not_raised(kernel: str) -> None:
    ring, leaves, dout = watched(kernel)
    out = attend(ring, leaves, kernel)
    forward = len(ring.peaks)
    assert len(set(ring.peaks[:forward])) == 1, ring.peaks
    torch.autograd.grad(out, leaves, dout)
    assert len(set(ring.peaks[forward:])) == 1, ring.peaks


@pytest.mark.parametrize("kernel", ["auto", "triton", "cudnn", "FA4"], indirect=True)
def test_the_next_call_needs_no_more_memory_than_the_last(kernel: str) -> None:
    ring, leaves, dout = watched(kernel)
    peaks = []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        forward_and_backward(ring, leaves, dout, kernel)
        peaks.append(torch.cuda.max_memory_allocated())
    assert len(set(peaks)) == 1, peaks


@pytest.mark.parametrize("dim", [128, 96], ids=["hopper", "plain"])
def test_our_kernels_allocate_nothing(dim: int) -> None:
    """Not even memory that they give back: the allocator counts every request."""
    from burst_attention.geometry import full_piece
    from burst_attention.merge import State, clear
    from burst_attention.tiles import Accumulator, BackwardInputs, Gradients
    from burst_attention.tiles.triton_kernel import TritonKernel

    kernel, pieces = TritonKernel(), [full_piece(0, 300, 0, 300)]
    q, k, v, dout = made_inputs(TaxCase(heads=4, kv_heads=2, head_dim=dim), 300)
    state = State(*(torch.empty(shape, device="cuda") for shape in (q.shape, q.shape[:3], q.shape[:3])))
    clear(state)
    rows = torch.ones(q.shape[:3], device="cuda")
    inputs = BackwardInputs(dout, q, k, v, rows, rows, None)
    tensors = [torch.zeros(x.shape, device="cuda") for x in (q, k, v)]
    requests = []
    for _ in range(2):
        gradients = Gradients(*(Accumulator(x) for x in tensors))
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        kernel.forward(pieces, q, k, v, state, 0.1)
        kernel.backward(pieces, inputs, gradients, 0.1)
        requests.append(torch.cuda.memory_stats()["allocation.all.allocated"] - before)
    # The first call builds the tables of blocks.
    assert requests[1] == 0, requests


def two_runs(kernel: str) -> list[tuple[Tensor, ...]]:
    """What every rank of a ring of four threads got in its first and its second run, the one after the other."""
    q, k, v, dout = made_inputs(TaxCase(heads=4, kv_heads=2), TOKENS)
    layout = Layout.zigzag(TOKENS, 4)

    def body(ring: Ring) -> list[tuple[Tensor, ...]]:
        leaves = [layout.shard(x, ring.rank, 2).detach().requires_grad_() for x in (q, k, v)]
        mine = layout.shard(dout, ring.rank, 2)
        found = []
        for _ in range(2):
            out = burst_attention(*leaves, ring=ring, mask=causal(), layout=layout, kernel=kernel)
            found.append((out.detach(), *torch.autograd.grad(out, leaves, mine)))
        return found

    ranks = run_ranks(body, 4, timeout=300)
    return [tuple(x for rank in ranks for x in rank[turn]) for turn in range(2)]


@pytest.mark.parametrize("kernel", ["auto", "triton"])
def test_forward_gives_the_same_bits_twice(kernel: str) -> None:
    first, second = two_runs(kernel)
    assert all(torch.equal(one, other) for one, other in zip(first[::4], second[::4], strict=True))


def test_backward_gives_the_same_bits_twice_where_torch_is_asked_to() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        first, second = two_runs("auto")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_queries_whose_gradient_is_zero_give_no_nan() -> None:
    """Masked labels: whole rows of dout at home are 0; test_vendor_kernels.py has those that visit."""
    for kernel in ("auto", "triton"):
        ring, leaves, dout = watched(kernel)
        dout[:, :, ::3] = 0.0
        for result in forward_and_backward(ring, leaves, dout, kernel):
            assert result.isfinite().all()
