"""Some ranks of a ring as a ring of their own, numbered anew; what they send and tell goes over the whole ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from burst_attention.ring.base import Parcel, Pending, Ring, TransferTime


class PartOfRing(Ring):
    """Ranks `members` of `whole`, this rank among them. Nothing is agreed here: the whole ring has done that.

    Errors name ranks as the whole ring numbers them.
    """

    def __init__(self, whole: Ring, members: Sequence[int]) -> None:
        name = f"{whole.name} ranks {','.join(map(str, members))}"
        super().__init__(name, list(members).index(whole.rank), len(members), whole.timeout, whole._inbox)
        self.whole, self.members, self.trace = whole, members, whole.trace
        self.hosts = tuple(whole.hosts[rank] for rank in members)

    def buffer(self, nbytes: int, device: torch.device, what: str) -> Tensor:
        return self.whole.buffer(nbytes, device, what)

    def open_lanes(self, device: torch.device) -> None:
        self.whole.open_lanes(device)

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel], where: str) -> Pending:
        return self.whole.post(self._renamed(sends), self._renamed(receives), where)

    def _renamed(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        return [replace(parcel, peer=self.members[parcel.peer]) for parcel in parcels]

    def wait(self, pending: Pending) -> None:
        self.whole.wait(pending)

    def time_of(self, pending: Pending) -> TransferTime:
        return self.whole.time_of(pending)

    def abort(self, message: str) -> None:
        self.whole.abort(message)

    def fail(self, where: str, error: BaseException) -> None:
        self.whole.fail(where, error)

    def _start(self, pending: Pending) -> None:
        self.whole._start(pending)

    def _finish(self, pending: Pending) -> None:
        self.whole._finish(pending)

    def _send_control(self, peer: int, data: bytes) -> None:
        self.whole._send_control(self.members[peer], data)
