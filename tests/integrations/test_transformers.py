"""transformers' models on a ring: the loss and every gradient of the whole sequence, and nothing dropped in silence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from burst_attention import Layout, Ring, causal, documents, run_ranks, window
from burst_attention.integrations.batch import shard_batch
from burst_attention.integrations.transformers import NAME, disable, enable
from tests.integrations.tiny_models import FAMILIES, SMALL, tiny_model

TOKENS = 61
DOCUMENTS = (7, 1, 20, 33)


def whole_batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(0, 97, (2, TOKENS), generator=generator)}


def dense_mask(model: Any, lengths: tuple[int, ...] | None) -> Any:
    """What the same model takes for the same documents, on one device: a dense mask, its own window beside it."""
    if lengths is None:
        return None
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
    allowed = (i >= j) & (ids[:, None] == ids[None])
    reach = getattr(model.config, "sliding_window", None)

    def bias(allowed: torch.Tensor) -> torch.Tensor:
        return torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))[None, None]

    kinds = getattr(model.config, "layer_types", None)
    if kinds and "sliding_attention" in kinds and "full_attention" in kinds:
        return {"full_attention": bias(allowed), "sliding_attention": bias(allowed & (i - j < reach))}
    return bias(allowed & (i - j < reach) if reach else allowed)


def reference(model: Any, lengths: tuple[int, ...] | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the unsharded model."""
    batch = shard_batch({**whole_batch(), "documents": lengths}, Layout.contiguous(TOKENS, 1), 0)
    given = {name: batch[name] for name in ("input_ids", "labels", "shift_labels", "num_items_in_batch")}
    loss = model(**given, attention_mask=dense_mask(model, lengths), use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def sharded(model: Any, layout: Layout, lengths: tuple[int, ...] | None, **options: Any) -> Any:
    """The same, summed over the ranks of a ring of threads, each with a copy of the model."""

    def body(ring: Ring) -> Any:
        mine = enable(copy.deepcopy(model), ring=ring, **options)
        batch = shard_batch({**whole_batch(), "documents": lengths}, layout, ring.rank)
        loss = mine(**batch, use_cache=False).loss  # type: ignore[operator]
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in mine.named_parameters()}

    parts = run_ranks(body, layout.ring_size, timeout=60)
    gradients = {name: torch.stack([part[1][name] for part in parts]).sum(0) for name in parts[0][1]}
    return torch.stack([part[0] for part in parts]).sum(), gradients


def require_same(found: Any, expected: Any) -> None:
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-5)
    for name, gradient in expected[1].items():
        difference = (found[1][name] - gradient).norm() / gradient.norm().clamp(min=1e-8)
        assert difference < 2e-5, (name, float(difference))


