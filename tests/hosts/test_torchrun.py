"""torchrun on hosts: its rendezvous, its output and its ends, by the command that users have."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from burst_attention.cli import main
from burst_attention.hosts import Hosts
from burst_attention.namespaces import processes_in

EXACT = """
import sys
import torch.distributed as dist
from burst_attention import Ring
from tests.hosts.rank_bodies import step_error

dist.init_process_group("gloo")
error = step_error(Ring.from_group(timeout=20))
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: error {error:.0e}", *sys.argv[1:])
dist.destroy_process_group()
"""


def test_a_script_runs_exactly_on_two_hosts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(EXACT)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    status = main(["hosts", "--count", "2", "--mbit", "200", "--timeout", "60", "--", str(script), "--flag", "x"])
    printed = capfd.readouterr().out
    assert status == 0, printed
    for host in range(2):
        (line,) = [line for line in printed.splitlines() if line.startswith(f"[host {host}] rank ")]
        assert line.startswith(f"[host {host}] rank {host} of 2: error ") and line.endswith(" --flag x")
        assert float(line.split()[7]) < 5e-6


def test_a_host_that_fails_ends_the_run(tmp_path: Path) -> None:
    """The other does not wait for the run's whole time."""
    script = tmp_path / "script.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(100)\n")
    started = time.monotonic()
    with Hosts(2) as hosts:
        first, second = hosts.torchrun([str(script)], 1, timeout=90, grace=0.5)
        assert processes_in(hosts.namespaces) == []
    assert time.monotonic() - started < 40
    assert first.killed and first.status == -9
    assert not second.killed and second.status == 1
    assert "exitcode  : 3" in second.output


@pytest.mark.parametrize("timeout", ["0.001", "0.5"], ids=["at-once", "begun"])
def test_what_takes_too_long_is_killed(timeout: str, capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    assert main(["hosts", "--timeout", timeout, "--", "--no-python", "sleep", "20"]) == 124
    assert time.monotonic() - started < 10
    assert capfd.readouterr().err.count("was not done, and was killed") == 2
