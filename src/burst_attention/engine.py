"""The engine: one loop that runs any phase plan with a tile kernel over a ring.

Shapes: B batch, H query heads, G key heads, S local query rows, K local key rows, D head dim, E value head dim.

Home's tensors stay where they are. A visiting block is a buffer of rows (schedule/bundles.py); views of its fields
stand in for home's tensors of the same names, so every direction is the same loop and the same kernel call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from burst_attention.geometry import Piece, Rows, count_rows, row_offset, unite_rows
from burst_attention.merge import State, clear, merge
from burst_attention.ring import Parcel, Ring, TraceEvent
from burst_attention.schedule import Bundle, PhasePlan, Round, Transfer, make_bundle
from burst_attention.schedule.plan import OPERAND, RESULT
from burst_attention.tiles import BackwardInputs, Gradients, TileKernel

CHANNELS = {OPERAND: 0, RESULT: 1}
STATE_FIELDS = ("acc", "peak", "total")

Compute = Callable[[tuple[Piece, ...], Mapping[str, Tensor]], None]


class RowBuffer:
    """Room for some rows of a bundle; `load` says which rows of which block it holds now."""

    def __init__(self, bundle: Bundle, rows: int, device: torch.device) -> None:
        self.bundle = bundle
        self.memory = torch.empty(rows * bundle.row_bytes, dtype=torch.uint8, device=device)
        self.rows: Rows = ()

    def load(self, rows: Rows) -> RowBuffer:
        self.rows = rows
        return self

    @property
    def used(self) -> Tensor:
        """The bytes of the rows it holds."""
        return self.memory[: count_rows(self.rows) * self.bundle.row_bytes]

    def fields(self) -> dict[str, Tensor]:
        """Views (batch, heads, rows, dim) or (batch, heads, rows) of every field."""
        count, views = count_rows(self.rows), {}
        for field in self.bundle.fields:
            size = field.dtype.itemsize
            typed = self.memory.view(field.dtype)
            shape, stride = [field.batch, field.heads, count], [field.heads * max(field.dim, 1), max(field.dim, 1)]
            stride.append(self.bundle.row_bytes // size)
            if field.dim:
                shape, stride = [*shape, field.dim], [*stride, 1]
            views[field.name] = typed.as_strided(shape, stride, field.offset // size)
        return views

    def part(self, rows: Rows) -> Tensor:
        """The bytes of some of its rows: a slice where they lie together, a packed copy where they do not."""
        width = self.bundle.row_bytes
        starts = [row_offset(self.rows, first) for first, _ in rows]
        slices = [
            self.memory[start * width : (start + last - first) * width]
            for start, (first, last) in zip(starts, rows, strict=True)
        ]
        together = starts and starts[-1] + rows[-1][1] - rows[-1][0] - starts[0] == count_rows(rows)
        return self.memory[starts[0] * width :][: count_rows(rows) * width] if together else torch.cat(slices)


class PhaseRun:
    """One rank's run of one phase plan."""

    def __init__(self, plan: PhasePlan, ring: Ring, home: dict[str, Tensor], compute: Compute) -> None:
        self.plan, self.ring, self.home, self.compute = plan, ring, home, compute
        # Backward's out belongs to home's queries and does not travel with visiting ones: delta stands for it.
        self.staying = {name: x for name, x in home.items() if name != "out" or plan.direction == "kv"}
        device, rank = home["q"].device, ring.rank
        self.slots = [RowBuffer(plan.operands, rows, device) for rows in plan.slot_rows(rank)]
        computed, received, returned = plan.result_slot_rows(rank)
        precise = make_bundle(plan.results.names, plan.shapes)
        self.sent_as_computed = precise == plan.results
        self.computing = RowBuffer(precise, computed, device)
        # Where results travel as they are computed, these two change places every round.
        self.sending = RowBuffer(plan.results, computed, device)
        self.receiving = RowBuffer(plan.results, received, device)
        self.returning = RowBuffer(plan.results, returned, device) if returned else self.receiving

    def run(self) -> None:
        """Run every round; on any error the other ranks are told where and why."""
        index = 0
        try:
            for step in self.plan.rounds[self.ring.rank]:
                index = step.index
                self._round(step)
        except BaseException as error:
            place = f"{self.plan.phase} round {index}"
            self.ring.abort(f"rank {self.ring.rank} failed in {place}: {type(error).__name__}: {error}")
            raise

    def _round(self, step: Round) -> None:
        where = f"{self.plan.phase} round {step.index}"
        sends = [self._parcel(t.target, t, self._outgoing(t, step)) for t in step.sends]
        receives = [self._parcel(t.source, t, self._incoming(t, step)) for t in step.receives]
        pending = self.ring.post(sends, receives, where)
        started = time.perf_counter()
        self._compute_round(step)
        computed = time.perf_counter()
        self.ring.wait(pending)
        if self.ring.trace is not None:
            times = computed - started, time.perf_counter() - computed
            self.ring.trace.append(TraceEvent(self.plan.phase, step.index, step.block, started, *times))
        for transfer in step.receives:
            if transfer.channel == RESULT:
                self._combine(transfer)
        if step.result_rows:
            self._turn_over()

    def _parcel(self, peer: int, transfer: Transfer, tensor: Tensor) -> Parcel:
        return Parcel(peer, CHANNELS[transfer.channel], tensor, f"{transfer.channel} block {transfer.block}")

    def _outgoing(self, transfer: Transfer, step: Round) -> Tensor:
        if transfer.channel == RESULT:
            return self.sending.part(transfer.rows)
        if transfer.block != self.ring.rank:
            return self.slots[step.index % 2].part(transfer.rows)
        slot = self.slots[0 if step.index == 0 else 2].load(transfer.rows)
        for name, view in slot.fields().items():
            copy_rows(view, self.home[name], transfer.rows)
        return slot.used

    def _incoming(self, transfer: Transfer, step: Round) -> Tensor:
        if transfer.channel == RESULT:
            return self._arrival(transfer).load(transfer.rows).used
        return self.slots[(step.index + 1) % 2].load(transfer.rows).used

    def _arrival(self, transfer: Transfer) -> RowBuffer:
        return self.returning if transfer.block == self.ring.rank else self.receiving

    def _compute_round(self, step: Round) -> None:
        if not step.pieces:
            return
        if step.block == self.ring.rank:
            self.compute(step.pieces, self.home)
            return
        slot = self.slots[step.index % 2]
        operands = slot.fields()
        results = {}
        if step.result_rows:
            results = self.computing.load(step.result_rows).fields()
            clear_results(results)
        # Operands and results may each hold more rows than this round needs, for later and from earlier visitors.
        for (first, last), pieces in group_pieces(step.pieces, self.plan.direction):
            visiting: dict[str, Tensor] = {}
            for views, rows in ((operands, slot.rows), (results, step.result_rows)):
                start = row_offset(rows, first) if views else 0
                visiting |= {name: view[:, :, start : start + last - first] for name, view in views.items()}
            self.compute(pieces, {**self.staying, **visiting})

    def _combine(self, transfer: Transfer) -> None:
        """Add results that have arrived: to home's own, or to those just computed for the same block."""
        arrived = self._arrival(transfer).fields()
        at_home = transfer.block == self.ring.rank
        target = self.home if at_home else self.computing.fields()
        offset = 0
        for first, last in transfer.rows:
            start = first if at_home else row_offset(self.computing.rows, first)
            mine = {name: target[name][:, :, start : start + last - first] for name in arrived}
            theirs = {name: view[:, :, offset : offset + last - first] for name, view in arrived.items()}
            add_results(mine, theirs)
            offset += last - first

    def _turn_over(self) -> None:
        """What was computed, with what arrived for it, is sent in the next round."""
        if self.sent_as_computed:
            self.computing, self.sending = self.sending, self.computing
            return
        views = self.computing.fields()
        for name, view in self.sending.load(self.computing.rows).fields().items():
            view.copy_(views[name])


