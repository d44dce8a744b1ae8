"""Hugging Face transformers on a ring: `enable(model, ring=...)`, then `model(**shard_batch(batch, layout, rank))`.

Shapes: B batch, H query heads, G key heads, S tokens of this rank, D head dim.

One name is registered through transformers' public interfaces; nothing else is global. The ring and what does not
change stand on the model's modules; layout and documents of a batch come with each call and are never kept, so that a
recomputation and interleaved micro-batches see their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from burst_attention.api import burst_attention
from burst_attention.integrations.batch import require_unpadded, shard_batch
from burst_attention.integrations.checkpointing import attend_in_parts
from burst_attention.layout import Layout
from burst_attention.mask import Mask, causal, documents, full, window
from burst_attention.ring import Ring

__all__ = ["NAME", "disable", "enable", "shard_batch"]

NAME = "burst_attention"
SETTINGS = "_burst_attention"

REFUSED = {
    "softcap": "a cap on the scores is not implemented",
    "position_bias": "an additive bias on the scores is not implemented",
    "relative_position_bias": "an additive bias on the scores is not implemented",
    "alibi": "an additive bias on the scores is not implemented",
    "head_mask": "a mask of heads is not implemented",
    "output_attentions": "weights are never formed, so they cannot be returned",
    "cu_seq_lens_q": "say documents=[...] with the lengths of the whole sequence's documents instead",
    "cu_seq_lens_k": "say documents=[...] with the lengths of the whole sequence's documents instead",
    "cu_seqlens": "say documents=[...] with the lengths of the whole sequence's documents instead",
    "indexer_mask": "a mask of chosen keys is not implemented",
}
SERVED_LAYERS = {"full_attention", "sliding_attention"}
HARMLESS = {
    "labels", "shift_labels", "num_items_in_batch", "use_cache", "cache_position", "past_key_values", "past_key_value",
    "return_dict", "output_hidden_states", "output_router_logits", "logits_to_keep", "max_length_q", "max_length_k",
    "position_embeddings", "deterministic", "target_dtype", "is_causal", "implementation",
}  # fmt: skip
"""Keywords that reach attention and change nothing of it."""


class Settings:
    """What `enable` attaches to a model's modules. Copies of a model share the ring."""

    def __init__(
        self, ring: Ring, layout: str | Layout, mask: Mask | None, keep_last: float, options: dict[str, Any]
    ) -> None:
        self.ring, self.layout, self.mask, self.keep_last, self.options = ring, layout, mask, keep_last, options

    def __deepcopy__(self, memo: Any) -> Settings:
        return self


def enable(
    model: nn.Module,
    *,
    ring: Ring,
    layout: str | Layout = "zigzag",
    mask: Mask | None = None,
    keep_last: float = 1.0,
    **options: Any,
) -> nn.Module:
    """Let a transformers model attend over a sequence that is spread on a ring; returns the model.

    `layout` stands for calls that bring none; a batch of `shard_batch` brings its own. `mask` is in place of the causal
    one, if given; windows that the model has and documents of a batch are added to it. With `keep_last` below 1
    attention is called apart for that last fraction of the sequence, whose results alone `checkpointing.keep_attention`
    then keeps. `options` go to every `burst_attention` call (`direction`, `heads`, `kernel`, `check`, ...). A second
    call replaces the first.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"enable needs a transformers model, got {type(model).__name__}")
    if not isinstance(ring, Ring):
        raise ValueError(f"ring must be a Ring, got {type(ring).__name__}; use Ring.from_group() or Ring.from_mesh()")
    if not 0 < keep_last <= 1:
        raise ValueError(f"keep_last is a fraction of the sequence, above 0 and at most 1, got {keep_last!r}")
    _register()
    _require_served(config)
    _require_attention_alone(model, config)
    settings = Settings(ring, layout, mask, keep_last, {"check": "first", **options})
    for module in model.modules():
        setattr(module, SETTINGS, settings)
    _choose(model, NAME)
    return model


def disable(model: nn.Module, implementation: str = "sdpa") -> nn.Module:
    """Undo `enable`: the model attends by itself again."""
    for module in model.modules():
        with contextlib.suppress(AttributeError):
            delattr(module, SETTINGS)
    _choose(model, implementation)
    return model


def _choose(model: Any, implementation: str) -> None:
    model.set_attn_implementation(implementation)


def _register() -> None:
    """Name our attention to transformers, and a maker of masks that refuses what would be dropped in silence."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


def _require_served(config: Any) -> None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "attn_logit_softcapping", None) is not None:
        raise ValueError(
            f"{type(config).__name__} caps its scores (attn_logit_softcapping={text.attn_logit_softcapping}): "
            f"{REFUSED['softcap']}"
        )
    if getattr(text, "attention_dropout", 0):
        raise ValueError(
            f"{type(config).__name__} drops attention weights (attention_dropout={text.attention_dropout}); dropout is "
            "not implemented: set it to 0"
        )


