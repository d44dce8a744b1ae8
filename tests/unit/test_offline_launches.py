"""Kernels compiled as they are launched, tuples and all, for chips that are not here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton

from burst_attention.geometry import Piece
from burst_attention.merge import MAX_PARTIALS, MAX_PARTS, BlockOrder, Part, Partial, State
from burst_attention.tiles import Accumulator, BackwardInputs, Gradients, block_table, fused, hopper, triton_kernel
from burst_attention.tiles.triton_backward import key_gradients_kernel, query_gradients_kernel
from burst_attention.tiles.triton_forward import forward_kernel
from tests.unit.test_offline_compile import spills_nothing

HEADS, ROWS = 2, 48


class ChipThatIsNotHere:
    """What Triton asks of a driver: each chip is a device of its own, and starting a kernel does nothing."""

    class utils:  # noqa: N801
        load_binary = staticmethod(lambda name, binary, shared, device: (1, 1, 32, 0, 1024))
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 232448})
        unload_module = staticmethod(lambda module: None)

    class launcher_cls:  # noqa: N801
        def __init__(self, source: Any, metadata: Any) -> None:
            self.launch_cooperative_grid = False

        def __call__(self, *arguments: Any) -> None:
            """Nothing."""

    def __init__(self, chip: int | str) -> None:
        self.chip = chip

    def get_current_device(self) -> int | str:
        return self.chip

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        if isinstance(self.chip, str):
            return GPUTarget("hip", self.chip, 32 if self.chip.startswith("gfx1") else 64)
        return GPUTarget("cuda", self.chip, 32)


AMD = ("gfx90a", "gfx942", "gfx1100")
"""MI200, MI300 and a consumer's card."""
AMD_ROOM = 64 * 1024
"""Bytes of fast memory that a program may have there."""


@pytest.fixture
def chip(request: pytest.FixtureRequest) -> Iterator[int | str]:
    """Kernels are launched for it. Where Triton interprets them instead, nothing would be compiled, and that fails."""
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(ChipThatIsNotHere(request.param))
    yield request.param
    triton.runtime.driver._active = before


def compiled(kernel: Any, chip: int | str) -> list[Any]:
    kernels = list(kernel.device_caches[chip][0].values())
    kernel.device_caches.pop(chip)
    return kernels


SUMS = BlockOrder(torch.zeros(80 * 128, dtype=torch.int32), 80, 0.5)