def copy_rows(target: Tensor, source: Tensor, rows: Rows) -> None:
    """Pack some rows of a home tensor, one range after the other."""
    offset = 0
    for first, last in rows:
        target[:, :, offset : offset + last - first].copy_(source[:, :, first:last])
        offset += last - first


def group_pieces(pieces: tuple[Piece, ...], direction: str) -> list[tuple[tuple[int, int], tuple[Piece, ...]]]:
    """The stretches of moving rows that pieces need, each with its pieces counted from the stretch's first row."""
    first, count = ("k_first", "k_count") if direction == "kv" else ("q_first", "q_count")
    rows = [(getattr(piece, first), getattr(piece, first) + getattr(piece, count)) for piece in pieces]
    groups = []
    for low, high in unite_rows(rows):
        inside = [piece for piece, (start, _) in zip(pieces, rows, strict=True) if low <= start < high]
        moved = tuple(piece._replace(**{first: getattr(piece, first) - low}) for piece in inside)
        groups.append(((low, high), moved))
    return groups


def clear_results(results: Mapping[str, Tensor]) -> None:
    """Start results from nothing: a state of no keys, or gradients of 0."""
    if "acc" in results:
        clear(State(*(results[name] for name in STATE_FIELDS)))
        return
    for view in results.values():
        view.zero_()


def add_results(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Merge states, or add gradients, in place."""
    if "acc" in mine:
        merge(State(*(mine[name] for name in STATE_FIELDS)), State(*(theirs[name] for name in STATE_FIELDS)))
        return
    for name, view in mine.items():
        view.add_(theirs[name])


def forward_compute(kernel: TileKernel, scale: float) -> Compute:
    """How a round's pieces are computed in forward."""

    def compute(pieces: tuple[Piece, ...], x: Mapping[str, Tensor]) -> None:
        kernel.forward(pieces, x["q"], x["k"], x["v"], State(*(x[name] for name in STATE_FIELDS)), scale)

    return compute


def backward_compute(kernel: TileKernel, scale: float) -> Compute:
    """How a round's pieces are computed in backward."""

    def compute(pieces: tuple[Piece, ...], x: Mapping[str, Tensor]) -> None:
        inputs = BackwardInputs(x["dout"], x["q"], x["k"], x["v"], x["lse"], x["delta"], x.get("out"))
        kernel.backward(pieces, inputs, Gradients(x.get("dq"), x.get("dk"), x.get("dv")), scale)

    return compute
