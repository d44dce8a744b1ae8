"""A GPU that is not there: its streams only count, its kernels are torch, and what they touch is written down."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from burst_attention import engine, lanes, ops
from burst_attention.ring import threads
from burst_attention.tiles import cuda, flash4, fused, gpu, hopper_kernel, triton_kernel, vendor
from tests.unit import gpu_kernels_in_torch as in_torch
from tests.unit.stream_order import Machine, Written

DIMS = (16, 32, 64, 128)
"""Of heads, in tests."""


class CudnnInTorch(vendor.CudnnKernel):
    """Gives partials, and parts of all three gradients; they are computed in torch."""

    machine: Machine

    def attend(self, *given: Any) -> Any:
        return self.machine.kernel(in_torch.attend, lambda made, *read: {"made": made, "read": read})(*given)

    def gradients(self, *given: Any) -> Any:
        return self.machine.kernel(in_torch.gradients, lambda made, *read: {"made": made, "read": read})(*given)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, pool: int) -> Machine:
    """All that ranks that are threads ask of a GPU; `pool` is its number of streams."""
    made = Machine(pool)
    monkeypatch.setattr(torch.cuda, "current_stream", made.current)
    monkeypatch.setattr(torch.cuda, "Stream", made.stream)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "set_stream", made.go_on)
    monkeypatch.setattr(threads, "_rank_streams", lambda size: [made.stream() for _ in range(size)])
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(engine, "capturing", lambda: False)
    monkeypatch.setattr(engine, "ROUNDING", 0)
    monkeypatch.setattr(lanes, "_lanes", {})
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


def adds(_: Any, pieces: Any, x: Any, gradients: Any, scale: float, add: bool = True) -> dict[str, Any]:
    """What our backward for Hopper touches."""
    dq, *keys = gradients
    return {"read": (tuple(x)[:6], keys if add else ()), "add": dq, "write": keys}


def continues(_: Any, pieces: Any, q: Any, k: Any, v: Any, state: Any, scale: float, **more: Any) -> dict[str, Any]:
    """What our forward touches."""
    read = (q, k, v, state[:3] if more.get("load", True) else ())
    return {"read": read, "write": more.get("finished") or state[:3]}


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

    def lays_out(_: Any, lse: Any, delta: Any, *written: Any, **blocks: Any) -> dict[str, Any]:
        return {"read": (lse, delta), "write": written[:3]}

    def adds_some(_: Any, pieces: Any, x: Any, *rest: Any, add: bool = True) -> dict[str, Any]:
        *written, _scale = rest
        return {"read": (tuple(x)[:6], written if add else ()), "write": written}

    def makes(made: Any, *read: Any) -> dict[str, Any]:
        return {"made": made, "read": read}

    def replace(fn: Callable[..., Any], touches: Callable[..., Any], *places: tuple[Any, str]) -> None:
        launch = machine.kernel(fn, touches)
        for owner, name in places:
            monkeypatch.setattr(owner, name, staticmethod(launch) if isinstance(owner, type) else launch)

    replace(in_torch.launch, adds_to_sums, (flash4, "_launch"))
    replace(in_torch.attend, makes, (flash4, "attend"))
    forwards = (triton_kernel, "launch_fastest_forward"), (hopper_kernel, "launch_hopper_forward")
    replace(in_torch.continue_state, continues, *forwards)
    launches = (hopper_kernel, "launch_hopper_backward"), (triton_kernel, "launch_hopper_backward")
    replace(in_torch.add_gradients, adds, *launches)
    replace(in_torch.add_key_gradients, adds_some, (triton_kernel, "launch_key_gradients"))
    replace(in_torch.add_query_gradients, adds_some, (triton_kernel, "launch_query_gradients"))
    monkeypatch.setattr(triton_kernel, "serves_backward", lambda x, scale, dims: True)
    statistics = machine.kernel(in_torch.statistics, lays_out)
    monkeypatch.setattr(fused, "_statistics_kernel", defaultdict(lambda: statistics))  # by any grid
    replace(in_torch.merge_partials, merges, (gpu, "merge_partials"))
    replace(in_torch.sum_parts, sums, (fused, "sum_parts"), (gpu.DeferringKernel, "sum_parts"))
    replace(in_torch.fused_delta, makes, (gpu, "fused_delta"))
    replace(in_torch.stand_in_for_out, makes, (vendor, "stand_in_for_out"))
    config = SimpleNamespace(m_block_size=in_torch.BLOCK)
    monkeypatch.setattr(flash4, "_config", lambda dim, triangle: config)
    # It is asked for once, and no part of what a call holds.
    monkeypatch.setattr(flash4, "_cast", in_torch.cast)
    orders = {dim: flash4.order_of_sums(config, True, dim, torch.device("cpu")) for dim in DIMS}
    monkeypatch.setattr(flash4, "order_of_sums", lambda config, causal, dim, device: orders[dim])
    monkeypatch.setattr(flash4, "LARGEST_BLOCK", dict.fromkeys(DIMS, in_torch.BLOCK))
    monkeypatch.setattr(flash4, "serves", lambda piece, x, scale: True)
    monkeypatch.setattr(flash4, "serves_forward", lambda q, k, v: True)
    monkeypatch.setattr(flash4, "serves_backward", lambda shapes, device=None: True)
    monkeypatch.setattr(CudnnInTorch, "machine", machine, raising=False)


KERNELS: dict[str, Callable[[], gpu.GpuKernel]] = {
    "FA4": vendor.FlashKernel, "cuDNN": CudnnInTorch, "hopper": hopper_kernel.HopperKernel,
    "triton": triton_kernel.TritonKernel, "cuda": cuda.CudaKernel,
}  # fmt: skip


def use_kernel(monkeypatch: pytest.MonkeyPatch, name: str) -> gpu.GpuKernel:
    """Have calls take FlashAttention-4 by itself ("FA4"), cuDNN ("cuDNN"), or our own as they are called."""
    if name in ("hopper", "cuda"):
        # Tests ask for deterministic algorithms, which the plain kernels serve.
        monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: False)
    tiles = KERNELS[name]()
    monkeypatch.setattr(ops, "pick_kernel", lambda name, request: tiles)
    return tiles
