"""Masks allow exactly the pairs of their written formulas, reduce to disjoint bands, and read back from their text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from burst_attention import Mask, blocks, causal, documents, full, parse_mask, plan, prefix, window
from burst_attention.geometry import Band
from burst_attention.reference import allowed_pairs
from tests.unit.oracle import MaskCase, masks

PACK = "pack the rows into B = 1"

SIZE = 24


def band_counts(bands: tuple[Band, ...], i: NDArray[np.int64], j: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of the bands hold each pair."""
    counts = np.zeros((i.size, j.size), np.int64)
    rows, cols = i[:, None], j[None, :]
    for i0, i1, j0, j1, low, high in bands:
        inside = (i0 <= rows) & (rows < i1) & (j0 <= cols) & (cols < j1)
        counts += inside & (low <= rows - cols) & (rows - cols < high)
    return counts


def picture(mask: Mask, size: int = 4) -> list[str]:
    """The first positions drawn as rows of # and dots, from the mask's bands."""
    counts = band_counts(mask.bands, np.arange(size), np.arange(size))
    return ["".join("#" if count else "." for count in row) for row in counts]


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        (full(), ["####", "####", "####", "####"]),
        (causal(), ["#...", "##..", "###.", "####"]),
        (window(1), ["#...", ".#..", "..#.", "...#"]),
        (window(2), ["##..", "###.", ".###", "..##"]),
        (documents([2, 2]), ["##..", "##..", "..##", "..##"]),
        (documents([1, 2, 1]), ["#...", ".##.", ".##.", "...#"]),
        (prefix(0), ["....", "....", "....", "...."]),
        (prefix(1), ["#...", "#...", "#...", "#..."]),
        (blocks([[1, 0], [1, 1]], 2), ["##..", "##..", "####", "####"]),
        (blocks([[0, 1], [1, 0]], 3), ["...#", "...#", "...#", "###."]),
        (causal() | prefix(2), ["##..", "##..", "###.", "####"]),
        (causal() & window(2), ["#...", "##..", ".##.", "..##"]),
        (causal() & (window(2) | prefix(1)), ["#...", "##..", "###.", "#.##"]),
        (causal() & window(2) | prefix(1), ["#...", "##..", "###.", "#.##"]),
        (causal() & documents([3, 1]), ["#...", "##..", "###.", "...#"]),
    ],
    ids=lambda value: str(value) if isinstance(value, Mask) else "",
)
def test_small_masks_look_as_drawn(mask: Mask, rows: list[str]) -> None:
    assert picture(mask) == rows


@settings(deadline=None, derandomize=True, max_examples=400)
@given(masks(SIZE))
def test_bands_hold_each_allowed_pair_once_and_no_other(case: MaskCase) -> None:
    mask, allowed = case
    counts = band_counts(mask.bands, np.arange(SIZE), np.arange(SIZE))
    np.testing.assert_array_equal(counts, allowed.astype(np.int64))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(masks(SIZE), st.lists(st.integers(0, SIZE - 1), min_size=1), st.lists(st.integers(0, SIZE - 1), min_size=1))
def test_dense_oracle_of_the_package_follows_the_formulas(case: MaskCase, i: list[int], j: list[int]) -> None:
    mask, allowed = case
    got = allowed_pairs(mask, torch.tensor(i), torch.tensor(j))
    assert got.dtype == torch.bool
    np.testing.assert_array_equal(got.numpy(), allowed[np.ix_(i, j)])


def test_no_mask_is_full_attention_for_the_oracle() -> None:
    assert allowed_pairs(None, torch.arange(3), torch.arange(5)).tolist() == [[True] * 5] * 3


