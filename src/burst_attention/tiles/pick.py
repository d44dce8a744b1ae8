"""Which kernel serves a call: one pure function over a table, each row with its reason.

On a GPU the kernel "cuda" decides further, piece by piece (cuda.py, policy.py). Kernels that need triton are imported
when a call on a GPU asks for them, never before.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from burst_attention.tiles.cpu_flash import CpuFlashKernel
from burst_attention.tiles.hopper import DIMS, has_async_add, has_gluon
from burst_attention.tiles.plain import PlainKernel
from burst_attention.tiles.policy import PLANNED_FOR, active_flash, capability_of, cudnn_takes, flash2_trains, runs_on
from burst_attention.tiles.protocol import TileKernel


@dataclass(frozen=True)
class TileRequest:
    """What a kernel has to serve."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    returns_lse: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class Choice:
    """A kernel, why it cannot serve a request (None: it can), and why it stands where it stands."""

    name: str
    make: Callable[[], TileKernel]
    refusal: Callable[[TileRequest], str | None]
    reason: str


def _cpu_flash_refusal(request: TileRequest) -> str | None:
    if request.device_type != "cpu":
        return f"it runs on cpu, the tensors are on {request.device_type}"
    if request.dtype not in (torch.float32, torch.bfloat16):
        return f"it serves float32 and bfloat16, the tensors are {request.dtype}"
    if request.head_dim != request.value_dim:
        return f"it needs equal head dims, got {request.head_dim} for q, k and {request.value_dim} for v"
    if request.scale <= 0:
        return f"its causal form needs a positive scale, got {request.scale}"
    if request.returns_lse:
        return (
            "its lse is rough (500 ulp off in bf16, 4 in fp32) and takes no gradient, and return_lse=True asks for both"
        )
    return None


def _refusal_with_triton(request: TileRequest) -> str | None:
    """Why our own kernels do not serve, where they can be had."""
    if request.device_type != "cuda":
        return f"it runs on a GPU, the tensors are on {request.device_type}"
    if request.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it serves float32, bfloat16 and float16, the tensors are {request.dtype}"
    if max(request.head_dim, request.value_dim) > 256:
        return f"it serves head dims up to 256, got {request.head_dim} and {request.value_dim}"
    return None


def lacks_triton(request: TileRequest) -> bool:
    """Whether our own kernels would serve, but for triton, which is not here."""
    return not has_triton() and _refusal_with_triton(request) is None


def _triton_refusal(request: TileRequest) -> str | None:
    refusal = _refusal_with_triton(request)
    if refusal is not None:
        return refusal
    return None if has_triton() else "it needs triton, which cannot be imported here; install triton"


def _vendor_refusal(request: TileRequest) -> str | None:
    refusal = _triton_refusal(request)
    if refusal is not None:
        return refusal
    if request.dtype == torch.float32:
        return "it serves bfloat16 and float16, the tensors are torch.float32"
    if request.head_dim % 8 or request.value_dim % 8:
        return f"it serves head dims that 8 divides, got {request.head_dim} and {request.value_dim}"
    if request.scale <= 0:
        return f"its causal form needs a positive scale, got {request.scale}"
    if request.returns_lse:
        return "its backward takes no gradient on lse, and return_lse=True asks for one"
    return None


def _hopper_refusal(request: TileRequest) -> str | None:
    refusal = _triton_refusal(request)
    if refusal is not None:
        return refusal
    if request.dtype == torch.float32:
        return "it serves bfloat16 and float16, the tensors are torch.float32"
    if request.head_dim != request.value_dim or request.head_dim not in DIMS:
        dims = " and ".join(map(str, DIMS))
        return f"it serves head dims {dims}, got {request.head_dim} for q, k and {request.value_dim} for v"
    if request.scale <= 0:
        return f"it needs a positive scale, got {request.scale}"
    chip = capability_of(None) or PLANNED_FOR[0]
    if torch.version.hip or chip != (9, 0):
        return f"it is written for Hopper (9.0), and this GPU is {chip[0]}.{chip[1]}"
    if torch.cuda.is_available() and not (has_gluon() and has_async_add()):
        return "it needs a triton with Gluon, 3.6 or newer"
    return None


