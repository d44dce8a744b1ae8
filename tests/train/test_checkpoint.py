"""A checkpoint is whole or does not exist, resumes to the last bit, fits any number of ranks, and never lies."""

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
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

from burst_attention import Ring
from burst_attention.launch import RankFailedError, run_processes
from burst_attention.train import checkpoint, folders
from burst_attention.train.checkpoint import CheckpointError, Stopper, check, latest, load, save
from tests.train.jobs import Job, differences

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


@pytest.fixture(autouse=True)
def several_files_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 600)


def saved(folder: Path, steps: int = 1, ranks: int = 2, kind: str = "plain", more: int = 0) -> list[list[float]]:
    """Save a job after `steps`; the losses of `more` steps that follow, by rank."""

    def body(ring: Ring) -> list[float]:
        job = Job(kind)
        job.train(steps)
        job.save(folder)
        return job.train(more)

    return run_processes(body, ranks)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("kind", "ranks"), [("plain", 1), ("plain", 2), ("fsdp", 2), ("fsdp", 3), ("fsdp+tp", 4)])
def test_the_same_ranks_resume_to_the_last_bit(kind: str, ranks: int, tmp_path: Path) -> None:
    def body(ring: Ring) -> list[str]:
        job = Job(kind)
        job.train(3)
        job.evaluate()
        path = job.save(tmp_path)
        before = job.contents()
        losses, after = job.train(2), job.contents()
        resumed = Job(kind, seed=2).load(path)
        wrong = differences(resumed.contents(), before)
        assert resumed.train(2) == losses
        return wrong + differences(resumed.contents(), after)

    assert run_processes(body, ranks) == [[]] * ranks


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("fsdp", 2), ("fsdp", 1)),
        (("fsdp", 2), ("fsdp", 3)),
        (("fsdp", 2), ("fsdp", 4)),
        (("fsdp", 2), ("plain", 1)),
        (("plain", 2), ("fsdp", 3)),
        (("fsdp+tp", 4), ("plain", 2)),
        (("fsdp", 3), ("fsdp+tp", 4)),
    ],
    ids=lambda case: f"{case[0]}{case[1]}",
)
def test_other_ranks_resume_with_the_same_loss(before: tuple[str, int], after: tuple[str, int], tmp_path: Path) -> None:
    losses = saved(tmp_path, steps=2, kind=before[0], ranks=before[1], more=3)[0]

    def body(ring: Ring) -> list[float]:
        return Job(after[0], seed=2).load(tmp_path / "step-00000002").train(3)

    for found in run_processes(body, after[1]):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)


def test_other_ranks_are_seeded_anew_alike_every_time_and_unlike_each_other(tmp_path: Path) -> None:
    saved(tmp_path, ranks=2)

    def body(ring: Ring) -> tuple[float, ...]:
        Job(seed=2).load(tmp_path / "step-00000001")
        return tuple(torch.rand(2).tolist())

    noise = run_processes(body, 3)
    assert len(set(noise)) == 3
    assert run_processes(body, 3) == noise


def test_an_optimizer_that_made_no_step_makes_none_by_being_saved(tmp_path: Path) -> None:
    job = Job()
    job.save(tmp_path)
    assert not job.optimizer.state
    resumed = Job(seed=2).load(tmp_path / "step-00000000")
    assert not resumed.optimizer.state
    assert differences(resumed.contents(), job.contents()) == []


def test_tied_weights_are_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one file, which would refuse tensors that share memory."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 2**30)
    job = Job()
    path = job.save(tmp_path)
    assert len(list(path.glob("tensors/*"))) == 1
    resumed = Job(seed=2).load(path)
    assert resumed.model.tied.weight is resumed.model.inner.weight
    assert differences(resumed.contents(), job.contents()) == []


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, where ranks need not talk: a checkpoint from elsewhere is data."""
    job = Job()
    job.train(1)
    path = job.save(tmp_path)
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".json", ".safetensors"}
    monkeypatch.setattr("pickle.Unpickler", None)
    monkeypatch.setattr("pickle.load", None)
    monkeypatch.setattr("pickle.loads", None)
    monkeypatch.setattr("torch.load", None)
    assert differences(Job(seed=2).load(path).contents(), job.contents()) == []


def test_bf16_parameters_keep_fp32_moments(tmp_path: Path) -> None:
    """The optimiser's own load_state_dict would cast them."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 3).bfloat16()
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)

    model, optimizer = made()
    for parameter in model.parameters():
        moments = {name: torch.randn(parameter.shape) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(7.0), **moments}
    path = save(tmp_path, 7, model, optimizer, {})
    other, restored = made()
    for parameter in other.parameters():
        restored.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros(parameter.shape),
            "exp_avg_sq": torch.zeros(parameter.shape),
        }
    restored.param_groups[0]["lr"].zero_()
    assert load(path, other, restored) == {"step": 7}
    assert restored.param_groups[0]["lr"].item() == torch.tensor(0.1).item()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, restored.state[theirs][key]) and value.dtype == torch.float32


