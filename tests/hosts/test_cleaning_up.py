"""Hosts go with the process that made them, however it ends; what a killed one leaves is removed by the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from burst_attention.cli import main
from burst_attention.hosts import Hosts, remove_leftovers
from burst_attention.launch import RankFailedError
from burst_attention.namespaces import owned, processes_in

# A shell that runs the tests in the background has them, and what they start, ignore interrupts.
HEED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
HOLD = """
import time
from burst_attention.hosts import Hosts

with Hosts(2, mbit=100) as hosts:
    def meanwhile(processes):
        time.sleep(0.3)
        print(*(process.pid for process in processes), flush=True)
    hosts.run(lambda ring: time.sleep(60), 1, meanwhile=meanwhile)
"""
COMMAND = """
import sys
from burst_attention.cli import main

sys.exit(main(["hosts", "--", "--no-python", "sleep", "60"]))
"""


class Other:
    """Another process that holds two hosts, with a rank on each."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HEED + HOLD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self.ranks = [int(pid) for pid in lines.readline().split()]
        self.namespaces = owned(f"burst-{self.process.pid}-")

    def end(self, signals: Sequence[signal.Signals]) -> int:
        """Send signals, a moment apart, and return its exit status."""
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.02)
        return self.process.wait(timeout=20)


def running(pids: list[int]) -> list[int]:
    """Those that have not ended; one that only waits for init to take notice has."""
    states = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [pid for pid, stat in states.items() if stat.exists() and stat.read_text().split(")")[1].split()[0] != "Z"]


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        ([signal.SIGINT], [-signal.SIGINT]),
        ([signal.SIGTERM], [128 + signal.SIGTERM]),
        # The second may come before, while or after the first has removed everything.
        ([signal.SIGINT, signal.SIGINT], [-signal.SIGINT, 0, 1]),
    ],
    ids=["interrupt", "terminate", "interrupt-twice"],
)
def test_hosts_go_when_their_process_is_told_to_end(signals: list[signal.Signals], status: list[int]) -> None:
    other = Other()
    assert len(other.namespaces) == 3 and len(other.ranks) == 2
    assert sorted(processes_in(other.namespaces)) == sorted(other.ranks)
    assert not set(remove_leftovers()) & set(other.namespaces)
    assert other.end(signals) in status
    assert owned(f"burst-{other.process.pid}-") == []
    assert running(other.ranks) == []


def test_what_a_killed_process_leaves_is_removed_by_the_next_hosts() -> None:
    other = Other()
    assert other.end([signal.SIGKILL]) == -signal.SIGKILL
    assert owned(f"burst-{other.process.pid}-") == other.namespaces
    assert running(other.ranks) == other.ranks
    with Hosts(1):
        assert owned(f"burst-{other.process.pid}-") == []
    assert running(other.ranks) == []


def test_the_command_removes_leftovers_also_of_a_pid_that_is_used_again(capsys: pytest.CaptureFixture[str]) -> None:
    """The name says when its owner was started, and that was not this process."""
    name = f"burst-{os.getpid()}-1-0-bench-switch"
    subprocess.run(["ip", "netns", "add", name], check=True)
    assert main(["hosts", "--clean"]) == 0
    assert f"removed {name}\n" in capsys.readouterr().out
    assert name not in owned()


def test_an_interrupted_command_ends_its_scripts() -> None:
    """torchrun puts what it starts into sessions of their own, out of a terminal's reach."""
    command = [sys.executable, "-c", HEED + COMMAND]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 40
        while len(pids := processes_in(owned(f"burst-{process.pid}-"))) < 4:
            assert time.monotonic() < deadline, "no scripts started"
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
    assert owned(f"burst-{process.pid}-") == []
    assert running(pids) == []


def test_hosts_go_after_an_error() -> None:
    hosts = Hosts(2)
    with pytest.raises(RankFailedError), hosts:
        hosts.run(lambda ring: 1 // 0, 1, timeout=40)
    assert owned(hosts._prefix) == []


def test_hosts_go_when_only_a_part_could_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burst_attention.hosts._limit", lambda *_: "qdisc add dev nowhere root tbf")
    hosts = Hosts(2, mbit=100)
    with pytest.raises(RuntimeError, match="tc -n"), hosts:
        pass
    assert owned(hosts._prefix) == []


def test_what_a_rank_has_started_on_a_host_goes_too() -> None:
    with Hosts(1) as hosts:
        (pid,) = hosts.run(lambda ring: subprocess.Popen(["sleep", "60"]).pid, 1, timeout=40)
        assert processes_in(hosts.namespaces) == [pid]
    assert running([pid]) == []


def test_a_fork_does_not_take_the_hosts_away() -> None:
    with Hosts(1) as hosts:
        child = os.fork()
        if child == 0:
            hosts.__exit__()
            os._exit(0)
        os.waitpid(child, 0)
        assert owned(hosts._prefix) == sorted([hosts._switch, *hosts.namespaces])


def test_signal_handlers_of_the_caller_stay() -> None:
    def mine(number: int, frame: object) -> None:
        pass

    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with Hosts(1):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        with Hosts(1):
            pass
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, mine)
    try:
        with Hosts(1):
            assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
