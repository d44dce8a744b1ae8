"""Which kernel serves a call: one pure function over a table, each row with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from burst_attention.tiles.cpu_flash import CpuFlashKernel
from burst_attention.tiles.plain import PlainKernel
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

    kernel: TileKernel
    refusal: Callable[[TileRequest], str | None]
    reason: str


def _flash_refusal(request: TileRequest) -> str | None:
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


CHOICES = (
    Choice(
        CpuFlashKernel(),
        _flash_refusal,
        "fastest on CPU in fp32 and bf16; its speed in fp16 hangs on the processor, so fp16 goes to plain",
    ),
    Choice(PlainKernel(), lambda request: None, "serves every dtype, head dim, mask and device"),
)

KERNEL_NAMES = ("auto", *(choice.kernel.name for choice in CHOICES))


def pick_kernel(name: str, request: TileRequest) -> TileKernel:
    """The named kernel, or for "auto" the first of the table that can serve the request."""
    if name not in KERNEL_NAMES:
        raise ValueError(f"there is no kernel {name!r}; use one of {', '.join(KERNEL_NAMES)}")
    for choice in CHOICES:
        if name not in ("auto", choice.kernel.name):
            continue
        refusal = choice.refusal(request)
        if refusal is None:
            return choice.kernel
        if name != "auto":
            raise ValueError(f"kernel {name!r} cannot serve this call: {refusal}; use kernel='auto'")
    raise AssertionError("the plain kernel serves everything")