def test_the_last_are_kept_in_the_order_of_saving(tmp_path: Path) -> None:
    job = Job()
    for _ in range(4):
        job.train(1)
        job.save(tmp_path)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    # Back to an earlier one: what is saved now is the newest, though its step is not.
    job.load(tmp_path / "step-00000003")
    job.step = 2
    job.save(tmp_path)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]
    assert latest(tmp_path) == tmp_path / "step-00000002"


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    job = Job()
    job.save(tmp_path)
    job.model.get_parameter("narrow.bias").data.fill_(3)
    path = job.save(tmp_path)
    assert names(tmp_path) == [path.name]
    assert differences(Job(seed=2).load(path).contents(), job.contents()) == []


def test_what_json_cannot_hold_is_refused_before_writing(tmp_path: Path) -> None:
    job = Job()
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path, 1, job.model, job.optimizer, {"position": torch.ones(2)})
    with pytest.raises(ValueError, match="keep 0"):
        job.save(tmp_path, keep=0)
    assert names(tmp_path) == []


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


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def moved_decimal(path: Path) -> None:
    """Still JSON: only its digest can tell."""
    path.write_text(path.read_text().replace('"lr": 0.0', '"lr": 0.1', 1))


def stray(path: Path) -> None:
    shutil.copy(path, path.with_name("extra.safetensors"))


SHARD = "tensors/shard-00001-model-00002-of-*.safetensors"


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        (SHARD, truncated, "has 1?[0-9]+ bytes instead of [0-9]+: truncated or replaced"),
        (SHARD, flipped, "is corrupt: its contents do not match the digest in state.json"),
        (SHARD, Path.unlink, "is missing"),
        (SHARD, stray, "does not belong to this checkpoint"),
        ("state.json", truncated, "is corrupt: JSONDecodeError"),
        ("state.json", moved_decimal, "is corrupt: its contents do not match its own digest"),
        ("state.json", Path.unlink, "is missing"),
    ],
)
def test_damage_is_one_line_and_the_one_before_is_taken(
    file: str, damage: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    job = Job()
    for _ in range(2):
        job.train(1)
        path = job.save(tmp_path)
    damaged = next(path.glob(file))
    damage(damaged)
    name = damaged.with_name("extra.safetensors") if damage is stray else damaged
    message = f"^{re.escape(str(name))} {said}"

    def body(ring: Ring) -> str:
        with pytest.raises(CheckpointError) as caught:
            Job(seed=2).load(path)
        return str(caught.value)

    errors = run_processes(body, 2)
    assert errors[0] == errors[1] and "\n" not in errors[0] and re.search(message, errors[0]), errors
    with pytest.warns(RuntimeWarning, match=f"{message}.*; the checkpoint before it is tried"):
        assert latest(tmp_path) == tmp_path / "step-00000001"
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.warns(RuntimeWarning), pytest.raises(CheckpointError, match="no whole checkpoint is left in"):
        latest(tmp_path)


def test_no_checkpoint_yet_is_none(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None
    (tmp_path / "step-00000001.writing").mkdir()
    assert latest(tmp_path) is None


def test_another_model_or_optimizer_is_named(tmp_path: Path) -> None:
    job = Job()
    job.train(1)
    path = job.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"model.back.bias is float64 \[7\] there, float64 \[6\] here \(and"):
        Job(width=6).load(path)
    with pytest.raises(CheckpointError, match="another model or optimiser: its groups of parameters differ"):
        load(path, job.model, torch.optim.SGD(job.model.parameters(), lr=0.1))
    job.optimizer = torch.optim.SGD(job.optimizer.param_groups, momentum=0.1)
    with pytest.raises(CheckpointError, match=r"optimizer.back.bias.exp_avg is float64 \[7\] there, absent here"):
        load(path, job.model, job.optimizer)
    with pytest.raises(CheckpointError, match=r"model.back.bias is float64 \[7\] there, float32 \[7\] here"):
        load(path, Job().model.float(), None)
    assert load(path, Job().model, None)["step"] == 1
    folders.write_record(path, {**folders.read_record(path), "format": 2})
    with pytest.raises(CheckpointError, match="has format 2; this version reads 1"):
        check(path)


def test_a_signal_to_one_rank_stops_all_at_the_same_step() -> None:
    def body(ring: Ring) -> tuple[int, bool]:
        before = signal.getsignal(signal.SIGTERM)
        with Stopper() as stopper:
            for step in range(10):
                if ring.rank == 1 and step == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                if stopper.requested():
                    break
        return step, signal.getsignal(signal.SIGTERM) == before

    assert run_processes(body, 3) == [(3, True)] * 3


def test_the_second_interrupt_interrupts() -> None:
    with Stopper() as stopper:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopper.requested()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