def _cudnn_refusal(request: TileRequest) -> str | None:
    refusal = _vendor_refusal(request)
    if refusal is not None:
        return refusal
    chip = capability_of(None) or PLANNED_FOR[0]
    if not cudnn_takes(chip, request.head_dim, request.value_dim):
        return f"it has no head dims {request.head_dim} and {request.value_dim} on this GPU ({chip[0]}.{chip[1]})"
    return None


def _gpu_refusal(request: TileRequest) -> str | None:
    return _vendor_refusal(request) if request.returns_lse else _triton_refusal(request)


def _flash_refusal(request: TileRequest) -> str | None:
    if request.head_dim != request.value_dim:
        return f"it needs equal head dims, got {request.head_dim} for q, k and {request.value_dim} for v"
    refusal = _vendor_refusal(request)
    if refusal is not None or not torch.cuda.is_available():
        return refusal
    flash, chip = active_flash(), torch.cuda.get_device_capability()
    if not runs_on(flash, chip):
        return f"{flash} is activated, which does not run on this GPU ({chip[0]}.{chip[1]})"
    if flash == "FA2" and not flash2_trains(chip, request.head_dim):
        return f"its backward takes no head dim {request.head_dim} on this GPU ({chip[0]}.{chip[1]})"
    return None


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether triton is installed; it is imported only when a kernel needs it."""
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=1)
def _warn_without_triton() -> None:
    """Once: what serves then is slow, and holds more memory."""
    warnings.warn("on a GPU without triton torch's matrix products compute attention: install triton", stacklevel=2)


@lru_cache(maxsize=8)
def _gpu_kernel(name: str) -> TileKernel:
    from burst_attention.tiles.cuda import CudaKernel

    every = CudaKernel()
    return {every.name: every, **every.kernels}[name]


CPU_FLASH, PLAIN = CpuFlashKernel(), PlainKernel()
CHOICES = (
    Choice(
        "flash",
        lambda: CPU_FLASH,
        _cpu_flash_refusal,
        "fastest on CPU in fp32 and bf16; its speed in fp16 hangs on the processor, so fp16 goes to plain",
    ),
    Choice("cuda", lambda: _gpu_kernel("cuda"), _gpu_refusal, "on a GPU, the fastest for each piece (policy.py)"),
    Choice("triton", lambda: _gpu_kernel("triton"), _triton_refusal, "takes a gradient on lse, which vendors do not"),
    Choice(
        "hopper",
        lambda: _gpu_kernel("hopper"),
        _hopper_refusal,
        "by name, where vendors' kernels and their ways are not wanted: any mask, on Hopper",
    ),
    Choice("cudnn", lambda: _gpu_kernel("cudnn"), _cudnn_refusal, "by name only: it serves full and causal pieces"),
    Choice("flash", lambda: _gpu_kernel("flash"), _flash_refusal, "by name only, like cudnn"),
    Choice("plain", lambda: PLAIN, lambda request: None, "serves every dtype, head dim, mask and device"),
)

KERNEL_NAMES = ("auto", *dict.fromkeys(choice.name for choice in CHOICES))


def pick_kernel(name: str, request: TileRequest) -> TileKernel:
    """The named kernel, or for "auto" the first of the table that can serve the request."""
    if name not in KERNEL_NAMES:
        raise ValueError(f"there is no kernel {name!r}; use one of {', '.join(KERNEL_NAMES)}")
    refusals = []
    for choice in CHOICES:
        if name not in ("auto", choice.name):
            continue
        refusal = choice.refusal(request)
        if refusal is None:
            if choice.name == "plain" != name and lacks_triton(request):
                _warn_without_triton()
            return choice.make()
        refusals.append(refusal)
    # Two kernels share a name, one for each kind of device: the tensors' own says what is wrong.
    refusal = refusals[-1 if request.device_type == "cuda" else 0]
    raise ValueError(f"kernel {name!r} cannot serve this call: {refusal}; use kernel='auto'")
