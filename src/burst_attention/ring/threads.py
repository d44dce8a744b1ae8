"""A ring of threads in one process: the same engine and the same contracts, without processes or ports."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from burst_attention.lanes import HURRIED
from burst_attention.ring.base import DEFAULT_TIMEOUT, Inbox, Parcel, Pending, Ring, RingError

Result = TypeVar("Result")
_ring_numbers = itertools.count()


@dataclass
class _Letter:
    tensor: Tensor
    taken: bool = False
    ready: Any = None
    """On a GPU, the event after which the tensor may be read."""
    copied: Any = None
    """On a GPU, the event after which it may be written again."""


class ThreadRing(Ring):
    """One thread's place in a ring of threads; each waits on its own condition, so a letter wakes its reader only."""

    def __init__(self, name: str, rank: int, ranks: list[ThreadRing], size: int, timeout: float) -> None:
        super().__init__(name, rank, size, timeout, Inbox())
        self._ranks = ranks
        self._letters: dict[tuple[int, int, int], _Letter] = {}
        """By rank, channel and number: sends and receives match in the order they were posted, however they end."""
        self._sent: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(itertools.count)
        self._expected: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(itertools.count)
        self._copy_stream: Any = None

    def _start(self, pending: Pending) -> None:
        if any(parcel.tensor.is_cuda for parcel in (*pending.sends, *pending.receives)):
            # What is sent has been computed, and what is received into has been read, by all that is enqueued so far.
            pending.posted = torch.cuda.current_stream().record_event()
        for parcel in pending.sends:
            letter = _Letter(parcel.tensor, ready=pending.posted)
            pending.works.append((parcel, letter))
            reader, number = self._ranks[parcel.peer], next(self._sent[parcel.peer, parcel.channel])
            with reader._inbox.changed:
                reader._letters[self.rank, parcel.channel, number] = letter
                reader._inbox.changed.notify_all()
        pending.numbers = [next(self._expected[parcel.peer, parcel.channel]) for parcel in pending.receives]

    def _finish(self, pending: Pending) -> None:
        for parcel, number in zip(pending.receives, pending.numbers, strict=True):
            self._receive(parcel, number, pending)
        letters = pending.works

        def untaken() -> list[int]:
            return [parcel.peer for parcel, letter in letters if not letter.taken]

        def describe(peer: int) -> str:
            return f"rank {peer} does not take {next(parcel.what for parcel, _ in letters if parcel.peer == peer)}"

        self._await(untaken, describe, pending.where)
        for _, letter in letters:
            if letter.copied is not None:
                torch.cuda.current_stream().wait_event(letter.copied)

    def _receive(self, parcel: Parcel, number: int, pending: Pending) -> None:
        where, key = pending.where, (parcel.peer, parcel.channel, number)

        def missing() -> list[int]:
            return [] if key in self._letters else [parcel.peer]

        self._await(missing, lambda peer: f"no {parcel.what} from rank {peer}", where)
        letter = self._letters.pop(key)
        if letter.tensor.nbytes != parcel.tensor.nbytes:
            raise RingError(
                f"rank {self.rank}, {where}: {parcel.what} from rank {parcel.peer} has {letter.tensor.nbytes} bytes, "
                f"{parcel.tensor.nbytes} were planned"
            )
        # Copied here, by the receiver: the sender may reuse its buffer once the letter is taken.
        if parcel.tensor.is_cuda:
            self._copy_on_gpu(parcel.tensor, letter, pending)
        else:
            parcel.tensor.copy_(letter.tensor)
        writer = self._ranks[parcel.peer]
        with writer._inbox.changed:
            letter.taken = True
            writer._inbox.changed.notify_all()

    def _copy_on_gpu(self, target: Tensor, letter: _Letter, pending: Pending) -> None:
        """Copy on a stream of its own, beside what this rank computes; the rank's stream waits for the end of it."""
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(target.device, HURRIED)  # type: ignore[no-untyped-call]
        for event in (letter.ready, pending.posted):
            self._copy_stream.wait_event(event)
        with torch.cuda.stream(self._copy_stream):
            target.copy_(letter.tensor)
        letter.copied = self._copy_stream.record_event()
        torch.cuda.current_stream().wait_event(letter.copied)

    def _send_control(self, peer: int, data: bytes) -> None:
        self._ranks[peer]._inbox.deliver(self.rank, data)


def thread_rings(size: int, timeout: float) -> list[ThreadRing]:
    """The places of a new ring, in rank order."""
    number = next(_ring_numbers)
    rings: list[ThreadRing] = []
    rings.extend(ThreadRing(f"threads-{number}-{rank}", rank, rings, size, timeout) for rank in range(size))
    return rings


def run_ranks(
    fn: Callable[[Ring], Result], ring_size: int, *, timeout: float = DEFAULT_TIMEOUT, ranks_per_host: int | None = None
) -> list[Result]:
    """Run `fn(ring)` on `ring_size` threads and return the results in rank order.

    Grad mode, inference mode, autocast, the default device and the current CUDA device carry over into the threads. The
    first error of any rank is raised here, after the others have been told and have ended; `timeout` bounds every wait
    inside the ring. Where CUDA is in use each rank has a stream of its own, and the caller's waits for them all. With
    `ranks_per_host` the ring takes them for ranks of several hosts, as a double ring has.
    """
    if ring_size < 1:
        raise ValueError(f"ring_size must be at least 1, got {ring_size}")
    rings = thread_rings(ring_size, timeout)
    for ring in rings:
        ring.hosts = tuple(str(rank // (ranks_per_host or ring_size)) for rank in range(ring_size))
    results: list[Any] = [None] * ring_size
    errors: list[tuple[int, BaseException]] = []
    context = _capture_context()

    def leave(rank: int, reason: str) -> None:
        for ring in rings:
            ring._inbox.leave(rank, reason)

    streams = _rank_streams(ring_size)

    def body(rank: int) -> None:
        try:
            with context(), torch.cuda.stream(streams[rank]):
                results[rank] = fn(rings[rank])
            leave(rank, f"rank {rank} has returned")
        except BaseException as error:
            errors.append((rank, error))
            leave(rank, f"rank {rank} raised {type(error).__name__}: {error}")

    threads = [threading.Thread(target=body, args=(rank,), name=f"ring-rank-{rank}") for rank in range(ring_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for stream in streams:
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
    if errors:
        # The cause, not what other ranks raised because of it, whoever was quicker to end.
        raise min(errors, key=lambda at: (isinstance(at[1], RingError), not rings[at[0]].failed_first))[1]
    return results


def _rank_streams(ring_size: int) -> list[Any]:
    """A stream per rank of the current GPU where CUDA is in use, behind all that the caller gave it; else nothing."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return [None] * ring_size
    streams = [torch.cuda.Stream() for _ in range(ring_size)]  # type: ignore[no-untyped-call]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    return streams


def _capture_context() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """The caller's thread-local torch settings, to be entered in each rank's thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    autocast = {name: (torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in devices}
    cuda_device = torch.cuda.current_device() if torch.cuda.is_available() else None
    default_device = torch.get_default_device()

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            # A backward that blocks on other ranks must run in this thread, not in a device thread they share. After
            # inference mode, which turns it on again.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(torch.set_grad_enabled(grad))
            for name, (enabled, dtype) in autocast.items():
                stack.enter_context(torch.autocast(name, dtype=dtype, enabled=enabled))
            if cuda_device is not None:
                torch.cuda.set_device(cuda_device)
            if default_device.type != "cpu":
                stack.enter_context(default_device)
            yield

    return enter