@pytest.mark.parametrize("lengths", [None, DOCUMENTS], ids=["causal", "documents"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_models_give_the_whole_sequences_loss_and_gradients(family: str, lengths: tuple[int, ...] | None) -> None:
    model = tiny_model(family)
    require_same(
        sharded(model, Layout.zigzag(TOKENS, 3), lengths),
        reference(copy.deepcopy(model), lengths),
    )


@pytest.mark.parametrize("name", ["contiguous", "striped"])
def test_layouts(name: str) -> None:
    model = tiny_model("llama")
    require_same(
        sharded(model, Layout(name, TOKENS, 4), DOCUMENTS, heads=2), reference(copy.deepcopy(model), DOCUMENTS)
    )


def test_labels_are_shifted_before_they_are_cut() -> None:
    """Cut first and shifted then, every shard's last label would be wrong; so would a document's."""
    layout, batch = Layout.zigzag(TOKENS, 3), {**whole_batch(), "documents": DOCUMENTS}
    ids, ends = batch["input_ids"], torch.tensor(DOCUMENTS).cumsum(0) - 1
    for rank in range(3):
        mine, positions = shard_batch(batch, layout, rank), layout.positions(rank)
        assert torch.equal(mine["position_ids"][1], positions)
        for at, position in enumerate(positions.tolist()):
            expected = torch.full((2,), -100) if position in ends.tolist() else ids[:, position + 1]
            assert torch.equal(mine["shift_labels"][:, at], expected)
        assert mine["num_items_in_batch"] == 2 * (TOKENS - len(DOCUMENTS))
        assert mine["documents"] == DOCUMENTS and mine["layout"] == layout


def test_own_labels_are_shifted_too() -> None:
    labels = torch.full((2, TOKENS), -100)
    labels[:, 5] = 3
    mine = shard_batch({**whole_batch(), "labels": labels}, Layout.contiguous(TOKENS, 1), 0)
    assert (mine["shift_labels"] != -100).nonzero().tolist() == [[0, 4], [1, 4]] and mine["num_items_in_batch"] == 2


def test_recomputation_and_interleaved_micro_batches_see_their_own() -> None:
    """Two forwards with different documents before either backward, layers recomputed: nothing may be remembered."""
    model = tiny_model("llama")
    layout, others = Layout.zigzag(TOKENS, 2), (30, 31)

    def body(ring: Ring) -> dict[str, torch.Tensor]:
        mine: Any = enable(copy.deepcopy(model), ring=ring)
        mine.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        mine.train()
        losses = []
        for lengths in (DOCUMENTS, others):
            batch = shard_batch({**whole_batch(), "documents": lengths}, layout, ring.rank)
            losses.append(mine(**batch, use_cache=False).loss)
        for loss in reversed(losses):
            loss.backward()
        return {name: p.grad for name, p in mine.named_parameters()}

    parts = run_ranks(body, 2, timeout=60)
    found = {name: sum(part[name] for part in parts) for name in parts[0]}
    expected = [reference(copy.deepcopy(model), lengths)[1] for lengths in (DOCUMENTS, others)]
    for name, gradient in found.items():
        whole = expected[0][name] + expected[1][name]
        assert (gradient - whole).norm() <= 2e-5 * whole.norm(), name


def test_enabling_again_replaces_and_disabling_undoes() -> None:
    def body(ring: Ring) -> None:
        model: Any = tiny_model("llama")
        enable(model, ring=ring)
        enable(model, ring=ring, mask=causal() & window(5))
        assert model.config._attn_implementation == NAME
        batch = shard_batch(whole_batch(), Layout.zigzag(TOKENS, ring.size), ring.rank)
        with torch.no_grad():
            near = model(**batch, use_cache=False).loss
            enable(model, ring=ring)
            far = model(**batch, use_cache=False).loss
        assert near != far
        disable(model)
        assert model.config._attn_implementation == "sdpa"
        model(batch["input_ids"])

    run_ranks(body, 2, timeout=60)


def refusal(call: Any, family: str = "llama", size: int = 2, **changes: Any) -> str:
    """What a model that is called so says, on every rank alike."""

    def body(ring: Ring) -> str:
        model: Any = enable(tiny_model(family, **changes), ring=ring)
        try:
            call(model, shard_batch(whole_batch(), Layout.zigzag(TOKENS, ring.size), ring.rank))
        except (ValueError, RuntimeError) as error:
            return str(error)
        return ""

    texts = set(run_ranks(body, size, timeout=60))
    assert len(texts) == 1
    return texts.pop()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"output_attentions": True}, "output_attentions is refused: weights are never formed"),
        ({"softcap": 30.0}, "softcap is refused: a cap on the scores"),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, "cu_seq_lens_q is refused: say documents="),
        ({"something_new": 1}, "something_new is refused: it is not known here"),
    ],
)
def test_keywords_are_honoured_or_refused(keywords: dict[str, Any], message: str) -> None:
    assert message in refusal(lambda model, batch: model(**batch, **keywords))


def test_padding_is_refused_and_a_mask_of_ones_is_not() -> None:
    def call(model: Any, batch: Any, value: int) -> None:
        mask = torch.ones_like(batch["input_ids"])
        mask[:, -1] = value
        model(**batch, attention_mask=mask)

    assert "masks padding, which is not taken" in refusal(lambda model, batch: call(model, batch, 0))
    assert refusal(lambda model, batch: call(model, batch, 1)) == ""


def test_a_dense_mask_is_refused() -> None:
    def call(model: Any, batch: Any) -> None:
        tokens = batch["input_ids"].shape[1]
        model(**batch, attention_mask=torch.zeros(2, 1, tokens, tokens))

    # Shards of an odd length differ, and with them the shapes in the message.
    def body(ring: Ring) -> str:
        model: Any = enable(tiny_model("llama"), ring=ring)
        batch = shard_batch(whole_batch(), Layout.zigzag(TOKENS, ring.size), ring.rank)
        with pytest.raises(ValueError, match="a dense attention mask of shape") as caught:
            call(model, batch)
        return str(caught.value)

    assert all("write it as a Mask" in text for text in run_ranks(body, 2, timeout=60))


