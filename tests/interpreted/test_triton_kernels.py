"""Our Triton kernels against their twins in plain torch, on the CPU by Triton's interpreter (`make test` runs both)."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

from burst_attention.geometry import Piece, full_piece, make_piece
from burst_attention.merge import BlockOrder, Deferred, Part, Partial, State, clear, finish, merge_partial
from burst_attention.tiles import Accumulator, BackwardInputs, Gradients
from burst_attention.tiles.plain import PlainKernel

if os.environ.get("TRITON_INTERPRET") != "1":
    # The variable must be set before triton is imported, so these tests have a process of their own.
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

pytest.importorskip("triton")
from burst_attention.tiles import block_table as block_tables
from burst_attention.tiles import fused
from burst_attention.tiles.fused import (
    copy_on_gpu,
    fused_delta,
    merge_partials,
    padded_statistics,
    stand_in_for_out,
    sum_parts,
)
from burst_attention.tiles.gpu import add_partial, finish_deferred, settle
from burst_attention.tiles.split import rectangle_and_triangle
from burst_attention.tiles.triton_kernel import TritonKernel
from burst_attention.tiles.vendor import CudnnKernel
from tests.unit import gpu_kernels_in_torch as in_torch

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}
PIECES: dict[str, tuple[Piece, ...]] = {
    "full": (full_piece(0, 70, 0, 50),),
    "causal": (Piece(0, 70, 0, 70, 0, 70),),
    "window": (Piece(3, 60, 10, 50, -5, 20),),
    "two-pieces": (Piece(3, 60, 10, 50, -5, 20), full_piece(65, 5, 2, 8)),
    "part-of-rows": (full_piece(40, 9, 30, 40),),
}


def tensors(dtype: torch.dtype, dim: int, value_dim: int, heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim))
    return [torch.randn(2, count, 70, width).to(dtype) for count, width in shapes]


def empty_state(q: torch.Tensor, value_dim: int, deferred: Deferred | None = None) -> State:
    """A state of no keys; one that defers holds memory that nothing may read."""
    rows = q.shape[:3]
    state = State(torch.full((*rows, value_dim), torch.nan), torch.full(rows, torch.nan), torch.full(rows, torch.nan))
    if deferred is None:
        clear(state)
    return state._replace(deferred=deferred)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize(("dim", "value_dim", "scale"), [(16, 16, 0.3), (24, 8, 0.3), (16, 16, -0.3)])
def test_kernels_equal_their_twin(dtype: torch.dtype, name: str, dim: int, value_dim: int, scale: float) -> None:
    require_twins_agree(dtype, name, dim, value_dim, scale)


@pytest.mark.parametrize(("heads", "blocks"), [(1, 99), (2, 99), (4, 1), (99, 1)])
def test_heads_take_turns_in_any_number_of_launches(monkeypatch: pytest.MonkeyPatch, heads: int, blocks: int) -> None:
    """Of 8 heads forward, and 4 key heads: one by one, in groups, all at once; with a launch for each block."""
    head_bytes = 70 * 32 * 4
    monkeypatch.setattr(block_tables, "UNEVEN", 2.0)
    monkeypatch.setattr(block_tables, "INTERPRETED", heads * head_bytes)
    monkeypatch.setattr(block_tables, "MOST_BLOCKS", blocks)
    kept = block_tables.block_table, block_tables._cache_bytes
    for function in kept:
        function.cache_clear()
    launches, grids = block_tables.BlockTable.launches, set()

    def noted(table: block_tables.BlockTable, pairs: int, walked: Any) -> Any:
        for grid, lines in launches(table, pairs, walked):
            grids.add((pairs, grid[0]))
            yield grid, lines

    monkeypatch.setattr(block_tables.BlockTable, "launches", noted)
    require_twins_agree(torch.float32, "causal", 16, 16, 0.3)
    assert grids == {(8, min(heads, 8)), (4, min(heads, 4))}
    for function in kept:
        function.cache_clear()


def require_twins_agree(dtype: torch.dtype, name: str, dim: int, value_dim: int, scale: float) -> None:
    q, k, v, dout = tensors(dtype, dim, value_dim)
    ours, twin = TritonKernel(), PlainKernel()
    states = [empty_state(q, value_dim) for _ in range(2)]
    for kernel, state in zip((ours, twin), states, strict=True):
        # Twice: the second call continues a state.
        kernel.forward(PIECES[name], q, k, v, state, scale)
        kernel.forward(PIECES["full"], q, k, v, state, scale)
    (out, lse), (expected, expected_lse) = (finish(state, torch.float32) for state in states)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=0.0)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=0.0)
    inputs = BackwardInputs(dout, q, k, v, expected_lse, torch.randn(q.shape[:3]), None)
    found, wanted = (Gradients(*(Accumulator(torch.full(x.shape, torch.nan)) for x in (q, k, v))) for _ in range(2))
    for kernel, gradients in ((ours, found), (twin, wanted)):
        kernel.backward(PIECES[name], inputs, gradients, scale)
        kernel.backward(PIECES["full"], inputs, gradients, scale)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine is not None and theirs is not None
        exact = theirs.settle()
        torch.testing.assert_close(mine.settle(), exact, atol=TOLERANCE[dtype] * exact.abs().max().item(), rtol=0.0)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("first", [None, "full", "window"])
@pytest.mark.parametrize("then", ["causal", "window"])
def test_a_state_is_begun_and_ended_in_the_kernel_where_it_writes_every_row(
    first: str | None, then: str, last: bool
) -> None:
    q, k, v, _ = tensors(torch.float32, 16, 24)
    ours, twin = TritonKernel(), PlainKernel()
    deferred = Deferred()
    state, right = empty_state(q, 24, deferred), empty_state(q, 24)
    for name, ends in ((first, False), (then, last)) if first else ((then, last),):
        deferred.last = ends
        ours.forward(PIECES[name], q, k, v, state, 0.3)
        twin.forward(PIECES[name], q, k, v, right, 0.3)
    found, expected = ours.finish(state, torch.float32), finish(right, torch.float32)
    assert (deferred.finished is not None) == (last and then == "causal")
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=0.0)


def test_a_gradient_begun_for_some_heads_is_zero_for_the_others() -> None:
    total = Accumulator(torch.full((1, 3, 4, 16), torch.nan))
    assert total.heads(1, 2).fresh
    total.heads(1, 2).begin().fill_(1.0)
    assert not total.fresh
    assert torch.equal(total.settle()[0, :, 0, 0], torch.tensor([0.0, 1.0, 0.0]))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
def test_only_wanted_gradients_are_written(wanted: str) -> None:
    q, k, v, dout = tensors(torch.float32, 16, 16)
    inputs = BackwardInputs(dout, q, k, v, torch.zeros(q.shape[:3]), torch.zeros(q.shape[:3]), None)
    everything = Gradients(*(Accumulator(torch.empty_like(x)) for x in (q, k, v)))
    some = Gradients(
        *(
            Accumulator(torch.empty_like(x)) if name in wanted else None
            for name, x in zip("qkv", (q, k, v), strict=True)
        )
    )
    for gradients in (everything, some):
        TritonKernel().backward(PIECES["causal"], inputs, gradients, 0.3)
    for whole, part in zip(everything, some, strict=True):
        assert part is None or (whole is not None and torch.equal(part.settle(), whole.settle()))


def partials() -> list[Partial]:
    """All rows in token-major order, some rows, and rows without keys."""
    torch.manual_seed(0)
    return [
        Partial(0, torch.randn(2, 70, 3, 24).transpose(1, 2), torch.randn(2, 3, 70) * 5),
        Partial(30, torch.randn(2, 3, 40, 24), torch.randn(2, 3, 40) * 5),
        Partial(10, torch.randn(2, 3, 13, 24), torch.full((2, 3, 13), float("-inf"))),
    ]


@pytest.mark.parametrize("chosen", [[0], [1], [2], [0, 1, 2], [1, 2, 1, 0, 1, 0, 2, 1]], ids=str)
def test_deferred_partials_merge_like_their_twin(chosen: list[int]) -> None:
    """Up to eight of them, so that some are merged before the end; and a state that is settled on the way."""
    q = torch.empty(2, 3, 70, 1)
    expected = empty_state(q, 24)
    state, settled = empty_state(q, 24, Deferred()), empty_state(q, 24, Deferred())
    for index in chosen:
        part = partials()[index]
        merge_partial(expected.rows(part.first, part.first + part.out.shape[2]), part.out, part.lse)
        for one in (state, settled):
            add_partial(one, part)
        settle(settled)
    out, lse = finish(expected, torch.float32)
    for one in (state, settled):
        found = finish_deferred(one, torch.float32)
        torch.testing.assert_close(found, (out, lse), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("before", [1, 6, 7])
def test_heads_that_are_finished_before_others(before: int) -> None:
    """One head, then two, each after its own last partial; up to seven wait when there must be room for those."""
    q = torch.empty(2, 3, 70, 1)
    expected, state = empty_state(q, 24), empty_state(q, 24, Deferred())
    for index in range(before):
        part = partials()[index % 3]
        merge_partial(expected.rows(part.first, part.first + part.out.shape[2]), part.out, part.lse)
        add_partial(state, part)
    kernel, last = CudnnKernel(), partials()[1]
    merge_partial(expected.rows(30, 70), last.out, last.lse)
    kernel.open_heads(state, 1, torch.float32, 1)
    for first, end in ((0, 1), (1, 3)):
        heads = state.heads(first, end)
        add_partial(heads, Partial(30, last.out[:, first:end], last.lse[:, first:end]))
        if first == 0:
            kernel.finish_heads(heads)
    found, right = kernel.finish(state, torch.float32), finish(expected, torch.float32)
    torch.testing.assert_close(found, right, atol=2e-6, rtol=1e-6)


def test_a_state_that_does_not_defer_is_merged_at_once() -> None:
    q = torch.empty(2, 3, 70, 1)
    states = [empty_state(q, 24) for _ in range(2)]
    for part in partials():
        add_partial(states[0], part)
        merge_partial(states[1].rows(part.first, part.first + part.out.shape[2]), part.out, part.lse)
    for mine, theirs in zip(states[0][:3], states[1][:3], strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=1e-6)


def test_too_many_partials_at_once_are_refused() -> None:
    with pytest.raises(AssertionError, match="at most 5 partials, got 9"):
        merge_partials(empty_state(torch.empty(2, 3, 70, 1), 24), partials() * 3, load=True)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_parts_of_a_gradient_wait_and_are_added(count: int) -> None:
    torch.manual_seed(0)
    parts = [(first, head, torch.randn(2, 3 - head, 70 - first, 24)) for first, head in ((0, 0), (30, 1), (5, 2))] * 3
    deferring = Accumulator(torch.full((2, 3, 70, 24), torch.nan), sum_parts)
    at_once = Accumulator(torch.full((2, 3, 70, 24), torch.nan))
    for first, head, part in parts[:count]:
        deferring.add(first, part.half(), head=head)
        at_once.heads(head, 3).add(first, part.half())
    torch.testing.assert_close(deferring.finish(torch.float16), at_once.finish(torch.float16), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("programs", [1, 7, 18])
def test_few_programs_add_all_parts(monkeypatch: pytest.MonkeyPatch, programs: int, many: bool) -> None:
    """Beside something that computes they take blocks in turn: 18 of them here, of 3 in each of 6 heads."""
    monkeypatch.setattr(fused, "BESIDE_MANY" if many else "BESIDE_FEW", fused.PassShape(programs, 32, 4))
    torch.manual_seed(0)
    places = ((0, 0), (39, 1), (20, 0)) * (3 if many else 1)
    parts = [Part(row, head, torch.randn(2, 2, 31, 24).half()) for row, head in places]
    found, wanted = (torch.full((2, 3, 70, 24), torch.nan) for _ in range(2))
    sum_parts(found, parts, load=False, beside=True)
    sum_parts(wanted, parts, load=False)
    assert torch.equal(found, wanted) and wanted.abs().max() > 1


def test_a_borrowed_part_is_taken_in_before_its_memory_changes() -> None:
    total = Accumulator(torch.full((1, 1, 4, 16), torch.nan), sum_parts)
    kept, borrowed = torch.ones(1, 1, 4, 16), torch.ones(1, 1, 4, 16)
    total.add(0, kept)
    total.settle_borrowed()
    assert total.untouched, "nothing was borrowed, so it may wait"
    total.add(0, borrowed, borrowed=True)
    total.settle_borrowed()
    borrowed.fill_(99.0)
    assert torch.equal(total.settle(), torch.full((1, 1, 4, 16), 2.0))


@pytest.mark.parametrize("beside", [False, True])
def test_parts_in_an_order_of_their_own(monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    """Two of them, in blocks of 8 rows and of 20, the last of them not full; and some in rows, before and after."""
    monkeypatch.setattr(fused, "BESIDE_FEW", fused.PassShape(5, 32, 4))
    torch.manual_seed(0)
    wanted = torch.zeros(2, 3, 70, 16)
    parts = []
    for row, head, heads, rows, block in ((0, 0, 3, 70, 0), (11, 1, 2, 37, 8), (20, 0, 1, 50, 20), (3, 2, 1, 9, 0)):
        part, order = torch.randn(2, heads, rows, 16), None
        wanted[:, head : head + heads, row : row + rows] += part * (0.5 if block else 1.0)
        if block:
            blocks = torch.full((2, heads, -(-rows // block) * block, 16), torch.nan)
            blocks[:, :, :rows] = part
            places = torch.randperm(block * 16)
            memory = torch.empty_like(blocks).view(2, heads, -1, block * 16)
            memory[..., places] = blocks.view(memory.shape)
            part, order = memory.view(blocks.shape)[:, :, :rows], BlockOrder(places.int(), block, 0.5)
        parts.append(Part(row, head, part, order))
    found = torch.full(wanted.shape, torch.nan)
    sum_parts(found, parts, load=False, beside=beside)
    torch.testing.assert_close(found, wanted)
    sum_parts(found, parts, load=True, out=(twice := torch.full(wanted.shape, torch.nan).half()), beside=beside)
    torch.testing.assert_close(twice.float(), 2 * wanted, atol=1e-2, rtol=1e-3)
    in_torch.sum_parts(found, parts, load=False)
    torch.testing.assert_close(found, wanted)


class Grown:
    """A part that a kernel adds ones to."""

    def __init__(self, row: int, rows: int) -> None:
        self.row, self.sum = row, torch.zeros(1, 2, rows, 16)

    def part(self, head: int) -> Part:
        return Part(self.row, head, self.sum)


def test_a_part_grows_until_it_is_settled() -> None:
    total = Accumulator(torch.full((1, 4, 8, 16), torch.nan), sum_parts)
    some = total.heads(2, 4)
    for _ in range(3):
        some.growing("rows from 5", lambda: Grown(5, 3)).sum += 1.0
    total.add(0, torch.ones(1, 4, 8, 16))
    assert not total.fresh and not some.fresh
    wanted = torch.ones(1, 4, 8, 16)
    wanted[:, 2:, 5:] += 3.0
    assert torch.equal(total.settle(), wanted)
    some.growing("rows from 5", lambda: Grown(5, 3)).sum += 1.0
    wanted[:, 2:, 5:] += 1.0
    assert torch.equal(total.finish(torch.float16), wanted.half())


def test_statistics_for_a_kernel_in_blocks() -> None:
    lse, delta = (torch.randn(2, 70, 6).transpose(1, 2) for _ in range(2))
    lse[0, 1, 2] = -torch.inf
    *found, sums = padded_statistics(lse, delta, 80, 16)
    assert sums.shape == (2, 6, 80, 16) and sums.dtype == torch.float32 and not sums.any()
    lse[0, 1, 2] = torch.inf
    for padded, given, beyond in zip(found, (lse / math.log(2.0), delta), (torch.inf, 0.0), strict=True):
        torch.testing.assert_close(padded[:, :, :70], given)
        assert padded.shape == (2, 6, 80) and (padded[:, :, 70:] == beyond).all()


def test_passes_over_memory() -> None:
    torch.manual_seed(0)
    out, dout, dlse = torch.randn(2, 3, 70, 24), torch.randn(2, 70, 3, 24).transpose(1, 2).half(), torch.randn(2, 3, 70)
    dout[0, 0, 1] = 0.0
    dout[0, 1, 2] = 1e-7
    delta = (out * dout.float()).sum(-1)
    torch.testing.assert_close(fused_delta(out, dout, None), delta, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fused_delta(out, dout, dlse), delta - dlse, atol=1e-5, rtol=1e-5)
    row_sums = (stand_in_for_out(dout, delta).float() * dout.float()).sum(-1)
    delta[0, 0, 1] = 0.0
    torch.testing.assert_close(row_sums, delta, atol=2e-3, rtol=2e-3)
    copied = torch.full((2, 70, 3, 24), torch.nan, dtype=torch.float16).transpose(1, 2)
    copy_on_gpu(copied, dout)
    assert torch.equal(copied, dout)


@pytest.mark.parametrize("first", [0, 1, 24, 40])
def test_what_a_cut_leaves_of_a_triangle_is_a_rectangle_and_a_triangle(first: int) -> None:
    causal = make_piece(0, 64, 0, 64, 0, 64)
    assert causal is not None
    rest = causal.crop(first, 64, 0, 64)
    assert rest is not None
    parts = rectangle_and_triangle(rest)
    assert sum(part.pairs for part in parts) == rest.pairs
    assert all(part.is_full or (part.is_causal and part.q_count == part.k_count) for part in parts)