def rows(dim: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """As a vendor's kernel gives them."""
    return torch.zeros(1, ROWS, HEADS, dim, dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize(
    ("chip", "dim"), [(80, 128), (90, 128), (90, 80), (100, 128), *((chip, 128) for chip in AMD)], indirect=["chip"]
)
def test_every_pass_compiles(monkeypatch: pytest.MonkeyPatch, chip: int | str, dim: int, tmp_path: Path) -> None:
    """On NVIDIA's chips for head dim 128 without spills, and a row of bf16 is loaded 16 bytes at a time."""
    monkeypatch.setattr(torch.version, "hip", "of a chip" if isinstance(chip, str) else None)
    for name in ("BESIDE_FEW", "BESIDE_MANY"):
        monkeypatch.setattr(fused, name, getattr(fused, name)._replace(programs=1))
    statistics = torch.zeros(1, HEADS, ROWS)
    state = State(torch.zeros(1, HEADS, ROWS, dim), statistics.clone(), statistics.clone())
    for count, load, finished in ((1, True, None), (MAX_PARTIALS, False, (rows(dim), statistics.clone()))):
        fused.merge_partials(state, [Partial(0, rows(dim), statistics)] * count, load, finished)
    most = MAX_PARTS + 3  # and parts of dq that grew
    passes = [(1, False, False), (most, True, False)]
    passes += [(1, False, True), (fused.FEW_PARTS, True, True), (most, True, True)]
    for count, load, beside in passes:
        fused.sum_parts(state.acc, [Part(0, 0, rows(dim))] * count, load, rows(dim) if load else None, beside)
    for beside in (False, True):
        # As dq ends with FlashAttention-4: rectangles of all queries and of half, and a triangle.
        fused.sum_parts(
            state.acc, [*[Part(0, 0, state.acc, SUMS)] * 3, Part(0, 0, rows(dim))], False, rows(dim), beside
        )
    fused.stand_in_for_out(rows(dim), statistics)
    fused.fused_delta(rows(dim), rows(dim), statistics)
    fused.padded_statistics(statistics, statistics, 64, 128)
    made = {
        name: compiled(getattr(fused, name), chip)
        for name in ("_merge_kernel", "_sum_kernel", "_stand_in_kernel", "_delta_kernel", "_statistics_kernel")
    }
    assert len(made["_merge_kernel"]) >= 2 and len(made["_sum_kernel"]) == 7
    judged = made if dim == 128 and isinstance(chip, int) else {}
    for name, kernel in ((name, kernel) for name, kernels in judged.items() for kernel in kernels):
        assert spills_nothing(kernel, tmp_path), name
        assert name == "_statistics_kernel" or "ld.global.v4.b32" in kernel.asm["ptx"], name


@pytest.mark.parametrize("chip", [80, 90], indirect=True)
@pytest.mark.parametrize(("dim", "dtype"), [(256, torch.bfloat16), (128, torch.float32)], ids=["256", "fp32"])
def test_wide_rows_fit_registers_beside_tiles(
    monkeypatch: pytest.MonkeyPatch, chip: int, dim: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    for name in ("BESIDE_FEW", "BESIDE_MANY"):
        monkeypatch.setattr(fused, name, getattr(fused, name)._replace(programs=1))
    total = torch.zeros(1, HEADS, ROWS, dim)
    for count in (fused.FEW_PARTS, MAX_PARTS + 3):
        fused.sum_parts(total, [Part(0, 0, rows(dim, dtype))] * count, load=True, beside=True)
    made = compiled(fused._sum_kernel, chip)
    assert len(made) == 2
    assert all(spills_nothing(kernel, tmp_path) for kernel in made)


@pytest.mark.parametrize(
    ("chip", "dtype", "dim"),
    [*((chip, torch.bfloat16, 128) for chip in AMD), ("gfx942", torch.float32, 64)],
    indirect=["chip"],
    ids=[*AMD, "gfx942-fp32"],
)
def test_our_kernels_compile_for_amd(monkeypatch: pytest.MonkeyPatch, chip: str, dtype: torch.dtype, dim: int) -> None:
    """And fit its fast memory. None of them has run on such a chip."""
    monkeypatch.setattr(triton_kernel, "_room", lambda device: AMD_ROOM)
    q, k, v, dout = (torch.zeros(1, HEADS, ROWS, dim, dtype=dtype) for _ in range(4))
    statistics = torch.zeros(1, HEADS, ROWS)
    state = State(torch.zeros(1, HEADS, ROWS, dim), statistics.clone(), statistics.clone())
    gradients = Gradients(*(Accumulator(torch.zeros(x.shape)) for x in (q, k, v)))
    pieces = [Piece(0, ROWS, 0, ROWS, 0, ROWS)]
    kernel = triton_kernel.TritonKernel()
    kernel.forward(pieces, q, k, v, state, 0.1)
    kernel.backward(pieces, BackwardInputs(dout, q, k, v, statistics, statistics, None), gradients, 0.1)
    for launched in (forward_kernel, key_gradients_kernel, query_gradients_kernel):
        (made,) = compiled(launched, chip)
        assert made.metadata.shared <= AMD_ROOM


HOPPER = {"forward": "hopper_forward", "backward": "hopper_backward"}


@pytest.mark.parametrize("chip", [90], indirect=True)
@pytest.mark.parametrize("phase", HOPPER)
def test_hopper_kernels_get_what_they_ask_for(monkeypatch: pytest.MonkeyPatch, chip: int, phase: str) -> None:
    """By name; as many heads take turns as have what they walk over in the cache; two launches share a compilation."""
    count, dim, heads = 1024, 128, 8
    module = importlib.import_module(f"burst_attention.tiles.{HOPPER[phase]}")
    kernel = getattr(module, f"{HOPPER[phase]}_kernel")
    given: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: Any, **options: Any) -> None:
                given.append((grid, dict(zip(kernel.arg_names, arguments, strict=False)) | options))
                kernel[grid](*arguments, **options)

            return launch

    monkeypatch.setattr(module, f"{HOPPER[phase]}_kernel", Noted())
    monkeypatch.setattr(block_table, "MOST_BLOCKS", 4)
    # k and v forward; q, dout and fp32 sums of dq backward.
    walked = {"forward": 2 * dim * 2, "backward": 2 * dim * 2 + dim * 4}[phase]
    monkeypatch.setattr(block_table, "_cache_bytes", lambda device: 4 * count * walked)
    q, k, v, dout = (torch.zeros(1, count, heads, dim, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    statistics, piece = torch.zeros(1, heads, count), Piece(0, count, 0, count, 0, count)
    sums = [torch.zeros(1, heads, count, dim) for _ in range(3)]
    if phase == "forward":
        state = State(sums[0], statistics, statistics)
        hopper.launch_hopper_forward((piece,), q, k, v, state, 0.1)
        strides = {"acc": sums[0], "peak": statistics, "out": sums[0], "lse": statistics}
        counts = {"heads": heads, "groups": 1, "q_rows": count}
    else:
        x = BackwardInputs(dout, q, k, v, statistics, statistics, None)
        hopper.launch_hopper_backward((piece,), x, (sums[0], sums[1], sums[2]), 0.1)
        strides = {"lse": statistics, "delta": statistics, "dk": sums[1], "dv": sums[2]}
        counts = {"kv_heads": heads, "groups": 1, "parts": 1, "k_rows": count}
    table = block_table.block_table(
        (piece,), phase == "backward", 128, {"forward": 128, "backward": 64}[phase], q.device
    )
    assert [grid for grid, _ in given] == [(4, 4, 2), (4, 4, 2)]
    assert torch.equal(torch.cat([named["blocks_ptr"] for _, named in given]), table.blocks)
    for _, named in given:
        assert named["entries_ptr"] is table.entries and named["scale"] == 0.1 and named["enable_fp_fusion"]
        assert {name: named[name] for name in counts} == counts
        for name, tensor in strides.items():
            assert [named[f"{name}_{part}"] for part in ("batch", "head", "row")] == list(tensor.stride()[:3]), name
    assert len(compiled(kernel, chip)) == 1
