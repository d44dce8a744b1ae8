"""The ranks of a run as processes of this machine: under torch's elastic agent, none left behind at the end."""

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

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
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
    the ranks are waited for; a Ctrl-C after that kills them.
    """
    with tempfile.TemporaryDirectory(prefix="burst-train-") as folder, _environment(ranks):
        watch = _Watch(ranks)
        agent = _Agent(watch, (body, told, folder, ranks))
        with watch.signals():
            agent.run()
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
            if len(self.asked) == 1:
                process.terminate()
            elif number == signal.SIGINT:
                # A second SIGTERM is no haste: `timeout` sends one to its child and one to the child's group.
                process.kill()

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


class _Agent(SimpleElasticAgent):
    """torch's elastic agent, extended as it is meant to be: by how its workers are started, watched and ended.

    Its own extension for one machine, `LocalElasticAgent`, would end all ranks at the first failure, before the others
    can say what they know of it, and leave semaphores behind when it is killed together with its ranks.
    """

    def __init__(self, watch: _Watch, told: tuple[Any, ...]) -> None:
        super().__init__(WorkerSpec("rank", watch.ranks, _Alone(), entrypoint=_enter, args=told, max_restarts=0))
        self._watch, self._deadline = watch, float("inf")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        with _interrupts_held():
            started = start_processes(  # type: ignore[no-untyped-call]
                spec.entrypoint, spec.args, spec.local_world_size, join=False, start_method=START_METHOD
            )
        self._watch.processes = started.processes
        if self._watch.asked:  # while they were started
            for process in started.processes:
                process.terminate()
        return dict(enumerate(started.pids()))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Wait for a rank to end; once one has failed, the others get a few seconds more."""
        processes = self._watch.processes
        ended = {rank: p.exitcode for rank, p in enumerate(processes) if p.exitcode is not None}
        failed = not set(ended.values()) <= {0, STOPPED}
        if failed:
            self._deadline = min(self._deadline, time.monotonic() + LAST_SECONDS)
        left = self._deadline - time.monotonic()
        if len(ended) < len(processes) and left > 0:
            wait([p.sentinel for rank, p in enumerate(processes) if rank not in ended], min(left, 60.0))
            return RunResult(WorkerState.HEALTHY)
        self._watch.ended = ended
        return RunResult(WorkerState.FAILED if failed else WorkerState.SUCCEEDED, return_values=ended)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        for process in self._watch.processes:
            process.kill()
            process.join()

    def _construct_event(self, *_: Any, **__: Any) -> Event:
        # Events go nowhere here, and torch's would ask for this host's full name, which a slow DNS lets wait.
        return Event("rank", EventSource.AGENT)


class _Alone(RendezvousHandler):
    """One agent has no other to meet: its store stays in this process, where torch's own would listen on a port."""

    def next_rendezvous(self) -> RendezvousInfo:
        store = dist.HashStore()  # type: ignore[attr-defined]
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(master_addr="", master_port=0))

    def get_backend(self) -> str:
        return "alone"

    def get_run_id(self) -> str:
        return "burst-train"

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


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
    """One rank's process; it ends with what `body` gives, without Python's own tidying up."""
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
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may still be blocked inside gloo, and the teardown of what a rank has used may complain, or abort.
    os._exit(status)


def _end_with_parent() -> None:
    """Nobody watches ranks whose starter was killed, and a resumed run would meet them in its folder: they end too."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(FAILED)
