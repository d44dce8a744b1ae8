"""What recomputation costs: attention's forward runs once per layer and step where kept, twice where it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from burst_attention import Ring, heads_ops, ops
from burst_attention.launch import run_processes
from burst_attention.train.config import TrainConfig
from burst_attention.train.loop import Trainer
from burst_attention.train.parallel import make_ranks
from tests.train.exact import LOSS, TINY, tiny, unsharded
from tests.train.exact_matrix import SAME

STEPS, ACCUMULATE = 2, 2
CALLS = TINY["num_hidden_layers"] * ACCUMULATE
"""Layers times sequences: how often attention is needed in a step."""
RUNS = {"none": 1, "selective": 1, "full": 2}
"""How often its forward runs for each of them."""


def counted(found: dict[str, int], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    found[name] = 0

    def call(*args: Any) -> Any:
        found[name] += 1
        return function(*args)

    return call


def counts_and_records(config: TrainConfig) -> dict[str, tuple[list[dict[str, int]], list[tuple[float, float]]]]:
    """By kind of recomputation: how often each operator ran in every step, and what was logged; on rank 0."""

    def body(ring: Ring) -> Any:
        now: dict[str, int] = {}
        # What the operators run, whoever calls them: forward, a recomputation or the policy that keeps them.
        for module, prefix in ((ops, ""), (heads_ops, "heads_")):
            for name in ("run_forward", "run_backward"):
                setattr(module, name, counted(now, prefix + name, getattr(module, name)))
        found = {}
        for checkpointing in RUNS:
            chosen = replace(config, checkpointing=checkpointing)
            trainer = Trainer(chosen, make_ranks(chosen, torch.device("cpu")))
            steps, records = [], []
            for trainer.step in range(STEPS):
                now.update(dict.fromkeys(now, 0))
                record = trainer._train_step()
                steps.append(dict(now))
                records.append((record.loss, record.grad_norm))
            found[checkpointing] = steps, records
        return found

    return run_processes(body, config.cp, timeout=300, ring_timeout=120)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("cp", "heads"), [(2, 1), (4, 2)], ids=["ring", "heads"])
def test_attention_runs_once_where_it_is_kept(cp: int, heads: int, tmp_path: Path) -> None:
    config = tiny(tmp_path, **{**SAME, "steps": STEPS, "cp": cp, "heads": heads, "accumulate": ACCUMULATE})
    expected = unsharded(config)
    ours, other = ("heads_", "") if heads > 1 else ("", "heads_")
    for checkpointing, (steps, records) in counts_and_records(config).items():
        for found in steps:
            assert found[f"{ours}run_forward"] == RUNS[checkpointing] * CALLS, checkpointing
            assert found[f"{ours}run_backward"] == CALLS, checkpointing
            assert found[f"{other}run_forward"] == found[f"{other}run_backward"] == 0
        assert [loss for loss, _ in records] == pytest.approx(expected.losses, rel=LOSS)
        assert [norm for _, norm in records] == pytest.approx(expected.norms, rel=LOSS)
