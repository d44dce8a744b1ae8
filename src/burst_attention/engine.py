"""The engine: one loop that runs any phase plan with a tile kernel over a ring.

Shapes: B batch, H query heads, G key heads, S local query rows, K local key rows, D head dim, E value head dim.

Home's tensors stay where they are. The blocks that visit in a round lie packed in one buffer (schedule/bundles.py);
views of its fields stand in for home's tensors of the same names, so every direction is the same loop and the same
kernel call, and several blocks are computed as one.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from torch import Tensor

from burst_attention.geometry import Piece, Rows, count_rows, row_offset
from burst_attention.merge import State, clear, merge, normalised
from burst_attention.ring import Parcel, Ring, TraceEvent
from burst_attention.schedule import Bundle, PhasePlan, Round, Transfer, make_bundle
from burst_attention.schedule.bundles import KEY_SIDE, Heads
from burst_attention.schedule.plan import OPERAND, RESULT
from burst_attention.tiles import GRADIENTS, Accumulator, BackwardInputs, Gradients, TileKernel

CHANNELS = {OPERAND: 0, RESULT: 1}


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
            views[field.name] = typed.as_strided(shape, stride, field.offset // size + first * stride[2])
        return views


def state_of(fields: Mapping[str, Tensor]) -> State:
    return State(fields["acc"], fields["peak"], fields["total"])


class ForwardWork:
    """How forward computes pieces and merges results: a state at home, and one for visiting queries."""

    def __init__(self, kernel: TileKernel, scale: float, home: State) -> None:
        self.kernel, self.scale, self.home = kernel, scale, home

    def of_heads(self, heads: Heads, key_heads: Heads) -> ForwardWork:
        """The same work at home for some heads."""
        return ForwardWork(self.kernel, self.scale, self.home.heads(*heads))

    def compute(self, pieces: tuple[Piece, ...], x: Mapping[str, Tensor], visiting: Collection[str]) -> None:
        """Add pieces to home's state, or begin that of queries that are among the visiting tensors."""
        state = self.home
        if "acc" in visiting:
            state = state_of(x)
            clear(state)
        self.kernel.forward(pieces, x["q"], x["k"], x["v"], state, self.scale)

    def combine(self, first: int, arrived: Mapping[str, Tensor], at_home: bool, visiting: Mapping[str, Tensor]) -> None:
        """Merge a partial state that has arrived, from row `first` on."""
        mine, theirs = self.home if at_home else state_of(visiting), state_of(arrived)
        if theirs.acc.dtype != mine.acc.dtype:
            theirs = theirs._replace(acc=theirs.acc.to(mine.acc.dtype).mul_(theirs.total.unsqueeze(-1)))
        merge(mine.rows(first, first + theirs.acc.shape[2]), theirs)

    def settle(self, ends: bool) -> None:
        """Nothing waits: states that travel are merged at once."""


class BackwardWork:
    """How backward computes pieces and adds results: gradients grow at home; visiting ones are begun every round."""

    def __init__(self, kernel: TileKernel, scale: float, home: Mapping[str, Accumulator]) -> None:
        self.kernel, self.scale, self.home = kernel, scale, home
        self.visiting: dict[str, Accumulator] = {}

    def of_heads(self, heads: Heads, key_heads: Heads) -> BackwardWork:
        """The same work at home for some heads."""
        parts = {name: total.heads(*(key_heads if name in KEY_SIDE else heads)) for name, total in self.home.items()}
        return BackwardWork(self.kernel, self.scale, parts)

    def compute(self, pieces: tuple[Piece, ...], x: Mapping[str, Tensor], visiting: Collection[str]) -> None:
        """Add pieces to home's gradients and, for visiting tensors, to new ones."""
        inputs = BackwardInputs(x["dout"], x["q"], x["k"], x["v"], x["lse"], x["delta"], x.get("out"))
        begun = (name for name in GRADIENTS if name in visiting)
        self.visiting = {name: Accumulator(x[name], self.kernel.sum_parts) for name in begun}
        here = {**self.home, **self.visiting}
        self.kernel.backward(pieces, inputs, Gradients(*(here.get(name) for name in GRADIENTS)), self.scale)

    def combine(self, first: int, arrived: Mapping[str, Tensor], at_home: bool, visiting: Mapping[str, Tensor]) -> None:
        """Add gradients that have arrived, from row `first` on."""
        for name, part in arrived.items():
            (self.home if at_home else self.visiting)[name].add(first, part, borrowed=True)

    def settle(self, ends: bool) -> None:
        """Take in what waits in buffers that the next round will use again; when the phase ends there is none."""
        for total in self.visiting.values():
            total.settle()
        for total in () if ends else self.home.values():
            total.settle(borrowed_only=True)


