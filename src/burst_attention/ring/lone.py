"""One rank of a ring whose other ranks do not exist: for measuring what a rank costs by itself.

What the others would send is made up. It stands in the buffers from the start, as if handed over by reference, or is
copied there on a stream of its own as a receive on a GPU would be. Nothing is agreed: calls need check="off".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from burst_attention.lanes import HURRIED
from burst_attention.ring.base import DEFAULT_TIMEOUT, Inbox, Pending, Ring

_numbers = itertools.count()

Maker = Callable[[str, int], Tensor]
"""Bytes that other ranks could have sent, of a kind such as "forward operand", as many as asked for."""


class LoneRing(Ring):
    """The place of `rank` among `size` ranks; buffers hold made-up blocks, which are copied in again if `copies`."""

    def __init__(self, rank: int, size: int, maker: Maker, copies: bool = False) -> None:
        super().__init__(f"lone-{next(_numbers)}", rank, size, DEFAULT_TIMEOUT, Inbox())
        self._maker, self._copies = maker, copies
        self.copied: list[tuple[Tensor, Tensor]] = []
        """(buffer, what was copied there), to be copied again by themselves."""
        on_gpu = copies and torch.cuda.is_available()
        self._stream = torch.cuda.Stream(priority=HURRIED) if on_gpu else None  # type: ignore[no-untyped-call]

    def buffer(self, nbytes: int, device: torch.device, what: str) -> Tensor:
        return self._maker(what, nbytes)

    def _start(self, pending: Pending) -> None:
        if not self._copies:
            return
        if self._stream is not None:
            # The buffers are free once what was enqueued before this round has run.
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for parcel in pending.receives:
                kind = "result" if parcel.channel % 2 else "operand"
                made = self._maker(f"{pending.where.split()[0]} {kind} copied", parcel.tensor.nbytes)
                parcel.tensor.copy_(made)
                self.copied.append((parcel.tensor, made))

    def _finish(self, pending: Pending) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def exchange(self, record: dict[str, Any], where: str) -> list[dict[str, Any]]:
        raise RuntimeError("a lone rank has nobody to agree with; call with check='off'")

    def _send_control(self, peer: int, data: bytes) -> None:
        """There is nobody to tell."""
