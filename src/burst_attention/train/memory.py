"""A rank's memory: the most it has held, and on CPUs what freed blocks leave of it."""

from __future__ import annotations

import ctypes
import os
import resource
import sys

import torch

M_MMAP_THRESHOLD = -3
LARGEST_THRESHOLD = 32 << 20
"""glibc takes no larger one; above it, it gives blocks back by itself."""
USERS_CHOICE = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_")


def peak_memory(device: torch.device) -> int:
    """The most bytes this rank has held: on a GPU of tensors, on a CPU of the whole process, its imports included."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(used if sys.platform == "darwin" else used * 1024)


def give_back_blocks_above(nbytes: int) -> bool:
    """Let blocks of more bytes go back to the system when they are freed; whether the C library can be told.

    By itself glibc soon keeps them, and the holes that they leave grow from step to step. Asked for from a single
    hidden state on, it gives back what the next operation asks for again, and page faults cost speed.
    """
    if any(name in os.environ for name in USERS_CHOICE) or not sys.platform.startswith("linux"):
        return False
    tell = getattr(ctypes.CDLL(None), "mallopt", None)
    return tell is not None and bool(tell(M_MMAP_THRESHOLD, min(nbytes + 1, LARGEST_THRESHOLD)))
