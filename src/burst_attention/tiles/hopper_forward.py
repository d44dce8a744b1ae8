"""Our forward for Hopper, in Gluon: loads, matrix products and softmax overlap, in three groups of warps.

Shapes: B batch, H query heads, G key heads, S query rows, K key rows, D head dim, E value head dim.

The same function as triton_forward.py, from the same table. One program computes 128 query rows of one head. One warp
loads blocks of keys and values (tensor descriptors, a ring of buffers); two groups of four warps compute 64 rows each:

    scores of block t + 1   ####          ####          on the matrix units, issued first
    P V of block t              ####          ####      issued behind it, runs
    softmax of t + 1            ------        ------    while the weights are computed

Triton's interpreter does not know Gluon. tests/unit/gluon_on_cpu.py runs this file as it is without a GPU, and finds
whoever reads or writes shared memory too early.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from burst_attention.tiles.block_table import ENTRY_FIELDS
from burst_attention.tiles.gluon_names import load_block

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E_LOW = gl.constexpr(1.4426950408889634 - 1.44269502162933349609375)
FIELDS = gl.constexpr(ENTRY_FIELDS)
GROUP_ROWS = gl.constexpr(64)
"""Rows of one group of four warps, which is what a warpgroup's matrix product takes."""
WORKER_WARPS = gl.constexpr([4, 1])
WORKER_REGISTERS = gl.constexpr([240, 24])
"""Of the second group that computes, and of the loading warp; the first group has what they leave."""


@gluon.jit
def pair_of():
    """Which of B * H heads a program is for, as in triton_forward.py.

    It is read again at each use, which costs nothing: an argument for it would take a register over the loop.
    """
    return gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)


@gluon.jit
def _count_blocks(entries_ptr, first, last, BLOCK_K: gl.constexpr):
    count = 0
    for index in range(first, last):
        entry = entries_ptr + index * FIELDS
        count += (gl.load(entry + 3) - gl.load(entry) + BLOCK_K - 1) // BLOCK_K
    return count


