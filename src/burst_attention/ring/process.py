"""A ring over torch.distributed: data on the caller's group, control records on a gloo group of its own."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import socket
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from burst_attention.ring.base import (
    _RINGS,
    DEFAULT_TIMEOUT,
    LANES,
    RECORD_BYTES,
    Inbox,
    Parcel,
    Pending,
    Ring,
    RingError,
)

CAUSE_SECONDS = 0.5

# The control thread's receive must never time out: gloo closes every connection of a group when one wait does.
_FOREVER = timedelta(days=365)
_MOMENT = timedelta(seconds=1)
HOST_BYTES = 128
CONTROL_TAG, UNUSED_TAG = 0, 99
"""Of records on the control group, and of a message there that nobody sends."""
FIRST_TAG, CHANNEL_TAGS = 1 << 30, 1 << 28
"""Of blocks: four channels' worth, up to the last tag that gloo takes."""


_MESH_GROUPS: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""By a mesh's shape and ranks: the world it was made in, and its group."""


class ProcessRing(Ring):
    """One process's place in a ring over a torch.distributed group."""

    # A peer that has ended may have sent its last blocks before; the data connection itself says when it broke.
    _left_means_no_data = False

    def __init__(self, name: str, group: Any, timeout: float) -> None:
        size = dist.get_world_size(group)
        super().__init__(name, dist.get_rank(group), size, timeout, Inbox())
        self._group = group
        self._control_sends: deque[tuple[Any, torch.Tensor]] = deque(maxlen=4 * size)
        self._posted: list[queue.SimpleQueue[Pending | None]] = [queue.SimpleQueue() for _ in range(LANES)]
        self._lane_groups: list[Any] = [group]
        self._numbers: Counter[tuple[str, int, int]] = Counter()
        if size == 1:
            return
        ranks = dist.get_process_group_ranks(group)
        # Members only: other ranks of the world need not take part.
        limit = timedelta(seconds=timeout)
        came = _RollCall(name, self.rank)
        try:
            self._control: Any = dist.new_group(ranks, timeout=limit, backend="gloo", use_local_synchronization=True)
            self.hosts = _hosts_of(self._control, size, limit)
        except RuntimeError as error:
            reason = came.absent(size) or str(error).splitlines()[0]
            raise RingError(f"rank {self.rank}: no ring of {size} ranks within {timeout:g} s: {reason}") from error
        peers = [peer for peer in range(size) if peer != self.rank]
        listeners = {peer: _start_daemon(_listen, self._control, peer, self._inbox) for peer in peers}
        weakref.finalize(self, _end_listeners, self._control, self._control_sends, listeners)
        for posted in self._posted:
            completer = _start_daemon(_complete, posted, self._inbox)
            weakref.finalize(self, posted.put, None)
            atexit.register(_end_completer, group, posted, dict.fromkeys(peers, completer))

    def _start(self, pending: Pending) -> None:
        if any(parcel.tensor.is_cuda for parcel in (*pending.receives, *pending.sends)):
            self._start_on_gpu(pending)
            return
        # Receives first, so that a message which arrives early lands in place.
        for start, end, parcels in (("irecv", "group_src", pending.receives), ("isend", "group_dst", pending.sends)):
            for parcel in parcels:
                ends = {"group": self._group, end: parcel.peer, "tag": self._tag(parcel, start)}
                try:
                    pending.works.append((parcel, getattr(dist, start)(parcel.tensor, **ends)))
                except RuntimeError as error:
                    # The peer ended while this rank was computing.
                    raise self._broken(pending, parcel, error) from error
        if pending.works:
            self._posted[pending.lane].put(pending)

    def _tag(self, parcel: Parcel, start: str) -> int:
        """What a message and its receive have in common: channel, number there, and size.

        So gloo never brings one of another size to a receive: it would take a shorter one as if it were whole, and end
        the process at a longer one. Both ends time out instead.
        """
        key = (start, parcel.peer, parcel.channel)
        self._numbers[key] += 1
        digest = zlib.crc32(f"{self._numbers[key]} {parcel.tensor.nbytes}".encode()) % CHANNEL_TAGS
        return FIRST_TAG + parcel.channel * CHANNEL_TAGS + digest

    def _start_on_gpu(self, pending: Pending) -> None:
        """One group of transfers: posted one by one, a receive would keep NCCL's stream from the send it waits for.

        NCCL's own stream begins when all that is enqueued now is done, and runs beside what is enqueued next.
        """
        group = self._lane_groups[pending.lane]
        operations = [dist.P2POp(dist.irecv, p.tensor, group=group, group_peer=p.peer) for p in pending.receives]
        operations += [dist.P2POp(dist.isend, p.tensor, group=group, group_peer=p.peer) for p in pending.sends]
        pending.grouped = dist.batch_isend_irecv(operations)

    def open_lanes(self, device: torch.device) -> None:
        """NCCL runs a communicator's transfers one after the other, so each lane has one of its own."""
        while device.type == "cuda" and len(self._lane_groups) < LANES:
            ranks = dist.get_process_group_ranks(self._group)
            # NCCL's watchdog aborts a communicator whose transfer takes longer than its group's timeout.
            limit = timedelta(seconds=self.timeout)
            self._lane_groups.append(dist.new_group(ranks, timeout=limit, use_local_synchronization=True))

    def _finish(self, pending: Pending) -> None:
        if pending.grouped:
            # The device waits, not the host: an error shows at the next agreement, or by NCCL's own watchdog.
            for work in pending.grouped:
                work.wait()
            return

        def unfinished() -> list[int]:
            if pending.done:
                return []
            late = [parcel.peer for parcel, work in pending.works if not work.is_completed()]
            return late or [parcel.peer for parcel, _ in pending.works]

        def describe(peer: int) -> str:
            parcels = [parcel for parcel, work in pending.works if parcel.peer == peer and not work.is_completed()]
            if not parcels:
                return f"transfer with rank {peer}"
            block = f"{parcels[0].what} of {parcels[0].tensor.nbytes} bytes"
            return (
                f"no {block} from rank {peer}"
                if parcels[0] in pending.receives
                else f"rank {peer} does not take {block}"
            )

        self._await(unfinished, describe, pending.where)
        if pending.error is not None:
            raise self._broken(pending, *pending.error)

    def _broken(self, pending: Pending, parcel: Parcel, error: Exception) -> RingError:
        """A connection that failed, by the names of those at its ends and, where it is known, of what ended it."""
        cause = self._cause_within(CAUSE_SECONDS) or f"the connection failed: {error}"
        return RingError(f"rank {self.rank}, {pending.where}: {parcel.what} with rank {parcel.peer}: {cause}")

    def _cause_within(self, seconds: float) -> str | None:
        """A connection that breaks is often the end of a rank that has told why: its words may be a moment behind."""
        with self._inbox.changed:
            self._inbox.changed.wait_for(lambda: self._inbox.failure is not None, timeout=seconds)
            return self._inbox.failure

    def _send_control(self, peer: int, data: bytes) -> None:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        try:
            self._control_sends.append((self._control.send([buffer], peer, CONTROL_TAG), buffer))
        except RuntimeError as error:
            self._inbox.leave(peer, f"its control connection is closed ({error})")


