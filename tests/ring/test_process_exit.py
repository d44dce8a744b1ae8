"""A process that has used a ring ends as any other does: with status 0, and nothing on its last page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = 3
SCRIPT = """
import os, sys, torch, torch.distributed as dist
from burst_attention import Ring, burst_attention

rank, store, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, 3), rank=rank, world_size=3)
ring = Ring.from_group(timeout=60)
if ending == "a rank fails" and rank == 1:
    from burst_attention.tiles.cpu_flash import CpuFlashKernel
    compute, calls = CpuFlashKernel.forward, []
    def fail_later(*arguments):
        calls.append(1)
        return compute(*arguments) if len(calls) == 1 else 1 / 0
    CpuFlashKernel.forward = fail_later
x = torch.randn(1, 2, 8, 8, requires_grad=True)
burst_attention(x, x, x, ring=ring, forward_direction="query").sum().backward()
if ending == "ring deleted":
    del x, ring
if ending == "groups destroyed":
    dist.barrier()
    dist.destroy_process_group()
print("done")
"""


def run(ending: str, store: Path) -> list[tuple[int, str, str]]:
    """(exit status, output, errors) of every rank."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(store), ending],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(RANKS)
    ]
    said = [process.communicate(timeout=120) for process in processes]
    return [(process.returncode, *words) for process, words in zip(processes, said, strict=True)]


@pytest.mark.parametrize("ending", ["nothing", "groups destroyed", "ring deleted"])
def test_processes_end_well(ending: str, tmp_path: Path) -> None:
    """Threads that listen inside gloo must not be there when Python ends: most runs would end with SIGABRT."""
    for status, out, err in run(ending, tmp_path / "store"):
        assert (status, out) == (0, "done\n"), err


def test_processes_end_with_their_error_when_a_rank_fails(tmp_path: Path) -> None:
    """Transfers wait forever then, in a thread, and the others' exit would wake it at the wrong moment."""
    ends = run("a rank fails", tmp_path / "store")
    assert [status for status, _, _ in ends] == [1, 1, 1], ends
    for rank, (_, _, err) in enumerate(ends):
        assert ("ZeroDivisionError" if rank == 1 else "RingError") in err.splitlines()[-1], err
