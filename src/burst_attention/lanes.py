"""Streams that take turns at a ring's rounds on a GPU: one begins while the last blocks of another end.

The last blocks of a kernel leave most of the chip idle, and on one stream the next kernel waits for them. Rounds need
not wait for each other where their results are only laid aside. So they take turns on two streams, the lanes;
transfers, and what is packed for them, stay on the caller's stream:

    caller    | packed, ready | post 0 | ready | wait for 0, post 1 | ready | wait for 1, post 2 | ...
    lane 0                    | round 0 .................           | round 2 ...
    lane 1                             | round 1 ............................

A round begins when the caller's stream was `ready` for it: its block is there, and whatever was laid aside before it
may be freed, which is why lanes may allocate. What a round read is written again, and what it wrote is sent, by
transfers that are posted after a `join`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

LANES = 2

_lanes: dict[tuple[Any, ...], tuple[Any, ...]] = {}
"""By the stream they serve: memory that was allocated on a lane is kept for it."""


class Lanes:
    """The lanes of the current stream of a GPU; without one, all that is asked of them is nothing."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.caller: Any = None if device is None else torch.cuda.current_stream(device)
        self.streams = () if device is None else _lanes_of(self.caller)
        self.turns = 0

    @property
    def used(self) -> tuple[Any, ...]:
        """Lanes that had a turn; to wait for others would wait for something outside of a CUDA graph's capture."""
        return self.streams[: self.turns]

    def ready(self) -> Any:
        """A mark that the next round waits for: all that the caller's stream has been given so far."""
        return self.caller.record_event() if self.caller else None

    @contextlib.contextmanager
    def turn(self, ready: Any) -> Iterator[None]:
        """A round: what is enqueued in here goes to the next lane."""
        if not self.streams:
            yield
            return
        lane = self.streams[self.turns % len(self.streams)]
        self.turns += 1
        lane.wait_event(ready)
        with torch.cuda.stream(lane):
            yield

    def join(self) -> None:
        """What the caller's stream is given next comes after all rounds so far."""
        for lane in self.used:
            self.caller.wait_stream(lane)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """What is enqueued in here comes after all that any of the streams has, and before all that they get next."""
        if not self.streams:
            yield
            return
        current = torch.cuda.current_stream(self.caller.device)
        others = [stream for stream in (self.caller, *self.used) if stream != current]
        for stream in others:
            current.wait_stream(stream)
        try:
            yield
        finally:
            for stream in others:
                stream.wait_stream(current)


def _lanes_of(caller: Any) -> tuple[Any, ...]:
    key = caller.device, caller.cuda_stream
    if key not in _lanes:
        _lanes[key] = tuple(torch.cuda.Stream(caller.device) for _ in range(LANES))  # type: ignore[no-untyped-call]
    return _lanes[key]
