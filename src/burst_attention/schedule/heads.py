"""Heads exchanged inside groups of ranks, a ring between the groups: another plan, made of rings' plans.

Neighbouring ranks form a group, as many as `heads=` says. Its **members** exchange heads for tokens, all to all:
before, each has all heads of its own tokens; after, some heads of all the group's tokens. Then the first members of all
groups form a ring with their heads, the second members another, and so on. Four ranks, groups of two, heads a and b:

    rank        0         1         2         3
    tokens      ab        ab        ab        ab         before: rank r holds shard r
    exchanged   a a       b b       a a       b b        ranks 0 and 1 hold shards 0 and 1 of one head each
    rings       0 <-----------------> 2,      1 <-----------------> 3

With one group it is what is known as Ulysses; with groups of one, a ring.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from burst_attention.kept import kept
from burst_attention.layout import Layout, chunk_edges
from burst_attention.mask import Mask
from burst_attention.schedule.build import build_plan
from burst_attention.schedule.bundles import KEY_SIDE, Bundle, Heads, Shapes, make_bundle
from burst_attention.schedule.plan import Plan

TO_HEADS, TO_TOKENS = "to heads", "to tokens"
EXCHANGED: dict[tuple[str, str], tuple[str, ...]] = {
    ("forward", TO_HEADS): ("q", "k", "v"),
    ("forward", TO_TOKENS): ("out", "lse"),
    ("backward", TO_HEADS): ("dout", "dlse"),
    ("backward", TO_TOKENS): ("dq", "dk", "dv"),
}


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each member of a group computes."""

    queries: tuple[Heads, ...]
    keys: tuple[tuple[int, ...], ...]
    """Key heads by member; several members may have one, and a member may have one several times."""

    @property
    def degree(self) -> int:
        return len(self.queries)

    @property
    def shares_keys(self) -> bool:
        """Whether gradients of a key head come from several places and must be summed."""
        everywhere = [head for heads in self.keys for head in heads]
        return len(everywhere) > len(set(everywhere))

    def shapes(self, shapes: Shapes, member: int) -> Shapes:
        first, last = self.queries[member]
        return replace(shapes, heads=last - first, kv_heads=len(self.keys[member]))

    def heads_of(self, name: str, member: int) -> list[int]:
        """The heads of a tensor that a member computes with."""
        return list(self.keys[member]) if name in KEY_SIDE else list(range(*self.queries[member]))


def split_heads(heads: int, kv_heads: int, degree: int) -> HeadSplit:
    """Key heads split where there are enough, their queries with them; else some members have the same key head.

    Where key heads divide neither way, queries are split alone, and a member whose queries share key heads unevenly has
    a key head for each query.
    """
    per_key = heads // kv_heads
    if kv_heads >= degree:
        edges = chunk_edges(0, kv_heads, degree)
        spans = [(edges[member], edges[member + 1]) for member in range(degree)]
        return HeadSplit(
            tuple((first * per_key, last * per_key) for first, last in spans),
            tuple(tuple(range(first, last)) for first, last in spans),
        )
    if heads < degree:
        raise ValueError(f"heads={degree} exchanges heads over {degree} ranks, and q has only {heads}")
    if degree % kv_heads == 0:
        members = degree // kv_heads
        cuts = chunk_edges(0, per_key, members)
        edges = [key * per_key + cut for key in range(kv_heads) for cut in cuts[:-1]] + [heads]
    else:
        edges = chunk_edges(0, heads, degree)
    queries = tuple((edges[member], edges[member + 1]) for member in range(degree))
    return HeadSplit(queries, tuple(_keys_of(range(*span), per_key) for span in queries))


