"""Single tiles of every kind and what fp64 makes of them, for kernels on a GPU, or as on one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from burst_attention import Layout, causal, documents
from burst_attention.geometry import Piece, full_piece
from burst_attention.merge import Deferred, State, clear
from burst_attention.schedule.build import piece_table
from burst_attention.tiles import BackwardInputs
from burst_attention.tiles.hopper import launch_hopper_backward, launch_hopper_forward

ZIGZAG = Layout.zigzag(3000, 3)
PIECES: dict[str, tuple[Piece, ...]] = {
    "full": (full_piece(0, 256, 0, 256),),
    "causal": (Piece(0, 300, 0, 300, 0, 300),),
    "window": (Piece(3, 250, 10, 240, -5, 40),),
    "two-pieces": (Piece(3, 150, 10, 140, -5, 40), full_piece(200, 56, 7, 131)),
    "few-keys": (full_piece(0, 300, 60, 3),),
    "long": (Piece(0, 540, 0, 540, 0, 540),),
    "far-apart": (full_piece(7, 60, 0, 150), full_piece(400, 100, 60, 90)),
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
        dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))  # type: ignore[no-untyped-call]
        return delta, dscores @ k, dk, dv


def make_tile(
    name: str,
    dtype: torch.dtype,
    dim: int,
    value_dim: int,
    kv_heads: int,
    packed: bool,
    device: str = "cuda",
    batch: int = 2,
) -> Tile:
    """Rows of all heads of a token lie together where `packed`, as in a visiting block."""
    torch.manual_seed(0)
    rows = {"documents": 1000, "long": 540, "far-apart": 540}.get(name, 300)
    allowed = torch.zeros(rows, rows, dtype=torch.bool, device=device)
    for piece in PIECES[name]:
        x, y = torch.arange(piece.q_count, device=device)[:, None], torch.arange(piece.k_count, device=device)[None]
        inside = (x - y >= piece.low) & (x - y < piece.high)
        allowed[piece.q_first : piece.q_first + piece.q_count, piece.k_first : piece.k_first + piece.k_count] |= inside

    def random(heads: int, width: int) -> Tensor:
        if packed:
            return torch.randn(batch, rows, heads, width, device=device, dtype=dtype).transpose(1, 2)
        return torch.randn(batch, heads, rows, width, device=device, dtype=dtype)

    q, k, v, dout = random(4, dim), random(kv_heads, dim), random(kv_heads, value_dim), random(4, value_dim)
    return Tile(q, k, v, dout, allowed, dim**-0.5)


def relative(found: Tensor, wanted: Tensor) -> float:
    assert found.isfinite().all()
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-9))


def cleared(tile: Tile) -> State:
    rows = tile.q.shape[:3]
    shapes = (*rows, tile.v.shape[3]), rows, rows
    state = State(*(torch.full(shape, torch.nan, device=tile.q.device) for shape in shapes))
    clear(state)
    return state


def check_forward(tile: Tile, pieces: tuple[Piece, ...], split: int | None = 90) -> None:
    """The keys in two parts, so that the second continues what the first has left."""
    wanted, lse, _ = tile.forward()
    state = cleared(tile)
    for first, last in ((0, split), (split, 1000)) if split else ((0, 1000),):
        parts = tuple(part for piece in pieces if (part := piece.crop(0, 1000, first, last)))
        if parts:
            launch_hopper_forward(parts, tile.q, tile.k, tile.v, state, tile.scale)
    some = state.total > 0
    assert torch.equal(some, lse.isfinite())
    assert relative(state.acc / torch.where(some, state.total, 1.0)[..., None], wanted) < ERROR[tile.q.dtype]
    assert ((state.peak + state.total.log()).double() - lse)[some].abs().max() < 3e-6


def check_begun_and_ended(tile: Tile, pieces: tuple[Piece, ...]) -> None:
    """A state that the kernel begins and ends itself, every row being in a piece."""
    wanted, lse, _ = tile.forward()
    out = torch.full_like(wanted, torch.nan, dtype=tile.q.dtype)
    found = torch.full_like(lse, torch.nan, dtype=torch.float32)
    launch_hopper_forward(pieces, tile.q, tile.k, tile.v, cleared(tile), tile.scale, load=False, finished=(out, found))
    assert relative(out, wanted) < ERROR[tile.q.dtype]
    assert (found.double() - lse).abs().max() < 3e-6


def check_partial(tile: Tile, pieces: tuple[Piece, ...]) -> None:
    """What a round leaves to wait: nothing for rows without keys, also where no block of the kernel has them."""
    from burst_attention.tiles.hopper_kernel import HopperKernel

    wanted, lse, _ = tile.forward()
    waiting = Deferred(side_by_side=True)
    state = cleared(tile)._replace(deferred=waiting)
    HopperKernel().forward(pieces, tile.q, tile.k, tile.v, state, tile.scale)
    (partial,) = waiting.partials
    rows = slice(partial.first, partial.first + partial.out.shape[2])
    some = lse[:, :, rows].isfinite()
    assert some.sum() == lse.isfinite().sum() and torch.equal(some, partial.lse.isfinite())
    assert relative(partial.out, wanted[:, :, rows]) < ERROR[tile.q.dtype]
    assert (partial.lse.double() - lse[:, :, rows])[some].abs().max() < 3e-6


def backward_inputs(tile: Tile) -> BackwardInputs:
    _, lse, _ = tile.forward()
    return BackwardInputs(tile.dout, tile.q, tile.k, tile.v, lse.float(), tile.backward()[0].float(), None)


def check_backward(tile: Tile, pieces: tuple[Piece, ...], parts: int = 1) -> None:
    """Gradients added to what is there; of dk and dv, where they are several, to each of their parts."""
    k, v = (x.repeat_interleave(parts, 1) for x in (tile.k, tile.v))
    _, *wanted = replace(tile, k=k, v=v).backward()
    found = tuple(torch.ones(x.shape, device=x.device) for x in (tile.q, k, v))
    launch_hopper_backward(pieces, backward_inputs(tile), found, tile.scale)
    for gradient, right in zip(found, wanted, strict=True):
        assert relative(gradient - 1, right) < ERROR[tile.q.dtype]


def check_parts_as_they_wait(tile: Tile, pieces: tuple[Piece, ...], parts: int) -> None:
    """Parts of dk and dv written in the dtype of the inputs, and one that adds them up."""
    _, *wanted = tile.backward()
    dq = torch.zeros(tile.q.shape, device=tile.q.device)
    dk, dv = (torch.zeros_like(x.repeat_interleave(parts, 1)) for x in (tile.k, tile.v))
    launch_hopper_backward(pieces, backward_inputs(tile), (dq, dk, dv), tile.scale, add=False)
    whole = (dq, *(x.float().unflatten(1, (-1, parts)).sum(2) for x in (dk, dv)))  # type: ignore[no-untyped-call]
    for found, right in zip(whole, wanted, strict=True):
        assert relative(found, right) < 2 * ERROR[tile.q.dtype]
