"""The rule of exactness: error against an fp64 oracle, beside the error of torch's own flash operator on one device.

Shapes: B batch, H query heads, G key heads, T tokens of the whole sequence, D head dim.

A result is exact when, for out, dq, dk and dv, its rms error is at most 2 times the operator's plus 2 ulp of the
tensor's rms, its largest error at most 4 times plus 4 ulp, and lse lies within 2 ulp of max(1, |lse|).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from burst_attention.api import burst_attention
from burst_attention.layout import Layout
from burst_attention.mask import Mask, parse_mask
from burst_attention.reference import Attention, allowed_pairs, reference_gradients
from burst_attention.ring import Ring

RMS_FACTOR, RMS_ULP = 2, 2
MAX_FACTOR, MAX_ULP = 4, 4
LSE_ULP = {"cpu": 2, "cuda": 16}
"""Matrix units sum scores in fp32, so that on a GPU lse cannot hold what fp64 sums do (docs/numerics.md)."""


@dataclass(frozen=True)
class Problem:
    """Whole inputs, made from a seed; one oracle serves every way of sharding it."""

    tokens: int
    mask: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    seed: int = 0
    batch: int = 1

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and dout, (batch, heads, tokens, head_dim) each."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, count, self.tokens, self.head_dim) for count in heads]
        q, k, v, dout = (torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes)
        return q, k, v, dout


@dataclass(frozen=True)
class Sharding:
    """One way of running a problem on a ring."""

    ring_size: int
    layout: str
    forward_direction: str = "auto"
    direction: str = "auto"
    per_host: int = 1
    """Ranks that share a host in a double ring; 1 is a flat ring."""
    heads: int = 1
    """Neighbouring ranks that exchange heads."""

    def layout_for(self, problem: Problem) -> Layout:
        if self.layout == "balanced":
            return Layout.balanced(problem.tokens, self.ring_size, parse_mask(problem.mask))
        return Layout(self.layout, problem.tokens, self.ring_size)

    def __str__(self) -> str:
        ring = f"{self.ring_size // self.per_host}x{self.per_host}" if self.per_host > 1 else f"W{self.ring_size}"
        ring += f"-heads{self.heads}" if self.heads > 1 else ""
        return f"{ring}-{self.layout}-{self.forward_direction}-{self.direction}"


@dataclass(frozen=True)
class Finding:
    """One tensor's error, the yardstick's, and whether the rule holds."""

    name: str
    rms: float
    rms_yardstick: float
    rms_limit: float
    largest: float
    largest_limit: float

    @property
    def holds(self) -> bool:
        return self.rms <= self.rms_limit and self.largest <= self.largest_limit


def run_rank(
    ring: Ring,
    problem: Problem,
    sharding: Sharding,
    lse: Tensor | None = None,
    device: str = "cpu",
    one_call: bool = False,
    kernel: str = "auto",
) -> tuple[Tensor, ...]:
    """One rank's part of a problem: its shards of out, lse, dq, dk, dv, on the CPU again.

    lse takes a forward of its own, unless it is given: no choice of backward changes it. With `one_call` all come from
    the call that returns lse, which other kernels may serve. `kernel` is for the call that does not.
    """
    layout = sharding.layout_for(problem)
    q, k, v, dout = (layout.shard(x, ring.rank, 2).to(device) for x in problem.inputs())
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    options: dict[str, Any] = {
        "ring": ring,
        "mask": parse_mask(problem.mask),
        "layout": layout,
        "direction": sharding.direction,
        "forward_direction": sharding.forward_direction,
        "heads": sharding.heads,
        # Ranks of several hosts would find a double ring by themselves.
        "topology": "flat" if sharding.per_host == 1 else "auto",
    }
    if one_call:
        out, lse = burst_attention(q, k, v, return_lse=True, **options)
    else:
        if lse is None:
            with torch.no_grad():
                _, lse = burst_attention(q, k, v, return_lse=True, **options)
        out = burst_attention(q, k, v, kernel=kernel, **options)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return tuple(x.detach().cpu() for x in (out, lse, dq, dk, dv))


def gather(problem: Problem, sharding: Sharding, shards: Sequence[tuple[Tensor, ...]]) -> Attention:
    """The whole result from every rank's shards."""
    layout = sharding.layout_for(problem)
    return Attention(*(layout.unshard([shard[index] for shard in shards], 2) for index in range(5)))


