"""What GPUs compute by kernels that need one, written in torch: attention's own, and our passes over memory.

FlashAttention-4's sums of dq lie here with each block's rows in reverse: the cast alone may count on their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from burst_attention.merge import Part, Partial, State, clear, finish, merge_partial

BLOCK = 8


def in_order(sums: Tensor, dim: int) -> Tensor:
    """(B, H, rows, D), a copy."""
    blocks = sums.view(*sums.shape[:2], -1, BLOCK, dim)
    return blocks.flip(3).flatten(2, 3)


def launch(
    config: Any, triangle: bool, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor,
    sums: Tensor, dk: Tensor, dv: Tensor, scale: float,
) -> None:  # fmt: skip
    """FlashAttention-4's backward on (B, S, H, D): scores in powers of two, dq without its scale."""
    rows, dim = q.shape[1], q.shape[3]
    assert lse.shape[2] == delta.shape[2] == sums.shape[2] // dim and lse.shape[2] % BLOCK == 0
    queries, keys, values, douts = (x.transpose(1, 2).float() for x in (q, k, v, dout))
    weights = torch.exp2(queries @ keys.transpose(2, 3) * (scale / math.log(2)) - lse[:, :, :rows, None])
    weights = weights.tril() if triangle else weights
    scores = weights * (douts @ values.transpose(2, 3) - delta[:, :, :rows, None])
    added = torch.zeros(*sums.shape[:2], lse.shape[2], dim)
    added[:, :, :rows] = scores @ keys
    sums += in_order(added.flatten(2), dim).flatten(2)
    dk.copy_((scores.transpose(2, 3) @ queries * scale).transpose(1, 2))
    dv.copy_((weights.transpose(2, 3) @ douts).transpose(1, 2))


def cast(config: Any, sums: Tensor, dq: Tensor, scale: float) -> None:
    """FlashAttention-4's pass after it."""
    dq.copy_((in_order(sums, dq.shape[3])[:, :, : dq.shape[1]] * scale).transpose(1, 2))


def attend(q: Tensor, k: Tensor, v: Tensor, triangle: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of a piece."""
    keys, values = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q.float() @ keys.transpose(2, 3) * scale
    if triangle:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -math.inf)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ values).to(q.dtype), lse


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, triangle: bool, scale: float
) -> list[Tensor]:
    """(dq, dk, dv) of a piece, as cuDNN gives them."""
    per_key = q.shape[1] // k.shape[1]
    queries, douts = q.float(), dout.float()
    keys, values = (x.float().repeat_interleave(per_key, 1) for x in (k, v))
    weights = torch.exp(queries @ keys.transpose(2, 3) * scale - lse[..., None])
    weights = weights.tril() if triangle else weights
    delta = (out.float() * douts).sum(-1, keepdim=True)
    scores = weights * (douts @ values.transpose(2, 3) - delta) * scale
    of_heads = scores.transpose(2, 3) @ queries, weights.transpose(2, 3) @ douts
    dk, dv = (x.unflatten(1, (-1, per_key)).sum(2) for x in of_heads)  # type: ignore[no-untyped-call]
    return [x.to(q.dtype) for x in (scores @ keys, dk, dv)]


def merge_partials(
    state: State, partials: list[Partial], load: bool, finished: tuple[Tensor, Tensor] | None = None
) -> None:
    """As in fused.py."""
    if not load:
        clear(state)
    for first, out, lse, _ in partials:
        merge_partial(state.rows(first, first + out.shape[2]), out, lse)
    for place, x in zip(finished or (), finish(state, finished[0].dtype) if finished else (), strict=True):
        place.copy_(x)


def sum_parts(
    target: Tensor, parts: Sequence[Part], load: bool, out: Tensor | None = None, beside: bool = False
) -> None:
    """As in fused.py."""
    total = target.float().clone() if load else torch.zeros(target.shape)
    for row, head, part in parts:
        total[:, head : head + part.shape[1], row : row + part.shape[2]] += part
    (target if out is None else out).copy_(total)


def fused_delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """As in fused.py."""
    delta = (out.float() * dout.float()).sum(-1)
    return delta if dlse is None else delta - dlse


def stand_in_for_out(dout: Tensor, delta: Tensor) -> Tensor:
    """As in fused.py."""
    wide = dout.float()
    size = (wide * wide).sum(-1, keepdim=True)
    return torch.where(size > 0, wide * delta[..., None] / size, 0.0).to(dout.dtype)


def statistics(
    lse: Tensor, delta: Tensor, lse_out: Tensor, delta_out: Tensor, sums: Tensor, lse_strides: Any, delta_strides: Any,
    heads: int, per_key: int, row_count: int, padded: int, **blocks: int,
) -> None:  # fmt: skip
    """As the kernel in fused.py."""
    assert lse.shape == delta.shape == (lse.shape[0], heads, row_count)
    for x, beyond, out in ((lse / math.log(2), math.inf, lse_out), (delta, 0.0, delta_out)):
        filled = torch.full((lse.shape[0], heads, padded), beyond)
        filled[:, :, :row_count] = x.masked_fill(x == -math.inf, math.inf)
        groups = filled.unflatten(1, (-1, per_key)).transpose(1, 2)  # type: ignore[no-untyped-call]
        out.copy_(groups.reshape(out.shape))
    sums.zero_()
