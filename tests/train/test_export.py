"""What is exported loads in transformers and computes the same, and no folder of somebody else's is touched."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from burst_attention import Ring
from burst_attention.launch import run_processes
from burst_attention.train.export import export, tokenizer_files
from burst_attention.train.folders import CheckpointError
from tests.train.commands import trained

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
MODEL_FILES = {"config.json", "generation_config.json", "model.safetensors", "burst_export.json"}


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def tiny_llama(tied: bool) -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def tiny_tokenizer(folder: Path) -> Path:
    """As tokenizers saves one, among files that are none of its own."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=270, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(["rings of rings of attention"] * 3, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    for name in ("config.json", "tokenization_own.py", "model.safetensors", "notes.txt"):
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(("ranks", "tied"), [(1, False), (2, True), (2, False)])
def test_an_export_loads_and_computes_the_same(ranks: int, tied: bool, tmp_path: Path) -> None:
    folder = tiny_tokenizer(tmp_path / "tokenizer")
    tokens = torch.arange(10)[None]

    def body(ring: Ring) -> torch.Tensor:
        model = tiny_llama(tied)
        with torch.no_grad():
            logits: torch.Tensor = model(tokens).logits
        if ranks > 1:
            fully_shard(Wrapped(model))
        for _ in range(2):  # The second replaces the first.
            export(tmp_path / "model", model, folder)
            assert len({path.stat().st_mode for path in (tmp_path / "model").iterdir()}) == 1
        return logits

    expected = run_processes(body, ranks)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tokenizer"]
    written = {path.name for path in (tmp_path / "model").iterdir()}
    assert written == {*MODEL_FILES, "tokenizer.json", "tokenizer_config.json"}
    text = "rings of rings"
    ours, loaded = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "model"))
    assert loaded.encode(text) == ours.encode(text) and loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_token == "<end>"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.architectures == ["LlamaForCausalLM"]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
@pytest.mark.parametrize("own", [True, False])
def test_a_runs_tokenizer_is_exported_with_its_model(own: bool, tmp_path: Path) -> None:
    """But the bytes have no files."""
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer") if own else "bytes"
    trained(tmp_path / "run", steps=1, tokenizer=tokenizer)
    model = tmp_path / "run" / "model"
    if own:
        assert transformers.AutoTokenizer.from_pretrained(model).decode([0]) == "<end>"
    else:
        assert {path.name for path in model.iterdir()} == MODEL_FILES


def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="exists and is no earlier export; choose another folder"):
        export(tmp_path, tiny_llama(False))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_failed_export_leaves_the_earlier_one(tmp_path: Path) -> None:
    model = tiny_llama(False)
    export(tmp_path / "model", model)
    with pytest.raises(
        CheckpointError, match=r"model was not exported: rank 0: FileNotFoundError: .*absent.* MiB free"
    ):
        export(tmp_path / "model", model, tmp_path / "absent")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match="a Linear has no save_pretrained"):
        export(tmp_path / "other", nn.Linear(2, 2))


def test_of_a_tokenizers_folder_nothing_else_is_taken(tmp_path: Path) -> None:
    folder = tiny_tokenizer(tmp_path / "tokenizer")
    (folder / "merges.txt").symlink_to("notes.txt")
    (folder / "vocab.json").symlink_to("nowhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tokenizer_files(folder)
    assert [path.name for path in found] == ["tokenizer.json", "tokenizer_config.json", "merges.txt"]


def test_a_link_out_of_a_tokenizers_folder_is_not_followed(tmp_path: Path) -> None:
    folder = tiny_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "secret").write_text("of its user")
    (folder / "chat_template.jinja").symlink_to("../secret")
    with pytest.warns(UserWarning, match=r"chat_template.jinja leads out of its folder, so it is not exported"):
        export(tmp_path / "model", tiny_llama(False), folder)
    assert not (tmp_path / "model" / "chat_template.jinja").exists()
    assert (tmp_path / "model" / "tokenizer.json").exists()


def test_a_snapshot_of_the_hubs_cache_is_a_tokenizers_folder(tmp_path: Path) -> None:
    """Its files are links to the cache's blobs."""
    folder = tmp_path / "models--a--b" / "snapshots" / "0123"
    folder.parent.mkdir(parents=True)
    blob = tmp_path / "models--a--b" / "blobs" / "4567"
    tiny_tokenizer(folder)
    blob.parent.mkdir()
    (folder / "tokenizer.json").rename(blob)
    (folder / "tokenizer.json").symlink_to("../../blobs/4567")
    export(tmp_path / "model", tiny_llama(False), folder)
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == blob.read_bytes()
    assert not (tmp_path / "model" / "tokenizer.json").is_symlink()