@lru_cache(maxsize=4)
def truth(problem: Problem, device: str = "cpu") -> tuple[Attention, Attention]:
    """(the fp64 oracle, the yardstick: torch's flash operator on the whole sequence).

    The oracle is the slow part and may run on a GPU; not where ranks are forked, for their parent must not use CUDA.
    """
    positions = torch.arange(problem.tokens)
    mask: Mask = parse_mask(problem.mask)
    allowed = allowed_pairs(mask, positions, positions)
    q, k, v, dout = (x.to(device) for x in problem.inputs())
    oracle = reference_gradients(q, k, v, dout, allowed.to(device))
    return Attention(*(x.cpu() for x in oracle)), flash_attention(*problem.inputs(), allowed)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, allowed: Tensor) -> Attention:
    """torch's CPU flash operator, forward and backward, with the whole mask; rows without keys put right."""
    bias = None if bool(allowed.all()) else torch.zeros(allowed.shape, dtype=q.dtype).masked_fill_(~allowed, -math.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)
    empty = ~allowed.any(-1)
    out, lse = out.masked_fill(empty[:, None], 0.0), lse.masked_fill(empty, math.inf).contiguous()
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, False, attn_mask=bias
    )
    return Attention(out, lse.masked_fill(empty, -math.inf), *gradients)


def judge(problem: Problem, result: Attention, device: str = "cpu") -> list[Finding]:
    """Compare a result of `device` with the oracle, computed there too, tensor by tensor."""
    oracle, yardstick = truth(problem, device)
    findings = []
    for name in ("out", "dq", "dk", "dv"):
        exact = getattr(oracle, name)
        error = (getattr(result, name).double() - exact).nan_to_num(nan=math.inf)
        allowance = (getattr(yardstick, name).double() - exact).nan_to_num(nan=math.inf)
        ulp = ulp_of(rms(exact), problem.dtype)
        findings.append(
            Finding(
                name,
                rms(error),
                rms(allowance),
                RMS_FACTOR * rms(allowance) + RMS_ULP * ulp,
                error.abs().max().item(),
                MAX_FACTOR * allowance.abs().max().item() + MAX_ULP * ulp,
            )
        )
    findings.append(_judge_lse(oracle.lse, yardstick.lse, result.lse, LSE_ULP[device]))
    return findings


def _judge_lse(oracle: Tensor, yardstick: Tensor, result: Tensor, limit: int) -> Finding:
    """Errors of lse in units of ulp(max(1, |lse|)); -inf must be -inf."""
    same = (oracle == result) | ((oracle == -math.inf) & (result == -math.inf))
    unit = torch.finfo(torch.float32).eps * 2 ** oracle.abs().clamp(1, 1e30).log2().floor()
    error = torch.where(same, 0.0, (result.double() - oracle).abs() / unit).nan_to_num(nan=math.inf)
    other = torch.where(oracle == -math.inf, 0.0, (yardstick.double() - oracle).abs() / unit)
    return Finding("lse", rms(error), rms(other), limit, error.max().item(), limit)


def rms(x: Tensor) -> float:
    """Root of the mean square; 0 for an empty tensor."""
    return math.sqrt(x.square().mean().item()) if x.numel() else 0.0


def ulp_of(value: float, dtype: torch.dtype) -> float:
    """The distance to the next larger number of a dtype near a value; 0 for 0."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(value)) if value > 0 else 0.0
