"""Kill -9 at any moment, of a rank or of the whole run, and a full disk: the run goes on as if nothing had been."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from burst_attention.train import checkpoint
from burst_attention.train.checkpoint import check, latest
from tests.ring.test_soak import FAULTS, SEED, keep
from tests.train.commands import Command, arguments, logged, none_left, rows, run, saved, trained, until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
JOB: dict[str, Any] = {"steps": 12, "save_every": 2}
SOON = 20.0
"""Seconds in which the others end when one is killed, long before they would give up a silent one."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    trained(out, **JOB)
    return out


def writing(out: Path) -> bool:
    return any(name.endswith(".writing") for name in saved(out))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_a_step(victim: int, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Command(arguments(out, **JOB), tmp_path) as command:
        until(lambda: logged(out) >= 3, "three steps")
        os.kill(command.ranks()[victim], signal.SIGKILL)
        assert command.wait(SOON) == 1
        assert command.stderr == f"burst train: rank {victim} was killed by SIGKILL; --resume goes on\n"
    assert not (out / "model").exists()
    assert trained(out, **JOB, resume=True) == rows(whole)


def test_the_run_killed_in_a_save(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Command(arguments(out, **{**JOB, "save_every": 1}), tmp_path) as command:
        until(lambda: logged(out) >= 2 and writing(out), "a save", pause=0)
        command.signal_all(signal.SIGKILL)
        command.wait(SOON)
        assert writing(out), "it was done before it was killed"
    assert trained(out, **JOB, resume=True) == rows(whole)
    assert not writing(out)


def test_ranks_end_when_their_starter_is_killed(whole: Path, tmp_path: Path) -> None:
    """Else they would train on, and a resumed run would meet them in its folder."""
    out = tmp_path / "run"
    with Command(arguments(out, **{**JOB, "save_every": 0}), tmp_path) as command:
        until(lambda: logged(out) >= 1, "a step")
        os.kill(command.process.pid, signal.SIGKILL)
        assert command.wait(SOON) == -signal.SIGKILL
    assert saved(out) == [], "they should not save any more: another run may be doing so"
    assert trained(out, **JOB, resume=True) == rows(whole)


def test_killed_before_its_first_checkpoint_a_run_is_resumed_from_the_beginning(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Command(arguments(out, **{**JOB, "save_every": 0}), tmp_path) as command:
        until(lambda: logged(out) >= 2, "two steps")
        command.signal_all(signal.SIGKILL)
        command.wait(SOON)
    assert saved(out) == []
    assert trained(out, **JOB, resume=True) == rows(whole)


def test_a_full_disk_in_a_save_costs_nothing_but_the_save(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of files: a write that really fails, in the middle of a shard."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 2**30)  # The tests' small files would all stay below the limit.
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    shutil.copy(whole.parent / "data.jsonl", tmp_path)
    shutil.rmtree(out / "checkpoints" / "step-00000012")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # What is forked now inherits it.
    try:
        status, said = run(arguments(out, **JOB, resume=True), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status == 2
    (line,) = said.splitlines()
    assert line.startswith(f"burst train: {out}/checkpoints/step-00000012 was not saved: rank ")
    assert "File too large" in line and line.endswith("earlier checkpoints are untouched")
    assert saved(out) == ["step-00000010"]
    check(out / "checkpoints" / "step-00000010")
    assert trained(out, **JOB, resume=True) == rows(whole)


def killed_somewhere(chance: random.Random, out: Path, seconds: float, resume: bool) -> str:
    """Start or resume, and kill a rank or all at a random moment; what was killed and when."""
    words = arguments(out, **{**JOB, "save_every": 1}, **({"resume": True} if resume else {}))
    with Command(words, out.parent) as command:
        moment = chance.choice(("any", "save"))
        begun = time.monotonic()
        if moment == "save":
            step = chance.randrange(JOB["steps"])
            until(lambda: (logged(out) > step and writing(out)) or command.process.exitcode is not None, "a save", 0)
            time.sleep(chance.uniform(0, 0.05))
        else:
            time.sleep(chance.uniform(0, seconds))
        ranks, what = command.ranks(), chance.choice(("run", "rank", "starter"))
        with contextlib.suppress(ProcessLookupError):  # It was done before.
            if what == "rank" and ranks:
                os.kill(chance.choice(ranks), signal.SIGKILL)
            elif what == "starter":
                os.kill(command.process.pid, signal.SIGKILL)
            else:
                command.signal_all(signal.SIGKILL)
        after = time.monotonic() - begun
        command.process.join(SOON)
        if command.process.exitcode is None:
            return f"{what} at {after:.2f} s ({moment}): the others are not done after {SOON:g} s"
        none_left(command.process.pid)
        lines = command.stderr.splitlines()
        if len(lines) > 1 or not all(line.startswith("burst train: rank ") for line in lines):
            return f"{what} at {after:.2f} s ({moment}): said {lines}"
    return ""


@pytest.mark.soak
def test_killed_at_random_moments(whole: Path, tmp_path: Path) -> None:
    """Each time one to three kills, and then the rest of the run without one."""
    chance, started, hangs, wrong = random.Random(SEED), time.perf_counter(), 0, []
    begun = time.perf_counter()
    trained(tmp_path / "timed", **{**JOB, "save_every": 1})
    seconds = time.perf_counter() - begun
    for number in range(FAULTS):
        out = tmp_path / f"run-{number}" / "run"
        out.parent.mkdir()
        for kill in range(chance.randint(1, 3)):
            whole_before = sum(name.count(".") == 0 for name in saved(out))
            if found := killed_somewhere(chance, out, seconds, resume=kill > 0):
                hangs += "not done" in found
                wrong.append(found)
            # What was saved stays: beginning again would give the same numbers, and hide that it was lost.
            whole_now = sum(name.count(".") == 0 for name in saved(out))
            if whole_now < whole_before or (whole_now and latest(out / "checkpoints") is None):
                wrong.append(f"run {number}: of {whole_before} checkpoints and more there are {saved(out)}")
        status, said = run(arguments(out, **JOB, resume=True), out.parent)
        if (status, said) != (0, ""):
            wrong.append(f"run {number}: resuming ended with {status}: {said}")
        elif rows(out) != rows(whole):
            wrong.append(f"run {number}: other numbers than those of a run that nobody disturbed")
        shutil.rmtree(out.parent)
    keep("training: kill -9 of a rank, of all, of their starter", FAULTS, hangs, wrong, started)
    assert not hangs and not wrong, wrong[:3]
