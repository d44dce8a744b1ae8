"""Network namespaces of Linux, made and removed by iproute2; each carries in its name the process that owns it."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

NAMESPACES = Path("/var/run/netns")
ENDING_SECONDS = 5.0

_CLONE_NEWNET = 0x40000000
_SERIAL = itertools.count()
_OWNED = re.compile(r"burst-(\d+)-(\d+)-.+")


class HostsError(RuntimeError):
    """Hosts cannot be made here, or no longer exist; the message says why."""


def enter(space: str) -> None:
    """Move the calling thread, and what it starts from now on, into a namespace (os.setns came with Python 3.12)."""
    with open(NAMESPACES / space) as file:
        _setns(file.fileno())


@contextlib.contextmanager
def inside(space: str) -> Iterator[None]:
    """The calling thread is in a namespace for a while; sockets made there stay in it."""
    with open("/proc/thread-self/ns/net") as home:
        try:
            enter(space)
            yield
        finally:
            _setns(home.fileno())


def without_ipv6(space: str) -> None:
    """IPv6 would announce itself on every link, and be counted."""
    with inside(space):
        for scope in ("all", "default"):
            setting = Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6")
            if setting.exists():
                setting.write_text("1")


def _setns(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise HostsError(f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")


def find_tool(name: str) -> str | None:
    """Where a program is: PATH may lack the folders of system tools, even root's."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def call_tool(name: str, *arguments: str, lines: Sequence[str] = ()) -> str:
    """Run `ip` or `tc`, with commands to read where it is told to, and return what it prints."""
    done = subprocess.run(
        [find_tool(name) or name, *arguments],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        # An interrupt at the terminal must not stop the tool halfway.
        start_new_session=True,
    )
    if done.returncode != 0:
        raise HostsError(f"{name} {' '.join(arguments)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def new_name(label: str) -> str:
    """The beginning of a namespace's name: the process that owns it, a number and a label."""
    return f"burst-{os.getpid()}-{_start_time(os.getpid())}-{next(_SERIAL)}-{label}"


def owned(beginning: str = "") -> list[str]:
    """Namespaces that this module has made, in any process, whose names begin so."""
    names = (path.name for path in NAMESPACES.iterdir()) if NAMESPACES.is_dir() else ()
    return sorted(name for name in names if _OWNED.fullmatch(name) and name.startswith(beginning))


def remove_leftovers() -> list[str]:
    """Remove the hosts of processes that died without doing so, with all that still runs there; their names."""
    return remove([name for name in owned() if not _owner_lives(name)])


def remove(names: list[str]) -> list[str]:
    """Remove namespaces with all that runs there, and return their names."""
    end_processes(names)
    for name in names:
        # Another process may be removing the same leftovers.
        with contextlib.suppress(HostsError):
            call_tool("ip", "netns", "delete", name)
    if left := [name for name in names if (NAMESPACES / name).exists()]:
        raise HostsError(f"cannot remove the network namespaces {', '.join(left)}")
    return names


def end_processes(names: Sequence[str]) -> None:
    """Kill whatever runs in these namespaces, and wait until it is gone."""
    deadline = time.monotonic() + ENDING_SECONDS
    while (pids := processes_in(names)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def processes_in(names: Sequence[str]) -> list[int]:
    """The processes that are in one of these namespaces, this one apart."""
    spaces = {_identity(NAMESPACES / name) for name in names} - {None}
    entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal() and int(entry.name) != os.getpid()]
    return [int(entry.name) for entry in entries if spaces and _identity(entry / "ns/net") in spaces]


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _owner_lives(name: str) -> bool:
    match = _OWNED.fullmatch(name)
    return match is not None and _start_time(int(match[1])) == match[2]


def _start_time(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks, so that a pid used again is not mistaken; None if dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
