"""Recomputed layers whose attention is not: forward runs once, or once more for the first part of the sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from burst_attention import Layout, Ring, heads_ops, ops, run_ranks
from burst_attention.integrations.batch import shard_batch
from burst_attention.integrations.checkpointing import is_first_part, keep_attention
from burst_attention.integrations.transformers import enable
from tests.integrations.test_transformers import DOCUMENTS, TOKENS, reference, require_same, whole_batch
from tests.integrations.tiny_models import tiny_model

LAYERS, RANKS = 2, 2


def train_step(
    monkeypatch: pytest.MonkeyPatch, family: str, layout: Layout, selective: bool, **options: Any
) -> tuple[Any, list[str]]:
    """Loss and gradients summed over ranks, and the layouts that rank 0's attention ran with."""
    model, calls = tiny_model(family), []
    for module in (ops, heads_ops):
        before = module.run_forward

        def counted(q: Any, k: Any, v: Any, text: str, ring: Ring, run: Any = before) -> Any:
            if ring.rank == 0:
                calls.append(ops.parse_options(text)[0].layout)
            return run(q, k, v, text, ring)

        monkeypatch.setattr(module, "run_forward", counted)

    def body(ring: Ring) -> Any:
        mine: Any = enable(copy.deepcopy(model), ring=ring, **options)
        kept = {"context_fn": keep_attention()} if selective else {}
        mine.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **kept})
        mine.train()
        batch = shard_batch({**whole_batch(), "documents": DOCUMENTS}, layout, ring.rank)
        loss = mine(**batch, use_cache=False).loss
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in mine.named_parameters()}

    parts = run_ranks(body, RANKS, timeout=60)
    gradients = {name: sum(part[1][name] for part in parts) for name in parts[0][1]}
    return (sum(part[0] for part in parts), gradients), calls


@pytest.mark.parametrize("options", [{}, {"heads": 2}], ids=["ring", "heads"])
def test_attention_runs_once_where_its_results_are_kept_and_twice_where_not(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    layout = Layout.zigzag(TOKENS, RANKS)
    expected = reference(tiny_model("llama"), DOCUMENTS)
    for selective, runs in ((True, LAYERS), (False, 2 * LAYERS)):
        with monkeypatch.context() as patch:
            found, calls = train_step(patch, "llama", layout, selective, **options)
        require_same(found, expected)
        assert len(calls) == runs


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("name", ["zigzag", "striped", "contiguous"])
def test_only_the_first_part_runs_again(monkeypatch: pytest.MonkeyPatch, name: str, family: str) -> None:
    layout = Layout(name, TOKENS, RANKS)
    cut = TOKENS - round(0.4 * TOKENS)
    found, calls = train_step(monkeypatch, family, layout, True, keep_last=0.4)
    require_same(found, reference(tiny_model(family), DOCUMENTS))
    first, last = str(layout.between(0, cut)), str(layout.between(cut, TOKENS))
    assert sorted(calls) == sorted(2 * LAYERS * [first] + LAYERS * [last])
    assert is_first_part(first) and not is_first_part(last) and not is_first_part(str(layout))


@pytest.mark.parametrize("keep", [0, 1.5, -1])
def test_fractions_that_are_none_are_refused(keep: float) -> None:
    def body(ring: Ring) -> None:
        with pytest.raises(ValueError, match="keep_last is a fraction of the sequence"):
            enable(tiny_model("llama"), ring=ring, keep_last=keep)

    run_ranks(body, 1, timeout=60)


def test_a_bare_name_does_not_say_which_rows_come_last() -> None:
    def body(ring: Ring) -> None:
        model: Any = enable(tiny_model("llama"), ring=ring, keep_last=0.5)
        batch = shard_batch(whole_batch(), Layout.zigzag(TOKENS, RANKS), ring.rank)
        with pytest.raises(ValueError, match="keep_last needs a Layout"):
            model(**{**batch, "layout": None})

    run_ranks(body, RANKS, timeout=60)


def test_the_kept_results_are_no_ones_state() -> None:
    """One context for all layers, and a forward without backward between: nothing is left for the next."""
    context = keep_attention()
    first, second = context(), context()
    assert first is not second and torch.is_grad_enabled()
