"""Rounds that take turns on streams, on streams that only count: nothing is touched out of order, nothing freed early.

What GPUs make of it is for tests/gpu/test_lanes_on_cuda.py.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention import Layout, Ring, burst_attention, causal, full, ops, run_ranks
from burst_attention.lanes import Lanes
from burst_attention.reference import allowed_pairs, reference_gradients
from burst_attention.ring import threads
from tests.unit import gpu_kernels_in_torch as in_torch
from tests.unit.stream_order import Machine, Written

pytest.importorskip("triton")
from burst_attention import lanes as lanes_module
from burst_attention.tiles import flash4, fused, gpu, vendor

HEADS, DIM = 4, 16


class CudnnInTorch(vendor.CudnnKernel):
    """Gives partials, and parts of all three gradients; they are computed in torch."""

    machine: Machine

    def attend(self, *given: Any) -> Any:
        return self.machine.kernel(in_torch.attend, lambda made, *read: {"made": made, "read": read})(*given)

    def gradients(self, *given: Any) -> Any:
        return self.machine.kernel(in_torch.gradients, lambda made, *read: {"made": made, "read": read})(*given)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Machine:
    """A GPU that is not there; its pool has as many streams as the test asks for."""
    made = Machine(pool=getattr(request, "param", 100))
    monkeypatch.setattr(torch.cuda, "current_stream", made.current)
    monkeypatch.setattr(torch.cuda, "Stream", made.stream)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(threads, "_rank_streams", lambda size: [made.stream() for _ in range(size)])
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(lanes_module, "_lanes", {})
    # After the ranks have ended their caller, who is nobody here, waits for them.
    made.local.stream = made.stream()
    for name in ("run_forward", "run_backward"):
        monkeypatch.setattr(ops, name, written_down(made, getattr(ops, name)))
    replace_kernels(monkeypatch, made)
    return made


def written_down(machine: Machine, phase: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        with Written(machine):
            return phase(*given)

    return run


def replace_kernels(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Every launch as one thing on a stream."""

    def adds_to_sums(_: Any, config: Any, triangle: bool, *given: Any) -> dict[str, Any]:
        *read, sums, dk, dv, _scale = given
        return {"read": read, "add": sums, "write": (dk, dv)}

    def merges(_: Any, state: Any, partials: Any, load: bool, finished: Any = None) -> dict[str, Any]:
        kept = state[:3]
        return {"read": (list(partials), kept if load else ()), "write": finished or kept}

    def sums(_: Any, target: Any, parts: Any, load: bool, out: Any = None, beside: bool = False) -> dict[str, Any]:
        return {"read": (list(parts), target if load else ()), "write": target if out is None else out}

    def makes(made: Any, *read: Any) -> dict[str, Any]:
        return {"made": made, "read": read}

    def replace(fn: Callable[..., Any], touches: Callable[..., Any], *places: tuple[Any, str]) -> None:
        launch = machine.kernel(fn, touches)
        for owner, name in places:
            monkeypatch.setattr(owner, name, staticmethod(launch) if isinstance(owner, type) else launch)

    replace(in_torch.launch, adds_to_sums, (flash4, "_launch"))
    replace(in_torch.cast, lambda _, config, sums, dq, scale: {"read": sums, "write": dq}, (flash4, "_cast"))
    replace(in_torch.attend, makes, (flash4, "attend"))
    replace(in_torch.padded_statistics, makes, (flash4, "padded_statistics"))
    replace(in_torch.merge_partials, merges, (gpu, "merge_partials"), (vendor, "merge_partials"))
    replace(in_torch.sum_parts, sums, (fused, "sum_parts"), (gpu.DeferringKernel, "sum_parts"))
    replace(in_torch.fused_delta, makes, (gpu, "fused_delta"))
    monkeypatch.setattr(flash4, "_config", lambda dim, triangle: SimpleNamespace(m_block_size=in_torch.BLOCK))
    monkeypatch.setattr(flash4, "serves", lambda piece, x, scale: True)
    monkeypatch.setattr(flash4, "serves_forward", lambda q, k, v: True)
    monkeypatch.setattr(CudnnInTorch, "machine", machine, raising=False)


class CountedLanes(Lanes):
    turns_of_all = 0

    @contextlib.contextmanager
    def turn(self, ready: Any) -> Iterator[None]:
        CountedLanes.turns_of_all += bool(self.streams)
        with super().turn(ready):
            yield


