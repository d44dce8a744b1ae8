"""The ranks of a run as processes of this machine: started by torch, watched until all have ended, none left behind."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import start_processes

from burst_attention.launch import LOOPBACK

START_METHOD = "spawn"
FAILED, WRONG = 1, 2
STOPPED = 75
"""A rank's status after it was asked to stop and has saved: there is more to train. The command's own is then 0."""
LAST_SECONDS = 5.0
"""How long the other ranks may take, once one has failed, to find out and to say what they know."""

Body = Callable[[Any, str, int, int], int]
"""A rank: (what it is told, where ranks meet, rank, ranks) to its exit status."""


class RankError(Exception):
    """Why a rank gives up, in words for its user. `weight`: 0 is a cause, 1 a defect, 2 another rank's fault."""

    def __init__(self, words: str, status: int, weight: int) -> None:
        super().__init__(" ".join(words.split()))
        self.status, self.weight = status, weight


def run_ranks(body: Body, told: Any, ranks: int) -> int:
    """Run `body` in as many processes and give the status of all; why they failed is said once, on stderr.

    They meet over a file and the loopback interface: no port is opened. SIGTERM, or a first Ctrl-C, is passed on, and
    the ranks are waited for; a second one kills them.
    """
    with tempfile.TemporaryDirectory(prefix="burst-train-") as folder, _environment(ranks):
        watch = _Watch(ranks)
        with watch.signals():
            with _interrupts_held():
                started = start_processes(  # type: ignore[no-untyped-call]
                    _enter, (body, told, folder, ranks), ranks, join=False, start_method=START_METHOD
                )
            watch.until_all_end(started.processes)
        told_by = {rank: _read(Path(folder, f"error-{rank}")) for rank in range(ranks)}
    return watch.status(told_by)


@dataclass
class _Watch:
    """What the starter of the ranks sees of them."""

    ranks: int
    processes: list[Any] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)
    """Exit codes of the ranks that ended without being killed from here."""

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        numbers = (signal.SIGTERM, signal.SIGINT)
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._pass_on) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: object) -> None:
        self.asked.append(number)
        # A terminal's Ctrl-C has reached the ranks already, but one sent to this process alone has not.
        for process in self.processes:
            process.terminate() if len(self.asked) == 1 else process.kill()

    def until_all_end(self, processes: list[Any]) -> None:
        """Wait; once a rank has failed, the others get a few seconds more and are then killed."""
        self.processes, deadline = processes, float("inf")
        try:
            if self.asked:  # while they were started
                for process in processes:
                    process.terminate()
            while running := [process for process in processes if process.exitcode is None]:
                if any(process.exitcode not in (None, 0, STOPPED) for process in processes):
                    deadline = min(deadline, time.monotonic() + LAST_SECONDS)
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                wait([process.sentinel for process in running], min(left, 60.0))
        finally:
            self.ended = {rank: p.exitcode for rank, p in enumerate(processes) if p.exitcode is not None}
            for process in processes:
                process.kill()
                process.join()

    def status(self, told_by: dict[int, dict[str, Any]]) -> int:
        """The status of the command; a failure's cause is printed."""
        codes = set(self.ended.values())
        if len(self.ended) == self.ranks and codes <= {0, STOPPED}:
            return 128 + signal.SIGINT if signal.SIGINT in self.asked else max(codes)
        causes = [(said["weight"], rank, said["words"], said["status"]) for rank, said in told_by.items() if said]
        for rank, code in self.ended.items():
            if code < 0 and not self.asked:
                causes.append((-1, rank, f"rank {rank} was killed by {_name(-code)}; --resume goes on", FAILED))
            elif code not in (0, STOPPED) and not told_by[rank]:
                causes.append((3, rank, f"rank {rank} ended with status {code} and without a word", FAILED))
        # Asked to end before training or after it, ranks do so at once, and those they talk to see them go.
        if self.asked and not any(weight < 2 for weight, *_ in causes):
            return 128 + self.asked[0]
        _, rank, words, status = min(causes, default=(0, 0, "the ranks ended without a word", FAILED))
        if trace := told_by.get(rank, {}).get("trace"):
            print(trace, end="", file=sys.stderr)
        print(f"burst train: {words}", file=sys.stderr, flush=True)
        return int(status)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):  # absent, or cut short by a kill
        return {}
    return found


@contextlib.contextmanager
def _environment(ranks: int) -> Iterator[None]:
    """What processes must find in their environment before they import torch."""
    given = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // ranks, 1)), "GLOO_SOCKET_IFNAME": LOOPBACK}
    added = {name: value for name, value in given.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """A process inherits which signals are held back: a Ctrl-C during its imports waits for `_enter`, in silence."""
    if START_METHOD == "spawn":
        # Started with the first process otherwise, it would let signals through again.
        resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _enter(rank: int, body: Body, told: Any, folder: str, ranks: int) -> None:
    """One rank's process; it ends with what `body` gives, without Python's own tidying up where that failed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True, name="burst-parent").start()
    said: dict[str, Any] = {}
    try:
        status = body(told, f"file://{folder}/store", rank, ranks)
    except RankError as error:
        status, said = error.status, {"words": str(error), "weight": error.weight, "status": error.status}
        if error.weight == 1:
            said["trace"] = "".join(traceback.format_exception(error.__cause__ or error))
    if said:
        Path(folder, f"error-{rank}").write_text(json.dumps(said))
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads may still be blocked inside gloo, and its teardown may complain at length.
        os._exit(status)


def _end_with_parent() -> None:
    """Nobody watches ranks whose starter was killed, and a resumed run would meet them in its folder: they end too."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(FAILED)
