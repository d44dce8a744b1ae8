"""A plugin that runs tests of tests/gpu on the GPU that is not there: `python -m pytest -p tests.pretended_cuda ...`.

So a fault of such a test is found before it costs time on a GPU. What is theirs to find, kernels that compute or copy
something else there, is not found here. A process of its own: torch is told that there is a GPU when tests are
collected, and tensors for it are made on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention

from burst_attention import api, ops
from burst_attention.tiles import flash4, vendor
from tests.unit import fake_gpu
from tests.unit import gpu_kernels_in_torch as in_torch

FACTORIES = ("zeros", "ones", "empty", "full", "randn", "tensor", "arange")
NAMES = {"auto": "FA4", "flash": "FA4", "cudnn": "cuDNN", "hopper": "hopper", "triton": "triton"}
"""Kernels as a call names them, and as fake_gpu.py does."""
BY_POLICY = ("test_exactness_on_cuda", "test_threads_on_cuda")
"""Modules whose "auto" is what users get: a kernel for each piece."""
HOPPER = (9, 0)
ALLOCATOR = {"num_device_alloc": 0, "allocation.all.allocated": 0}
SMALLER: dict[str, dict[str, Callable[[Any], Any]]] = {
    "test_lanes_on_cuda": {"TOKENS": lambda tokens: tokens // 32},
    "test_steady_state": {
        "TOKENS": lambda tokens: tokens // 32,
        "CASE": lambda case: replace(case, tokens_per_rank=case.tokens_per_rank // 32),
    },
    "test_flash4": {"MANY_ROWS": lambda rows: rows // 32},
}
"""Sizes of modules: kernels are torch's here, and hold scores."""


def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """A factory that makes a GPU's tensors too."""

    @functools.wraps(make)
    def made(*given: Any, **options: Any) -> Any:
        if str(options.get("device")).startswith("cuda"):
            options["device"] = "cpu"
        return make(*given, **options)

    return made


def stays(move: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`Tensor.to` where the way to a GPU is a way to nowhere."""

    def to(x: Tensor, *given: Any, **options: Any) -> Tensor:
        kept = [place for place in given if not str(place).startswith("cuda")]
        options = {name: value for name, value in options.items() if not str(value).startswith("cuda")}
        return move(x, *kept, **options) if kept or options else x

    return to


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that tests ask of torch beside streams."""
    monkeypatch.setattr(Tensor, "to", stays(Tensor.to))
    monkeypatch.setattr(Tensor, "cuda", lambda x: x)
    for name in FACTORIES:
        monkeypatch.setattr(torch, name, on_cpu(getattr(torch, name)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: ALLOCATOR)
    for name in ("synchronize", "_sleep", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *given: None)
    for name in ("max_memory_allocated", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: 0)
    for name in ("activate_flash_attention_impl", "restore_flash_attention_impl"):
        monkeypatch.setattr(attention, name, lambda *given: None, raising=False)


def pytest_configure() -> None:
    """Modules ask as they are collected whether there is a GPU."""
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: HOPPER


def name_of(module: Any) -> str:
    return str(module.__name__.rpartition(".")[2])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.getparent(pytest.Module) for item in items}:
        assert module is not None
        for name, smaller in SMALLER.get(name_of(module.obj), {}).items():
            setattr(module.obj, name, smaller(getattr(module.obj, name)))


@pytest.fixture(autouse=True)
def pretended(request: pytest.FixtureRequest) -> Iterator[None]:
    serves, serves_backward = flash4.serves, flash4.serves_backward
    make_options = api.make_options
    # Not the test's own, which it may undo.
    with pytest.MonkeyPatch.context() as monkeypatch:
        machine = fake_gpu.pretend_gpu(monkeypatch, pool=100)
        pretend(monkeypatch)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: False)
        kernels: dict[str, Any] = {name: make() for name, make in fake_gpu.KERNELS.items()}
        kernels["cuda"].kernels["cudnn"] = kernels["cuDNN"]
        names = NAMES | ({"auto": "cuda"} if name_of(request.module) in BY_POLICY else {})
        for module in (api, ops):
            monkeypatch.setattr(module, "pick_kernel", lambda name, request: kernels[names[name]])
        monkeypatch.setattr(api, "make_options", lambda **options: make_options(**options | {"device_type": "cuda"}))
        monkeypatch.setattr(flash4, "is_there", lambda device=None: flash4.installed_version() in flash4.KNOWN)
        monkeypatch.setattr(flash4, "serves", serves)
        monkeypatch.setattr(flash4, "serves_backward", serves_backward)
        monkeypatch.setattr(vendor.FlashKernel, "gradients", lambda self, *given: in_torch.gradients(*given))
        yield
        assert not machine.found, "\n".join(sorted(set(machine.found))[:10])