class _RollCall:
    """Who came to make a ring, in the store that the world met at: gloo does not say whom it waited for."""

    def __init__(self, name: str, rank: int) -> None:
        find = getattr(dist.distributed_c10d, "_get_default_store", None)
        self._store = dist.distributed_c10d.PrefixStore(f"burst-{name}", find()) if find else None
        if self._store:
            self._store.set(str(rank), "here")

    def absent(self, size: int) -> str:
        """Those who did not come, in words; empty where all did, or where the store does not answer in a moment."""
        away: list[int] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                away.extend(peer for peer in range(size) if self._store and not self._store.check([str(peer)]))

        _start_daemon(ask).join(_MOMENT.total_seconds())
        return ", ".join(f"rank {peer} did not come" for peer in away)


def _hosts_of(control: Any, size: int, limit: timedelta) -> tuple[str, ...]:
    """The host of each rank: its name and the address of its network, for containers may share a name."""
    mine = torch.zeros(HOST_BYTES, dtype=torch.uint8)
    name = host_identity().encode()[:HOST_BYTES]
    mine[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    found = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(found, mine, group=control, async_op=True).wait(limit)
    return tuple(bytes(data.tolist()).rstrip(b"\0").decode(errors="replace") for data in found)


def host_identity() -> str:
    """What ranks of one host have in common: its name, and on Linux the network namespace they are in."""
    try:
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()


def group_of_mesh(mesh: Any) -> Any:
    """The group of all ranks of a mesh of two dimensions, row by row; made once for a mesh of that shape.

    Never the world's own: a ring over that knows its hosts otherwise.
    """
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(
            f"a group numbers its ranks in ascending order, and the mesh has {mesh.mesh.tolist()}; make one whose "
            "ranks ascend row by row"
        )
    key, world = (*mesh.mesh.shape, *ranks), dist.group.WORLD
    made = _MESH_GROUPS.get(key)
    if made is None or made[0] is not world:
        made = _MESH_GROUPS[key] = world, dist.new_group(ranks, use_local_synchronization=True)
    return made[1]


def ring_from_group(group: Any, timeout: float | None) -> Ring:
    """One ring per group: asking again gives the same ring while it lives."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "Ring.from_group needs torch.distributed: call torch.distributed.init_process_group() first, "
            "or use run_ranks() for a ring of threads in one process"
        )
    group = dist.group.WORLD if group is None else group
    if not hasattr(group, "group_name"):
        raise ValueError("this process is not a member of the group; only members make a ring over it")
    name = f"group-{group.group_name}"
    ring = _RINGS.get(name)
    if ring is None:
        return ProcessRing(name, group, DEFAULT_TIMEOUT if timeout is None else timeout)
    if ring.failure is not None:
        raise RuntimeError(
            f"the ring over this group failed earlier and its messages are lost; make a new group with "
            f"torch.distributed.new_group() and a ring over that ({ring.failure})"
        )
    if timeout is not None:
        ring.timeout = timeout
    return ring


def _start_daemon(target: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True, name=f"burst-ring{target.__name__}")
    thread.start()
    return thread


def _end_listeners(control: Any, sends: deque[Any], listeners: dict[int, threading.Thread]) -> None:
    """Close the control connections when the ring or the process ends."""
    with contextlib.suppress(RuntimeError):
        # What this rank has told the others goes first.
        for work, _ in sends:
            work.wait(_MOMENT)
    _end_threads(control, listeners)


def _end_completer(
    group: Any, posted: queue.SimpleQueue[Pending | None], completers: dict[int, threading.Thread]
) -> None:
    """When the process ends: a transfer still waits only where the ring has failed."""
    posted.put(None)
    next(iter(completers.values())).join(CAUSE_SECONDS)
    _end_threads(group, completers)


def _end_threads(group: Any, by_peer: dict[int, threading.Thread]) -> None:
    """Let no thread wait inside gloo: one that is there while Python ends takes the process down, as if it had failed.

    What breaks its wait is a wait of our own that times out: gloo then closes every connection of the group. Where the
    peer has gone, ours fails before its time and closes that connection only.
    """
    for peer, thread in by_peer.items():
        with contextlib.suppress(RuntimeError):
            if thread.is_alive():
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))
        thread.join(_MOMENT.total_seconds())


def _listen(group: Any, peer: int, inbox: Inbox) -> None:
    """Receive one peer's records until its connection ends: a thread each, so that a closed one has a name."""
    buffer = torch.empty(RECORD_BYTES, dtype=torch.uint8)
    while True:
        try:
            group.recv([buffer], peer, CONTROL_TAG).wait(_FOREVER)
        except Exception as error:
            inbox.leave(peer, f"its control connection closed ({str(error).splitlines()[0]})")
            return
        inbox.deliver(peer, bytes(buffer.tolist()))


def _complete(posted: queue.SimpleQueue[Pending | None], inbox: Inbox) -> None:
    """Wait for transfers in the order they were posted, so that the caller's thread can watch the control channel."""
    while _complete_one(posted.get(), inbox):
        pass


def _complete_one(pending: Pending | None, inbox: Inbox) -> bool:
    """Wait for one post; its buffers must not stay alive here while the thread waits for the next."""
    if pending is None:
        return False
    for parcel, work in pending.works:
        try:
            # The ring's own timeout bounds it, and says who is late; the group's may be as short.
            work.wait(_FOREVER)
        except Exception as error:
            pending.error = parcel, error
            break
    pending.done_at = time.perf_counter()
    with inbox.changed:
        pending.done = True
        inbox.changed.notify_all()
    return True
