"""How other libraries spread an attention over ranks, short and on our tiles, to measure ours against.

Shapes: W ranks, B batch, H query heads, G key heads, S local tokens, D head dim.

Each is forward and backward of one call over torch.distributed's default group, which has as many tokens on every rank.
What is computed in a tile, and how partial results merge, is what `burst_attention` runs too: only what travels, and
when, differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from burst_attention.geometry import Piece
from burst_attention.layout import Layout
from burst_attention.mask import Mask
from burst_attention.merge import State, clear
from burst_attention.schedule.build import piece_table
from burst_attention.tiles import Accumulator, BackwardInputs, Gradients, TileKernel, TileRequest, pick_kernel

Pieces = tuple[Piece, ...]
OPERANDS, RESULTS = 1, 2
"""Tags: each has an order of its own between two ranks."""


class Arriving(NamedTuple):
    """What the rank before sends, while this one's own goes on."""

    tensor: Tensor
    works: tuple[dist.Work | None, ...]

    def wait(self) -> Tensor:
        for work in self.works:
            assert work is not None
            work.wait()
        return self.tensor


def pass_on(tensor: Tensor, tag: int) -> Arriving:
    """Begin to send a contiguous tensor to the next rank and to receive the like from the one before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    arriving = torch.empty_like(tensor)
    receive = dist.irecv(arriving, (rank - 1) % size, tag=tag)
    return Arriving(arriving, (receive, dist.isend(tensor, (rank + 1) % size, tag=tag)))


class Saved(NamedTuple):
    """What backward needs of forward; `delta` is rowsum(out * dout)."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    delta: Tensor