def run(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, kernel: str, ranks: int, mask_name: str, kv_heads: int
) -> int:
    """Two calls on each rank, the second in memory of the first; returns how many rounds went to lanes."""
    tiles = {"FA4": vendor.FlashKernel, "cuDNN": CudnnInTorch}[kernel]()
    monkeypatch.setattr(ops, "pick_kernel", lambda name, request: tiles)
    monkeypatch.setattr("burst_attention.engine.Lanes", CountedLanes)
    CountedLanes.turns_of_all = 0
    tokens, mask = 16 * ranks, causal() if mask_name == "causal" else full()
    layout, generator = Layout.zigzag(tokens, ranks), torch.Generator().manual_seed(0)
    heads = HEADS, kv_heads, kv_heads, HEADS
    tensors = [torch.randn(1, count, tokens, DIM, generator=generator).half() for count in heads]
    options: dict[str, Any] = {"direction": "kv", "coalesce": 2, "results": "straight", "wire_dtype": torch.float16}

    def body(ring: Ring) -> list[Tensor]:
        q, k, v, dout = (layout.shard(x, ring.rank, 2) for x in tensors)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        for _ in range(2):
            out = burst_attention(*leaves, ring=ring, mask=mask, layout=layout, **options)
            gradients = torch.autograd.grad(out, leaves, dout)
        return [out.detach(), *gradients]

    found = run_ranks(body, ranks, timeout=120)
    exact = reference_gradients(*tensors, allowed_pairs(mask, torch.arange(tokens), torch.arange(tokens)))
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        whole, right = layout.unshard([rank[index] for rank in found], 2).double(), getattr(exact, name)
        assert (whole - right).norm() < 3e-3 * right.norm(), name
    gc.collect()
    machine.look_at_freed()
    return CountedLanes.turns_of_all


@pytest.mark.parametrize(
    ("machine", "ranks", "mask", "kv_heads"),
    [
        (100, 2, "causal", 4),
        (100, 3, "full", 2),
        (100, 4, "causal", 4),
        (5, 4, "causal", 2),
        (5, 10, "causal", 4),
        (100, 10, "full", 2),
    ],
    indirect=["machine"],
    ids=["2-causal", "3-full-GQA", "4-causal", "4-causal-GQA-shared", "10-causal-shared", "10-full-GQA"],
)
@pytest.mark.parametrize("kernel", ["FA4", "cuDNN"])
def test_everything_is_in_order(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, kernel: str, ranks: int, mask: str, kv_heads: int
) -> None:
    turns = run(monkeypatch, machine, kernel, ranks, mask, kv_heads)
    assert turns >= 4 * ranks, "no round went to a lane"
    assert not machine.found, "\n".join(sorted(set(machine.found))[:10])


def no_wait_for_what_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = CountedLanes.turn
    monkeypatch.setattr(CountedLanes, "turn", lambda self, ready: turn(self, {}))


def no_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedLanes, "join", lambda self: None)


def alone_without(monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    """Waits on one side are left out: before what is alone, or after it."""

    @contextlib.contextmanager
    def alone(self: Lanes) -> Iterator[None]:
        current = torch.cuda.current_stream()
        others = [stream for stream in (self.caller, *self.used) if stream not in (None, current)]
        for stream in () if before else others:
            current.wait_stream(stream)
        yield
        for stream in others if before else ():
            stream.wait_stream(current)

    monkeypatch.setattr(CountedLanes, "alone", alone)


def given_back_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are let go before the others wait for what reads them."""
    sum_parts = gpu.DeferringKernel.sum_parts

    def sum_and_free(target: Tensor, parts: Any, **options: Any) -> None:
        sum_parts(target, parts, **options)
        parts.clear()

    monkeypatch.setattr(gpu.DeferringKernel, "sum_parts", staticmethod(sum_and_free))


def sums_before_they_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    add = flash4.QuerySums.add

    def add_at_once(self: Any, *given: Any) -> Any:
        self.cleared = None
        return add(self, *given)

    monkeypatch.setattr(flash4.QuerySums, "add", add_at_once)


def receives_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self: threads.ThreadRing, target: Tensor, letter: Any, pending: Any) -> None:
        stream = self._copy_stream = self._copy_stream or torch.cuda.Stream()
        for event in (letter.ready, pending.posted):
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            target.copy_(letter.tensor)
        letter.copied = stream.record_event()

    monkeypatch.setattr(threads.ThreadRing, "_copy_on_gpu", copy)


BROKEN: dict[str, tuple[str, int, Callable[[pytest.MonkeyPatch], None], str]] = {
    "a round does not wait until it is ready": ("FA4", 4, no_wait_for_what_is_ready, "aten::copy_ (write)"),
    "transfers do not wait for rounds": ("cuDNN", 4, no_join, "has yet to attend"),
    "what is alone does not wait": ("cuDNN", 10, lambda patch: alone_without(patch, before=True), "gradients (write)"),
    "rounds do not wait for what is alone": (
        "cuDNN", 10, lambda patch: alone_without(patch, before=False), "has yet to sum_parts",
    ),
    "memory goes back too early": ("cuDNN", 10, given_back_inside, "has yet to sum_parts"),
    "sums grow before they are cleared": ("FA4", 4, sums_before_they_are_cleared, "aten::zeros (write)"),
    "receives are not waited for": ("FA4", 3, receives_not_waited_for, "has yet to aten::copy_"),
}  # fmt: skip
"""By what is left out: a kernel, a number of ranks, how it is left out, and what is to be said of it."""


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_out_of_order_is_seen(monkeypatch: pytest.MonkeyPatch, machine: Machine, name: str) -> None:
    kernel, ranks, break_it, wrong = BROKEN[name]
    break_it(monkeypatch)
    run(monkeypatch, machine, kernel, ranks, "causal", HEADS)
    assert any(wrong in found for found in machine.found), sorted(set(machine.found))[:10]