@settings(deadline=None, derandomize=True, max_examples=200)
@given(masks(SIZE))
def test_text_reads_back_to_an_equal_mask(case: MaskCase) -> None:
    mask, _ = case
    again = parse_mask(str(mask))
    assert again == mask and hash(again) == hash(mask) and str(again) == str(mask)
    assert again.bands == mask.bands


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal()", causal()),
        ("causal", causal()),
        ("  full() ", full()),
        ("window(64)", window(64)),
        ("documents([3, 1, 4])", documents([3, 1, 4])),
        ("documents((3, 1, 4))", documents([3, 1, 4])),
        ("prefix(0)", prefix(0)),
        ("blocks([[1, 0], [0, 1]], 8)", blocks([[True, False], [False, True]], 8)),
        ("causal() & window(64) | prefix(4)", (causal() & window(64)) | prefix(4)),
        ("prefix(4) | causal() & window(64)", prefix(4) | (causal() & window(64))),
        ("causal() & (window(64) | prefix(4))", causal() & (window(64) | prefix(4))),
        ("full() & (causal() & window(2))", full() & (causal() & window(2))),
        ("full() | causal() | window(2)", (full() | causal()) | window(2)),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_written_text_means_what_python_would_mean(text: str, mask: Mask) -> None:
    assert parse_mask(text) == mask


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sliding(3)",
        "window",
        "window()",
        "window(0)",
        "window(1, 2)",
        "window(size=3)",
        "window(2 + 1)",
        "documents(3)",
        "documents([])",
        "causal() & 3",
        "causal() + full()",
        "causal() and full()",
        "~causal()",
        "causal(",
        "causal(); full()",
        "__import__('os')",
        "causal().bands",
    ],
)
def test_unreadable_text_is_refused_and_named(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read mask") as caught:
        parse_mask(text)
    assert repr(text) in str(caught.value)
    assert "documents" in str(caught.value), "the message names the masks there are"


def test_masks_are_frozen_values() -> None:
    mask = causal() & documents([3, 5])
    same = causal() & documents(torch.tensor([3, 5]))
    assert mask == same and hash(mask) == hash(same) and len({mask, same}) == 1
    assert mask != documents([3, 5]) & causal()
    assert mask != causal() & documents([5, 3])
    with pytest.raises(FrozenInstanceError):
        mask.name = "|"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("mask", "name", "args"),
    [
        (full(), "full", ()),
        (causal(), "causal", ()),
        (window(7), "window", (7,)),
        (documents([2, 3]), "documents", ((2, 3),)),
        (prefix(4), "prefix", (4,)),
        (causal() & window(7), "&", (causal(), window(7))),
        (causal() | prefix(4), "|", (causal(), prefix(4))),
    ],
    ids=lambda value: str(value) if isinstance(value, Mask) else "",
)
def test_name_and_args_say_how_a_mask_was_made(mask: Mask, name: str, args: tuple[object, ...]) -> None:
    assert (mask.name, mask.args) == (name, args)


def test_matrix_of_blocks_may_be_a_list_a_tensor_an_array_or_its_own_text_form() -> None:
    rows = [[1, 0, 1], [0, 0, 1]]
    expected = blocks(rows, 4)
    assert blocks(torch.tensor(rows), 4) == expected
    assert blocks(torch.tensor(rows, dtype=torch.bool), 4) == expected
    assert blocks(np.array(rows, dtype=np.float32), 4) == expected
    assert blocks([[bool(cell) for cell in row] for row in rows], 4) == expected
    assert blocks(expected.args[0], 4) == expected
    assert blocks([[0, 0, 1], [0, 0, 1]], 4) != expected


