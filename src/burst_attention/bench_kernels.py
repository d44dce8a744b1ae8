"""The kernels' part of `burst bench gpu`: rates on single tiles and whole masks, beside others' in the same run.

Rates are algorithmic: 4 operations per pair, head and head dim in forward and 10 in backward, whatever is computed
twice inside. H = 32, D = 128, bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from burst_attention.api import burst_attention
from burst_attention.bench_tax import TaxCase, flash_name, made_inputs
from burst_attention.bench_timing import median_ms
from burst_attention.geometry import Piece, full_piece
from burst_attention.layout import Layout
from burst_attention.mask import Mask, causal, documents, window
from burst_attention.merge import State, clear
from burst_attention.ring.lone import LoneRing
from burst_attention.schedule.build import piece_table
from burst_attention.tiles import Accumulator, BackwardInputs, Gradients, TileKernel

TILES = ((8192, 8192, False), (8192, 8192, True), (8192, 4096, False), (4096, 2048, False))
SIZES = (512, 1024, 2048, 4096, 8192, 16384)
MASK_TOKENS = 16384
DOCUMENT_LENGTHS = (1700, 600, 3100, 900, 2400, 300, 4100, 3284)


def masks() -> dict[str, Mask]:
    """What our kernel is compared with FlexAttention on."""
    return {
        "causal": causal(),
        "causal window 1024": causal() & window(1024),
        "causal documents": causal() & documents(DOCUMENT_LENGTHS),
    }


def tile_rows(repeat: int) -> Iterator[dict[str, Any]]:
    """Every kernel on single tiles: as a ring asks for it, and from inputs to results as one device alone runs it.

    A ring's forward is into a carried state, which for vendors takes a merge; its backward is added to accumulators.
    """
    yield from _rows_of_kernels(_kernels_of_tiles(), repeat)
    yield from _flex_rows(repeat)


def flash_rows(repeat: int) -> Iterator[dict[str, Any]]:
    """What serves torch's flash operator now, on the same tiles."""
    from burst_attention.tiles.vendor import FlashKernel

    yield from _rows_of_kernels((FlashKernel(),), repeat)


def _kernels_of_tiles() -> tuple[TileKernel, ...]:
    """Ours and those of vendors."""
    from burst_attention.tiles.triton_kernel import TritonKernel
    from burst_attention.tiles.vendor import CudnnKernel, FlashKernel

    return TritonKernel(), CudnnKernel(), FlashKernel()


def _tiles() -> Iterator[tuple[dict[str, Any], Piece, tuple[Tensor, ...], float]]:
    """(what a row says of it, the piece, q, k, v and dout, its 10^9 operations in forward)."""
    for rows, cols, triangle in TILES:
        case = TaxCase(ranks=1, tokens_per_rank=rows, causal=triangle)
        q, _, _, dout = made_inputs(case, rows)
        _, k, v, _ = made_inputs(case, cols)
        piece = Piece(0, rows, 0, cols, 0, rows) if triangle else full_piece(0, rows, 0, cols)
        row = {"suite": "gpu-tiles", "flash": flash_name(), "rows": rows, "cols": cols, "causal": triangle}
        yield row, piece, (q, k, v, dout), 4 * piece.pairs * case.head_dim * case.heads / 1e9


def _rows_of_kernels(kernels: Sequence[TileKernel], repeat: int) -> Iterator[dict[str, Any]]:
    for row, piece, inputs, flops in _tiles():
        for kernel in kernels:
            forward, backward = _tile_calls(kernel, piece, *inputs)
            plain, plain_backward = _plain_calls(kernel, piece, *inputs)
            calls = {
                "forward": (forward, 1.0),
                "backward": (backward, 2.5),
                "plain_forward": (plain, 1.0),
                "plain_backward": (plain_backward, 2.5),
            }
            rates = {
                f"{name}_tflops": round(cost * flops / median_ms(call, repeat), 1)
                for name, (call, cost) in calls.items()
            }
            yield row | {"kernel": kernel.name, "repeat": repeat} | rates


def _flex_rows(repeat: int) -> Iterator[dict[str, Any]]:
    """FlexAttention knows no state and no accumulators."""
    for row, piece, inputs, flops in _tiles():
        forward, backward = _flex_calls("full" if piece.is_full else "causal", (piece,), *inputs)
        yield row | {
            "kernel": "flex", "repeat": repeat, "plain_forward_tflops": round(flops / median_ms(forward, repeat), 1),
            "plain_backward_tflops": round(2.5 * flops / median_ms(backward, repeat), 1),
        }  # fmt: skip


def size_rows(repeat: int) -> Iterator[dict[str, Any]]:
    """How rates hang on the size of a full square tile."""
    for size in SIZES:
        case = TaxCase(ranks=1, tokens_per_rank=size, causal=False)
        q, k, v, dout = made_inputs(case, size)
        flops = 4 * size * size * case.head_dim * case.heads / 1e9
        for kernel in _kernels_of_tiles():
            forward, backward = _tile_calls(kernel, full_piece(0, size, 0, size), q, k, v, dout)
            rates = flops / median_ms(forward, repeat), 2.5 * flops / median_ms(backward, repeat)
            yield {
                "suite": "gpu-sizes", "kernel": kernel.name, "flash": flash_name(), "size": size, "repeat": repeat,
                "forward_tflops": round(rates[0], 1), "backward_tflops": round(rates[1], 1),
            }  # fmt: skip


