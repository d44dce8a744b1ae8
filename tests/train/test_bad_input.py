"""Bad input of `burst train`: one clear line, a status that is not 0, and nothing half-written."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from burst_attention import Ring
from burst_attention.launch import run_processes
from burst_attention.train import start
from burst_attention.train.config import TrainConfig, add_arguments, read_config
from burst_attention.train.folders import read_record
from burst_attention.train.model import make_model
from burst_attention.train.parallel import agreed
from tests.train.commands import TINY, Command, arguments, run, saved, trained

transformers = pytest.importorskip("transformers")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")


def refused(words: list[str], folder: Path) -> str:
    """What a command that must fail says: one line."""
    status, said = run(words, folder)
    assert status == 2, said
    assert re.fullmatch("burst train: [^\n]+\n", said), said
    return said.removeprefix("burst train: ").rstrip("\n")


def empty(folder: Path) -> Path:
    (folder / "empty.txt").write_text("")
    return folder / "empty.txt"


def latin(folder: Path) -> Path:
    (folder / "latin.txt").write_bytes("naïve".encode("latin-1"))
    return folder / "latin.txt"


def folder_without_text(folder: Path) -> Path:
    (folder / "nothing").mkdir()
    return folder / "nothing"


def foreign_export(folder: Path) -> Path:
    (folder / "mine/model").mkdir(parents=True)
    (folder / "mine/model/notes.txt").write_text("of somebody's own")
    return folder / "mine"


def tiny(**changes: Any) -> str:
    return json.dumps({**TINY, **changes})


CASES: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "unknown-model": (lambda _: {"model": "nosuch"}, "there is no model 'nosuch'"),
    "no-language-model": (lambda _: {"model": "t5"}, "the family 't5' has no causal language model in transformers"),
    "softcap": (lambda _: {"model": "gemma2"}, "caps its scores"),
    "own-mask": (lambda _: {"model": "gemma3_text", "model_config": tiny(use_bidirectional_attention=True)}, "mask"),
    "dropout": (lambda _: {"model_config": tiny(attention_dropout=0.1)}, "attention_dropout must be 0, for ranks"),
    "dropout-of-one": (lambda _: {"model_config": tiny(attention_dropout=1)}, "attention_dropout must be 0, for ranks"),
    "window": (lambda _: {"window": 9}, "window 9 needs a mask with a window, and mask is documents"),
    "keep-last": (lambda _: {"keep_last": 0.5}, "keep_last needs checkpointing selective, which is none"),
    "out-in-a-file": (lambda folder: {"out": empty(folder) / "run"}, "empty.txt is a file"),
    "vocabulary": (lambda _: {"model_config": tiny(vocab_size=100)}, "the tokenizer has 257 tokens"),
    "model-config-typo": (lambda _: {"model_config": tiny(hiden_size=64)}, "'hiden_size'; is 'hidden_size' meant?"),
    "model-config": (lambda _: {"model_config": "{"}, "--model-config is neither a JSON object nor a file"),
    "empty-file": (lambda folder: {"data": empty(folder)}, "is empty"),
    "empty-folder": (lambda folder: {"data": folder_without_text(folder)}, "there are no text files in"),
    "no-data": (lambda folder: {"data": folder / "absent"}, "there is no data at"),
    "not-utf-8": (lambda folder: {"data": latin(folder)}, "is not UTF-8: byte 0xef at offset 2"),
    "no-tokenizer": (lambda folder: {"tokenizer": folder / "absent"}, "is not a folder; use 'bytes'"),
    "few-tokens": (lambda _: {"tokens": 3, "cp": 4}, "3 tokens cannot be spread over 4 ranks"),
    "hosts": (lambda _: {"cp": 4, "hosts": 3}, "4 ranks cannot be spread evenly over 3 hosts"),
    "hosts-in-part": (
        lambda _: {"cp": 3, "dp": 2, "hosts": 3, "tokens": 12},
        "cp x tp = 3 ranks share a sequence, and",
    ),
    "no-gpu": (lambda _: {"device": "cuda"}, "there is no GPU here"),
    "tp": (lambda _: {"tp": 3, "cp": 1}, "tp 3 must divide the model's 4 heads and 2 key heads"),
    "clip": (lambda _: {"clip": "nan"}, "clip must be a finite number, got nan"),
    "timeout": (lambda _: {"timeout": "inf"}, "timeout must be a finite number, got inf"),
    "seed": (lambda _: {"seed": 10**30}, "seed must be at most 9.22337e+18, got 1000"),
    "model-config-folder": (lambda folder: {"model_config": folder}, "--model-config is neither a JSON object nor"),
    "foreign-export": (lambda folder: {"out": foreign_export(folder)}, "model exists and is no earlier export"),
    "missing-package": (lambda _: {"wandb": True}, "--wandb needs the package wandb"),
}


@linux
@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    settings, said = CASES[case]
    given = settings(tmp_path)
    elsewhere = ["--out", str(given.pop("out"))] if "out" in given else []
    words = [*arguments(tmp_path / "run", **given), *elsewhere]
    assert said in refused(words, tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("lama", "there is no model 'lama': neither a folder nor a family that transformers knows; near it: llama, "),
        ("vit", "the family 'vit' has no causal language model in transformers; near it: git; "),
        ("t5", "the family 't5' has no causal language model in transformers; "),
        ("x" * 200, f"there is no model '{'x' * 40}...': neither a folder nor a family that transformers knows; "),
    ],
)
def test_a_wrong_family_is_told_briefly_with_those_near_it(model: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}.*--model list prints all families$") as caught:
        make_model(TrainConfig(model=model), 257)
    assert len(str(caught.value)) <= 200


def test_what_a_family_says_at_length_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_config(*_: Any, **__: Any) -> Any:
        raise KeyError("a word and another " * 100)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", from_config)
    with pytest.raises(ValueError, match=r"^cannot make a causal .* family llama: 'a word and .* \.\.\.$") as caught:
        make_model(TrainConfig(), 257)
    assert len(str(caught.value)) <= 200


def test_all_families_can_be_seen(capsys: pytest.CaptureFixture[str]) -> None:
    assert start.train(TrainConfig(model="list")) == 0
    printed = capsys.readouterr().out.split()
    assert {"llama", "qwen3", "gpt2"} <= set(printed) and "vit" not in printed
    assert printed == sorted(printed)


@linux
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stepz = 3", "there is no setting 'stepz'; is 'steps' meant?"),
        ("steps = 'three'", "steps must be a whole number, got 'three'"),
        ("steps = ", "cannot read the settings in"),
        ("layout = 'zagzig'", "layout must be one of"),
    ],
)
def test_a_typo_in_the_settings_is_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(text)
    assert said in refused(["train", "--config", str(tmp_path / "settings.toml")], tmp_path)


@linux
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stpes", "3"], "there is no option --stpes, is --steps meant?"),
        (["--steps", "three"], "argument --steps: invalid int value: 'three'"),
        (["--layout=zagzig"], "argument --layout: invalid choice: 'zagzig'"),
    ],
)
def test_a_typo_in_the_command_is_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    assert said in refused(["train", *words], tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    trained(out, steps=2, save_every=1)
    return out


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@linux
@pytest.mark.parametrize("file", ["state.json", "tensors/shard-00002-model-00001-of-00001.safetensors"])
def test_a_truncated_checkpoint_is_named_and_the_one_before_it_taken(file: str, copy: Path) -> None:
    assert saved(copy) == ["step-00000001", "step-00000002"]
    damaged = copy / "checkpoints" / "step-00000002" / file
    os.truncate(damaged, damaged.stat().st_size // 2)
    status, said = run(arguments(copy, steps=2, save_every=1, resume=True), copy.parent)
    assert status == 0
    assert re.fullmatch(f"burst train: {damaged} [^\n]+; step-00000001, saved before it, is taken\n", said), said


@linux
@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_without_a_whole_checkpoint_nothing_is_touched(damage: str, copy: Path) -> None:
    shards = sorted(copy.rglob("shard-00001-*.safetensors"))
    assert len(shards) == 2
    for shard in shards:
        text = bytearray(shard.read_bytes())
        text[len(text) // 2] ^= 1
        shard.write_bytes(text[:-100] if damage == "truncated" else text)
    before = content(copy)
    said = refused(arguments(copy, steps=2, resume=True), copy.parent)
    assert said.startswith(f"no whole checkpoint is left in {copy}/checkpoints: {shards[1]} ")
    assert content(copy) == before


@linux
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": 64}, "tokens was 128 in the checkpoint and is 64 now"),
        ({"model_config": tiny(hidden_size=64)}, "another model"),
        ({"accumulate": 3}, "a step read 1 sequences (dp x accumulate) in the checkpoint and would read 3"),
        ({"data": __file__}, "was trained on other data"),
    ],
    ids=["tokens", "model", "accumulate", "data"],
)
def test_a_run_is_not_resumed_as_another(changes: dict[str, Any], said: str, copy: Path) -> None:
    before = content(copy)
    assert said in refused(arguments(copy, steps=2, resume=True, **changes), copy.parent)
    assert content(copy) == before


@linux
def test_what_may_change_with_a_resumed_run_does(copy: Path) -> None:
    with Command(arguments(copy, steps=3, resume=True, weight_decay=0.7), copy.parent) as command:
        assert command.wait() == 0, command.stderr
        assert "weight_decay was 0.1 in the checkpoint and is 0.7 from here on" in command.stdout
    newest = max((copy / "checkpoints").iterdir())
    groups = read_record(newest)["optimizer"]["groups"]
    assert [group["weight_decay"] for group in groups] == [0.7, 0.0]


@linux
def test_a_resumed_run_has_the_settings_of_its_checkpoint(copy: Path) -> None:
    """What was given when it began, and differs from what is usual, is not given again."""
    words = ["train", "--resume", "--steps", "3", "--device", "cpu", "--timeout", "60", "--out", str(copy)]
    with Command(words, copy.parent) as command:
        assert command.wait() == 0, command.stderr
        assert "steps was 2 in the checkpoint and is 3 from here on" in command.stdout
    settings = read_record(max((copy / "checkpoints").iterdir()))["state"]["settings"]
    assert (settings["tokens"], settings["lr"], settings["steps"], settings["save_every"]) == (128, 3e-3, 3, 1)


def test_a_model_s_settings_are_kept_by_content_not_by_the_name_of_their_file(tmp_path: Path) -> None:
    (tmp_path / "shape.json").write_text(json.dumps(TINY, indent=2))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    config = read_config(parser.parse_args(["--model-config", str(tmp_path / "shape.json")]))
    assert config.model_config == json.dumps(TINY)


def test_a_whole_number_that_no_float_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="lr must be a finite number, got inf"):
        TrainConfig(lr=10**400)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for settings in ({"cp": 4}, {"dp": 3}, {"cp": 2, "dp": 2}):
        with pytest.raises(ValueError, match=r"\d ranks need as many GPUs, and 2 are here"):
            start.train(TrainConfig(**settings))  # type: ignore[arg-type]


def test_a_fault_on_one_rank_is_the_same_error_on_all() -> None:
    """A file that one host has not: the others do not wait for it, nor tell that they lost it."""

    def body(ring: Ring) -> str:
        def read() -> str:
            if ring.rank == 1:
                raise ValueError("there is no data at 'text'")
            return "data"

        with pytest.raises(ValueError, match="no data") as caught:
            agreed(read)
        return str(caught.value)

    assert run_processes(body, 3) == ["rank 1: there is no data at 'text'"] * 3
