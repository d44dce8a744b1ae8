"""Who starts the ranks, how many there are, and what is said when they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from burst_attention.train import processes, start
from burst_attention.train.config import TrainConfig
from burst_attention.train.processes import FAILED, STOPPED, WRONG, RankError, _Watch, run_ranks

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake environment: none of a job's variables but those given, and what is set on the way is taken back."""
    for name in (*NAMES, *(name for name in os.environ if name.startswith("SLURM_"))):
        monkeypatch.setenv(name, "")  # So that monkeypatch restores it, whatever becomes of it.
        monkeypatch.delenv(name)

    def give(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return give


def no_scontrol(*_: Any, **__: Any) -> Any:
    raise AssertionError("nobody should ask SLURM")


def test_where_nobody_started_ranks_the_command_does(job: Any) -> None:
    assert start._ranks_of_a_job() is None
    # A shell on a node of SLURM: one task, which is to start its ranks itself.
    job(SLURM_PROCID="0", SLURM_NTASKS="1", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node1")
    assert start._ranks_of_a_job() is None


def test_torchruns_variables_are_taken(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", no_scontrol)
    job(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", SLURM_PROCID="3", SLURM_NTASKS="4")
    assert start._ranks_of_a_job() == (5, 8, 1)


def test_slurms_variables_are_taken_and_its_first_host_leads(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def scontrol(words: list[str], **_: Any) -> Any:
        asked.append(words)
        return subprocess.CompletedProcess(words, 0, stdout="node7\nnode8\n")

    monkeypatch.setattr(subprocess, "run", scontrol)
    job(SLURM_PROCID="3", SLURM_NTASKS="4", SLURM_LOCALID="1", SLURM_JOB_ID="123456", SLURM_JOB_NODELIST="node[7-8]")
    assert start._ranks_of_a_job() == (3, 4, 1)
    assert asked == [["scontrol", "show", "hostnames", "node[7-8]"]]
    assert os.environ["MASTER_ADDR"] == "node7"
    # The same on every host, and another job's is another.
    assert os.environ["MASTER_PORT"] == str(20000 + 123456 % 20000)


def test_what_the_user_says_of_the_leader_stands(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", no_scontrol)
    job(SLURM_PROCID="0", SLURM_NTASKS="2", SLURM_JOB_ID="1", MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    assert start._ranks_of_a_job() == (0, 2, 0)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.1", "29500")


@pytest.mark.parametrize("fault", [FileNotFoundError(2, "No such file", "scontrol"), None], ids=["absent", "refusing"])
def test_slurm_without_an_answer_is_one_line(
    fault: Exception | None, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scontrol(words: list[str], **_: Any) -> Any:
        raise fault or subprocess.CalledProcessError(1, words, stderr="slurm_load_node: invalid\n")

    monkeypatch.setattr(subprocess, "run", scontrol)
    job(SLURM_PROCID="0", SLURM_NTASKS="2", SLURM_JOB_ID="1", SLURM_JOB_NODELIST="node[7-8]")
    with pytest.raises(ValueError, match=r"cannot tell the job's first host from .*node\[7-8\].*set MASTER_ADDR"):
        start._ranks_of_a_job()


@pytest.mark.parametrize(
    ("gpus", "settings", "found"),
    [
        (0, {}, (2, "cpu")),
        (0, {"dp": 2, "tp": 2}, (4, "cpu")),
        (0, {"dp": 2, "cp": 3}, (6, "cpu")),
        (8, {}, (8, "cuda")),
        (8, {"cp": 2}, (2, "cuda")),
        (7, {"dp": 2}, (6, "cuda")),
        (8, {"device": "cpu"}, (2, "cpu")),
    ],
)
def test_as_many_ranks_are_started_as_fit(
    gpus: int, settings: Any, found: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert start._find_ranks(TrainConfig(**settings)) == found


@pytest.mark.parametrize(("local", "ok"), [(1, True), (2, False)])
def test_a_rank_of_a_job_without_a_gpu_says_so(local: int, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    config = TrainConfig(device="cuda")
    if ok:
        assert start._device(config, 5, local) == torch.device("cuda", local)
    else:
        with pytest.raises(ValueError, match="rank 5 has no GPU: 2 are on this host"):
            start._device(config, 5, local)


def test_a_task_of_slurm_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --gpus-per-task every task sees its own as the first."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    assert start._device(TrainConfig(device="cuda"), 3, 3) == torch.device("cuda", 0)


def said(weight: int, words: str = "words", status: int = FAILED, trace: str = "") -> dict[str, Any]:
    return {"weight": weight, "words": words, "status": status, "trace": trace}


@pytest.mark.parametrize(
    ("ended", "told_by", "asked", "status", "line"),
    [
        ({0: 0, 1: 0}, {}, [], 0, ""),
        ({0: STOPPED, 1: STOPPED}, {}, [signal.SIGTERM], STOPPED, ""),
        ({0: STOPPED, 1: STOPPED}, {}, [signal.SIGINT], 130, ""),
        ({0: WRONG, 1: WRONG}, {0: said(0, "no", WRONG), 1: said(0, "no", WRONG)}, [], WRONG, "no"),
        ({0: FAILED, 1: -9}, {0: said(2, "lost")}, [], FAILED, "rank 1 was killed by SIGKILL; --resume goes on"),
        ({0: FAILED, 1: WRONG}, {0: said(2, "lost"), 1: said(0, "cause", WRONG)}, [], WRONG, "cause"),
        ({0: FAILED, 1: FAILED}, {0: said(2, "lost"), 1: said(1, "defect")}, [], FAILED, "defect"),
        ({1: 3}, {}, [], FAILED, "rank 1 ended with status 3 and without a word"),
        # Asked to end while they start, ranks die of the signal, and those that met them lose them.
        ({0: FAILED, 1: -15}, {0: said(2, "lost")}, [signal.SIGTERM], 143, ""),
        ({0: WRONG, 1: WRONG}, {0: said(0, "disk full", WRONG)}, [signal.SIGTERM], WRONG, "disk full"),
    ],
)
def test_of_all_that_ranks_say_the_cause_is_told(
    ended: dict[int, int], told_by: Any, asked: list[int], status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = _Watch(2, asked=asked, ended=ended)
    assert watch.status({0: {}, 1: {}, **told_by}) == status
    assert capsys.readouterr().err == (f"burst train: {line}\n" if line else "")


Ranks = Callable[[Callable[[int], int], int], int]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Run a function of the rank in forked processes; the status of all."""
    if not sys.platform.startswith("linux"):
        pytest.skip("processes are forked")
    monkeypatch.setattr(processes, "START_METHOD", "fork")
    return lambda body, count: run_ranks(lambda told, store, rank, ranks: body(rank), None, count)


def test_the_ranks_are_started_by_torchs_elastic_agent(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    results, run = [], SimpleElasticAgent.run
    monkeypatch.setattr(SimpleElasticAgent, "run", lambda agent: results.append(run(agent)))
    assert ranks(lambda rank: STOPPED if rank else 0, 3) == STOPPED
    assert [(result.state.name, result.return_values) for result in results] == [
        ("SUCCEEDED", {0: 0, 1: STOPPED, 2: STOPPED})
    ]


def test_the_agent_does_not_ask_for_this_hosts_name(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where DNS does not answer, that takes many seconds, and torch's agent asks for every event."""
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getfqdn", lambda *names: asked.append(names) or "here")
    assert ranks(lambda rank: 0, 2) == 0
    assert not asked


def test_ranks_that_end_together_are_not_waited_for(ranks: Ranks) -> None:
    begun = time.monotonic()
    for _ in range(5):
        assert ranks(lambda rank: 0, 2) == 0
    assert time.monotonic() - begun < 20


def test_after_a_failure_the_others_may_say_what_they_know(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> int:
        if rank == 0:
            raise RankError("rank 0 lost another rank", FAILED, 2)
        time.sleep(1.0)
        raise RankError("the cause", WRONG, 0)

    assert ranks(body, 2) == WRONG
    assert capsys.readouterr().err == "burst train: the cause\n"


def test_after_a_failure_a_silent_rank_is_killed(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "LAST_SECONDS", 0.5)

    def body(rank: int) -> int:
        if rank == 1:
            raise RankError("the cause", FAILED, 0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
        return 0

    begun = time.monotonic()
    assert ranks(body, 2) == FAILED
    assert time.monotonic() - begun < 20
    assert capsys.readouterr().err == "burst train: the cause\n"
