"""A call is made here on every rank, and must be refused soon, alike and before anything moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from burst_attention import Ring, burst_attention, causal, run_ranks
from burst_attention.reference import allowed_pairs, reference_attention

SIZE, TOKENS = 3, 12
LOCAL = TOKENS // SIZE
TIMEOUT = 6.0
QUICK = 3.0
"""Seconds in which a refusal must have reached every rank; far below the time that a wait would take."""

WRONG = 1
"""The rank that is called differently."""


def inputs(rank: int) -> list[Tensor]:
    """q (1, 4, 4, 8), k and v (1, 2, 4, 8) of one rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(1, heads, LOCAL, 8, generator=generator) for heads in (4, 2, 2)]


def wanting(letters: str) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda qkv: [x.requires_grad_(name in letters) for name, x in zip("qkv", qkv, strict=True)]


def attempt(ring: Ring, call: Callable[[], Any]) -> str:
    """The error of a call as "Type: text", after proving that it came soon."""
    started, text = time.monotonic(), "no error"
    try:
        call()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    assert time.monotonic() - started < QUICK, f"rank {ring.rank} was told late: {text}"
    return text


def correct_call(ring: Ring) -> None:
    """A call that must work on a ring whose last call was refused."""
    q, k, v = (torch.cat(parts, 2) for parts in zip(*(inputs(rank) for rank in range(ring.size)), strict=True))
    positions = torch.arange(q.shape[2])
    expected, _ = reference_attention(q, k, v, allowed_pairs(causal(), positions, positions))
    found = burst_attention(*inputs(ring.rank), ring=ring, mask=causal())
    torch.testing.assert_close(found.double(), expected.chunk(ring.size, 2)[ring.rank], rtol=1e-4, atol=1e-5)


def refused_everywhere(call: Callable[[Ring], Any], size: int = SIZE) -> str:
    """The one text with which every rank refuses a call, after proving that nothing moved and the ring still works."""

    def body(ring: Ring) -> str:
        text = attempt(ring, lambda: call(ring))
        assert ring.bytes_sent == 0, "blocks moved before the refusal"
        correct_call(ring)
        assert ring.size == 1 or ring.bytes_sent > 0 or ring.rank == size - 1
        return text

    texts = run_ranks(body, size, timeout=TIMEOUT)
    assert len(set(texts)) == 1, f"ranks say different things: {texts}"
    kind, _, text = texts[0].partition(": ")
    assert kind == "ValueError", texts[0]
    return text