Work = ForwardWork | BackwardWork


class PhaseRun:
    """One rank's run of one phase plan."""

    def __init__(
        self,
        plan: PhasePlan,
        ring: Ring,
        home: dict[str, Tensor],
        work: Work,
    ) -> None:
        self.plan, self.ring, self.home, self.work = plan, ring, home, work
        self.rounds = plan.rounds[ring.rank]
        # Backward's out belongs to home's queries and does not travel with visiting ones: delta stands for it.
        self.staying = {name: x for name, x in home.items() if name != "out" or plan.direction == "kv"}
        self.slots = [self._buffer(OPERAND, plan.operands, rows) for rows in plan.slot_rows(ring.rank)]
        rows = plan.slot_rows(ring.rank)[0]
        self.dense = {
            field.name: home["q"].new_empty(field.batch * field.heads * rows, dtype=field.dtype)
            for field in plan.operands.statistics
        }
        computed, received = plan.result_slot_rows(ring.rank)
        precise = make_bundle(plan.results.names, plan.shapes)
        self.sent_as_computed = precise == plan.results
        self.computing = self._buffer(RESULT, precise, computed)
        # Where results travel as they are computed, these two change places every round.
        self.sending = self._buffer(RESULT, plan.results, computed)
        self.receiving = self._buffer(RESULT, plan.results, received)

    def _buffer(self, channel: str, bundle: Bundle, rows: int) -> RowBuffer:
        what = f"{self.plan.phase} {channel}"
        return RowBuffer(bundle, self.ring.buffer(rows * bundle.row_bytes, self.home["q"].device, what))

    def run(self) -> None:
        """Run every round; on any error the other ranks are told where and why."""
        index = 0
        try:
            for step in self.rounds:
                index = step.index
                self._round(step)
        except BaseException as error:
            place = f"{self.plan.phase} round {index}"
            self.ring.abort(f"rank {self.ring.rank} failed in {place}: {type(error).__name__}: {error}")
            raise

    def _round(self, step: Round) -> None:
        where = f"{self.plan.phase} round {step.index}"
        packed = self._pack_home(step)
        sends = [self._parcel(t.target, t, self._outgoing(t, step, packed)) for t in step.sends]
        receives = [self._parcel(t.source, t, self._incoming(t, step)) for t in step.receives]
        pending = self.ring.post(sends, receives, where)
        started = time.perf_counter()
        self._compute_round(step)
        computed = time.perf_counter()
        self.ring.wait(pending)
        if self.ring.trace is not None:
            times = computed - started, time.perf_counter() - computed
            blocks = tuple(visit.block for visit in step.visits)
            self.ring.trace.append(TraceEvent(self.plan.phase, step.index, blocks, started, *times))
        for transfer in step.receives:
            if transfer.channel == RESULT:
                self._combine(transfer, step)
        self.work.settle(ends=step is self.rounds[-1])
        if self.plan.results.fields and step.row_count:
            self._turn_over(step)

    def _parcel(self, peer: int, transfer: Transfer, tensor: Tensor) -> Parcel:
        return Parcel(peer, CHANNELS[transfer.channel], tensor, f"{transfer.channel} block {transfer.block}")

    def _pack_home(self, step: Round) -> Rows:
        """Pack the rows of its own block that this rank sends now, once whoever gets them, and say which."""
        rows = self.plan.packed_at_home(self.ring.rank, step)
        for name, view in self._packing(step).fields(0, count_rows(rows)).items() if rows else ():
            offset = 0
            for first, last in rows:
                part = view[:, :, offset : offset + last - first]
                self.work.kernel.copy(part, self.home[name][:, :, first:last])
                offset += last - first
        return rows

    def _packing(self, step: Round) -> RowBuffer:
        return self.slots[0 if step.index == 0 else 2]

    def _outgoing(self, transfer: Transfer, step: Round, packed: Rows) -> Tensor:
        first = transfer.rows[0][0]
        if transfer.channel == RESULT:
            start = self.rounds[step.index - 1].offset(transfer.block, first)
            return self.sending.part(start, transfer.row_count)
        if transfer.block != self.ring.rank:
            return self.slots[step.index % 2].part(step.offset(transfer.block, first), transfer.row_count)
        return self._packing(step).part(row_offset(packed, first), transfer.row_count)

    def _incoming(self, transfer: Transfer, step: Round) -> Tensor:
        if transfer.channel == RESULT:
            return self.receiving.part(self._arrival(transfer, step), transfer.row_count)
        start = self.rounds[step.index + 1].offset(transfer.block, transfer.rows[0][0])
        return self.slots[(step.index + 1) % 2].part(start, transfer.row_count)

    def _arrival(self, transfer: Transfer, step: Round) -> int:
        """The first row of a result in the buffer that all results of a round are received into."""
        start = 0
        for other in step.receives:
            if other == transfer:
                break
            start += other.row_count * (other.channel == RESULT)
        return start

    def _compute_round(self, step: Round) -> None:
        if not step.pieces:
            return
        if not step.row_count:
            self._compute_home(step)
            return
        visiting = self._densely(self.slots[step.index % 2].fields(0, step.row_count))
        if self.plan.results.fields:
            visiting |= self.computing.fields(0, step.row_count)
        self.work.compute(step.pieces, {**self.staying, **visiting}, visiting.keys())

    def _densely(self, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        """Row statistics lie a whole row apart in a buffer, where loading them is slow: kernels get them in a row."""
        for name, memory in self.dense.items():
            scattered = fields[name]
            fields[name] = memory[: scattered.numel()].view(scattered.shape)
            self.work.kernel.copy(fields[name], scattered)
        return fields

    def _compute_home(self, step: Round) -> None:
        if step.heads is None:
            self.work.compute(step.pieces, self.home, ())
            return
        heads, key_heads = step.heads, self.plan.shapes.key_heads(step.heads)
        of = {name: slice(*(key_heads if name in KEY_SIDE else heads)) for name in self.home}
        home = {name: x[:, of[name]] for name, x in self.home.items()}
        self.work.of_heads(heads, key_heads).compute(step.pieces, home, ())

    def _combine(self, transfer: Transfer, step: Round) -> None:
        """Add results that have arrived: to home's own, or to those just computed for the same block."""
        arrived = self.receiving.fields(self._arrival(transfer, step), transfer.row_count)
        at_home = transfer.block == self.ring.rank
        visiting = {} if at_home else self.computing.fields(0, step.row_count)
        offset = 0
        for first, last in transfer.rows:
            start = first if at_home else step.offset(transfer.block, first)
            part = {name: view[:, :, offset : offset + last - first] for name, view in arrived.items()}
            self.work.combine(start, part, at_home, visiting)
            offset += last - first

    def _turn_over(self, step: Round) -> None:
        """What was computed, with what arrived for it, is sent in the next round."""
        if self.sent_as_computed:
            self.computing, self.sending = self.sending, self.computing
            return
        views = self.computing.fields(0, step.row_count)
        for name, view in self.sending.fields(0, step.row_count).items():
            # acc is a sum of as many values as there are keys, which another dtype might not hold: it travels as out.
            view.copy_(normalised(state_of(views)) if name == "acc" else views[name])
