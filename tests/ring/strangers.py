"""Something that is no rank, where ranks meet: at a gloo port, at that of a store, or in the store's file."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.ring.listening import listening

PAIRS = 8


def damage(store: Path, chance: random.Random) -> None:
    """Garbage, or half a record, behind what ranks have written; or some of that cut off."""
    kind = chance.choice(("garbage", "half", "cut"))
    if kind == "cut":
        os.truncate(store, chance.randrange(1, max(2, store.stat().st_size)))
        return
    with store.open("ab") as file:
        file.write(chance.randbytes(64) if kind == "garbage" else struct.pack("q", 40) + b"half")


def await_store(folder: Path, seconds: float = 10.0) -> Path:
    """The file that ranks meet at, once it exists and one of them has written to it."""
    deadline = time.monotonic() + seconds
    while not (found := [path for path in folder.glob("*/store") if path.stat().st_size]):
        assert time.monotonic() < deadline, "no rank has written to the store"
        time.sleep(0.005)
    return found[0]


def await_ports(pids: Sequence[int] | None, seconds: float = 10.0) -> list[tuple[Any, int]]:
    """Where ranks wait to be connected to."""
    deadline = time.monotonic() + seconds
    while not (found := listening(pids)):
        assert time.monotonic() < deadline, "no rank listens"
        time.sleep(0.005)
    return found


def intrude(ports: Sequence[tuple[Any, int]], chance: random.Random) -> list[socket.socket]:
    """Connect to each port and say what no rank would; the connections, to be held or closed.

    gloo first reads which pair of ranks a connection is for, 8 bytes. Garbage names one that does not exist; a number
    that does takes the place of a rank.
    """
    made = []
    for address, port in ports:
        for said in chance.choice(
            ([chance.randbytes(64)], [b"\1\2\3"], [struct.pack("q", pair) for pair in range(PAIRS)])
        ):
            connection = socket.create_connection((str(address), port), timeout=5)
            connection.sendall(said)
            made.append(connection)
    return made


def late(name: str, seconds: Callable[[], float]) -> Any:
    """A patch for ranks to come: what torch.distributed calls so begins some seconds later, as each process has it."""
    original = getattr(dist, name)

    def later(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds())
        return original(*args, **kwargs)

    return mock.patch.object(dist, name, later)


@contextmanager
def no_store(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port of the loopback interface where every connection is accepted, and answered in another way than a store's.

    Connections that the answer does not close stay open.
    """
    with ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))

        def serve() -> None:
            with suppress(OSError):  # The listener is closed when the test ends.
                while True:
                    connection = held.enter_context(listener.accept()[0])
                    with suppress(OSError):
                        answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        with suppress(OSError):
            # Closing alone would leave the thread in its accept.
            listener.shutdown(socket.SHUT_RDWR)
