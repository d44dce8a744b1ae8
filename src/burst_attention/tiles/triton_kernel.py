"""Our own Triton kernels behind the tile-kernel protocol: every piece, state carried, gradients added in the kernel.

Shapes: B batch, H query heads, G key heads, S query rows, K key rows, D head dim, E value head dim.

Importing this file needs triton; `pick.py` does so only for tensors on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from burst_attention.geometry import Piece, cover_rows
from burst_attention.merge import State
from burst_attention.schedule import Bundle, PhasePlan, Round
from burst_attention.tiles.accumulator import Accumulator
from burst_attention.tiles.block_table import block_table
from burst_attention.tiles.gpu import GpuKernel, settle
from burst_attention.tiles.hopper import (
    MEASURED_DIMS,
    launch_hopper_backward,
    launch_hopper_forward,
    serves_backward,
    serves_forward,
)
from burst_attention.tiles.protocol import BackwardInputs, Gradients
from burst_attention.tiles.start import start_kernel
from burst_attention.tiles.triton_backward import key_gradients_kernel, query_gradients_kernel
from burst_attention.tiles.triton_forward import forward_kernel


@dataclass(frozen=True)
class Config:
    """Rows and columns of a program's block, its warps, and how many loads are in flight."""

    block_q: int
    block_k: int
    warps: int
    stages: int


SWIZZLED = 64
"""Columns of 16 bits from which on rows lie in fast memory in the same order, however wide they are."""
FP32_WARPS = 8
"""For wide heads in fp32, whose products are written out one by one: 4 would have twice the code to compile."""


def forward_config(head_dim: int, value_dim: int, dtype: torch.dtype) -> Config:
    """What was fastest on an H200 (docs/benchmarks.md); smaller where fp32 or a wide head needs the room.

    Beyond 128 nothing was measured, here and below: what compiles for every chip with few registers spilled.
    """
    wide = max(head_dim, value_dim)
    if dtype == torch.float32:
        return Config(64, 32, 4, 2) if wide <= 64 else Config(32, 32, FP32_WARPS, 2)
    if wide <= 128:
        return Config(128, 128, 8, 3) if wide <= 64 else Config(128, 64, 8, 3)
    return Config(128, 64, 8, 2) if value_dim <= 128 else Config(64, 64, 8, 2)


def key_config(head_dim: int, value_dim: int, dtype: torch.dtype) -> Config:
    """For dk and dv, where a program holds a block of keys."""
    wide = max(head_dim, value_dim)
    if dtype == torch.float32:
        return Config(32, 32, 4 if wide <= 64 else FP32_WARPS, 1)
    return Config(64, 128, 8, 2) if wide <= 128 else Config(32, 32, 8, 1)


def query_config(head_dim: int, value_dim: int, dtype: torch.dtype) -> Config:
    """For dq, where a program holds a block of queries."""
    wide = max(head_dim, value_dim)
    if dtype == torch.float32:
        return Config(32, 32, 4 if wide <= 64 else FP32_WARPS, 1)
    return Config(128, 64, 8, 2) if wide <= 128 else Config(64, 32, 8, 1)


ROOM_FOR_ALL, ROOM_FOR_NARROW = 160 * 1024, 96 * 1024
"""Bytes of fast memory that a program of any head dim takes, and one of head dims up to 128."""


