"""Who computes which heads after an exchange: every query head once, with its own key head, and plans that hold."""

from __future__ import annotations

import pytest
import torch

from burst_attention import Layout, causal, parse_mask, plan, window
from burst_attention.schedule import HeadsPlan, simulate, split_heads


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (8, 1), (12, 3), (12, 4), (9, 3), (10, 2), (40, 8)])
def test_every_query_head_is_computed_once_with_its_own_key_head(heads: int, kv_heads: int, degree: int) -> None:
    split = split_heads(heads, kv_heads, degree)
    assert [head for first, last in split.queries for head in range(first, last)] == list(range(heads))
    assert {head for keys in split.keys for head in keys} == set(range(kv_heads))
    counts = []
    for (first, last), keys in zip(split.queries, split.keys, strict=True):
        per_key, rest = divmod(last - first, len(keys))
        assert last > first and rest == 0
        assert [keys[index // per_key] for index in range(last - first)] == [
            query // (heads // kv_heads) for query in range(first, last)
        ]
        counts.append(last - first)
    # Where key heads are split, queries follow them.
    assert max(counts) - min(counts) <= (heads // kv_heads if kv_heads >= degree else 1)
    assert split.shares_keys == (sum(map(len, split.keys)) > kv_heads)


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"heads=4 exchanges heads over 4 ranks, and q has only 3"):
        split_heads(3, 1, 4)


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped", "balanced"])
@pytest.mark.parametrize(("tokens", "ranks", "together"), [(61, 6, 2), (61, 6, 3), (61, 4, 4), (3, 6, 2), (0, 4, 2)])
def test_a_grouped_layout_holds_what_its_ranks_hold(name: str, tokens: int, ranks: int, together: int) -> None:
    layout = Layout.balanced(tokens, ranks, causal(), 5) if name == "balanced" else Layout(name, tokens, ranks, 5)
    grouped = layout.grouped(together)
    assert grouped.ring_size == ranks // together and f"by {together}" in str(grouped)
    for group in range(grouped.ring_size):
        held = [layout.positions(rank) for rank in range(group * together, (group + 1) * together)]
        assert torch.equal(grouped.positions(group).sort().values, torch.cat(held).sort().values)
    with pytest.raises(ValueError, match="must divide"):
        layout.grouped(ranks + 1)


def test_neighbours_of_a_zigzag_are_a_zigzag() -> None:
    assert all(len(Layout.zigzag(64, 8).grouped(2).runs(group)) <= 2 for group in range(4))
    assert [run.length for run in Layout.striped(64, 4).grouped(4).runs(0)] == [64]


@pytest.mark.parametrize("mask", ["causal()", "full()", "causal() & window(9)", "causal() & documents([20, 1, 40])"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_the_rings_of_the_members_hold_in_simulation(mask: str, layout: str) -> None:
    made = plan(
        61, 6, heads=6, kv_heads=2, head_dim=4, mask=parse_mask(mask), layout=layout, head_degree=3, requires_grad="qkv"
    )
    assert isinstance(made, HeadsPlan) and len(made.rings) == 3
    for ring in made.rings:
        for phase in (ring.forward, ring.backward):
            assert phase is not None
            simulate(phase)


def test_the_plan_says_what_is_exchanged() -> None:
    """Of q, k, v and out a rank keeps its own half and sends the other; backward sends dout and takes gradients."""
    made = plan(64, 4, heads=8, kv_heads=4, head_dim=16, dtype=torch.float32, mask=causal(), head_degree=2)
    assert isinstance(made, HeadsPlan)
    tokens, half = 16, 4 * 16
    assert made.exchanged_bytes(1, "forward") == tokens * 4 * (half + 2 * half // 2 + half + 4)
    assert made.exchanged_bytes(1, "backward") == tokens * 4 * (half + half + 2 * half // 2)
    text = str(made)
    assert "heads exchanged between 2 neighbouring ranks, then 2 rings of 2 ranks" in text
    assert "ranks 1, 3: query heads 4 to 7, key heads 2, 3" in text
    assert made.direction("forward") == made.rings[0].direction("forward")
    with pytest.raises(ValueError, match="rank 4 is outside a ring of 4"):
        made.flops(4, "forward")


def test_work_is_counted_for_every_rank() -> None:
    """Three heads on two ranks: one has twice the other's."""
    made = plan(64, 2, heads=3, head_dim=16, head_degree=2)
    assert made.flops(0, "forward") == 2 * made.flops(1, "forward")
    assert made.imbalance == pytest.approx(1 / 3)


@pytest.mark.parametrize("degree", [0, 3, True, "two"])
def test_a_plan_refuses_what_the_call_refuses(degree: object) -> None:
    with pytest.raises(ValueError, match="heads must say how many neighbouring ranks exchange heads, a divisor of"):
        plan(64, 4, heads=8, head_dim=16, head_degree=degree, mask=window(4))  # type: ignore[call-overload]
