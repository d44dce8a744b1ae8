"""Fifty steps of training, sharded in every way against unsharded: `python -m tests.train.exact_matrix` keeps the rows.

With `bf16` after it, those of bf16 alone are made anew.

The same cells run as tests: `pytest -m matrix tests/train/test_exact_training.py`.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from burst_attention.bench import machine
from tests.train.exact import Trained, apart, sharded, tiny, unsharded

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "train_exact.jsonl"
COMMAND = "python -m tests.train.exact_matrix"
STEPS, BF16_STEPS, BF16_FACTOR = 50, 10, 1.5
BF16_TOKENS = 1021
"""With a few hundred a mean error over ten steps is a draw of few numbers."""
BF16_SEEDS = (0, 1, 2)
LAYOUTS = ("zigzag", "striped", "contiguous")
Cell = dict[str, Any]

# A full learning rate from the first step: fp32 stays together at 1e-3, and it is the largest that is promised.
SAME: Cell = {"lr": 1e-3, "clip": 1.0, "warmup": 0, "window": 9, "dtype": "float32"}
CELLS: list[Cell] = [
    *(
        {"cp": cp, "layout": layout, "mask": mask}
        for cp in (2, 4)
        for layout in LAYOUTS
        for mask in ("causal", "documents", "window", "documents-window")
    ),
    {"cp": 2, "dp": 2},
    {"cp": 2, "accumulate": 3},
    {"cp": 2, "dp": 2, "accumulate": 2, "layout": "striped"},
    {"cp": 2, "tp": 2},
    {"cp": 2, "dp": 2, "tp": 2},
    {"cp": 2, "tp": 2, "model": "qwen3"},
    {"cp": 4, "hosts": 2},
    {"cp": 4, "heads": 2, "checkpointing": "selective"},
    {"cp": 4, "heads": 4, "checkpointing": "full"},
    {"cp": 2, "checkpointing": "selective", "offload": True, "mlp_chunks": 3, "accumulate": 2},
    {"cp": 2, "shape": {"tie_word_embeddings": True}},
]
BF16_CELLS: list[Cell] = [{"cp": cp, "layout": layout} for cp in (2, 4) for layout in LAYOUTS]


def name_of(cell: Cell) -> str:
    return "-".join(f"{key}={value}" if key not in ("layout", "mask") else value for key, value in cell.items())


def measure(cell: Cell, folder: Path, steps: int = STEPS) -> tuple[Trained, Trained]:
    """(sharded, unsharded) of a cell."""
    config = tiny(folder, **{**SAME, "steps": steps, **cell})
    return sharded(config), unsharded(config)


def bf16_errors(cell: Cell, folder: Path, seed: int) -> tuple[float, float]:
    """Mean |loss - loss of the unsharded fp32 run|: of the sharded bf16 run, and of the unsharded bf16 one."""
    same = {**SAME, "steps": BF16_STEPS, "tokens": BF16_TOKENS, **cell, "seed": seed}
    config = tiny(folder, **{**same, "dtype": "bfloat16"})
    exact = unsharded(tiny(folder, **same)).losses

    def error(run: Trained) -> float:
        return sum(abs(a - b) for a, b in zip(run.losses, exact, strict=True)) / BF16_STEPS

    return error(sharded(config)), error(unsharded(config))


def main() -> None:
    """Run all cells and write a row of each."""
    torch.set_num_threads(1)
    only_bf16 = sys.argv[1:] == ["bf16"]
    kept = [json.loads(line) for line in RESULTS.read_text().splitlines()] if only_bf16 else []
    rows: list[dict[str, Any]] = [row for row in kept if row["suite"] == "train-exact"]
    about = {**machine(), "command": " ".join((COMMAND, *sys.argv[1:]))}
    with tempfile.TemporaryDirectory() as folder:
        for cell in () if only_bf16 else CELLS:
            started = time.perf_counter()
            found, expected = measure(cell, Path(folder))
            row = {"cell": name_of(cell), "steps": STEPS, **asdict(apart(found, expected))}
            rows.append({"suite": "train-exact", **row, "seconds": round(time.perf_counter() - started, 1), **about})
            print(json.dumps(row), flush=True)
        for cell, seed in itertools.product(BF16_CELLS, BF16_SEEDS):
            ours, theirs = bf16_errors(cell, Path(folder), seed)
            row = {"cell": name_of(cell), "seed": seed, "steps": BF16_STEPS, "error": ours, "unsharded_error": theirs}
            row["ratio"] = round(ours / theirs, 3)
            rows.append({"suite": "train-bf16", **row, **about})
            print(json.dumps(row), flush=True)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
