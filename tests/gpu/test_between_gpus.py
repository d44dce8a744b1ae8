"""A rank per GPU over NCCL. It needs two GPUs; the same test over gloo on CPU shows that the test itself works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from burst_attention import Ring, burst_attention, causal, run_ranks
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
    q, k, v = (torch.randn(1, 2, 2048, 128, device="cuda:1", dtype=torch.bfloat16) for _ in range(3))
    with torch.cuda.device(0):
        (found,) = run_ranks(lambda ring: burst_attention(q, k, v, ring=ring, mask=causal()), 1)
        assert torch.cuda.current_device() == 0
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)
