"""FlashAttention-4's backward kernel started by itself: the contract that each version in `KNOWN` has to keep.

From lse and delta of whole rows; sums of dq that several pieces share; query heads of a group as a batch over the same
keys; rows that lie apart; sizes that no block divides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import attention

from burst_attention.geometry import Piece, full_piece
from burst_attention.tiles import Accumulator, BackwardInputs, Gradients
from tests.single_tiles import ERROR, Tile, relative

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")]
MANY_ROWS = 4096
PIECES = {
    "rectangles": (full_piece(0, 300, 0, 260), full_piece(0, 300, 260, 277), full_piece(30, 270, 537, 263)),
    "triangle": (Piece(0, 333, 0, 333, 0, 333),),
}


@pytest.fixture(autouse=True)
def fa4(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whichever version is installed: that these tests pass with it is what lets it be listed."""
    from burst_attention.tiles import flash4

    monkeypatch.setattr(flash4, "KNOWN", (flash4.installed_version(),))
    try:
        attention.activate_flash_attention_impl("FA4")
    except ImportError as error:
        pytest.skip(f"FA4 is not installed: {str(error).splitlines()[0]}")
    yield
    attention.restore_flash_attention_impl()


def make_tile(name: str, dtype: torch.dtype, dim: int, kv_heads: int, batch: int, packed: bool) -> Tile:
    torch.manual_seed(0)
    rows, keys = (max(getattr(p, f"{x}_first") + getattr(p, f"{x}_count") for p in PIECES[name]) for x in "qk")
    allowed = torch.zeros(rows, keys, dtype=torch.bool, device="cuda")
    for p in PIECES[name]:
        x, y = torch.arange(p.q_count, device="cuda")[:, None], torch.arange(p.k_count, device="cuda")[None]
        inside = (x - y >= p.low) & (x - y < p.high)
        allowed[p.q_first : p.q_first + p.q_count, p.k_first : p.k_first + p.k_count] |= inside

    def random(heads: int, count: int) -> Tensor:
        if packed:
            # Next to another tensor's heads, as in a visiting block.
            return torch.randn(batch, count, 2 * heads, dim, device="cuda", dtype=dtype)[:, :, heads:].transpose(1, 2)
        return torch.randn(batch, heads, count, dim, device="cuda", dtype=dtype)

    return Tile(random(4, rows), random(kv_heads, keys), random(kv_heads, keys), random(4, rows), allowed, dim**-0.5)


def gradients_of(tile: Tile, pieces: tuple[Piece, ...], lse: Tensor, delta: Tensor) -> list[Tensor]:
    from burst_attention.tiles.vendor import FlashKernel

    kernel = FlashKernel()
    inputs = BackwardInputs(tile.dout, tile.q, tile.k, tile.v, lse.float(), delta.float(), None)
    inputs_alone = (tile.q, tile.k, tile.v)
    totals = [Accumulator(torch.full(x.shape, math.nan, device="cuda"), kernel.sum_parts) for x in inputs_alone]
    for piece in pieces:
        kernel.backward([piece], inputs, Gradients(*totals), tile.scale)
    return [total.finish(tile.q.dtype) for total in totals]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 4), (1, 2), (1, 1), (2, 4), (2, 2)])
@pytest.mark.parametrize(("dim", "dtype"), [(128, torch.bfloat16), (128, torch.float16), (64, torch.bfloat16)])
@pytest.mark.parametrize("name", PIECES)
def test_gradients(name: str, dim: int, dtype: torch.dtype, batch: int, kv_heads: int, packed: bool) -> None:
    from burst_attention.tiles import flash4

    tile = make_tile(name, dtype, dim, kv_heads, batch, packed)
    _, lse, _ = tile.forward()
    delta, *wanted = tile.backward()
    inputs = BackwardInputs(tile.dout, tile.q, tile.k, tile.v, lse.float(), delta.float(), None)
    by_itself = [flash4.serves(piece, inputs, tile.scale) for piece in PIECES[name]]
    assert all(by_itself) if batch == 1 or kv_heads == 4 else not any(by_itself)
    for gradient, right in zip(gradients_of(tile, PIECES[name], lse, delta), wanted, strict=True):
        assert relative(gradient, right) < 2 * ERROR[dtype]


