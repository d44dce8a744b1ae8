"""Tiles cover a piece once, and kernels agree with the oracle on single pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burst_attention import causal, full, plan, window
from burst_attention.geometry import Piece, make_piece
from burst_attention.merge import Part, State, clear, finish, merge
from burst_attention.ops import require_served
from burst_attention.reference import reference_attention
from burst_attention.tiles import Accumulator, BackwardInputs, Gradients, TileKernel
from burst_attention.tiles.cpu_flash import CpuFlashKernel, stand_in_for_out
from burst_attention.tiles.pick import TileRequest, pick_kernel
from burst_attention.tiles.plain import PlainKernel
from burst_attention.tiles.split import CAUSAL, FULL, MASKED, allowed_block, rows_without_keys, split_piece
from tests.unit.gpu_kernels_in_torch import sum_parts

CPU = torch.device("cpu")
KERNELS = [CpuFlashKernel(), PlainKernel()]


def dense(piece: Piece, rows: int, cols: int) -> torch.Tensor:
    """The piece's pairs in a whole matrix, from its definition."""
    full = torch.zeros(rows, cols, dtype=torch.bool)
    for x in range(piece.q_count):
        for y in range(piece.k_count):
            full[piece.q_first + x, piece.k_first + y] = piece.low <= x - y < piece.high
    return full


pieces = st.builds(
    make_piece,
    st.integers(0, 5), st.integers(1, 40), st.integers(0, 5), st.integers(1, 40),
    st.integers(-45, 20), st.integers(-20, 45),
).filter(lambda piece: piece is not None)  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(piece=pieces, rows=st.integers(1, 20), cols=st.integers(1, 50), masked=st.integers(1, 12))
def test_tiles_cover_every_pair_once(piece: Piece, rows: int, cols: int, masked: int) -> None:
    covered = torch.zeros(50, 50, dtype=torch.int64)
    for tile in split_piece(piece, rows, cols, masked):
        block = {
            FULL: lambda t=tile: torch.ones(t.q1 - t.q0, t.k1 - t.k0, dtype=torch.bool),
            CAUSAL: lambda t=tile: torch.ones(t.q1 - t.q0, t.k1 - t.k0, dtype=torch.bool).tril(),
            MASKED: lambda t=tile: allowed_block(t, CPU),
        }[tile.kind]()
        if tile.kind == MASKED:
            assert tile.q1 - tile.q0 <= masked and tile.k1 - tile.k0 <= masked
            empty = rows_without_keys(tile, CPU)
            expected = ~block.any(-1)
            assert torch.equal(empty, expected) if empty is not None else not expected.any()
        covered[tile.queries, tile.keys] += block
    assert torch.equal(covered, dense(piece, 50, 50).long())


def test_causal_and_full_pieces_need_no_mask() -> None:
    causal = make_piece(0, 100, 0, 100, 0, 100)
    shifted = make_piece(0, 100, 0, 130, -30, 100)
    assert causal is not None and shifted is not None
    for piece in (causal, shifted):
        assert {tile.kind for tile in split_piece(piece, 32, 1000)} <= {FULL, CAUSAL}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(piece=pieces)
