"""Attention with heads exchanged inside groups of ranks (schedule/heads.py): one operator forward, one backward.

Shapes: B batch, H query heads, G key heads, S local query tokens, K local key tokens, D head dim, E value head dim; and
h, g, s, k the heads and tokens of this rank after the exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from burst_attention.agreement import shapes_of
from burst_attention.engine import RowBuffer
from burst_attention.layout import Layout
from burst_attention.operators import as_operator
from burst_attention.ops import attention, attention_gradients, prepare, refuse_double_backward, told_to_all
from burst_attention.options import parse_options
from burst_attention.ring import Parcel, PartOfRing, Ring, TraceEvent, ring_named
from burst_attention.schedule import HeadsPlan, Shapes, split_heads
from burst_attention.schedule.bundles import KEY_SIDE
from burst_attention.schedule.heads import TO_HEADS, TO_TOKENS

CHANNEL = 0
FORWARD, BACKWARD = "burst_attention::heads_forward", "burst_attention::heads_backward"
torch.library.define(
    FORWARD,
    "(Tensor q, Tensor k, Tensor v, str options, str ring) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    BACKWARD,
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, SymInt[] key_shape, str options,"
    " str ring, str needs) -> (Tensor, Tensor, Tensor)",
)
heads_forward_op = torch.ops.burst_attention.heads_forward.default
heads_backward_op = torch.ops.burst_attention.heads_backward.default
Tensors = dict[str, Tensor]
Give = Callable[[int, str], Tensor]
"""What a rank of the group gets of a tensor."""
Take = Callable[[int, str, Tensor], None]
"""What is done with what came from a rank of the group."""


def select(x: Tensor, dim: int, indices: list[int]) -> Tensor:
    """Some slices of a tensor; a view where they follow each other."""
    first, count = indices[0], len(indices)
    if indices == list(range(first, first + count)):
        return x.narrow(dim, first, count)
    return x.index_select(dim, torch.tensor(indices, device=x.device))


class HeadExchange:
    """One rank's messages to and from its group, and the tensors that they are made of and put into."""

    def __init__(self, plan: HeadsPlan, ring: Ring, phase: str) -> None:
        self.plan, self.ring, self.phase = plan, ring, phase
        self.group, self.member = plan.place(ring.rank)
        self.others = [rank for rank in plan.members(self.group) if rank != ring.rank]

    def to_heads(self, tensors: Tensors) -> Tensors:
        """(B, all heads, own tokens, ...) become (B, own heads, the group's tokens, ...)."""
        found = {}
        for name, x in tensors.items():
            tokens = self.plan.layout_of(name).grouped(self.plan.split.degree).local_tokens(self.group)
            found[name] = x.new_empty((x.shape[0], len(self._heads(name, self.ring.rank)), tokens, *x.shape[3:]))

        def give(peer: int, name: str) -> Tensor:
            return select(tensors[name], 1, self._heads(name, peer))

        def take(peer: int, name: str, x: Tensor) -> None:
            found[name].index_copy_(2, self._rows(name, peer, x.device), x)

        self._exchange(TO_HEADS, tuple(tensors), give, take)
        return found

    def to_tokens(self, tensors: Tensors) -> Tensors:
        """(B, own heads, the group's tokens, ...) become (B, all heads, own tokens, ...); what meets is summed."""
        shapes, found = self.plan.shapes, {}
        summed = KEY_SIDE if self.plan.split.shares_keys else ()
        for name, x in tensors.items():
            heads = shapes.kv_heads if name in KEY_SIDE else shapes.heads
            size = x.shape[0], heads, self.plan.layout_of(name).local_tokens(self.ring.rank), *x.shape[3:]
            found[name] = x.new_zeros(size) if name in summed else x.new_empty(size)

        def give(peer: int, name: str) -> Tensor:
            return tensors[name].index_select(2, self._rows(name, peer, tensors[name].device))

        def take(peer: int, name: str, x: Tensor) -> None:
            heads = torch.tensor(self._heads(name, peer), device=x.device)
            if name in summed:
                found[name].index_add_(1, heads, x.to(found[name].dtype))
            else:
                found[name].index_copy_(1, heads, x)

        self._exchange(TO_TOKENS, tuple(tensors), give, take)
        return found

    def _heads(self, name: str, rank: int) -> list[int]:
        return self.plan.split.heads_of(name, self.plan.place(rank)[1])

    def _rows(self, name: str, rank: int, device: torch.device) -> Tensor:
        return self.plan.rows_in_group(name, rank).to(device)

    def _exchange(self, way: str, names: tuple[str, ...], give: Give, take: Take) -> None:
        """Send every other member its part and take theirs; sums are in the order of ranks, so that they repeat."""
        where, started, mine = f"{self.phase} exchange of heads", time.perf_counter(), self.ring.rank
        device = give(mine, names[0]).device
        outgoing, incoming = [], {}
        for peer in self.others:
            ends = (mine, peer) if way == TO_HEADS else (peer, mine)
            memory, views = self._message(way, ends[0], ends[1], device)
            for name, view in views.items():
                view.copy_(give(peer, name))
            outgoing.append(Parcel(peer, CHANNEL, memory, f"heads of rank {mine}"))
            incoming[peer] = self._message(way, ends[1], ends[0], device)
        receives = [Parcel(peer, CHANNEL, memory, f"heads of rank {peer}") for peer, (memory, _) in incoming.items()]
        packed = time.perf_counter()
        pending = self.ring.post(outgoing, receives, where)
        self.ring.wait(pending)
        if self.ring.trace is not None:
            waited = packed, time.perf_counter() - packed
            moved = (self.ring.time_of(pending),)
            self.ring.trace.append(TraceEvent(where, 0, (), started, packed - started, *waited, moved))
        for peer in self.plan.members(self.group):
            for name in names:
                take(peer, name, give(mine, name) if peer == mine else incoming[peer][1][name])

    def _message(self, way: str, tokens_of: int, heads_of: int, device: torch.device) -> tuple[Tensor, Tensors]:
        """Memory for the rows of one rank with the heads of another, and the tensors in it."""
        plan = self.plan
        memory = torch.empty(plan.message_bytes(self.phase, way, tokens_of, heads_of), dtype=torch.uint8, device=device)
        bundles = plan.bundles(self.phase, way, plan.place(heads_of)[1])
        rows = plan.layout.local_tokens(tokens_of), plan.key_layout.local_tokens(tokens_of)
        edge = rows[0] * bundles[0].row_bytes
        parts = zip(bundles, rows, (memory[:edge], memory[edge:]), strict=True)
        return memory, {
            name: view
            for bundle, count, part in parts
            for name, view in RowBuffer(bundle, part).fields(0, count).items()
        }


