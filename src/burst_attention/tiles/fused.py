"""Passes over memory that a ring on a GPU would otherwise make one by one, each fused into a single one, in Triton.

Shapes: B batch, H query heads, S query rows, E value head dim.

Vendor kernels give a normalised bf16 partial per piece. Several partials, and the state where there is one, are merged
in one pass, which can also end the state: so four partials cost little more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from burst_attention.lanes import hurried
from burst_attention.merge import MAX_PARTIALS, Part, Partial, State
from burst_attention.tiles.start import start_kernel
from burst_attention.tiles.triton_forward import LN_2, LOG2_E


class PassShape(NamedTuple):
    """How a pass over memory beside tiles is shared out: programs, which take blocks in turn, and a block's rows."""

    programs: int
    rows: int
    warps: int


FEW_PARTS = 5
BESIDE_FEW, BESIDE_MANY = PassShape(32, 128, 32), PassShape(128, 32, 8)
"""For up to so many parts, and for more, which would not fit the registers of a program of 32 warps. Most of AMD's have
twice the threads, of which there may be 1024: they take the second.

Both fill some 16 to 32 of an H200's 132 cores. Small programs take a place on every core where all are idle, as before
the first tile, which then waits for them. Backward tax of a ring of 8 with S = 4096: 1.049 with 32 programs of 32
warps, 1.052 with 128 of 8, 1.057 with 256 of 4; with GQA 4 they differ by less, 1.039, 1.035 and 1.036. Blocks copied
to shared memory ahead were slower (gpu-trials)."""
ROW_BYTES = 256
"""Of a part, with which a shape has its rows: 128 numbers of 2 bytes."""
PASS_ROWS, PASS_WARPS = 16, 4
"""Of a program. On an H200 five partials merge at 3.5 TB/s so, at 2.7 with 32 rows; sums at 4.1 or 4 (gpu-trials)."""


def _blocks(rows: int, block: int) -> int:
    """Blocks that rows take. In the host's own integers, as below: triton's functions for it take microseconds."""
    return -(-rows // block)


def _power_of_two(dim: int) -> int:
    """The next."""
    return 1 << (dim - 1).bit_length()


@triton.jit
def _load_lse(lse_ptr, strides, first, count, batch, head, rows):
    """A partial's lse; -inf for rows that it does not have."""
    local = (rows - first).to(tl.int64)
    at = lse_ptr + batch * strides[0] + head * strides[1] + local * strides[2]
    return tl.load(at, mask=(local >= 0) & (local < count), other=float("-inf"))


@triton.jit
def _load_values(out_ptr, strides, first, count, batch, head, rows, e, E: tl.constexpr):
    """A partial's values, and 0 where it has none. They are loaded without a look at lse, which would come first."""
    local = (rows - first).to(tl.int64)
    inside = (local >= 0) & (local < count)
    at = out_ptr + batch * strides[0] + head * strides[1] + local[:, None] * strides[2] + e[None, :]
    return tl.load(at, mask=inside[:, None] & (e < E)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["firsts", "counts", "heads", "row_count"])
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
    new_peak = peak
    for index in tl.static_range(COUNT):
        lse = _load_lse(lses[index], lses_strides[index], firsts[index], counts[index], batch, head, rows)
        new_peak = tl.maximum(new_peak, lse)
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    mine = tl.exp2((peak - shift) * LOG2_E)
    acc, total, peak = acc * mine[:, None], total * mine, new_peak
    for index in tl.static_range(COUNT):
        out = _load_values(outs[index], outs_strides[index], firsts[index], counts[index], batch, head, rows, e, E)
        lse = _load_lse(lses[index], lses_strides[index], firsts[index], counts[index], batch, head, rows)
        # What a kernel leaves in rows without keys is not even a number.
        out = tl.where((lse == float("-inf"))[:, None], 0.0, out)
        theirs = tl.exp2((lse - shift) * LOG2_E)
        acc += out * theirs[:, None]
        total += theirs
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
    start_kernel(_merge_kernel, (_blocks(rows, PASS_ROWS), batch * heads))(
        state.acc, state.peak, state.total, state.acc.stride()[:3], state.peak.stride(),
        tuple(p.out for p in partials), tuple(p.lse for p in partials),
        tuple(p.out.stride()[:3] for p in partials), tuple(p.lse.stride() for p in partials),
        tuple(p.first for p in partials), tuple(p.out.shape[2] for p in partials),
        out, lse, out.stride()[:3], lse.stride(), heads, rows,
        BLOCK=PASS_ROWS, E=dim, PADDED=_power_of_two(dim), COUNT=len(partials), LOAD=load,
        FINISH=finished is not None,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "row_count"])
