"""Start the ranks of a ring as processes on this machine: gloo on the loopback interface, a FileStore, no open port."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from burst_attention.ring import Ring, RingError

Result = TypeVar("Result")
START_METHOD = "fork" if sys.platform.startswith("linux") else "spawn"
ENDING_SECONDS = 1.0
# A spawned process imports torch first, and on few cores one after the other.
STARTING_SECONDS = 0.0 if START_METHOD == "fork" else 60.0
STUCK_SECONDS = 2.5
"""How long after its timeout a rank may still be on its way to say so; gloo's connecting counts whole seconds."""
POLL_SECONDS = 0.005
LAST_WORDS_SECONDS = 0.2
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class RankFailedError(RuntimeError):
    """A rank's process raised, died or did not answer; `errors` holds what is known of each rank."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__("; ".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items())))


def run_processes(
    fn: Callable[[Ring], Result],
    ring_size: int,
    *,
    timeout: float = 600.0,
    ring_timeout: float = 60.0,
    threads: int = 1,
) -> list[Result]:
    """Run `fn(ring)` in `ring_size` processes and return their results in rank order.

    Raises RankFailedError when any of them raises, dies, or is not done after `timeout` seconds; none is left behind.
    `ring_timeout` bounds each wait of a rank for others, the first being that all come and are connected.
    On Linux processes are forked and `fn` may be a closure; elsewhere it must be picklable.
    """
    return run_entered(fn, ring_size, _stay_on_loopback, timeout=timeout, ring_timeout=ring_timeout, threads=threads)


def run_entered(
    fn: Callable[[Ring], Result],
    ring_size: int,
    enter: Callable[[int], None],
    *,
    timeout: float,
    ring_timeout: float,
    threads: int,
    meanwhile: Callable[[list[Any]], None] | None = None,
) -> list[Result]:
    """Like `run_processes`; each process first calls `enter(rank)`, which says where it is and how gloo connects it.

    `meanwhile(processes)` runs in a thread of this process as soon as all are started; what it raises is raised here.
    """
    context: Any = multiprocessing.get_context(START_METHOD)
    _load_what_ranks_need()
    _let_threads_end()
    with tempfile.TemporaryDirectory(prefix="burst-ring-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(ring_size)]
        store = os.path.join(folder, "store")
        processes = [
            context.Process(
                target=_rank_main,
                args=(fn, rank, ring_size, enter, store, pipes[rank][1], ring_timeout, threads),
                daemon=True,
            )
            for rank in range(ring_size)
        ]
        try:
            for process in processes:
                process.start()
            for _, sender in pipes:
                sender.close()
            with _beside(meanwhile, processes, timeout):
                return _collect(
                    [receiver for receiver, _ in pipes], processes, timeout, ring_timeout + STARTING_SECONDS
                )
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _stay_on_loopback(rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK


@contextlib.contextmanager
def _beside(act: Callable[[list[Any]], None] | None, processes: list[Any], timeout: float) -> Iterator[None]:
    """Run `act` in a thread beside the body, and wait for it where the body ended by itself."""
    if act is None:
        yield
        return
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act(processes)
        except BaseException as error:
            errors.append(error)

    failure: RankFailedError | None = None
    thread = threading.Thread(target=run, daemon=True, name="burst-meanwhile")
    thread.start()
    try:
        yield
    except RankFailedError as error:
        failure = error
    thread.join(timeout)
    if errors:
        raise errors[0] from failure
    if thread.is_alive():
        raise RuntimeError(f"what runs beside the ranks is not done {timeout:g} s after them") from failure
    if failure is not None:
        raise failure


def _load_what_ranks_need() -> None:
    """torch imports sympy at the first gradient with respect to a given dout; better once here than in every fork.

    Only imported: a gradient computed here would start autograd's threads, and those do not survive a fork.
    """
    if START_METHOD == "fork":
        importlib.import_module("torch.fx.experimental.symbolic_shapes")


def _let_threads_end() -> None:
    """Wait, a second at most, for threads that Python has joined and that are still ending.

    MKL gives back a thread's buffers at its very end, under a lock. A fork in that moment copies the lock as taken, and
    the child spins on it forever in its first matrix product.
    """
    tasks, deadline = Path("/proc/self/task"), time.monotonic() + ENDING_SECONDS
    if START_METHOD != "fork" or not tasks.exists():
        return
    known = {str(thread.native_id) for thread in threading.enumerate()}
    while any(_is_running(task) for task in tasks.iterdir() if task.name not in known):
        if time.monotonic() > deadline:
            return
        time.sleep(0.001)


def _is_running(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "RD"
    except OSError:
        return False


def _rank_main(
    fn: Callable[[Ring], Any],
    rank: int,
    size: int,
    enter: Callable[[int], None],
    store: str,
    pipe: Connection,
    ring_timeout: float,
    threads: int,
) -> None:
    # First of all: a forked child hangs in its first parallel region when it inherits the parent's thread pool.
    torch.set_num_threads(threads)
    try:
        enter(rank)
        pipe.send_bytes(pickle.dumps(("meeting", None)))
        _meet(store, rank, size, ring_timeout + STARTING_SECONDS)
        # Kept until the process ends: closing its connections while others still talk would take time and threads.
        ring = Ring.from_group(timeout=ring_timeout)
        pipe.send_bytes(pickle.dumps(("met", None)))
        result = fn(ring)
        # Plain pickle copies tensors; multiprocessing's own would hand over files that end with this process.
        pipe.send_bytes(pickle.dumps(("result", result)))
        # A rank that ended while others still talk to it would look like a dead one.
        dist.barrier()
    except BaseException as error:
        # What this rank told the others may still be on its way out of the process.
        time.sleep(LAST_WORDS_SECONDS)
        with contextlib.suppress(OSError):
            pipe.send_bytes(pickle.dumps(("error", f"{type(error).__name__}: {error}")))
    finally:
        pipe.close()
        sys.stdout.flush()
        # Skip interpreter shutdown: daemon threads may still be blocked inside gloo.
        os._exit(0)


def _meet(path: str, rank: int, size: int, seconds: float) -> None:
    """Wait at the store until all ranks have come, so that one that does not has a name; then connect them."""
    place, limit = f"rank {rank}, rendezvous", timedelta(seconds=seconds)
    here = [f"rank {peer} is here" for peer in range(size)]
    try:
        store = dist.FileStore(path, size)  # type: ignore[attr-defined]
        store.set(here[rank], "")
    except Exception as error:
        raise RingError(f"{place}: the store's file cannot be used: {_first_line(error)}") from error
    # A FileStore's own wait counts whole seconds.
    deadline = time.monotonic() + seconds
    while not store.check(here):
        if time.monotonic() > deadline:
            absent = " and ".join(f"rank {peer}" for peer in range(size) if not store.check([here[peer]]))
            raise RingError(f"{place}: {absent or 'no other rank'} did not come within {seconds:g} s")
        time.sleep(POLL_SECONDS)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    except Exception as error:
        raise RingError(f"{place}: all ranks came, and connecting them failed: {_first_line(error)}") from error
    # That limit was for connecting. As the group's own it would end a barrier with ranks that take longer.
    dist.distributed_c10d._set_pg_timeout(dist.default_pg_timeout)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _collect(pipes: list[Connection], processes: list[Any], timeout: float, meeting_seconds: float) -> list[Any]:
    """What ranks report, until all have ended, the time is up, or some have not met the others in time."""
    end = time.monotonic() + timeout
    outcomes: dict[str, dict[int, Any]] = {"result": {}, "error": {}}
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    meeting: dict[Connection, float] = {}
    while waiting and time.monotonic() < end:
        for ready in wait(list(waiting), timeout=max(0.0, min([end, *meeting.values()]) - time.monotonic())):
            assert isinstance(ready, Connection)
            kind, value = _report(ready, processes[waiting[ready]])
            meeting.pop(ready, None)
            if kind == "meeting":
                meeting[ready] = time.monotonic() + meeting_seconds + STUCK_SECONDS
            elif kind in outcomes:
                outcomes[kind][waiting.pop(ready)] = value
        for stuck in [pipe for pipe, limit in meeting.items() if time.monotonic() > limit]:
            # torch reads a store's file in a loop without an end where a record is cut short, and holds Python's lock.
            del meeting[stuck]
            rank = waiting.pop(stuck)
            processes[rank].kill()
            outcomes["error"][rank] = (
                f"RingError: rank {rank}, rendezvous: it has not met the other ranks within {meeting_seconds:g} s, "
                "nor said why, and was killed; the store's file may be damaged"
            )
    errors = outcomes["error"] | dict.fromkeys(waiting.values(), f"not done after {timeout:g} s")
    if errors:
        raise RankFailedError(errors)
    return [outcomes["result"][rank] for rank in range(len(pipes))]


def _report(pipe: Connection, process: Any) -> tuple[str, Any]:
    try:
        kind, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(5)
        return "error", f"died with exit code {process.exitcode}"
    return kind, value