@gluon.jit
def _load_keys(
    q_desc, k_desc, v_desc, buffers, blocks_ptr, entries_ptr, heads, groups,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: queries once, then every block of keys and values into the next free buffers."""
    q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty = buffers
    line = blocks_ptr + gl.program_id(1) * 3
    batch, head = pair_of() // heads, pair_of() % heads
    row = gl.load(line) * (2 * GROUP_ROWS)
    mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
    load_block(q_desc, [batch, head, row, 0], q_full, q_smem.index(0))
    load_block(q_desc, [batch, head, row + GROUP_ROWS, 0], q_full, q_smem.index(1))
    kv_head = head // groups
    count = 0
    for index in range(gl.load(line + 1), gl.load(line + 2)):
        entry = entries_ptr + index * FIELDS
        for start in range(gl.load(entry), gl.load(entry + 3), BLOCK_K):
            slot, phase = turn_of(count, STAGES)
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            load_block(k_desc, [batch, kv_head, start, 0], k_full.index(slot), k_smem.index(slot))
            mbarrier.wait(v_empty.index(slot), phase ^ 1)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            load_block(v_desc, [batch, kv_head, start, 0], v_full.index(slot), v_smem.index(slot))
            count += 1


@gluon.jit
def read_entry(entry, rows):
    """(every_first, every_last, some_last, low, high): each row may see the columns [low, high) of an entry."""
    x = rows - gl.load(entry + 4)
    some_last = gl.load(entry + 3)
    low = x + (gl.load(entry + 6) + 1 - gl.load(entry + 8))
    high = gl.minimum(x + (gl.load(entry + 6) + 1 - gl.load(entry + 7)), some_last)
    # Rows outside of the piece see nothing of it.
    high = gl.where((x >= 0) & (x < gl.load(entry + 5)), high, 0)
    return gl.load(entry + 1), gl.load(entry + 2), some_last, low, high


@gluon.jit
def pair_exists(low, high, start, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """(rows, COLUMNS) bool: which of the columns from `start` on each row may see."""
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    return (columns >= (low - start)[:, None]) & (columns < (high - start)[:, None])


@gluon.jit
def _weigh(scores, peak, total, masked, seen, start, scale, S_LAYOUT: gl.constexpr, BLOCK_K: gl.constexpr):
    """Online softmax of one block: (weights, what the old state is multiplied by, peak, total)."""
    if masked:
        scores = gl.where(pair_exists(seen[0], seen[1], start, BLOCK_K, S_LAYOUT), scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale)
    # Rows without keys so far: any finite shift keeps exp(-inf) at 0.
    shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = gl.exp2(scores * scale - shift[:, None])
    carried = gl.exp2(peak - shift)
    return weights, carried, new_peak, total * carried + gl.sum(weights, 1)


@gluon.jit
def group_rows(line, PART: gl.constexpr, LAYOUT: gl.constexpr):
    """The rows of one of the two groups of a line of the table."""
    return gl.load(line) * (2 * GROUP_ROWS) + PART * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=LAYOUT)


@gluon.jit
def _places(base_ptr, strides, line, heads, PART: gl.constexpr, LAYOUT: gl.constexpr):
    """(pointers to this group's rows in a (B, H, S, ...) tensor, the rows).

    The row is read again at each use: pointers kept over the loop would take registers that it needs.
    """
    batch, head = (pair_of() // heads).to(gl.int64), (pair_of() % heads).to(gl.int64)
    rows = group_rows(line, PART, LAYOUT)
    return base_ptr + batch * strides[0] + head * strides[1] + rows.to(gl.int64) * strides[2], rows


@gluon.jit
def _state_places(
    tensors, line, heads, PART: gl.constexpr, E: gl.constexpr, O_LAYOUT: gl.constexpr, S_ROWS: gl.constexpr
):
    """Pointers to a state's (acc, peak, total), with the rows of the first and of the other two."""
    acc_ptr, peak_ptr, total_ptr, acc_strides, peak_strides = tensors
    peak_at, rows = _places(peak_ptr, peak_strides, line, heads, PART, S_ROWS)
    total_at, _ = _places(total_ptr, peak_strides, line, heads, PART, S_ROWS)
    acc_at, acc_rows = _places(acc_ptr, acc_strides, line, heads, PART, gl.SliceLayout(1, O_LAYOUT))
    e = gl.arange(0, E, layout=gl.SliceLayout(0, O_LAYOUT))
    return acc_at[:, None] + e[None, :], acc_rows, peak_at, total_at, rows


@gluon.jit
def turn_of(count, BUFFERS: gl.constexpr):
    """(buffer, phase of its barriers) of the `count`-th use of a ring of buffers."""
    return count % BUFFERS, (count // BUFFERS) & 1


@gluon.jit
def _no_state(E: gl.constexpr, O_LAYOUT: gl.constexpr, S_ROWS: gl.constexpr):
    """The state of no keys."""
    acc = gl.zeros([GROUP_ROWS, E], gl.float32, O_LAYOUT)
    return acc, gl.full([GROUP_ROWS], float("-inf"), gl.float32, S_ROWS), gl.zeros([GROUP_ROWS], gl.float32, S_ROWS)


@gluon.jit
def _load_state(
    tensors, line, heads, q_rows, PART: gl.constexpr, E: gl.constexpr, O_LAYOUT: gl.constexpr, S_ROWS: gl.constexpr
):
    """A state in units of log2: what rounding costs the change of units goes into acc and total."""
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    acc_at, acc_rows, peak_at, total_at, rows = _state_places(tensors, line, heads, PART, E, O_LAYOUT, S_ROWS)
    natural = gl.load(peak_at, mask=rows < q_rows, other=float("-inf"))
    known = natural != float("-inf")
    finite = gl.where(known, natural, 0.0)
    peak = finite * LOG2_E
    factor = gl.exp2(gl.fma(finite, LOG2_E, -peak) + finite * LOG2_E_LOW)
    total = gl.load(total_at, mask=rows < q_rows, other=0.0) * factor
    acc = gl.load(acc_at, mask=(acc_rows < q_rows)[:, None], other=0.0)
    return acc * gl.convert_layout(factor, O_ROWS)[:, None], gl.where(known, peak, float("-inf")), total


@gluon.jit
def _store_state(
    tensors, line, heads, q_rows, acc, peak, total,
    PART: gl.constexpr, E: gl.constexpr, O_LAYOUT: gl.constexpr, S_ROWS: gl.constexpr,
):  # fmt: skip
    """The inverse of `_load_state`."""
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    acc_at, acc_rows, peak_at, total_at, rows = _state_places(tensors, line, heads, PART, E, O_LAYOUT, S_ROWS)
    known = peak != float("-inf")
    finite = gl.where(known, peak, 0.0)
    natural = finite * LN_2
    product = natural * LOG2_E
    factor = gl.exp2((finite - product) - (gl.fma(natural, LOG2_E, -product) + natural * LOG2_E_LOW))
    gl.store(peak_at, gl.where(known, natural, float("-inf")), mask=rows < q_rows)
    gl.store(total_at, total * factor, mask=rows < q_rows)
    acc = acc * gl.convert_layout(factor, O_ROWS)[:, None]
    gl.store(acc_at, acc, mask=(acc_rows < q_rows)[:, None])


@gluon.jit
def _store_out(
    tensors, line, heads, q_rows, acc, peak, total,
    PART: gl.constexpr, E: gl.constexpr, O_LAYOUT: gl.constexpr, S_ROWS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """out and lse; 0 and -inf for rows without keys."""
    out_ptr, lse_ptr, out_strides, lse_strides = tensors
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    lse_at, rows = _places(lse_ptr, lse_strides, line, heads, PART, S_ROWS)
    out_at, out_rows = _places(out_ptr, out_strides, line, heads, PART, O_ROWS)
    e = gl.arange(0, E, layout=gl.SliceLayout(0, O_LAYOUT))
    some = total > 0
    total = gl.where(some, total, 1.0)
    gl.store(lse_at, gl.where(some, (peak + gl.log2(total)) * LN_2, float("-inf")), mask=rows < q_rows)
    acc = acc / gl.convert_layout(total, O_ROWS)[:, None]
    gl.store(out_at[:, None] + e[None, :], acc.to(DTYPE), mask=(out_rows < q_rows)[:, None])


@gluon.jit
def _attend(
    PART: gl.constexpr, buffers, state, finished, blocks_ptr, entries_ptr, heads, q_rows, scale,
    BLOCK_K: gl.constexpr, D: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr,
    LOAD: gl.constexpr, FINISH: gl.constexpr,
):  # fmt: skip
    """One group of four warps: 64 rows over every block of keys."""
    q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty = buffers
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    line = blocks_ptr + gl.program_id(1) * 3
    acc, peak, total = _no_state(E, O_LAYOUT, S_ROWS)
    if LOAD:
        acc, peak, total = _load_state(state, line, heads, q_rows, PART, E, O_LAYOUT, S_ROWS)
    rows = group_rows(line, PART, S_ROWS)
    index = gl.load(line + 1)
    count = _count_blocks(entries_ptr, index, gl.load(line + 2), BLOCK_K)
    start = gl.load(entries_ptr + index * FIELDS)
    every_first, every_last, some_last, low, high = read_entry(entries_ptr + index * FIELDS, rows)
    scale *= LOG2_E

    q = q_smem.index(PART).reshape([GROUP_ROWS, D])
    zeros = gl.zeros([GROUP_ROWS, BLOCK_K], gl.float32, S_LAYOUT)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    k = k_smem.index(0).reshape([BLOCK_K, D]).permute((1, 0))
    scores = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(0))
    masked = (start < every_first) | (start >= every_last)
    weights, carried, peak, total = _weigh(scores, peak, total, masked, (low, high), start, scale, S_LAYOUT, BLOCK_K)
    operand = gl.convert_layout(weights.to(DTYPE), P_LAYOUT)
    acc = acc * gl.convert_layout(carried, O_ROWS)[:, None]
    for turn in range(1, count):
        start += BLOCK_K
        if start >= some_last:
            index += 1
            start = gl.load(entries_ptr + index * FIELDS)
            every_first, every_last, some_last, low, high = read_entry(entries_ptr + index * FIELDS, rows)
        masked = (start < every_first) | (start >= every_last)
        slot, phase = turn_of(turn, STAGES)
        before, before_phase = turn_of(turn - 1, STAGES)
        mbarrier.wait(k_full.index(slot), phase)
        k = k_smem.index(slot).reshape([BLOCK_K, D]).permute((1, 0))
        scores = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), before_phase)
        acc = warpgroup_mma(operand, v_smem.index(before).reshape([BLOCK_K, E]), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(slot))
        weights, carried, peak, total = _weigh(
            scores, peak, total, masked, (low, high), start, scale, S_LAYOUT, BLOCK_K
        )
        acc, operand, weights = warpgroup_mma_wait(0, deps=[acc, operand, weights])
        mbarrier.arrive(v_empty.index(before))
        acc = acc * gl.convert_layout(carried, O_ROWS)[:, None]
        operand = gl.convert_layout(weights.to(DTYPE), P_LAYOUT)
    before, before_phase = turn_of(count - 1, STAGES)
    mbarrier.wait(v_full.index(before), before_phase)
    acc = warpgroup_mma(operand, v_smem.index(before).reshape([BLOCK_K, E]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if FINISH:
        _store_out(finished, line, heads, q_rows, acc, peak, total, PART, E, O_LAYOUT, S_ROWS, DTYPE)
    else:
        _store_state(state, line, heads, q_rows, acc, peak, total, PART, E, O_LAYOUT, S_ROWS)


@gluon.jit(do_not_specialize=["heads", "groups", "q_rows"])
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, acc_ptr, peak_ptr, total_ptr, out_ptr, lse_ptr, blocks_ptr, entries_ptr,
    acc_batch, acc_head, acc_row, peak_batch, peak_head, peak_row, out_batch, out_head, out_row,
    lse_batch, lse_head, lse_row, heads, groups, q_rows, scale,
    BLOCK_K: gl.constexpr, D: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr,
    LOAD: gl.constexpr, FINISH: gl.constexpr,
):  # fmt: skip
    """Grid (heads in turns, blocks of 128 rows, groups), as triton_forward.forward_kernel. The scale is positive."""
    DTYPE: gl.constexpr = k_desc.dtype
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 1, 1, GROUP_ROWS, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_K, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_K, E], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        # Both groups of warps release a buffer.
        mbarrier.init(k_empty.index(slot), count=2)
        mbarrier.init(v_empty.index(slot), count=2)
    buffers = (q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty)
    acc_strides, peak_strides = (acc_batch, acc_head, acc_row), (peak_batch, peak_head, peak_row)
    state = (acc_ptr, peak_ptr, total_ptr, acc_strides, peak_strides)
    finished = (out_ptr, lse_ptr, (out_batch, out_head, out_row), (lse_batch, lse_head, lse_row))
    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (gl.constexpr(0), buffers, state, finished, blocks_ptr, entries_ptr, heads, q_rows, scale,
                       BLOCK_K, D, E, STAGES, DTYPE, LOAD, FINISH)),
            (_attend, (gl.constexpr(1), buffers, state, finished, blocks_ptr, entries_ptr, heads, q_rows, scale,
                       BLOCK_K, D, E, STAGES, DTYPE, LOAD, FINISH)),
            (_load_keys, (q_desc, k_desc, v_desc, buffers, blocks_ptr, entries_ptr, heads, groups, BLOCK_K, STAGES)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )
    # fmt: on
