"""Our kernels for Hopper against fp64 on single tiles: every kind of piece, state carried, gradients added."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from burst_attention import Layout, causal, documents
from burst_attention.geometry import Piece, full_piece
from burst_attention.merge import State, clear
from burst_attention.schedule.build import piece_table
from burst_attention.tiles import BackwardInputs
from burst_attention.tiles import block_table as block_tables

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")]

ZIGZAG = Layout.zigzag(3000, 3)
PIECES: dict[str, tuple[Piece, ...]] = {
    "full": (full_piece(0, 256, 0, 256),),
    "causal": (Piece(0, 300, 0, 300, 0, 300),),
    "window": (Piece(3, 250, 10, 240, -5, 40),),
    "two-pieces": (Piece(3, 150, 10, 140, -5, 40), full_piece(200, 56, 7, 131)),
    "few-keys": (full_piece(0, 300, 60, 3),),
    "documents": piece_table(causal() & documents([700, 1300, 1000]), ZIGZAG, ZIGZAG)[1][1],
}
ERROR = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


@dataclass
class Tile:
    """Random inputs, and what fp64 makes of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    allowed: Tensor
    scale: float

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """out, lse and the weights."""
        groups = self.q.shape[1] // self.k.shape[1]
        k, v = (x.double().repeat_interleave(groups, 1) for x in (self.k, self.v))
        scores = (self.q.double() @ k.transpose(-1, -2) * self.scale).masked_fill(~self.allowed, -math.inf)
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
        return weights @ v, lse, weights

    def backward(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """delta, dq, dk, dv."""
        out, _, weights = self.forward()
        groups = self.q.shape[1] // self.k.shape[1]
        k, v = (x.double().repeat_interleave(groups, 1) for x in (self.k, self.v))
        delta = (out * self.dout.double()).sum(-1)
        dscores = weights * (self.dout.double() @ v.transpose(-1, -2) - delta[..., None]) * self.scale
        dk, dv = dscores.transpose(-1, -2) @ self.q.double(), weights.transpose(-1, -2) @ self.dout.double()
        dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
        return delta, dscores @ k, dk, dv


def make_tile(name: str, dtype: torch.dtype, dim: int, value_dim: int, kv_heads: int, packed: bool) -> Tile:
    """Rows of all heads of a token lie together where `packed`, as in a visiting block."""
    torch.manual_seed(0)
    pieces = PIECES[name]
    rows = 1000 if name == "documents" else 300
    allowed = torch.zeros(rows, rows, dtype=torch.bool, device="cuda")
    for piece in pieces:
        x, y = torch.arange(piece.q_count, device="cuda")[:, None], torch.arange(piece.k_count, device="cuda")[None]
        inside = (x - y >= piece.low) & (x - y < piece.high)
        allowed[piece.q_first : piece.q_first + piece.q_count, piece.k_first : piece.k_first + piece.k_count] |= inside

    def random(heads: int, width: int) -> Tensor:
        if packed:
            return torch.randn(2, rows, heads, width, device="cuda", dtype=dtype).transpose(1, 2)
        return torch.randn(2, heads, rows, width, device="cuda", dtype=dtype)

    q, k, v, dout = random(4, dim), random(kv_heads, dim), random(kv_heads, value_dim), random(4, value_dim)
    return Tile(q, k, v, dout, allowed, dim**-0.5)


def relative(found: Tensor, wanted: Tensor) -> float:
    assert found.isfinite().all()
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-9))


