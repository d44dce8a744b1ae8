"""Streams that take turns at a ring's rounds on a GPU: one begins while the last blocks of another end.

The last blocks of a kernel leave most of the chip idle, and on one stream the next kernel waits for them. Rounds need
not wait for each other where their results are only laid aside. So they take turns on two streams, the lanes;
transfers, and what is packed for them, stay on the caller's stream:

    caller    | packed, ready | post 0 | ready | wait for 0, post 1 | ready | wait for 1, post 2 | ...
    lane 0                    | round 0 .................           | round 2 ...
    lane 1                             | round 1 ............................

A round begins when the caller's stream was `ready` for it: its block is there, and whatever was laid aside before it
may be freed, which is why lanes may allocate. What a round read is written again, and what it wrote is sent, by
transfers that are posted after a `join`. Home's own work, which backward ends with, was ready with round 0: it reads
nothing that came later, and what lanes have allocated is freed where it is used, or `alone`.

Blocks of a kernel that was given to the GPU first are begun first, whatever stream they are from. A short pass over
memory would so wait for nearly all of a tile that computes beside it, and what comes after it on its stream as well. So
passes are `hurried`: in their place on a stream, but by way of another, of which the GPU takes blocks first. And a tile
is not to overtake the one before it, whose results are waited for first: a turn comes after what `begins` the last.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LANES = 2

HURRIED = -1
"""A stream's priority; that of others is 0."""

_lanes: dict[tuple[Any, ...], list[tuple[Any, Any]]] = {}
"""By the stream they serve: first itself, then its lanes, each with the stream of its hurried passes. Memory that was
allocated on a lane is kept for it."""


class _Now(threading.local):
    """Of what a thread enqueues, the lanes it is part of, its stream, and that of its hurried passes, by a number."""

    lanes: Lanes | None = None
    hurried: Any = None
    number: int = 0

    @property
    def stream(self) -> Any:
        """Where what is not hurried goes."""
        assert self.lanes is not None
        return self.lanes.streams[self.number - 1] if self.number else self.lanes.caller


_now = _Now()


class Lanes:
    """The lanes of the current stream of a GPU; without one, all that is asked of them is nothing."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.caller: Any = None if device is None else torch.cuda.current_stream(device)
        pairs = [] if device is None else _lanes_of(self.caller)
        self.streams, self._hurried = tuple(lane for lane, _ in pairs[1:]), tuple(hurried for _, hurried in pairs)
        self.turns = 0
        self._begun: Any = None
        self._joined = True

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
        number = self.turns % len(self.streams)
        self.turns += 1
        self._joined = False
        for event in (ready, self._begun) if self._begun is not None else (ready,):
            self.streams[number].wait_event(event)
        with on_stream(self.streams[number], self.caller), self._passes_on(1 + number):
            yield

    @contextlib.contextmanager
    def memory_of(self, turn: int) -> Iterator[None]:
        """What is allocated in here is from the memory of a turn that is yet to come."""
        if not self.streams:
            yield
            return
        with on_stream(self.streams[turn % len(self.streams)], self.caller):
            yield

    def gather(self) -> None:
        """What the current turn is given next comes after all turns before it."""
        for lane in self.used:
            if lane != _now.stream:
                _now.stream.wait_stream(lane)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Passes on the caller's stream while rounds compute."""
        with self._passes_on(0) if self.streams else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _passes_on(self, number: int) -> Iterator[None]:
        before = _now.lanes, _now.hurried, _now.number
        # Before the first tile there is nothing to come before; to change streams would only take time.
        waits = number > 0 and self._begun is None
        _now.lanes, _now.hurried, _now.number = self, None if waits else self._hurried[number], number
        try:
            yield
        finally:
            _now.lanes, _now.hurried, _now.number = before

    def join(self) -> None:
        """What the caller's stream is given next comes after all rounds so far."""
        for lane in self.used if not self._joined else ():
            self.caller.wait_stream(lane)
        self._joined = True

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """What is enqueued in here comes after all that any of the streams has, and before all that they get next."""
        if not self.streams:
            yield
            return
        current = torch.cuda.current_stream(self.caller.device)
        others = [stream for stream in (self.caller, *self.used) if stream != current]
        for stream in () if self._joined else others:
            current.wait_stream(stream)
        try:
            yield
        finally:
            for stream in others:
                stream.wait_stream(current)


@contextlib.contextmanager
def hurried(x: Tensor) -> Iterator[None]:
    """Passes over memory such as x. Nothing is to be allocated in here: it would belong to the other stream.

    Each change of streams takes some 5 us, which is why those in here that would hurry too stay where they are.
    """
    other = _now.hurried
    if other is None:
        yield
        return
    current = _now.stream
    other.wait_stream(current)
    _now.hurried = None
    try:
        with on_stream(other, current):
            yield
    finally:
        _now.hurried = other
        current.wait_stream(other)


def begins(x: Tensor) -> None:
    """Just before the tile of a turn, on tensors such as x."""
    if _now.lanes is not None:
        _now.lanes._begun = _now.stream.record_event()
        _now.hurried = _now.lanes._hurried[_now.number]


def capturing() -> bool:
    """Whether what is enqueued now becomes part of a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def on_stream(stream: Any, current: Any) -> Iterator[None]:
    """As `torch.cuda.stream`, for those who know the current stream and stay on its device: a third of the time."""
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(current)


def _lanes_of(caller: Any) -> list[tuple[Any, Any]]:
    key = caller.device, caller.cuda_stream
    if key not in _lanes:
        lanes = [torch.cuda.Stream(caller.device) for _ in range(LANES)]  # type: ignore[no-untyped-call]
        _lanes[key] = [
            (stream, torch.cuda.Stream(caller.device, HURRIED))  # type: ignore[no-untyped-call]
            for stream in (caller, *lanes)
        ]
    return _lanes[key]
