"""`burst train` from its command line: what a run leaves, stopping and going on, and the ways to start it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from burst_attention.hosts import Hosts, hosts_refusal
from tests.ring.listening import listening
from tests.ring.strangers import no_store
from tests.train.commands import (
    SECONDS,
    Command,
    arguments,
    environment,
    logged,
    losses,
    members,
    none_left,
    real,
    rows,
    run,
    saved,
    trained,
    until,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
JOB: dict[str, Any] = {"steps": 12, "save_every": 4, "accumulate": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbs, as most users start one: a new interpreter, and ranks that it spawns."""
    out = tmp_path_factory.mktemp("whole") / "run"
    started = real(arguments(out, **JOB))
    printed, errors = started.communicate(timeout=SECONDS)
    assert (started.returncode, errors) == (0, ""), errors
    none_left(started.pid)
    assert "step 12/12" in printed and "| last loss" in printed
    return out


def test_a_run_leaves_log_curves_summary_checkpoints_and_a_model(whole: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    reports = {"curves.svg", "summary.md", "summary.json", "settings.json", "versions.json"}
    assert names == {"log.jsonl", "checkpoints", "model", *reports}
    assert [row["step"] for row in rows(whole)] == list(range(1, 13))
    found = losses(rows(whole))
    assert found[-1] < 0.9 * found[0]
    assert saved(whole) == ["step-00000008", "step-00000012"]
    settings = json.loads((whole / "settings.json").read_text())
    assert settings["ranks"] == 2 and settings["cp"] == 2 and settings["tokens"] == 128


def test_others_load_the_model(whole: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(whole / "model")
    with torch.no_grad():
        ids = torch.tensor([list(b"4 is 16 squared. 5 is 25 squared. ")])
        loss = float(model(input_ids=ids, labels=ids).loss)
    assert loss < losses(rows(whole))[0]


def test_a_second_run_into_the_folder_is_refused(whole: Path) -> None:
    before = rows(whole)
    status, said = run(arguments(whole, **JOB), whole.parent)
    assert status == 2
    assert said == f"burst train: {whole} holds a run already; go on with --resume, or choose another --out\n"
    assert rows(whole) == before


def stopped(how: str, out: Path) -> Command:
    """Ask a run to stop once it has trained some steps, and see that it saved where it stopped."""
    with Command(arguments(out, **JOB), out.parent) as command:
        until(lambda: logged(out) >= 2, "two steps")
        if how == "rank":
            os.kill(command.ranks()[1], signal.SIGTERM)
        elif how == "starter":
            # Twice, as `timeout` does.
            for _ in range(2):
                os.kill(command.process.pid, signal.SIGTERM)
                time.sleep(0.1)
        else:
            command.signal_all(signal.SIGINT)
        assert command.wait() == (130 if how == "ctrl-c" else 0), command.stderr
        assert command.stderr == ""
    steps = logged(out)
    assert 2 <= steps < 12, "it should have stopped before the end"
    assert saved(out)[-1] == f"step-{steps:08d}"
    assert not (out / "model").exists()
    return command


@pytest.mark.parametrize("how", ["starter", "rank", "ctrl-c"])
def test_stopped_and_resumed_every_number_is_the_same(how: str, whole: Path, tmp_path: Path) -> None:
    """Forked ranks against spawned ones, too."""
    out = tmp_path / "run"
    stopped(how, out)
    assert trained(out, **JOB, resume=True) == rows(whole)


@pytest.mark.parametrize(
    "split",
    [
        {"cp": 1},
        {"cp": 3, "layout": "contiguous"},
        {"cp": 1, "dp": 2, "accumulate": 1},
        {"cp": 2, "dp": 2, "accumulate": 1},
        {"cp": 2, "tp": 2},
    ],
    ids=lambda split: "-".join(f"{name}{value}" for name, value in split.items()),
)
def test_on_other_ranks_the_losses_go_on_alike(split: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / "step-00000012")
    shutil.copy(whole.parent / "data.jsonl", tmp_path)
    found = trained(out, **{**JOB, **split}, resume=True)
    assert [row["step"] for row in found] == list(range(1, 13))
    assert losses(found)[:8] == losses(rows(whole))[:8]
    torch.testing.assert_close(losses(found), losses(rows(whole)), rtol=1e-5, atol=0)
    ranks = split["cp"] * split.get("dp", 1) * split.get("tp", 1)
    assert json.loads((out / "settings.json").read_text())["ranks"] == ranks


def test_a_second_interrupt_ends_it_at_once(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Command(arguments(out, steps=10000, save_every=0), tmp_path) as command:
        until(lambda: logged(out) >= 1, "a step")
        for rank in command.ranks():
            os.kill(rank, signal.SIGSTOP)  # So that the first one cannot be answered.
        os.kill(command.process.pid, signal.SIGINT)
        time.sleep(0.5)  # Two at once are one.
        os.kill(command.process.pid, signal.SIGINT)
        assert command.wait(20) == 130
        assert command.stderr == ""


def test_stopped_before_the_sharded_run_a_comparison_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = {"steps": 8, "compare": True}
    with Command(arguments(out, **job), tmp_path) as command:
        until(lambda: logged(out / "unsharded") >= 2, "two steps of the unsharded run")
        os.kill(command.process.pid, signal.SIGTERM)
        assert command.wait() == 0, command.stderr
    assert logged(out) == 0 and 2 <= logged(out / "unsharded") < 8
    found = trained(out, **job, resume=True)
    torch.testing.assert_close(losses(found), losses(rows(out / "unsharded")), rtol=1e-5, atol=0)
    assert json.loads((out / "summary.json").read_text())["compared_steps"] == 8


def test_nothing_listens_outside_this_machine(tmp_path: Path) -> None:
    """Neither the ranks, while they train, nor what has started them."""
    out = tmp_path / "run"
    with Command(arguments(out, steps=10000, save_every=0), tmp_path) as command:
        until(lambda: logged(out) >= 1, "a step")
        for rank in command.ranks():
            found = listening([rank])
            assert found and all(address.is_loopback for address, _ in found), found
        # What it was forked from may hold some; it adds none.
        assert listening([command.process.pid]) == listening([os.getpid()])


def imports_torch(pid: int) -> bool:
    """Whether it is a rank, no longer a copy of its starter, on its way to `_enter`."""
    try:
        spawned = "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
        return spawned and "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # ended meanwhile
        return False


def test_interrupted_while_it_starts_it_leaves_nothing(tmp_path: Path) -> None:
    """Also not the tracebacks of ranks that were importing."""
    started = real(arguments(tmp_path / "run"))
    until(lambda: any(imports_torch(pid) for pid in members(started.pid) if pid != started.pid), "a rank that imports")
    # As a terminal does, but ranks first, so that none is ended by its starter before it can answer.
    for pid in members(started.pid):
        if pid != started.pid:
            os.kill(pid, signal.SIGINT)
    time.sleep(0.1)
    os.kill(started.pid, signal.SIGINT)
    _, errors = started.communicate(timeout=SECONDS)
    assert (started.returncode, errors) == (130, "")
    none_left(started.pid)
    assert not (tmp_path / "run").exists()


def test_the_ranks_of_torchrun_train_alike(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = arguments(out, **JOB)
    started = real(words, starter=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"))
    _, errors = started.communicate(timeout=SECONDS)
    assert started.returncode == 0, errors
    assert rows(out) == rows(whole)


def test_a_rank_of_a_job_does_not_outlast_a_store_that_is_none(tmp_path: Path) -> None:
    """Something accepts at MASTER_PORT and says nothing."""
    with no_store(lambda connection: None) as port:
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started = real(arguments(tmp_path / "run", timeout=2), variables)
        _, errors = started.communicate(timeout=SECONDS)
    place = f"rank 1, rendezvous: no store of torch answered at 127.0.0.1:{port} within 2 s; "
    assert started.returncode == 1
    assert errors.startswith(f"burst train: {place}") and errors.count("\n") == 1, errors


@pytest.mark.skipif(hosts_refusal() is not None, reason="no hosts can be made here")
def test_ranks_on_two_hosts_train_alike(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["-m", "burst_attention.cli", *arguments(out, **JOB)]
    with Hosts(2, mbit=200) as hosts:
        # Two on each, which is a double ring.
        outcomes = hosts.torchrun(words, 2, env=environment(), timeout=SECONDS)
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    torch.testing.assert_close(losses(rows(out)), losses(rows(whole)), rtol=1e-5, atol=0)
