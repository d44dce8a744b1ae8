"""Our kernels for Hopper against fp64 on single tiles: every kind of piece, state carried, gradients added.

tests/unit/test_hopper_on_cpu.py runs the same without a GPU.
"""

from __future__ import annotations

import pytest
import torch

from burst_attention.tiles import BackwardInputs
from burst_attention.tiles import block_table as block_tables
from burst_attention.tiles.hopper import DIMS, serves_backward, serves_forward
from tests.single_tiles import (
    ERROR,
    PIECES,
    backward_inputs,
    check_backward,
    check_begun_and_ended,
    check_forward,
    check_partial,
    check_parts_as_they_wait,
    make_tile,
)

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("dim", "value_dim"), [(128, 128), (64, 64), (64, 128), (128, 64)])
@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("name", PIECES)
def test_forward(name: str, dtype: torch.dtype, dim: int, value_dim: int, packed: bool) -> None:
    tile = make_tile(name, dtype, dim, value_dim, 2, packed)
    assert serves_forward(tile.q, tile.k, tile.v, tile.scale)
    check_forward(tile, PIECES[name])
    if name == "causal":
        check_begun_and_ended(tile, PIECES[name])


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("dim", "kv_heads"), [(128, 4), (128, 2), (128, 1), (64, 2)])
@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("name", PIECES)
def test_backward(name: str, dtype: torch.dtype, dim: int, kv_heads: int, packed: bool) -> None:
    tile = make_tile(name, dtype, dim, dim, kv_heads, packed)
    assert serves_backward(backward_inputs(tile), tile.scale, DIMS)
    check_backward(tile, PIECES[name])


@pytest.mark.parametrize("name", ["causal", "window", "documents", "far-apart"])
def test_a_partial_that_waits(name: str) -> None:
    check_partial(make_tile(name, torch.float16, 128, 128, 2, True), PIECES[name])


@pytest.mark.parametrize(("kv_heads", "parts"), [(2, 2), (1, 2), (1, 4)])
def test_a_key_head_in_parts(kv_heads: int, parts: int) -> None:
    tile = make_tile("documents", torch.bfloat16, 128, 128, kv_heads, False)
    check_backward(tile, PIECES["documents"], parts)
    check_parts_as_they_wait(tile, PIECES["documents"], parts)


@pytest.mark.parametrize(("heads", "blocks"), [(1, 9), (2, 9), (4, 1), (8, 9)])
def test_heads_take_turns_in_any_number_of_launches(monkeypatch: pytest.MonkeyPatch, heads: int, blocks: int) -> None:
    """Of 8 heads: one by one, in groups, all at once; with a launch for each block."""
    tile = make_tile("documents", torch.bfloat16, 128, 128, 4, False)
    monkeypatch.setattr(block_tables, "MOST_BLOCKS", blocks)
    monkeypatch.setattr(block_tables, "UNEVEN", 2.0)
    rows, dim = tile.q.shape[2:]
    block_tables.block_table.cache_clear()
    for check, row_bytes in ((check_forward, 2 * dim * 2), (check_backward, 2 * dim * 2 + dim * 4)):
        monkeypatch.setattr(block_tables, "_cache_bytes", lambda device, size=heads * rows * row_bytes: size)
        check(tile, PIECES["documents"])
    block_tables.block_table.cache_clear()


def test_deterministic_algorithms_are_left_to_the_deterministic_kernel() -> None:
    tile = make_tile("full", torch.bfloat16, 128, 128, 2, False)
    rows = torch.zeros(tile.q.shape[:3], device="cuda")
    inputs = BackwardInputs(tile.dout, tile.q, tile.k, tile.v, rows, rows, None)
    torch.use_deterministic_algorithms(True)
    try:
        assert not serves_backward(inputs, tile.scale, DIMS)
    finally:
        torch.use_deterministic_algorithms(False)