def fitted(config: Config, wide: int, room: int) -> Config:
    """A config on a chip with so much fast memory for a program; consumers' cards have half of what others have."""
    if room >= ROOM_FOR_ALL or (room >= ROOM_FOR_NARROW and wide <= 128):
        return config
    return Config(max(config.block_q // 2, 16), max(config.block_k // 2, 16), 4, 1)


def config_for(tuned: Callable[[int, int, torch.dtype], Config], q: Tensor, v: Tensor) -> Config:
    """One of the configs above for these tensors, where they are."""
    dims = q.shape[3], v.shape[3]
    return fitted(tuned(*dims, q.dtype), max(dims), _room(q.device))


@lru_cache(maxsize=16)
def _room(device: torch.device) -> int:
    """Bytes of fast memory that a program may have there."""
    if device.type != "cuda":
        # The interpreter.
        return ROOM_FOR_ALL
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", 0) or found.shared_memory_per_block)


class TritonKernel(GpuKernel):
    """Any pieces on a GPU, in fp32, bf16 and fp16."""

    name = "triton"
    backward_dims: tuple[int, ...] = MEASURED_DIMS
    """Of heads, for which our backward for Hopper serves there."""

    def workspace_bytes(self, phase: PhasePlan, step: Round, visiting: Bundle | None) -> int:
        """Row statistics of visiting queries, laid out afresh for the kernel for Hopper."""
        if phase.phase == "forward" or not visiting or phase.direction == "kv":
            return 0
        return 2 * step.row_count * phase.shapes.batch * phase.shapes.heads * 4

    def forward(self, pieces: Sequence[Piece], q: Tensor, k: Tensor, v: Tensor, state: State, scale: float) -> None:
        q, k, v = (dense_columns(x) for x in (q, k, v))
        options: dict[str, Any] = {}
        if state.deferred is not None:
            # Where every row is in a piece, the kernel begins the state, and ends it, on its own.
            covered = cover_rows(pieces, q.shape[2])
            if state.deferred.partials or not covered:
                settle(state)
            options["load"] = not state.deferred.untouched
            state.deferred.untouched = False
            if covered and state.deferred.last:
                out = torch.empty_like(state.acc, dtype=q.dtype)
                options["finished"] = state.deferred.finished = out, torch.empty_like(state.peak)
        launch_fastest_forward(tuple(pieces), q, k, v, state, scale, **options)

    def backward(self, pieces: Sequence[Piece], x: BackwardInputs, gradients: Gradients, scale: float) -> None:
        x = x._replace(**{name: dense_columns(getattr(x, name)) for name in ("dout", "q", "k", "v")})
        pieces = tuple(pieces)
        keys_covered = cover_rows(pieces, x.k.shape[2], keys=True)
        dq, dk, dv = gradients
        if dq is not None and dk is not None and dv is not None and serves_backward(x, scale, self.backward_dims):
            keys, add = opened((dk, dv), keys_covered)
            # Programs meet in dq, so it must be there before the first.
            launch_hopper_backward(pieces, x, (dq.settle(), keys[0], keys[1]), scale, add=add)
            return
        if dk is not None or dv is not None:
            keys, add = opened([total for total in (dk, dv) if total is not None], keys_covered)
            launch_key_gradients(pieces, x, keys[0] if dk else None, keys[-1] if dv else None, scale, add=add)
        if dq is not None:
            queries, add = opened((dq,), cover_rows(pieces, x.q.shape[2]))
            launch_query_gradients(pieces, x, queries[0], scale, add=add)


def opened(totals: Sequence[Accumulator], covered: bool) -> tuple[list[Tensor], bool]:
    """Gradients' tensors, and whether a kernel must add to them: not to fresh ones if it writes every row."""
    if covered and all(total.fresh for total in totals):
        return [total.begin() for total in totals], False
    return [total.settle() for total in totals], True


def launch_fastest_forward(
    pieces: tuple[Piece, ...], q: Tensor, k: Tensor, v: Tensor, state: State, scale: float, **options: Any
) -> None:
    """`launch_forward`, by the kernel for Hopper where it serves."""
    launch = launch_hopper_forward if serves_forward(q, k, v, scale) else launch_forward
    launch(pieces, q, k, v, state, scale, **options)


def launch_forward(
    pieces: tuple[Piece, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    scale: float,
    *,
    load: bool = True,
    finished: tuple[Tensor, Tensor] | None = None,
    config: Config | None = None,
) -> None:
    """Add pieces to a state, or start one (`load` False), or end one into `finished`, (out, lse)."""
    head_dim, value_dim = q.shape[3], v.shape[3]
    config = config or config_for(forward_config, q, v)
    table = block_table(pieces, False, config.block_q, config.block_k, q.device)
    out, lse = finished or (state.acc, state.peak)
    one_entry = len(table.blocks) == len(table.entries)
    for grid, blocks in table.launches(q.shape[0] * q.shape[1], (k, v)):
        start_kernel(forward_kernel, grid)(
            q, k, v, *state[:3], out, lse, blocks, table.entries,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *state.acc.stride()[:3], *state.peak.stride(),
            *out.stride()[:3], *lse.stride(), q.shape[1], q.shape[1] // k.shape[1], q.shape[2], scale,
            BLOCK_Q=config.block_q, BLOCK_K=config.block_k, **_dims(head_dim, value_dim),
            LOAD=load, FINISH=finished is not None, ONE_ENTRY=one_entry, NEGATIVE=scale < 0,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip


def launch_key_gradients(
    pieces: tuple[Piece, ...],
    x: BackwardInputs,
    dk: Tensor | None,
    dv: Tensor | None,
    scale: float,
    *,
    add: bool = True,
    config: Config | None = None,
) -> None:
    """Add pieces to dk and dv, either of which may be unwanted, or write them where not `add`."""
    head_dim, value_dim = x.q.shape[3], x.v.shape[3]
    config = config or config_for(key_config, x.q, x.v)
    table = block_table(pieces, True, config.block_k, config.block_q, x.q.device)
    some = dk if dk is not None else dv
    assert some is not None
    dk_or_any, dv_or_any = dk if dk is not None else some, dv if dv is not None else some
    for grid, blocks in table.launches(x.k.shape[0] * x.k.shape[1], (x.q, x.dout)):
        start_kernel(key_gradients_kernel, grid)(
            x.q, x.k, x.v, x.dout, x.lse, x.delta, dk_or_any, dv_or_any, blocks, table.entries,
            *x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3], *x.dout.stride()[:3], *x.lse.stride(),
            *x.delta.stride(), *dk_or_any.stride()[:3], *dv_or_any.stride()[:3],
            x.k.shape[1], x.q.shape[1] // x.k.shape[1], x.k.shape[2], scale,
            BLOCK_Q=config.block_q, BLOCK_K=config.block_k, **_dims(head_dim, value_dim),
            WANT_K=dk is not None, WANT_V=dv is not None, ADD=add,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip


def launch_query_gradients(
    pieces: tuple[Piece, ...],
    x: BackwardInputs,
    dq: Tensor,
    scale: float,
    *,
    add: bool = True,
    config: Config | None = None,
) -> None:
    """Add pieces to dq, or write it where not `add`."""
    head_dim, value_dim = x.q.shape[3], x.v.shape[3]
    config = config or config_for(query_config, x.q, x.v)
    table = block_table(pieces, False, config.block_q, config.block_k, x.q.device)
    for grid, blocks in table.launches(x.q.shape[0] * x.q.shape[1], (x.k, x.v)):
        start_kernel(query_gradients_kernel, grid)(
            x.q, x.k, x.v, x.dout, x.lse, x.delta, dq, blocks, table.entries,
            *x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3], *x.dout.stride()[:3], *x.lse.stride(),
            *x.delta.stride(), *dq.stride()[:3],
            x.q.shape[1], x.q.shape[1] // x.k.shape[1], x.q.shape[2], scale,
            BLOCK_Q=config.block_q, BLOCK_K=config.block_k, **_dims(head_dim, value_dim),
            ADD=add, num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip


def dense_columns(x: Tensor) -> Tensor:
    """The same tensor with each row's columns next to each other, which is all that our kernels ask of a layout."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dims(head_dim: int, value_dim: int) -> dict[str, int]:
    """Head dims as they are, and padded to what a matrix product takes.

    Values are not narrower than keys below SWIZZLED. Those lie in fast memory in another order than keys, and where one
    comes after the other in the same place, ptxas of CUDA 12.8 makes an address for Hopper's products out of registers
    that it never set (tests/unit/test_offline_compile.py).
    """
    wide, value_wide = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, value_dim))
    value_wide = max(value_wide, min(wide, SWIZZLED))
    return {"DIM": head_dim, "VALUE_DIM": value_dim, "D": wide, "E": value_wide}
