"""Killed at any moment of a save, or with the disk full, a job has a whole checkpoint to go on from."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from burst_attention import Ring
from burst_attention.launch import RankFailedError, run_processes
from burst_attention.train import checkpoint
from burst_attention.train.checkpoint import CheckpointError, check, latest
from tests.train.jobs import Job, differences, names, saved

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


class Killed:
    """Kills this process at the n-th thing it does to files under a folder, reading, writing and renaming alike."""

    def __init__(self, folder: Path, moment: int) -> None:
        self.folder, self.moment, self.seen, self.armed = str(folder), moment, 0, False
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed or not (event == "open" or event.startswith(("os.", "shutil."))):
            return
        if arguments and isinstance(arguments[0], (str, os.PathLike)) and self.folder in str(arguments[0]):
            self.seen += 1
            if self.seen == self.moment:
                os.kill(os.getpid(), signal.SIGKILL)


def save_and_count(folder: Path, step: int, victims: tuple[int, ...], moment: int) -> list[int]:
    """Resume from step 1, train, save as `step`; the victims die at that moment. Gives the moments seen, if none."""

    def body(ring: Ring) -> int:
        job = Job().load(folder / "step-00000001")
        job.train(1)
        job.step = step
        killer = Killed(folder, moment if ring.rank in victims else 0)
        killer.armed = True
        job.save(folder, keep=1)
        return killer.seen

    return run_processes(body, 2, timeout=60)


@pytest.fixture(scope="module")
def first_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    saved(folder)
    return folder


VICTIMS = pytest.mark.parametrize(
    ("victims", "step"),
    [((0,), 2), ((1,), 2), ((0, 1), 2), ((0,), 1)],
    ids=["rank0", "rank1", "job", "replacing"],
)


@VICTIMS
def test_killed_during_a_save_there_is_one_to_resume_from(
    victims: tuple[int, ...], step: int, tmp_path: Path, first_step: Path
) -> None:
    killed_at(victims, step, tmp_path, first_step, moments=4)


@pytest.mark.soak
@VICTIMS
def test_killed_at_every_moment_of_a_save_there_is_one_to_resume_from(
    victims: tuple[int, ...], step: int, tmp_path: Path, first_step: Path
) -> None:
    killed_at(victims, step, tmp_path, first_step, moments=None)


def killed_at(victims: tuple[int, ...], step: int, tmp_path: Path, first_step: Path, moments: int | None) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(first_step, whole)
    last = save_and_count(whole, step, (), 0)[victims[0]]
    before = Job(seed=2).load(first_step / "step-00000001").contents(noise=False)
    after = Job(seed=2).load(whole / f"step-0000000{step}").contents(noise=False)
    found = []
    for moment in range(1, last + 1) if moments is None else (1, *random.sample(range(2, last), moments - 2), last):
        folder = tmp_path / f"killed-{moment}"
        shutil.copytree(first_step, folder)
        with pytest.raises(RankFailedError, match=f"rank {victims[0]}: died with exit code -9"):
            save_and_count(folder, step, victims, moment)
        path = latest(folder)
        assert path is not None
        resumed = Job(seed=3).load(path)
        is_new = not differences(resumed.contents(noise=False), after)
        assert is_new or differences(resumed.contents(noise=False), before) == [], moment
        found.append(is_new)
        # The next save clears away what was left.
        resumed.step = 3
        resumed.save(folder, keep=1)
        assert names(folder) == ["step-00000003"]
    assert not found[0] and found[-1] == (0 in victims)
    assert multiprocessing.active_children() == []


def no_space(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def full_tensors(rank: int) -> None:
    if dist.get_rank() == rank:
        FileSystem.create_stream = no_space  # type: ignore[method-assign]


def full_files(rank: int) -> None:
    """A limit on the size of files: a write that really fails, in the middle."""
    if dist.get_rank() == rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))


def full_record(rank: int) -> None:
    checkpoint.write_record = no_space


@pytest.mark.parametrize(
    ("fill", "rank", "cause"),
    [
        (full_tensors, 1, "OSError: [Errno 28] No space left on device"),
        (full_files, 1, "OSError: [Errno 27] File too large"),
        (full_record, 0, "OSError: [Errno 28] No space left on device"),
    ],
)
def test_a_full_disk_is_one_error_on_every_rank_and_costs_nothing(
    fill: Callable[[int], None], rank: int, cause: str, tmp_path: Path
) -> None:
    def body(ring: Ring) -> str:
        job = Job("fsdp")
        job.train(1)
        job.save(tmp_path, keep=1)
        fill(rank)
        job.train(1)
        with pytest.raises(CheckpointError) as caught:
            job.save(tmp_path, keep=1)
        job.train(1)  # The job may go on, and save when there is room.
        return str(caught.value)

    said = run_processes(body, 2)
    assert said[0] == said[1] and "\n" not in said[0]
    start = f"{tmp_path}/step-00000002 was not saved: rank {rank}: {cause}"
    assert said[0].startswith(start), said[0]
    assert re.search(rf"\([\d.]+ MiB free in {tmp_path}\); earlier checkpoints are untouched$", said[0])
    assert names(tmp_path) == ["step-00000001"]
    check(tmp_path / "step-00000001")