def mask_rows(repeat: int) -> Iterator[dict[str, Any]]:
    """Ours and FlexAttention on whole masks: from q, k and v to out, and from dout to gradients in the inputs' dtype.

    Ours is `burst_attention` on a ring of one, as a user calls it, with its passes over memory.
    """
    case = TaxCase(ranks=1, tokens_per_rank=MASK_TOKENS)
    q, k, v, dout = made_inputs(case, MASK_TOKENS)
    layout = Layout.contiguous(MASK_TOKENS, 1)
    for name, mask in masks().items():
        pieces = piece_table(mask, layout, layout)[0][0]
        flops = 4 * sum(piece.pairs for piece in pieces) * case.head_dim * case.heads / 1e9
        row = {"suite": "gpu-masks", "mask": name, "tokens": MASK_TOKENS, "repeat": repeat}
        calls = {
            "triton": _our_calls(mask, layout, q, k, v, dout),
            "flex": _flex_calls(name, pieces, q, k, v, dout),
        }
        _require_close(calls["triton"], calls["flex"])
        for kernel, (forward, backward) in calls.items():
            rates = flops / median_ms(forward, repeat), 2.5 * flops / median_ms(backward, repeat)
            yield row | {
                "kernel": kernel, "forward_tflops": round(rates[0], 1), "backward_tflops": round(rates[1], 1)
            }  # fmt: skip


def _plain_calls(
    kernel: TileKernel, piece: Piece, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """From q, k and v to out and lse, and from dout to gradients in the inputs' dtype, as one device alone runs it."""
    from burst_attention.tiles.triton_kernel import launch_fastest_forward
    from burst_attention.tiles.vendor import VendorKernel

    scale, out, lse = q.shape[3] ** -0.5, torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
    if isinstance(kernel, VendorKernel):
        out, lse = kernel.attend(q, k, v, not piece.is_full, scale)
        given = dout, q, k, v, out, lse.contiguous(), not piece.is_full, scale
        return partial(kernel.attend, q, k, v, not piece.is_full, scale), partial(kernel.gradients, *given)
    state = State(out, lse, lse)
    inputs = _backward_inputs(q, k, v, dout)

    def backward() -> list[Tensor]:
        totals = Gradients(*(Accumulator(torch.empty(x.shape, device=x.device)) for x in (q, k, v)))
        kernel.backward([piece], inputs, totals, scale)
        return [total.finish(q.dtype) for total in totals if total]

    return (
        lambda: launch_fastest_forward((piece,), q, k, v, state, scale, load=False, finished=(out, lse)),
        backward,
    )


def _tile_calls(
    kernel: TileKernel, pieces: Piece | tuple[Piece, ...], q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A forward into a state that is carried on, and a backward into accumulators that are added to."""
    listed = [pieces] if isinstance(pieces, Piece) else list(pieces)
    scale = q.shape[3] ** -0.5
    acc, peak, total = (torch.empty(shape, device="cuda") for shape in (q.shape, q.shape[:3], q.shape[:3]))
    state = State(acc, peak, total)
    clear(state)
    inputs = _backward_inputs(q, k, v, dout)
    totals = Gradients(*(Accumulator(torch.zeros(x.shape, device="cuda"), untouched=False) for x in (q, k, v)))
    return (
        lambda: kernel.forward(listed, q, k, v, state, scale),
        lambda: kernel.backward(listed, inputs, totals, scale),
    )


def _backward_inputs(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> BackwardInputs:
    """With row statistics of the size that they have for random inputs."""
    lse = torch.full(q.shape[:3], math.log(k.shape[2]) + 0.5, device="cuda")
    return BackwardInputs(dout, q, k, v, lse, torch.zeros_like(lse), None)


def _our_calls(
    mask: Mask, layout: Layout, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Our own kernels on one device."""
    ring = LoneRing(0, 1, lambda what, nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
    options: dict[str, Any] = {"ring": ring, "check": "off", "kernel": "triton", "mask": mask, "layout": layout}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = burst_attention(*leaves, **options)
    return (
        lambda: burst_attention(q, k, v, **options),
        lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
    )


def _require_close(ours: tuple[Callable[[], Any], ...], others: tuple[Callable[[], Any], ...]) -> None:
    """Compare results before their times are compared."""
    for mine, theirs in zip((ours[0](), *ours[1]()), (others[0](), *others[1]()), strict=True):
        difference = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
        if not difference < 0.02:
            raise RuntimeError(f"results of two kernels differ by {difference:.2%}: their times mean nothing")


def _flex_calls(
    name: str, pieces: tuple[Piece, ...], q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """torch's FlexAttention, compiled, with a block mask built beforehand, written as its users write it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    first, last = (edge.to(q.device) for edge in key_ranges(pieces, q.shape[2]))
    rules: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
        "causal": lambda b, h, i, j: j <= i,
        "causal window 1024": lambda b, h, i, j: (j <= i) & (i - j < 1024),
        "causal documents": lambda b, h, i, j: (j >= first[i]) & (j < last[i]),
    }
    block_mask = None
    if name != "full":
        block_mask = create_block_mask(rules[name], None, None, q.shape[2], k.shape[2], device="cuda")
    attend: Any = torch.compile(flex_attention, dynamic=False)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, block_mask=block_mask)
    return (
        lambda: attend(q, k, v, block_mask=block_mask),
        lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
    )


def key_ranges(pieces: tuple[Piece, ...], tokens: int) -> tuple[Tensor, Tensor]:
    """The keys [first, last) that each query sees, for masks that leave every query one range of them."""
    first, last = torch.full((tokens,), tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
    for piece in pieces:
        x = torch.arange(piece.q_count, dtype=torch.int32)
        low, high = (x - piece.high + 1).clamp(min=0), (x - piece.low + 1).clamp(max=piece.k_count)
        rows = slice(piece.q_first, piece.q_first + piece.q_count)
        first[rows] = torch.minimum(first[rows], piece.k_first + low)
        last[rows] = torch.maximum(last[rows], piece.k_first + high)
    return first, last
