"""The part of `burst bench gpu` that says what a rank holds, in rings of several sizes, beside what its plan says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from burst_attention.bench_tax import TaxCase, case_fields, flash_name, peak_gib

RING_SIZES = (2, 4, 8, 16)


def memory_rows(repeat: int) -> Iterator[dict[str, Any]]:
    """The largest peak of all ranks of a ring, two blocks at once, beyond inputs; it needs no repetitions."""
    names = ("auto",) if flash_name() != "FA2" else ("auto", "hopper", "cudnn")
    for kv_heads, causal, kernel, ranks in itertools.product((32, 8), (True, False), names, RING_SIZES):
        case = TaxCase(ranks, kv_heads=kv_heads, causal=causal)
        options: dict[str, Any] = {"kernel": kernel, "coalesce": 2}
        planned = case.plan(**options)
        shard = case.tokens_per_rank * case.heads * case.head_dim * case.dtype.itemsize / 2**30
        yield (
            case_fields(case)
            | options
            | {
                "suite": "gpu-memory",
                "flash": flash_name(),
                "shard_gib": shard,
                "peak_gib": round(max(peak_gib(case, rank, **options) for rank in range(ranks)), 3),
                "planned_peak_gib": round(max(map(planned.peak_bytes, range(ranks))) / 2**30, 3),
            }
        )