def cleared(tile: Tile) -> State:
    rows = tile.q.shape[:3]
    state = State(*(torch.full(shape, torch.nan, device="cuda") for shape in ((*rows, tile.v.shape[3]), rows, rows)))
    clear(state)
    return state


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("dim", "value_dim"), [(128, 128), (64, 64), (64, 128), (128, 64)])
@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("name", PIECES)
def test_forward(name: str, dtype: torch.dtype, dim: int, value_dim: int, packed: bool) -> None:
    from burst_attention.tiles.hopper import launch_hopper_forward, serves_forward

    tile = make_tile(name, dtype, dim, value_dim, 2, packed)
    wanted, lse, _ = tile.forward()
    assert serves_forward(tile.q, tile.k, tile.v, tile.scale)
    state = cleared(tile)
    # The keys in two parts, so that the second continues what the first has left.
    for first, last in ((0, 90), (90, 1000)):
        parts = tuple(part for piece in PIECES[name] if (part := piece.crop(0, 1000, first, last)))
        if parts:
            launch_hopper_forward(parts, tile.q, tile.k, tile.v, state, tile.scale)
    some = state.total > 0
    assert torch.equal(some, lse.isfinite())
    assert relative(state.acc / torch.where(some, state.total, 1.0)[..., None], wanted) < ERROR[dtype]
    found = state.peak + state.total.log()
    assert (found.double() - lse)[some].abs().max() < 3e-6
    if name == "causal":
        out, whole_lse = torch.full_like(wanted, torch.nan, dtype=dtype), torch.full_like(found, torch.nan)
        pieces = PIECES[name]
        launch_hopper_forward(
            pieces, tile.q, tile.k, tile.v, cleared(tile), tile.scale, load=False, finished=(out, whole_lse)
        )
        assert relative(out, wanted) < ERROR[dtype]
        assert (whole_lse.double() - lse)[some].abs().max() < 3e-6


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("name", PIECES)
def test_backward(name: str, dtype: torch.dtype, kv_heads: int, packed: bool) -> None:
    from burst_attention.tiles.hopper import launch_hopper_backward, serves_backward

    tile = make_tile(name, dtype, 128, 128, kv_heads, packed)
    _, lse, _ = tile.forward()
    delta, *wanted = tile.backward()
    inputs = BackwardInputs(tile.dout, tile.q, tile.k, tile.v, lse.float(), delta.float(), None)
    assert serves_backward(inputs, tile.scale)
    found = tuple(torch.ones(x.shape, device="cuda") for x in (tile.q, tile.k, tile.v))
    launch_hopper_backward(PIECES[name], inputs, found, tile.scale)
    for gradient, right in zip(found, wanted, strict=True):
        assert relative(gradient - 1, right) < ERROR[dtype]


@pytest.mark.parametrize(("heads", "blocks"), [(1, 9), (2, 9), (4, 1), (8, 9)])
def test_heads_take_turns_in_any_number_of_launches(monkeypatch: pytest.MonkeyPatch, heads: int, blocks: int) -> None:
    """Of 8 heads: one by one, in groups, all at once; with a launch for each block."""
    from burst_attention.tiles.hopper import launch_hopper_backward, launch_hopper_forward

    tile = make_tile("documents", torch.bfloat16, 128, 128, 4, packed=False)
    wanted, lse, _ = tile.forward()
    delta, *gradients = tile.backward()
    inputs = BackwardInputs(tile.dout, tile.q, tile.k, tile.v, lse.float(), delta.float(), None)
    state, found = cleared(tile), tuple(torch.ones(x.shape, device="cuda") for x in (tile.q, tile.k, tile.v))
    monkeypatch.setattr(block_tables, "MOST_BLOCKS", blocks)
    block_tables.block_table.cache_clear()
    monkeypatch.setattr(block_tables, "UNEVEN", 2.0)
    rows, dim = tile.q.shape[2:]
    monkeypatch.setattr(block_tables, "_cache_bytes", lambda device: heads * rows * 2 * dim * 2)
    launch_hopper_forward(PIECES["documents"], tile.q, tile.k, tile.v, state, tile.scale)
    monkeypatch.setattr(block_tables, "_cache_bytes", lambda device: heads * rows * (2 * dim * 2 + dim * 4))
    launch_hopper_backward(PIECES["documents"], inputs, found, tile.scale)
    block_tables.block_table.cache_clear()
    assert (
        relative(state.acc / torch.where(state.total > 0, state.total, 1.0)[..., None], wanted) < ERROR[torch.bfloat16]
    )
    for gradient, right in zip(found, gradients, strict=True):
        assert relative(gradient - 1, right) < ERROR[torch.bfloat16]


def test_deterministic_algorithms_are_left_to_the_deterministic_kernel() -> None:
    from burst_attention.tiles.hopper import serves_backward

    tile = make_tile("full", torch.bfloat16, 128, 128, 2, False)
    rows = torch.zeros(tile.q.shape[:3], device="cuda")
    inputs = BackwardInputs(tile.dout, tile.q, tile.k, tile.v, rows, rows, None)
    torch.use_deterministic_algorithms(True)
    try:
        assert not serves_backward(inputs, tile.scale)
    finally:
        torch.use_deterministic_algorithms(False)
