"""Meeting the ranks of a job at the store that torchrun's variables name, within a time of our own.

torch's client of that store waits without an end where something accepts its connection and says nothing, and tells
nobody which rank is missing. So it is asked in a thread that can be left behind, and ranks call the roll at the store.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from burst_attention.ring import RingError
from burst_attention.ring.base import DEFAULT_TIMEOUT

MOMENT_SECONDS = 0.5
"""How long after its time a rank whose store answers may still be on its way to say who is missing."""
LOOK_SECONDS = 1.0
"""How often it looks who has come, to know that also where the store ends before it does."""
ATTEMPT_SECONDS, LONGEST_ATTEMPT_SECONDS = 1.0, 4.0
"""How long torch may try at what accepts, at first and later: where that is no store, it comes back soon after."""
KNOCK_SECONDS = 0.1
# A store takes a limit of less than a millisecond for none.
SHORTEST_SECONDS = 0.01
CAME, ALL_CAME = "came", "all came"
NAMED = 4


class MeetingError(RingError):
    """A rank has not met the others in time; the message names it, the store and what was waited for."""


def meet(
    backend: str | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    rank: int | None = None,
    ranks: int | None = None,
    device_id: torch.device | None = None,
) -> None:
    """Like `torch.distributed.init_process_group` over env://, but over after `timeout` seconds whatever is there.

    Where ranks meet is in MASTER_ADDR and MASTER_PORT; `rank` and `ranks` stand for RANK and WORLD_SIZE. As torch's,
    `timeout` is also the group's own. MeetingError says who or what did not come. A thread inside torch may then be
    waiting still, so that this process cannot meet anybody any more: let it end.
    """
    if not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds above 0, got {timeout!r}")
    rank = _number("RANK") if rank is None else rank
    ranks = _number("WORLD_SIZE") if ranks is None else ranks
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be one of the {ranks} ranks 0 to {ranks - 1}, got {rank}")
    meeting = _Meeting(rank, ranks, _variable("MASTER_ADDR"), _port(), timeout)
    options = {"backend": backend, "device_id": device_id, "timeout": timedelta(seconds=timeout)}
    # A thread begins with the first GPU as its current one.
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    thread = threading.Thread(target=meeting.run, args=(options, gpu), daemon=True, name="burst-meeting")
    thread.start()
    thread.join(timeout)
    if meeting.answered:
        thread.join(MOMENT_SECONDS)
    if thread.is_alive():
        meeting.given_up = True
        atexit.register(meeting.let_end, thread)
        raise meeting.late()
    if meeting.error is not None:
        raise meeting.error


class _Meeting:
    """One rank's way to the others, in a thread: to the store, through the roll call, to the group."""

    def __init__(self, rank: int, ranks: int, address: str, port: int, seconds: float) -> None:
        self.rank, self.ranks, self.seconds = rank, ranks, seconds
        self.address, self.port = address, port
        self.deadline = time.monotonic() + seconds
        self.place, self.store_place = f"rank {rank}, rendezvous", f"{address}:{port}"
        self.answered, self.given_up = False, False
        self.error: Exception | None = None
        self.lacking = f"{self.place}: no store of torch answered at {self.store_place}"
        """What this rank is waiting for, as an error would say it."""
        self.heard = ""
        """Why the last attempt at the store failed, where it did."""
        self.returns_by = 0.0
        """When torch has come back from that attempt, if it ever does: it may pause after each time it was refused."""

    def late(self) -> MeetingError:
        """What to raise when the time is up."""
        return MeetingError(f"{self.lacking} within {self.seconds:g} s{self.heard and f' ({self.heard})'}{self._hint}")

    def let_end(self, thread: threading.Thread) -> None:
        """At exit, wait for a thread left behind that may return yet: later, while Python ends, it would abort."""
        thread.join(max(0.0, self.returns_by - time.monotonic()))

    @property
    def _hint(self) -> str:
        return "" if self.answered else "; see that rank 0, or torchrun, serves there and no other program does"

    def run(self, options: dict[str, Any], gpu: int | None) -> None:
        """Form the group, or keep why it cannot be."""
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            store = self._store()
            if self._agent_serves():
                # As torch has it: ranks that torchrun starts again must not find what the ones before have left.
                attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                store = dist.PrefixStore(f"/worker/attempt_{attempt}", store)  # type: ignore[attr-defined]
            self.answered = True
            self._call_the_roll(dist.PrefixStore("burst-meeting", store))  # type: ignore[attr-defined]
            self.lacking = f"{self.place}: all {self.ranks} ranks came to {self.store_place}, and were not connected"
            if not self.given_up:
                group = dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]
                dist.init_process_group(**options, store=group, rank=self.rank, world_size=self.ranks)
        except MeetingError as error:
            self.error = error
        except RuntimeError as error:
            self.error = MeetingError(f"{self.lacking}: {_first_line(error)}{self._hint}")
            self.error.__cause__ = error
        except Exception as error:
            self.error = error

    def _store(self) -> Any:
        """The store, once it answers."""
        if self._serves():
            return self._torch_store(self.seconds)
        longest = ATTEMPT_SECONDS
        while (left := self._left()) > 0:
            self._knock()
            seconds, longest = min(left, longest), min(2 * longest, LONGEST_ATTEMPT_SECONDS)
            self.returns_by = time.monotonic() + 2 * seconds + 1
            try:
                store = self._torch_store(seconds)
            except dist.DistNetworkError as error:
                self.heard = _first_line(error)
            else:
                store.set_timeout(timedelta(seconds=self.seconds))
                self.heard = ""
                return store
        raise self.late()

    def _left(self) -> float:
        return 0.0 if self.given_up else self.deadline - time.monotonic()

    def _knock(self) -> None:
        """Return when something accepts there. Often rank 0 only starts later; torch would tell of each attempt."""
        while (left := self._left()) > 0:
            try:
                socket.create_connection((self.address, self.port), timeout=left).close()
                return
            except OSError as error:
                self.heard = _first_line(error)
                time.sleep(max(min(KNOCK_SECONDS, self._left()), 0.0))
        raise self.late()

    def _serves(self) -> bool:
        """Whether the store is this rank's own."""
        return self.rank == 0 and not self._agent_serves()

    def _agent_serves(self) -> bool:
        """Whether torchrun's agent says that it serves a store itself."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def _torch_store(self, seconds: float) -> Any:
        """As torch's env:// has it, but nobody is waited for: the roll call does that, and knows names."""
        return dist.TCPStore(  # type: ignore[attr-defined]
            self.address,
            self.port,
            self.ranks,
            is_master=self._serves(),
            timeout=timedelta(seconds=max(seconds, SHORTEST_SECONDS)),
            wait_for_workers=False,
            # So that a process which meets again on the same port finds the server that it has.
            multi_tenant=True,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )

    def _call_the_roll(self, store: Any) -> None:
        store.append(CAME, f"{self.rank} ")
        while absent := self._absent(store):
            self.lacking = f"{self.place}: {absent} did not come to {self.store_place}"
            if (left := self._left()) <= 0:
                raise self.late()
            with contextlib.suppress(dist.DistStoreError):  # Nobody else came meanwhile.
                store.wait([ALL_CAME], timedelta(seconds=max(min(left, LOOK_SECONDS), SHORTEST_SECONDS)))
        store.set(ALL_CAME, "")

    def _absent(self, store: Any) -> str:
        """Who is missing, in words; empty where nobody is. One question, however many ranks there are."""
        came = {int(word) for word in store.get(CAME).split()}
        away = [f"rank {peer}" for peer in range(self.ranks) if peer not in came]
        more = [f"{len(away) - NAMED} more ranks"] if len(away) > NAMED else []
        return " and ".join(away[:NAMED] + more)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ValueError(f"{name} is not in the environment; start the ranks with torchrun, or set it")
    return value


def _number(name: str) -> int:
    value = _variable(name)
    if not value.isdecimal():
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return int(value)


def _port() -> int:
    port = _number("MASTER_PORT")
    if not 0 < port < 1 << 16:
        raise ValueError(f"MASTER_PORT must be a port from 1 to 65535, got {port}")
    return port
