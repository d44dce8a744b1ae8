"""The ring's part of `burst bench gpu`: what a rank costs, against the fastest whole attention in the same run.

The ring tax is W x (time of the slowest rank) / (time of one whole attention by the fastest kernel). Each rank is timed
alone: what other ranks would send is handed over by reference, or copied on a stream of its own as a receive would be.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from burst_attention.api import burst_attention, plan
from burst_attention.engine import RowBuffer
from burst_attention.layout import Layout
from burst_attention.mask import causal, full
from burst_attention.ring.lone import LoneRing
from burst_attention.schedule import PhasePlan, Plan

WARM_UPS = 3
HEAD_START_CYCLES = 20_000_000


@dataclass(frozen=True)
class TaxCase:
    """A ring and the attention it computes."""

    ranks: int = 8
    tokens_per_rank: int = 8192
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    causal: bool = True
    dtype: torch.dtype = torch.bfloat16

    @property
    def tokens(self) -> int:
        return self.ranks * self.tokens_per_rank

    @property
    def options(self) -> dict[str, Any]:
        layout = Layout("zigzag" if self.causal else "contiguous", self.tokens, self.ranks)
        return {"mask": causal() if self.causal else full(), "layout": layout}

    def plan(self, **options: Any) -> Plan:
        shapes: dict[str, Any] = {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
        }
        made: Plan = plan(self.tokens, self.ranks, device="cuda", **shapes, **self.options, **options)
        return made


def median_ms(run: Callable[[], Any], repeat: int) -> float:
    """Median milliseconds on the device, each repetition between its own events.

    The device is kept busy before each, so that launches are enqueued ahead as they are in the middle of a training
    step; `host_ms` says what they cost the host.
    """
    for _ in range(WARM_UPS):
        run()
    times = []
    for _ in range(repeat):
        torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times))


def host_ms(run: Callable[[], Any], repeat: int) -> float:
    """Median milliseconds until a call returns to the host, with nothing on the device to wait for."""
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def made_up_blocks(case: TaxCase, made: Plan, device: str) -> Callable[[str, int], Tensor]:
    """What other ranks would send: random operands with plausible statistics, and results of 0.

    Buffers of one call are different memory; the next call gets the same ones again.
    """
    kept: dict[tuple[str, int], list[Tensor]] = {}
    given: dict[tuple[str, int], int] = {}

    def make(what: str, nbytes: int) -> Tensor:
        phase, channel, *copied = what.split()
        key = what, nbytes
        turn = given[key] = (given.get(key, -1) + 1) % (1 if copied else 3)
        pool = kept.setdefault(key, [])
        if turn >= len(pool):
            pool.append(_made_up_block(case, made.phase(phase), channel == "result", nbytes, device))
        return pool[turn]

    return make


def _made_up_block(case: TaxCase, phase: PhasePlan, result: bool, nbytes: int, device: str) -> Tensor:
    memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if result:
        return memory
    rows = nbytes // phase.operands.row_bytes
    for name, view in RowBuffer(phase.operands, memory).fields(0, rows).items():
        if name == "lse":
            view.fill_(math.log(case.tokens) + 0.5)
        elif name == "delta":
            view.normal_(std=0.01)
        else:
            view.normal_()
    return memory


def lone_calls(case: TaxCase, rank: int, copies: bool, **options: Any) -> dict[str, Callable[[], Any]]:
    """One rank's forward and backward, by themselves."""
    made = case.plan(**{name: value for name, value in options.items() if name in ("coalesce", "direction")})
    ring = LoneRing(rank, case.ranks, made_up_blocks(case, made, "cuda"), copies)
    q, k, v, dout = made_inputs(case, case.tokens_per_rank)
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def attend() -> Tensor:
        out: Tensor = burst_attention(q, k, v, ring=ring, check="off", **case.options, **options)
        return out

    out = attend()
    return {
        "forward": attend,
        "backward": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
    }


