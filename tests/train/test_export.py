"""What is exported loads in transformers and computes the same, and no folder of somebody else's is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from burst_attention import Ring
from burst_attention.launch import run_processes
from burst_attention.train.export import export
from burst_attention.train.folders import CheckpointError

transformers = pytest.importorskip("transformers")


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


@pytest.mark.parametrize(("ranks", "tied"), [(1, False), (2, True), (2, False)])
def test_an_export_loads_and_computes_the_same(ranks: int, tied: bool, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a b c")
    tokens = torch.arange(10)[None]

    def body(ring: Ring) -> torch.Tensor:
        model = tiny_llama(tied)
        with torch.no_grad():
            logits: torch.Tensor = model(tokens).logits
        if ranks > 1:
            fully_shard(Wrapped(model))
        for _ in range(2):  # The second replaces the first.
            export(tmp_path / "model", model, [tmp_path / "vocab.txt"])
        return logits

    expected = run_processes(body, ranks)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "vocab.txt"]
    assert (tmp_path / "model" / "vocab.txt").read_text() == "a b c"
    assert not [path for path in (tmp_path / "model").iterdir() if path.suffix in (".bin", ".pt", ".pkl")]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.architectures == ["LlamaForCausalLM"]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected)


def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="exists and is no earlier export; choose another folder"):
        export(tmp_path, tiny_llama(False))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_failed_export_leaves_the_earlier_one(tmp_path: Path) -> None:
    model = tiny_llama(False)
    export(tmp_path / "model", model)
    with pytest.raises(CheckpointError, match=r"model was not exported: rank 0: FileNotFoundError: .* MiB free"):
        export(tmp_path / "model", model, [tmp_path / "absent"])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match="a Linear has no save_pretrained"):
        export(tmp_path / "other", nn.Linear(2, 2))
