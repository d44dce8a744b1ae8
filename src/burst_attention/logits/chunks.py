"""An LM head over chunks of rows: the statistics of every row's logits, and their gradients.

Shapes: N rows (tokens of the whole batch), C hidden width, V vocabulary, R rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from burst_attention.logits.rows import LogitOptions, plain_gradient, plain_statistics

CHUNK_BYTES = 512 << 20
"""Logits of a chunk. Each chunk reads and writes the whole weight gradient, so small ones are slow: with half of this
the products of a step take 22% longer on an H200, with twice 2% less (V = 131072, C = 4096; rows "loss-trials")."""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """What logits, statistics and sums of gradients are in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunk_rows(rows: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Rows of a chunk whose logits stay within CHUNK_BYTES, in chunks of about equal size."""
    most = max(1, CHUNK_BYTES // (vocabulary * accumulate_dtype(dtype).itemsize))
    count = max(1, -(-rows // most))
    return max(1, -(-rows // count))


class Chunks:
    """The head over chunks of rows; all share one buffer of logits, which each may overwrite."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: LogitOptions) -> None:
        self.hidden = hidden
        self.rows = options.chunk or chunk_rows(len(hidden), len(weight), hidden.dtype)
        self.accumulate = accumulate_dtype(hidden.dtype)
        # CUDA's products of bf16 sum and return fp32. Elsewhere they would round logits to bf16, so they are of fp32.
        self.product = hidden.dtype if hidden.is_cuda else self.accumulate
        self.weight = weight.to(self.product)
        self.bias = None if bias is None else bias.to(self.accumulate)
        self.buffer = hidden.new_empty((min(self.rows, len(hidden)), len(weight)), dtype=self.accumulate)

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Which rows, their hidden states as products take them, and their logits before cap and temperature."""
        for first in range(0, len(self.hidden), self.rows):
            rows = slice(first, first + self.rows)
            hidden = self.hidden[rows].to(self.product)
            logits = self.buffer[: len(hidden)]
            if self.product == self.accumulate:
                torch.mm(hidden, self.weight.T, out=logits)
            else:
                torch.mm(hidden, self.weight.T, out_dtype=self.accumulate, out=logits)
            yield rows, hidden, logits if self.bias is None else logits.add_(self.bias)


def row_passes(backend: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """What makes statistics of a chunk's logits, and what makes their gradient."""
    if backend == "torch":
        return plain_statistics, plain_gradient
    from burst_attention.logits.fused import fused_gradient, fused_statistics

    return fused_statistics, fused_gradient


def head_statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: LogitOptions
) -> Tensor:
    """(4, N) statistics of hidden (N, C) through weight (V, C); 0 for what is not wanted."""
    statistics_of, _ = row_passes(options.backend)
    found = hidden.new_zeros((4, len(hidden)), dtype=accumulate_dtype(hidden.dtype))
    for rows, _, logits in Chunks(hidden, weight, bias, options):
        statistics_of(logits, labels[rows], options, found[:, rows])
    return found


def head_gradients(
    dstatistics: Tensor,
    saved: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor],
    options: LogitOptions,
    needs: str,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias, each if its letter of "hwb" is in `needs`; logits are computed again.

    Those of weight and bias are in the dtype of their sums, for the caller to cast.
    """
    hidden, weight, bias, labels, statistics = saved
    _, gradient_of = row_passes(options.backend)
    chunks = Chunks(hidden, weight, bias, options)
    dhidden = hidden.new_empty(hidden.shape) if "h" in needs else None
    dweight = hidden.new_zeros(weight.shape, dtype=chunks.accumulate) if "w" in needs else None
    dbias = hidden.new_zeros(len(weight), dtype=chunks.accumulate) if "b" in needs else None
    in_place = chunks.product == chunks.accumulate
    buffer = chunks.buffer if in_place else hidden.new_empty(chunks.buffer.shape)
    for rows, hidden_rows, logits in chunks:
        dlogits = buffer[: len(logits)]
        gradient_of(logits, labels[rows], statistics[:, rows], dstatistics[:, rows], options, dlogits)
        if dhidden is not None:
            dhidden[rows] = dlogits @ chunks.weight
        if dweight is not None and in_place:
            dweight.addmm_(dlogits.T, hidden_rows)
        elif dweight is not None:
            torch.addmm(dweight, dlogits.T, hidden_rows, out_dtype=dweight.dtype, out=dweight)
        if dbias is not None:
            dbias += dlogits.sum(0, dtype=dbias.dtype)
    return dhidden, dweight, dbias
