"""A checkpoint is whole or does not exist, resumes to the last bit, fits any number of ranks, and never lies."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from burst_attention import Ring
from burst_attention.launch import run_processes
from burst_attention.train import checkpoint, folders
from burst_attention.train.checkpoint import CheckpointError, check, latest, load, save
from tests.train.jobs import Job, differences, names, saved

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


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
    with pytest.warns(RuntimeWarning, match=f"{message}.*; step-00000001, saved before it, is taken"):
        assert latest(tmp_path) == tmp_path / "step-00000001"
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="no whole checkpoint is left in"):
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