@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 11, 11), (1, 12, 4), (3, 5, 5)])
def test_blocks_of_many_heads_in_turns(batch: int, heads: int, kv_heads: int) -> None:
    """A large triangle's longest blocks go first, of as many heads at once as fit the cache: 8, then those left."""
    torch.manual_seed(0)
    shapes = [(batch, count, MANY_ROWS, 128) for count in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    allowed = torch.ones(MANY_ROWS, MANY_ROWS, dtype=torch.bool, device="cuda").tril()
    wanted: list[list[Tensor]] = [[], [], []]
    found = [torch.empty(shape[:3], device="cuda") for shape in (q.shape, q.shape)]
    per_key = heads // kv_heads
    # The oracle takes a key head at a time: its weights would not fit otherwise.
    for one in range(batch):
        for head in range(kv_heads):
            here = slice(one, one + 1), slice(head * per_key, (head + 1) * per_key)
            keys = here[0], slice(head, head + 1)
            tile = Tile(q[here], k[keys], v[keys], dout[here], allowed, 0.1)
            found[0][here] = tile.forward()[1].float()
            delta, *gradients = tile.backward()
            found[1][here] = delta.float()
            for whole, part in zip(wanted, gradients, strict=True):
                whole.append(part.float())
    tile = Tile(q, k, v, dout, allowed, 0.1)
    for gradient, parts in zip(
        gradients_of(tile, (Piece(0, MANY_ROWS, 0, MANY_ROWS, 0, MANY_ROWS),), *found), wanted, strict=True
    ):
        assert relative(gradient, torch.cat(parts).view(gradient.shape).double()) < 2 * ERROR[torch.bfloat16]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("dim", "dtype"), [(128, torch.bfloat16), (128, torch.float16), (64, torch.bfloat16)])
def test_attention(dim: int, dtype: torch.dtype, kv_heads: int, packed: bool) -> None:
    from burst_attention.tiles import flash4

    tile = make_tile("triangle", dtype, dim, kv_heads, 2, packed)
    wanted, lse, _ = tile.forward()
    out, found = flash4.attend(tile.q, tile.k, tile.v, True, tile.scale)
    assert relative(out, wanted) < ERROR[dtype]
    assert (found.double() - lse).abs().max() < 1e-4


def test_home_and_visiting_keys_may_have_different_heads() -> None:
    """Home's own rectangle in two halves of the heads, another of all: as with a full mask whose keys move."""
    from burst_attention.tiles.vendor import FlashKernel

    tile = make_tile("rectangles", torch.bfloat16, 128, 4, 1, packed=False)
    tile.allowed[:, 520:] = False
    tile.allowed[:, :520] = True
    _, lse, _ = tile.forward()
    delta, *wanted = tile.backward()
    kernel = FlashKernel()
    total = Accumulator(torch.full(tile.q.shape, math.nan, device="cuda"), kernel.sum_parts)
    everything = BackwardInputs(tile.dout, tile.q, tile.k, tile.v, lse.float(), delta.float(), None)
    for first, last, piece in ((0, 2, 0), (0, 4, 260), (2, 4, 0)):
        part = BackwardInputs(*(None if x is None else x[:, first:last] for x in everything))  # type: ignore[arg-type]
        gradients = Gradients(total.heads(first, last) if last - first == 2 else total, None, None)
        kernel.backward([full_piece(0, 300, piece, 260)], part, gradients, tile.scale)
    assert relative(total.finish(torch.bfloat16), wanted[0]) < 2 * ERROR[torch.bfloat16]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", PIECES)
def test_gradients_are_written_where_they_are_sent_from(name: str, kv_heads: int) -> None:
    """Rows of a buffer that holds all of a token, in the dtype of the inputs."""
    from burst_attention.tiles.vendor import FlashKernel

    tile, kernel = make_tile(name, torch.bfloat16, 128, kv_heads, 1, packed=True), FlashKernel()
    _, lse, _ = tile.forward()
    delta, *wanted = tile.backward()
    inputs = BackwardInputs(tile.dout, tile.q, tile.k, tile.v, lse.float(), delta.float(), None)

    def packed(x: Tensor, other: int) -> Tensor:
        rows = torch.full((1, x.shape[2], x.shape[1] + other, 128), math.nan, device="cuda", dtype=torch.bfloat16)
        return rows[:, :, other:].transpose(1, 2)

    totals = [Accumulator(packed(x, other), kernel.sum_parts) for x, other in ((tile.q, 0), (tile.k, 0), (tile.v, 4))]
    for piece in PIECES[name][:2]:
        kernel.backward([piece], inputs, Gradients(*totals), tile.scale)
    kernel.backward(PIECES[name][2:], inputs, Gradients(*totals), tile.scale)
    for total, right in zip(totals, wanted, strict=True):
        assert relative(total.settle(), right) < 2 * ERROR[torch.bfloat16]


def test_another_version_goes_through_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    from burst_attention.tiles import flash4

    tile = make_tile("rectangles", torch.bfloat16, 128, 2, 1, packed=False)
    _, lse, _ = tile.forward()
    delta, *wanted = tile.backward()
    monkeypatch.setattr(flash4, "KNOWN", ())
    monkeypatch.setattr(flash4, "add_gradients", lambda *_: pytest.fail("this version is not known"))
    for gradient, right in zip(gradients_of(tile, PIECES["rectangles"], lse, delta), wanted, strict=True):
        assert relative(gradient, right) < 2 * ERROR[torch.bfloat16]
