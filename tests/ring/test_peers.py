"""The baselines that ours is measured against are right too: a wrong one would make the comparison worthless."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from burst_attention import Layout, Mask, Ring, causal, full, window
from burst_attention.launch import run_processes
from burst_attention.peers import PEERS, Ulysses
from tests.ring.problems import TOLERANCE, Problem, assert_close, oracle

MASKS: dict[str, Mask] = {"full": full(), "causal": causal(), "window": causal() & window(11)}
EXACT = [name for name in PEERS if name != "all-gather kept"]


@lru_cache
def problem_of(mask: str, size: int, kv_heads: int, layout: str, dtype: torch.dtype) -> Problem:
    return Problem(tokens=48, size=size, heads=8, kv_heads=kv_heads, mask=MASKS[mask], layout=layout, dtype=dtype)


def peers_results(problem: Problem, name: str) -> dict[str, Tensor]:
    layout, _ = problem.layouts

    def body(ring: Ring) -> list[Tensor]:
        q, k, v, dout = (layout.shard(x, ring.rank, 2).contiguous() for x in problem.whole()[:4])
        peer = PEERS[name](problem.mask, layout, problem.heads, problem.kv_heads, problem.dim, problem.dtype)
        out = peer.forward(q, k, v)
        return [out, *peer.backward(dout)]

    shards = zip(*run_processes(body, problem.size, timeout=60), strict=True)
    return {name: layout.unshard(parts, 2) for name, parts in zip(("out", "dq", "dk", "dv"), shards, strict=True)}


def check(problem: Problem, name: str) -> None:
    expected = {key: value for key, value in oracle(problem).items() if key != "lse"}
    found = peers_results(problem, name)
    assert all(x.dtype == problem.dtype for x in found.values())
    assert_close(found, expected, TOLERANCE[problem.dtype])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kv_heads", [8, 2], ids=["MHA", "GQA4"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", EXACT)
def test_peers_are_exact(name: str, mask: str, kv_heads: int, size: int) -> None:
    """fp32, for what fp32 cannot hide. With 4 ranks and 2 key heads Ulysses must copy heads."""
    layout = "contiguous" if name == "Ulysses" or mask == "window" else "zigzag"
    check(problem_of(mask, size, kv_heads, layout, torch.float32), name)


@pytest.mark.parametrize("kv_heads", [8, 2], ids=["MHA", "GQA4"])
@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("name", PEERS)
def test_peers_are_exact_in_bf16(name: str, mask: str, kv_heads: int) -> None:
    """As they are measured; the gathered keys that are kept have bf16 gradients on the wire."""
    layout = "contiguous" if name == "Ulysses" or mask == "window" else "zigzag"
    check(problem_of(mask, 4, kv_heads, layout, torch.bfloat16), name)


@pytest.mark.parametrize("name", ["kv ring", "all-gather"])
def test_rings_of_stripes_are_exact(name: str) -> None:
    check(problem_of("window", 4, 2, "striped", torch.float32), name)


def test_what_a_peer_cannot_do_is_refused() -> None:
    def body(ring: Ring) -> list[str]:
        refused = []
        for layout, heads in ((Layout.zigzag(8, 2), 2), (Layout.contiguous(8, 2), 3), (Layout.contiguous(7, 2), 2)):
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                Ulysses(causal(), layout, heads, heads, 8, torch.float32)
            refused.append(str(caught.value))
        return refused

    for in_order, heads, tokens in run_processes(body, 2, timeout=60):
        assert "needs the sequence in order" in in_order
        assert "3 and 3 heads cannot be dealt to 2 ranks" in heads
        assert "as many tokens" in tokens
