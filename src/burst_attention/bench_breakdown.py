"""The part of `burst bench gpu` that says where a rank's time goes, by torch's profiler, beside a whole attention's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from burst_attention.bench_tax import (
    HOST_REPEAT,
    MAIN_CASES,
    TaxCase,
    case_fields,
    flash_name,
    has_flash4,
    lone_calls,
    whole_calls,
)
from burst_attention.bench_timing import PAUSE_CYCLES, WARM_UPS, host_ms, median_ms, pause

PROFILED = 3
"""Calls under the profiler, of which the mean is taken."""
KINDS = {
    "attention's own passes": ("preprocess", "postprocess"),
    "attention": ("flash", "sdpa", "cudnn", "hopper_"),
    "merge": ("_merge_kernel",),
    "sums and packing": ("_sum_kernel",),
    "stand-in and delta": ("_stand_in_kernel", "_delta_kernel", "_statistics_kernel"),
    "clearing": ("Fill", "Memset", "memset"),
    "copies": ("copy", "Memcpy", "memcpy"),
    "bench": ("distribution", "spin_kernel"),
}
"""What a device kernel's name says of its purpose, the first that fits; "bench" is the benchmark's own: not counted."""


def kind_of(kernel_name: str) -> str:
    """The purpose of a device kernel."""
    return next((kind for kind, marks in KINDS.items() if any(mark in kernel_name for mark in marks)), "other")


def breakdown_rows(repeat: int, cases: Sequence[TaxCase] = MAIN_CASES) -> Iterator[dict[str, Any]]:
    """The slowest rank of each case and phase, and a whole attention divided by the ranks."""
    name = "cudnn" if flash_name() == "FA2" else "flash"
    for case in cases:
        row = case_fields(case) | {"suite": "gpu-breakdown", "flash": flash_name()}
        for whole in (name, "flash4") if has_flash4(case) else (name,):
            for phase, call in whole_calls(case, whole).items():
                yield row | {"phase": phase, "kernel": whole, "what": "whole"} | _spent(call, repeat, case.ranks)
        for kernel in ("auto", "hopper", "cudnn") if name == "cudnn" else ("auto",):
            ranks = {
                rank: lone_calls(case, rank, copies=False, coalesce=2, kernel=kernel) for rank in range(case.ranks)
            }
            for phase in ("forward", "backward"):
                slowest = max(ranks, key=lambda rank: median_ms(ranks[rank][phase], repeat))
                found = _spent(ranks[slowest][phase], repeat, 1)
                yield row | {"phase": phase, "kernel": kernel, "what": "slowest rank", "rank": slowest} | found


CALL = "the call that is profiled"
DriverCalls = dict[str, tuple[int, float]]
"""By name, how often, and microseconds."""


def driver_calls(events: Iterable[Any]) -> DriverCalls:
    """What a profiled call asked of CUDA on the host. The rest is Python's."""
    on_host = [event for event in events if "CPU" in str(event.device_type)]
    whole = next(event.time_range for event in on_host if event.name == CALL)
    found: DriverCalls = {}
    for event in on_host:
        if event.name.startswith("cu") and whole.start <= event.time_range.start <= whole.end:
            count, spent = found.get(event.name, (0, 0.0))
            found[event.name] = count + 1, spent + event.time_range.end - event.time_range.start
    return {name: (count, round(spent, 1)) for name, (count, spent) in found.items()}


def _spent(call: Callable[[], Any], repeat: int, share: int) -> dict[str, Any]:
    """A call's time by purpose, and without the profiler, divided by `share`; launches and the host's are of all."""
    spent, launches, asked = _time_by_purpose(call, PROFILED)
    return {
        "microseconds": {kind: round(value / share) for kind, value in spent.items()},
        "launches": launches,
        "unprofiled_us": round(1e3 * median_ms(call, repeat) / share),
        "host_us": round(1e3 * host_ms(call, HOST_REPEAT)),
        "driver_calls": asked,
    }


def _time_by_purpose(call: Callable[[], Any], repeat: int) -> tuple[dict[str, float], int, DriverCalls]:
    """Microseconds on the device by purpose, and idle between kernels; launches; what the last call asked of CUDA."""
    for _ in range(WARM_UPS):
        call()
    spent: dict[str, float] = {}
    launches, asked = 0, {}
    for _ in range(repeat):
        with torch.profiler.profile() as profile:
            pause(2 * PAUSE_CYCLES)
            with torch.profiler.record_function(CALL):
                call()
            torch.cuda.synchronize()
        asked = driver_calls(profile.events() or ())
        kernels = sorted(
            (event.time_range.start, event.time_range.end, kind_of(event.name))
            for event in profile.events() or ()
            if "CUDA" in str(event.device_type) and event.name != CALL
        )
        kernels = [kernel for kernel in kernels if kernel[2] != "bench"]
        busy_until, launches = kernels[0][0], len(kernels)
        for start, end, kind in kernels:
            spent["idle"] = spent.get("idle", 0.0) + max(start - busy_until, 0.0) / repeat
            spent[kind] = spent.get(kind, 0.0) + max(end - max(start, busy_until), 0.0) / repeat
            busy_until = max(busy_until, end)
    return spent, launches, asked
