"""Starting our Hopper kernels: what they serve, and the descriptors that their loads need.

The kernels themselves are imported when one is started: they need a triton that has Gluon, which `has_gluon` asks.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch
from torch import Tensor

from burst_attention.geometry import Piece
from burst_attention.merge import State
from burst_attention.tiles.block_table import block_table
from burst_attention.tiles.policy import capability_of
from burst_attention.tiles.protocol import BackwardInputs
from burst_attention.tiles.start import start_kernel

BLOCK_Q = 128
STAGES = 2
DIMS = (64, 128)
"""Of heads. Backward takes values of the same alone."""
MEASURED_DIMS = (128,)
"""What backward serves where it is not asked for by name."""
BACKWARD_BLOCK_K, BACKWARD_BLOCK_Q = 128, 64
BACKWARD_STAGES = 3
ALIGNMENT = 16


@lru_cache(maxsize=1)
def has_gluon() -> bool:
    """Whether triton is new enough to have what the kernels are written in."""
    try:
        return importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper") is not None
    except ModuleNotFoundError:
        return False


@lru_cache(maxsize=1)
def has_async_add() -> bool:
    """Whether triton's builder knows the operation that hopper_backward.py adds dq with."""
    try:
        from triton._C.libtriton import gluon_ir, ir
    except ImportError:
        return False
    return hasattr(gluon_ir.GluonOpBuilder, "create_async_tma_reduce") and hasattr(ir, "DESCRIPTOR_REDUCE_KIND")


def serves_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Whether the Hopper forward can take these tensors; what it cannot goes to triton_forward.py."""
    return q.shape[3] in DIMS and v.shape[3] in DIMS and _served((q, k, v), scale)


def serves_backward(x: BackwardInputs, scale: float, dims: tuple[int, ...]) -> bool:
    """Whether the Hopper backward can take these tensors; what it cannot goes to triton_backward.py.

    That is deterministic, so it also serves where torch was asked for deterministic algorithms.
    """
    if torch.are_deterministic_algorithms_enabled() or not has_async_add():
        return False
    return x.q.shape[3] == x.v.shape[3] and x.q.shape[3] in dims and _served((x.q, x.k, x.v, x.dout), scale)


def _served(tensors: tuple[Tensor, ...], scale: float) -> bool:
    q = tensors[0]
    on_hopper = q.is_cuda and torch.version.hip is None and capability_of(q.device) == (9, 0)
    half = q.dtype in (torch.bfloat16, torch.float16)
    return on_hopper and half and scale > 0 and has_gluon() and all(loadable(x) for x in tensors)


def loadable(x: Tensor) -> bool:
    """Whether a tensor descriptor can point at it: rows and heads begin at multiples of 16 bytes."""
    strides = [stride for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1]
    aligned = all(stride * x.element_size() % ALIGNMENT == 0 for stride in strides)
    return x.stride(3) == 1 and aligned and x.data_ptr() % ALIGNMENT == 0 and x.numel() > 0


def _descriptor(x: Tensor, rows: int, dim: int | None = None) -> object:
    """For loads of (1, 1, rows, dim), or all columns, of a (B, heads, rows, D) tensor."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [1, 1, rows, dim or x.shape[3]]
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[x.dtype]
    # The stride of a single batch or head is never used, and must be aligned all the same.
    strides = [stride if size > 1 else x.shape[3] for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True)]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)


def launch_hopper_forward(
    pieces: tuple[Piece, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    scale: float,
    *,
    load: bool = True,
    finished: tuple[Tensor, Tensor] | None = None,
    block_k: int = 128,
    stages: int = STAGES,
) -> None:
    """As `triton_kernel.launch_forward`, for what `serves_forward` allows."""
    from burst_attention.tiles.hopper_forward import hopper_forward_kernel

    table = block_table(pieces, False, BLOCK_Q, block_k, q.device)
    out, lse = finished or (state.acc, state.peak)
    for grid, blocks in table.launches(q.shape[0] * q.shape[1], (k, v)):
        start_kernel(hopper_forward_kernel, grid)(
            _descriptor(q, BLOCK_Q // 2), _descriptor(k, block_k), _descriptor(v, block_k), *state[:3], out, lse,
            blocks, table.entries, *state.acc.stride()[:3], *state.peak.stride(), *out.stride()[:3], *lse.stride(),
            q.shape[1], q.shape[1] // k.shape[1], q.shape[2], scale,
            BLOCK_K=block_k, D=q.shape[3], E=v.shape[3], STAGES=stages, LOAD=load, FINISH=finished is not None,
            num_warps=4,
        )  # fmt: skip


def launch_hopper_backward(
    pieces: tuple[Piece, ...],
    x: BackwardInputs,
    gradients: tuple[Tensor, Tensor, Tensor],
    scale: float,
    *,
    add: bool = True,
    stages: int = BACKWARD_STAGES,
) -> None:
    """Add pieces to dq, dk and dv, for what `serves_backward` allows; dk and dv are written where not `add`.

    They may have several heads for each of k, which then are parts, one after the other, each of as many query heads.
    """
    from burst_attention.tiles.hopper_backward import hopper_backward_kernel

    dq, dk, dv = gradients
    assert dq.dtype == torch.float32, "dq is added to as it lies in fast memory"
    table = block_table(pieces, True, BACKWARD_BLOCK_K, BACKWARD_BLOCK_Q, x.q.device)
    heads = dk.shape[1]
    for grid, blocks in table.launches(x.k.shape[0] * heads, (x.q, x.dout, dq)):
        start_kernel(hopper_backward_kernel, grid)(
            _descriptor(x.q, BACKWARD_BLOCK_Q), _descriptor(x.dout, BACKWARD_BLOCK_Q),
            _descriptor(x.k, BACKWARD_BLOCK_K), _descriptor(x.v, BACKWARD_BLOCK_K),
            _descriptor(dq, BACKWARD_BLOCK_Q, dq.shape[3] // 2), x.lse, x.delta, dk, dv, blocks, table.entries,
            *x.lse.stride(), *x.delta.stride(), *dk.stride()[:3], *dv.stride()[:3],
            heads, x.q.shape[1] // heads, heads // x.k.shape[1], x.k.shape[2], scale,
            D=x.q.shape[3], STAGES=stages, ADD=add, num_warps=4,
        )  # fmt: skip
