"""Building a plan: cut the mask along the layouts, find which rows must travel, and chain their hops."""

from __future__ import annotations

from functools import lru_cache

import torch

from burst_attention.geometry import Band, Piece, Rows, Run, cut, join_pieces, unite_rows
from burst_attention.layout import Layout
from burst_attention.mask import Mask
from burst_attention.schedule.bundles import DIRECTIONS, Shapes, make_bundle, moved_fields
from burst_attention.schedule.plan import OPERAND, RESULT, PhasePlan, Plan, Round, Transfer
from burst_attention.topology import FlatRing

Pieces = tuple[Piece, ...]
PieceTable = tuple[tuple[Pieces, ...], ...]
"""pieces[query rank][key rank]"""

HOME_SPLIT_ROWS = 64
"""Home's pieces are split at a multiple of this many query rows, so that both parts stay kernel-friendly."""


@lru_cache(maxsize=64)
def build_plan(
    mask: Mask,
    layout: Layout,
    key_layout: Layout,
    shapes: Shapes,
    forward_direction: str,
    direction: str,
    wire_dtype: torch.dtype | None,
    needs: str,
) -> Plan:
    """The plan of one call. The moving side of each phase is the given one or, for "auto", the one with fewer bytes."""
    if layout.ring_size != key_layout.ring_size:
        raise ValueError(f"layout is for {layout.ring_size} ranks and key_layout for {key_layout.ring_size}")
    mask.require_cover(layout.end, key_layout.end)
    forward = _choose(mask, layout, key_layout, shapes, "forward", forward_direction, wire_dtype, needs)
    backward = None
    if needs:
        backward = _choose(mask, layout, key_layout, shapes, "backward", direction, wire_dtype, needs)
    return Plan(mask, layout, key_layout, forward, backward)


def _choose(
    mask: Mask,
    layout: Layout,
    key_layout: Layout,
    shapes: Shapes,
    phase: str,
    direction: str,
    wire_dtype: torch.dtype | None,
    needs: str,
) -> PhasePlan:
    """The candidate with the fewest bytes over all ranks: sides that may move, in both ways round the ring."""
    pieces = piece_table(mask, layout, key_layout)
    candidates = []
    for side in DIRECTIONS if direction == "auto" else (direction,):
        home = key_layout if side == "kv" else layout
        local_rows = tuple(home.local_tokens(rank) for rank in range(home.ring_size))
        operands, results = moved_fields(phase, side, needs)
        bundles = make_bundle(operands, shapes), make_bundle(results, shapes, wire_dtype)
        for step in (1, -1):
            topology = FlatRing(layout.ring_size, step)
            rounds = _Builder(topology, pieces, side, bool(results)).rounds()
            candidates.append(PhasePlan(phase, side, topology, *bundles, shapes, needs, local_rows, rounds))
    return min(candidates, key=lambda plan: plan.total_bytes)


@lru_cache(maxsize=16)
def piece_table(mask: Mask, layout: Layout, key_layout: Layout) -> PieceTable:
    """The allowed pairs between every query rank and every key rank, as few pieces."""
    ranks = range(layout.ring_size)
    by_keys = [_bands_of_runs(mask.bands, key_layout, rank, keys=True) for rank in ranks]
    table = []
    for q_rank in ranks:
        by_queries = _bands_of_runs(mask.bands, layout, q_rank, keys=False)
        row = []
        for k_rank in ranks:
            pieces = [
                piece
                for q_run, q_first, q_bands in by_queries
                for k_run, k_first, k_bands in by_keys[k_rank]
                for band in sorted(q_bands & k_bands)
                if (piece := cut(band, q_run, q_first, k_run, k_first))
            ]
            row.append(join_pieces(pieces))
        table.append(tuple(row))
    return tuple(table)


def _bands_of_runs(bands: tuple[Band, ...], layout: Layout, rank: int, keys: bool) -> list[tuple[Run, int, set[Band]]]:
    """(run, its first local row, the bands whose range on this side meets it)."""
    found, first = [], 0
    for run in layout.runs(rank):
        near = {
            band
            for band in bands
            if (band.j0 if keys else band.i0) <= run.last and run.start < (band.j1 if keys else band.i1)
        }
        found.append((run, first, near))
        first += run.length
    return found


