"""Memory by traced allocations: flat in the number of ranks, as the plan says, and no large score or mask block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from burst_attention import Ring, burst_attention, parse_mask, plan, run_ranks
from burst_attention.launch import run_processes
from burst_attention.tiles import TileKernel, cpu_flash
from burst_attention.tiles.cpu_flash import CpuFlashKernel
from burst_attention.tiles.plain import PlainKernel

SHARD, HEADS, HEAD_DIM = 256, 8, 64
Case = tuple[str, str, str, torch.dtype, int, int]


def traced_peak(
    ring: Ring,
    mask: str,
    layout: str,
    direction: str,
    dtype: torch.dtype,
    kv_heads: int,
    coalesce: int,
    key_layout: str | None = None,
    return_lse: bool = False,
    heads: int = 1,
    results: str = "chain",
) -> int:
    """Most bytes allocated at once by a forward and backward, beyond its inputs."""
    counts = (HEADS, kv_heads, kv_heads, HEADS)
    q, k, v, dout = (torch.randn(1, count, SHARD, HEAD_DIM).to(dtype) for count in counts)
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def run() -> None:
        options = {"mask": parse_mask(mask), "layout": layout, "direction": direction, "coalesce": coalesce}
        options |= {"key_layout": key_layout, "return_lse": return_lse, "heads": heads, "results": results}
        found = burst_attention(q, k, v, ring=ring, **options)  # type: ignore[call-overload]
        out = found[0] if return_lse else found
        torch.autograd.grad(out, (q, k, v), dout)

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        run()
    assert trace.profiler is not None
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert held == 0, f"{held} bytes are still held after the call"
    return peak


def measure(ring_size: int, case: Case) -> list[int]:
    return run_processes(lambda ring: traced_peak(ring, *case), ring_size, timeout=120)


CASES: list[Case] = [
    ("full()", "contiguous", "kv", torch.float32, 8, 1),
    ("causal()", "zigzag", "query", torch.bfloat16, 8, 1),
    ("causal()", "zigzag", "kv", torch.float32, 2, 1),
    ("causal() & window(200)", "contiguous", "query", torch.float32, 8, 1),
    ("causal()", "zigzag", "query", torch.float32, 8, 2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_peak_is_flat_in_ring_size_and_as_planned(case: Case) -> None:
    mask, layout, direction, dtype, kv_heads, coalesce = case
    peaks = {}
    for ring_size in (2, 4, 16):
        measured = measure(ring_size, case)
        planned = plan(
            SHARD * ring_size, ring_size, heads=HEADS, kv_heads=kv_heads, head_dim=HEAD_DIM, dtype=dtype,
            mask=parse_mask(mask), layout=layout, direction=direction, coalesce=coalesce,
        )  # fmt: skip
        for rank, peak in enumerate(measured):
            assert planned.peak_bytes(rank) == pytest.approx(peak, rel=0.10), f"W={ring_size}, rank {rank}"
        peaks[ring_size] = max(measured) / (SHARD * HEADS * HEAD_DIM * dtype.itemsize)
    many = [peaks[size] for size in (4, 16)]
    assert max(many) <= 1.10 * min(many), peaks
    assert peaks[2] <= min(many) * 1.001, peaks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_another_kernel_needs_for_lse_is_planned(dtype: torch.dtype) -> None:
    case = ("causal()", "zigzag", "query", dtype, HEADS, 1, None, True)
    options: dict[str, Any] = {"heads": HEADS, "head_dim": HEAD_DIM, "dtype": dtype, "mask": parse_mask("causal()")}
    planned = plan(SHARD * 4, 4, layout="zigzag", direction="query", coalesce=1, return_lse=True, **options)
    for rank, peak in enumerate(run_processes(lambda ring: traced_peak(ring, *case), 4, timeout=120)):
        assert planned.peak_bytes(rank) == pytest.approx(peak, rel=0.10), f"rank {rank}"


@pytest.mark.parametrize("direction", ["kv", "query"])
@pytest.mark.parametrize(("layout", "key_layout"), [("striped", "zigzag"), ("contiguous", "striped")])
def test_copies_in_another_order_are_planned(layout: str, key_layout: str, direction: str) -> None:
    """Next to stripes, the other side's rows are copied in the stripes' order."""
    run_all = lambda ring: traced_peak(ring, "causal()", layout, direction, torch.float32, 2, 1, key_layout)  # noqa: E731
    options: dict[str, Any] = {"heads": HEADS, "kv_heads": 2, "head_dim": HEAD_DIM, "dtype": torch.float32}
    options |= {"mask": parse_mask("causal()"), "layout": layout, "key_layout": key_layout, "direction": direction}
    planned = plan(SHARD * 4, 4, coalesce=1, **options)
    for rank, peak in enumerate(run_processes(run_all, 4, timeout=120)):
        assert planned.peak_bytes(rank) == pytest.approx(peak, rel=0.10), f"rank {rank}"


@pytest.mark.parametrize(("direction", "size"), [("kv", 4), ("query", 8)])
def test_results_that_wait_at_home_are_planned(direction: str, size: int) -> None:
    case = ("causal()", "zigzag", direction, torch.float32, HEADS, 1, None, False, 1, "straight")
    options: dict[str, Any] = {"heads": HEADS, "head_dim": HEAD_DIM, "dtype": torch.float32, "layout": "zigzag"}
    planned = plan(
        SHARD * size, size, mask=parse_mask("causal()"), direction=direction, coalesce=1, results="straight", **options
    )
    for rank, peak in enumerate(run_processes(lambda ring: traced_peak(ring, *case), size, timeout=120)):
        assert planned.peak_bytes(rank) == pytest.approx(peak, rel=0.10), f"rank {rank}"


@pytest.mark.parametrize(
    ("dtype", "degree", "kv_heads", "has_bf16"),
    [
        (torch.float32, 2, 8, False),
        (torch.float32, 4, 2, False),
        (torch.bfloat16, 4, 8, False),
        (torch.bfloat16, 2, 1, False),
        (torch.bfloat16, 2, 1, True),
    ],
    ids=str,
)
def test_exchanged_heads_are_planned(
    dtype: torch.dtype, degree: int, kv_heads: int, has_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_flash, "multiplies_bf16", lambda: has_bf16)
    case = ("causal()", "zigzag", "auto", dtype, kv_heads, 1, None, False, degree)
    options: dict[str, Any] = {"heads": HEADS, "kv_heads": kv_heads, "head_dim": HEAD_DIM, "dtype": dtype}
    planned = plan(
        SHARD * 4, 4, layout="zigzag", mask=parse_mask("causal()"), coalesce=1, head_degree=degree, **options
    )
    for rank, peak in enumerate(run_processes(lambda ring: traced_peak(ring, *case), 4, timeout=120)):
        assert planned.peak_bytes(rank) == pytest.approx(peak, rel=0.10), f"rank {rank}"


class _LargestMatrix(TorchDispatchMode):
    """Remembers the largest last two dimensions of anything that looks like scores or a mask."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim, self.largest = head_dim, (0, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and x.dim() >= 2 and self.head_dim not in x.shape[-2:]:
                rows, cols = x.shape[-2:]
                if rows * cols > self.largest[0] * self.largest[1] and min(rows, cols) > HEADS:
                    self.largest = rows, cols
        return result


@pytest.mark.parametrize("kernel", [CpuFlashKernel, PlainKernel], ids=lambda kernel: kernel.name)
def test_no_score_or_mask_block_is_larger_than_1024(kernel: type[TileKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _LargestMatrix(24)
    for phase in ("forward", "backward"):
        inner = getattr(kernel, phase)

        def traced(*args: Any, inner: Any = inner) -> None:
            with seen:
                inner(*args)

        monkeypatch.setattr(kernel, phase, traced)

    def body(ring: Ring) -> None:
        q, k, v = (torch.randn(1, 1, 2600, 24, requires_grad=True) for _ in range(3))
        out = burst_attention(q, k, v, ring=ring, mask=parse_mask("window(1300)"), kernel=kernel.name)
        out.sum().backward()

    run_ranks(body, 1)
    assert 0 < seen.largest[0] <= 1024 and 0 < seen.largest[1] <= 1024
