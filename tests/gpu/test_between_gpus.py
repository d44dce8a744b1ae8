"""A rank per GPU over NCCL. It needs two GPUs; the same test over gloo on CPU shows that the test itself works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from burst_attention import Layout, Ring, burst_attention, causal, run_ranks
from burst_attention.exactness import Problem, Sharding, gather, judge, run_rank
from tests.ring.matrix import require_exact

RANKS = 2
PROBLEM = Problem(1000, "causal() & documents([300, 700])", 4, 2, 64, torch.bfloat16)
SHARDING = Sharding(RANKS, "zigzag", "kv", "query")


def attend(rank: int, backend: str, folder: str) -> None:
    """One process: its shard on its own device, its results in a file."""
    device = "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    store = dist.FileStore(f"{folder}/store", RANKS)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS)
    torch.save(run_rank(Ring.from_group(timeout=60), PROBLEM, SHARDING, device=device), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "backend",
    [
        "gloo",
        pytest.param(
            "nccl",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs"),
            ],
        ),
    ],
)
def test_a_rank_per_device_is_exact(backend: str, tmp_path: Path) -> None:
    mp.spawn(attend, (backend, str(tmp_path)), nprocs=RANKS)  # type: ignore[no-untyped-call]
    result = gather(PROBLEM, SHARDING, [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)])
    require_exact(PROBLEM, SHARDING, judge(PROBLEM, result, "cpu" if backend == "gloo" else "cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")
def test_tensors_may_be_on_another_gpu_than_the_current_one() -> None:
    """As with torch's operators; kernels and streams follow the tensors, and the current device stays what it was."""
    layout = Layout.zigzag(4096, 2)
    whole = [torch.randn(1, 2, 4096, 128, device="cuda:1", dtype=torch.bfloat16) for _ in range(4)]

    def body(ring: Ring) -> list[torch.Tensor]:
        q, k, v, dout = (layout.shard(x, ring.rank, 2) for x in whole)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = burst_attention(*leaves, ring=ring, mask=causal(), layout=layout, kernel="cudnn")
        gradients = torch.autograd.grad(out, leaves, dout)
        assert torch.cuda.current_device() == 0
        return [out.detach(), *gradients]

    with torch.cuda.device(0):
        ranks = run_ranks(body, 2)
    torch.cuda.synchronize(1)
    *leaves, dout = (x.float() for x in whole)
    leaves = [x.requires_grad_() for x in leaves]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    for index, expected in enumerate((out, *torch.autograd.grad(out, leaves, dout))):
        found = layout.unshard([results[index] for results in ranks], 2).float()
        assert (found - expected).norm() < 2e-2 * expected.norm()