def test_numbers_may_be_of_any_whole_type() -> None:
    assert window(np.int64(5)) == window(5) == window(torch.tensor(5))
    assert documents(np.array([2, 3])) == documents((2, 3)) == documents([2, 3])
    assert type(window(np.int64(5)).args[0]) is int


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: window(0), "window", id="window-zero"),
        pytest.param(lambda: window(-3), "window", id="window-negative"),
        pytest.param(lambda: window(2.5), "window", id="window-fraction"),
        pytest.param(lambda: window(True), "window", id="window-bool"),
        pytest.param(lambda: window(None), "window", id="window-none"),
        pytest.param(lambda: prefix(-1), "prefix", id="prefix-negative"),
        pytest.param(lambda: prefix("4"), "prefix", id="prefix-text"),
        pytest.param(lambda: documents([]), "at least one document", id="documents-none-at-all"),
        pytest.param(lambda: documents([3, 0, 2]), "documents", id="documents-an-empty-one"),
        pytest.param(lambda: documents([3, -1]), "documents", id="documents-negative"),
        pytest.param(lambda: documents([1.5, 2]), "documents", id="documents-fraction"),
        pytest.param(lambda: documents(16), "documents", id="documents-a-bare-number"),
        pytest.param(lambda: documents([[3, 5], [4, 4]]), PACK, id="documents-list-per-row"),
        pytest.param(lambda: documents([(8,), (4, 4)]), PACK, id="documents-tuple-per-row"),
        pytest.param(lambda: documents(torch.tensor([[3, 5], [4, 4]])), PACK, id="documents-tensor-per-row"),
        pytest.param(
            lambda: documents([torch.tensor([3, 5]), torch.tensor([4, 4])]),
            PACK,
            id="documents-list-of-tensors-per-row",
        ),
        pytest.param(lambda: blocks([], 4), "2-D", id="blocks-no-rows"),
        pytest.param(lambda: blocks([[]], 4), "2-D", id="blocks-no-columns"),
        pytest.param(lambda: blocks([1, 0], 4), "2-D", id="blocks-one-dimension"),
        pytest.param(lambda: blocks([[1, 0], [1]], 4), "rows of equal length", id="blocks-ragged-short"),
        pytest.param(lambda: blocks([[1], [1, 0]], 4), "rows of equal length", id="blocks-ragged-long"),
        pytest.param(lambda: blocks(torch.zeros(2, 2, 2), 4), "2-D", id="blocks-three-dimensions"),
        pytest.param(lambda: blocks([[1, 0]], 0), "blocks", id="blocks-of-zero"),
        pytest.param(lambda: blocks([[1, 0]], 1.0), "blocks", id="blocks-of-a-fraction"),
    ],
)
def test_bad_values_are_refused_with_a_message_that_says_which(make: Callable[[], Mask], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("operator", [lambda a, b: a & b, lambda a, b: a | b], ids=["and", "or"])
@pytest.mark.parametrize("other", [None, True, 3, "causal()"], ids=repr)
def test_masks_compose_with_masks_only(operator: Callable[[object, object], object], other: object) -> None:
    with pytest.raises(TypeError, match=type(other).__name__):
        operator(causal(), other)


@pytest.mark.parametrize("start", [10**6, 2**31 - 3, 2**40], ids=["million", "edge-of-int32", "2**40"])
@pytest.mark.parametrize("far", [0, 5, -5], ids=["same", "queries-later", "keys-later"])
def test_bands_are_exact_at_far_positions(start: int, far: int) -> None:
    """Masks without an end hold there the same pairs that their formulas give near the origin."""
    i, j = start + max(far, 0) + np.arange(8), start + max(-far, 0) + np.arange(8)
    rows, cols = i[:, None], j[None, :]
    mask = (causal() & window(4)) | (window(2) & full()) | prefix(start + 3)
    allowed = ((cols <= rows) & (rows - cols < 4)) | (np.abs(rows - cols) < 2) | (cols < start + 3)
    np.testing.assert_array_equal(band_counts(mask.bands, i, j), allowed.astype(np.int64))


@pytest.mark.parametrize(
    ("mask", "count"),
    [
        (full(), 1),
        (causal() & window(8), 1),
        (causal() & documents([3] * 50), 50),
        (prefix(0), 0),
        (documents([4, 4]) & blocks([[0, 1], [1, 0]], 4), 0),
        (blocks(torch.ones(30, 30), 2), 1),
        (blocks(torch.eye(30), 2), 30),
        (causal() | full(), 2),
        (full() | causal(), 1),
    ],
    ids=lambda value: str(value)[:40],
)
def test_masks_reduce_to_few_bands(mask: Mask, count: int) -> None:
    assert len(mask.bands) == count


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (documents([4, 3]), "covers 7 tokens but positions go up to 8"),
        (causal() & (window(2) | documents([7])), "covers 7 tokens"),
        (blocks([[1, 1]], 4), "4 queries and 8 keys"),
        (blocks([[1], [1]], 4), "8 queries and 4 keys"),
    ],
    ids=lambda value: str(value) if isinstance(value, Mask) else "",
)
def test_positions_that_a_mask_says_nothing_about_are_refused(mask: Mask, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(8, 2, heads=1, head_dim=8, mask=mask)


@pytest.mark.parametrize("mask", [documents([4, 4]), documents([9]), blocks([[1, 1], [1, 1]], 4)], ids=str)
def test_masks_that_cover_every_position_are_taken(mask: Mask) -> None:
    assert plan(8, 2, heads=1, head_dim=8, mask=mask).mask == mask
