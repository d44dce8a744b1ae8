"""Our own forward in Triton: any pieces, adding keys to a state that is carried in and out, so a ring merges nothing.

Shapes: B batch, H query heads, G key heads, S query rows, K key rows, D head dim, E value head dim.

One program computes one block of query rows of one head, over every range of keys that the table lists for it
(block_table.py). Scores are kept in units of log2 inside; the state outside is in natural units (merge.py), and the
difference that rounding makes between the two is multiplied into acc and total.
"""

from __future__ import annotations

import triton
import triton.language as tl

from burst_attention.tiles.block_table import ENTRY_FIELDS

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# log2(e) less its fp32 rounding: products with both parts are exact to fp32's square.
LOG2_E_LOW = tl.constexpr(1.4426950408889634 - 1.44269502162933349609375)
FIELDS = tl.constexpr(ENTRY_FIELDS)
# tf32 would cost fp32 inputs half their digits, and most chips of AMD refuse it; for 16 bits it is all the same.
PRECISION = tl.constexpr("ieee")


@triton.jit
def load_block(base, rows, row_stride, cols, last, DIM: tl.constexpr, MASK_ROWS: tl.constexpr, PADDED: tl.constexpr):
    """(rows, cols) of a matrix whose columns lie together; 0 outside [.., last) rows and DIM columns."""
    pointers = base + rows[:, None].to(tl.int64) * row_stride + cols[None, :]
    if MASK_ROWS:
        if PADDED:
            return tl.load(pointers, mask=(rows[:, None] < last) & (cols[None, :] < DIM), other=0.0)
        return tl.load(pointers, mask=rows[:, None] < last, other=0.0)
    if PADDED:
        return tl.load(pointers, mask=cols[None, :] < DIM, other=0.0)
    return tl.load(pointers)


@triton.jit
def pair_exists(entry, rows, cols, last):
    """(rows, cols) bool: the pairs of an entry's piece, by position."""
    x = rows - tl.load(entry + 4)
    y = cols - tl.load(entry + 6)
    distance = x[:, None] - y[None, :]
    inside = (distance >= tl.load(entry + 7)) & (distance < tl.load(entry + 8))
    return inside & ((x >= 0) & (x < tl.load(entry + 5)))[:, None] & (cols < last)[None, :]


