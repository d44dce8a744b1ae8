"""What GPUs compute by kernels that need one, written in torch: attention's own, and our passes over memory.

FlashAttention-4's sums of dq lie here with each block's rows in reverse: all others ask the cast for their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from burst_attention.geometry import Piece
from burst_attention.merge import Part, Partial, State, clear, finish, merge_partial
from burst_attention.tiles import BackwardInputs
from burst_attention.tiles.vendor import rows_of

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


def continue_state(
    pieces: Sequence[Piece], q: Tensor, k: Tensor, v: Tensor, state: State, scale: float, load: bool = True,
    finished: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Our own forward, on any pieces. What it begins and ends is in no state."""
    if finished and not load:
        state = State(*(torch.empty(x.shape) for x in (finished[0], finished[1], finished[1])))
    if not load:
        clear(state)
    for piece in pieces:
        queries, keys = rows_of(piece)
        scores, values = _scores(piece, q[:, :, queries], k[:, :, keys], scale), _per_query(v[:, :, keys], q)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
        merge_partial(state.rows(queries.start, queries.stop), weights @ values, lse)
    for place, x in zip(finished or (), finish(state, finished[0].dtype) if finished else (), strict=True):
        place.copy_(x)


def add_gradients(
    pieces: Sequence[Piece], x: BackwardInputs, gradients: tuple[Tensor, Tensor, Tensor], scale: float, add: bool = True
) -> None:
    """Our backward for Hopper, on any pieces: adds to dq, and to dk and dv or, if not `add`, writes those."""
    dq, dk, dv = gradients
    assert dq.dtype == torch.float32
    sums = torch.zeros(dk.shape), torch.zeros(dv.shape)
    for piece in pieces:
        queries, keys = rows_of(piece)
        q, dout, lse, delta = (part[:, :, queries].float() for part in (x.q, x.dout, x.lse, x.delta))
        weights = (_scores(piece, q, x.k[:, :, keys], scale) - lse[..., None]).exp().nan_to_num(0.0)
        scores = weights * (dout @ _per_query(x.v[:, :, keys], q).transpose(2, 3) - delta[..., None]) * scale
        dq[:, :, queries] += scores @ _per_query(x.k[:, :, keys], q)
        for total, part in zip(sums, (scores.transpose(2, 3) @ q, weights.transpose(2, 3) @ dout), strict=True):
            total[:, :, keys] += part.unflatten(1, (dk.shape[1], -1)).sum(2)
    for total, part in zip((dk, dv), sums, strict=True):
        total.copy_(total + part if add else part)


def add_key_gradients(
    pieces: Sequence[Piece], x: BackwardInputs, dk: Tensor | None, dv: Tensor | None, scale: float, add: bool = True
) -> None:
    """One of our plain kernels."""
    others = (torch.zeros(part.shape) for part in (x.q, x.k, x.v))
    dq, *keys = (other if wanted is None else wanted for wanted, other in zip((None, dk, dv), others, strict=True))
    add_gradients(pieces, x, (dq, keys[0], keys[1]), scale, add)


def add_query_gradients(pieces: Sequence[Piece], x: BackwardInputs, dq: Tensor, scale: float, add: bool = True) -> None:
    """The other."""
    sums = torch.zeros(dq.shape)
    add_gradients(pieces, x, (sums, torch.zeros(x.k.shape), torch.zeros(x.v.shape)), scale)
    dq.copy_(dq + sums if add else sums)


def _per_query(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values for every query head."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


def _scores(piece: Piece, q: Tensor, k: Tensor, scale: float) -> Tensor:
    distance = torch.arange(piece.q_count)[:, None] - torch.arange(piece.k_count)
    missing = (distance < piece.low) | (distance >= piece.high)
    return (q.float() @ _per_query(k, q).transpose(2, 3) * scale).masked_fill(missing, -math.inf)


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
    for part in parts:
        row, head, tensor, _ = part
        total[:, head : head + tensor.shape[1], row : row + tensor.shape[2]] += in_rows(part)
    (target if out is None else out).copy_(total)


def in_rows(part: Part) -> Tensor:
    """A part's numbers, in order."""
    x = part.tensor
    if part.order is None:
        return x
    table, block, scale = part.order
    count = -(-x.shape[2] // block)
    blocks = x.as_strided((*x.shape[:2], count, block * x.shape[3]), (*x.stride()[:2], block * x.stride(2), 1))
    return blocks[..., table.long()].view(*x.shape[:2], count * block, x.shape[3])[:, :, : x.shape[2]] * scale


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
    heads: int, row_count: int, padded: int, **blocks: int,
) -> None:  # fmt: skip
    """As the kernel in fused.py."""
    assert lse.shape == delta.shape == (lse.shape[0], heads, row_count)
    for x, beyond, out in ((lse / math.log(2), math.inf, lse_out), (delta, 0.0, delta_out)):
        filled = torch.full((lse.shape[0], heads, padded), beyond)
        filled[:, :, :row_count] = x.masked_fill(x == -math.inf, math.inf)
        out.copy_(filled)
    sums.zero_()
