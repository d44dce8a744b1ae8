"""Ranks of a job that meet over torchrun's variables: an error with a name within the timeout, whatever is there."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from burst_attention.launch import LOOPBACK
from burst_attention.rendezvous import MeetingError, meet
from tests.interpreters import environment
from tests.ring.strangers import no_store

SECONDS = 3.0
SLACK = 1.0
"""What a busy machine may add to the timeout; torch alone would wait for ever, or some twice as long."""

ALONE = """
import time
from burst_attention.rendezvous import meet
started = time.monotonic()
try:
    meet("gloo", timeout=3.0)
finally:
    print(time.monotonic() - started, time.monotonic())
"""


def silent(connection: socket.socket) -> None:
    """Not a word."""


def garbage(connection: socket.socket) -> None:
    connection.sendall(random.Random(1).randbytes(4096))


@pytest.mark.parametrize(
    ("answer", "heard"),
    [(silent, ""), (garbage, r" \(Ping failed.*\)"), (socket.socket.close, r" \(.+\)")],
    ids=["silent", "garbage", "hangs-up"],
)
def test_what_is_no_store_ends_a_rank_in_time(answer: Callable[[socket.socket], None], heard: str) -> None:
    with no_store(answer) as port:
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        rank = subprocess.run(
            [sys.executable, "-c", ALONE], env=environment(variables), capture_output=True, text=True, timeout=30
        )
        ended = time.monotonic()
    assert rank.returncode == 1, rank.stderr
    took, at = map(float, rank.stdout.split())
    assert took < SECONDS + SLACK
    # torch's thread is left behind in its wait, and the process ends as after any other error.
    assert ended - at < 6
    (line,) = [line for line in rank.stderr.splitlines() if "MeetingError" in line]
    said = (
        rf"rank 1, rendezvous: no store of torch answered at 127\.0\.0\.1:{port} within 3 s{heard}; see that rank 0, .*"
    )
    assert re.fullmatch(rf"burst_attention\.rendezvous\.MeetingError: {said}", line), line


def test_a_thread_left_behind_is_waited_for_when_the_process_ends() -> None:
    """torch comes back from what hangs up; its thread would abort the process if Python were ending just then."""

    def body(rank: int) -> tuple[bool, bool]:
        at_exit: list[Callable[[], None]] = []
        kept = mock.patch.object(atexit, "register", lambda act, *given: at_exit.append(lambda: act(*given)))
        with kept, pytest.raises(MeetingError):
            meet("gloo", timeout=0.5)
        alive = [any(thread.name == "burst-meeting" for thread in threading.enumerate())]
        for act in at_exit:
            act()
        alive.append(any(thread.name == "burst-meeting" for thread in threading.enumerate()))
        return alive[0], alive[1]

    with no_store(socket.socket.close) as port:
        assert in_processes(body, [1], 2, port) == {1: (True, False)}


def test_where_nothing_listens_it_is_said_and_torch_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    found = in_processes(lambda rank: meet("gloo", timeout=0.5), [1], 2, port)
    expected = f"MeetingError: rank 1, rendezvous: no store of torch answered at 127.0.0.1:{port} within 0.5 s ("
    assert found[1].startswith(expected) and "Connection refused" in found[1], found
    assert capfd.readouterr().err == ""


def test_a_rank_0_that_starts_later_is_waited_for_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> int:
        time.sleep(0 if rank else 1.5)
        meet("gloo", timeout=20.0)
        return dist.get_rank()

    assert in_processes(body, [0, 1], 2, free_port()) == {0: 0, 1: 1}
    assert capfd.readouterr().err == ""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def in_processes(body: Callable[[int], Any], come: list[int], ranks: int, port: int) -> dict[int, Any]:
    """What `body(rank)` gives, or the words of its error, in a process for each rank that comes."""
    context = multiprocessing.get_context("fork")
    pipes = {rank: context.Pipe(duplex=False) for rank in come}

    def run(rank: int) -> None:
        variables = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in variables.items()} | {"GLOO_SOCKET_IFNAME": LOOPBACK})
        try:
            pipes[rank][1].send(body(rank))
        except Exception as error:
            pipes[rank][1].send(f"{type(error).__name__}: {error}")
        # The store is rank 0's: its end must not come before the others' words.
        time.sleep(0.5)
        os._exit(0)

    processes = [context.Process(target=run, args=(rank,)) for rank in come]
    for process in processes:
        process.start()
    try:
        return {rank: pipes[rank][0].recv() if pipes[rank][0].poll(30) else "hangs" for rank in come}
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_ranks_that_meet_form_a_group_with_the_timeout_given() -> None:
    def body(rank: int) -> Any:
        meet("gloo", timeout=20.0)
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        limit = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
        return dist.get_rank(), dist.get_world_size(), total.item(), limit

    found = in_processes(body, [0, 1, 2], 3, free_port())
    assert found == {rank: (rank, 3, 6.0, timedelta(seconds=20)) for rank in range(3)}


def test_ranks_that_do_not_come_are_named() -> None:
    port = free_port()
    found = in_processes(lambda rank: meet("gloo", timeout=SECONDS), [0, 2], 8, port)
    absent = "rank 1 and rank 3 and rank 4 and rank 5 and 2 more ranks"
    for rank in (0, 2):
        place = f"rank {rank}, rendezvous"
        assert found[rank] == f"MeetingError: {place}: {absent} did not come to 127.0.0.1:{port} within 3 s"


def test_a_store_that_ends_before_all_have_come_names_who_had_not() -> None:
    """Rank 0 gives up first, and its store ends with it."""
    port = free_port()
    found = in_processes(lambda rank: meet("gloo", timeout=20.0 if rank else 1.0), [0, 1], 3, port)
    assert found[0] == f"MeetingError: rank 0, rendezvous: rank 2 did not come to 127.0.0.1:{port} within 1 s"
    assert found[1].startswith(f"MeetingError: rank 1, rendezvous: rank 2 did not come to 127.0.0.1:{port}: "), found


def test_a_port_that_is_taken_ends_the_rank_that_is_to_serve_there_at_once() -> None:
    with no_store(silent) as port:
        started = time.monotonic()
        found = in_processes(lambda rank: meet("gloo", timeout=20.0), [0], 2, port)
        assert time.monotonic() - started < 10
    assert found[0].startswith(f"MeetingError: rank 0, rendezvous: no store of torch answered at 127.0.0.1:{port}: ")
    assert "EADDRINUSE" in found[0]


def test_a_defect_of_the_call_is_told_as_torch_tells_it() -> None:
    found = in_processes(lambda rank: meet("glue", timeout=20.0), [0], 1, free_port())
    assert not found[0].startswith("MeetingError") and "glue" in found[0], found


GOOD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "options", "words"),
    [
        ({"RANK": ""}, {}, "RANK is not in the environment; start the ranks with torchrun, or set it"),
        ({"MASTER_ADDR": ""}, {}, "MASTER_ADDR is not in the environment"),
        ({"WORLD_SIZE": "two"}, {}, "WORLD_SIZE must be a whole number, got 'two'"),
        ({"RANK": "2"}, {}, "rank must be one of the 2 ranks 0 to 1, got 2"),
        ({"RANK": "7"}, {"rank": -1, "ranks": 3}, "rank must be one of the 3 ranks 0 to 2, got -1"),
        ({"MASTER_PORT": "65536"}, {}, "MASTER_PORT must be a port from 1 to 65535, got 65536"),
        ({}, {"timeout": 0}, "timeout must be a number of seconds above 0, got 0"),
    ],
)
def test_what_cannot_be_met_at_is_refused(
    variables: dict[str, str], options: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**GOOD, **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        meet("gloo", **options)


RESTARTED = """
import os, sys, time
import torch.distributed as dist
from burst_attention.rendezvous import meet
again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
if again and os.environ["RANK"] == "1":
    time.sleep(2.0)
meet("gloo", timeout=20.0)
dist.barrier()
if not again:
    sys.exit(3)
print("met again")
dist.destroy_process_group()
"""


def test_ranks_that_torchrun_starts_again_meet_again(tmp_path: Path) -> None:
    """What the ranks before them left at the agent's store is not theirs."""
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "--max-restarts", "1", "--monitor-interval", "0.1", str(script)],
        env=environment(), capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("met again") == 2, run.stderr