class _Builder:
    """Lays the rounds of every rank for one moving side and one way round the ring."""

    def __init__(self, topology: FlatRing, pieces: PieceTable, side: str, has_results: bool) -> None:
        self.topology = topology
        self.pieces = pieces
        self.side = side
        self.has_results = has_results
        size = topology.size
        self.last_round = size if size > 1 and has_results else size - 1
        self.sends: list[list[list[Transfer]]] = [[[] for _ in range(size + 1)] for _ in range(size)]
        self.receives: list[list[list[Transfer]]] = [[[] for _ in range(size + 1)] for _ in range(size)]
        self.held: dict[tuple[int, int], Rows] = {}
        self.result_rows: dict[tuple[int, int], Rows] = {}

    def rounds(self) -> tuple[tuple[Round, ...], ...]:
        for block in range(self.topology.size):
            for chain in self._chains(block):
                self._lay_chain(block, chain)
        return tuple(self._rank_rounds(rank) for rank in range(self.topology.size))

    def _visit(self, block: int, rank: int) -> Pieces:
        return self.pieces[rank][block] if self.side == "kv" else self.pieces[block][rank]

    def _needed(self, block: int, rank: int) -> Rows:
        """Rows of a block that a rank's pieces touch."""
        if self.side == "kv":
            return unite_rows((p.k_first, p.k_first + p.k_count) for p in self._visit(block, rank))
        return unite_rows((p.q_first, p.q_first + p.q_count) for p in self._visit(block, rank))

    def _chains(self, block: int) -> list[list[int]]:
        """Rounds in which the block is wanted, as consecutive stretches: home starts each, visitors forward it."""
        chains: list[list[int]] = []
        for index in range(1, self.topology.size):
            if not self._visit(block, self.topology.visitor(block, index)):
                continue
            if chains and chains[-1][-1] == index - 1:
                chains[-1].append(index)
            else:
                chains.append([index])
        return chains

    def _lay_chain(self, block: int, chain: list[int]) -> None:
        visitors = {index: self.topology.visitor(block, index) for index in chain}
        needed = {index: self._needed(block, visitors[index]) for index in chain}
        carried: Rows = ()
        for index in reversed(chain):
            carried = unite_rows((*carried, *needed[index]))
            self.held[visitors[index], index] = carried
        source = block
        gathered: Rows = ()
        for index in chain:
            target = visitors[index]
            self._add(OPERAND, block, self.held[target, index], source, target, index - 1)
            if self.has_results:
                if gathered:
                    self._add(RESULT, block, gathered, source, target, index)
                gathered = unite_rows((*gathered, *needed[index]))
                self.result_rows[target, index] = gathered
            source = target
        if self.has_results:
            self._add(RESULT, block, gathered, source, block, chain[-1] + 1)

    def _add(self, channel: str, block: int, rows: Rows, source: int, target: int, index: int) -> None:
        link = self.topology.link(source, target)
        transfer = Transfer(channel, block, rows, source, target, link, index)
        self.sends[source][index].append(transfer)
        self.receives[target][index].append(transfer)

    def _rank_rounds(self, rank: int) -> tuple[Round, ...]:
        home_first, home_last = self._home_parts(rank)
        rounds = []
        for index in range(self.last_round + 1):
            block = self.topology.visiting(rank, index) if index < self.topology.size else rank
            if index == 0:
                pieces = home_first
            elif index == self.topology.size:
                pieces = home_last
            else:
                pieces = self._visit(block, rank)
            rounds.append(
                Round(
                    index=index,
                    block=block,
                    pieces=pieces,
                    held=self.held.get((rank, index), ()),
                    result_rows=self.result_rows.get((rank, index), ()),
                    sends=_in_order(self.sends[rank][index]),
                    receives=_in_order(self.receives[rank][index]),
                )
            )
        return tuple(rounds)

    def _home_parts(self, rank: int) -> tuple[Pieces, Pieces]:
        """Home's pieces to compute first, hiding the first hop, and last, hiding the way home of its results."""
        home = self.pieces[rank][rank]
        if self.last_round < self.topology.size:
            return home, ()
        return split_rows(home)


def split_rows(pieces: Pieces) -> tuple[Pieces, Pieces]:
    """Cut pieces at a query row so that both parts hold about half of the pairs; all in the first when too small."""
    if not pieces:
        return (), ()
    rows = max(p.q_first + p.q_count for p in pieces)
    keys = max(p.k_first + p.k_count for p in pieces)
    total = sum(p.pairs for p in pieces)

    def upper(row: int) -> Pieces:
        return tuple(part for p in pieces if (part := p.crop(0, row, 0, keys)))

    low, high = 0, rows // HOME_SPLIT_ROWS
    while low < high:
        middle = (low + high) // 2
        if 2 * sum(p.pairs for p in upper(middle * HOME_SPLIT_ROWS)) < total:
            low = middle + 1
        else:
            high = middle
    row = low * HOME_SPLIT_ROWS
    lower = tuple(part for p in pieces if (part := p.crop(row, rows, 0, keys)))
    return (upper(row), lower) if upper(row) else (pieces, ())


def _in_order(transfers: list[Transfer]) -> tuple[Transfer, ...]:
    """Both ends list the transfers between them in the same order."""
    return tuple(sorted(transfers, key=lambda t: (t.channel, t.block, t.source, t.target)))
