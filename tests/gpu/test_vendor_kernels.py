"""Vendors' kernels by name, each version that is installed: forward with lse, backward from lse and delta, strides.

What we count on in every version of the flash operator: lse is the natural log of the row's sum; gradients of a tile
from the lse of whole rows add up over tiles; `out` counts in backward only by its row sums with dout, so that a
stand-in serves for queries that visit (direction "query").
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import attention

from burst_attention import Layout, Ring, burst_attention, causal, run_ranks
from burst_attention.exactness import Problem, Sharding
from burst_attention.reference import allowed_pairs, reference_gradients
from tests.gpu.test_exactness_on_cuda import judge_on_gpu
from tests.single_tiles import ERROR, PIECES, make_tile, relative

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KERNELS = ("cudnn", "flash FA2", "flash FA3", "flash FA4")


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """A kernel's name, with the version of flash that the test asks for under torch's operator."""
    name, *version = request.param.split()
    if version in ([], ["FA2"]):
        yield name
        return
    try:
        attention.activate_flash_attention_impl(version[0])
    except ImportError as error:
        pytest.skip(f"{version[0]} is not installed: {str(error).splitlines()[0]}")
    yield name
    attention.restore_flash_attention_impl()


@pytest.mark.parametrize("direction", ["kv", "query"])
@pytest.mark.parametrize(("mask", "layout"), [("causal()", "zigzag"), ("full()", "contiguous")])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["MHA", "GQA4"])
def test_a_ring_on_one_kernel_is_exact(
    kernel: str, direction: str, mask: str, layout: str, heads: tuple[int, int]
) -> None:
    problem = Problem(4096, mask, *heads, 128, torch.bfloat16)
    judge_on_gpu(problem, Sharding(4, layout, direction, direction), kernel)


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16), (64, torch.float16)])
def test_other_shapes_that_the_policy_sends_there(kernel: str, head_dim: int, dtype: torch.dtype) -> None:
    judge_on_gpu(Problem(4096, "causal()", 8, 2, head_dim, dtype), Sharding(4, "zigzag", "query", "query"), kernel)


@pytest.mark.parametrize("packed_out", [False, True], ids=["out-dense", "out-packed"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", ["full", "causal"])
def test_rows_may_lie_apart(kernel: str, name: str, packed: bool, packed_out: bool) -> None:
    """Inputs and dout, or out, whose tokens lie together, as in a visiting block: cuDNN ignores some strides."""
    from burst_attention.tiles.vendor import CudnnKernel, FlashKernel

    vendor = {"cudnn": CudnnKernel, "flash": FlashKernel}[kernel]()
    tile = make_tile(name, torch.bfloat16, 128, 128, 2, packed)
    rows = slice(0, PIECES[name][0].q_count)
    q, k, v, dout = (x[:, :, rows] for x in (tile.q, tile.k, tile.v, tile.dout))
    out, lse = vendor.attend(q, k, v, name == "causal", tile.scale)
    wanted, wanted_lse, _ = tile.forward()
    assert relative(out, wanted[:, :, rows]) < ERROR[torch.bfloat16]
    assert (lse.double() - wanted_lse[:, :, rows]).abs().max() < 1e-4

    out = out.transpose(1, 2).contiguous().transpose(1, 2) if packed_out else out.contiguous()
    found = vendor.gradients(dout, q, k, v, out, lse.contiguous(), name == "causal", tile.scale)
    _, *gradients = tile.backward()
    for gradient, right in zip(found, gradients, strict=True):
        assert relative(gradient, right[:, :, rows]) < 2 * ERROR[torch.bfloat16]


def test_visiting_queries_without_a_gradient_give_no_nan(kernel: str) -> None:
    """Masked labels: dout is 0 in whole rows, and what stands in for out there must be 0 too."""
    layout, generator = Layout.zigzag(1024, 4), torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, heads, 1024, 128, generator=generator).bfloat16() for heads in (4, 2, 2, 4))
    dout[:, :, ::3] = 0.0

    def body(ring: Ring) -> list[Tensor]:
        leaves = [layout.shard(x, ring.rank, 2).cuda().requires_grad_() for x in (q, k, v)]
        out = burst_attention(*leaves, ring=ring, mask=causal(), layout=layout, kernel=kernel, direction="query")
        return [x.cpu() for x in torch.autograd.grad(out, leaves, layout.shard(dout, ring.rank, 2).cuda())]

    shards = run_ranks(body, 4, timeout=300)
    positions = torch.arange(1024)
    exact = reference_gradients(q, k, v, dout, allowed_pairs(causal(), positions, positions))
    for index, name in enumerate(("dq", "dk", "dv")):
        found = layout.unshard([shard[index] for shard in shards], 2)
        assert relative(found, getattr(exact, name)) < 4 * ERROR[torch.bfloat16], name
