"""Building a plan: cut the mask along the layouts, find which rows must travel, and chain their hops."""

from __future__ import annotations

import itertools
from dataclasses import replace

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
from burst_attention.kept import kept
from burst_attention.layout import Layout
from burst_attention.mask import Mask
from burst_attention.schedule.bundles import DIRECTIONS, Bundle, Heads, Shapes, make_bundle, moved_fields
from burst_attention.schedule.plan import OPERAND, RESULT, PhasePlan, Plan, Round, Transfer, Visit
from burst_attention.topology import INSIDE, DoubleRing, Stop

HOME = Stop(0, 0)
Pieces = tuple[Piece, ...]
PieceTable = tuple[tuple[Pieces, ...], ...]
"""pieces[query rank][key rank]"""

MESSAGE_BYTES = 64 * 1024
"""What a message costs beside its bytes: a link of 10 Gbit/s carries so many in 50 microseconds."""


@kept(64)
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
    per_host: int = 1,
    groups: int = 1,
    straight: bool = False,
) -> Plan:
    """The plan of one call. The moving side of each phase is the given one or, for "auto", the one with fewer bytes.

    Results go from visitor to visitor and then home, or `straight` home from each, in a flat ring.
    """
    shapes = replace(shapes, heads=shapes.heads // groups, kv_heads=shapes.kv_heads // groups)
    if layout.ring_size != key_layout.ring_size:
        raise ValueError(f"layout is for {layout.ring_size} ranks and key_layout for {key_layout.ring_size}")
    mask.require_cover(layout.end, key_layout.end)
    # On a single host a double ring is a flat one.
    ring = coalesce, 1 if per_host == layout.ring_size else per_host, straight
    forward = _choose(mask, layout, key_layout, shapes, "forward", forward_direction, wire_dtype, needs, *ring)
    backward = None
    if needs:
        backward = _choose(mask, layout, key_layout, shapes, "backward", direction, wire_dtype, needs, *ring)
    return Plan(mask, layout, key_layout, forward, backward, groups=groups)


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
    per_host: int,
    straight: bool,
) -> PhasePlan:
    """Of either side and either way round, what moves the fewest bytes between hosts, then in all, then messages."""
    pieces = piece_table(mask, layout, key_layout)

    def lay(side: str, topology: DoubleRing) -> PhasePlan:
        home = key_layout if side == "kv" else layout
        local_rows = tuple(home.local_tokens(rank) for rank in range(home.ring_size))
        operands, results = moved_fields(phase, side, needs)
        bundles = make_bundle(operands, shapes), make_bundle(results, shapes, wire_dtype)
        rounds = _Builder(topology, pieces, side, bundles, shapes.halves(), straight).rounds()
        return PhasePlan(phase, side, topology, *bundles, shapes, needs, local_rows, rounds, straight)

    together = min(coalesce, max(layout.ring_size - 1, 1))
    candidates = [
        lay(side, DoubleRing(layout.ring_size, per_host, step, together))
        for side in (DIRECTIONS if direction == "auto" else (direction,))
        for step in (1, -1)
    ]
    best = min(candidates, key=lambda plan: (plan.bytes_between_hosts, plan.total_bytes, plan.total_messages))
    if not best.topology.can_be_staggered:
        return best
    staggered = lay(best.direction, replace(best.topology, staggered=True))
    return staggered if _joins_more(staggered, best) else best


def _joins_more(one: PhasePlan, other: PhasePlan) -> bool:
    """Whether ranks compute fewer pieces, each of them larger, for no more bytes and in no larger buffers."""
    sizes = [
        (plan.total_bytes, plan.total_bytes_held, sum(len(step.pieces) for rounds in plan.rounds for step in rounds))
        for plan in (one, other)
    ]
    (sent, held, pieces), (most_sent, most_held, most_pieces) = sizes
    return sent <= most_sent and held <= most_held and pieces < most_pieces


