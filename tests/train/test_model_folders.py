"""Models with weights of a folder: as they were saved, or refused in a line. And what a config may not ask for."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from safetensors.torch import load_file, save_file

from burst_attention.train import loop
from burst_attention.train.config import TrainConfig
from burst_attention.train.model import make_model, require_known_logits
from tests.train.commands import TINY, arguments, run

VOCABULARY = 257
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as others save theirs."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    make_model(TrainConfig(model_config=json.dumps(TINY), seed=3), VOCABULARY).save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    return make_model(TrainConfig(model=str(folder)), VOCABULARY)


def test_weights_are_those_of_the_folder(saved: Path) -> None:
    found, expected = load(saved).state_dict(), load_file(saved / WEIGHTS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def without_a_weight(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def configured(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def truncated(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_a_weight, "lacks 1 of its weights, model.layers.0.self_attn.q_proj.weight among them"),
        (configured(num_hidden_layers=4), "lacks 18 of its weights, model.layers.2.input_layernorm.weight among them"),
        (configured(hidden_size=64), "cannot load the model"),
        (truncated, "cannot load the model"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"no weights"), "cannot load the model"),
        (pickled, "cannot load the model"),
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json, so it is no model's folder"),
    ],
    ids=["a weight less", "more layers", "other sizes", "truncated", "garbage", "pickled", "no config"],
)
def test_a_wrong_folder_is_told_in_a_line(
    change: Callable[[Path], object], said: str, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    change(folder)
    with pytest.raises(ValueError, match=said) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_name_too_long_for_a_file_is_told_as_any_other() -> None:
    with pytest.raises(ValueError, match=r"there is no model 'xxxx.*--model list"):
        make_model(TrainConfig(model="x" * 300), VOCABULARY)
    with pytest.raises(ValueError, match="--model-config is neither a JSON object nor a file"):
        make_model(TrainConfig(model_config="x" * 300), VOCABULARY)


def test_a_folder_with_the_name_of_a_family_hides_it_only_if_it_is_a_model_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    config = TrainConfig(model_config=json.dumps(TINY))
    assert make_model(config, VOCABULARY).config.model_type == "llama"
    (tmp_path / "llama" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="llama brings its own"):
        make_model(config, VOCABULARY)


def test_a_family_that_drops_by_default_is_trained_without() -> None:
    shape = json.dumps({**TINY, "ffn_dim": 64, "word_embed_proj_dim": 32})
    with pytest.warns(UserWarning, match="dropout is off: the model's dropout taken as 0"):
        model = make_model(TrainConfig(model="opt", model_config=shape), VOCABULARY).train()
    ids = torch.arange(20)[None]
    first, second = (model(input_ids=ids).logits for _ in range(2))
    assert torch.equal(first, second)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_model(TrainConfig(model_config=json.dumps(TINY)), VOCABULARY)


def test_a_model_that_cannot_compute_is_told_in_a_line() -> None:
    def fail(**_: Any) -> Any:
        raise AttributeError("at length\n" * 50)

    model: Any = type("Broken", (), {"__call__": lambda self, **given: fail(**given), "eval": lambda self: self})()
    model.get_output_embeddings = lambda: SimpleNamespace(weight=torch.zeros(1))
    with pytest.raises(ValueError, match=r"^Broken cannot compute two tokens with this config: at length") as caught:
        require_known_logits(model)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_gradients_that_are_no_numbers_end_the_run_before_they_are_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loop, "clip_gradients", lambda parameters, limit: torch.tensor(float("nan")))
    status, said = run(arguments(tmp_path / "run", steps=1), tmp_path)
    assert status == 2
    assert said == "burst train: the gradients' norm of step 1 is nan; lower --lr, or look at the data\n"
    assert not (tmp_path / "run" / "checkpoints").exists()
