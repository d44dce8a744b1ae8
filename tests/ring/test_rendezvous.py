"""Ranks that do not meet, and strangers where they do: an error with a name within the timeout, never a hang."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from burst_attention import Ring
from burst_attention.launch import LOOPBACK, STUCK_SECONDS, RankFailedError, run_entered, run_processes
from tests.ring.fault_injection import step
from tests.ring.listening import listening
from tests.ring.strangers import await_ports, await_store, late

RING_TIMEOUT = 1.5
SLACK = 6.0
"""Seconds that a busy machine may add to a timeout; a run that hangs takes 30."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="sockets are looked up in /proc")


def run(
    enter: Callable[[int], None] = lambda rank: None,
    meanwhile: Callable[[list[Any]], None] | None = None,
    body: Callable[[Ring], Any] = step,
) -> tuple[list[Any] | dict[int, str], float]:
    """Three ranks on the loopback interface: their results, or their errors, and the seconds it took."""

    def begin(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
        enter(rank)

    started, ended = time.monotonic(), {"timeout": 30.0, "ring_timeout": RING_TIMEOUT}
    try:
        found: Any = run_entered(body, 3, begin, threads=1, meanwhile=meanwhile, **ended)  # type: ignore[arg-type]
    except RankFailedError as error:
        found = error.errors
    assert multiprocessing.active_children() == []
    return found, time.monotonic() - started


def test_a_rank_that_does_not_come_is_named() -> None:
    def enter(rank: int) -> None:
        if rank == 1:
            raise OSError("no such host")

    errors, seconds = run(enter)
    missing = f"did not come within {RING_TIMEOUT:g} s"
    assert errors == {
        0: f"RingError: rank 0, rendezvous: rank 1 {missing}",
        1: "OSError: no such host",
        2: f"RingError: rank 2, rendezvous: rank 1 {missing}",
    }
    assert seconds < RING_TIMEOUT + SLACK


def test_a_store_that_cannot_be_read_ends_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads such a file for ever; nothing is left of it, and the next run is as ever."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def meanwhile(processes: list[Any]) -> None:
        with await_store(tmp_path).open("ab") as file:
            file.write(struct.pack("q", 40) + b"half a record")

    def enter(rank: int) -> None:
        time.sleep(0.5 if rank == 2 else 0)

    errors, seconds = run(enter, meanwhile)
    assert isinstance(errors, dict) and sorted(errors) == [0, 1, 2]
    for rank, text in errors.items():
        assert text.startswith(f"RingError: rank {rank}, rendezvous: "), text
    assert "the store's file may be damaged" in errors[2]
    assert seconds < 0.5 + RING_TIMEOUT + STUCK_SECONDS + SLACK
    assert list(tmp_path.iterdir()) == []
    assert len(run()[0]) == 3


PLACES = [struct.pack("q", pair) for pair in range(8)]
"""What ranks say first when they connect. Where the stranger is quicker that is an error, else it changes nothing."""


@pytest.mark.parametrize(
    ("said", "stays", "ends"),
    [
        ([random.Random(1).randbytes(64)], True, list),
        ([b"\1\2\3"], True, list),
        (PLACES, True, (list, dict)),
        (PLACES, False, (list, dict)),
    ],
    ids=["garbage", "half", "in-place-of-a-rank", "and-gone"],
)
def test_a_stranger_at_a_rank_s_port_changes_no_result(said: list[bytes], stays: bool, ends: Any) -> None:
    """gloo leaves alone a connection that says nothing it knows; one that takes a rank's place is an error."""
    expected, _ = run()
    with ExitStack() as held:

        def meanwhile(processes: list[Any]) -> None:
            for address, port in await_ports([process.pid for process in processes]):
                for words in said:
                    held.enter_context(socket.create_connection((str(address), port))).sendall(words)
            if not stays:
                held.close()

        # Rank 0 listens a while before the others do.
        ranks: list[int] = []
        with late("init_process_group", lambda: 0.5 if ranks[0] else 0.0):
            found, seconds = run(ranks.append, meanwhile)
    assert seconds < 0.5 + 2 * RING_TIMEOUT + SLACK
    assert isinstance(found, ends)
    if isinstance(found, dict):
        assert sorted(found) == [0, 1, 2]
        assert all(text.startswith(f"RingError: rank {rank}") for rank, text in found.items()), found
    else:
        assert all(got.equal(want) for got, want in zip(found, expected, strict=True))


def test_what_bounds_the_rendezvous_does_not_bound_the_group() -> None:
    """Ranks wait for the slowest at the end, and may use the group for collectives of their own."""

    def body(ring: Ring) -> None:
        time.sleep(0.7 * RING_TIMEOUT * ring.rank)
        dist.barrier()

    assert run(body=body)[0] == [None] * 3


def test_nothing_listens_outside_this_machine() -> None:
    """Neither the ranks, while they are connected, nor what has started them."""
    before = listening([os.getpid()])

    def body(ring: Ring) -> tuple[list[Any], list[Any]]:
        ring.exchange({}, "start")
        step(ring)
        found = listening([os.getpid()]), listening([os.getppid()])
        ring.exchange({}, "end")
        return found

    found = run_processes(body, 3, timeout=40)
    for own, parent in found:
        assert own and parent == before
        assert all(address.is_loopback for address, _ in own), own
    assert listening([os.getpid()]) == before
    assert not {port for own, _ in found for _, port in own} & {port for _, port in listening()}