def test_positions_that_begin_at_0_on_every_rank_are_refused() -> None:
    def body(ring: Ring) -> str:
        model: Any = enable(tiny_model("llama"), ring=ring)
        batch = shard_batch(whole_batch(), Layout.zigzag(TOKENS, 2), ring.rank)
        del batch["position_ids"]
        with pytest.raises(ValueError, match="not this rank's positions in the whole sequence") as caught:
            model(**batch)
        return str(caught.value)

    run_ranks(body, 2, timeout=60)


def test_caches_are_refused() -> None:
    def call(model: Any, batch: Any) -> None:
        with torch.no_grad():
            cache = model(**batch, use_cache=True).past_key_values
            model(**batch, past_key_values=cache)

    def body(ring: Ring) -> None:
        model: Any = enable(tiny_model("llama"), ring=ring)
        with pytest.raises(ValueError, match="caches of earlier tokens are not served"):
            call(model, shard_batch(whole_batch(), Layout.zigzag(TOKENS, 2), ring.rank))

    run_ranks(body, 2, timeout=60)


def test_models_that_need_more_are_refused_at_once() -> None:
    def body(ring: Ring) -> None:
        with pytest.raises(ValueError, match="drops attention weights"):
            enable(tiny_model("llama", attention_dropout=0.1), ring=ring)
        with pytest.raises(ValueError, match="needs a transformers model, got Linear"):
            enable(torch.nn.Linear(2, 2), ring=ring)
        with pytest.raises(ValueError, match="ring must be a Ring"):
            enable(tiny_model("llama"), ring="ring")  # type: ignore[arg-type]

    run_ranks(body, 1, timeout=60)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen3_next", {"linear_num_value_heads": 4, "num_experts": 0}, "linear_attention"),
        ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4}, "hybrid"),
        ("llama4_text", {"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
    ],
)
def test_layers_that_are_not_attention_are_refused(family: str, changes: dict[str, Any], named: str) -> None:
    """Their states would end at a shard's edge, their masks would be dropped, and nothing would tell."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{**SMALL, "head_dim": 8, **changes})

    def body(ring: Ring) -> None:
        model: Any = tiny_model("llama")
        model.config = config
        with pytest.raises(ValueError, match=rf"neither full nor sliding attention \(.*{named}"):
            enable(model, ring=ring)
        model = tiny_model("llama")
        model.model.layers[1].mix = torch.nn.Conv1d(2, 2, 3)
        with pytest.raises(ValueError, match=r"\(model.layers.1.mix\); what they pass from token to token"):
            enable(model, ring=ring)

    run_ranks(body, 1, timeout=60)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": torch.zeros(4)}, "needs input_ids of shape"),
        ({"input_ids": torch.zeros(1, TOKENS), "token_type_ids": 1}, r"cannot cut \['token_type_ids'\]"),
        ({"input_ids": torch.zeros(1, TOKENS), "labels": torch.zeros(1, 3)}, "must have the shape of input_ids"),
        ({"input_ids": torch.zeros(1, TOKENS), "position_ids": torch.zeros(1)}, "makes position_ids itself"),
        ({"input_ids": torch.zeros(1, TOKENS), "documents": [3, 4]}, "documents sum to 7 tokens"),
        ({"input_ids": torch.zeros(1, TOKENS), "attention_mask": torch.zeros(1, TOKENS)}, "masks padding"),
        ({"input_ids": torch.zeros(1, 4)}, "holds 61"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_batch(batch, Layout.zigzag(TOKENS, 2), 0)


def test_a_module_without_a_ring_says_so() -> None:
    model: Any = tiny_model("llama")
    run_ranks(lambda ring: enable(tiny_model("llama"), ring=ring), 1, timeout=60)
    model.set_attn_implementation(NAME)
    with pytest.raises(RuntimeError, match=r"has no ring: call enable\(model, ring=...\)"):
        model(whole_batch()["input_ids"])


def test_documents_are_the_masks_own() -> None:
    """The keyword gives what enable(mask=) gives."""

    def body(ring: Ring) -> bool:
        layout = Layout.zigzag(TOKENS, ring.size)
        model: Any = enable(tiny_model("llama"), ring=ring)
        by_keyword = shard_batch({**whole_batch(), "documents": DOCUMENTS}, layout, ring.rank)
        with torch.no_grad():
            first = model(**by_keyword).logits
            enable(model, ring=ring, mask=causal() & documents(DOCUMENTS))
            second = model(**{**by_keyword, "documents": None}).logits
        return torch.equal(first, second)

    assert all(run_ranks(body, 2, timeout=60))
