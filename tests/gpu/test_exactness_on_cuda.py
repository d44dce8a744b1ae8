"""The core's rule on one GPU: a pairwise cover of its matrix in bf16 and fp16, and the steady shapes of vendor kernels.

lse has a wider limit here. Matrix units sum scores in fp32 whatever the kernel, so lse cannot hold 2 ulp of numbers
near 1 as the CPU's fp64 sums do (docs/numerics.md); kernel="plain" on fp32 inputs is the exact road.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from burst_attention import causal, run_ranks
from burst_attention.exactness import Problem, Sharding, gather, judge, run_rank
from tests.ring import matrix
from tests.ring.matrix import problem_of, require_exact

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = (16, 64, 72, 128, 256)
"""The smallest, those of our Hopper kernels, one that fills no block, and the largest."""
AXES = (*matrix.AXES[:3], tuple(GPU_DTYPES), *matrix.AXES[4:], HEAD_DIMS)
COVER = matrix.pairwise_cover(axes=AXES)
LONE_KEY_GRADIENTS = ("dq", "dk")
"""0 where every row sees one key: what is left is how two sums of the same D products, in fp32, differ."""


def judge_on_gpu(problem: Problem, sharding: Sharding, kernel: str = "auto") -> None:
    torch.zeros(1, device="cuda")
    shards = run_ranks(
        lambda ring: run_rank(ring, problem, sharding, device="cuda", kernel=kernel), sharding.ring_size, timeout=300
    )
    findings = judge(problem, gather(problem, sharding, shards), "cuda")
    if problem.tokens == 1:
        left = max(finding.largest for finding in findings if finding.name in LONE_KEY_GRADIENTS)
        assert left <= problem.head_dim * torch.finfo(torch.float32).eps, left
        findings = [finding for finding in findings if finding.name not in LONE_KEY_GRADIENTS]
    require_exact(problem, sharding, findings)


@pytest.mark.parametrize("part", range(16))
def test_pairwise_cover(part: int) -> None:
    for layout, mask, heads, dtype, ring_size, forward, backward, tokens, head_dim in COVER[part::16]:
        problem = replace(problem_of(mask, heads, "bf16", tokens), dtype=GPU_DTYPES[dtype], head_dim=head_dim)
        judge_on_gpu(problem, Sharding(ring_size, layout, forward, backward))


@pytest.mark.parametrize("direction", ["kv", "query"])
@pytest.mark.parametrize(("mask", "layout"), [(str(causal()), "zigzag"), ("full()", "contiguous")])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["MHA", "GQA4"])
def test_vendor_tiles(direction: str, mask: str, layout: str, heads: tuple[int, int]) -> None:
    """Shards of 2048 tokens and head dim 128 go to cuDNN or the flash operator."""
    problem = Problem(8192, mask, *heads, 128, torch.bfloat16)
    judge_on_gpu(problem, Sharding(4, layout, direction, direction))
