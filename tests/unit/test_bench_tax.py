"""A rank that is timed alone runs what all ranks would have agreed on, on a GPU that is not there.

Copies for receives are counted here, on the caller's stream: the ring has one of its own only where there is a GPU.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from burst_attention import bench_tax
from burst_attention.bench_tax import TaxCase
from burst_attention.ring.lone import LoneRing
from tests.unit import fake_gpu


@pytest.mark.parametrize(
    ("kv_heads", "results", "copies"), [(2, "auto", False), (1, "auto", True), (2, "chain", False)]
)
def test_a_lone_rank_moves_what_its_plan_says(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, results: str, copies: bool
) -> None:
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: False)
    case = TaxCase(4, 2048, heads=2, kv_heads=kv_heads, head_dim=64, dtype=torch.float16)
    options = {"kernel": "auto", "coalesce": 2, "results": results}
    made = case.plan(**options)
    assert made.phase("backward").straight == (results == "auto")
    machine = fake_gpu.pretend_gpu(monkeypatch, pool=100)
    fake_gpu.use_kernel(monkeypatch, "FA4")
    heads = case.heads, kv_heads, kv_heads, case.heads
    inputs = [torch.randn(1, count, case.tokens_per_rank, case.head_dim, dtype=case.dtype) for count in heads]
    monkeypatch.setattr(bench_tax, "made_inputs", lambda case, tokens: inputs)
    ring = LoneRing(1, case.ranks, bench_tax.made_up_blocks(case, made, "cpu"), copies)
    calls = bench_tax._calls_on(ring, case, bench_tax.as_agreed(made, options))
    for phase, call in calls.items():
        before = ring.bytes_sent
        call()
        assert ring.bytes_sent - before == made.bytes_sent(1, phase)
    assert not machine.found, "\n".join(sorted(set(machine.found))[:10])