def rank_ms(case: TaxCase, rank: int, *, copies: bool, repeat: int, **options: Any) -> dict[str, float]:
    """Milliseconds of one rank's forward and backward, on the device and on the host."""
    calls = lone_calls(case, rank, copies, **options)
    times = {phase: median_ms(call, repeat) for phase, call in calls.items()}
    return times | {f"{phase}_host": host_ms(call, repeat) for phase, call in calls.items()}


def made_inputs(case: TaxCase, tokens: int) -> tuple[Tensor, ...]:
    """Random q, k, v and dout."""
    torch.manual_seed(0)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    return tuple(torch.randn(1, h, tokens, case.head_dim, device="cuda", dtype=case.dtype) for h in heads)


def whole_calls(case: TaxCase, name: str) -> dict[str, Callable[[], Any]]:
    """One whole attention by a vendor's kernel, forward and backward by themselves."""
    from burst_attention.tiles.vendor import CudnnKernel, FlashKernel

    kernel = {"cudnn": CudnnKernel, "flash": FlashKernel}[name]()
    q, k, v, dout = made_inputs(case, case.tokens)
    scale = case.head_dim**-0.5
    out, lse = kernel.attend(q, k, v, case.causal, scale)
    out, lse = out.contiguous(), lse.contiguous()
    return {
        "forward": lambda: kernel.attend(q, k, v, case.causal, scale),
        "backward": lambda: kernel.gradients(dout, q, k, v, out, lse, case.causal, scale),
    }


def whole_ms(case: TaxCase, name: str, repeat: int) -> tuple[float, float]:
    """Milliseconds of one whole attention by a vendor's kernel, forward and backward."""
    calls = whole_calls(case, name)
    return median_ms(calls["forward"], repeat), median_ms(calls["backward"], repeat)


