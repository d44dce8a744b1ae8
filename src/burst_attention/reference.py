"""The oracle: dense attention in fp64 from each mask's written formula. Shares no code with planning.

Shapes: B batch, H query heads, G key heads, T query tokens, K key tokens, D head dim, E value head dim.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


def allowed_pairs(mask: Any, i: Tensor, j: Tensor) -> Tensor:
    """(queries, keys) bool for global positions i and j, straight from the definition of each mask."""
    i, j = i[:, None], j[None, :]
    everything: Tensor = (i >= 0) & (j >= 0)
    if mask is None or mask.name == "full":
        return everything
    if mask.name in ("&", "|"):
        left, right = (allowed_pairs(side, i[:, 0], j[0]) for side in mask.args)
        return left & right if mask.name == "&" else left | right
    if mask.name == "causal":
        return (j <= i) & everything
    if mask.name == "window":
        return everything & ((i - j).abs() < int(mask.args[0]))
    if mask.name == "prefix":
        return everything & (j < int(mask.args[0]))
    if mask.name == "documents":
        lengths = torch.tensor(mask.args[0])
        owner: Tensor = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return owner[i] == owner[j]
    if mask.name == "blocks":
        matrix = torch.tensor([[bit == "1" for bit in row] for row in mask.args[0]])
        return matrix[i // mask.args[1], j // mask.args[1]]
    raise ValueError(f"the oracle knows no mask {mask.name!r}")


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of whole q (B, H, T, D), k (B, G, K, D), v (B, G, K, E), in fp64, differentiable.

    Rows with no allowed key give out 0 and lse -inf, and gradient 0.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    some = allowed.any(-1)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~allowed, float("-inf"))
    # A finite stand-in keeps rows without keys out of the softmax and its gradient.
    safe = scores.masked_fill(~some[:, None], 0.0)
    out = torch.softmax(safe, -1).masked_fill(~some[:, None], 0.0) @ v
    lse = torch.logsumexp(safe, -1).masked_fill(~some, float("-inf"))
    return out, lse


class Attention(NamedTuple):
    """Output, row statistics and gradients of one attention."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def reference_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, allowed: Tensor, scale: float | None = None, rows: int = 128
) -> Attention:
    """The oracle with its gradients written out, a few query rows at a time: the same numbers, for longer sequences."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    groups = q.shape[1] // k.shape[1]
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    outs, lses, dqs = [], [], []
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for first in range(0, q.shape[2], rows):
        part = slice(first, first + rows)
        q_part, dout_part = q[:, :, part], dout[:, :, part]
        scores = (q_part @ k.transpose(-1, -2)).mul_(scale).masked_fill_(~allowed[part], float("-inf"))
        lse = torch.logsumexp(scores, -1)
        # Rows without keys have lse -inf; +inf gives them weight 0.
        weights = scores.sub_(lse.masked_fill(lse == float("-inf"), float("inf")).unsqueeze(-1)).exp_()
        out = weights @ v
        delta = (out * dout_part).sum(-1, keepdim=True)
        dscores = (dout_part @ v.transpose(-1, -2)).sub_(delta).mul_(weights).mul_(scale)
        outs.append(out)
        lses.append(lse)
        dqs.append(dscores @ k)
        dk += dscores.transpose(-1, -2) @ q_part
        dv += weights.transpose(-1, -2) @ dout_part
    dk, dv = (x.reshape(x.shape[0], -1, groups, *x.shape[2:]).sum(2) for x in (dk, dv))
    return Attention(torch.cat(outs, 2), torch.cat(lses, 2), torch.cat(dqs, 2), dk, dv)
