"""The passes over memory compiled as they are launched, tuples and all, for chips that are not here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton

from burst_attention.merge import Part, Partial, State
from burst_attention.tiles import fused
from tests.unit.test_offline_compile import spilled

HEADS, ROWS = 2, 48


class ChipThatIsNotHere:
    """What Triton asks of a driver: the chip is its device's number, and starting a kernel does nothing."""

    class utils:  # noqa: N801
        load_binary = staticmethod(lambda name, binary, shared, device: (1, 1, 32, 0, 1024))
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 232448})

    class launcher_cls:  # noqa: N801
        def __init__(self, source: Any, metadata: Any) -> None:
            self.launch_cooperative_grid = False

        def __call__(self, *arguments: Any) -> None:
            """Nothing."""

    def __init__(self, chip: int) -> None:
        self.chip = chip

    def get_current_device(self) -> int:
        return self.chip

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.chip, 32)


@pytest.fixture(params=[80, 90, 100], ids=["sm_80", "sm_90", "sm_100"])
def chip(request: pytest.FixtureRequest) -> Iterator[int]:
    if getattr(fused._sum_kernel, "device_caches", None) is None:
        pytest.skip("the interpreter compiles nothing")
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(ChipThatIsNotHere(request.param))
    yield request.param
    triton.runtime.driver._active = before


def compiled(kernel: Any, chip: int) -> list[Any]:
    kernels = list(kernel.device_caches[chip][0].values())
    kernel.device_caches.pop(chip)
    return kernels


def rows(dim: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """As a vendor's kernel gives them."""
    return torch.zeros(1, ROWS, HEADS, dim, dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize("dim", [128, 80])
def test_every_pass_compiles(monkeypatch: pytest.MonkeyPatch, chip: int, dim: int, tmp_path: Path) -> None:
    """For head dim 128 without spills, and a row of bf16 is loaded 16 bytes at a time."""
    monkeypatch.setattr(fused, "BESIDE_PROGRAMS", 3)
    statistics = torch.zeros(1, HEADS, ROWS)
    state = State(torch.zeros(1, HEADS, ROWS, dim), statistics.clone(), statistics.clone())
    for count, load, finished in ((1, True, None), (7, False, (rows(dim), statistics.clone()))):
        fused.merge_partials(state, [Partial(0, rows(dim), statistics)] * count, load, finished)
    for count, load, beside, out in ((1, False, False, None), (9, True, False, rows(dim)), (4, False, True, None)):
        fused.sum_parts(state.acc, [Part(0, 0, rows(dim))] * count, load, out, beside)
    fused.stand_in_for_out(rows(dim), statistics)
    fused.fused_delta(rows(dim), rows(dim), statistics)
    fused.padded_statistics(statistics, statistics, 64, 1)
    made = {
        name: compiled(getattr(fused, name), chip)
        for name in ("_merge_kernel", "_sum_kernel", "_stand_in_kernel", "_delta_kernel", "_statistics_kernel")
    }
    assert len(made["_merge_kernel"]) >= 2 and len(made["_sum_kernel"]) >= 3
    for name, kernel in ((name, kernel) for name, kernels in made.items() for kernel in kernels if dim == 128):
        assert spilled(kernel, tmp_path) == 0, name
        assert name == "_statistics_kernel" or "ld.global.v4.b32" in kernel.asm["ptx"], name