@triton.jit
def _attend(
    acc, peak, total, q, k_base, v_base, k_row, v_row, entry, rows, first, last, some_last, scale,
    BLOCK_K: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    MASKED: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [first, last), a multiple of BLOCK_K of them unless MASKED."""
    d, e = tl.arange(0, D), tl.arange(0, E)
    for start in tl.range(first, last, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        k = load_block(k_base, cols, k_row, d, some_last, DIM, MASKED, DIM != D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if NEGATIVE or MASKED:
            scores = scores * scale
        if MASKED:
            scores = tl.where(pair_exists(entry, rows, cols, some_last), scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            # Rows without keys so far: any finite shift keeps exp(-inf) at 0.
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - shift[:, None])
        elif NEGATIVE:
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            shift = new_peak
            weights = tl.exp2(scores - shift[:, None])
        else:
            new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
            shift = new_peak
            weights = tl.exp2(scores * scale - shift[:, None])
        carried = tl.exp2(peak - shift)
        total = total * carried + tl.sum(weights, 1)
        acc = acc * carried[:, None]
        v = load_block(v_base, cols, v_row, e, some_last, VALUE_DIM, MASKED, VALUE_DIM != E)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _load_state(acc_at, peak_at, total_at, kept, kept_acc):
    """A state in units of log2: what rounding costs the change of units goes into acc and total."""
    natural = tl.load(peak_at, mask=kept, other=float("-inf"))
    known = natural != float("-inf")
    finite = tl.where(known, natural, 0.0)
    peak = finite * LOG2_E
    factor = tl.exp2(tl.fma(finite, LOG2_E, -peak) + finite * LOG2_E_LOW)
    total = tl.load(total_at, mask=kept, other=0.0) * factor
    acc = tl.load(acc_at, mask=kept_acc, other=0.0) * factor[:, None]
    return acc, tl.where(known, peak, float("-inf")), total


@triton.jit
def _store_state(acc_at, peak_at, total_at, kept, kept_acc, acc, peak, total):
    """The inverse of `_load_state`."""
    known = peak != float("-inf")
    finite = tl.where(known, peak, 0.0)
    natural = finite * LN_2
    product = natural * LOG2_E
    factor = tl.exp2((finite - product) - (tl.fma(natural, LOG2_E, -product) + natural * LOG2_E_LOW))
    tl.store(peak_at, tl.where(known, natural, float("-inf")), mask=kept)
    tl.store(total_at, total * factor, mask=kept)
    tl.store(acc_at, acc * factor[:, None], mask=kept_acc)


@triton.jit
def pair_of():
    """Which of B * H heads a program is for. Grids are (heads that take turns, blocks, groups of such heads).

    Two heads at a time of four, with three blocks each, in the order that programs begin:

        head   0 1 0 1 0 1   2 3 2 3 2 3
        block  0 0 1 1 2 2   0 0 1 1 2 2
    """
    return tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)


@triton.jit(do_not_specialize=["heads", "groups", "q_rows"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, acc_ptr, peak_ptr, total_ptr, out_ptr, lse_ptr, blocks_ptr, entries_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    acc_batch, acc_head, acc_row, peak_batch, peak_head, peak_row, out_batch, out_head, out_row,
    lse_batch, lse_head, lse_row, heads, groups, q_rows, scale,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    LOAD: tl.constexpr, FINISH: tl.constexpr, ONE_ENTRY: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Grid (heads in turns, row blocks, groups). LOAD continues a state; FINISH writes out and lse instead of one."""
    line = blocks_ptr + tl.program_id(1) * 3
    batch, head = pair_of() // heads, pair_of() % heads
    rows = tl.load(line) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d, e = tl.arange(0, D), tl.arange(0, E)
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    q = load_block(q_ptr + batch * q_batch + head * q_head, rows, q_row, d, q_rows, DIM, True, DIM != D)
    k_base = k_ptr + batch * k_batch + (head // groups) * k_head
    v_base = v_ptr + batch * v_batch + (head // groups) * v_head

    state = batch * peak_batch + head * peak_head + rows.to(tl.int64) * peak_row
    acc_at = acc_ptr + batch * acc_batch + head * acc_head + rows[:, None].to(tl.int64) * acc_row + e[None, :]
    kept = rows < q_rows
    kept_acc = kept[:, None] & (e[None, :] < VALUE_DIM)
    if LOAD:
        acc, peak, total = _load_state(acc_at, peak_ptr + state, total_ptr + state, kept, kept_acc)
    else:
        peak = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        acc = tl.zeros([BLOCK_Q, E], tl.float32)

    scale *= LOG2_E
    first = tl.load(line + 1)
    last = first + 1 if ONE_ENTRY else tl.load(line + 2)
    for index in range(first, last):
        entry = entries_ptr + index * FIELDS
        some_first, every_first = tl.load(entry), tl.load(entry + 1)
        every_last, some_last = tl.load(entry + 2), tl.load(entry + 3)
        acc, peak, total = _attend(
            acc, peak, total, q, k_base, v_base, k_row, v_row, entry, rows, some_first, every_first, some_last, scale,
            BLOCK_K, DIM, VALUE_DIM, D, E, True, NEGATIVE,
        )  # fmt: skip
        acc, peak, total = _attend(
            acc, peak, total, q, k_base, v_base, k_row, v_row, entry, rows, every_first, every_last, some_last, scale,
            BLOCK_K, DIM, VALUE_DIM, D, E, False, NEGATIVE,
        )  # fmt: skip
        acc, peak, total = _attend(
            acc, peak, total, q, k_base, v_base, k_row, v_row, entry, rows, every_last, some_last, some_last, scale,
            BLOCK_K, DIM, VALUE_DIM, D, E, True, NEGATIVE,
        )  # fmt: skip

    if FINISH:
        some = total > 0
        total = tl.where(some, total, 1.0)
        out_at = out_ptr + batch * out_batch + head * out_head + rows[:, None].to(tl.int64) * out_row + e[None, :]
        tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=kept_acc)
        lse = tl.where(some, (peak + tl.log2(total)) * LN_2, float("-inf"))
        tl.store(lse_ptr + batch * lse_batch + head * lse_head + rows.to(tl.int64) * lse_row, lse, mask=kept)
    else:
        _store_state(acc_at, peak_ptr + state, total_ptr + state, kept, kept_acc, acc, peak, total)
