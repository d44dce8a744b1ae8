"""The long part of `burst bench gpu`: a million tokens on one card, as a ring of threads; one head checked in fp64."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from burst_attention.api import burst_attention, plan
from burst_attention.layout import Layout
from burst_attention.mask import causal
from burst_attention.ring import Ring, run_ranks

TOKENS, RANKS, HEADS, HEAD_DIM = 1 << 20, 8, 32, 128
KEY_HEADS = (32, 8)
LARGEST_ERROR = 0.01
"""Relative, rms: some three times what bf16's rounding of inputs and results leaves."""
QUERY_BLOCK, KEY_BLOCK = 8192, 32768
KERNEL = "triton"


def million_rows(repeat: int, tokens: int = TOKENS) -> Iterator[dict[str, Any]]:
    """One causal layer with grouped heads, and one with as many key heads as the plan says fit."""
    layout = Layout.zigzag(tokens, RANKS)
    options: dict[str, Any] = {"mask": causal(), "layout": layout, "coalesce": 1, "kernel": KERNEL}
    for kv_heads in KEY_HEADS:
        made = plan(tokens, RANKS, heads=HEADS, kv_heads=kv_heads, head_dim=HEAD_DIM, device="cuda", **options)
        row = {
            "suite": "gpu-million", "tokens": tokens, "ranks": RANKS, "heads": HEADS, "kv_heads": kv_heads,
            "head_dim": HEAD_DIM, "kernel": KERNEL, "coalesce": 1,
            "inputs_gib": round(2 * tokens * HEAD_DIM * 2 * (HEADS + kv_heads) / 2**30, 2),
            "planned_peak_gib": round(sum(map(made.peak_bytes, range(RANKS))) / 2**30, 2),
            "card_gib": round(torch.cuda.mem_get_info()[1] / 2**30, 2),
        }  # fmt: skip
        fits = row["inputs_gib"] + row["planned_peak_gib"] < row["card_gib"]
        yield row | {"fits": fits} | (_measured(layout, kv_heads, options) if fits else {})


def _measured(layout: Layout, kv_heads: int, options: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward, timed once: it is long. One head is checked."""
    shards = [shard_inputs(layout.local_tokens(rank), rank, kv_heads) for rank in range(RANKS)]
    inputs = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times: dict[str, float] = {}

    def attend(ring: Ring) -> tuple[Tensor, ...]:
        q, k, v, dout = shards[ring.rank]
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        started = time.perf_counter()
        out = burst_attention(q, k, v, ring=ring, **options)
        torch.cuda.synchronize()
        forward = time.perf_counter()
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        torch.cuda.synchronize()
        # The slowest rank's, from the same start for all.
        times["forward"] = max(times.get("forward", 0.0), forward - started)
        times["backward"] = max(times.get("backward", 0.0), time.perf_counter() - forward)
        return tuple(x[:, 0].detach().clone() for x in (out, *gradients))

    found = run_ranks(attend, RANKS, timeout=600)
    peak = torch.cuda.max_memory_allocated() - inputs
    wholes = [layout.unshard([parts[index] for parts in found], 1)[0] for index in range(4)]
    heads = [layout.unshard([shard[index][:, 0].detach() for shard in shards], 1)[0] for index in range(4)]
    errors = head_errors(heads, wholes)
    if not max(errors.values()) < LARGEST_ERROR:
        raise RuntimeError(f"a head differs from fp64 by {errors}, where {LARGEST_ERROR:.0%} is allowed")
    pairs = layout.tokens * (layout.tokens + 1) // 2
    return {
        **{f"{phase}_s": round(seconds, 2) for phase, seconds in times.items()},
        "forward_tflops": round(4 * pairs * HEAD_DIM * HEADS / times["forward"] / 1e12, 1),
        "backward_tflops": round(10 * pairs * HEAD_DIM * HEADS / times["backward"] / 1e12, 1),
        "peak_gib": round(peak / 2**30, 2), "rms_errors": errors,
    }  # fmt: skip


def shard_inputs(tokens: int, rank: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A rank's q, k, v and dout.

    Of the heads that share key head 0 only the first has a dout: then dk and dv there are one query head's alone.
    """
    maker = torch.Generator("cuda").manual_seed(rank)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    q, k, v, dout = (
        torch.randn(1, count, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16, generator=maker) for count in heads
    )
    dout[:, 1 : HEADS // kv_heads] = 0
    return q, k, v, dout


def head_errors(inputs: list[Tensor], found: list[Tensor]) -> dict[str, float]:
    """Relative rms errors of out, dq, dk and dv of one (tokens, dim) head against fp64, computed in blocks."""
    q, k, v, dout = (x.double() for x in inputs)
    scale = HEAD_DIM**-0.5
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    wrong, size = [0.0] * 4, [0.0] * 4

    def judge(index: int, got: Tensor, right: Tensor) -> None:
        wrong[index] += float((got.double() - right).square().sum())
        size[index] += float(right.square().sum())

    for first in range(0, len(q), QUERY_BLOCK):
        rows = slice(first, first + QUERY_BLOCK)
        blocks = range(0, min(first + QUERY_BLOCK, len(q)), KEY_BLOCK)
        lse = torch.full((len(q[rows]),), -math.inf, dtype=torch.float64, device=q.device)
        out = torch.zeros_like(q[rows])
        for start in blocks:
            scores = _scores(q, k, first, start, scale)
            new = torch.logaddexp(lse, torch.logsumexp(scores, 1))
            out = out * (lse - new).exp()[:, None] + (scores - new[:, None]).exp() @ v[start : start + KEY_BLOCK]
            lse = new
        judge(0, found[0][rows], out)
        delta = (out * dout[rows]).sum(1)
        dq = torch.zeros_like(out)
        for start in blocks:
            keys = slice(start, start + KEY_BLOCK)
            weights = (_scores(q, k, first, start, scale) - lse[:, None]).exp()
            dv[keys] += weights.T @ dout[rows]
            dscores = weights * (dout[rows] @ v[keys].T - delta[:, None]) * scale
            dk[keys] += dscores.T @ q[rows]
            dq += dscores @ k[keys]
        judge(1, found[1][rows], dq)
    judge(2, found[2], dk)
    judge(3, found[3], dv)
    names = ("out", "dq", "dk", "dv")
    return {name: round(math.sqrt(a / b), 6) for name, a, b in zip(names, wrong, size, strict=True)}


def _scores(q: Tensor, k: Tensor, first: int, start: int, scale: float) -> Tensor:
    """Masked scores of a block of queries and a block of keys."""
    scores = q[first : first + QUERY_BLOCK] @ k[start : start + KEY_BLOCK].T * scale
    i = torch.arange(first, first + scores.shape[0], device=q.device)[:, None]
    j = torch.arange(start, start + scores.shape[1], device=q.device)[None]
    return scores.masked_fill_(j > i, -math.inf)
