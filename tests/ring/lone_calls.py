"""One call with a ring to itself is made here, as the measure for calls that share something."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from burst_attention import Ring, burst_attention, run_ranks

TIMEOUT = 30.0


def shards(rank: int, seed: int = 0, tokens: int = 9, heads: int = 4, kv_heads: int = 2, dim: int = 16) -> list[Tensor]:
    """[q, k, v, dout] of one rank; the first three want gradients."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    shapes = [(1, count, tokens, dim) for count in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(shape, generator=generator) for shape in shapes)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout]


def train(ring: Ring, seed: int = 0, **options: Any) -> list[Tensor]:
    """[out, dq, dk, dv] of one call with nothing else on the ring."""
    q, k, v, dout = shards(ring.rank, seed)
    out = burst_attention(q, k, v, ring=ring, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def alone(size: int, seed: int = 0, **options: Any) -> list[list[Tensor]]:
    """What each rank gets from that call on a ring of its own."""
    return run_ranks(lambda ring: train(ring, seed, **options), size, timeout=TIMEOUT)


def assert_identical(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    """Every tensor of every rank, bit for bit, and none of them trivial."""
    assert len(found) == len(expected)
    for rank, (mine, other) in enumerate(zip(found, expected, strict=True)):
        for index, (a, b) in enumerate(zip(mine, other, strict=True)):
            assert torch.equal(a, b), f"rank {rank}, tensor {index}: differs by {(a - b).abs().max()}"
            assert a.isfinite().all() and a.abs().max() > 0, f"rank {rank}, tensor {index}: says nothing"
