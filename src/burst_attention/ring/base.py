"""The ring in three verbs: `post` and `wait` move bundles, `exchange` tells every rank a small record first.

A ring knows tensors and peers, nothing of attention. Its control channel lives on the CPU beside the data: records of
a fixed size, as JSON text, never unpickled. Every host wait also watches that channel, so a rank that fails, or that
entered another call, is heard by the others at once and by name instead of leaving them to hang.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

RECORD_BYTES = 1024
LANES, CHANNELS_PER_LANE = 2, 2
DEFAULT_TIMEOUT = 600.0

_RINGS: weakref.WeakValueDictionary[str, Ring] = weakref.WeakValueDictionary()


class RingError(RuntimeError):
    """A rank failed, left or stayed silent; the message names the rank, the round and the peer."""


@dataclass(frozen=True)
class Parcel:
    """One contiguous tensor to send to, or receive from, a peer. `what` names it in errors."""

    peer: int
    channel: int
    """Between two ranks each channel keeps its order; two and two share a lane."""
    tensor: Tensor
    what: str


@dataclass
class Pending:
    """Transfers under way: what `post` gives and `wait` takes."""

    sends: Sequence[Parcel]
    receives: Sequence[Parcel]
    where: str
    works: list[tuple[Parcel, Any]] = field(default_factory=list)
    numbers: Sequence[int] = ()
    """Between threads, of each receive: the how-manieth it is from that rank on that channel."""
    posted: Any = None
    """Between threads on a GPU, the event of the moment it was posted."""
    grouped: Sequence[Any] = ()
    """Over NCCL, what the device is to wait for."""
    done: bool = False
    posted_at: float = 0.0
    done_at: float = 0.0
    error: tuple[Parcel, Exception] | None = None

    @property
    def lane(self) -> int:
        """Transfers of one lane complete in the order they were posted; another lane does not wait for them."""
        return next((parcel.channel // CHANNELS_PER_LANE for parcel in (*self.sends, *self.receives)), 0)


@dataclass(frozen=True)
class TransferTime:
    """Transfers that were posted together: from when to when they were under way, and their bytes."""

    posted: float
    done: float
    sent_bytes: int
    received_bytes: int
    sent_between: int
    received_between: int
    """Of these bytes, those to and from ranks of other hosts."""


@dataclass(frozen=True)
class TraceEvent:
    """One round on one rank: seconds spent computing, and then waiting for transfers; and those that ended with it."""

    phase: str
    round: int
    blocks: tuple[int, ...]
    started: float
    compute: float
    waited_from: float
    wait: float
    transfers: tuple[TransferTime, ...] = ()
    group: int = 0
    """Of heads, where they are computed in groups."""


class Inbox:
    """What has reached a rank on its control channel; every change wakes whoever waits."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.records: dict[int, dict[int, dict[str, Any]]] = {}
        self.failure: str | None = None
        self.left: dict[int, str] = {}

    def deliver(self, source: int, data: bytes) -> None:
        """Take in one record from a peer."""
        try:
            record = json.loads(data.rstrip(b"\0 ").decode())
            kind, call = record["kind"], int(record["call"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            kind, call, record = "abort", 0, {"message": f"rank {source} sent a control record that cannot be read"}
        with self.changed:
            if kind == "abort":
                self.failure = self.failure or str(record.get("message"))
            else:
                self.records.setdefault(call, {})[source] = record
            self.changed.notify_all()

    def leave(self, rank: int, reason: str) -> None:
        """Note that a peer will send nothing more."""
        with self.changed:
            self.left[rank] = reason
            self.changed.notify_all()


class Ring(ABC):
    """W ranks that pass blocks around. Make one with `Ring.from_group`, `Ring.from_mesh` or `run_ranks`."""

    _left_means_no_data = True

    def __init__(self, name: str, rank: int, size: int, timeout: float, inbox: Inbox) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.hosts: tuple[str, ...] = ("",) * size
        """The host of each rank."""
        self.timeout = timeout
        self.bytes_sent = 0
        """Bytes of the tensors handed to the transport, counted there."""
        self.control_bytes = 0
        """Bytes of the records sent on the control channel."""
        self.agreed: dict[Any, Any] = {}
        """What earlier exchanges settled, for calls that check only once."""
        self.trace: list[TraceEvent] | None = None
        """A list that every round's times are appended to; None keeps none. `trace.py` draws it."""
        self.failed_first = False
        """Whether this rank broke the ring, rather than hearing that another did."""
        self._inbox = inbox
        self._call = 0
        _RINGS[name] = self

    @staticmethod
    def from_group(group: Any = None, *, timeout: float | None = None, trace: bool = False) -> Ring:
        """The ring over a torch.distributed group (default: the world). Collective over the group on first use.

        Asking again gives the same ring. `timeout` bounds every wait in seconds; None keeps what it is, 600 at first.
        With `trace` every round's times are kept in `ring.trace`.
        """
        from burst_attention.ring.process import ring_from_group

        ring = ring_from_group(group, timeout)
        if trace and ring.trace is None:
            ring.trace = []
        return ring

    @staticmethod
    def from_mesh(mesh: Any, *, hosts: str | None = None, timeout: float | None = None, trace: bool = False) -> Ring:
        """The ring over a one-dimensional DeviceMesh, such as `mesh["cp"]`, or over two axes of one.

        With two, `hosts` names the first: it goes from host to host, the second over the ranks of each, whatever the
        machines are. It must be named, for a ring over a data-parallel axis would mix sequences.
        """
        if mesh.ndim == 1 and hosts is None:
            return Ring.from_group(mesh.get_group(), timeout=timeout, trace=trace)
        names = tuple(mesh.mesh_dim_names or ())
        if mesh.ndim != 2 or hosts is None or names[:1] != (hosts,):
            raise ValueError(
                f"a ring needs a mesh of one dimension, or of two with hosts= naming the first, got {mesh.ndim} "
                f"({names}) and hosts={hosts!r}; choose the axes, e.g. Ring.from_mesh(mesh['cp'])"
            )
        from burst_attention.ring.process import group_of_mesh

        ring = Ring.from_group(group_of_mesh(mesh), timeout=timeout, trace=trace)
        ring.hosts = tuple(str(host) for host, row in enumerate(mesh.mesh.tolist()) for _ in row)
        return ring

    def ranks_per_host(self) -> int:
        """How many ranks every host has; ValueError where hosts differ or ranks are not numbered host by host."""
        names = list(dict.fromkeys(self.hosts))
        counts = [self.hosts.count(name) for name in names]
        if len(set(counts)) > 1:
            held = ", ".join(f"{count} on {name or 'this host'}" for name, count in zip(names, counts, strict=True))
            raise ValueError(f"a double ring needs as many ranks on every host, got {held}; use topology='flat'")
        if self.hosts != tuple(name for name in names for _ in range(counts[0])):
            raise ValueError(
                "a double ring needs ranks numbered host by host, and here hosts take turns; order the ranks of the "
                "group by host, or use topology='flat'"
            )
        return counts[0]

    @property
    def failure(self) -> str | None:
        """Why this ring cannot be used any more; None while it can."""
        return self._inbox.failure

    def next_call(self) -> int:
        """Start a call: all ranks number their calls alike, so records of different calls cannot be confused."""
        if self.failure is not None:
            raise RingError(
                f"rank {self.rank}: this ring failed earlier and cannot be used again; make a new one, over a new "
                f"group ({self.failure})"
            )
        self._call += 1
        return self._call

    def buffer(self, nbytes: int, device: torch.device, what: str) -> Tensor:
        """Memory for blocks that travel; `what` says which, such as "forward operand"."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def open_lanes(self, device: torch.device) -> None:  # noqa: B027
        """Make ready for transfers that overtake others; collective, where the transport must prepare for it."""

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel], where: str) -> Pending:
        """Start transfers and return at once; buffers belong to the ring until `wait` returns."""
        for parcel in (*sends, *receives):
            assert parcel.tensor.is_contiguous(), f"{parcel.what}: a parcel must be contiguous"
        self.bytes_sent += sum(parcel.tensor.nbytes for parcel in sends)
        pending = Pending(sends, receives, where, posted_at=time.perf_counter())
        self._start(pending)
        return pending

    def exchange(self, record: dict[str, Any], where: str) -> list[dict[str, Any]]:
        """Give every rank this call's record and return all of them in rank order."""
        record = {**record, "kind": "call", "call": self._call}
        data = self._tell_all(record)
        inbox, call = self._inbox, self._call

        def silent() -> list[int]:
            return [peer for peer in range(self.size) if peer != self.rank and peer not in inbox.records.get(call, {})]

        self._await(silent, lambda peer: f"no record of call {call} from rank {peer}", where, exchanging=True)
        with inbox.changed:
            records = inbox.records.pop(call, {})
        # Its own record as the others read it, so that all ranks judge the same words.
        records[self.rank] = json.loads(data)
        return [records[peer] for peer in range(self.size)]

    def abort(self, message: str) -> None:
        """Tell every rank that this one cannot go on; the ring is unusable from here."""
        with self._inbox.changed:
            if self._inbox.failure is not None:
                return
            self._inbox.failure = message
        self.failed_first = True
        self._tell_all({"kind": "abort", "call": self._call, "message": message})

    def fail(self, where: str, error: BaseException) -> None:
        """Tell every rank where and why this one's work ended."""
        self.abort(f"rank {self.rank} failed in {where}: {type(error).__name__}: {error}")

    def wait(self, pending: Pending) -> None:
        """Return when everything posted has been sent and received; raise RingError when it cannot be."""
        if not pending.sends and not pending.receives:
            return
        self._finish(pending)
        pending.done_at = pending.done_at or time.perf_counter()

    def time_of(self, pending: Pending) -> TransferTime:
        """When transfers were under way; on a GPU, until the host had told the device to wait for them."""
        sizes = [
            sum(parcel.tensor.nbytes for parcel in end if anywhere or self.hosts[parcel.peer] != self.hosts[self.rank])
            for anywhere in (True, False)
            for end in (pending.sends, pending.receives)
        ]
        return TransferTime(pending.posted_at, pending.done_at, *sizes)

    def _tell_all(self, record: dict[str, Any]) -> bytes:
        data = encode_record(record)
        for peer in range(self.size):
            if peer != self.rank:
                self.control_bytes += len(data)
                self._send_control(peer, data)
        return data

    def _await(
        self, missing: Callable[[], list[int]], describe: Callable[[int], str], where: str, exchanging: bool = False
    ) -> None:
        """Wait until no peer is missing, watching for aborts, for peers that left, and for the time."""
        inbox, deadline = self._inbox, time.monotonic() + self.timeout
        place = f"rank {self.rank}, {where}"
        with inbox.changed:
            while peers := missing():
                if inbox.failure is not None:
                    raise RingError(f"{place}: {describe(peers[0])}: {inbox.failure}")
                watched = exchanging or self._left_means_no_data
                gone = [peer for peer in peers if watched and peer in inbox.left]
                if gone:
                    raise RingError(f"{place}: {describe(gone[0])}: {inbox.left[gone[0]]}")
                if not exchanging:
                    self._raise_unexpected(place)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise RingError(f"{place}: {describe(peers[0])} within {self.timeout:g} s")
                inbox.changed.wait(min(remaining, 1.0))

    def _raise_unexpected(self, place: str) -> None:
        """A record of this call or an earlier one, outside an exchange: a peer checks, and this rank does not."""
        for call in sorted(self._inbox.records):
            if call <= self._call:
                peer, record = next(iter(self._inbox.records[call].items()))
                reason = record.get("error") or "it entered a call that differs from the agreed one"
                raise RingError(f"{place}: rank {peer} does not follow: {reason}")

    @abstractmethod
    def _start(self, pending: Pending) -> None:
        """Begin the transfers of `pending`."""

    @abstractmethod
    def _finish(self, pending: Pending) -> None:
        """Block until they are complete."""

    @abstractmethod
    def _send_control(self, peer: int, data: bytes) -> None:
        """Send one encoded record; must not block on the peer."""


def ring_named(name: str) -> Ring:
    """The live ring of that name."""
    ring = _RINGS.get(name)
    if ring is None:
        raise RuntimeError(f"ring {name!r} no longer exists; keep the ring alive until backward has run")
    return ring


def encode_record(record: dict[str, Any]) -> bytes:
    """JSON text padded to RECORD_BYTES; texts that do not fit lose their middle, longest first."""
    record = dict(record)
    while len(data := json.dumps(record).encode()) > RECORD_BYTES:
        longest = max((key for key in record if isinstance(record[key], str)), key=lambda key: len(record[key]))
        text = record[longest]
        assert len(text) > 8, "a control record holds too many fields"
        record[longest] = f"{text[: len(text) // 2 - 3]}...{text[-(len(text) // 4) :]}"
    return data.ljust(RECORD_BYTES)
