"""A whole batch cut for the ranks of a ring: what a causal language model needs to see its shard in its place.

Shapes: B batch, T tokens of the whole sequence, S tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from burst_attention.layout import Layout

IGNORED = -100
"""The label that no loss counts."""

TAKEN = ("input_ids", "labels", "documents", "attention_mask", "position_ids")


def shard_batch(batch: Mapping[str, Any], layout: Layout, rank: int) -> dict[str, Any]:
    """A rank's part of a batch of whole sequences, as keywords of the model's call.

    `batch` holds input_ids (B, T) and may hold labels (B, T), not shifted (input_ids where there are none), and
    documents, the lengths of the documents that are packed in every row. The result holds

        input_ids             (B, S)
        position_ids          (B, S) in the whole sequence: a model's own count would begin at 0 on every rank
        shift_labels, labels  (B, S) the next token's label, shifted in the whole sequence; none at a document's end
        num_items_in_batch    labels that count in the whole batch: ranks' losses then sum to the whole batch's mean
        layout, documents     what attention needs to know of this batch
    """
    unknown = set(batch) - set(TAKEN)
    if unknown:
        raise ValueError(f"shard_batch cannot cut {sorted(unknown)}: it takes {', '.join(TAKEN)}")
    input_ids = batch.get("input_ids")
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        shown = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"shard_batch needs input_ids of shape (batch, tokens), got {shown}")
    if batch.get("position_ids") is not None:
        raise ValueError("shard_batch makes position_ids itself, from the layout; leave them out")
    require_unpadded(batch.get("attention_mask"))
    labels = batch.get("labels")
    labels = input_ids if labels is None else labels
    if labels.shape != input_ids.shape:
        raise ValueError(f"labels {tuple(labels.shape)} must have the shape of input_ids {tuple(input_ids.shape)}")
    documents: Sequence[int] | None = batch.get("documents")
    # Counted on the whole, so that every rank has the same number without asking the others.
    whole = Layout.contiguous(layout.tokens, 1, layout.start).labels(labels, 0, documents, IGNORED)
    shifted = layout.shard(whole, rank, 1).contiguous()
    positions = layout.positions(rank).to(input_ids.device).expand(input_ids.shape[0], -1)
    return {
        "input_ids": layout.shard(input_ids, rank, 1).contiguous(),
        "position_ids": positions,
        "labels": shifted,
        "shift_labels": shifted,
        "num_items_in_batch": int((whole != IGNORED).sum()),
        "layout": layout,
        "documents": None if documents is None else tuple(int(length) for length in documents),
    }


def require_unpadded(attention_mask: Tensor | None) -> None:
    """A mask of padding is refused unless it masks nothing."""
    if attention_mask is not None and not bool(attention_mask.to(torch.bool).all()):
        raise ValueError(
            "attention_mask masks padding, which is not taken: pack sequences without padding and give the lengths of "
            "their documents instead (documents=[...])"
        )
