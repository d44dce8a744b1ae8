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
    everything = (i >= 0) & (j >= 0)
    if mask is None or mask.name == "full":
        return everything
    if mask.name in ("&", "|"):
        left, right = (allowed_pairs(side, i[:, 0], j[0]) for side in mask.args)
        return left & right if mask.name == "&" else left | right
    if mask.name == "causal":
        return j <= i
    if mask.name == "window":
        return (i - j).abs() < mask.args[0]
    if mask.name == "prefix":
        return (j < mask.args[0]) & everything
    if mask.name == "documents":
        lengths = torch.tensor(mask.args[0])
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
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
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, allowed: Tensor, scale: float | None = None, rows: int = 512
) -> Attention:
    """The oracle with its gradients written out, a few query rows at a time: the same numbers, for longer sequences."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    groups = q.shape[1] // k.shape[1]
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    wide_k, wide_v = (x.repeat_interleave(groups, 1) for x in (k, v))
    outs, lses, dqs = [], [], []
    dk, dv = torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    for first in range(0, q.shape[2], rows):
        part = slice(first, first + rows)
        out, lse = reference_attention(q[:, :, part], wide_k, wide_v, allowed[part], scale)
        scores = (q[:, :, part] @ wide_k.transpose(-1, -2) * scale).masked_fill_(~allowed[part], float("-inf"))
        finite = lse.masked_fill(lse == float("-inf"), float("inf"))
        weights = scores.sub_(finite.unsqueeze(-1)).exp_()
        delta = (out * dout[:, :, part]).sum(-1, keepdim=True)
        dscores = weights * (dout[:, :, part] @ wide_v.transpose(-1, -2) - delta) * scale
        outs.append(out)
        lses.append(lse)
        dqs.append(dscores @ wide_k)
        dk += dscores.transpose(-1, -2) @ q[:, :, part]
        dv += weights.transpose(-1, -2) @ dout[:, :, part]
    dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
    return Attention(torch.cat(outs, 2), torch.cat(lses, 2), torch.cat(dqs, 2), dk, dv)