@kept(16)
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
        self,
        topology: DoubleRing,
        pieces: PieceTable,
        side: str,
        bundles: tuple[Bundle, Bundle],
        halves: tuple[Heads, Heads] | None,
        straight: bool,
    ) -> None:
        assert not straight or topology.per_host == 1, "results go straight home in a flat ring"
        self.topology = topology
        self.straight = straight
        self.pieces = pieces
        self.side = side
        self.row_bytes = {OPERAND: bundles[0].row_bytes, RESULT: bundles[1].row_bytes}
        self.has_results = bool(bundles[1].fields)
        self.halves = halves
        self.returns = self.has_results and topology.size > 1
        self.last_round = topology.visiting_rounds + self.returns
        ranks = range(topology.size)
        self.needed = {(b, d): self._needed_at(b, d) for b in ranks for d in range(topology.hosts)}
        self.laid: list[Transfer] = []
        """Transfers of the block that is being laid."""
        self.sends: list[list[list[Transfer]]] = [[[] for _ in range(self.last_round + 1)] for _ in ranks]
        self.receives: list[list[list[Transfer]]] = [[[] for _ in range(self.last_round + 1)] for _ in ranks]

    def rounds(self) -> tuple[tuple[Round, ...], ...]:
        for block in range(self.topology.size):
            for transfer in self._cheapest(block):
                self.sends[transfer.source][transfer.round].append(transfer)
                self.receives[transfer.target][transfer.round].append(transfer)
        return tuple(self._rank_rounds(rank) for rank in range(self.topology.size))

    def _cheapest(self, block: int) -> list[Transfer]:
        """A block's transfers: each host gets the rows that it needs or, if that saves enough messages, what any needs.

        Short documents of a striped layout are an example: ranks need nearly the same rows, and where one does not
        need a few of every document, its rows lie in as many stretches as there are documents.
        """
        exact = self._lay(block)
        if len({(t.channel, t.source, t.target, t.round) for t in exact}) == len(exact):
            return exact
        needed = {at: rows for at, rows in self.needed.items() if at[0] == block and rows}
        self.needed |= dict.fromkeys(needed, unite_rows(itertools.chain.from_iterable(needed.values())))
        alike = self._lay(block)
        if self._cost(alike) < self._cost(exact):
            return alike
        self.needed |= needed
        return exact

    def _cost(self, transfers: list[Transfer]) -> int:
        return sum(t.row_count * self.row_bytes[t.channel] + MESSAGE_BYTES for t in transfers)

    def _lay(self, block: int) -> list[Transfer]:
        self.laid = []
        self._lay_operands(block)
        if self.has_results:
            self._lay_results(block)
        return self.laid

    def _visit(self, block: int, stop: Stop) -> Pieces:
        rank = self.topology.rank_at(block, stop)
        return self.pieces[rank][block] if self.side == "kv" else self.pieces[block][rank]

    def _needed_at(self, block: int, distance: int) -> Rows:
        """Rows of a block that ranks of a host need, its home left out: all of them travel the host's turn."""
        stops = [Stop(distance, inner) for inner in range(self.topology.per_host)]
        return unite_rows(moved_rows(p, self.side) for stop in stops if stop != HOME for p in self._visit(block, stop))

    def _shared(self, block: int, distance: int, before: int) -> Rows:
        """Rows needed at a host and at another, where the block was before, unless that is its own."""
        held = self.needed[block, before] if before > 0 else ()
        return intersect_rows(self.needed.get((block, distance), ()), held)

    def _carried(self, block: int, distance: int) -> Rows:
        """Rows that a host gets from where the block was before."""
        return self._shared(block, distance, self.topology.before(distance, block))

    def _lay_operands(self, block: int) -> None:
        """Each host gets what it needs: from the host before where that needed it too, the rest from home."""
        topology = self.topology
        self._lay_turn(OPERAND, block, 0)
        for turn in range(1, topology.turns):
            distances = topology.distances(turn, block)
            fresh = {d: subtract_rows(self.needed[block, d], self._carried(block, d)) for d in distances}
            # What home packs in round 0 for its own host lies in the same memory.
            packed = self._packed_first(block) if turn == 1 else unite_rows(p for rows in fresh.values() for p in rows)
            posted, due = (turn - 1) * topology.per_host, turn * topology.per_host - 1
            for distance in distances:
                needed, target = self.needed[block, distance], topology.rank_at(block, Stop(distance, 0))
                before, shared = topology.before(distance, block), self._carried(block, distance)
                for rows in stretches(shared, needed, self.needed[block, before]) if shared else ():
                    self._add(OPERAND, block, rows, topology.rank_at(block, Stop(before, 0)), target, posted, due)
                for rows in stretches(fresh[distance], needed, packed):
                    self._add(OPERAND, block, rows, block, target, posted, due)
                self._lay_turn(OPERAND, block, distance)

    def _lay_turn(self, channel: str, block: int, distance: int) -> None:
        """From rank to rank of one host: operands in the round before they are needed, results a round behind."""
        topology, needed = self.topology, self.needed[block, distance]
        begin = topology.first_round(distance, block)
        for inner in range(1, topology.per_host) if needed else ():
            source, target = (topology.rank_at(block, Stop(distance, at)) for at in (inner - 1, inner))
            index = begin + inner - (channel == OPERAND)
            if channel == OPERAND or source != block:
                packed = self._packed_first(block) if source == block else needed
                for rows in stretches(needed, needed, packed):
                    self._add(channel, block, rows, source, target, index, index)

    def _packed_first(self, block: int) -> Rows:
        """What home packs in round 0: for its own host, and for the hosts of the first turn."""
        distances = (0, *self.topology.distances(1, block)) if self.topology.turns > 1 else (0,)
        return unite_rows(pair for distance in distances for pair in self.needed[block, distance])

    def _lay_results(self, block: int) -> None:
        """Results go round a host, then on to the next for the rows that it adds to, and home for the others.

        Where they go straight home, nobody adds to them on the way.
        """
        topology = self.topology
        last = topology.per_host - 1
        for distance in range(topology.hosts):
            needed, source = self.needed[block, distance], topology.rank_at(block, Stop(distance, last))
            self._lay_turn(RESULT, block, distance)
            if source == block or not needed:
                continue
            posted = topology.first_round(distance, block) + topology.per_host
            due = min(posted + last, self.last_round)
            after = distance + topology.coalesce
            onward = () if self.straight else self._shared(block, after, distance)
            target = topology.rank_at(block, Stop(after, last))
            for rows in stretches(onward, needed):
                self._add(RESULT, block, rows, source, target, posted, due)
            due = posted if topology.link(source, block) == INSIDE else due
            for rows in stretches(subtract_rows(needed, onward), needed):
                self._add(RESULT, block, rows, source, block, posted, due)

    def _add(self, channel: str, block: int, rows: Rows, source: int, target: int, index: int, due: int) -> None:
        link = self.topology.link(source, target)
        self.laid.append(Transfer(channel, block, rows, source, target, link, index, due))

    def _rank_rounds(self, rank: int) -> tuple[Round, ...]:
        home_first, home_last = self._home_visits(rank)
        rounds = []
        for index in range(self.last_round + 1):
            if index == 0:
                visits: tuple[Visit, ...] = (home_first,)
            elif index > self.topology.visiting_rounds:
                visits = (home_last,)
            else:
                visits = tuple(
                    Visit(block, rows, self._visit(block, stop))
                    for block, stop in self.topology.visitors(index, rank)
                    if (rows := self.needed[block, stop.distance])
                )
            sends, receives = self.sends[rank][index], self.receives[rank][index]
            rounds.append(Round(index, visits, self.side, _in_order(sends), _in_order(receives)))
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
    return tuple(sorted(transfers, key=lambda t: (t.due, t.channel, t.block, t.source, t.target, t.rows)))