def _require_attention_alone(model: nn.Module, config: Any) -> None:
    """Refuse layers that pass something along the tokens by another way: it would end at a shard's edge, in silence."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    others = sorted(set(getattr(text, "layer_types", None) or ()) - SERVED_LAYERS)
    # State-space layers, linear attention and short convolutions all have one; not every family says so in its config.
    others = others or [name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)][:1]
    if others:
        raise ValueError(
            f"{type(model).__name__} has layers that are neither full nor sliding attention ({', '.join(others)}); "
            "what they pass from token to token would end at every shard's edge"
        )


def make_mask(*args: Any, attention_mask: Tensor | None = None, use_vmap: bool = False, **unused: Any) -> None:
    """What transformers calls for a mask: none is made, and what is added to the causal one is refused."""
    require_unpadded(attention_mask)
    if use_vmap:
        raise ValueError(
            "this model adds a mask of its own to the causal one, which a ring does not see; say it as a Mask in "
            "enable(model, mask=...) if it can be, or use another attention implementation"
        )


@torch.compiler.disable
def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    layout: str | Layout | None = None,
    documents: Sequence[int] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: query (B, H, S, D), key and value (B, G, S, D); gives (B, S, H, D).

    Every keyword is honoured, known to change nothing, or refused.
    """
    settings: Settings | None = getattr(module, SETTINGS, None)
    if settings is None:
        raise RuntimeError(
            f"{type(module).__name__} has no ring: call enable(model, ring=...) of "
            "burst_attention.integrations.transformers"
        )
    _refuse(attention_mask, dropout, others)
    ring = settings.ring
    layout = settings.layout if layout is None else layout
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{query.shape[2]} queries meet {key.shape[2]} keys: caches of earlier tokens are not served, call the "
            "model with use_cache=False"
        )
    if getattr(module, "layer_idx", 0) in (0, None):
        _require_positions(position_ids, layout, ring)
    mask = _mask(settings.mask, module, is_causal, sliding_window, documents)
    options = {"ring": ring, "mask": mask, "key_layout": layout, "scale": scaling, **settings.options}

    def attend(rows: Tensor, layout: str | Layout) -> Tensor:
        if s_aux is None:
            found: Tensor = burst_attention(rows, key, value, layout=layout, **options)
            return found
        # A sink is one more key for every query, with a score of its own and no value: it takes its share of weight.
        found, lse = burst_attention(rows, key, value, layout=layout, return_lse=True, **options)
        share = torch.sigmoid(lse - s_aux.to(lse.dtype).reshape(1, -1, 1))
        return (found * share[..., None]).to(query.dtype)

    if settings.keep_last == 1:
        return attend(query, layout).transpose(1, 2), None
    if not isinstance(layout, Layout):
        raise ValueError("keep_last needs a Layout; call the model with **shard_batch(batch, layout, rank)")
    return attend_in_parts(attend, query, layout, ring.rank, settings.keep_last).transpose(1, 2), None


def _refuse(attention_mask: Tensor | None, dropout: float, others: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise ValueError(
            f"a dense attention mask of shape {tuple(attention_mask.shape)} is not taken; write it as a Mask in "
            "enable(model, mask=...), or give documents=[...] with the batch"
        )
    if dropout:
        raise ValueError(f"dropout={dropout} on the weights is not implemented; set attention_dropout to 0")
    for name, value in others.items():
        if value is None or value is False or name in HARMLESS:
            continue
        reason = REFUSED.get(name, "it is not known here, and dropping it in silence could be wrong")
        raise ValueError(f"{name} is refused: {reason}")


def _require_positions(position_ids: Tensor | None, layout: str | Layout, ring: Ring) -> None:
    """Where a model had to count positions by itself it began at 0 on every rank: wrong, and nothing would tell."""
    if position_ids is None or ring.size == 1:
        return
    row = position_ids.reshape(-1, position_ids.shape[-1])[0]
    if isinstance(layout, Layout):
        expected = layout.positions(ring.rank).to(row.device)
        right = row.shape == expected.shape and bool((row == expected).all())
    else:
        right = ring.rank == 0 or len(row) == 0 or int(row[0]) != 0
    if not right:
        raise ValueError(
            "position_ids are not this rank's positions in the whole sequence; call the model with "
            "**shard_batch(batch, layout, rank)"
        )


def _mask(
    given: Mask | None,
    module: nn.Module,
    is_causal: bool | None,
    sliding_window: int | None,
    lengths: Sequence[int] | None,
) -> Mask:
    if given is not None:
        mask = given
    else:
        one_way = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = causal() if one_way else full()
    if sliding_window is not None:
        mask = mask & window(int(sliding_window))
    return mask if lengths is None else mask & documents(lengths)
