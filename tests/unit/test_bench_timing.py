"""`burst bench gpu` on a GPU that is only two clocks: what it times, and that tables can be made of its rows."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from burst_attention import bench_breakdown, bench_memory, bench_tax, bench_timing

ROOT = Path(__file__).parents[2]
QUEUE = 1024
"""Launches that may wait before the host does."""


class Clocks:
    """Milliseconds on the host and on the device, whose launches wait in a queue."""

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.ends: list[float] = []
        self.products: list[float] = []

    def launch(self, device_ms: float, host_ms: float = 0.005) -> None:
        self.host += host_ms
        self.ends = [end for end in self.ends if end > self.host]
        if len(self.ends) >= QUEUE:
            self.host = self.ends[-QUEUE]
        self.device = max(self.device, self.host) + device_ms
        self.ends.append(self.device)

    def call(self, launches: int, device_ms: float, host_ms: float) -> Callable[[], None]:
        return lambda: [self.launch(device_ms / launches, host_ms / launches) for _ in range(launches)] and None

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def make_products(self, milliseconds: float) -> None:
        self.products.append(milliseconds)
        for _ in range(int(milliseconds / 1.5) + 1):
            self.launch(1.5)


class Event:
    def __init__(self, clocks: Clocks, enable_timing: bool) -> None:
        self.clocks, self.at = clocks, 0.0

    def record(self) -> None:
        self.at = max(self.clocks.device, self.clocks.host)

    def query(self) -> bool:
        return self.at <= self.clocks.host

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(torch.cuda, "Event", functools.partial(Event, made))
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(bench_timing, "pause", lambda cycles: made.launch(cycles / 2e6))
    monkeypatch.setattr(bench_timing, "make_products", made.make_products)
    monkeypatch.setattr(bench_timing.time, "perf_counter", lambda: made.host / 1e3)
    return made


@pytest.mark.parametrize(("launches", "ms", "host"), [(10, 1.5, 3.0), (25, 4.5, 7.0), (80, 4.5, 14.0), (25, 30.0, 3.0)])
def test_both_manners_find_what_the_device_takes(clocks: Clocks, launches: int, ms: float, host: float) -> None:
    """Also where the host takes longer; and all that is compared comes after the same products, which stay few."""
    run, whole = clocks.call(launches, ms, host), clocks.call(2, 8 * ms, 0.5)
    assert bench_timing.median_ms(run, 5) == pytest.approx(ms)
    found = bench_timing.busy_medians_ms({"rank": (run, 8), "whole": (whole, 1)}, 12)
    assert found == {"rank": pytest.approx(ms, rel=1e-3), "whole": pytest.approx(8 * ms, rel=1e-3)}
    assert len(set(clocks.products)) == 1, "one came after more products than another"


def test_a_host_that_is_never_ahead_ends_all_the_same(clocks: Clocks) -> None:
    found = bench_timing.busy_medians_ms({"rank": (clocks.call(400, 4.0, 8.0), 8)}, 12)
    assert 4.0 < found["rank"] <= 8.0
    assert max(clocks.products) == pytest.approx(2**bench_timing.LONGER_HEADS * 1.3 * 8 * 8.0)


def test_what_is_asked_of_cuda_is_counted_on_the_host() -> None:
    def event(name: str, device: str, start: float, end: float) -> Any:
        return SimpleNamespace(
            name=name, device_type=f"DeviceType.{device}", time_range=SimpleNamespace(start=start, end=end)
        )

    events = [event("cudaLaunchKernel", "CPU", 0.0, 4.6), event("cudaLaunchKernel", "CPU", 10.0, 13.0)]
    events += [event("cudnn_attention", "CUDA", 11.0, 19.0), event("aten::empty", "CPU", 11.0, 19.0)]
    events += [event("cudaStreamWaitEvent", "CPU", at, at + 0.3) for at in (14.0, 15.0)]
    events += [event(bench_breakdown.CALL, "CPU", 9.0, 20.0), event("cudaDeviceSynchronize", "CPU", 21.0, 90.0)]
    asked = bench_breakdown.driver_calls(events)
    assert asked == {"cudaLaunchKernel": (1, 3.0), "cudaStreamWaitEvent": (2, 0.6)}


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, clocks: Clocks) -> list[str]:
    """What is under torch's flash operator, to be changed. A rank's time follows from its case."""
    flash = ["FA4"]

    def lone_calls(case: bench_tax.TaxCase, rank: int, copies: bool, **options: Any) -> dict[str, Callable[[], None]]:
        ms = case.tokens_per_rank**2 * case.ranks / 4e8 * (1 + rank / 100)
        return {"forward": clocks.call(9, ms, 3.0), "backward": clocks.call(25, 3 * ms, 7.0)}

    def whole_calls(case: bench_tax.TaxCase, name: str) -> dict[str, Callable[[], None]]:
        ms = case.tokens**2 / 4e8
        made = {"forward": clocks.call(2, ms, 0.5), "backward": clocks.call(3, 3 * ms, 1.0)}
        return {"backward": made["backward"]} if name == "flash4" else made

    for module in (bench_tax, bench_memory):
        monkeypatch.setattr(module, "flash_name", lambda: flash[0])
        monkeypatch.setattr(module, "peak_gib", lambda case, rank, **options: 1.0 + rank)
    monkeypatch.setattr(bench_tax, "has_flash4", lambda case: flash[0] == "FA4")
    monkeypatch.setattr(bench_tax, "lone_calls", lone_calls)
    monkeypatch.setattr(bench_tax, "whole_calls", whole_calls)
    monkeypatch.setattr(bench_tax, "copies_ms", lambda case, rank, repeat, **options: {"forward": 0.1, "backward": 0.2})
    return flash


def test_tables_can_be_made_of_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, pretended: list[str], tmp_path: Path
) -> None:
    """Of all parts; of FlashAttention-4 alone, where cuDNN's rows have one manner; of memory that was cut short."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables_gpu

    found: dict[str, list[dict[str, Any]]] = {}
    for flash in ("FA4", "FA2"):
        pretended[0] = flash
        rows = [*bench_tax.tax_rows(bench_tax.MAIN_CASES, 2), *bench_memory.memory_rows(1)]
        about = {"gpu": "two clocks", "torch": "none", "commit": "none"}
        found[flash] = [json.loads(json.dumps(row | about)) for row in rows]
    slowest = next(row for row in found["FA4"] if row["suite"] == "gpu-tax" and row["ranks"] == 8)
    assert slowest["forward_slowest"] == 7
    assert slowest["forward_tax"] == slowest["busy_forward_tax"] == pytest.approx(1.07, rel=1e-3)
    # Of full masks, which goals were not set for; a grid is measured after the rest.
    full = [row | {"causal": False, "forward_tax": 0.1} for row in found["FA4"] if row["suite"] == "gpu-tax"]
    before = tables_gpu.of_suite
    for name, new in {
        "all": found["FA4"] + found["FA2"] + full,
        "FA4": found["FA4"],
        "FA2": found["FA2"],
        "cut": [row for row in found["FA4"] if row["ranks"] != 16],
    }.items():
        monkeypatch.setattr(
            tables_gpu, "of_suite", lambda suite, new=new: before(suite) + [r for r in new if r["suite"] == suite]
        )
        tables = (tables_gpu.gpu_goals_table, tables_gpu.gpu_busy_table, tables_gpu.gpu_tax_table)
        for table in (*tables, tables_gpu.gpu_memory_table):
            lines = table()
            assert len({line.count("|") for line in lines}) == 1, (
                f"{name}: {table.__name__} has lines of different width"
            )
            assert len(lines) > 2
            assert "**0.100**" not in "".join(lines), name
