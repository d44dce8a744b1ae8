"""The two passes over a chunk's logits in Triton: each reads them once, where plain torch makes several passes.

Shapes: R rows, V vocabulary. `rows.py` has the definitions, and these kernels' twins in plain torch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from burst_attention.logits.rows import LogitOptions
from burst_attention.tiles.start import start_kernel

BLOCK = 4096
"""Columns at a time: sixteen numbers for each thread of eight warps."""


@triton.jit
def _shaped(logits, softcap, temperature, CAP: tl.constexpr):
    """Logits after cap and temperature."""
    if CAP:
        # tanh by exp, which the interpreter has too; at both ends exp is inf or 0, and this is 1 or -1.
        logits = softcap * (1 - 2 / (tl.exp(logits * (2 / softcap)) + 1))
    return logits / temperature


@triton.jit(do_not_specialize=["softcap", "temperature"])
def statistics_kernel(
    logits_ptr, labels_ptr, out_ptr, logits_row, out_row, columns, softcap, temperature,
    BLOCK: tl.constexpr, CAP: tl.constexpr, MEAN: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Grid (R,). Online softmax along a row; with z - peak weighted by exp(z - peak) where the entropy is wanted."""
    row = tl.program_id(0).to(tl.int64)
    peak, total, weighted, plain_sum = float("-inf"), 0.0, 0.0, 0.0
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < columns
        z = tl.load(logits_ptr + row * logits_row + at, mask=inside, other=0.0)
        z = _shaped(z, softcap, temperature, CAP)
        if MEAN:
            plain_sum += tl.sum(tl.where(inside, z, 0.0), 0)
        z = tl.where(inside, z, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(z, 0))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        share = tl.exp(z - shift)
        before = tl.exp(peak - shift)
        if ENTROPY:
            # What has no weight adds nothing, however far below the peak.
            moved = tl.where(total > 0, before * (weighted + (peak - shift) * total), 0.0)
            weighted = moved + tl.sum(tl.where(share > 0, share * (z - shift), 0.0), 0)
        total = total * before + tl.sum(share, 0)
        peak = new_peak
    label = tl.load(labels_ptr + row)
    z = _shaped(tl.load(logits_ptr + row * logits_row + label), softcap, temperature, CAP)
    log_total = tl.log(total)
    tl.store(out_ptr + row, peak + log_total)
    tl.store(out_ptr + out_row + row, z - peak - log_total)
    if MEAN:
        tl.store(out_ptr + 2 * out_row + row, plain_sum / columns - peak - log_total)
    if ENTROPY:
        tl.store(out_ptr + 3 * out_row + row, log_total - weighted / total)


@triton.jit(do_not_specialize=["softcap", "temperature"])
def gradient_kernel(
    logits_ptr, labels_ptr, lse_ptr, spread_ptr, dlabel_ptr, dmean_ptr, dentropy_ptr, out_ptr, logits_row, out_row,
    columns, softcap, temperature, BLOCK: tl.constexpr, CAP: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Grid (R, column blocks). Every number of the gradient is made from its own logit, so `out` may be the logits."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    z = tl.load(logits_ptr + row * logits_row + at, mask=inside, other=0.0)
    z = _shaped(z, softcap, temperature, CAP)
    log_p = z - tl.load(lse_ptr + row)
    p = tl.exp(log_p)
    dz = p * tl.load(spread_ptr + row) + tl.load(dmean_ptr + row)
    if ENTROPY:
        dz -= tl.load(dentropy_ptr + row) * tl.where(p > 0, p * log_p, 0.0)
    dz += tl.where(at == tl.load(labels_ptr + row), tl.load(dlabel_ptr + row), 0.0)
    dz /= temperature
    if CAP:
        tanh = z * temperature / softcap
        dz *= 1 - tanh * tanh
    tl.store(out_ptr + row * out_row + at, dz.to(out_ptr.dtype.element_ty), mask=inside)


def fused_statistics(logits: Tensor, labels: Tensor, options: LogitOptions, out: Tensor) -> None:
    """(4, R) statistics of (R, V) logits in fp32."""
    start_kernel(statistics_kernel, (len(logits),))(
        logits, labels, out, logits.stride(0), out.stride(0), logits.shape[1],
        float(options.softcap or 1.0), float(options.temperature),
        BLOCK=BLOCK, CAP=options.softcap is not None, MEAN=options.wants_mean, ENTROPY=options.wants_entropy,
        num_warps=8,
    )  # fmt: skip


def fused_gradient(
    logits: Tensor, labels: Tensor, statistics: Tensor, dstatistics: Tensor, options: LogitOptions, out: Tensor
) -> None:
    """The gradient of (R, V) logits into `out`, of any floating dtype, which may be the logits."""
    lse, _, _, entropy = statistics
    dlse, dlabel, dmean, dentropy = dstatistics.contiguous()
    spread = dlse - dlabel - dmean - dentropy * entropy
    columns = logits.shape[1]
    start_kernel(gradient_kernel, (len(logits), triton.cdiv(columns, BLOCK)))(
        logits, labels, lse, spread, dlabel, dmean / columns, dentropy, out, logits.stride(0), out.stride(0), columns,
        float(options.softcap or 1.0), float(options.temperature),
        BLOCK=BLOCK, CAP=options.softcap is not None, ENTROPY=options.wants_entropy, num_warps=8,
    )  # fmt: skip
