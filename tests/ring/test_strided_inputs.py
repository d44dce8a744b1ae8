"""Inputs and gradients need not be contiguous: views give what their copies give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention import Ring, burst_attention, causal, documents, run_ranks
from tests.ring.call_variants import each_direction, each_forward_direction, each_kernel
from tests.ring.lone_calls import TIMEOUT, alone, shards


@each_kernel
@each_direction
@each_forward_direction
def test_strided_inputs_equal_contiguous_ones(forward_direction: str, direction: str, kernel: str) -> None:
    def strided(ring: Ring) -> list[Tensor]:
        views = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in shards(ring.rank)]
        assert not any(x.is_contiguous() for x in views)
        q, k, v, dout = views
        for x in (q, k, v):
            x.requires_grad_()
        out = burst_attention(q, k, v, ring=ring, **options)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    options: dict[str, Any] = {"mask": causal(), "layout": "zigzag", "kernel": kernel}
    options |= {"direction": direction, "forward_direction": forward_direction}
    for found, expected in zip(run_ranks(strided, 3, timeout=TIMEOUT), alone(3, **options), strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_views_of_one_fused_projection() -> None:
    """q, k and v cut from one (B, S, 3, H, D) tensor: their gradients meet in it again."""

    def fused(ring: Ring) -> list[Tensor]:
        q, k, v, dout = (x.detach() for x in shards(ring.rank, kv_heads=4))
        qkv = torch.stack([q, k, v], 2).permute(0, 3, 2, 1, 4).contiguous().requires_grad_()
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = burst_attention(q, k, v, ring=ring, mask=documents([20, 7]))
        (gradient,) = torch.autograd.grad(out, qkv, dout)
        return [out.detach(), *gradient.permute(2, 0, 3, 1, 4).unbind(0)]

    def apart(ring: Ring) -> list[Tensor]:
        q, k, v, dout = shards(ring.rank, kv_heads=4)
        out = burst_attention(q, k, v, ring=ring, mask=documents([20, 7]))
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    found, expected = run_ranks(fused, 3, timeout=TIMEOUT), run_ranks(apart, 3, timeout=TIMEOUT)
    for mine, other in zip(found, expected, strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@each_kernel
@each_direction
@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced"])
def test_dout_need_not_be_contiguous(kind: str, direction: str, kernel: str) -> None:
    def gradients(ring: Ring, strided: bool) -> list[Tensor]:
        q, k, v, dout = shards(ring.rank)
        if kind == "expanded":
            dout = torch.ones((), dtype=dout.dtype).expand(dout.shape)
        elif kind == "transposed":
            dout = dout.transpose(1, 3).contiguous().transpose(1, 3)
        else:
            dout = torch.stack([dout, dout.neg()], -1)[..., 0]
        assert not dout.is_contiguous()
        seen: list[bool] = []
        out = burst_attention(q, k, v, ring=ring, mask=causal(), direction=direction, kernel=kernel)
        out.register_hook(lambda gradient: seen.append(gradient.is_contiguous()))
        if strided and kind == "expanded":
            out.sum().backward()
        else:
            out.backward(dout if strided else dout.contiguous())
        # The hook shows that what reached the operator was strided, or was not.
        assert seen == [not strided]
        return [x.grad for x in (q, k, v) if x.grad is not None]

    found = run_ranks(lambda ring: gradients(ring, True), 3, timeout=TIMEOUT)
    expected = run_ranks(lambda ring: gradients(ring, False), 3, timeout=TIMEOUT)
    for mine, other in zip(found, expected, strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
