"""Passes over memory that a ring on a GPU would otherwise make one by one, each fused into a single one, in Triton.

Shapes: B batch, H query heads, S query rows, E value head dim.

Vendor kernels give a normalised bf16 partial per piece. Several partials, and the state where there is one, are merged
in one pass, which can also end the state: so four partials cost little more than one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from burst_attention.merge import MAX_PARTIALS, Partial, State
from burst_attention.tiles.triton_forward import LN_2, LOG2_E

MERGE_ROWS = 32
STAND_IN_ROWS = 32


@triton.jit
def _load_partial(out_ptr, lse_ptr, out_strides, lse_strides, first, count, batch, head, rows, e, E: tl.constexpr):
    """A partial's rows as (values, lse); lse is -inf for rows that it does not have."""
    local = rows - first
    inside = (local >= 0) & (local < count)
    local = local.to(tl.int64)
    lse_at = lse_ptr + batch * lse_strides[0] + head * lse_strides[1] + local * lse_strides[2]
    lse = tl.load(lse_at, mask=inside, other=float("-inf"))
    out_at = out_ptr + batch * out_strides[0] + head * out_strides[1] + local[:, None] * out_strides[2] + e[None, :]
    out = tl.load(out_at, mask=(inside & (lse != float("-inf")))[:, None] & (e < E)[None, :], other=0.0)
    return out.to(tl.float32), lse


@triton.jit
def _merge_kernel(
    acc_ptr, peak_ptr, total_ptr, acc_strides, peak_strides, outs, lses, outs_strides, lses_strides, firsts, counts,
    out_ptr, lse_ptr, out_strides, lse_strides, heads, row_count,
    BLOCK: tl.constexpr, E: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr, LOAD: tl.constexpr,
    FINISH: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks, B * H)."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, PADDED)
    kept = rows < row_count
    at = rows.to(tl.int64)
    state_at = batch * peak_strides[0] + head * peak_strides[1] + at * peak_strides[2]
    acc_at = acc_ptr + batch * acc_strides[0] + head * acc_strides[1] + at[:, None] * acc_strides[2] + e[None, :]
    kept_acc = kept[:, None] & (e < E)[None, :]
    if LOAD:
        peak = tl.load(peak_ptr + state_at, mask=kept, other=float("-inf"))
        total = tl.load(total_ptr + state_at, mask=kept, other=0.0)
        acc = tl.load(acc_at, mask=kept_acc, other=0.0)
    else:
        peak = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        acc = tl.zeros([BLOCK, PADDED], tl.float32)
    for index in tl.static_range(COUNT):
        out, lse = _load_partial(
            outs[index], lses[index], outs_strides[index], lses_strides[index], firsts[index], counts[index],
            batch, head, rows, e, E,
        )  # fmt: skip
        new_peak = tl.maximum(peak, lse)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        mine, theirs = tl.exp2((peak - shift) * LOG2_E), tl.exp2((lse - shift) * LOG2_E)
        acc = acc * mine[:, None] + out * theirs[:, None]
        total = total * mine + theirs
        peak = new_peak
    if FINISH:
        some = total > 0
        total = tl.where(some, total, 1.0)
        out_at = out_ptr + batch * out_strides[0] + head * out_strides[1] + at[:, None] * out_strides[2] + e[None, :]
        tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=kept_acc)
        lse = tl.where(some, peak + tl.log2(total) * LN_2, float("-inf"))
        tl.store(lse_ptr + batch * lse_strides[0] + head * lse_strides[1] + at * lse_strides[2], lse, mask=kept)
    else:
        tl.store(peak_ptr + state_at, peak, mask=kept)
        tl.store(total_ptr + state_at, total, mask=kept)
        tl.store(acc_at, acc, mask=kept_acc)


def merge_partials(
    state: State, partials: list[Partial], load: bool, finished: tuple[Tensor, Tensor] | None = None
) -> None:
    """Merge partials into a state, which holds nothing yet unless `load`; or end it into `finished`, (out, lse)."""
    assert len(partials) <= MAX_PARTIALS, f"at most {MAX_PARTIALS} partials, got {len(partials)}"
    batch, heads, rows, dim = state.acc.shape
    out, lse = finished or (state.acc, state.peak)
    _merge_kernel[(triton.cdiv(rows, MERGE_ROWS), batch * heads)](
        state.acc, state.peak, state.total, state.acc.stride()[:3], state.peak.stride(),
        tuple(p.out for p in partials), tuple(p.lse for p in partials),
        tuple(p.out.stride()[:3] for p in partials), tuple(p.lse.stride() for p in partials),
        tuple(p.first for p in partials), tuple(p.out.shape[2] for p in partials),
        out, lse, out.stride()[:3], lse.stride(), heads, rows,
        BLOCK=MERGE_ROWS, E=dim, PADDED=triton.next_power_of_2(dim), COUNT=len(partials), LOAD=load,
        FINISH=finished is not None,
    )  # fmt: skip


@triton.jit
def _stand_in_kernel(
    dout_ptr, delta_ptr, out_ptr, dout_strides, delta_strides, out_strides, heads, row_count,
    BLOCK: tl.constexpr, E: tl.constexpr, PADDED: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks, B * H)."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    rows = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    e = tl.arange(0, PADDED)
    kept = rows < row_count
    mask = kept[:, None] & (e < E)[None, :]
    at = batch * dout_strides[0] + head * dout_strides[1] + rows[:, None] * dout_strides[2] + e[None, :]
    dout = tl.load(dout_ptr + at, mask=mask, other=0.0).to(tl.float32)
    at = batch * delta_strides[0] + head * delta_strides[1] + rows * delta_strides[2]
    rest = tl.load(delta_ptr + at, mask=kept, other=0.0)
    size = tl.abs(dout)
    out = tl.zeros([BLOCK, PADDED], tl.float32)
    for _ in tl.static_range(TERMS):
        place = tl.argmax(size, 1)
        here = e[None, :] == place[:, None]
        value = tl.sum(tl.where(here, dout, 0.0), 1)
        term = tl.where(value == 0.0, 0.0, rest / tl.where(value == 0.0, 1.0, value))
        term = term.to(out_ptr.dtype.element_ty).to(tl.float32)
        rest = rest - term * value
        out = tl.where(here, term[:, None], out)
        size = tl.where(here, -1.0, size)
    at = batch * out_strides[0] + head * out_strides[1] + rows[:, None] * out_strides[2] + e[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


def stand_in_for_out(dout: Tensor, delta: Tensor, terms: int) -> Tensor:
    """The twin of cpu_flash.stand_in_for_out: (B, H, S, E), contiguous, whose row sums with dout are delta."""
    out = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    batch, heads, rows, dim = dout.shape
    _stand_in_kernel[(triton.cdiv(rows, STAND_IN_ROWS), batch * heads)](
        dout, delta, out, dout.stride()[:3], delta.stride(), out.stride()[:3], heads, rows,
        BLOCK=STAND_IN_ROWS, E=dim, PADDED=triton.next_power_of_2(dim), TERMS=min(terms, dim),
    )  # fmt: skip
    return out