def tax_rows(cases: Sequence[TaxCase], repeat: int, ranks: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
    """The ring tax of each case in all variants.

    `ranks` narrows whom to time; the slowest of those is taken.
    """
    for case in cases:
        timed = {name: whole for name in ("cudnn", "flash") if (whole := _try_whole(case, name, repeat)) is not None}
        row = _case_fields(case) | {"suite": "gpu-tax", "flash": flash_name(), "repeat": repeat}
        for name, (forward, backward) in timed.items():
            row |= {f"whole_{name}_forward_ms": forward, f"whole_{name}_backward_ms": backward}
        best = [min(whole[index] for whole in timed.values()) for index in (0, 1)]
        chosen = range(case.ranks) if ranks is None else [rank for rank in ranks if rank < case.ranks]
        for kernel, coalesce, copies in VARIANTS:
            if kernel == "cudnn" and flash_name() != "FA2":
                continue
            options = {"kernel": kernel, "coalesce": coalesce}
            times = [rank_ms(case, rank, copies=copies, repeat=repeat, **options) for rank in chosen]
            slowest = {name: max(found[name] for found in times) for name in times[0]}
            yield row | {
                "kernel": kernel,
                "coalesce": coalesce,
                "copies": copies,
                "ranks_timed": list(chosen),
                **{f"{name}_ms": round(value, 4) for name, value in slowest.items()},
                "forward_tax": round(case.ranks * slowest["forward"] / best[0], 4),
                "backward_tax": round(case.ranks * slowest["backward"] / best[1], 4),
                "planned_peak_gib": round(max(map(case.plan(coalesce=coalesce).peak_bytes, chosen)) / 2**30, 3),
            }


def _try_whole(case: TaxCase, name: str, repeat: int) -> tuple[float, float] | None:
    try:
        return whole_ms(case, name, repeat)
    except RuntimeError as error:
        print(f"{name} cannot compute the whole of {case}: {error}")
        return None


def _case_fields(case: TaxCase) -> dict[str, Any]:
    return {**asdict(case), "dtype": str(case.dtype).removeprefix("torch.")}


def flash_name() -> str:
    """What serves torch's flash operator now."""
    from burst_attention.tiles.cuda import active_flash

    return active_flash()


TAX_CASES = (
    TaxCase(),
    TaxCase(tokens_per_rank=4096),
    TaxCase(kv_heads=8),
    TaxCase(tokens_per_rank=4096, kv_heads=8),
    TaxCase(ranks=2),
    TaxCase(ranks=4),
    TaxCase(ranks=4, tokens_per_rank=16384),
    TaxCase(tokens_per_rank=2048),
    TaxCase(ranks=16, tokens_per_rank=4096),
    TaxCase(causal=False, tokens_per_rank=4096),
    TaxCase(causal=False, kv_heads=8),
)
VARIANTS = (("auto", 2, False), ("auto", 1, False), ("auto", 2, True), ("cudnn", 2, False))
"""(kernel, blocks at once, copies); cuDNN by name only where no faster flash was activated."""
RANKS_TIMED = (0, 2, 3, 7, 15)
"""The first, the last, and those whose coalesced blocks lie on both sides of the diagonal."""

KINDS = {
    "attention's own passes": ("preprocess", "postprocess"),
    "attention": ("flash", "sdpa", "cudnn", "hopper_"),
    "merge": ("_merge_kernel",),
    "sums and packing": ("_sum_kernel",),
    "stand-in and delta": ("_stand_in_kernel", "_delta_kernel"),
    "bench": ("distribution", "spin_kernel"),
}
"""What a device kernel's name says of its purpose, the first that fits; "bench" is the benchmark's own: not counted."""


def kind_of(kernel_name: str) -> str:
    """The purpose of a device kernel."""
    return next((kind for kind, marks in KINDS.items() if any(mark in kernel_name for mark in marks)), "other")


def breakdown_rows(case: TaxCase, rank: int, repeat: int = 3) -> Iterator[dict[str, Any]]:
    """Where a rank's time on the device goes, by torch's profiler, and a whole attention's for each rank."""
    name = "cudnn" if flash_name() == "FA2" else "flash"
    whole, lone = whole_calls(case, name), lone_calls(case, rank, copies=False, coalesce=2)
    for phase in whole:
        row = _case_fields(case) | {"suite": "gpu-breakdown", "flash": flash_name(), "phase": phase}
        for what, call, share in (
            (f"whole, by {case.ranks}", whole[phase], case.ranks),
            (f"rank {rank}", lone[phase], 1),
        ):
            spent, launches = _time_by_purpose(call, repeat)
            yield row | {
                "what": what,
                "microseconds": {kind: round(value / share) for kind, value in spent.items()},
                "launches": launches,
                "unprofiled_us": round(1e3 * median_ms(call, 3 * repeat) / share),
            }


def _time_by_purpose(call: Callable[[], Any], repeat: int) -> tuple[dict[str, float], int]:
    """Microseconds on the device by purpose, with those in which it was idle between kernels, and kernels launched."""
    for _ in range(WARM_UPS):
        call()
    spent: dict[str, float] = {}
    launches = 0
    for _ in range(repeat):
        with torch.profiler.profile() as profile:
            torch.cuda._sleep(2 * HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
            call()
            torch.cuda.synchronize()
        kernels = sorted(
            (event.time_range.start, event.time_range.end, kind_of(event.name))
            for event in profile.events() or ()
            if "CUDA" in str(event.device_type)
        )
        kernels = [kernel for kernel in kernels if kernel[2] != "bench"]
        busy_until, launches = kernels[0][0], len(kernels)
        for start, end, kind in kernels:
            spent["idle"] = spent.get("idle", 0.0) + max(start - busy_until, 0.0) / repeat
            spent[kind] = spent.get(kind, 0.0) + max(end - max(start, busy_until), 0.0) / repeat
            busy_until = max(busy_until, end)
    return spent, launches
