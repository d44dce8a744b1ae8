"""The engine: one loop that runs any phase plan with a tile kernel over a ring.

Shapes: B batch, H query heads, G key heads, S local query rows, K local key rows, D head dim, E value head dim.

Home's tensors stay where they are. The blocks that visit in a round lie packed in one buffer (schedule/bundles.py);
views of its fields stand in for home's tensors of the same names, so every direction is the same loop and the same
kernel call, and several blocks are computed as one.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from burst_attention.geometry import Piece, Rows, count_rows, row_offset
from burst_attention.lanes import Lanes, capturing, hurried
from burst_attention.merge import normalised
from burst_attention.rank_setup import Made, kept_with, setup_of
from burst_attention.ring import Parcel, Pending, Ring, TraceEvent
from burst_attention.schedule import Bundle, PhasePlan, Plan, Round, Transfer, growth_by_round, room_at_the_end
from burst_attention.schedule.bundles import KEY_SIDE, Heads
from burst_attention.schedule.plan import OPERAND, RESULT
from burst_attention.work import Work, state_of

Portion = tuple[tuple[Piece, ...], int, int]
"""Pieces, and of the visiting rows that they are of the first, and how many."""

ROUNDING = 8 * 512
"""Bytes of a turn's workspace that its tensors, some eight, take beyond their own, for each begins at a multiple."""

CHANNELS = {(OPERAND, False): 0, (RESULT, False): 1, (OPERAND, True): 2, (RESULT, True): 3}
"""By what travels, and whether it may take more than a round: each has an order of its own."""


