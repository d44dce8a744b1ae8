"""Rings on 2, 3 and 4 hosts, flat, double and with heads exchanged: the core's rule, and the bytes that plans say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from burst_attention import Ring, burst_attention, full, plan
from burst_attention.exactness import Sharding, gather, judge, run_rank
from burst_attention.hosts import Hosts
from tests.ring.matrix import problem_of, require_exact


@pytest.mark.parametrize("count", [2, 3, 4])
def test_rings_on_hosts_are_exact(count: int) -> None:
    """With 1 and 2 ranks on each, both directions; a ring finds by itself who shares a host.

    Heads are exchanged inside each host, and between hosts where each has one rank.
    """
    flat, double = 1, 2
    cases = (
        (1, flat, "kv", "MHA", 1), (2, flat, "query", "MHA", 1), (2, double, "query", "GQA4", 1),
        (2, double, "kv", "MHA", 1), (2, double, "query", "MHA", 2), (2, double, "kv", "GQA4", 2),
        (1, flat, "auto", "GQA4", count),
    )  # fmt: skip
    with Hosts(count) as hosts:
        for ranks, per_host, direction, heads, degree in cases:
            problem = problem_of("causal", heads, "bf16", 257)
            sharding = Sharding(count * ranks, "zigzag", direction, direction, per_host, degree)

            def body(ring: Ring, problem: Any = problem, sharding: Any = sharding) -> Any:
                return ring.ranks_per_host(), run_rank(ring, problem, sharding)

            found = hosts.run(body, ranks, timeout=60, ring_timeout=30)
            assert [per_host for per_host, _ in found] == [ranks] * (count * ranks)
            require_exact(problem, sharding, judge(problem, gather(problem, sharding, [part for _, part in found])))


@pytest.mark.parametrize(("topology", "count"), [("flat", 2), ("double", 2), ("double", 3)])
def test_what_leaves_a_host_is_what_the_plan_says(topology: str, count: int) -> None:
    ranks, shard, heads, dim = 2 * count, 1024, 8, 64

    def body(ring: Ring) -> None:
        q, k, v = (torch.ones(1, heads, shard, dim, requires_grad=True) for _ in range(3))
        burst_attention(q, k, v, ring=ring, topology=topology).sum().backward()

    with Hosts(count) as hosts:
        hosts.run(lambda ring: None, 2, timeout=40)
        start = hosts.bytes_sent(0)
        hosts.run(lambda ring: None, 2, timeout=40)
        idle = hosts.bytes_sent(0) - start
        before, again = hosts.bytes_sent(0), hosts.bytes_repeated(0)
        hosts.run(body, 2, timeout=60, ring_timeout=30)
        sent = hosts.bytes_sent(0) - before - idle
        again = hosts.bytes_repeated(0) - again
    per_host = 2 if topology == "double" else 1
    made = plan(
        ranks * shard, ranks, heads=heads, head_dim=dim, dtype=torch.float32, mask=full(), ranks_per_host=per_host
    )
    phases = [phase for phase in (made.forward, made.backward) if phase]
    planned = made.groups * sum(
        phase.nbytes(t)
        for phase in phases
        for rank in (0, 1)
        for step in phase.rounds[rank]
        for t in step.sends
        if t.target >= 2
    )
    rows = sum(made.groups * (phase.operands.row_bytes + phase.results.row_bytes) for phase in phases)
    # In a double ring each of a host's two ranks sends W / 2 - 1 shards, in a flat one the last of them W - 1.
    assert planned == (2 * (count - 1) if topology == "double" else ranks - 1) * shard * rows
    assert planned <= sent <= 1.03 * planned + again, (sent, planned, again)
