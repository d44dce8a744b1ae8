"""Sharded training is the unsharded run: every loss, every norm, all weights. And what would show if it were not.

`pytest -m matrix` runs fifty steps of every cell; here are the first few steps of the ones that differ most.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from burst_attention import Layout, Ring
from burst_attention.integrations.batch import shard_batch
from burst_attention.launch import run_processes
from burst_attention.train import loop
from burst_attention.train.config import TrainConfig
from burst_attention.train.loop import Trainer
from burst_attention.train.parallel import Ranks, make_ranks
from tests.train.exact import (
    LOSS,
    PARAMETERS,
    Trained,
    apart,
    next_tokens,
    require_same,
    sharded,
    tiny,
    unsharded,
)
from tests.train.exact_matrix import (
    BF16_CELLS,
    BF16_FACTOR,
    BF16_SEEDS,
    CELLS,
    LAYOUTS,
    SAME,
    Cell,
    bf16_errors,
    measure,
    name_of,
)

SHORT: list[Cell] = [
    {"cp": 2, "layout": "contiguous", "mask": "causal"},
    {"cp": 2, "layout": "zigzag", "mask": "documents"},
    {"cp": 4, "layout": "striped", "mask": "documents-window"},
    {"cp": 2, "dp": 2, "accumulate": 2, "mask": "window"},
    {"cp": 4, "hosts": 2, "mask": "causal"},
    # Some ranks have one token, some none, and documents of one token have no label.
    {"cp": 4, "tokens": 5, "layout": "zigzag"},
    {"cp": 2, "checkpointing": "selective", "offload": True, "mlp_chunks": 3, "shape": {"tie_word_embeddings": True}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all, so that runs that differ only in their ranks are trained unsharded once."""
    return tmp_path_factory.mktemp("train")


@pytest.mark.parametrize("cell", SHORT, ids=name_of)
def test_first_steps_are_the_unsharded_runs(cell: Cell, folder: Path) -> None:
    require_same(*measure(cell, folder, steps=3))


def test_hosts_that_are_told_make_a_double_ring(folder: Path) -> None:
    def look(trainer: Trainer) -> None:
        assert trainer.ring.ranks_per_host() == 2

    sharded(tiny(folder, cp=4, hosts=2, steps=1), look)
    with pytest.raises(ValueError, match="6 ranks cannot be spread evenly over 4 hosts"):
        TrainConfig(cp=2, dp=3, hosts=4).on(6)
    assert TrainConfig(cp=2, tp=2, dp=2, hosts=2).on(8).hosts == 2, "a host may hold a whole sequence"


@pytest.mark.matrix
@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_fifty_steps_are_the_unsharded_runs(cell: Cell, folder: Path) -> None:
    require_same(*measure(cell, folder))


@pytest.mark.parametrize(
    ("cell", "seed"),
    [
        pytest.param(cell, seed, marks=[pytest.mark.matrix] if index else [], id=f"{name_of(cell)}-{seed}")
        for index, (cell, seed) in enumerate(itertools.product(BF16_CELLS, BF16_SEEDS))
    ],
)
def test_bf16_is_no_further_from_fp32_than_unsharded_bf16(cell: Cell, seed: int, folder: Path) -> None:
    ours, unsharded_error = bf16_errors(cell, folder, seed)
    assert 0 < ours <= BF16_FACTOR * unsharded_error


def two_steps(folder: Path, **changes: Any) -> tuple[TrainConfig, Trained]:
    """A short run on two ranks, and what it must be."""
    config = tiny(folder, **{**SAME, "steps": 2, "cp": 2, **changes})
    return config, unsharded(config)


