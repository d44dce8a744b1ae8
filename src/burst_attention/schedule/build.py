"""Building a plan: cut the mask along the layouts, find which rows must travel, and chain their hops."""

from __future__ import annotations

from functools import lru_cache

import torch

from burst_attention.geometry import (
    Band,
    Piece,
    Rows,
    Run,
    cut,
    intersect_rows,
    join_pieces,
    moved_rows,
    stretches,
    subtract_rows,
    unite_rows,
)
from burst_attention.layout import Layout
from burst_attention.mask import Mask
from burst_attention.schedule.bundles import DIRECTIONS, Heads, Shapes, make_bundle, moved_fields
from burst_attention.schedule.plan import OPERAND, RESULT, PhasePlan, Plan, Round, Transfer, Visit, packed_pieces
from burst_attention.topology import FlatRing

Pieces = tuple[Piece, ...]
PieceTable = tuple[tuple[Pieces, ...], ...]
"""pieces[query rank][key rank]"""


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
    coalesce: int = 1,
) -> Plan:
    """The plan of one call. The moving side of each phase is the given one or, for "auto", the one with fewer bytes."""
    if layout.ring_size != key_layout.ring_size:
        raise ValueError(f"layout is for {layout.ring_size} ranks and key_layout for {key_layout.ring_size}")
    mask.require_cover(layout.end, key_layout.end)
    forward = _choose(mask, layout, key_layout, shapes, "forward", forward_direction, wire_dtype, needs, coalesce)
    backward = None
    if needs:
        backward = _choose(mask, layout, key_layout, shapes, "backward", direction, wire_dtype, needs, coalesce)
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
    coalesce: int,
) -> PhasePlan:
    """The candidate with the fewest bytes over all ranks, then the fewest messages: either side, either way round."""
    pieces = piece_table(mask, layout, key_layout)
    candidates = []
    for side in DIRECTIONS if direction == "auto" else (direction,):
        home = key_layout if side == "kv" else layout
        local_rows = tuple(home.local_tokens(rank) for rank in range(home.ring_size))
        operands, results = moved_fields(phase, side, needs)
        bundles = make_bundle(operands, shapes), make_bundle(results, shapes, wire_dtype)
        for step in (1, -1):
            topology = FlatRing(layout.ring_size, step, min(coalesce, max(layout.ring_size - 1, 1)))
            rounds = _Builder(topology, pieces, side, bool(results), shapes.halves()).rounds()
            candidates.append(PhasePlan(phase, side, topology, *bundles, shapes, needs, local_rows, rounds))
    return min(candidates, key=lambda plan: (plan.total_bytes, plan.total_messages))


@lru_cache(maxsize=16)
def piece_table(mask: Mask, layout: Layout, key_layout: Layout) -> PieceTable:
    """The allowed pairs between every query rank and every key rank, as few pieces."""
    ranks, stride = range(layout.ring_size), max(layout.stride, key_layout.stride)
    by_keys = [_bands_of_runs(mask.bands, key_layout.runs_by_remainder(stride, rank), keys=True) for rank in ranks]
    table = []
    for q_rank in ranks:
        by_queries = _bands_of_runs(mask.bands, layout.runs_by_remainder(stride, q_rank), keys=False)
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


