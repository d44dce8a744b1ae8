"""Our backward for Hopper, in Gluon, from lse and delta: five matrix products per block, none computed twice.

Shapes: B batch, H query heads, G key heads, S query rows, K key rows, D = E head dim.

One program holds 128 keys of one key head and walks over blocks of 64 queries. One warp loads queries, dout, lse and
delta; two groups of four warps hold 64 keys each and keep their dk and dv in registers:

    scores = k q'    dweights = v dout'    dv += weights dout    dk += dscores q    dq += dscores' k

For dq the two groups put their dscores side by side in shared memory, and each computes half of dq's columns over all
128 keys. That half is put in shared memory and added to the result from there by the copy engine, while the group goes
on: atomically, in whatever order programs come, so the last bits of dq differ from run to run; triton_backward.py's do
not.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from burst_attention.tiles.gluon_names import add_block, load_block
from burst_attention.tiles.hopper_forward import (
    FIELDS,
    GROUP_ROWS,
    LOG2_E,
    WORKER_REGISTERS,
    WORKER_WARPS,
    group_rows,
    pair_exists,
    pair_of,
    read_entry,
    turn_of,
)

BLOCK_Q = gl.constexpr(64)


@gluon.jit
def _load_queries(
    descriptors, buffers, statistics, blocks_ptr, entries_ptr, kv_heads, groups, parts, scale,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: keys and values once, then every block of queries with its lse and delta."""
    q_desc, dout_desc, k_desc, v_desc = descriptors
    q_smem, dout_smem, k_smem, v_smem, lse_smem, delta_smem, kv_full, q_full, q_empty = buffers
    lse_ptr, delta_ptr, lse_strides, delta_strides = statistics
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    line = blocks_ptr + gl.program_id(1) * 3
    batch, kv_head = pair_of() // kv_heads, pair_of() % kv_heads
    key = gl.load(line) * (2 * GROUP_ROWS)
    mbarrier.expect(kv_full, 2 * k_desc.block_type.nbytes)
    load_block(k_desc, [batch, kv_head // parts, key, 0], kv_full, k_smem)
    load_block(v_desc, [batch, kv_head // parts, key, 0], kv_full, v_smem)
    first, last = gl.load(line + 1), gl.load(line + 2)
    count = 0
    for turn in range(groups * (last - first)):
        head = kv_head * groups + turn // (last - first)
        entry = entries_ptr + (first + turn % (last - first)) * FIELDS
        some_last = gl.load(entry + 3)
        lse_base = lse_ptr + batch.to(gl.int64) * lse_strides[0] + head.to(gl.int64) * lse_strides[1]
        delta_base = delta_ptr + batch.to(gl.int64) * delta_strides[0] + head.to(gl.int64) * delta_strides[1]
        for start in range(gl.load(entry), some_last, BLOCK_Q):
            slot, phase = turn_of(count, STAGES)
            rows = start + gl.arange(0, BLOCK_Q, layout=LAYOUT)
            lse = gl.load(lse_base + rows.to(gl.int64) * lse_strides[2], mask=rows < some_last, other=float("inf"))
            delta = gl.load(delta_base + rows.to(gl.int64) * delta_strides[2], mask=rows < some_last, other=0.0)
            mbarrier.wait(q_empty.index(slot), phase ^ 1)
            mbarrier.expect(q_full.index(slot), 2 * q_desc.block_type.nbytes)
            load_block(q_desc, [batch, head, start, 0], q_full.index(slot), q_smem.index(slot))
            load_block(dout_desc, [batch, head, start, 0], q_full.index(slot), dout_smem.index(slot))
            # A row without keys has lse = -inf; +inf makes its weights 0 instead of NaN.
            lse_smem.index(slot).store(-gl.where(lse == float("-inf"), float("inf"), lse) / scale)
            delta_smem.index(slot).store(-delta)
            mbarrier.arrive(q_full.index(slot))
            count += 1


@gluon.jit
def _add_rows(
    base_ptr, strides, line, kv_heads, k_rows, part,
    PART: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Add to this group's keys of dk or dv, or write them where there is nothing yet to add to."""
    batch, kv_head = (pair_of() // kv_heads).to(gl.int64), (pair_of() % kv_heads).to(gl.int64)
    rows = group_rows(line, PART, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    at = base_ptr + batch * strides[0] + kv_head * strides[1] + rows.to(gl.int64)[:, None] * strides[2] + d[None, :]
    kept = (rows < k_rows)[:, None]
    if ADD:
        part += gl.load(at, mask=kept, other=0.0)
    gl.store(at, part, mask=kept)


@gluon.jit
def _in_registers_of_their_own(x):
    """The same numbers, where some are alike too.

    Products begin in these registers. Of numbers that are alike there would be copies, made between one product and the
    next, and before them the compiler would have the first one end (its message C7517).
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _weigh(
    k, v, q, dout, lse, delta, masked, seen, start, scale,
    LAYOUT: gl.constexpr, A_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """(weights, the same as an operand, dweights - delta) of a block, keys as rows."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    # The products begin at -lse and -delta, which then need no registers of their own.
    zeros = gl.zeros([GROUP_ROWS, BLOCK_Q], gl.float32, LAYOUT)
    less_lse = _in_registers_of_their_own(zeros + lse.load(COLUMNS)[None, :])
    less_delta = _in_registers_of_their_own(zeros + delta.load(COLUMNS)[None, :])
    scores = warpgroup_mma(k, q.permute((1, 0)), less_lse, is_async=True)
    dweights = warpgroup_mma(v, dout.permute((1, 0)), less_delta, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    weights = gl.exp2(scores * (scale * LOG2_E))
    if masked:
        weights = gl.where(pair_exists(seen[0], seen[1], start, BLOCK_Q, LAYOUT), weights, 0.0)
    operand = gl.convert_layout(weights.to(DTYPE), A_LAYOUT)
    return weights, operand, warpgroup_mma_wait(0, deps=[dweights])


@gluon.jit
def _publish(dscores, smem, full, PART: gl.constexpr):
    """Put this group's dscores where both groups' matrix products find them."""
    smem.slice(PART * GROUP_ROWS, GROUP_ROWS, dim=0).store(dscores)
    fence_async_shared()
    mbarrier.arrive(full)


@gluon.jit
def _add_queries(dq_desc, batch, head, row, part, smem, PART: gl.constexpr, D: gl.constexpr):
    """Add to this group's columns of a block of dq; the memory it stands in is free again at the next call."""
    tma.store_wait(0)
    smem.reshape([BLOCK_Q, D // 2]).store(part)
    fence_async_shared()
    add_block(dq_desc, [batch, head, row, PART * (D // 2)], smem)


@gluon.jit
def _differentiate(
    PART: gl.constexpr, buffers, exchange, gradients, blocks_ptr, entries_ptr,
    kv_heads, groups, k_rows, scale, D: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """One group of four warps: 64 keys over every block of queries."""
    q_smem, dout_smem, k_smem, v_smem, lse_smem, delta_smem, kv_full, q_full, q_empty = buffers
    scores_smem, scores_full, scores_empty, dq_smem = exchange
    dq_desc, dk_ptr, dv_ptr, dk_strides, dv_strides = gradients
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    KEY_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    QUERY_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, KEY_LAYOUT, 2)
    line = blocks_ptr + gl.program_id(1) * 3
    batch, kv_head = pair_of() // kv_heads, pair_of() % kv_heads
    keys = group_rows(line, PART, gl.SliceLayout(1, S_LAYOUT))
    k_all = k_smem.reshape([2 * GROUP_ROWS, D])
    k = k_all.slice(PART * GROUP_ROWS, GROUP_ROWS, dim=0)
    v = v_smem.reshape([2 * GROUP_ROWS, D]).slice(PART * GROUP_ROWS, GROUP_ROWS, dim=0)
    k_half = k_all.slice(PART * (D // 2), D // 2, dim=1)
    no_dq = gl.zeros([BLOCK_Q, D // 2], gl.float32, QUERY_LAYOUT)
    dk = gl.zeros([GROUP_ROWS, D], gl.float32, KEY_LAYOUT)
    dv = gl.zeros([GROUP_ROWS, D], gl.float32, KEY_LAYOUT)
    first, last = gl.load(line + 1), gl.load(line + 2)
    mbarrier.wait(kv_full, 0)
    count = 0
    before_head, before_row = kv_head, 0
    for turn in range(groups * (last - first)):
        head = kv_head * groups + turn // (last - first)
        entry = entries_ptr + (first + turn % (last - first)) * FIELDS
        every_first, every_last, some_last, low, high = read_entry(entry, keys)
        for start in range(gl.load(entry), some_last, BLOCK_Q):
            slot, phase = turn_of(count, STAGES)
            side, side_phase = turn_of(count, 2)
            mbarrier.wait(q_full.index(slot), phase)
            q = q_smem.index(slot).reshape([BLOCK_Q, D])
            dout = dout_smem.index(slot).reshape([BLOCK_Q, D])
            weights, operand, dweights = _weigh(
                k, v, q, dout, lse_smem.index(slot), delta_smem.index(slot),
                (start < every_first) | (start >= every_last), (low, high), start, scale, S_LAYOUT, A_LAYOUT, DTYPE,
            )  # fmt: skip
            dv = warpgroup_mma(operand, dout, dv, is_async=True)
            dscores = (weights * dweights).to(DTYPE)
            mbarrier.wait(scores_empty.index(side), side_phase ^ 1)
            _publish(dscores, scores_smem.index(side), scores_full.index(side), PART)
            second = gl.convert_layout(dscores, A_LAYOUT)
            dk = warpgroup_mma(second, q, dk, is_async=True)
            # dq of the block before, whose other part has long been there; at the first block there is none to add.
            other, other_phase = turn_of(count + 1, 2)
            mbarrier.wait(scores_full.index(other), other_phase ^ 1, pred=count > 0)
            dq = warpgroup_mma(scores_smem.index(other).permute((1, 0)), k_half, no_dq, use_acc=False, is_async=True)
            dq, dv, dk, operand, second = warpgroup_mma_wait(0, deps=[dq, dv, dk, operand, second])
            mbarrier.arrive(q_empty.index(slot))
            mbarrier.arrive(scores_empty.index(other), pred=count > 0)
            if count > 0:
                _add_queries(dq_desc, batch, before_head, before_row, dq * scale, dq_smem.index(PART), PART, D)
            before_head, before_row = head, start
            count += 1
    other, other_phase = turn_of(count - 1, 2)
    mbarrier.wait(scores_full.index(other), other_phase)
    dq = warpgroup_mma(scores_smem.index(other).permute((1, 0)), k_half, no_dq, use_acc=False, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    _add_queries(dq_desc, batch, before_head, before_row, dq * scale, dq_smem.index(PART), PART, D)
    _add_rows(dk_ptr, dk_strides, line, kv_heads, k_rows, dk * scale, PART, D, KEY_LAYOUT, ADD)
    _add_rows(dv_ptr, dv_strides, line, kv_heads, k_rows, dv, PART, D, KEY_LAYOUT, ADD)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "groups", "parts", "k_rows"])
def hopper_backward_kernel(
    q_desc, dout_desc, k_desc, v_desc, dq_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, blocks_ptr, entries_ptr,
    lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, kv_heads, groups, parts, k_rows,
    scale, D: gl.constexpr, STAGES: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Adds to dq, and to dk and dv or, if not ADD, writes those. Grid (key heads in turns, blocks of keys, groups).

    Key heads are those of dk and dv, each for `groups` query heads. k and v have one for every `parts` of them.
    """
    DTYPE: gl.constexpr = k_desc.dtype
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_Q, D], q_desc.layout)
    dout_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_Q, D], dout_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, v_desc.block_type.shape, v_desc.layout)
    ROW_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], ROW_LAYOUT)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], ROW_LAYOUT)
    SCORES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * GROUP_ROWS, BLOCK_Q], DTYPE)
    scores_smem = gl.allocate_shared_memory(DTYPE, [2, 2 * GROUP_ROWS, BLOCK_Q], SCORES)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, 1, 1, BLOCK_Q, D // 2], dq_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scores_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    scores_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for slot in gl.static_range(STAGES):
        # What the descriptors load, and lse and delta.
        mbarrier.init(q_full.index(slot), count=2)
        mbarrier.init(q_empty.index(slot), count=2)
    for side in gl.static_range(2):
        mbarrier.init(scores_full.index(side), count=2)
        mbarrier.init(scores_empty.index(side), count=2)
    buffers = (q_smem, dout_smem, k_smem, v_smem, lse_smem, delta_smem, kv_full, q_full, q_empty)
    statistics = (lse_ptr, delta_ptr, (lse_batch, lse_head, lse_row), (delta_batch, delta_head, delta_row))
    gradients = (dq_desc, dk_ptr, dv_ptr, (dk_batch, dk_head, dk_row), (dv_batch, dv_head, dv_row))
    descriptors = (q_desc, dout_desc, k_desc, v_desc)
    exchange = (scores_smem, scores_full, scores_empty, dq_smem)
    # fmt: off
    gl.warp_specialize(
        [
            (_differentiate, (gl.constexpr(0), buffers, exchange, gradients, blocks_ptr, entries_ptr,
                              kv_heads, groups, k_rows, scale, D, STAGES, DTYPE, ADD)),
            (_differentiate, (gl.constexpr(1), buffers, exchange, gradients, blocks_ptr, entries_ptr,
                              kv_heads, groups, k_rows, scale, D, STAGES, DTYPE, ADD)),
            (_load_queries, (descriptors, buffers, statistics, blocks_ptr, entries_ptr,
                             kv_heads, groups, parts, scale, D, STAGES)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )
    # fmt: on
