"""FlashAttention-4's kernels on Hopper, without the passes that its package, and torch's operator, put around a call.

Shapes: B batch, H query heads, G key heads, S query rows, K key rows, D head dim.

Through torch's operator backward of a piece costs more than its products: one pass makes delta out of out and dout and
clears fp32 sums of dq, another casts them, and queries that visit need a stand-in for out first. A ring has delta
already. So the kernel is started by itself: from lse and delta, adding to sums of dq that pieces of the same queries
share. They lie in an order of the kernel's own, in which the pass that adds up all parts of dq at the end reads them.

Where query heads share a key head, the package's kernel adds up dk and dv by atomics and is up to a fifth slower. Here
the query heads of a group take the place of a batch over the same keys, and their dk and dv are parts to be added.

This starts what the package keeps to itself, so it is for the versions listed here (tests/gpu/test_flash4.py); any
other goes through torch's operator.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from burst_attention.geometry import Piece
from burst_attention.lanes import begins
from burst_attention.merge import MAX_PARTS, MAX_SHARES, SUMS_COUNT, BlockOrder, Part
from burst_attention.schedule import Bundle, PhasePlan, Round, Shapes
from burst_attention.tiles.fused import padded_statistics, sum_parts
from burst_attention.tiles.hopper import loadable
from burst_attention.tiles.policy import active_flash, capability_of
from burst_attention.tiles.protocol import BackwardInputs, Gradients
from burst_attention.tiles.start import start
from burst_attention.tiles.waiting import in_heads_of, rounds_before

KNOWN = ("4.0.0b9",)
HEAD_DIMS = (64, 128)
FEWEST_ROWS = 256
"""Of a piece: more than one block of the kernel either way, for which it is compiled."""
ARCHITECTURE = 90
LARGEST_BLOCK = {64: 128, 128: 80}
"""Query rows of the kernel's blocks by head dim, at most: sums and statistics are whole blocks."""


@functools.lru_cache(maxsize=1)
def installed_version() -> str:
    """Of flash-attn-4; nothing where there is none."""
    try:
        return importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_there(device: torch.device | None = None) -> bool:
    """Whether the kernels are there on a device, or on the current one.

    Where there is no GPU, as on a laptop that plans, they are planned for (`facts` in cuda.py).
    """
    capability = capability_of(device)
    return capability is None or (capability == (9, 0) and active_flash() == "FA4" and installed_version() in KNOWN)


def serves_dims(head_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device | None = None) -> bool:
    """Whether the kernels are there, and for these heads."""
    half = dtype in (torch.bfloat16, torch.float16)
    return is_there(device) and half and head_dim == value_dim and head_dim in HEAD_DIMS


