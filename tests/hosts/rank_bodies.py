"""What ranks do on hosts: a training step that is compared with torch's own attention on the whole sequence."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from burst_attention import Ring, burst_attention
from burst_attention.hosts import Hosts

LIMIT = 5e-6
"""Largest error over the largest value, in fp32."""


def step_error(ring: Ring, tokens: int = 96, heads: int = 2, dim: int = 16) -> float:
    """One step, forward and backward; the largest relative error of out and the gradients of this rank's shard."""
    generator = torch.Generator().manual_seed(tokens)
    q, k, v, dout = (torch.randn(1, heads, tokens, dim, generator=generator) for _ in range(4))

    def shard(x: Tensor) -> Tensor:
        return x.chunk(ring.size, dim=2)[ring.rank].contiguous()

    mine = [shard(x).requires_grad_() for x in (q, k, v)]
    out = burst_attention(*mine, ring=ring)
    got = [out.detach(), *torch.autograd.grad(out, mine, shard(dout))]
    whole = [x.requires_grad_() for x in (q, k, v)]
    expected_out = torch.nn.functional.scaled_dot_product_attention(*whole)
    expected = [expected_out.detach(), *torch.autograd.grad(expected_out, whole, dout)]
    return max(float((a - shard(b)).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True))


def keep_stepping(ring: Ring, tokens: int = 2048) -> None:
    """Steps of attention without an end; 1 MiB of keys and values from every rank in each."""
    q, k, v = (torch.ones(1, 2, tokens // ring.size, 64) for _ in range(3))
    while True:
        burst_attention(q, k, v, ring=ring)


def steps_with_traffic(ring: Ring, steps: int = 12, tokens: int = 4096) -> float:
    """Steps that together take long enough for something to happen to the link, then the error of one more."""
    q, k, v = (torch.ones(1, 2, tokens // ring.size, 64) for _ in range(3))
    for _ in range(steps):
        burst_attention(q, k, v, ring=ring)
    return step_error(ring)


def await_traffic(hosts: Hosts, nbytes: int = 1_000_000, seconds: float = 20.0) -> None:
    """Until host 0 has sent so much more than now: by then its ranks are connected and at work."""
    start, deadline = hosts.bytes_sent(0), time.monotonic() + seconds
    while hosts.bytes_sent(0) < start + nbytes:
        assert time.monotonic() < deadline, "the ranks send nothing"
        time.sleep(0.01)
