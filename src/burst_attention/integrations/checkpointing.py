"""Selective checkpointing that never recomputes attention, or recomputes that of the first part of the sequence only.

torch's own policy names our operator, whose out and lse are kept; everything else is recomputed. Under a causal mask
the first half of the tokens has a quarter of the pairs, so keeping the last half's results saves three quarters of the
work for half of the memory: attention is then called twice, for the rows of each part.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from burst_attention.layout import Layout

OPERATORS = ("forward", "heads_forward")
OPTIONS_ARGUMENT = 3


def keep_attention() -> Callable[[], Any]:
    """What `torch.utils.checkpoint.checkpoint(..., context_fn=)` takes, so that attention's results are kept.

    It holds no state, so one serves all layers and micro-batches.
    """
    return partial(create_selective_checkpoint_contexts, _policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    ours = [getattr(torch.ops.burst_attention, name).default for name in OPERATORS]
    if operator in ours and not is_first_part(json.loads(args[OPTIONS_ARGUMENT])["layout"]):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def is_first_part(text: str) -> bool:
    """Whether a call's layout is that of the rows before others, which are called apart."""
    if "[" not in text.rpartition(")")[2]:
        return False
    layout = Layout.parse(text)
    assert layout.part_of is not None
    return layout.end < sum(layout.part_of)


def attend_in_parts(
    attend: Callable[[Tensor, Layout], Tensor], query: Tensor, layout: Layout, rank: int, keep: float
) -> Tensor:
    """Attention of (B, H, S, D) queries by two calls: for the last fraction of the sequence, and for what is before."""
    cut = layout.end - round(keep * layout.tokens)
    late = layout.positions(rank) >= cut
    rows = [torch.nonzero(part).flatten().to(query.device) for part in (~late, late)]
    parts = [layout.between(layout.start, cut), layout.between(cut, layout.end)]
    found = [attend(query.index_select(2, index), part) for index, part in zip(rows, parts, strict=True)]
    whole = torch.cat(found, dim=2)
    order = torch.cat(rows)
    ordered = torch.arange(len(order), device=order.device)
    return whole if torch.equal(order, ordered) else whole.index_select(2, torch.argsort(order))