@torch.library.impl(FORWARD, "default")
def _forward_impl(q: Tensor, k: Tensor, v: Tensor, options: str, ring: str) -> tuple[Tensor, ...]:
    """(out, lse) of this rank's queries, then q, k, v, out and lse as they are after the exchange, for backward."""
    with as_operator(q):
        return run_forward(q, k, v, options, ring_named(ring))


@torch.library.impl(BACKWARD, "default")
def _backward_impl(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key_shape: list[int],
    options: str,
    ring: str,
    needs: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this rank's tokens; an empty tensor for each letter of "qkv" that is not in `needs`.

    q, k, v, out and lse are as after the exchange; `key_shape` is the shape of k before it.
    """
    with as_operator(dout):
        return run_backward(dout, dlse, (q, k, v, out, lse), key_shape, options, ring_named(ring), needs)


def run_forward(q: Tensor, k: Tensor, v: Tensor, text: str, ring: Ring) -> tuple[Tensor, ...]:
    """Agree, exchange, run the member's ring, and exchange back."""
    options, plan, kernel = prepare("forward", shapes_of(q, k, v), q.device, (q.shape[2], k.shape[2]), text, ring)
    assert isinstance(plan, HeadsPlan)
    with told_to_all(ring, "forward"):
        exchange = HeadExchange(plan, ring, "forward")
        mine = exchange.to_heads({"q": q, "k": k, "v": v})
        q, k, v = mine["q"], mine["k"], mine["v"]
        out, lse = attention(q, k, v, options.scale, plan.rings[exchange.member], kernel, _part(exchange))
        whole = exchange.to_tokens({"out": out, "lse": lse})
        return whole["out"], whole["lse"], q, k, v, out, lse


def run_backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, ...],
    key_shape: list[int],
    text: str,
    ring: Ring,
    needs: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for gradients, from what forward had exchanged."""
    batch, heads, tokens, value_dim = dout.shape
    shapes = Shapes(batch, heads, key_shape[1], key_shape[3], value_dim, dout.dtype)
    options, plan, kernel = prepare("backward", shapes, dout.device, (tokens, key_shape[2]), text, ring, needs)
    assert isinstance(plan, HeadsPlan)
    accumulate = plan.shapes.accumulate_dtype
    with told_to_all(ring, "backward"):
        exchange = HeadExchange(plan, ring, "backward")
        given = {"dout": dout}
        if options.returns_lse:
            # Not every rank's loss may depend on lse, and all exchange alike.
            given["dlse"] = dout.new_zeros(dout.shape[:3], dtype=accumulate) if dlse is None else dlse
        mine = exchange.to_heads(given)
        key_dtype = accumulate if plan.split.shares_keys else None
        found = attention_gradients(
            mine["dout"], mine.get("dlse"), saved, options.scale, plan.rings[exchange.member], kernel,
            _part(exchange), key_dtype,
        )  # fmt: skip
        mine.clear()
        gradients = {f"d{name}": x for name, x in zip("qkv", found, strict=True) if name in needs}
        home = exchange.to_tokens(gradients) if gradients else {}
        dq, dk, dv = (home[f"d{name}"].to(dout.dtype) if name in needs else dout.new_empty(0) for name in "qkv")
        return dq, dk, dv


def _part(exchange: HeadExchange) -> PartOfRing:
    return PartOfRing(exchange.ring, exchange.plan.ring_members(exchange.member))


@torch.library.register_fake(FORWARD)
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, options: str, ring: str) -> tuple[Tensor, ...]:
    given, _ = parse_options(options)
    place = ring_named(ring)
    group, member = divmod(place.rank, given.head_degree)
    split = split_heads(q.shape[1], k.shape[1], given.head_degree)
    heads, key_heads = (len(split.heads_of(name, member)) for name in "qk")
    tokens, key_tokens = (
        # A layout's name alone does not tell what other ranks hold.
        Layout.parse(text).grouped(given.head_degree).local_tokens(group)
        if "(" in text
        else torch.library.get_ctx().new_dynamic_size()
        for text in (given.layout, given.key_layout or given.layout)
    )
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, dim, value_dim = q.shape[0], q.shape[3], v.shape[3]
    return (
        q.new_empty((*q.shape[:3], value_dim)),
        q.new_empty(q.shape[:3], dtype=accumulate),
        q.new_empty((batch, heads, tokens, dim)),
        q.new_empty((batch, key_heads, key_tokens, dim)),
        q.new_empty((batch, key_heads, key_tokens, value_dim)),
        q.new_empty((batch, heads, tokens, value_dim)),
        q.new_empty((batch, heads, tokens), dtype=accumulate),
    )


@torch.library.register_fake(BACKWARD)
def _backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key_shape: list[int],
    options: str,
    ring: str,
    needs: str,
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = {"q": (*dout.shape[:3], key_shape[3]), "k": tuple(key_shape), "v": (*key_shape[:3], dout.shape[3])}
    dq, dk, dv = (dout.new_empty(shapes[name] if name in needs else (0,)) for name in "qkv")
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.key_shape, (ctx.options, ctx.ring_name) = list(inputs[1].shape), inputs[3:]
    # The ring must outlive the graph: backward moves blocks over it.
    ctx.ring = ring_named(ctx.ring_name)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[2:])


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    needs = "".join(name for name, wanted in zip("qkv", ctx.needs_input_grad, strict=False) if wanted)
    if dout is None:
        assert dlse is not None
        dout = saved[0].new_zeros((*dlse.shape, saved[2].shape[3]))
    gradients = heads_backward_op(dout, dlse, *saved, ctx.key_shape, ctx.options, ctx.ring_name, needs)
    return *(x if name in needs else None for name, x in zip("qkv", gradients, strict=True)), None, None


torch.library.register_autograd(FORWARD, _backward, setup_context=_save)
torch.library.register_autograd(BACKWARD, refuse_double_backward)