def _bands_of_runs(bands: tuple[Band, ...], runs: tuple[Run, ...], keys: bool) -> list[tuple[Run, int, set[Band]]]:
    """(run, its first local row, the bands whose range on this side meets it)."""
    found, first = [], 0
    for run in runs:
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

    def __init__(
        self, topology: FlatRing, pieces: PieceTable, side: str, has_results: bool, halves: tuple[Heads, Heads] | None
    ) -> None:
        self.topology = topology
        self.pieces = pieces
        self.side = side
        self.has_results = has_results
        self.halves = halves
        self.returns = has_results and topology.size > 1
        self.last_round = topology.visiting_rounds + self.returns
        ranks = range(topology.size)
        self.needed = {
            (block, distance): unite_rows(moved_rows(p, side) for p in self._visit(block, distance))
            for block in ranks
            for distance in range(1, topology.size)
        }
        self.sends: list[list[list[Transfer]]] = [[[] for _ in range(self.last_round + 1)] for _ in ranks]
        self.receives: list[list[list[Transfer]]] = [[[] for _ in range(self.last_round + 1)] for _ in ranks]

    def rounds(self) -> tuple[tuple[Round, ...], ...]:
        for block in range(self.topology.size):
            self._lay_operands(block)
            if self.has_results:
                self._lay_results(block)
        return tuple(self._rank_rounds(rank) for rank in range(self.topology.size))

    def _visit(self, block: int, distance: int) -> Pieces:
        rank = self.topology.visitor(block, distance)
        return self.pieces[rank][block] if self.side == "kv" else self.pieces[block][rank]

    def _shared(self, block: int, distance: int) -> Rows:
        """Rows needed at a distance and already at the visitor of the round before."""
        return intersect_rows(
            self.needed.get((block, distance), ()), self.needed.get((block, distance - self.topology.coalesce), ())
        )

    def _lay_operands(self, block: int) -> None:
        """Each visitor gets what it needs: from the visitor before where that needed it too, the rest from home."""
        coalesce, visitor = self.topology.coalesce, self.topology.visitor
        for index in range(1, self.topology.visiting_rounds + 1):
            distances = self.topology.distances(index)
            fresh = {d: subtract_rows(self.needed[block, d], self._shared(block, d)) for d in distances}
            packed = unite_rows(pair for rows in fresh.values() for pair in rows)
            for distance in distances:
                needed, target = self.needed[block, distance], visitor(block, distance)
                before = self.needed.get((block, distance - coalesce), ())
                source = visitor(block, distance - coalesce)
                for rows in stretches(self._shared(block, distance), needed, before):
                    self._add(OPERAND, block, rows, source, target, index - 1)
                for rows in stretches(fresh[distance], needed, packed):
                    self._add(OPERAND, block, rows, block, target, index - 1)

    def _lay_results(self, block: int) -> None:
        """Results go on to the next visitor for the rows that it adds to, and home for the others."""
        coalesce = self.topology.coalesce
        for distance in range(1, self.topology.size):
            needed, source = self.needed[block, distance], self.topology.visitor(block, distance)
            index = self.topology.round_of(distance) + 1
            onward = self._shared(block, distance + coalesce)
            for rows in stretches(onward, needed):
                self._add(RESULT, block, rows, source, self.topology.visitor(block, distance + coalesce), index)
            for rows in stretches(subtract_rows(needed, onward), needed):
                self._add(RESULT, block, rows, source, block, index)

    def _add(self, channel: str, block: int, rows: Rows, source: int, target: int, index: int) -> None:
        link = self.topology.link(source, target)
        transfer = Transfer(channel, block, rows, source, target, link, index)
        self.sends[source][index].append(transfer)
        self.receives[target][index].append(transfer)

    def _rank_rounds(self, rank: int) -> tuple[Round, ...]:
        home_first, home_last = self._home_visits(rank)
        rounds = []
        for index in range(self.last_round + 1):
            if index == 0:
                visits: tuple[Visit, ...] = (home_first,)
            elif index > self.topology.visiting_rounds:
                visits = (home_last,)
            else:
                pairs = [(self.topology.visiting(rank, d), d) for d in self.topology.distances(index)]
                visits = tuple(
                    Visit(block, rows, self._visit(block, d)) for block, d in pairs if (rows := self.needed[block, d])
                )
            sends, receives = self.sends[rank][index], self.receives[rank][index]
            pieces = packed_pieces(visits, self.side)
            rounds.append(Round(index, visits, pieces, _in_order(sends), _in_order(receives)))
        return tuple(rounds)

    def _home_visits(self, rank: int) -> tuple[Visit, Visit]:
        """Home's work to do first, hiding the first hop, and last, hiding the way home of its results.

        Half of the heads each: the pieces stay as large as they are, which is what kernels are fast on.
        """
        home = self.pieces[rank][rank]
        if not self.returns or self.halves is None:
            return Visit(rank, (), home), Visit(rank, (), ())
        first, last = self.halves
        return Visit(rank, (), home, first), Visit(rank, (), home, last)


def _in_order(transfers: list[Transfer]) -> tuple[Transfer, ...]:
    """Both ends list the transfers between them in the same order."""
    return tuple(sorted(transfers, key=lambda t: (t.channel, t.block, t.source, t.target, t.rows)))
