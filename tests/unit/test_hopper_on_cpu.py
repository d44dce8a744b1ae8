"""Our kernels for Hopper on a chip that is not there: the numbers, and that nobody reads or writes too early."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch

from burst_attention.tiles import block_table as block_tables
from tests.single_tiles import (
    PIECES,
    check_backward,
    check_begun_and_ended,
    check_forward,
    check_partial,
    check_parts_as_they_wait,
    make_tile,
)
from tests.unit.gluon_on_cpu import BACKWARD, FORWARD, ORDERS, source_of, use_chip
from tests.unit.hopper_chip import WrongOrderError

BF16, FP16 = torch.bfloat16, torch.float16
BATCH = {"documents": 1, "long": 1, "far-apart": 1}


@pytest.fixture(autouse=True)
def tables_of_their_own() -> Iterator[None]:
    block_tables.block_table.cache_clear()
    yield
    block_tables.block_table.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim", "packed"),
    [(BF16, 128, 128, False), (FP16, 64, 64, True), (BF16, 64, 128, True), (FP16, 128, 64, False)],
    ids=str,
)
@pytest.mark.parametrize("name", PIECES)
def test_forward(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, dim: int, value_dim: int, packed: bool
) -> None:
    use_chip(monkeypatch)
    tile = make_tile(name, dtype, dim, value_dim, 2, packed, "cpu", BATCH.get(name, 2))
    check_forward(tile, PIECES[name])
    if name == "causal":
        check_begun_and_ended(tile, PIECES[name])


@pytest.mark.parametrize(
    ("dtype", "dim", "kv_heads", "packed"),
    [(BF16, 128, 4, False), (FP16, 128, 4, True), (BF16, 64, 2, True), (FP16, 128, 1, False)],
    ids=str,
)
@pytest.mark.parametrize("name", PIECES)
def test_backward(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, dim: int, kv_heads: int, packed: bool
) -> None:
    use_chip(monkeypatch)
    tile = make_tile(name, dtype, dim, dim, kv_heads, packed, "cpu", BATCH.get(name, 2))
    check_backward(tile, PIECES[name])


@pytest.mark.parametrize("name", ["causal", "window", "documents", "far-apart"])
def test_a_partial_that_waits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    use_chip(monkeypatch)
    check_partial(make_tile(name, FP16, 128, 128, 2, True, "cpu", BATCH.get(name, 2)), PIECES[name])


@pytest.mark.parametrize(("kv_heads", "parts"), [(2, 2), (1, 2), (1, 4)])
def test_a_key_head_in_parts(monkeypatch: pytest.MonkeyPatch, kv_heads: int, parts: int) -> None:
    """Each of some of its query heads, as a program of its own."""
    use_chip(monkeypatch)
    tile = make_tile("two-pieces", BF16, 128, 128, kv_heads, False, "cpu")
    check_backward(tile, PIECES["two-pieces"], parts)
    check_parts_as_they_wait(tile, PIECES["two-pieces"], parts)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_groups_of_warps_may_run_in_any_order(monkeypatch: pytest.MonkeyPatch, order: Sequence[int]) -> None:
    use_chip(monkeypatch, order)
    tile = make_tile("causal", BF16, 128, 128, 2, False, "cpu", batch=1)
    check_forward(tile, PIECES["causal"], split=None)
    check_backward(tile, PIECES["causal"])


@pytest.mark.parametrize(("heads", "blocks"), [(1, 9), (2, 9), (4, 1), (8, 9)])
def test_heads_take_turns_in_any_number_of_launches(monkeypatch: pytest.MonkeyPatch, heads: int, blocks: int) -> None:
    """Of 8 heads: one by one, in groups, all at once; with a launch for each block."""
    use_chip(monkeypatch)
    tile = make_tile("documents", BF16, 128, 128, 4, False, "cpu")
    monkeypatch.setattr(block_tables, "MOST_BLOCKS", blocks)
    monkeypatch.setattr(block_tables, "UNEVEN", 2.0)
    rows, dim = tile.q.shape[2:]
    for check, row_bytes in ((check_forward, 2 * dim * 2), (check_backward, 2 * dim * 2 + dim * 4)):
        monkeypatch.setattr(block_tables, "_cache_bytes", lambda device, size=heads * rows * row_bytes: size)
        check(tile, PIECES["documents"])


CHECKS = {FORWARD: partial(check_forward, split=None), BACKWARD: check_backward}
ORDERING = re.compile(r"\s*(mbarrier\.(wait|arrive|expect)|fence_async_shared|tma\.store_wait)\(")


def lines_of(module: str) -> list[str]:
    return source_of(module).splitlines()


def named(module: str, number: int) -> object:
    return pytest.param(
        module, number, id=f"{module.rpartition('_')[2]}-{number + 1}-{lines_of(module)[number].strip()}"
    )


def check_edited(
    monkeypatch: pytest.MonkeyPatch, module: str, change: Callable[[list[str]], None], order: Sequence[int] = ORDERS[0]
) -> None:
    """A kernel with some lines changed; enough blocks for every buffer to be used again and again."""

    def edit(name: str, source: str) -> str:
        lines = source.splitlines()
        if name == module:
            change(lines)
        return "\n".join(lines)

    use_chip(monkeypatch, order, edit)
    CHECKS[module](make_tile("long", BF16, 128, 128, 2, False, "cpu", batch=1), PIECES["long"])


@pytest.mark.parametrize(
    ("module", "number"),
    [named(name, number) for name in CHECKS for number, line in enumerate(lines_of(name)) if ORDERING.match(line)],
)
def test_what_keeps_groups_in_order_is_needed(monkeypatch: pytest.MonkeyPatch, module: str, number: int) -> None:
    def leave_out(lines: list[str]) -> None:
        lines[number] = re.sub(r"\S.*", "pass", lines[number])

    with pytest.raises((WrongOrderError, AssertionError)):
        check_edited(monkeypatch, module, leave_out)


LATER_ANYWAY = ("mbarrier.arrive(k_empty.index(slot))",)
"""Before the loading warp comes to these keys' buffer it waits for values that are given back after them."""


@pytest.mark.parametrize(
    ("module", "number"),
    [
        named(name, number)
        for name in CHECKS
        for number, (before, line) in enumerate(itertools.pairwise(["", *lines_of(name)]))
        if "mbarrier.arrive(" in line and "mbarrier.arrive(" not in before and line.strip() not in LATER_ANYWAY
    ],
)
def test_nothing_is_handed_over_too_early(monkeypatch: pytest.MonkeyPatch, module: str, number: int) -> None:
    """Before the line that comes before it: a product that still reads, a store or its fence."""

    def swap(lines: list[str]) -> None:
        lines[number - 1], lines[number] = lines[number], lines[number - 1]

    with pytest.raises((WrongOrderError, AssertionError)):
        check_edited(monkeypatch, module, swap)
