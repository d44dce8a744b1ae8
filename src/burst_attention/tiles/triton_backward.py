"""Our own backward in Triton, from lse and delta: adds into fp32 dq, dk and dv inside the kernel, and is deterministic.

Shapes: B batch, H query heads, G key heads, S query rows, K key rows, D head dim, E value head dim.

Two kernels, each rebuilding the weights: one program per block of keys loops over queries for dk and dv, one per block
of queries loops over keys for dq. No atomics, so a sum is the same sum every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from burst_attention.tiles.triton_forward import FIELDS, LOG2_E, PRECISION, load_block, pair_exists, pair_of


@triton.jit
def _load_rows(base, rows, row_stride, last, MASK: tl.constexpr, OTHER: tl.constexpr):
    pointers = base + rows.to(tl.int64) * row_stride
    if MASK:
        return tl.load(pointers, mask=rows < last, other=OTHER)
    return tl.load(pointers)


@triton.jit
def add_block(at, part, mask, ADD: tl.constexpr):
    """Add to a block of a gradient, or write it where there is nothing yet to add to."""
    if ADD:
        part += tl.load(at, mask=mask, other=0.0)
    tl.store(at, part, mask=mask)


@triton.jit
def _key_gradients(
    dk, dv, k, v, q_base, dout_base, lse_base, delta_base, q_row, dout_row, lse_row, delta_row,
    entry, keys, first, last, some_last, scale,
    BLOCK_Q: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    MASKED: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr,
):  # fmt: skip
    """Add the queries [first, last) to dk and dv of a block of keys. All products have keys as rows."""
    d, e = tl.arange(0, D), tl.arange(0, E)
    for start in tl.range(first, last, BLOCK_Q):
        queries = start + tl.arange(0, BLOCK_Q)
        q = load_block(q_base, queries, q_row, d, some_last, DIM, MASKED, DIM != D)
        lse = _load_rows(lse_base, queries, lse_row, some_last, MASKED, float("inf"))
        # A row without keys has lse = -inf; +inf makes its weights 0 instead of NaN.
        lse = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2_E
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        weights = tl.exp2(scores * (scale * LOG2_E) - lse[None, :])
        if MASKED:
            weights = tl.where(pair_exists(entry, keys, queries, some_last), weights, 0.0)
        dout = load_block(dout_base, queries, dout_row, e, some_last, VALUE_DIM, MASKED, VALUE_DIM != E)
        if WANT_V:
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
        if WANT_K:
            delta = _load_rows(delta_base, queries, delta_row, some_last, MASKED, 0.0)
            dweights = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
            dscores = weights * (dweights - delta[None, :])
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["kv_heads", "groups", "k_rows"])
def key_gradients_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, blocks_ptr, entries_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dout_batch, dout_head, dout_row, lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, kv_heads, groups, k_rows, scale,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    WANT_K: tl.constexpr, WANT_V: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Grid (key heads in turns, key blocks, groups): adds to dk and dv, or writes them, over all query heads."""
    line = blocks_ptr + tl.program_id(1) * 3
    batch, kv_head = (pair_of() // kv_heads).to(tl.int64), (pair_of() % kv_heads).to(tl.int64)
    keys = tl.load(line) * BLOCK_K + tl.arange(0, BLOCK_K)
    d, e = tl.arange(0, D), tl.arange(0, E)
    k = load_block(k_ptr + batch * k_batch + kv_head * k_head, keys, k_row, d, k_rows, DIM, True, DIM != D)
    v = load_block(v_ptr + batch * v_batch + kv_head * v_head, keys, v_row, e, k_rows, VALUE_DIM, True, VALUE_DIM != E)
    dk = tl.zeros([BLOCK_K, D], tl.float32)
    dv = tl.zeros([BLOCK_K, E], tl.float32)
    first, last = tl.load(line + 1), tl.load(line + 2)
    for turn in range(groups * (last - first)):
        head = kv_head * groups + turn // (last - first)
        entry = entries_ptr + (first + turn % (last - first)) * FIELDS
        q_base = q_ptr + batch * q_batch + head * q_head
        dout_base = dout_ptr + batch * dout_batch + head * dout_head
        lse_base = lse_ptr + batch * lse_batch + head * lse_head
        delta_base = delta_ptr + batch * delta_batch + head * delta_head
        some_first, every_first = tl.load(entry), tl.load(entry + 1)
        every_last, some_last = tl.load(entry + 2), tl.load(entry + 3)
        dk, dv = _key_gradients(
            dk, dv, k, v, q_base, dout_base, lse_base, delta_base, q_row, dout_row, lse_row, delta_row,
            entry, keys, some_first, every_first, some_last, scale,
            BLOCK_Q, DIM, VALUE_DIM, D, E, True, WANT_K, WANT_V,
        )  # fmt: skip
        dk, dv = _key_gradients(
            dk, dv, k, v, q_base, dout_base, lse_base, delta_base, q_row, dout_row, lse_row, delta_row,
            entry, keys, every_first, every_last, some_last, scale,
            BLOCK_Q, DIM, VALUE_DIM, D, E, False, WANT_K, WANT_V,
        )  # fmt: skip
        dk, dv = _key_gradients(
            dk, dv, k, v, q_base, dout_base, lse_base, delta_base, q_row, dout_row, lse_row, delta_row,
            entry, keys, every_last, some_last, some_last, scale,
            BLOCK_Q, DIM, VALUE_DIM, D, E, True, WANT_K, WANT_V,
        )  # fmt: skip
    kept = (keys < k_rows)[:, None]
    if WANT_K:
        at = dk_ptr + batch * dk_batch + kv_head * dk_head + keys[:, None].to(tl.int64) * dk_row + d[None, :]
        mask = kept & (d[None, :] < DIM)
        add_block(at, dk * scale, mask, ADD)
    if WANT_V:
        at = dv_ptr + batch * dv_batch + kv_head * dv_head + keys[:, None].to(tl.int64) * dv_row + e[None, :]
        mask = kept & (e[None, :] < VALUE_DIM)
        add_block(at, dv, mask, ADD)


@triton.jit
def _query_gradients(
    dq, q, dout, lse, delta, k_base, v_base, k_row, v_row, entry, queries, first, last, some_last, scale,
    BLOCK_K: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys [first, last) to dq of a block of queries."""
    d, e = tl.arange(0, D), tl.arange(0, E)
    for start in tl.range(first, last, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k = load_block(k_base, keys, k_row, d, some_last, DIM, MASKED, DIM != D)
        v = load_block(v_base, keys, v_row, e, some_last, VALUE_DIM, MASKED, VALUE_DIM != E)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        weights = tl.exp2(scores * (scale * LOG2_E) - lse[:, None])
        if MASKED:
            weights = tl.where(pair_exists(entry, queries, keys, some_last), weights, 0.0)
        dweights = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        dscores = weights * (dweights - delta[:, None])
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["heads", "groups", "q_rows"])
def query_gradients_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, blocks_ptr, entries_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dout_batch, dout_head, dout_row, lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row,
    dq_batch, dq_head, dq_row, heads, groups, q_rows, scale,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Grid (heads in turns, query blocks, groups): adds to dq, or writes it."""
    line = blocks_ptr + tl.program_id(1) * 3
    batch, head = (pair_of() // heads).to(tl.int64), (pair_of() % heads).to(tl.int64)
    queries = tl.load(line) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d, e = tl.arange(0, D), tl.arange(0, E)
    q = load_block(q_ptr + batch * q_batch + head * q_head, queries, q_row, d, q_rows, DIM, True, DIM != D)
    dout_base = dout_ptr + batch * dout_batch + head * dout_head
    dout = load_block(dout_base, queries, dout_row, e, q_rows, VALUE_DIM, True, VALUE_DIM != E)
    lse = _load_rows(lse_ptr + batch * lse_batch + head * lse_head, queries, lse_row, q_rows, True, float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2_E
    delta = _load_rows(delta_ptr + batch * delta_batch + head * delta_head, queries, delta_row, q_rows, True, 0.0)
    k_base = k_ptr + batch * k_batch + (head // groups) * k_head
    v_base = v_ptr + batch * v_batch + (head // groups) * v_head
    dq = tl.zeros([BLOCK_Q, D], tl.float32)
    for index in range(tl.load(line + 1), tl.load(line + 2)):
        entry = entries_ptr + index * FIELDS
        some_first, every_first = tl.load(entry), tl.load(entry + 1)
        every_last, some_last = tl.load(entry + 2), tl.load(entry + 3)
        dq = _query_gradients(
            dq, q, dout, lse, delta, k_base, v_base, k_row, v_row, entry, queries, some_first, every_first, some_last,
            scale, BLOCK_K, DIM, VALUE_DIM, D, E, True,
        )  # fmt: skip
        dq = _query_gradients(
            dq, q, dout, lse, delta, k_base, v_base, k_row, v_row, entry, queries, every_first, every_last, some_last,
            scale, BLOCK_K, DIM, VALUE_DIM, D, E, False,
        )  # fmt: skip
        dq = _query_gradients(
            dq, q, dout, lse, delta, k_base, v_base, k_row, v_row, entry, queries, every_last, some_last, some_last,
            scale, BLOCK_K, DIM, VALUE_DIM, D, E, True,
        )  # fmt: skip
    at = dq_ptr + batch * dq_batch + head * dq_head + queries[:, None].to(tl.int64) * dq_row + d[None, :]
    mask = (queries < q_rows)[:, None] & (d[None, :] < DIM)
    add_block(at, dq * scale, mask, ADD)