@pytest.mark.parametrize("factor", [0.5, 2.0], ids=["not at all", "twice"])
def test_a_wrong_sum_over_cp_shows(factor: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 sums over cp, once. Clipping and Adam hide a wrong factor from losses and weights: the norm does not."""
    config, expected = two_steps(folder, clip=0.1)
    right = Ranks.loss_scale
    monkeypatch.setattr(Ranks, "loss_scale", property(lambda ranks: factor * right.__get__(ranks)))
    wrong = sharded(config)
    difference = apart(wrong, expected)
    assert difference.loss <= LOSS and difference.weights <= PARAMETERS
    assert wrong.norms == pytest.approx([factor * norm for norm in expected.norms], rel=1e-5)
    with pytest.raises(AssertionError):
        require_same(wrong, expected)


def shifted_after_sharding(batch: Any, layout: Layout, rank: int) -> dict[str, Any]:
    cut = shard_batch(batch, layout, rank)
    labels = torch.full_like(cut["input_ids"], -100)
    labels[:, :-1] = cut["input_ids"][:, 1:]
    return {**cut, "shift_labels": labels}


def counted_from_the_shards_own_start(batch: Any, layout: Layout, rank: int) -> dict[str, Any]:
    cut = shard_batch(batch, layout, rank)
    # Not 0, which is refused: a count that begins where the shard does and goes on without its gaps.
    own = cut["position_ids"][:, :1] + torch.arange(cut["position_ids"].shape[1])
    return {**cut, "position_ids": own}


def without_documents_in_labels(batch: Any, layout: Layout, rank: int) -> dict[str, Any]:
    cut = shard_batch(batch, layout, rank)
    return {**cut, "shift_labels": shard_batch({**batch, "documents": None}, layout, rank)["shift_labels"]}


@pytest.mark.parametrize("wrong", [shifted_after_sharding, without_documents_in_labels])
def test_wrong_labels_show(wrong: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, expected = two_steps(folder)
    monkeypatch.setattr(loop, "shard_batch", wrong)
    assert apart(sharded(config), expected).loss > 10 * LOSS


def test_wrong_positions_show(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused; without the refusal the loss would tell."""
    config, expected = two_steps(folder)
    monkeypatch.setattr(loop, "shard_batch", counted_from_the_shards_own_start)
    monkeypatch.setattr("burst_attention.integrations.transformers._require_positions", lambda *_: None)
    assert apart(sharded(config), expected).loss > 10 * LOSS


@pytest.mark.parametrize("ring_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_labels_at_every_edge(name: str, ring_size: int) -> None:
    """Documents that end with a shard, one token before it and one after it; documents of one token."""
    tokens, documents = 24, (5, 1, 1, 5, 1, 5, 5, 1)
    config = TrainConfig(tokens=tokens, mask="documents")
    ids = torch.arange(100, 100 + tokens)
    expected = next_tokens(config, ids, documents)
    assert (expected == -100).nonzero().flatten().tolist() == [4, 5, 6, 11, 12, 17, 22, 23]
    layout = Layout(name, tokens, ring_size)
    seen: list[int] = []
    for rank in range(ring_size):
        cut = shard_batch({"input_ids": ids[None], "documents": documents}, layout, rank)
        positions = cut["position_ids"][0].tolist()
        assert cut["input_ids"][0].tolist() == [100 + at for at in positions]
        assert cut["shift_labels"][0].tolist() == expected[positions].tolist()
        assert cut["num_items_in_batch"] == tokens - len(documents)
        seen += positions
    assert sorted(seen) == list(range(tokens))


@pytest.mark.parametrize("mask", ["documents", "causal"])
def test_what_the_model_is_given(mask: str, folder: Path) -> None:
    """Every token of a step on one rank, with its place, its label and the same weight; weights sum to 1."""
    config = tiny(folder, cp=2, dp=2, accumulate=2, steps=1, mask=mask)

    def body(ring: Ring) -> list[dict[str, Any]]:
        trainer = Trainer(config, make_ranks(config, torch.device("cpu")))
        given, forward = [], trainer.model.forward

        def noted(batch: dict[str, Any]) -> torch.Tensor:
            given.append({**batch, "replica": trainer.ranks.dp})
            return forward(batch)

        trainer.model.forward = noted  # type: ignore[method-assign]
        trainer._train_step()
        sequences = [trainer.sequences(0, micro_batch) for micro_batch in range(config.accumulate)]
        return [{**each, "whole": sequences[index][each["replica"]]} for index, each in enumerate(given)]

    weight, places, numbers = 0.0, [], set()
    for given in (batch for rank in run_processes(body, 4) for batch in rank):
        whole, positions = given["whole"], given["position_ids"][0]
        assert torch.equal(given["input_ids"][0], whole.input_ids[positions])
        assert torch.equal(given["shift_labels"][0], next_tokens(config, whole.input_ids, whole.documents)[positions])
        assert given["documents"] == (whole.documents if mask == "documents" else None)
        numbers.add(given["num_items_in_batch"])
        weight += int((given["shift_labels"] != -100).sum()) / given["num_items_in_batch"]
        places += positions.tolist()
    assert len(numbers) == 1 and weight == pytest.approx(1)
    assert sorted(places) == sorted(4 * list(range(config.tokens)))
