"""Gluon's language on a CPU: our kernels for Hopper, as they are written, on the chip of hopper_chip.py.

Numbers and blocks of numbers are torch's tensors. A pointer knows its tensor, and may reach nothing else.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention.tiles import hopper
from tests.unit import hopper_chip as chip

FORWARD, BACKWARD = (f"burst_attention.tiles.hopper_{phase}" for phase in ("forward", "backward"))
ORDERS = tuple(itertools.permutations(range(3)))
"""In which a program's groups may be asked whether they can go on."""


class Pointer:
    """To one number of a tensor, or to a block of them."""

    def __init__(self, tensor: Tensor, at: Tensor | int | None = None) -> None:
        self.tensor = tensor
        self.at = torch.as_tensor(tensor.storage_offset() if at is None else at)

    def __add__(self, other: Tensor | int) -> Pointer:
        return Pointer(self.tensor, self.at + other)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.tensor, self.at[key])

    def places(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of those numbers that are asked for, where they are; and which are."""
        wanted = torch.ones_like(self.at, dtype=torch.bool) if mask is None else mask.broadcast_to(self.at.shape)
        places, size = self.at[wanted], self._memory().numel()
        allowed = torch.zeros(size, dtype=torch.bool)
        allowed.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()).fill_(True)
        assert ((places >= 0) & (places < size)).all() and allowed[places].all(), "a pointer leaves its tensor"
        return places, wanted

    def _memory(self) -> Tensor:
        size = self.tensor.untyped_storage().nbytes() // self.tensor.element_size()
        return self.tensor.as_strided((size,), (1,), 0)

    def _of_this_program(self, places: Tensor, stores: bool) -> None:
        """Programs come in any order, and may run at once: none touches what another has stored."""
        key = self.tensor.untyped_storage().data_ptr(), self.tensor.dtype
        writers = Program.writers.get(key)
        if writers is None:
            writers = Program.writers[key] = torch.zeros(self._memory().numel(), dtype=torch.int64)
        found = writers[places]
        assert ((found == 0) | (found == Program.number)).all(), "two programs touch one place"
        if stores:
            writers[places] = Program.number

    def load(self, mask: Tensor | None = None, other: float = torch.nan) -> Tensor:
        places, wanted = self.places(mask)
        self._of_this_program(places, stores=False)
        found = torch.full(self.at.shape, other if self.tensor.is_floating_point() else 0, dtype=self.tensor.dtype)
        found[wanted] = self._memory()[places]
        return found

    def store(self, value: Tensor, mask: Tensor | None = None) -> None:
        places, wanted = self.places(mask)
        assert len(places.unique()) == len(places), "two threads store to one place"
        self._of_this_program(places, stores=True)
        self._memory()[places] = value.broadcast_to(self.at.shape)[wanted].to(self.tensor.dtype)


class Program:
    """The one that runs: where it is in its grid, and in what order its groups are asked."""

    at: tuple[int, ...] = (0, 0, 0)
    grid: tuple[int, ...] = (1, 1, 1)
    order: Sequence[int] = ORDERS[0]
    number: int = 0
    """Of its launch, from 1 on."""
    writers: dict[tuple[int, torch.dtype], Tensor] = {}  # noqa: RUF012
    """By memory, which program of the launch has stored each number."""
    runs = threading.Lock()
    """Ranks that are threads share the chip."""


def allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> chip.Memory | chip.Barriers:
    """Shared memory of a program; of 64-bit integers for barriers."""
    name = f"memory of {tuple(shape)} {dtype}"
    return chip.Barriers(shape, name) if dtype == torch.int64 else chip.Memory.of(shape, dtype, name)


def arange(start: int, end: int, layout: Any) -> Tensor:
    return torch.arange(start, end, dtype=torch.int32)


def whole(value: Any) -> Any:
    """A constant of the language is the number itself."""
    return value


def fma(a: Tensor, b: float, c: Tensor) -> Tensor:
    """Rounded once."""
    return (a.double() * torch.tensor(b, dtype=torch.float32).double() + c.double()).float()


def moved(code: str, constraints: str, given: list[Tensor], **options: Any) -> Tensor:
    """The one instruction that our kernels have as such."""
    assert code == "mov.b32 $0, $1;" and options["dtype"] == given[0].dtype
    return given[0].clone()


def layouts() -> dict[str, Any]:
    """How numbers lie in registers and in shared memory is not judged here."""
    names = ("NVMMADistributedLayout", "SliceLayout", "DotOperandLayout", "BlockedLayout", "SwizzledSharedLayout")
    made: dict[str, Any] = dict.fromkeys(names, lambda *given: None)
    return made | {"NVMMASharedLayout": SimpleNamespace(get_default_for=lambda shape, dtype: None)}


LANGUAGE = layouts() | {
    "constexpr": whole,
    "program_id": lambda axis: torch.tensor(Program.at[axis], dtype=torch.int32),
    "num_programs": lambda axis: Program.grid[axis],
    "static_range": range,
    "warp_specialize": lambda parts, warps, registers: chip.run_groups(parts, Program.order),
    "allocate_shared_memory": allocate,
    "load": Pointer.load,
    "store": Pointer.store,
    "inline_asm_elementwise": moved,
    "convert_layout": lambda x, layout: x,
    "arange": arange,
    "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
    "where": torch.where,
    "minimum": lambda a, b: torch.minimum(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b))),
    "maximum": torch.maximum,
    "max": torch.amax,
    "sum": torch.sum,
    "exp2": torch.exp2,
    "log2": torch.log2,
    "fma": fma,
    "int64": torch.int64,
    "float32": torch.float32,
}


def jit(kernel: Any = None, **options: Any) -> Any:
    """`gluon.jit`: Python runs it."""
    return kernel or whole


def modules() -> dict[str, Any]:
    """Those that our kernels import, by name."""
    language = SimpleNamespace(**LANGUAGE)
    gluon = SimpleNamespace(jit=jit, language=language)
    hopper_language = SimpleNamespace(
        fence_async_shared=chip.fence,
        mbarrier=chip.BarrierNames,
        tma=chip.CopyEngine,
        warpgroup_mma=chip.multiply,
        warpgroup_mma_wait=chip.wait_for_products,
    )
    root = "triton.experimental"
    return {
        "triton": SimpleNamespace(),
        root: SimpleNamespace(gluon=gluon),
        f"{root}.gluon": gluon,
        f"{root}.gluon.language": language,
        f"{root}.gluon.language.nvidia": SimpleNamespace(),
        f"{root}.gluon.language.nvidia.hopper": hopper_language,
        "burst_attention.tiles.gluon_names": SimpleNamespace(load_block=chip.load_block, add_block=chip.add_block),
    }


def path_of(name: str) -> Path:
    return Path(hopper.__file__).with_name(f"{name.rpartition('.')[2]}.py")


def source_of(name: str) -> str:
    """A module's text, without importing it: that takes triton."""
    return path_of(name).read_text()


def use_chip(
    monkeypatch: pytest.MonkeyPatch,
    order: Sequence[int] = ORDERS[0],
    edit: Callable[[str, str], str] = lambda name, source: source,
) -> None:
    """Have launches of our kernels for Hopper run here; what `edit` makes of a module's name and text is run."""
    monkeypatch.setattr(Program, "order", order)
    kernels = {name: ModuleType(name) for name in (FORWARD, BACKWARD)}
    with pytest.MonkeyPatch.context() as while_imported:
        for name, module in (modules() | kernels).items():
            while_imported.setitem(sys.modules, name, module)
        for name, module in kernels.items():
            exec(compile(edit(name, source_of(name)), path_of(name), "exec"), module.__dict__)
    for name, module in kernels.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(hopper, "_descriptor", chip.Descriptor)
    monkeypatch.setattr(hopper, "start_kernel", start)


def start(kernel: Callable[..., None], grid: tuple[int, ...]) -> Callable[..., None]:
    """One program after the other, as a chip begins them."""

    def launch(*arguments: Any, num_warps: int, **options: Any) -> None:
        assert num_warps == 4
        given = [Pointer(x) if isinstance(x, Tensor) else x for x in arguments]
        with Program.runs:
            Program.grid, Program.number = grid, 0
            Program.writers.clear()
            for z, y, x in itertools.product(*(range(size) for size in reversed(grid))):
                Program.at = x, y, z
                Program.number += 1
                kernel(*given, **options)

    return launch