def _stand_in_kernel(
    dout_ptr, delta_ptr, out_ptr, dout_strides, delta_strides, out_strides, heads, row_count,
    BLOCK: tl.constexpr, E: tl.constexpr, PADDED: tl.constexpr,
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
    delta = tl.load(delta_ptr + at, mask=kept, other=0.0)
    # Scaled by the largest entry, so that squares of tiny gradients do not vanish.
    size = tl.max(tl.abs(dout), 1)
    safe = tl.where(size == 0.0, 1.0, size)
    unit = dout / safe[:, None]
    factor = tl.where(size == 0.0, 0.0, delta / safe / tl.maximum(tl.sum(unit * unit, 1), 1.0))
    at = batch * out_strides[0] + head * out_strides[1] + rows[:, None] * out_strides[2] + e[None, :]
    tl.store(out_ptr + at, (unit * factor[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def stand_in_for_out(dout: Tensor, delta: Tensor) -> Tensor:
    """(B, H, S, E) like dout, whose row sums with dout are delta: the projection of out on dout; 0 where dout is 0.

    Rounded to bf16 its sums lose some of delta's precision. What is left is enough for rows that see a thousand keys,
    which is what vendor kernels are given here; cpu_flash.py has one for rows that see few.
    """
    out = torch.empty_like(dout)
    batch, heads, rows, dim = dout.shape
    start_kernel(_stand_in_kernel, (_blocks(rows, PASS_ROWS), batch * heads))(
        dout, delta, out, dout.stride()[:3], delta.stride(), out.stride()[:3], heads, rows,
        BLOCK=PASS_ROWS, E=dim, PADDED=_power_of_two(dim),
    )  # fmt: skip
    return out


@triton.jit
def _sum_block(
    target_ptr, parts, target_strides, parts_strides, firsts, counts, first_heads, head_counts, tables, table_rows,
    scales, out_ptr, out_strides, heads, row_count, block, pair,
    BLOCK: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr, ORDERED: tl.constexpr,
    LOAD: tl.constexpr,
):  # fmt: skip
    """One block of rows of one of B * H heads. The last parts, ORDERED of COUNT, are in orders of their own."""
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, PADDED)
    at = rows.to(tl.int64)
    mask = (rows < row_count)[:, None] & (d < D)[None, :]
    if LOAD:
        target_at = batch * target_strides[0] + head * target_strides[1] + at[:, None] * target_strides[2] + d[None, :]
        total = tl.load(target_ptr + target_at, mask=mask, other=0.0).to(tl.float32)
    else:
        total = tl.zeros([BLOCK, PADDED], tl.float32)
    for index in tl.static_range(COUNT):
        local = rows - firsts[index]
        local_head = head - first_heads[index]
        inside = (local >= 0) & (local < counts[index]) & (local_head >= 0) & (local_head < head_counts[index])
        strides, kept = parts_strides[index], inside[:, None] & (d < D)[None, :]
        part_at = batch * strides[0] + local_head * strides[1]
        if index < COUNT - ORDERED:
            part_at += local.to(tl.int64)[:, None] * strides[2] + d[None, :]
            total += tl.load(parts[index] + part_at, mask=kept, other=0.0).to(tl.float32)
        else:
            within = local % table_rows[index - (COUNT - ORDERED)]
            table_at = tables[index - (COUNT - ORDERED)] + within[:, None] * D + d[None, :]
            part_at += (local - within).to(tl.int64)[:, None] * strides[2] + tl.load(table_at, mask=kept, other=0)
            part = tl.load(parts[index] + part_at, mask=kept, other=0.0)
            total += part * scales[index - (COUNT - ORDERED)]
    out_at = batch * out_strides[0] + head * out_strides[1] + at[:, None] * out_strides[2] + d[None, :]
    tl.store(out_ptr + out_at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "firsts", "counts", "first_heads", "head_counts", "table_rows", "heads", "row_count", "blocks", "pairs"
    ]
)  # fmt: skip
def _sum_kernel(
    target_ptr, parts, target_strides, parts_strides, firsts, counts, first_heads, head_counts, tables, table_rows,
    scales, out_ptr, out_strides, heads, row_count, blocks, pairs,
    BLOCK: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr, ORDERED: tl.constexpr,
    LOAD: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks, B * H); with TURNS as many programs as one likes, which take the blocks in turn."""
    if TURNS:
        for index in range(tl.program_id(0), blocks * pairs, tl.num_programs(0)):
            _sum_block(
                target_ptr, parts, target_strides, parts_strides, firsts, counts, first_heads, head_counts, tables,
                table_rows, scales, out_ptr, out_strides, heads, row_count, index % blocks, index // blocks,
                BLOCK, D, PADDED, COUNT, ORDERED, LOAD,
            )  # fmt: skip
    else:
        _sum_block(
            target_ptr, parts, target_strides, parts_strides, firsts, counts, first_heads, head_counts, tables,
            table_rows, scales, out_ptr, out_strides, heads, row_count, tl.program_id(0), tl.program_id(1),
            BLOCK, D, PADDED, COUNT, ORDERED, LOAD,
        )  # fmt: skip


def sum_parts(
    target: Tensor, parts: Sequence[Part], load: bool, out: Tensor | None = None, beside: bool = False
) -> None:
    """Add parts, each at its place, to a target that holds nothing yet unless `load`; or write the sum to `out`.

    One pass, whatever the dtypes: (B, H, S, D) all, with columns next to each other. Memory is the bound, which a few
    cores are enough for: with `beside` it leaves the others to what computes at the same time.
    """
    out = target if out is None else out
    batch, heads, rows, dim = target.shape
    firsts, first_heads, tensors, orders = zip(*sorted(parts, key=lambda part: part.order is not None), strict=True)
    ordered = [order for order in orders if order is not None]
    pairs, shape = batch * heads, _shape_beside(tensors) if beside else None
    turns = shape is not None and _blocks(rows, shape.rows) * pairs > shape.programs
    block, warps = (shape.rows, shape.warps) if shape and turns else (PASS_ROWS, PASS_WARPS)
    blocks = _blocks(rows, block)
    start_kernel(_sum_kernel, (shape.programs,) if shape and turns else (blocks, pairs))(
        target, tensors, target.stride()[:3], tuple(part.stride()[:3] for part in tensors),
        firsts, tuple(part.shape[2] for part in tensors), first_heads, tuple(part.shape[1] for part in tensors),
        tuple(order.table for order in ordered), tuple(order.rows for order in ordered),
        tuple(order.scale for order in ordered), out, out.stride()[:3], heads, rows, blocks, pairs,
        BLOCK=block, D=dim, PADDED=_power_of_two(dim), COUNT=len(parts), ORDERED=len(ordered), LOAD=load, TURNS=turns,
        num_warps=warps,
    )  # fmt: skip


def _shape_beside(parts: Sequence[Tensor]) -> PassShape:
    """A block has as many bytes of each part whatever their dim and dtype, for registers."""
    shape = BESIDE_FEW if len(parts) <= FEW_PARTS and torch.version.hip is None else BESIDE_MANY
    width = max(_power_of_two(part.shape[3]) * part.element_size() for part in parts)
    return shape._replace(rows=max(min(shape.rows, shape.rows * ROW_BYTES // width), 1))


def copy_on_gpu(target: Tensor, source: Tensor, beside: bool = False) -> None:
    """target.copy_(source) where (B, H, S, D) changes its order in memory, a whole row of D at a time."""
    if source.dim() == 4 and source.stride(-1) == 1 and source.numel():
        sum_parts(target, [Part(0, 0, source)], load=False, beside=beside)
    else:
        target.copy_(source)


@triton.jit(do_not_specialize=["heads", "row_count"])
def _delta_kernel(
    out_ptr, dout_ptr, dlse_ptr, delta_ptr, out_strides, dout_strides, dlse_strides, delta_strides, heads, row_count,
    BLOCK: tl.constexpr, E: tl.constexpr, PADDED: tl.constexpr, WITH_LSE: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks, B * H)."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    rows = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    e = tl.arange(0, PADDED)
    kept = rows < row_count
    mask = kept[:, None] & (e < E)[None, :]
    at = batch * out_strides[0] + head * out_strides[1] + rows[:, None] * out_strides[2] + e[None, :]
    out = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    at = batch * dout_strides[0] + head * dout_strides[1] + rows[:, None] * dout_strides[2] + e[None, :]
    delta = tl.sum(out * tl.load(dout_ptr + at, mask=mask, other=0.0).to(tl.float32), 1)
    if WITH_LSE:
        at = batch * dlse_strides[0] + head * dlse_strides[1] + rows * dlse_strides[2]
        delta -= tl.load(dlse_ptr + at, mask=kept, other=0.0).to(tl.float32)
    tl.store(delta_ptr + batch * delta_strides[0] + head * delta_strides[1] + rows * delta_strides[2], delta, mask=kept)


def fused_delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """(B, H, S) in fp32: rowsum(out * dout) - dlse, in one pass."""
    if out.stride(-1) != 1 or dout.stride(-1) != 1:
        out, dout = out.contiguous(), dout.contiguous()
    batch, heads, rows, dim = out.shape
    delta = torch.empty(batch, heads, rows, dtype=torch.float32, device=out.device)
    extra = delta if dlse is None else dlse
    if rows:
        start_kernel(_delta_kernel, (_blocks(rows, PASS_ROWS), batch * heads))(
            out, dout, extra, delta, out.stride()[:3], dout.stride()[:3], extra.stride(), delta.stride(), heads, rows,
            BLOCK=PASS_ROWS, E=dim, PADDED=_power_of_two(dim), WITH_LSE=dlse is not None,
        )  # fmt: skip
    return delta


@triton.jit(do_not_specialize=["heads", "row_count", "padded"])
def _statistics_kernel(
    lse_ptr, delta_ptr, lse_out_ptr, delta_out_ptr, sums_ptr, lse_strides, delta_strides, heads, row_count, padded,
    BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks, B * H)."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    rows = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    kept = rows < row_count
    at = batch * lse_strides[0] + head * lse_strides[1] + rows * lse_strides[2]
    lse = tl.load(lse_ptr + at, mask=kept, other=float("inf"))
    # A weight of 0 for rows without keys, as for those that are not there.
    lse = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2_E
    at = batch * delta_strides[0] + head * delta_strides[1] + rows * delta_strides[2]
    delta = tl.load(delta_ptr + at, mask=kept, other=0.0)
    place = tl.program_id(1).to(tl.int64)
    tl.store(lse_out_ptr + place * padded + rows, lse, mask=rows < padded)
    tl.store(delta_out_ptr + place * padded + rows, delta, mask=rows < padded)
    at = sums_ptr + (place * padded + rows)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at, tl.zeros([BLOCK, D], tl.float32), mask=(rows < padded)[:, None])


STATISTICS_ROWS = 64


def padded_statistics(lse: Tensor, delta: Tensor, padded: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """lse in powers of two, and delta, (B, H, S) each, as (B, H, padded), where rows beyond the last have no weight.

    And zeros (B, H, padded, dim) for sums: `dim` is a power of 2.
    """
    batch, heads, rows = lse.shape
    results = [torch.empty(batch, heads, padded, dtype=torch.float32, device=lse.device) for _ in range(2)]
    sums = lse.new_empty(batch, heads, padded, dim, dtype=torch.float32)
    with hurried(lse):
        start_kernel(_statistics_kernel, (_blocks(padded, STATISTICS_ROWS), batch * heads))(
            lse, delta, *results, sums, lse.stride(), delta.stride(), heads, rows, padded,
            BLOCK=STATISTICS_ROWS, D=dim,
        )  # fmt: skip
    return results[0], results[1], sums
