"""Being asked to stop: a signal is noted, all ranks agree at the end of a step, save at the same one and leave."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class Stopper:
    """Notes SIGTERM, and the first SIGINT, while it is entered; a second SIGINT interrupts as ever.

    A cluster's scheduler sends SIGTERM and, some time later, SIGKILL. Not every rank need get it: `requested` agrees.
    """

    def __init__(self) -> None:
        self.pending = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def requested(self, group: dist.ProcessGroup | None = None) -> bool:
        """Whether any rank was asked to stop; every rank calls this at the same step and gets the same answer."""
        if not dist.is_initialized():
            return self.pending
        # NCCL moves nothing but CUDA tensors.
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        flag = torch.tensor([int(self.pending)], device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        return bool(flag.item())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pending = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