def test_kernels_agree_with_the_oracle(kernel: TileKernel, kv_heads: int, piece: Piece) -> None:
    torch.manual_seed(0)
    q, dout = torch.randn(2, 4, 50, 8), torch.randn(2, 4, 50, 8)
    k, v = torch.randn(2, kv_heads, 50, 8), torch.randn(2, kv_heads, 50, 8)
    allowed = dense(piece, 50, 50)
    state = State(torch.empty(2, 4, 50, 8), torch.empty(2, 4, 50), torch.empty(2, 4, 50))
    clear(state)
    kernel.forward([piece], q, k, v, state, 0.3)
    out, lse = finish(state, torch.float32)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = reference_attention(*inputs, allowed, 0.3)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=1e-6)
    delta = (out * dout).sum(-1)
    gradients = Gradients(*(Accumulator(torch.full_like(x, float("nan"))) for x in (q, k, v)))
    kernel.backward([piece], BackwardInputs(dout, q, k, v, lse, delta, None), gradients, 0.3)
    for got, want in zip(gradients, torch.autograd.grad(expected, inputs, dout.double()), strict=True):
        assert got is not None
        torch.testing.assert_close(got.settle().double(), want, atol=5e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_stand_in_for_out_keeps_row_sums_and_survives_zero_and_tiny_rows(dtype: torch.dtype) -> None:
    dout = torch.randn(1, 2, 5, 8).to(dtype)
    dout[0, 0, 1] = 0.0
    dout[0, 1, 2] *= 1e-30
    delta = torch.randn(1, 2, 5)
    delta[0, 0, 1] = 3.0
    delta[0, 1, 2] = 1e-30
    row_sums = (stand_in_for_out(dout, delta).double() * dout.double()).sum(-1)
    expected = delta.double().clone()
    expected[0, 0, 1] = 0.0
    torch.testing.assert_close(row_sums, expected, rtol=1e-6, atol=0.0)


def test_merging_states_without_keys_gives_no_nan() -> None:
    states = [State(torch.empty(1, 1, 2, 3), torch.empty(1, 1, 2), torch.empty(1, 1, 2)) for _ in range(2)]
    for state in states:
        clear(state)
    states[1].peak[0, 0, 0], states[1].total[0, 0, 0] = 2.0, 4.0
    states[1].acc[0, 0, 0] = 8.0
    merge(*states)
    out, lse = finish(states[0], torch.float32)
    assert out[0, 0].tolist() == [[2.0] * 3, [0.0] * 3]
    torch.testing.assert_close(lse[0, 0], torch.tensor([2.0 + torch.tensor(4.0).log().item(), float("-inf")]))


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (TileRequest("cpu", torch.float32, 64, 64), "flash"),
        (TileRequest("cpu", torch.bfloat16, 64, 64), "flash"),
        (TileRequest("cpu", torch.float16, 64, 64), "plain"),
        (TileRequest("cpu", torch.float64, 64, 64), "plain"),
        (TileRequest("cpu", torch.float32, 192, 128), "plain"),
        (TileRequest("cpu", torch.float32, 64, 64, returns_lse=True), "plain"),
        (TileRequest("cuda", torch.bfloat16, 128, 128), "cuda"),
        (TileRequest("cuda", torch.bfloat16, 128, 128, returns_lse=True), "triton"),
        (TileRequest("cuda", torch.float64, 128, 128), "plain"),
    ],
    ids=str,
)
def test_the_first_kernel_that_can_serve_is_picked(request_: TileRequest, expected: str) -> None:
    if expected in ("cuda", "triton"):
        pytest.importorskip("triton")
    assert pick_kernel("auto", request_).name == expected


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_a_vendor_kernel_by_name_serves_full_and_causal_masks_only(kernel: str) -> None:
    """Judged from the plan of all ranks, so that every rank refuses alike, before the first hop."""
    vendor = pytest.importorskip("burst_attention.tiles.vendor")
    tiles = {"cudnn": vendor.CudnnKernel, "flash": vendor.FlashKernel}[kernel]()
    for mask in (full(), causal()):
        require_served(tiles, plan(64, 4, heads=1, head_dim=8, mask=mask, layout="zigzag", requires_grad=""))
    message = rf"kernel '{kernel}' serves full and square causal pieces only, and mask window\(7\) in layout zigzag"
    with pytest.raises(ValueError, match=message):
        require_served(tiles, plan(64, 4, heads=1, head_dim=8, mask=window(7), layout="zigzag"))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (TileRequest("cuda", torch.float32, 64, 64), "it serves bfloat16 and float16"),
        (TileRequest("cuda", torch.bfloat16, 20, 20), "it serves head dims that 8 divides, got 20 and 20"),
        (TileRequest("cuda", torch.bfloat16, 64, 64, returns_lse=True), "takes no gradient on lse"),
        (TileRequest("cuda", torch.bfloat16, 512, 512), "head dims up to 256, got 512 and 512"),
        (TileRequest("cuda", torch.float64, 64, 64), "it serves float32, bfloat16 and float16"),
        (TileRequest("cuda", torch.bfloat16, 64, 32), "it needs equal head dims, got 64 for q, k and 32 for v"),
        (TileRequest("cuda", torch.bfloat16, 64, 64, scale=-0.1), "needs a positive scale, got -0.1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gpu_kernels_say_what_they_cannot_serve(
    request_: TileRequest, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burst_attention.tiles.pick.has_triton", lambda: True)
    with pytest.raises(ValueError, match=message):
        pick_kernel("flash", request_)


def test_without_triton_a_gpu_kernel_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burst_attention.tiles.pick.has_triton", lambda: False)
    request_ = TileRequest("cuda", torch.bfloat16, 64, 64)
    assert pick_kernel("auto", request_).name == "plain"
    with pytest.raises(ValueError, match="it needs triton, which cannot be imported here; install triton"):
        pick_kernel("triton", request_)


def test_without_triton_a_gpu_gets_the_plain_kernel_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from burst_attention.tiles import pick

    monkeypatch.setattr(pick, "has_triton", lambda: False)
    pick._warn_without_triton.cache_clear()
    with pytest.warns(UserWarning, match="install triton"):
        assert pick_kernel("auto", TileRequest("cuda", torch.bfloat16, 64, 64)).name == "plain"


def test_parts_that_wait_hold_at_most_five_times_the_gradient() -> None:
    """Twelve quarters may wait together, and five whole ones."""
    taken: list[int] = []

    def note(
        target: torch.Tensor, parts: list[Part], load: bool, out: torch.Tensor | None = None, beside: bool = False
    ) -> None:
        taken.append(len(parts))

    for rows, together in ((2, 12), (8, 5)):
        total = Accumulator(torch.empty(1, 2, 8, 4), note)
        for _ in range(2 * together):
            total.add(0, torch.empty(1, 2, rows, 4))
        total.settle()
        assert taken == [together, together]
        taken.clear()


def test_parts_written_in_place_are_zeros_elsewhere_and_nowhere_twice() -> None:
    total = Accumulator(torch.full((1, 2, 10, 4), torch.nan, dtype=torch.bfloat16), sum_parts)
    for first, last in ((2, 4), (6, 9)):
        place = total.place(first, last - first, torch.bfloat16)
        assert place is not None
        place.fill_(1.0)
    assert total.place(3, 2, torch.bfloat16) is None, "some of these rows are taken"
    assert total.place(0, 2, torch.float32) is None, "it would have to be rounded"
    assert total.heads(0, 1).place(0, 2, torch.bfloat16) is None, "only all heads together"
    assert not total.fresh
    total.add(3, torch.ones(1, 1, 2, 4), head=1)
    wanted = torch.zeros(1, 2, 10, 4)
    wanted[:, :, 2:4] = wanted[:, :, 6:9] = 1.0
    wanted[:, 1, 3:5] += 1.0
    assert torch.equal(total.settle().float(), wanted)
    assert total.place(0, 2, torch.bfloat16) is None, "there is something now"


def test_what_arrives_waits_without_counting_as_memory() -> None:
    total = Accumulator(torch.full((1, 1, 4, 4), torch.nan), sum_parts)
    for _ in range(8):
        total.add(0, torch.ones(1, 1, 4, 4), borrowed=True)
    assert total.untouched, "nothing was taken in: buffers hold what is borrowed"
    total.add(0, torch.ones(1, 1, 4, 4))
    total.settle_borrowed()
    assert torch.equal(total.tensor, torch.full((1, 1, 4, 4), 8.0)), "its own part may wait"
    assert torch.equal(total.settle(), torch.full((1, 1, 4, 4), 9.0))


def test_what_arrives_is_taken_in_beside_what_was_written_in_place() -> None:
    total = Accumulator(torch.full((1, 1, 4, 4), torch.nan), sum_parts)
    place = total.place(0, 3, torch.float32)
    assert place is not None
    place.fill_(1.0)
    total.add(2, torch.ones(1, 1, 2, 4), borrowed=True)
    total.settle_borrowed()
    assert torch.equal(total.tensor[0, 0, :, 0], torch.tensor([1.0, 1.0, 2.0, 1.0]))


class Grown:
    """What a kernel adds to, here 1 everywhere."""

    def __init__(self, heads: int) -> None:
        self.sums = torch.ones(1, heads, 2, 4)

    def part(self, head: int) -> Part:
        return Part(0, head, self.sums)


@pytest.mark.parametrize("settled", [False, True])
def test_some_heads_are_finished_before_others(settled: bool) -> None:
    """What comes for the others, and what grows for them, is not looked at until all is finished."""
    total = Accumulator(torch.full((1, 4, 2, 4), torch.nan), sum_parts, result_dtype=torch.bfloat16)
    total.heads(0, 2).add(0, torch.full((1, 2, 2, 4), 2.0))
    total.growing("all heads", lambda: Grown(4))
    if settled:
        total.settle()
    else:
        total.add(1, torch.full((1, 4, 1, 4), 4.0), borrowed=True)
    later = torch.full((1, 2, 2, 4), torch.nan)
    total.heads(2, 4).add(0, later)
    grown = total.growing("others", lambda: Grown(2), head=2)
    grown.sums.fill_(torch.nan)
    assert total.open_heads(2)
    total.finish_heads()
    grown.sums.fill_(1.0)
    later.fill_(8.0)
    wanted = torch.ones(1, 4, 2, 4)
    wanted[:, :2] += 2.0
    wanted[:, 2:] += 9.0
    if not settled:
        wanted[:, :, 1] += 4.0
    found = total.finish(torch.bfloat16)
    assert found.dtype == torch.bfloat16 and torch.equal(found.float(), wanted)


@pytest.mark.parametrize("begun", [False, True])
def test_heads_without_parts_are_finished_too(begun: bool) -> None:
    total = Accumulator(torch.full((1, 4, 2, 4), torch.nan), sum_parts, result_dtype=torch.bfloat16)
    if begun:
        total.add(0, torch.ones(1, 4, 2, 4))
        total.settle()
    assert total.open_heads(2)
    total.finish_heads()
    assert torch.equal(total.finish(torch.bfloat16), torch.full((1, 4, 2, 4), float(begun), dtype=torch.bfloat16))


def test_heads_are_not_finished_early_where_nothing_is_gained() -> None:
    """One that is no other dtype than what it is summed in, or whose parts do not wait, ends as a whole."""
    for total in (
        Accumulator(torch.zeros(1, 4, 2, 4), sum_parts, result_dtype=torch.float32),
        Accumulator(torch.zeros(1, 4, 2, 4), result_dtype=torch.bfloat16),
        Accumulator(torch.zeros(1, 4, 2, 4), sum_parts),
    ):
        assert not total.open_heads(2)
        total.add(0, torch.ones(1, 4, 2, 4))
        assert torch.equal(total.finish(torch.float32), torch.ones(1, 4, 2, 4))


def test_a_plan_counts_the_workspace_of_who_would_compute_on_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def planned(**options: str) -> int:
        made = plan(8 * 8192, 8, heads=2, head_dim=128, mask=causal(), layout="zigzag", device="cuda", **options)
        return max(map(made.peak_bytes, range(8)))

    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: False)
    vendors, ours = planned(), planned(kernel="triton")
    assert ours < 0.8 * vendors
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("burst_attention.tiles.cuda.has_async_add", lambda: True)
    monkeypatch.setattr("burst_attention.tiles.block_table._cores", lambda device: 132)
    monkeypatch.setattr("burst_attention.tiles.cuda.active_flash", lambda: "FA2")
    assert ours < planned() == planned(kernel="hopper"), "cuDNN's forward holds less than our backward"
    monkeypatch.setattr("burst_attention.tiles.cuda.active_flash", lambda: "FA4")
    monkeypatch.setattr("burst_attention.tiles.flash4.is_there", lambda device=None: True)
    assert planned() == vendors