class Peer(ABC):
    """One attention over all ranks: `forward` once, then `backward` once."""

    def __init__(
        self, mask: Mask, layout: Layout, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if layout.ring_size != self.size or len({layout.local_tokens(rank) for rank in range(self.size)}) > 1:
            raise ValueError(f"{layout} does not give each of {self.size} ranks as many tokens")
        self.heads, self.kv_heads = heads, kv_heads
        self.scale = head_dim**-0.5
        self.kernel: TileKernel = pick_kernel("auto", TileRequest("cpu", dtype, head_dim, head_dim))
        self.pieces = self.pieces_of(mask, layout)

    def pieces_of(self, mask: Mask, layout: Layout) -> tuple[Pieces, ...]:
        """This rank's queries against the keys of every rank."""
        return piece_table(mask, layout, layout)[self.rank]

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, S, D): out of this rank's queries."""

    @abstractmethod
    def backward(self, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this rank's tokens."""

    def new_state(self, q: Tensor) -> State:
        peak, total = torch.empty((2, *q.shape[:3]))
        state = State(torch.empty_like(q, dtype=torch.float32), peak, total)
        clear(state)
        return state

    def attend(self, pieces: Pieces, q: Tensor, kv: Tensor, state: State) -> None:
        if pieces:
            self.kernel.forward(pieces, q, kv[0], kv[1], state, self.scale)

    def save(self, q: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Saved:
        return Saved(q, out, lse, dout, self.kernel.row_delta(out, dout, None, torch.float32))

    def gradients(self, pieces: Pieces, saved: Saved, kv: Tensor, dq: Accumulator) -> Tensor:
        """Add to dq, and give dk and dv of a block (2, B, G, rows, D), fp32."""
        dkv = torch.zeros_like(kv, dtype=torch.float32)
        if pieces:
            inputs = BackwardInputs(saved.dout, saved.q, kv[0], kv[1], saved.lse, saved.delta, saved.out)
            parts = (Accumulator(part, untouched=False) for part in dkv)
            self.kernel.backward(pieces, inputs, Gradients(dq, *parts), self.scale)
        return dkv


def new_gradient(x: Tensor) -> Accumulator:
    return Accumulator(torch.empty_like(x, dtype=torch.float32))


class KvRing(Peer):
    """Keys and values go round one ring of all ranks, whatever the mask needs of them, beside compute.

    In backward they go round again, and fp32 dk and dv, begun at home, follow a hop behind and make one hop more: W of
    them. So does ring-flash-attention (zigzag_ring_flash_attn.py).
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.q, self.kv = q, torch.stack((k, v))
        state, held = self.new_state(q), self.kv
        for step in range(self.size):
            arriving = pass_on(held, OPERANDS) if step + 1 < self.size else None
            self.attend(self.pieces[(self.rank - step) % self.size], q, held, state)
            held = arriving.wait() if arriving else held
        self.out, self.lse = self.kernel.finish(state, q.dtype)
        return self.out

    def backward(self, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        saved, dq, held = self.save(self.q, self.out, self.lse, dout), new_gradient(self.q), self.kv
        returning: Arriving | None = None
        for step in range(self.size):
            arriving = pass_on(held, OPERANDS) if step + 1 < self.size else None
            dkv = self.gradients(self.pieces[(self.rank - step) % self.size], saved, held, dq)
            if returning:
                dkv += returning.wait()
            held = arriving.wait() if arriving else held
            returning = pass_on(dkv, RESULTS)
        assert returning is not None
        dk, dv = returning.wait().to(dout.dtype)
        return dq.finish(dout.dtype), dk, dv


class AllGather(Peer):
    """Keys and values of all ranks are gathered while home's block is computed; dk and dv are summed round the ring.

    As torch's context_parallel does for SDPA: gathered again in backward, fp32 gradients passed on beside compute.
    torch begins them at home and makes W hops; here home's part stays and they make W - 1.
    """

    keeps = False
    """Whether the gathered keys and values are kept for backward: W times the memory."""
    wire_dtype = torch.float32

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.q, self.kv = q, torch.stack((k, v))
        state = self.new_state(q)
        whole, gathering = self.gather()
        self.attend(self.pieces[self.rank], q, self.kv, state)
        gathering.wait()
        for source in range(self.size):
            if source != self.rank:
                self.attend(self.pieces[source], q, whole[source], state)
        self.out, self.lse = self.kernel.finish(state, q.dtype)
        self.whole = whole if self.keeps else None
        return self.out

    def gather(self) -> tuple[list[Tensor], dist.Work]:
        whole = [torch.empty_like(self.kv) for _ in range(self.size)]
        gathering = dist.all_gather(whole, self.kv, async_op=True)
        assert gathering is not None
        return whole, gathering

    def backward(self, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        saved, dq = self.save(self.q, self.out, self.lse, dout), new_gradient(self.q)
        whole, gathering = (self.whole, None) if self.whole else self.gather()
        home = self.gradients(self.pieces[self.rank], saved, self.kv, dq)
        if gathering:
            gathering.wait()
        partial: Arriving | None = None
        for step in range(1, self.size):
            source = (self.rank - step) % self.size
            dkv = self.gradients(self.pieces[source], saved, whole[source], dq)
            if partial:
                dkv += partial.wait()
            partial = pass_on(dkv.to(self.wire_dtype), RESULTS)
        if partial:
            home += partial.wait()
        dk, dv = home.to(dout.dtype)
        return dq.finish(dout.dtype), dk, dv


class AllGatherKept(AllGather):
    """The same as torch's context parallelism does it for FlexAttention: gathered once, and gradients in bf16."""

    keeps = True
    wire_dtype = torch.bfloat16


class Ulysses(Peer):
    """Heads are exchanged for tokens: each rank attends over the whole sequence with H / W of the heads.

    One all-to-all brings q, k and v, one takes out back; backward mirrors it. Where there are fewer key heads than
    ranks, each goes to every rank that has queries for it, and home sums the gradients. The sequence must lie in order.
    """

    def pieces_of(self, mask: Mask, layout: Layout) -> tuple[Pieces, ...]:
        """The whole sequence against itself."""
        if layout.name != "contiguous":
            raise ValueError(f"Ulysses needs the sequence in order, got {layout}")
        if self.heads % self.size or (self.kv_heads % self.size and self.size % self.kv_heads):
            raise ValueError(f"{self.heads} and {self.kv_heads} heads cannot be dealt to {self.size} ranks")
        whole = Layout.contiguous(layout.tokens, 1)
        return piece_table(mask, whole, whole)[0]

    def heads_of(self, rank: int) -> tuple[slice, slice]:
        """The query heads and the key heads that a rank computes."""
        count, key_count = self.heads // self.size, max(self.kv_heads // self.size, 1)
        first = rank * self.kv_heads // self.size
        return slice(rank * count, (rank + 1) * count), slice(first, first + key_count)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for rank in range(self.size):
            heads, key_heads = self.heads_of(rank)
            parts.append(torch.cat((q[:, heads], k[:, key_heads], v[:, key_heads]), 1))
        whole = self.to_heads(torch.stack(parts))
        count = self.heads // self.size
        self.q, kv = whole[:, :count], whole[:, count:]
        self.kv = torch.stack(kv.chunk(2, 1))
        state = self.new_state(self.q)
        self.attend(self.pieces[0], self.q, self.kv, state)
        self.out, self.lse = self.kernel.finish(state, q.dtype)
        return join_heads(self.to_tokens(self.out))

    def backward(self, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mine = self.to_heads(torch.stack([dout[:, self.heads_of(rank)[0]] for rank in range(self.size)]))
        saved, dq = self.save(self.q, self.out, self.lse, mine), new_gradient(self.q)
        dk, dv = self.gradients(self.pieces[0], saved, self.kv, dq).to(dout.dtype)
        parts = self.to_tokens(torch.cat((dq.finish(dout.dtype), dk, dv), 1))
        count = self.heads // self.size
        batch, _, tokens, dim = dout.shape
        totals = torch.zeros((2, batch, self.kv_heads, tokens, dim))
        for rank in range(self.size):
            for total, part in zip(totals, parts[rank][:, count:].chunk(2, 1), strict=True):
                total[:, self.heads_of(rank)[1]] += part
        dk, dv = totals.to(dout.dtype)
        return join_heads(parts[:, :, :count]), dk, dv

    def to_heads(self, parts: Tensor) -> Tensor:
        """(W, B, heads, S, D), what each rank shall have, to (B, heads, W S, D), what all have for this one."""
        return exchange(parts).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def to_tokens(self, whole: Tensor) -> Tensor:
        """(B, heads, W S, D) to (W, B, heads, S, D): this rank's tokens with the heads of every rank."""
        return exchange(torch.stack(whole.chunk(self.size, 2)))


def exchange(parts: Tensor) -> Tensor:
    """Part r goes to rank r; part r of the result comes from it."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return received


def join_heads(parts: Tensor) -> Tensor:
    """(W, B, heads, S, D) to (B, W heads, S, D)."""
    return parts.transpose(0, 1).flatten(1, 2)


PEERS: dict[str, Callable[..., Peer]] = {
    "kv ring": KvRing,
    "all-gather": AllGather,
    "Ulysses": Ulysses,
    "all-gather kept": AllGatherKept,
}
