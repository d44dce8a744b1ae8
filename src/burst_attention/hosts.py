"""Hosts to try a ring on: network namespaces of this machine, joined by a bridge, each on a link of limited rate.

    with Hosts(2, mbit=200) as hosts:
        results = hosts.run(fn, ranks_per_host=2)

To the processes in it a namespace is a machine: its own loopback, one interface `eth0`, the other hosts behind it. The
bridge has a namespace too. So nothing shows among the machine's own interfaces, none of its routes and firewall rules
apply, two sets of hosts with the same addresses never meet, and removing the namespaces removes everything.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from burst_attention.launch import run_entered
from burst_attention.namespaces import (
    ENDING_SECONDS,
    HostsError,
    call_tool,
    end_processes,
    enter,
    find_tool,
    inside,
    new_name,
    owned,
    remove,
    remove_leftovers,
    without_ipv6,
)
from burst_attention.ring import Ring

Result = TypeVar("Result")
INTERFACE = "eth0"
MOST_HOSTS = 200
FRAME_BYTES = 1514

# A bucket smaller than one of the kernel's 64 KiB packets makes it cut each into frames, which takes much of a core.
# Two and a half milliseconds' worth is what 800 Mbit/s needs to come near its rate.
LEAST_BURST_BYTES = 128 * 1024
BURST_SECONDS = 0.0025
# Long enough never to drop a packet: TCP's own windows keep the queue short, and a loss costs 200 ms of silence.
QUEUE_BYTES = 16 * 1024 * 1024

__all__ = ["HostOutcome", "Hosts", "HostsError", "hosts_refusal", "remove_leftovers"]

_LIVE: list[Hosts] = []
_ENDING_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@dataclass(frozen=True)
class HostOutcome:
    """How one host's torchrun ended: its exit status, whether we had to kill it, its stdout and stderr together."""

    host: int
    status: int
    """Negative: the signal that ended it."""
    killed: bool
    output: str