class RowBuffer:
    """Room for rows of a bundle, packed from the start."""

    def __init__(self, bundle: Bundle, memory: Tensor) -> None:
        self.bundle, self.memory = bundle, memory

    def part(self, first: int, count: int) -> Tensor:
        """The bytes of some rows."""
        width = self.bundle.row_bytes
        return self.memory[first * width : (first + count) * width]

    def fields(self, first: int, count: int) -> dict[str, Tensor]:
        """Views (batch, heads, rows, dim) or (batch, heads, rows) of every field of some rows."""
        views = {}
        for field in self.bundle.fields:
            size = field.dtype.itemsize
            typed = self.memory.view(field.dtype)
            shape, stride = [field.batch, field.heads, count], [field.heads * max(field.dim, 1), max(field.dim, 1)]
            stride.append(self.bundle.row_bytes // size)
            if field.dim:
                shape, stride = [*shape, field.dim], [*stride, 1]
            begin = typed.storage_offset() + field.offset // size + first * stride[2]
            views[field.name] = typed.as_strided(shape, stride, begin)
        return views


def run_phase(runs: Sequence[PhaseRun]) -> None:
    """Run every round of one phase; on any error the other ranks are told where and why.

    Several runs are groups of heads. They take turns: while one waits for its next block, another computes, so what a
    group computes on arrival of a block is hidden too where the links are the bound.
    """
    at, first = 0, runs[0]
    try:
        for stretch in stretches_of_rounds(len(first.rounds), first.plan.topology.per_host):
            for run, index in itertools.product(runs, stretch):
                if index:
                    at = index - 1
                    run.end(at)
                at = index
                run.begin(at)
        for run in runs:
            run.end(at)
            run.finish_heads()
    except BaseException as error:
        first.ring.fail(f"{first.plan.phase} round {at}", error)
        # What waits is let go, whichever stream it is from; where the device itself has failed, its error counts.
        with contextlib.suppress(RuntimeError):
            for run in runs:
                with run.lanes.alone():
                    pass
        raise
    for run in runs:
        run.lanes.join()


def ask_for_room(plan: Plan, runs: Sequence[PhaseRun]) -> None:
    """On a GPU ask for all memory that a phase will allocate, and let it go again, before its first hop.

    Whoever does not have it says so here, where nobody waits yet; and what is held at most is the same after every hop.
    """
    first, like = runs[0], runs[0].home["q"]
    if not like.is_cuda or capturing():
        return
    kernel, phase = first.work.kernel, first.plan.phase
    at_the_end = first.kept("end", lambda: room_at_the_end(replace(plan, kernel=kernel), first.ring.rank, phase))
    held = [like.new_empty(at_the_end, dtype=torch.uint8)]
    for run in runs:
        rounds = run.memory_of_rounds()
        if kernel.parts_wait and phase == "backward":
            # Where groups of heads leave nothing to wait they have it one after the other.
            held += rounds
        del rounds


def stretches_of_rounds(rounds: int, per_host: int) -> list[range]:
    """Rounds that a group of heads runs before the next group has its turn.

    In a flat ring that is one. In a double ring it is one until blocks of other hosts come, and then a whole turn and
    the round after it, in which the turn's results leave the host, or its next operands: one group's are on the links
    between hosts while the other computes. With 3 ranks on each of 3 hosts

        0 | 1 | 2 | 3 4 5 6 | 7 8 9
    """
    if per_host == 1:
        return [range(index, index + 1) for index in range(rounds)]
    edges = [*range(min(per_host, rounds)), *range(2 * per_host + 1, rounds, per_host)]
    edges = sorted({*edges, min(per_host, rounds), rounds})
    return [range(first, last) for first, last in itertools.pairwise(edges)]


class PhaseRun:
    """One rank's run of one phase plan."""

    def __init__(
        self,
        plan: PhasePlan,
        ring: Ring,
        home: dict[str, Tensor],
        work: Work,
        group: int | None = None,
    ) -> None:
        self.plan, self.ring, self.home, self.work, self.group = plan, ring, home, work, group
        self.rounds = plan.rounds[ring.rank]
        setup = self.setup = setup_of(plan, ring.rank, work.kernel, work.scale, home["q"].device)
        # Backward's out belongs to home's queries and does not travel with visiting ones: delta stands for it.
        self.staying = {name: x for name, x in home.items() if name != "out" or plan.direction == "kv"}
        self.slots = [self._buffer(OPERAND, plan.operands, rows) for rows in plan.slot_rows]
        rows = max(plan.slot_rows)
        self.dense = {
            field.name: home["q"].new_empty(field.batch * field.heads * rows, dtype=field.dtype)
            for field in plan.operands.statistics
        }
        if plan.topology.per_host > 1:
            ring.open_lanes(home["q"].device)
        results = plan.result_slot_rows
        self.sent_as_computed = setup.computed == plan.results
        self.computing = self._buffer(RESULT, setup.computed, results.computed)
        # Where results travel as they are computed, these change places with it: one round, or a whole turn, later.
        self.sending = self._buffer(RESULT, plan.results, results.computed)
        self.held = self._buffer(RESULT, plan.results, results.held)
        self.outgoing = self.sending
        self.receiving = [self._buffer(RESULT, plan.results, results.received) for _ in range(plan.arrival_slots)]
        self.receiving_long = self._buffer(RESULT, plan.results, results.received_long)
        self.under_way: list[tuple[int, Pending]] = []
        """Transfers posted and not waited for, with the round they are due in."""
        self.lanes = Lanes(home["q"].device if self._rounds_are_apart() else None)
        self.first_ready: Any = None
        """What round 0 waits for (lanes.py)."""
        self.room = bool(self.lanes.streams) and setup.leaves_room
        """Whether passes over memory run beside rounds, in a part of the chip."""
        work.take_in_alone(self.lanes, self.room)

    def _rounds_are_apart(self) -> bool:
        """Whether on a GPU what rounds give is laid aside. Groups of heads take turns already."""
        return self.home["q"].is_cuda and self.group is None and self.setup.in_parts and self.work.lays_aside

    def kept(self, what: Hashable, make: Callable[[], Made]) -> Made:
        """What is worked out once for a plan."""
        return kept_with(
            self.plan, what, self.ring.rank, self.work.kernel, self.work.scale, self.home["q"].device, make
        )

    def memory_of_rounds(self) -> list[Tensor]:
        """What rounds will allocate, from lanes in the turns that rounds take."""
        held = []
        lanes = bool(self.lanes.streams), self.room
        for turn, nbytes in enumerate(self.kept(("rounds", lanes), self._growth_by_turn)):
            if nbytes:
                with self.lanes.memory_of(turn):
                    held.append(self.home["q"].new_empty(nbytes, dtype=torch.uint8))
        return held

    def _growth_by_turn(self) -> list[int]:
        """Bytes that the kernel's workspace grows by."""
        found: list[int] = []
        grown = growth_by_round(self.plan, self.ring.rank, self.work.kernel)
        for step, nbytes in zip(self.rounds, grown, strict=True):
            turns = self._turns_of(step)
            found += [-(-nbytes // turns) + ROUNDING if nbytes else 0] * turns
        return found

    def _turns_of(self, step: Round) -> int:
        """On how many lanes after each other a round computes."""
        if not step.row_count:
            return bool(step.pieces)
        if not step.pieces and not self.plan.results.fields:
            return 0
        return len(self._portions(step)) + (self._last_halves(step) is not None)

    def _buffer(self, channel: str, bundle: Bundle, rows: int) -> RowBuffer:
        what = f"{self.plan.phase} {channel}"
        return RowBuffer(bundle, self.ring.buffer(rows * bundle.row_bytes, self.home["q"].device, what))

    def begin(self, index: int) -> None:
        """Post a round's transfers and compute its pieces."""
        step = self.rounds[index]
        if halves := self._last_halves(step):
            self.work.open_heads(halves[0][1], self.home["q"].dtype, self.setup.last_partials)
        # Home's own work, last, hides the way home of results, and what they wait for: it was ready from the first.
        ready = self.first_ready if index and not step.row_count else self.lanes.ready()
        self.lanes.join()
        if index and self.plan.arrival_slot(index) == 0:
            # Its buffers for what arrives are those of an earlier one. The round itself need not wait for this.
            with self.lanes.beside():
                self.work.settle_arrived()
        self._post(step)
        if not index:
            # Where it is not packed beside, what it sends is packed first: the next round would wait for it after this.
            self.first_ready = ready = ready if self.room else self.lanes.ready()
        started = time.perf_counter()
        self._compute_round(step, ready)
        self.computed = started, time.perf_counter() - started

    def end(self, index: int) -> None:
        """Wait for what is due in a round, and take in results."""
        step = self.rounds[index]
        waiting = time.perf_counter()
        finished = [pending for due, pending in self.under_way if due == step.index]
        for pending in finished:
            self.ring.wait(pending)
        self.under_way = [entry for entry in self.under_way if entry[0] > step.index]
        if self.ring.trace is not None:
            waited = waiting, time.perf_counter() - waiting
            blocks = tuple(visit.block for visit in step.visits)
            times = tuple(self.ring.time_of(pending) for pending in finished if pending.sends or pending.receives)
            when = *self.computed, *waited
            self.ring.trace.append(TraceEvent(self.plan.phase, step.index, blocks, *when, times, self.group or 0))
        for transfer in self.setup.results_due.get(step.index, ()):
            self._combine(transfer, step)
        self.work.settle_visiting()
        if self.plan.results.fields and step.row_count:
            self._turn_over(step)

    def finish_heads(self) -> None:
        """End gradients of the heads that the last round does not compute, which are complete, beside it.

        They get the room of buffers that nothing is read from any more.
        """
        heads = self.rounds[-1].heads
        if heads is None or not self.lanes.streams:
            return
        del self.slots, self.computing, self.sending, self.held, self.outgoing
        # They are the first half. A key head of heads on both sides is not complete.
        with self.lanes.beside():
            self.work.finish_heads(heads[0], self.plan.shapes.key_heads(heads)[0])

    def _post(self, step: Round) -> None:
        """Post the round's transfers, those that are due together as one."""
        where = f"{self.plan.phase} round {step.index}"
        packed = self._pack_home(step)
        for due in sorted({t.due for t in (*step.sends, *step.receives)}):
            sends = [self._parcel(t.target, t, self._outgoing(t, step, packed)) for t in step.sends if t.due == due]
            receives = [self._parcel(t.source, t, self._incoming(t, step)) for t in step.receives if t.due == due]
            self.under_way.append((due, self.ring.post(sends, receives, where)))

    def _parcel(self, peer: int, transfer: Transfer, tensor: Tensor) -> Parcel:
        what = f"{transfer.channel} block {transfer.block}"
        return Parcel(peer, CHANNELS[transfer.channel, transfer.spans], tensor, what)

    def _pack_home(self, step: Round) -> Rows:
        """Pack the rows of its own block that this rank sends now, once whoever gets them, and say which."""
        rows = self.setup.packed[step.index]
        for name, view in self._packing(step).fields(0, count_rows(rows)).items() if rows else ():
            offset = 0
            for first, last in rows:
                part = view[:, :, offset : offset + last - first]
                with self.lanes.beside() if self.room else contextlib.nullcontext(), hurried(part):
                    self.work.kernel.copy(part, self.home[name][:, :, first:last], beside=self.room)
                offset += last - first
        return rows

    def _packing(self, step: Round) -> RowBuffer:
        return self.slots[self.plan.packing_slot(step.index)]

    def _outgoing(self, transfer: Transfer, step: Round, packed: Rows) -> Tensor:
        first = transfer.rows[0][0]
        if transfer.channel == RESULT:
            start = self.rounds[step.index - 1].offset(transfer.block, first)
            return self.outgoing.part(start, transfer.row_count)
        if transfer.block != self.ring.rank:
            slot = self.slots[self.plan.slot_of(step.index)]
            return slot.part(step.offset(transfer.block, first), transfer.row_count)
        return self._packing(step).part(row_offset(packed, first), transfer.row_count)

    def _incoming(self, transfer: Transfer, step: Round) -> Tensor:
        if transfer.channel == RESULT:
            return self._receiving(transfer).part(self._arrival(transfer, step), transfer.row_count)
        used = transfer.due + 1
        start = self.rounds[used].offset(transfer.block, transfer.rows[0][0])
        return self.slots[self.plan.slot_of(used)].part(start, transfer.row_count)

    def _receiving(self, transfer: Transfer) -> RowBuffer:
        return self.receiving_long if transfer.spans else self.receiving[self.plan.arrival_slot(transfer.round)]

    def _arrival(self, transfer: Transfer, step: Round) -> int:
        """The first row of a result in the buffer that results of the round it is posted in are received into."""
        start = 0
        for other in step.receives:
            if other == transfer:
                break
            start += other.row_count * (other.channel == RESULT and other.spans == transfer.spans)
        return start

    def _compute_round(self, step: Round, ready: Any) -> None:
        last = step is self.setup.last_computed
        if not step.row_count:
            if step.pieces:
                with self.lanes.turn(ready):
                    work, home = self._of_heads(self.home, step.heads)
                    work.compute(step.pieces, home, (), last)
            return
        if not step.pieces and not self.plan.results.fields:
            # It only passes through.
            return
        *portions, last_portion = self._portions(step)
        halves = self._last_halves(step)
        turns = [(portion, None) for portion in portions] + [(last_portion, heads) for heads in halves or (None,)]
        for (pieces, first, count), heads in turns:
            with self.lanes.turn(ready):
                visiting = self._densely(self.slots[self.plan.slot_of(step.index)].fields(first, count))
                if self.plan.results.fields:
                    visiting |= self.computing.fields(first, count)
                work, x = self._of_heads({**self.staying, **visiting}, heads)
                work.compute(pieces, x, visiting.keys(), last)
                if self.plan.straight:
                    work.settle_visiting()
                if halves and heads is halves[0]:
                    self.lanes.gather()
                    work.end_heads()

    def _last_halves(self, step: Round) -> tuple[Heads, Heads] | None:
        """Heads of the last pieces in two halves, of which one is ended beside the other; None for other pieces."""
        return self.setup.last_halves if self.room and step is self.setup.last_computed else None

    def _of_heads(self, x: dict[str, Tensor], heads: Heads | None) -> tuple[Work, dict[str, Tensor]]:
        """The work on some heads, and what they have of tensors; all of it for None."""
        if heads is None:
            return self.work, x
        key_heads = self.plan.shapes.key_heads(heads)
        of = {name: slice(*(key_heads if name in KEY_SIDE else heads)) for name in x}
        return self.work.of_heads(heads, key_heads), {name: tensor[:, of[name]] for name, tensor in x.items()}

    def _portions(self, step: Round) -> list[Portion]:
        """A round's pieces with the visiting rows they are of, first and count: all at once, or, in lanes, one by one.

        On one lane the second of two would be overtaken by the round after them.
        """
        if self.lanes.streams and len(step.pieces) > 1 and not self.setup.one_launch:
            pieces = sorted(step.pieces, key=lambda piece: piece.k_first)
            edges = [0, *(piece.k_first for piece in pieces[1:]), step.row_count]
            if all(piece.k_first + piece.k_count <= edge for piece, edge in zip(pieces, edges[1:], strict=True)):
                rows = dict(zip(pieces, itertools.pairwise(edges), strict=True))
                moved = [(piece._replace(k_first=piece.k_first - rows[piece][0]), rows[piece]) for piece in step.pieces]
                return [((piece,), first, last - first) for piece, (first, last) in moved]
        return [(step.pieces, 0, step.row_count)]

    def _densely(self, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        """Row statistics lie a whole row apart in a buffer, where loading them is slow: kernels get them in a row."""
        for name, memory in self.dense.items():
            scattered = fields[name]
            fields[name] = memory[: scattered.numel()].view(scattered.shape)
            self.work.kernel.copy(fields[name], scattered)
        return fields

    def _combine(self, transfer: Transfer, step: Round) -> None:
        """Add results that have arrived: to home's own, or to those just computed for the same block."""
        begin = self._arrival(transfer, self.rounds[transfer.round])
        arrived = self._receiving(transfer).fields(begin, transfer.row_count)
        at_home = transfer.block == self.ring.rank
        visiting = {} if at_home else self.computing.fields(0, step.row_count)
        offset = 0
        for first, last in transfer.rows:
            start = first if at_home else step.offset(transfer.block, first)
            part = {name: view[:, :, offset : offset + last - first] for name, view in arrived.items()}
            self.work.combine(start, part, at_home, visiting)
            offset += last - first

    def _turn_over(self, step: Round) -> None:
        """What was computed, with what arrived for it, is sent in the next round, or from there on for a turn."""
        name = "held" if self.plan.topology.ends_turn(step.index) else "sending"
        if self.sent_as_computed:
            filled = self.computing
            self.computing = getattr(self, name)
            setattr(self, name, filled)
        else:
            views = self.computing.fields(0, step.row_count)
            for field, view in getattr(self, name).fields(0, step.row_count).items():
                # acc is a sum of as many values as there are keys, which another dtype might not hold: it travels as
                # out.
                view.copy_(normalised(state_of(views)) if field == "acc" else views[field])
        self.outgoing = getattr(self, name)
