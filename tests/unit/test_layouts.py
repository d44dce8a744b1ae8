"""Layouts place every token on exactly one rank, shard and unshard exactly, and balance the work of a mask."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burst_attention import Layout, Mask, blocks, causal, documents, full, plan, prefix, window

SIMPLE = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag, "striped": Layout.striped}
BALANCED_FOR = (full(), causal(), causal() & window(3), window(5), causal() | prefix(4))
DOCUMENTS = (300, 24, 1, 400, 7, 292)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout of up to 70 tokens on up to 8 ranks, often with fewer tokens than ranks."""
    tokens = draw(st.one_of(st.integers(0, 9), st.integers(0, 70)))
    ring_size, start = draw(st.integers(1, 8)), draw(st.sampled_from([0, 0, 5]))
    name = draw(st.sampled_from([*SIMPLE, "balanced"]))
    if name == "balanced":
        return Layout.balanced(tokens, ring_size, draw(st.sampled_from(BALANCED_FOR)), start)
    return SIMPLE[name](tokens, ring_size, start)


def all_positions(layout: Layout) -> list[list[int]]:
    return [layout.positions(rank).tolist() for rank in range(layout.ring_size)]


@pytest.mark.parametrize(
    ("layout", "positions"),
    [
        (Layout.contiguous(8, 2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (Layout.contiguous(7, 3), [[0, 1, 2], [3, 4, 5], [6]]),
        (Layout.contiguous(9, 4), [[0, 1, 2], [3, 4, 5], [6, 7, 8], []]),
        (Layout.contiguous(2, 4), [[0], [1], [], []]),
        (Layout.contiguous(0, 2), [[], []]),
        (Layout.contiguous(5, 2, start=10), [[10, 11, 12], [13, 14]]),
        (Layout.zigzag(8, 2), [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (Layout.zigzag(8, 1), [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (Layout.zigzag(12, 3), [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
        (Layout.zigzag(10, 2), [[0, 1, 2, 8, 9], [3, 4, 5, 6, 7]]),
        (Layout.zigzag(7, 2), [[0, 1, 6], [2, 3, 4, 5]]),
        (Layout.zigzag(5, 4), [[0], [1], [2], [3, 4]]),
        (Layout.zigzag(3, 2), [[0], [1, 2]]),
        (Layout.zigzag(1, 3), [[0], [], []]),
        (Layout.zigzag(0, 3), [[], [], []]),
        (Layout.zigzag(8, 2, start=3), [[3, 4, 9, 10], [5, 6, 7, 8]]),
        (Layout.striped(8, 2), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (Layout.striped(7, 3), [[0, 3, 6], [1, 4], [2, 5]]),
        (Layout.striped(2, 4), [[0], [1], [], []]),
        (Layout.striped(0, 2), [[], []]),
        (Layout.striped(5, 2, start=1), [[1, 3, 5], [2, 4]]),
    ],
    ids=lambda value: str(value) if isinstance(value, Layout) else "",
)
def test_positions_of_small_layouts(layout: Layout, positions: list[list[int]]) -> None:
    assert all_positions(layout) == positions


@pytest.mark.parametrize("ring_size", [1, 2, 3, 4, 7, 8])
def test_contiguous_is_what_torch_chunk_gives(ring_size: int) -> None:
    for tokens in range(41):
        x = torch.arange(tokens)
        chunks = [chunk.tolist() for chunk in x.chunk(ring_size)]
        chunks += [[]] * (ring_size - len(chunks))
        layout = Layout.contiguous(tokens, ring_size)
        assert all_positions(layout) == chunks, f"{tokens} tokens"
        assert [layout.shard(x, rank, 0).tolist() for rank in range(ring_size)] == chunks, f"{tokens} tokens"


@settings(deadline=None, derandomize=True, max_examples=300)
@given(layouts())
def test_every_token_is_on_exactly_one_rank(layout: Layout) -> None:
    held = all_positions(layout)
    assert sorted(chain.from_iterable(held)) == list(range(layout.start, layout.start + layout.tokens))
    assert [layout.local_tokens(rank) for rank in range(layout.ring_size)] == [len(rank) for rank in held]
    assert all(layout.positions(rank).dtype == torch.int64 for rank in range(layout.ring_size))
    assert all(rank == sorted(rank) for rank in held), "a shard keeps the order of the sequence"


@pytest.mark.parametrize("name", ["zigzag", "striped"])
@pytest.mark.parametrize("ring_size", [1, 2, 3, 8])
def test_shards_are_near_equal(name: str, ring_size: int) -> None:
    for tokens in range(50):
        sizes = [SIMPLE[name](tokens, ring_size).local_tokens(rank) for rank in range(ring_size)]
        assert max(sizes) - min(sizes) <= 2 - (name == "striped"), f"{tokens} tokens"


@settings(deadline=None, derandomize=True, max_examples=200)
@given(layouts(), st.sampled_from([0, 1, 2, -1, -2]))
def test_shards_hold_their_positions_and_unshard_to_the_whole(layout: Layout, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = layout.tokens
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    shards = [layout.shard(x, rank, dim) for rank in range(layout.ring_size)]
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, x.index_select(dim, layout.positions(rank) - layout.start))
    assert torch.equal(layout.unshard(shards, dim), x)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(layouts())
def test_gradients_flow_through_shard_and_unshard_to_each_token(layout: Layout) -> None:
    x = torch.ones(2, layout.tokens, 3, dtype=torch.float64, requires_grad=True)
    shards = [layout.shard(x, rank, 1) * (rank + 1) for rank in range(layout.ring_size)]
    weight = torch.arange(1.0, layout.tokens + 1, dtype=torch.float64)[None, :, None]
    (layout.unshard(shards, 1) * weight).sum().backward()
    factor = torch.zeros(layout.tokens, dtype=torch.float64)
    for rank in range(layout.ring_size):
        factor[layout.positions(rank) - layout.start] += rank + 1
    assert x.grad is not None
    assert torch.equal(x.grad, (weight * factor[None, :, None]).expand_as(x))


@pytest.mark.parametrize("name", ["contiguous", "striped"])
def test_a_shard_of_one_run_is_a_view(name: str) -> None:
    x = torch.arange(12)
    SIMPLE[name](12, 3).shard(x, 1, 0).fill_(-1)
    assert (x == -1).sum() == 4


@settings(deadline=None, derandomize=True, max_examples=200)
@given(layouts(), st.data())
def test_labels_are_the_next_token_of_the_same_document(layout: Layout, data: st.DataObject) -> None:
    ignore = data.draw(st.sampled_from([-100, -1]))
    cuts = data.draw(st.none() | st.sets(st.integers(1, max(layout.tokens - 1, 1)), max_size=6))
    tokens = layout.tokens
    ids = torch.randperm(2 * tokens, generator=torch.Generator().manual_seed(tokens)).reshape(2, tokens) + 7
    if cuts is None:
        lengths, ends = None, {tokens - 1}
    else:
        edges = [0, *sorted(cut for cut in cuts if cut < tokens), tokens]
        lengths = [last - first for first, last in pairwise(edges) if first < last]
        ends = {edge - 1 for edge in edges[1:]}
    for rank in range(layout.ring_size):
        got = layout.labels(ids, rank, documents=lengths, ignore_index=ignore)
        places = [position - layout.start for position in layout.positions(rank).tolist()]
        expected = [[ignore if p in ends else int(row[p + 1]) for p in places] for row in ids]
        assert got.tolist() == expected
        assert got.dtype == ids.dtype


def test_labels_of_a_small_case_and_its_defaults() -> None:
    ids = torch.tensor([10, 11, 12, 13, 14, 15, 16, 17])
    layout = Layout.zigzag(8, 2)
    assert layout.labels(ids, 0).tolist() == [11, 12, 17, -100]
    assert layout.labels(ids, 1).tolist() == [13, 14, 15, 16]
    assert layout.labels(ids, 0, documents=[2, 5, 1]).tolist() == [11, -100, -100, -100]
    assert layout.labels(ids, 1, documents=torch.tensor([2, 5, 1])).tolist() == [13, 14, 15, 16]
    assert layout.labels(ids, 1, documents=(4, 4), ignore_index=-1).tolist() == [13, -1, 15, 16]
    assert ids.tolist() == list(range(10, 18)), "the input is left alone"


@settings(deadline=None, derandomize=True, max_examples=200)
@given(layouts())
def test_text_reads_back_to_an_equal_layout(layout: Layout) -> None:
    again = Layout.parse(str(layout))
    assert again == layout and hash(again) == hash(layout) and str(again) == str(layout)
    assert all_positions(again) == all_positions(layout)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("contiguous(1000, 4)", Layout.contiguous(1000, 4)),
        (" zigzag(1000, 4, 16) ", Layout.zigzag(1000, 4, 16)),
        ("striped(0, 1)", Layout.striped(0, 1)),
        (
            "balanced(9, 2, 0, causal() & documents([4, 5]))",
            Layout.balanced(9, 2, causal() & documents([4, 5])),
        ),
        ("balanced(9, 2, 3, causal() | prefix(2))", Layout.balanced(9, 2, causal() | prefix(2), start=3)),
    ],
)
def test_written_text_is_read(text: str, layout: Layout) -> None:
    assert Layout.parse(text) == layout


@pytest.mark.parametrize(
    "text",
    [
        "",
        "zigzag",
        "zigzag()",
        "zigzag(8)",
        "zigzag(8, 2, 0, 5)",
        "zigzag(8, ring_size=2)",
        "zigzag(8, 0)",
        "zigzag(-8, 2)",
        "zigzag(8.0, 2)",
        "zigzag(4 + 4, 2)",
        "diagonal(8, 2)",
        "balanced()",
        "balanced(8, 2)",
        "balanced(8, 2, 0, 3, causal())",
        "balanced(8, 2, 0, sliding(3))",
        "balanced(8, 2, 0, documents([3, 3]))",
        "zigzag(8, 2).tokens",
        "__import__('os')",
    ],
)
def test_unreadable_text_is_refused_and_named(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read layout") as caught:
        Layout.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: Layout.contiguous(-1, 2), "tokens", id="negative-tokens"),
        pytest.param(lambda: Layout.zigzag(8.0, 2), "tokens", id="fraction-of-tokens"),
        pytest.param(lambda: Layout.zigzag(8, 0), "ring_size", id="no-ranks"),
        pytest.param(lambda: Layout.striped(8, True), "ring_size", id="bool-ranks"),
        pytest.param(lambda: Layout.striped(8, 2, -1), "start", id="negative-start"),
        pytest.param(lambda: Layout.balanced(8, 2, None), "needs a Mask", id="balanced-for-no-mask"),
        pytest.param(lambda: Layout.balanced(8, 2, documents([4, 3])), "covers 7", id="balanced-short-documents"),
        pytest.param(lambda: Layout.balanced(4, 2, documents([7]), start=4), "covers 7", id="balanced-past-documents"),
        pytest.param(lambda: Layout.zigzag(8, 2).positions(2), "rank 2", id="rank-too-high"),
        pytest.param(lambda: Layout.zigzag(8, 2).local_tokens(-1), "rank -1", id="rank-below-0"),
        pytest.param(lambda: Layout.zigzag(8, 2).shard(torch.zeros(4), 0, 0), "whole tensor", id="shard-a-shard"),
        pytest.param(lambda: Layout.zigzag(8, 2).shard(torch.zeros(8), 5, 0), "rank 5", id="shard-of-no-rank"),
        pytest.param(lambda: Layout.zigzag(8, 2).unshard([torch.zeros(4)], 0), "2 shards", id="too-few-shards"),
        pytest.param(
            lambda: Layout.zigzag(8, 2).unshard([torch.zeros(4), torch.zeros(3)], 0), "rank 1 has 3", id="short-shard"
        ),
        pytest.param(
            lambda: Layout.contiguous(7, 2).unshard([torch.zeros(3), torch.zeros(4)], 0),
            "rank 0 has 3",
            id="shards-exchanged",
        ),
        pytest.param(lambda: Layout.zigzag(8, 2).labels(torch.zeros(4), 0), "whole tensor", id="labels-of-a-shard"),
        pytest.param(
            lambda: Layout.zigzag(8, 2).labels(torch.zeros(8), 0, documents=[3, 4]), "sum to 7", id="labels-documents"
        ),
        pytest.param(
            lambda: Layout.zigzag(8, 2).labels(torch.zeros(8), 0, documents=[9, -1]), "documents", id="labels-negative"
        ),
        pytest.param(
            lambda: Layout.zigzag(8, 2).labels(torch.zeros(2, 8), 0, documents=[[2, 2], [2, 2]]),
            "documents",
            id="labels-documents-per-row",
        ),
    ],
)
def test_bad_values_are_refused_with_a_message_that_says_which(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "mask",
    [
        full(),
        causal(),
        documents(DOCUMENTS),
        causal() & documents(DOCUMENTS),
        window(64),
        causal() & window(100),
        causal() & window(50) & documents(DOCUMENTS),
        causal() | prefix(200),
        causal() & (window(256) | prefix(16)),
        causal() & (window(64) | prefix(16)),
        blocks([[(7 * row + 3 * col) % 5 < 2 for col in range(16)] for row in range(16)], 64),
    ],
    ids=lambda mask: str(mask)[:60],
)
def test_balanced_gives_every_rank_near_equal_work(mask: Mask) -> None:
    uneven = {}
    for ring_size in range(2, 9):
        layout = Layout.balanced(1024, ring_size, mask)
        made = plan(1024, ring_size, heads=1, head_dim=16, mask=mask, layout=layout)
        uneven[ring_size] = made.imbalance
    # Sixteen keys that every query sees cannot be dealt evenly to seven ranks.
    limit = 0.08 if "prefix" in str(mask) else 0.05
    assert {ring_size: value for ring_size, value in uneven.items() if value >= limit} == {}


@pytest.mark.parametrize("ring_size", [2, 3, 5, 8])
def test_balanced_shards_differ_by_few_tokens(ring_size: int) -> None:
    for mask in (causal(), causal() & documents(DOCUMENTS), window(64)):
        layout = Layout.balanced(1024, ring_size, mask)
        sizes = [layout.local_tokens(rank) for rank in range(ring_size)]
        assert max(sizes) - min(sizes) <= 16, f"{mask}: {sizes}"


def dense_imbalance(layout: Layout, allowed: np.ndarray) -> float:
    """The busiest rank's pairs over the mean, less 1, by whole tables: the worse of rows and columns."""
    ranks = [layout.positions(rank).numpy() for rank in range(layout.ring_size)]
    work = [[allowed[held].sum(), allowed[:, held].sum()] for held in ranks]
    return float(np.max(work) * layout.ring_size / allowed.sum() - 1)


i, j = np.indices((240, 240))
DOCUMENT_OF = np.repeat([0, 1, 2], [150, 30, 60])


@pytest.mark.parametrize(
    ("mask", "allowed"),
    [
        (full(), np.ones((240, 240), bool)),
        (causal(), j <= i),
        (causal() & window(20), (j <= i) & (i - j < 20)),
        (causal() & documents([150, 30, 60]), (j <= i) & (DOCUMENT_OF[i] == DOCUMENT_OF[j])),
        (causal() & (window(20) | prefix(5)), (j <= i) & ((i - j < 20) | (j < 5))),
    ],
    ids=lambda value: str(value) if isinstance(value, Mask) else "",
)
@pytest.mark.parametrize("ring_size", [1, 2, 3, 6])
def test_best_is_within_two_percent_of_the_most_even_layout(mask: Mask, allowed: np.ndarray, ring_size: int) -> None:
    best = Layout.best(240, ring_size, mask)
    assert (best.tokens, best.ring_size, best.start) == (240, ring_size, 0)
    candidates = [make(240, ring_size) for make in SIMPLE.values()] + [Layout.balanced(240, ring_size, mask)]
    evenest = min(dense_imbalance(layout, allowed) for layout in candidates)
    assert dense_imbalance(best, allowed) <= evenest + 0.02 + 1e-9


@pytest.mark.parametrize(
    ("mask", "name"),
    [(None, "contiguous"), (full(), "contiguous"), (causal(), "zigzag"), (documents([256] * 4), "contiguous")],
    ids=str,
)
def test_best_prefers_the_simplest_of_even_layouts(mask: Mask | None, name: str) -> None:
    assert Layout.best(1024, 4, mask).name == name


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_best_takes_fewer_tokens_than_ranks(tokens: int) -> None:
    layout = Layout.best(tokens, 8, causal())
    assert sorted(chain.from_iterable(all_positions(layout))) == list(range(tokens))


def test_layouts_are_frozen_values() -> None:
    layout = Layout.zigzag(8, 2)
    assert layout == Layout.zigzag(8, 2) and hash(layout) == hash(Layout.zigzag(8, 2))
    assert layout not in {Layout.striped(8, 2), Layout.zigzag(8, 2, 1), Layout.zigzag(8, 3), Layout.zigzag(9, 2)}
    with pytest.raises(AttributeError):
        layout.tokens = 9  # type: ignore[misc]


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped", "balanced"])
@pytest.mark.parametrize(("tokens", "ranks", "start"), [(61, 4, 5), (3, 4, 0), (64, 8, 0)])
def test_some_positions_stay_where_they_are(name: str, tokens: int, ranks: int, start: int) -> None:
    layout = (
        Layout.balanced(tokens, ranks, causal(), start) if name == "balanced" else Layout(name, tokens, ranks, start)
    )
    for first in range(start, start + tokens + 1, 7):
        for end in range(first, start + tokens + 1, 5):
            part = layout.between(first, end)
            assert Layout.parse(str(part)) == part and (part.tokens, part.end) == (end - first, end)
            for rank in range(ranks):
                held = layout.positions(rank)
                assert torch.equal(part.positions(rank), held[(held >= first) & (held < end)])
    with pytest.raises(ValueError, match="holds positions"):
        layout.between(start, start + tokens + 1)