class Hosts:
    """`count` hosts that exist inside a `with` block. `mbit` limits what each may send, and what it may receive.

    Needs root and iproute2; `hosts_refusal` says what is missing. `name` becomes a part of the namespaces' names.
    """

    def __init__(self, count: int, mbit: float | None = None, name: str | None = None) -> None:
        if not 1 <= count <= MOST_HOSTS:
            raise ValueError(f"count must be from 1 to {MOST_HOSTS}, got {count}")
        if mbit is not None and not 0.01 <= mbit <= 1e6:
            raise ValueError(f"mbit must be from 0.01 to 1,000,000, got {mbit}; None is a link without a limit")
        if name is not None and not re.fullmatch(r"\w{1,32}", name):
            raise ValueError(f"name must be 1 to 32 letters, digits or underscores, got {name!r}")
        self.count = count
        self.mbit = mbit
        self._owner = os.getpid()
        self._prefix = new_name(name or "bench")
        self._switch = f"{self._prefix}-switch"
        self.namespaces = [f"{self._prefix}-host{host}" for host in range(count)]
        """What `ip netns exec` calls each host."""
        self.addresses = [f"10.77.0.{host + 1}" for host in range(count)]

    def __enter__(self) -> Hosts:
        if reason := hosts_refusal():
            raise HostsError(f"no hosts can be made here: {reason}")
        remove_leftovers()
        _LIVE.append(self)
        _catch_signals()
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # A fork that leaves the block must not take the hosts away from the process that made them.
        if self not in _LIVE or os.getpid() != self._owner:
            return
        remove(owned(f"{self._prefix}-"))
        _LIVE.remove(self)
        if not _LIVE:
            _release_signals()

    def _make(self) -> None:
        spaces = [self._switch, *self.namespaces]
        ports = [f"port{host}" for host in range(self.count)]
        pairs = zip(ports, self.namespaces, strict=True)
        lines = [f"netns add {space}" for space in spaces]
        lines += [f"link add {port} netns {self._switch} type veth peer {INTERFACE} netns {n}" for port, n in pairs]
        call_tool("ip", "-batch", "-", lines=lines)
        for space in spaces:
            without_ipv6(space)
        lines = ["link add bridge type bridge", "link set bridge up"]
        lines += [f"link set {port} master bridge up" for port in ports]
        call_tool("ip", "-n", self._switch, "-batch", "-", lines=lines)
        for host, space in enumerate(self.namespaces):
            lines = [f"addr add {self.addresses[host]}/24 dev {INTERFACE}", f"link set {INTERFACE} up"]
            call_tool("ip", "-n", space, "-batch", "-", lines=["link set lo up", *lines])
        if self.mbit is not None:
            # A bucket limits what leaves an end of a link: the host's end limits sending, the bridge's receiving.
            call_tool("tc", "-n", self._switch, "-batch", "-", lines=[_limit(port, self.mbit) for port in ports])
            for space in self.namespaces:
                call_tool("tc", "-n", space, "-batch", "-", lines=[_limit(INTERFACE, self.mbit)])

    def run(
        self,
        fn: Callable[[Ring], Result],
        ranks_per_host: int,
        *,
        timeout: float = 600.0,
        ring_timeout: float = 60.0,
        threads: int = 1,
        meanwhile: Callable[[list[Any]], None] | None = None,
    ) -> list[Result]:
        """Run `fn(ring)` in `ranks_per_host` processes on every host, host by host, and return results in rank order.

        Errors are those of `launch.run_processes`. `meanwhile(processes)` runs in a thread of this process once all are
        started, to cut a link or kill a rank; what it raises is raised here.
        """
        self._require_hosts(ranks_per_host)
        _require_positive(timeout=timeout, ring_timeout=ring_timeout, threads=threads)

        def enter_host(rank: int) -> None:
            _release_signals()
            enter(self.namespaces[rank // ranks_per_host])
            os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

        return run_entered(
            fn,
            self.count * ranks_per_host,
            enter_host,
            timeout=timeout,
            ring_timeout=ring_timeout,
            threads=threads,
            meanwhile=meanwhile,
        )

    def torchrun(
        self,
        arguments: Sequence[str],
        ranks_per_host: int,
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        grace: float = 30.0,
        on_line: Callable[[int, str], None] | None = None,
    ) -> list[HostOutcome]:
        """Run torchrun once on every host, with `arguments` (a script and its own), until all have ended.

        `on_line(host, line)` gets output as it comes. All that is left on these hosts after `timeout` seconds, or
        `grace` seconds after a host failed, is killed: torchrun itself waits five minutes for a host that is gone.
        """
        self._require_hosts(ranks_per_host)
        _require_positive(timeout=timeout, grace=grace)
        with inside(self.namespaces[0]), socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        # All hosts share this machine's cores; and lines are wanted as they come, not when a buffer is full.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
        launched: list[_Launched] = []
        late: list[_Launched] = []
        try:
            for host in range(self.count):
                command = [*self._torchrun_command(host, ranks_per_host, port), *arguments]
                launched.append(_Launched(host, command, {**environment, **(env or {})}, on_line))
            _wait_for(launched, timeout, grace)
        finally:
            late = [one for one in launched if one.process.poll() is None]
            for one in late:
                # It may not have come as far as its namespace.
                one.process.kill()
            if any(one.process.poll() != 0 for one in launched):
                end_processes(self.namespaces)
            for one in launched:
                one.join()
        return [HostOutcome(one.host, one.process.wait(), one in late, "".join(one.lines)) for one in launched]

    def _torchrun_command(self, host: int, ranks_per_host: int, port: int) -> list[str]:
        options = {
            "nnodes": self.count,
            "node-rank": host,
            "nproc-per-node": ranks_per_host,
            "master-addr": self.addresses[0],
            "master-port": port,
            # Else torchrun asks for this machine's name, which no host knows.
            "local-addr": self.addresses[host],
        }
        words = [f"--{key}={value}" for key, value in options.items()]
        in_host = [find_tool("ip") or "ip", "netns", "exec", self.namespaces[host]]
        return [*in_host, sys.executable, "-m", "torch.distributed.run", *words]

    def cut(self, host: int) -> None:
        """Pull a host's cable: nothing reaches it or leaves it until `restore`, and nobody is told."""
        self._set_port(host, "down")

    def restore(self, host: int) -> None:
        """Put the cable back."""
        self._set_port(host, "up")

    def _set_port(self, host: int, state: str) -> None:
        self._require_hosts()
        call_tool("ip", "-n", self._switch, "link", "set", f"port{self._index(host)}", state)

    def bytes_sent(self, host: int) -> int:
        """Bytes that have left a host on its link so far, headers and acknowledgements included."""
        self._require_hosts()
        shown = call_tool("ip", "-n", self._switch, "-json", "-statistics", "link", "show", f"port{self._index(host)}")
        return int(json.loads(shown)[0]["stats64"]["rx"]["bytes"])

    def bytes_repeated(self, host: int) -> int:
        """The most of `bytes_sent` that TCP may have sent again: where cores are short, acknowledgements come late."""
        self._require_hosts()
        with inside(self.namespaces[self._index(host)]), open("/proc/thread-self/net/snmp") as table:
            names, values = (line.split() for line in table if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")]) * FRAME_BYTES

    def link_rate(self, seconds: float = 0.4) -> float:
        """Mbit/s that a plain socket carries from host 0 to host 1, once under way."""
        self._require_hosts()
        _require_positive(seconds=seconds)
        if self.count < 2:
            raise ValueError("a rate is measured between two hosts, and there is one")
        with inside(self.namespaces[1]):
            server = socket.create_server((self.addresses[1], 0))
        with server:
            with inside(self.namespaces[0]):
                sender = socket.create_connection(server.getsockname(), timeout=10)
            receiver, _ = server.accept()
        receiver.settimeout(10)
        return _rate_between(sender, receiver, seconds)

    def _index(self, host: int) -> int:
        if not 0 <= host < self.count:
            raise ValueError(f"host must be from 0 to {self.count - 1}, got {host}")
        return host

    def _require_hosts(self, ranks_per_host: int = 1) -> None:
        if self not in _LIVE:
            raise HostsError("hosts exist only inside `with Hosts(...) as hosts:`")
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host must be at least 1, got {ranks_per_host}")


def _require_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value!r}")


class _Launched:
    """A command under way on a host, and the lines it has written."""

    def __init__(
        self, host: int, command: list[str], env: Mapping[str, str], on_line: Callable[[int, str], None] | None
    ) -> None:
        self.host = host
        self.lines: list[str] = []
        self._on_line = on_line
        self._error: Exception | None = None
        # In a session of its own, a terminal's interrupt reaches us alone, and we end it.
        self.process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"burst-host-{host}")
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            try:
                if self._on_line is not None and self._error is None:
                    self._on_line(self.host, line)
            except Exception as error:
                # Reading must go on, or the command would stop at a full pipe.
                self._error = error

    def join(self) -> None:
        """Until what it wrote is read; it has ended, or has been killed."""
        self.process.wait()
        self._reader.join(ENDING_SECONDS)
        if self._error is not None:
            raise self._error


def _wait_for(launched: Sequence[_Launched], timeout: float, grace: float) -> None:
    """Until all have ended, or the time is up that is left to them."""
    deadline, failed = time.monotonic() + timeout, False
    while any(one.process.poll() is None for one in launched) and time.monotonic() < deadline:
        if not failed and any(one.process.poll() for one in launched):
            deadline, failed = min(deadline, time.monotonic() + grace), True
        time.sleep(0.02)


def hosts_refusal() -> str | None:
    """Why hosts cannot be made here, or None where they can."""
    if not sys.platform.startswith("linux"):
        return f"hosts are network namespaces of Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if missing := [tool for tool in ("ip", "tc") if find_tool(tool) is None]:
        return f"no {' and no '.join(missing)} found; install iproute2"
    return _try_out()


@functools.cache
def _try_out() -> str | None:
    """Make one of each thing that hosts are made of: a container may forbid them and a kernel may lack them."""
    space = new_name("trial")
    try:
        call_tool("ip", "netns", "add", space)
        links = ["link add bridge type bridge", f"link add port0 type veth peer {INTERFACE}"]
        call_tool("ip", "-n", space, "-batch", "-", lines=links)
        call_tool("tc", "-n", space, "-batch", "-", lines=[_limit("port0", 100)])
    except HostsError as error:
        return str(error)
    finally:
        remove(owned(space))
    return None


def _limit(device: str, mbit: float) -> str:
    burst = max(LEAST_BURST_BYTES, int(mbit * 1e6 / 8 * BURST_SECONDS))
    return f"qdisc add dev {device} root tbf rate {round(mbit * 1e6)}bit burst {burst} limit {QUEUE_BYTES}"


def _rate_between(sender: socket.socket, receiver: socket.socket, seconds: float) -> float:
    """Mbit/s, from when a quarter of the time has gone: the bucket is full at first, and TCP starts slowly."""

    def send() -> None:
        block = bytes(256 * 1024)
        # Ends when the receiver closes.
        with contextlib.suppress(OSError):
            while True:
                sender.sendall(block)

    thread = threading.Thread(target=send, daemon=True)
    block, counted = bytearray(1024 * 1024), 0
    with sender:
        with receiver:
            thread.start()
            begin = time.perf_counter() + seconds / 4
            while time.perf_counter() < begin:
                receiver.recv_into(block)
            begin = now = time.perf_counter()
            while now < begin + seconds:
                counted += receiver.recv_into(block)
                now = time.perf_counter()
        thread.join()
    return counted * 8 / (now - begin) / 1e6


def _catch_signals() -> None:
    """Leave the blocks that hold hosts also when told to end; a handler of the caller's own stays in charge."""
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING_SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _leave)


def _release_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING_SIGNALS:
            if signal.getsignal(number) is _leave:
                signal.signal(number, signal.SIG_DFL)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


@atexit.register
def _remove_all() -> None:
    """What a block could not remove, because a second interrupt came while it did."""
    for hosts in list(_LIVE):
        hosts.__exit__()
