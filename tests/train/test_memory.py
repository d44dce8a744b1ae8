"""Large blocks that a rank frees go back to the system, unless its user has said how to keep them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from burst_attention.train.memory import USERS_CHOICE, give_back_blocks_above

MIB = 1 << 20
FREED = """
import os, torch
from burst_attention.train.memory import give_back_blocks_above

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

told = give_back_blocks_above(4 << 20)
# By itself glibc keeps blocks of a size once one of it has been freed.
torch.ones(5 << 18)
held = [torch.ones(5 << 18) for _ in range(40)]
full = resident()
# The last block stays: what is below it cannot go back by lowering the top of the heap.
del held[:-1]
print(told, (full - resident()) >> 20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc alone can be told")
@pytest.mark.parametrize("chosen", [{}, {"MALLOC_MMAP_THRESHOLD_": "33554432"}], ids=["told", "users-choice"])
def test_freed_blocks_go_back(chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in USERS_CHOICE:
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    told, freed = subprocess.run(
        [sys.executable, "-c", FREED], capture_output=True, text=True, check=True
    ).stdout.split()
    assert told == str(not chosen)
    # 39 blocks of 5 MiB.
    assert (int(freed) > 150) == (not chosen), freed


@pytest.mark.parametrize("name", USERS_CHOICE)
def test_what_a_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "")
    assert not give_back_blocks_above(8 * MIB)
