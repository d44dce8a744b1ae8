"""A ring of threads on one GPU, with the kernels that users get, against the fp64 oracle."""

from __future__ import annotations

import pytest
import torch

from burst_attention import Layout, Ring, burst_attention, parse_mask, run_ranks
from burst_attention.reference import allowed_pairs, reference_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("mask", ["full()", "causal()", "causal() & (window(40) | prefix(4))"])
@pytest.mark.parametrize(("layout", "direction"), [("zigzag", "kv"), ("striped", "query")])
@pytest.mark.parametrize(("ring_size", "dims"), [(1, (32, 32)), (4, (32, 32)), (4, (192, 128)), (4, (40, 24))], ids=str)
def test_output_and_gradients(
    ring_size: int, dims: tuple[int, int], layout: str, direction: str, mask: str, dtype: torch.dtype
) -> None:
    """Head dims of queries and keys, and of values."""
    tokens, generator = 257, torch.Generator().manual_seed(0)
    shapes = ((8, dims[0]), (2, dims[0]), (2, dims[1]), (8, dims[1]))
    q, k, v, dout = (torch.randn(1, count, tokens, dim, generator=generator).to(dtype) for count, dim in shapes)
    sharding = Layout(layout, tokens, ring_size)

    def body(ring: Ring) -> list[torch.Tensor]:
        mine = [sharding.shard(x, ring.rank, 2).cuda().requires_grad_() for x in (q, k, v)]
        sides = {"direction": direction, "forward_direction": direction}
        out = burst_attention(*mine, ring=ring, mask=parse_mask(mask), layout=sharding, **sides)
        gradients = torch.autograd.grad(out, mine, sharding.shard(dout, ring.rank, 2).cuda())
        return [x.detach().cpu() for x in (out, *gradients)]

    shards = run_ranks(body, ring_size, timeout=120)
    positions = torch.arange(tokens)
    oracle = reference_gradients(q, k, v, dout, allowed_pairs(parse_mask(mask), positions, positions))
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        result, exact = sharding.unshard([shard[index] for shard in shards], 2).double(), getattr(oracle, name)
        assert (result - exact).norm() <= TOLERANCE[dtype] * exact.norm(), name