def serves_forward(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether forward of a piece goes this way."""
    return serves_dims(q.shape[3], v.shape[3], q.dtype, q.device) and all(map(loadable, (q, k, v)))


def serves_backward(shapes: Shapes, device: torch.device | None = None) -> bool:
    """Whether backward of a call goes this way, where its pieces are large enough."""
    return (
        serves_dims(shapes.head_dim, shapes.value_dim, shapes.dtype, device)
        and not torch.are_deterministic_algorithms_enabled()
        # The heads of a group take the place of a batch: next to a batch they would need two strides.
        and (shapes.batch == 1 or shapes.heads == shapes.kv_heads)
    )


def serves(piece: Piece, x: BackwardInputs, scale: float) -> bool:
    """Whether backward of a piece, full or a square triangle, goes this way."""
    (batch, heads, _, dim), kv_heads, value_dim = x.q.shape, x.k.shape[1], x.v.shape[3]
    return (
        min(piece.q_count, piece.k_count) >= FEWEST_ROWS
        and scale > 0
        and serves_backward(Shapes(batch, heads, kv_heads, dim, value_dim, x.q.dtype), x.q.device)
        and all(map(loadable, (x.q, x.k, x.v, x.dout)))
    )


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of one piece: the kernel alone, where torch's operator also fills what only dropout would read."""
    from flash_attn.cute import interface

    rows = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = start(interface._flash_attn_fwd)(*rows, softmax_scale=scale, causal=causal, return_lse=True)
    return out.transpose(1, 2), lse


def workspace_bytes(phase: PhasePlan, step: Round, visiting: Bundle | None) -> int:
    """Sums of dq in fp32 with the statistics, and parts of dk and dv.

    Of queries at home sums stay, those of triangles too; and so do parts of home's own keys. Sums of queries that visit
    last a round. What is written where it is sent from needs no room.
    """
    shapes, size = phase.shapes, phase.shapes.dtype.itemsize
    row = shapes.batch * shapes.heads * shapes.head_dim
    placed = {field.name for field in visiting.fields if field.dtype == shapes.dtype} if visiting else set()
    statistics = 2 * shapes.batch * shapes.heads
    before = rounds_before(phase, step)
    if phase.direction == "query":
        before = tuple(other for other in before if not other.row_count)
        sums = sum(_rectangle_rows(phase, some) + _triangle_rows(phase, some) for some in (before, [step]))
        return sums * 4 * (row + statistics)
    rectangles = _rectangle_rows(phase, (*before, step))
    sums = rectangles + _triangle_rows(phase, (*before, step))
    in_place = len(placed & {"dk", "dv"}) if shapes.heads == shapes.kv_heads else 0
    parts = 2 * _home_key_rows(phase, before) + (2 - in_place) * sum(piece.k_count for piece in step.pieces)
    return (sums * 4 + parts * size) * row + 4 * statistics * (rectangles + _triangle_rows(phase, [step]))


def _rectangle_rows(phase: PhasePlan, rounds: Iterable[Round]) -> int:
    """Query rows of different rectangles."""
    ranges = {(p.q_first, p.q_count, other.heads) for other in rounds for p in other.pieces if p.is_full}
    return sum(in_heads_of(phase, heads, in_blocks(phase, count)) for _, count, heads in ranges)


def _triangle_rows(phase: PhasePlan, rounds: Iterable[Round]) -> int:
    """Query rows of triangles, each of which has its own sums; no more than may wait at once."""
    rounds = tuple(rounds)
    found = [
        in_heads_of(phase, other.heads, in_blocks(phase, p.q_count))
        for other in rounds
        for p in other.pieces
        if p.is_causal and p.q_count == p.k_count
    ]
    longest = max(found, default=0)
    shard = in_heads_of(phase, None, max((p.q_first + p.q_count for other in rounds for p in other.pieces), default=0))
    return min(sum(found), MAX_PARTS * longest, max(MAX_SHARES * shard // SUMS_COUNT, longest))


def in_blocks(phase: PhasePlan, rows: int) -> int:
    """Rows of as many of the kernel's blocks as some rows take."""
    block = LARGEST_BLOCK[phase.shapes.head_dim]
    return -(-rows // block) * block


def _home_key_rows(phase: PhasePlan, rounds: Iterable[Round]) -> int:
    """Rows of home's keys that its own queries were computed with."""
    at_home = (other for other in rounds if not other.row_count)
    return sum(in_heads_of(phase, other.heads, p.k_count) for other in at_home for p in other.pieces)


def add_gradients(piece: Piece, x: BackwardInputs, gradients: Gradients, scale: float) -> None:
    """Add a piece's part of the gradients."""
    queries = slice(piece.q_first, piece.q_first + piece.q_count)
    keys = slice(piece.k_first, piece.k_first + piece.k_count)
    causal, per_key = not piece.is_full, x.q.shape[1] // x.k.shape[1]
    for total in (gradients.dk, gradients.dv):
        if total is not None:
            total.make_room(per_key * piece.k_count)
    if causal and gradients.dq is not None and gradients.dq.waits:
        gradients.dq.make_room(SUMS_COUNT * piece.q_count)

    def new_sums() -> QuerySums:
        return QuerySums(piece, x.q[:, :, queries], x.lse[:, :, queries], x.delta[:, :, queries], per_key, scale)

    # Triangles have sums of their own. Rectangles come again with other keys, where queries stay at home.
    dq = gradients.dq
    # Home's own rectangles are of half of the heads, those of visiting keys of all.
    key = queries.start, queries.stop, x.q.shape[1]
    sums = dq.growing(key, new_sums) if dq is not None and dq.waits and not causal else new_sums()
    places = [
        total.place(keys.start, piece.k_count, x.k.dtype) if total is not None and per_key == 1 else None
        for total in (gradients.dk, gradients.dv)
    ]
    parts = sums.add(x.dout[:, :, queries], x.k[:, :, keys], x.v[:, :, keys], places)
    if dq is not None and not dq.waits:
        sum_parts(dq.settle(), [sums.part(0)], load=True)
    elif dq is not None and causal:
        dq.wait(sums.part(0))
    for total, place, of_heads in zip((gradients.dk, gradients.dv), places, parts, strict=True):
        for part in of_heads:
            if place is None and total is not None:
                total.add(keys.start, part)


class QuerySums:
    """fp32 sums of dq of some queries, in the kernel's own order, with the statistics that it reads."""

    def __init__(self, piece: Piece, q: Tensor, lse: Tensor, delta: Tensor, per_key: int, scale: float) -> None:
        self.row, self.q, self.per_key, self.scale = piece.q_first, q, per_key, scale
        self.causal = not piece.is_full
        self.config = _config(q.shape[3], self.causal)
        self.block = self.config.m_block_size
        rounded = -(-q.shape[2] // self.block) * self.block
        # Other lanes may add to sums once they are cleared: their turns come after what `begins` this one.
        self.lse, self.delta, self.sums = padded_statistics(lse, delta, rounded, q.shape[3])

    def add(
        self, dout: Tensor, k: Tensor, v: Tensor, places: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Add the part of some keys; returns dk and dv, each as parts (B, G, K, D) for query heads of a group.

        Where there is a place for all of dk, or of dv, it is written there.
        """
        q, dout = (_queries(x, self.per_key) for x in (self.q, dout))
        k, v = (_keys(x, self.per_key) for x in (k, v))
        lse, delta, sums = (_statistics(x, self.per_key) for x in (self.lse, self.delta, self.sums.flatten(2)))
        dk, dv = (
            torch.empty(x.shape, dtype=x.dtype, device=x.device) if place is None else place.transpose(1, 2)
            for x, place in zip((k, v), places, strict=True)
        )
        begins(self.q)
        start(_launch)(self.config, self.causal, q, k, v, dout, lse, delta, sums, dk, dv, self.scale)
        if self.per_key == 1:
            return [dk.transpose(1, 2)], [dv.transpose(1, 2)]
        return [part.transpose(0, 1).unsqueeze(0) for part in dk], [part.transpose(0, 1).unsqueeze(0) for part in dv]

    def part(self, head: int) -> Part:
        """What the sums are so far, of dq's heads from `head` on."""
        table = order_of_sums(self.config, self.causal, self.q.shape[3], self.q.device)
        order = BlockOrder(table, self.block, self.scale)
        return Part(self.row, head, self.sums[:, :, : self.q.shape[2]], order)


def _queries(x: Tensor, per_key: int) -> Tensor:
    """(B, H, S, D) as the kernel wants it, (B, S, H, D): the heads of a group, if there are some, for a batch."""
    return x.transpose(1, 2) if per_key == 1 else x[0].unflatten(0, (-1, per_key)).permute(1, 2, 0, 3)  # type: ignore[no-untyped-call]


def _keys(x: Tensor, per_key: int) -> Tensor:
    """(B, G, K, D) as (B, K, G, D), the same for all query heads of a group."""
    rows = x.transpose(1, 2)
    return rows if per_key == 1 else rows.expand(per_key, -1, -1, -1)


def _statistics(x: Tensor, per_key: int) -> Tensor:
    """(B, H, numbers): the heads of a group, if there are some, for a batch."""
    return x if per_key == 1 else x[0].unflatten(0, (-1, per_key)).transpose(0, 1)  # type: ignore[no-untyped-call]


def _config(head_dim: int, causal: bool) -> Any:
    """The package's own choice of blocks and warps."""
    from flash_attn.cute import interface

    return interface._tile_size_bwd_sm90(head_dim, head_dim, causal, False)


_orders: dict[tuple[Any, ...], Tensor] = {}
DIGIT = 256
"""bf16 has all whole numbers up to it."""


def order_of_sums(config: Any, causal: bool, dim: int, device: torch.device) -> Tensor:
    """Where the numbers of a block of sums are (`BlockOrder`), asked of the package's own pass over them, once."""
    key = causal, dim, device
    if key not in _orders:
        rows = config.m_block_size
        places = torch.arange(rows * dim, device=device)
        found = []
        for digit in (places % DIGIT, places // DIGIT):
            dq = torch.empty(1, rows, 1, dim, dtype=torch.bfloat16, device=device)
            start(_cast)(config, digit.float().view(1, 1, -1), dq, 1.0)
            # To the host and back: whatever stream reads the table later comes after that.
            found.append(dq.flatten().cpu().int())
        _orders[key] = (found[0] + DIGIT * found[1]).to(device)
    return _orders[key]


def _cast(config: Any, sums: Tensor, dq: Tensor, scale: float) -> None:
    """Sums of dq, scaled, in their places (B, S, H, D)."""
    from flash_attn.cute import interface

    threads = 128 if config.dQ_single_wg else 128 * config.num_wg
    interface._bwd_postprocess_convert(
        sums, dq, scale, None, None, ARCHITECTURE, _cute_dtype(dq.dtype), dq.shape[3], config.m_block_size, threads,
        config.AtomLayoutMdQ, config.dQ_swapAB,
    )  # fmt: skip


def _cute_dtype(dtype: torch.dtype) -> Any:
    from flash_attn.cute import interface

    return interface.torch2cute_dtype_map[dtype]


NOT_USED = (None,) * 11
"""Lengths of packed sequences, windows, semaphores of a fixed order, and masks in blocks."""
_compiled: dict[tuple[Any, ...], Callable[..., None]] = {}


def _launch(config: Any, causal: bool, *arguments: Any) -> None:
    """Start the kernel on q, k, v, dout, lse, delta, sums of dq, dk, dv and scale; compiled when first met."""
    q = arguments[0]
    # Which strides are 0 is part of the code.
    repeated = tuple(tuple(stride == 0 for stride in x.stride()) for x in arguments[:4])
    longest_first = causal and q.shape[1] * q.shape[3] * BYTES_OF_A_NUMBER < 2**31
    key = q.dtype, q.shape[3], causal, longest_first, repeated
    if key not in _compiled:
        with _longest_first() if longest_first else contextlib.nullcontext():
            _compiled[key] = _compile(config, causal, arguments)
    _compiled[key](*arguments, *NOT_USED)


BYTES_OF_A_NUMBER = 8
"""Of q, dout and the fp32 sum of dq together. To begin longest blocks first the package counts a head's in 32 bits; in
a triangle that large it makes no difference which are first."""


def _compile(config: Any, causal: bool, arguments: tuple[Any, ...]) -> Callable[..., None]:
    from cutlass import cute
    from flash_attn.cute.cute_dsl_utils import to_cute_tensor
    from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90

    q = arguments[0]
    kernel = FlashAttentionBackwardSm90(
        _cute_dtype(q.dtype),
        q.shape[3],
        is_causal=causal,
        tile_m=config.m_block_size,
        tile_n=config.n_block_size,
        Q_stage=config.num_stages_Q,
        dO_stage=config.num_stages_dO,
        PdS_stage=config.num_stages_PdS,
        SdP_swapAB=config.SdP_swapAB,
        dKV_swapAB=config.dKV_swapAB,
        dQ_swapAB=config.dQ_swapAB,
        AtomLayoutMSdP=config.AtomLayoutMSdP,
        AtomLayoutNdKV=config.AtomLayoutNdKV,
        AtomLayoutMdQ=config.AtomLayoutMdQ,
        num_threads=128 * (config.num_wg + 1),
        dQ_single_wg=config.dQ_single_wg,
    )
    *tensors, scale = arguments
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled: Callable[..., None] = cute.compile(
        kernel, *(to_cute_tensor(x) for x in tensors), scale, *NOT_USED, stream, options="--enable-tvm-ffi"
    )
    return compiled


@contextlib.contextmanager
def _longest_first() -> Iterator[None]:
    """Kernels compiled in here begin those blocks of a triangle first that take longest, of several heads together.

    The package does so where sums have a fixed order, and elsewhere goes head by head; why that is slower stands in
    `BlockTable.launches`, which orders our own kernels' blocks.
    """
    from flash_attn.cute import flash_bwd_sm90 as package

    before = package.SingleTileScheduler
    package.SingleTileScheduler = package.SingleTileLPTBwdScheduler
    try:
        yield
    finally:
        package.SingleTileScheduler = before
