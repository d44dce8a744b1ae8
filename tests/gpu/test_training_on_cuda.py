"""`burst train` on a GPU, as its users run it: with --deterministic a resumed run has the bits of a whole one."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]

MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
}


def train(out: Path, *options: str) -> list[float]:
    """Losses of a run, every digit of them."""
    words = [
        "train", "--out", str(out), "--steps", "8", "--save-every", "4", "--tokens", "4096", "--dtype", "bfloat16",
        "--deterministic", "--model-config", json.dumps(MODEL), *options,
    ]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "burst_attention.cli", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row["loss_metrics/global_avg_loss"] for row in rows if "loss_metrics/global_avg_loss" in row]


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    assert len(whole) == 8
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-00000008")
    assert train(tmp_path / "resumed", "--resume") == whole
    assert train(tmp_path / "again") == whole
