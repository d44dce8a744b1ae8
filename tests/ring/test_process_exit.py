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
from burst_attention import Ring, burst_attention, causal

rank, store, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, 3), rank=rank, world_size=3)
ring = Ring.from_group(timeout=60)
x = torch.randn(1, 2, 8, 8, requires_grad=True)
burst_attention(x, x, x, ring=ring, mask=causal()).sum().backward()
if ending == "ring deleted":
    del x, ring
if ending == "groups destroyed":
    dist.barrier()
    dist.destroy_process_group()
print("done")
"""


@pytest.mark.parametrize("ending", ["nothing", "groups destroyed", "ring deleted"])
def test_processes_end_well(ending: str, tmp_path: Path) -> None:
    """Threads that listen inside gloo must not be there when Python ends: most runs would end with SIGABRT."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    for turn in range(3):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / f"store{turn}"), ending],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(RANKS)
        ]
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert (process.returncode, out) == (0, "done\n"), err
