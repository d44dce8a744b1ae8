"""What one row of logits is asked for: four statistics, and the gradient of any loss over them. In plain torch.

Shapes: R rows, V vocabulary.

With p = softmax(z) of a row's logits z, its statistics are

    lse        log(sum(exp(z)))
    label      log(p[label])
    mean       mean(log(p)) over the vocabulary
    entropy    -sum(p * log(p))

and any loss over them has dz = p * (dlse - dlabel - dmean - dentropy * entropy) - dentropy * p * log(p) + dmean / V,
and dlabel more at the label. So one pass over logits gives statistics, and another turns them into their gradient.

z is cap(x) / temperature of a head's products x, with cap(x) = softcap * tanh(x / softcap) where a softcap is set.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LSE, LABEL, MEAN, ENTROPY = range(4)
"""Rows of a (4, N) tensor of statistics."""


class LogitOptions(NamedTuple):
    """How logits are made, which statistics are wanted beside lse and label, and how the work is cut and done."""

    chunk: int = 0  # rows; 0 for as many as CHUNK_BYTES allows
    backend: str = "torch"
    softcap: float | None = None
    temperature: float = 1.0
    wants_mean: bool = False
    wants_entropy: bool = False


def plain_statistics(logits: Tensor, labels: Tensor, options: LogitOptions, out: Tensor) -> None:
    """(4, R) statistics of (R, V) logits, which are overwritten."""
    if options.softcap is not None:
        logits.div_(options.softcap).tanh_().mul_(options.softcap)
    logits.div_(options.temperature)
    peak = logits.amax(1)
    logits.sub_(peak[:, None])
    label = logits.gather(1, labels[:, None])[:, 0]
    mean = logits.mean(1) if options.wants_mean else None
    total = logits.exp_().sum(1)
    # The label's logit less the peak, not less lse: the difference of two rounded numbers near 10 would show.
    out[LSE], out[LABEL] = peak + total.log(), label - total.log()
    if mean is not None:
        out[MEAN] = mean - total.log()
    if options.wants_entropy:
        out[ENTROPY] = torch.special.entr(logits.div_(total[:, None])).sum(1)


def plain_gradient(
    logits: Tensor, labels: Tensor, statistics: Tensor, dstatistics: Tensor, options: LogitOptions, out: Tensor
) -> None:
    """The gradient of (R, V) logits into `out`, which may be the logits; they are overwritten."""
    dlse, dlabel, dmean, dentropy = dstatistics / options.temperature
    slope = None
    if options.softcap is not None:
        logits.div_(options.softcap).tanh_()
        slope = 1 - logits.square()
        logits.mul_(options.softcap)
    # From here on the logits are p, and then their gradient.
    logits.div_(options.temperature).sub_(statistics[LSE, :, None]).exp_()
    surprise = torch.special.entr(logits).mul_(dentropy[:, None]) if options.wants_entropy else None
    logits.mul_((dlse - dlabel - dmean - dentropy * statistics[ENTROPY])[:, None])
    if surprise is not None:
        logits.add_(surprise)
    if options.wants_mean:
        logits.add_(dmean[:, None] / logits.shape[1])
    logits[torch.arange(len(labels), device=labels.device), labels] += dlabel
    if slope is not None:
        logits.mul_(slope)
    if out.dtype != logits.dtype:
        out.copy_(logits)