def _keys_of(queries: range, per_key: int) -> tuple[int, ...]:
    keys = [query // per_key for query in queries]
    distinct = sorted(set(keys))
    return tuple(distinct if len({keys.count(key) for key in distinct}) == 1 else keys)


@dataclass(frozen=True)
class HeadsPlan:
    """What a call with `heads=` runs: an exchange in every group, a ring plan for each member, and an exchange back."""

    layout: Layout
    key_layout: Layout
    shapes: Shapes
    split: HeadSplit
    rings: tuple[Plan, ...]
    """By member: the plan of its ring over the groups."""
    needs: str
    wire_dtype: torch.dtype | None
    returns_lse: bool

    @property
    def mask(self) -> Mask:
        return self.rings[0].mask

    def place(self, rank: int) -> tuple[int, int]:
        """(group, member) of a rank."""
        if not 0 <= rank < self.layout.ring_size:
            raise ValueError(f"rank {rank} is outside a ring of {self.layout.ring_size}")
        return divmod(rank, self.split.degree)

    def members(self, group: int) -> range:
        """The ranks of a group."""
        return range(group * self.split.degree, (group + 1) * self.split.degree)

    def ring_members(self, member: int) -> range:
        """The ranks that form a ring after the exchange."""
        return range(member, self.layout.ring_size, self.split.degree)

    def layout_of(self, name: str) -> Layout:
        return self.key_layout if name in KEY_SIDE else self.layout

    def rows_in_group(self, name: str, rank: int) -> Tensor:
        """(local_tokens,) int64: where a rank's rows lie among its group's."""
        return _rows_in_group(self.layout_of(name), self.split.degree, rank)

    def bundles(self, phase: str, way: str, member: int) -> tuple[Bundle, Bundle]:
        """What one row of queries, and one of keys, is in a message with a member's heads.

        Gradients travel as they are returned, unless several members' are to be summed.
        """
        names = EXCHANGED[phase, way]
        if phase == "backward":
            names = tuple(n for n in names if (n == "dlse" and self.returns_lse) or n == "dout" or n[1:] in self.needs)
        shapes = self.split.shapes(self.shapes, member)
        summed = self.wire_dtype if self.split.shares_keys else self.shapes.dtype
        queries = make_bundle(tuple(n for n in names if n not in KEY_SIDE), shapes, self.shapes.dtype)
        return queries, make_bundle(tuple(n for n in names if n in KEY_SIDE), shapes, summed)

    def message_bytes(self, phase: str, way: str, tokens_of: int, heads_of: int) -> int:
        """Bytes of the message with the rows of one rank and the heads of another of its group."""
        queries, keys = self.bundles(phase, way, heads_of % self.split.degree)
        lengths = self.layout.local_tokens(tokens_of), self.key_layout.local_tokens(tokens_of)
        return queries.row_bytes * lengths[0] + keys.row_bytes * lengths[1]

    def exchanged_bytes(self, rank: int, phase: str) -> int:
        """Bytes that a rank sends to its group in a phase."""
        others = [peer for peer in self.members(self.place(rank)[0]) if peer != rank]
        to_heads = sum(self.message_bytes(phase, TO_HEADS, rank, peer) for peer in others)
        return to_heads + sum(self.message_bytes(phase, TO_TOKENS, peer, rank) for peer in others)

    def bytes_sent(self, rank: int, phase: str) -> int:
        """Bytes that `rank` hands to the transport in a phase, without the control channel."""
        group, member = self.place(rank)
        return self.exchanged_bytes(rank, phase) + self.rings[member].bytes_sent(group, phase)

    def bytes_between_hosts(self, phase: str, per_host: int) -> int:
        """Bytes that leave hosts of so many ranks each in a phase, those of the exchange among them."""
        hosts = [rank // per_host for rank in range(self.layout.ring_size)]
        total = 0
        for rank in range(self.layout.ring_size):
            group, member = self.place(rank)
            for peer in (peer for peer in self.members(group) if hosts[peer] != hosts[rank]):
                total += self.message_bytes(phase, TO_HEADS, rank, peer)
                total += self.message_bytes(phase, TO_TOKENS, peer, rank)
            ring, ranks = self.rings[member], self.ring_members(member)
            steps = ring.phase(phase).rounds[group]
            away = [t for step in steps for t in step.sends if hosts[ranks[t.target]] != hosts[rank]]
            total += ring.groups * sum(map(ring.phase(phase).nbytes, away))
        return total

    def flops(self, rank: int, phase: str) -> int:
        """Floating-point operations of the matrix products that `rank` computes in a phase."""
        group, member = self.place(rank)
        return self.rings[member].flops(group, phase)

    def direction(self, phase: str) -> str:
        """Which side moves between groups: "kv" or "query"."""
        return self.rings[0].direction(phase)

    @property
    def imbalance(self) -> float:
        """The busiest rank's work over the mean, less 1, in the worse phase."""
        found = []
        for phase in ("forward", "backward") if self.needs else ("forward",):
            work = [self.flops(rank, phase) for rank in range(self.layout.ring_size)]
            found.append(max(work) * len(work) / sum(work) - 1 if sum(work) else 0.0)
        return max(found)

    def peak_bytes(self, rank: int) -> int:
        """Most bytes that a call holds at once beyond the caller's q, k, v and dout.

        What was exchanged stays; beside it is an exchange, with its messages and what it gives, or the ring's own.
        """
        group, member = self.place(rank)
        ring = self.rings[member].peak_bytes(group)
        operands, results = (self._held(names, rank) for names in (("q", "k", "v"), ("out", "lse")))
        returned = self._returned(rank, "forward")
        stages = [
            self._messages(rank, "forward", TO_HEADS),
            ring,
            results + self._messages(rank, "forward", TO_TOKENS) + returned,
        ]
        if self.needs:
            gradients = self._held(tuple(f"d{name}" for name in self.needs), rank)
            back = self._messages(rank, "backward", TO_TOKENS) + self._returned(rank, "backward")
            # Of what forward kept, the ring counts out and lse of its heads itself.
            stages += [returned + self._held(("dout",), rank) + ring, returned + results + gradients + back]
        return operands + max(stages)

    def _held(self, names: tuple[str, ...], rank: int) -> int:
        """Bytes of tensors with a rank's heads of all the group's tokens."""
        group, member = self.place(rank)
        fields = make_bundle(names, self.split.shapes(self.shapes, member), self.shapes.dtype).fields
        layouts = (self.layout_of(field.name).grouped(self.split.degree) for field in fields)
        return sum(field.row_bytes * layout.local_tokens(group) for field, layout in zip(fields, layouts, strict=True))

    def _returned(self, rank: int, phase: str) -> int:
        """Bytes of what the exchange back gives: all heads of a rank's own tokens."""
        members = self.members(self.place(rank)[0])
        return sum(self.message_bytes(phase, TO_TOKENS, rank, peer) for peer in members)

    def _messages(self, rank: int, phase: str, way: str) -> int:
        """Bytes of a rank's messages, sent and received, in an exchange."""
        others = [peer for peer in self.members(self.place(rank)[0]) if peer != rank]
        return sum(self.message_bytes(phase, way, *pair) for peer in others for pair in ((rank, peer), (peer, rank)))

    def __str__(self) -> str:
        from burst_attention.schedule.describe import describe_heads

        return describe_heads(self)


@kept(64)
def build_heads_plan(
    mask: Mask,
    layout: Layout,
    key_layout: Layout,
    shapes: Shapes,
    sides: tuple[str, str],
    wire_dtype: torch.dtype | None,
    needs: str,
    ways: tuple[int, int, int],
    straight: bool,
    degree: int,
    returns_lse: bool,
) -> HeadsPlan:
    """The plan of a call with heads=degree; `sides` and `ways` are what `build_plan` takes for its rings."""
    split = split_heads(shapes.heads, shapes.kv_heads, degree)
    layouts = layout.grouped(degree), key_layout.grouped(degree)
    rings = tuple(
        build_plan(mask, *layouts, split.shapes(shapes, member), *sides, wire_dtype, needs, *ways, straight=straight)
        for member in range(degree)
    )
    return HeadsPlan(layout, key_layout, shapes, split, rings, needs, wire_dtype, returns_lse)


@kept(64)
def _rows_in_group(layout: Layout, degree: int, rank: int) -> Tensor:
    together = layout.grouped(degree).positions(rank // degree)
    ordered, order = together.sort()
    return order[torch.searchsorted(ordered, layout.positions(rank))]
