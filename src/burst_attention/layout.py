"""Layouts: which global positions each rank holds, as a few runs (start, stride, count).

Eight tokens on two ranks, each cell naming the rank that holds it:

    contiguous  0 0 0 0 1 1 1 1      what torch.chunk gives
    zigzag      0 0 1 1 1 1 0 0      rank r holds chunks r and 2W - 1 - r: equal causal work
    striped     0 1 0 1 0 1 0 1      every W-th token
    balanced    chosen for a mask, so that work per rank is near equal

Any length works: shards may differ by a token, or be empty.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from burst_attention.geometry import Band, Piece, Run, cut
from burst_attention.mask import Mask, mask_from_node, parse_expression
from burst_attention.mask import documents as mask_of_documents

LAYOUT_NAMES = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class Layout:
    """Where each of `tokens` positions, counted from `start`, lives in a ring of `ring_size` ranks."""

    name: str
    tokens: int
    ring_size: int
    start: int = 0
    mask: Mask | None = None
    per_group: int = 1
    """More than 1 where `ring_size` counts groups of so many neighbouring ranks, whose shards are taken together."""
    part_of: tuple[int, int] | None = None
    """(tokens, start) of the layout that these are some consecutive positions of, each where it is there."""

    def __post_init__(self) -> None:
        if self.name not in (*LAYOUT_NAMES, "balanced"):
            raise ValueError(f"there is no layout {self.name!r}; use {', '.join(LAYOUT_NAMES)} or balanced")
        if (self.name == "balanced") != (self.mask is not None):
            raise ValueError(f"layout {self.name!r} with mask {self.mask}: a balanced layout, and no other, has a mask")
        for field, value, least in (
            ("tokens", self.tokens, 0),
            ("ring_size", self.ring_size, 1),
            ("start", self.start, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Layout {field} must be a whole number of at least {least}, got {value!r}")

    @classmethod
    def contiguous(cls, tokens: int, ring_size: int, start: int = 0) -> Layout:
        """One run per rank, as `torch.chunk` cuts: ceil(tokens / ring_size) each, the last ones shorter or empty."""
        return cls("contiguous", tokens, ring_size, start)

    @classmethod
    def zigzag(cls, tokens: int, ring_size: int, start: int = 0) -> Layout:
        """Chunks r and 2W - 1 - r on rank r, of 2W chunks whose lengths differ by at most one token."""
        return cls("zigzag", tokens, ring_size, start)

    @classmethod
    def striped(cls, tokens: int, ring_size: int, start: int = 0) -> Layout:
        """Tokens r, r + W, r + 2W, ... on rank r."""
        return cls("striped", tokens, ring_size, start)

    @classmethod
    def balanced(cls, tokens: int, ring_size: int, mask: Mask, start: int = 0) -> Layout:
        """Near-equal work on every rank for this mask, and shards that differ by few tokens."""
        if not isinstance(mask, Mask):
            raise ValueError(
                f"Layout.balanced needs a Mask to balance for, got {mask!r}; for full attention use full()"
            )
        mask.require_cover(start + tokens, start + tokens)
        return cls("balanced", tokens, ring_size, start, mask)

    @classmethod
    def best(cls, tokens: int, ring_size: int, mask: Mask | None = None) -> Layout:
        """Recommend a layout: the simplest whose work is within 2% of the most even one."""
        mask = mask or Mask("full")
        candidates = [cls(name, tokens, ring_size) for name in LAYOUT_NAMES]
        candidates.append(cls.balanced(tokens, ring_size, mask))
        uneven = [work_imbalance(layout, mask) for layout in candidates]
        return next(layout for layout, value in zip(candidates, uneven, strict=True) if value <= min(uneven) + 0.02)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a layout back from its text, "zigzag(1000, 4)" or "zigzag(1000, 4)[500:1000]". Nothing is evaluated."""
        try:
            node = parse_expression(text)
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
                first, end = (ast.literal_eval(edge) for edge in (node.slice.lower, node.slice.upper) if edge)
                return cls.parse(ast.unparse(node.value)).between(first, end)
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.keywords:
                raise ValueError("it is not of the form name(tokens, ring_size, start)")
            name, args = node.func.id, list(node.args)
            if name == "balanced":
                if len(args) != 4:
                    raise ValueError("balanced takes tokens, ring_size, start and a mask")
                mask = mask_from_node(args.pop())
                tokens, ring_size, start = (ast.literal_eval(arg) for arg in args)
                return cls.balanced(tokens, ring_size, mask, start)
            return cls(name, *(ast.literal_eval(arg) for arg in args))
        except (SyntaxError, ValueError, TypeError) as error:
            raise ValueError(f"cannot read layout {text!r}: {error}") from None

    def __str__(self) -> str:
        tokens, first = self.part_of or (self.tokens, self.start)
        start = f", {first}" if first or self.mask else ""
        mask, groups = f", {self.mask}" if self.mask else "", f" by {self.per_group}" if self.per_group > 1 else ""
        part = f"[{self.start}:{self.end}]" if self.part_of else ""
        return f"{self.name}({tokens}, {self.ring_size * self.per_group}{start}{mask}){part}{groups}"

    def grouped(self, per_group: int) -> Layout:
        """The same positions with so many neighbouring ranks taken together: each group holds all that they hold."""
        if per_group < 1 or self.ring_size % per_group:
            raise ValueError(f"{self} cannot be taken {per_group} ranks together; they must divide {self.ring_size}")
        return replace(self, ring_size=self.ring_size // per_group, per_group=self.per_group * per_group)

    def between(self, first: int, end: int) -> Layout:
        """Positions `first` to `end` alone, on the ranks that hold them; a shard has those of its rows, in order."""
        if not self.start <= first <= end <= self.end:
            raise ValueError(f"{self} holds positions {self.start} to {self.end}, not {first} to {end}")
        return replace(self, tokens=end - first, start=first, part_of=self.part_of or (self.tokens, self.start))

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.tokens

    def runs(self, rank: int) -> tuple[Run, ...]:
        """The positions of a rank as runs, in the order its shard holds them."""
        self._require_rank(rank)
        return _all_runs(self)[rank]

    @property
    def stride(self) -> int:
        """How far apart neighbours in a shard are: the ring's size where shards are stripes, else 1."""
        return _stride(self)

    def runs_by_remainder(self, stride: int, rank: int) -> tuple[Run, ...]:
        """The positions of a rank as runs of one stride, each run of consecutive tokens split by remainder."""
        return tuple(part for run in self.runs(rank) for part in run.by_remainder(stride))

    def order_by_remainder(self, stride: int, rank: int) -> Tensor | None:
        """(local_tokens,) int64: the shard's rows in the order of `runs_by_remainder`; None where it is the same."""
        if self.stride == stride or not self.runs(rank):
            return None
        parts, first = [], 0
        for run in self.runs(rank):
            parts += [torch.arange(first + at, first + run.length, stride) for at in range(min(stride, run.length))]
            first += run.length
        return torch.cat(parts)

    def local_tokens(self, rank: int) -> int:
        """How many tokens a rank holds."""
        return sum(run.length for run in self.runs(rank))

    def positions(self, rank: int) -> Tensor:
        """(local_tokens,) int64: the global position of each token of a rank's shard."""
        parts = [torch.arange(run.length) * run.stride + run.start for run in self.runs(rank)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def shard(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """A rank's part of a whole tensor along `dim`; a view where one slice gives it."""
        self._require_length(x, dim)
        slices = []
        for run in self.runs(rank):
            index = [slice(None)] * x.dim()
            first = run.start - self.start
            index[dim] = slice(first, first + run.stride * (run.length - 1) + 1, run.stride)
            slices.append(x[tuple(index)])
        if not slices:
            return x.narrow(dim, 0, 0)
        return slices[0] if len(slices) == 1 else torch.cat(slices, dim)

    def unshard(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """The whole tensor from every rank's shard, in rank order."""
        if len(shards) != self.ring_size:
            raise ValueError(f"unshard needs {self.ring_size} shards, one per rank, got {len(shards)}")
        for rank, shard in enumerate(shards):
            if shard.size(dim) != self.local_tokens(rank):
                raise ValueError(
                    f"shard of rank {rank} has {shard.size(dim)} tokens along dim {dim}, "
                    f"{self} gives it {self.local_tokens(rank)}"
                )
        joined = torch.cat(list(shards), dim)
        order = torch.cat([self.positions(rank) for rank in range(self.ring_size)]) - self.start
        return joined.index_select(dim, torch.argsort(order).to(joined.device))

    def labels(
        self, input_ids: Tensor, rank: int, documents: Sequence[int] | None = None, ignore_index: int = -100
    ) -> Tensor:
        """The next token of each of a rank's tokens, from the whole (..., tokens) input.

        Shifted globally and then sharded, so labels are exact at shard edges; the last token of the sequence, and of
        each document when `documents` gives their lengths, gets `ignore_index`.
        """
        dim = input_ids.dim() - 1
        self._require_length(input_ids, dim)
        shifted = torch.full_like(input_ids, ignore_index)
        shifted[..., :-1] = input_ids[..., 1:]
        if documents is not None:
            lengths = torch.tensor(mask_of_documents(documents).args[0] if len(documents) else (), dtype=torch.int64)
            if int(lengths.sum()) != self.tokens:
                raise ValueError(f"documents sum to {int(lengths.sum())} tokens, the layout holds {self.tokens}")
            shifted[..., (lengths.cumsum(0) - 1).to(shifted.device)] = ignore_index
        return self.shard(shifted, rank, dim)

    def _require_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ring_size:
            raise ValueError(f"rank {rank} is outside a ring of {self.ring_size}")

    def _require_length(self, x: Tensor, dim: int) -> None:
        if x.size(dim) != self.tokens:
            raise ValueError(f"dim {dim} has {x.size(dim)} tokens, {self} holds {self.tokens}; give the whole tensor")


@lru_cache(maxsize=256)
def _stride(layout: Layout) -> int:
    return max((run.stride for runs in _all_runs(layout) for run in runs), default=1)


@lru_cache(maxsize=256)
def _all_runs(layout: Layout) -> tuple[tuple[Run, ...], ...]:
    tokens, ring_size, start = layout.tokens, layout.ring_size, layout.start
    if layout.part_of:
        tokens, first = layout.part_of
        whole = _all_runs(replace(layout, tokens=tokens, start=first, part_of=None))
        return tuple(tuple(part for run in runs if (part := run.between(start, layout.end)).length) for runs in whole)
    if layout.per_group > 1:
        return _grouped_runs(replace(layout, ring_size=ring_size * layout.per_group, per_group=1), layout.per_group)
    if layout.name == "contiguous":
        size = -(-tokens // ring_size)
        runs = [[(start + rank * size, 1, min(size, tokens - rank * size))] for rank in range(ring_size)]
    elif layout.name == "zigzag":
        edges = chunk_edges(start, tokens, 2 * ring_size)
        chunks = [(first, 1, last - first) for first, last in pairwise(edges)]
        runs = [[chunks[rank], chunks[2 * ring_size - 1 - rank]] for rank in range(ring_size)]
    elif layout.name == "striped":
        runs = [[(start + rank, ring_size, -((rank - tokens) // ring_size))] for rank in range(ring_size)]
    else:
        assert layout.mask is not None
        return _balanced_runs(layout, layout.mask)
    return tuple(tuple(Run(*run) for run in rank_runs if run[2] > 0) for rank_runs in runs)


def _grouped_runs(layout: Layout, per_group: int) -> tuple[tuple[Run, ...], ...]:
    """Each group's runs by where they begin; those of consecutive tokens are joined."""
    if per_group == layout.ring_size:
        return ((Run(layout.start, 1, layout.tokens),) if layout.tokens else (),)
    found = []
    for first in range(0, layout.ring_size, per_group):
        runs = sorted(run for rank in range(first, first + per_group) for run in layout.runs(rank))
        found.append(tuple(runs) if layout.stride > 1 else _join_runs(runs))
    return tuple(found)


def chunk_edges(start: int, tokens: int, chunks: int) -> list[int]:
    """Edges of near-equal consecutive chunks: lengths differ by at most one."""
    size, longer = divmod(tokens, chunks)
    return [start + index * size + min(index, longer) for index in range(chunks + 1)]


def work_imbalance(layout: Layout, mask: Mask) -> float:
    """The busiest rank's pairs over the mean, less 1: the worse of counting by queries and counting by keys."""
    by_rank = [
        [sum(pair) for pair in zip(*(_run_work(mask, layout, run) for run in layout.runs(rank)), strict=True)] or [0, 0]
        for rank in range(layout.ring_size)
    ]
    total = sum(work[0] for work in by_rank)
    return max(max(side) for side in zip(*by_rank, strict=True)) * layout.ring_size / total - 1 if total else 0.0


def _run_work(mask: Mask, layout: Layout, run: Run) -> tuple[int, int]:
    """Allowed pairs of a run's tokens as queries, and as keys."""
    whole = Run(layout.start, 1, layout.tokens).by_remainder(run.stride)
    as_queries = sum(piece.pairs for band in mask.bands for part in whole if (piece := _cut_between(band, run, part)))
    as_keys = sum(piece.pairs for band in mask.bands for part in whole if (piece := _cut_between(band, part, run)))
    return as_queries, as_keys


def _cut_between(band: Band, q_run: Run, k_run: Run) -> Piece | None:
    if band.i0 > q_run.last or band.i1 <= q_run.start or band.j0 > k_run.last or band.j1 <= k_run.start:
        return None
    return cut(band, q_run, 0, k_run, 0)


def _balanced_runs(layout: Layout, mask: Mask) -> tuple[tuple[Run, ...], ...]:
    """Deal chunks to ranks, equally many each, finer until no rank has over 1% more than the mean."""
    best: tuple[float, list[list[Run]]] | None = None
    for per_rank in (1, 2, 4, 8, 16):
        chunks = per_rank * layout.ring_size
        if best is not None and chunks > layout.tokens:
            break
        edges = chunk_edges(layout.start, layout.tokens, chunks)
        runs = [Run(first, 1, last - first) for first, last in pairwise(edges)]
        work = [_run_work(mask, layout, run) if run.length else (0, 0) for run in runs]
        dealt = _deal(work, layout.ring_size)
        mean = sum(rows for rows, _ in work) / layout.ring_size
        uneven = max(sum(work[chunk][side] for chunk in hand) for hand in dealt for side in (0, 1)) / (mean or 1) - 1
        if best is None or uneven < best[0] - 1e-3:
            best = uneven, [[runs[chunk] for chunk in sorted(hand)] for hand in dealt]
        if best[0] <= 0.01:
            break
    assert best is not None
    # A few keys that every query sees weigh more than any chunk; stripes spread them.
    striped = Layout.striped(layout.tokens, layout.ring_size, layout.start)
    if best[0] > 0.02 and work_imbalance(striped, mask) < best[0]:
        return _all_runs(striped)
    return tuple(_join_runs(runs) for runs in best[1])


def _deal(work: list[tuple[int, int]], ranks: int) -> list[list[int]]:
    """Give each rank equally many chunks with near-equal work: heaviest first in a snake, then swaps that help."""
    order = sorted(range(len(work)), key=lambda chunk: (-sum(work[chunk]), chunk))
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for place, chunk in enumerate(order):
        turn, seat = divmod(place, ranks)
        hands[seat if turn % 2 == 0 else ranks - 1 - seat].append(chunk)
    loads = [[sum(work[chunk][side] for chunk in hand) for side in (0, 1)] for hand in hands]
    for _ in range(8 * len(work)):
        heavy, side = max(
            ((rank, side) for rank in range(ranks) for side in (0, 1)), key=lambda at: loads[at[0]][at[1]]
        )
        swap = _best_swap(work, hands, loads, heavy)
        if swap is None:
            break
        mine, other, theirs = swap
        hands[heavy][hands[heavy].index(mine)], hands[other][hands[other].index(theirs)] = theirs, mine
        for side in (0, 1):
            change = work[theirs][side] - work[mine][side]
            loads[heavy][side] += change
            loads[other][side] -= change
    return hands


def _best_swap(
    work: list[tuple[int, int]], hands: list[list[int]], loads: list[list[int]], heavy: int
) -> tuple[int, int, int] | None:
    """The exchange with another rank that lowers the larger of the two ranks' loads the most, if any does."""
    best, best_peak = None, max(loads[heavy])
    for other in range(len(hands)):
        if other == heavy or max(loads[other]) > best_peak:
            continue
        for mine in hands[heavy]:
            for theirs in hands[other]:
                change = [work[theirs][side] - work[mine][side] for side in (0, 1)]
                peak = max(max(loads[heavy][s] + change[s], loads[other][s] - change[s]) for s in (0, 1))
                if peak < best_peak:
                    best, best_peak = (mine, other, theirs), peak
    return best


def _join_runs(runs: list[Run]) -> tuple[Run, ...]:
    joined: list[Run] = []
    for run in runs:
        if run.length == 0:
            continue
        if joined and joined[-1].start + joined[-1].length == run.start:
            joined[-1] = Run(joined[-1].start, 1, joined[-1].length + run.length)
        else:
            joined.append(run)
    return tuple(joined)
