"""What a phase does with pieces and with what arrives: forward keeps states, backward gradients.

Shapes: B batch, H query heads, S local query rows, E value head dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from burst_attention.geometry import Piece
from burst_attention.lanes import Lanes, hurried
from burst_attention.merge import Part, State, clear, merge
from burst_attention.schedule.bundles import KEY_SIDE, Heads
from burst_attention.tiles import GRADIENTS, Accumulator, BackwardInputs, Gradients, TileKernel
from burst_attention.tiles.accumulator import SumParts


def state_of(fields: Mapping[str, Tensor]) -> State:
    return State(fields["acc"], fields["peak"], fields["total"])


class ForwardWork:
    """How forward computes pieces and merges results: a state at home, and one for visiting queries."""

    def __init__(self, kernel: TileKernel, scale: float, home: State) -> None:
        self.kernel, self.scale, self.home = kernel, scale, home

    def of_heads(self, heads: Heads, key_heads: Heads) -> ForwardWork:
        """The same work at home for some heads."""
        return ForwardWork(self.kernel, self.scale, self.home.heads(*heads))

    def compute(
        self, pieces: tuple[Piece, ...], x: Mapping[str, Tensor], visiting: Collection[str], last: bool = False
    ) -> None:
        """Add pieces to home's state, or begin that of queries that are among the visiting tensors."""
        state = self.home
        if state.deferred:
            state.deferred.last = last
        if "acc" in visiting:
            state = state_of(x)
            clear(state)
        if pieces:
            self.kernel.forward(pieces, x["q"], x["k"], x["v"], state, self.scale)

    def combine(self, first: int, arrived: Mapping[str, Tensor], at_home: bool, visiting: Mapping[str, Tensor]) -> None:
        """Merge a partial state that has arrived, from row `first` on."""
        mine, theirs = self.home if at_home else state_of(visiting), state_of(arrived)
        if theirs.acc.dtype != mine.acc.dtype:
            theirs = theirs._replace(acc=theirs.acc.to(mine.acc.dtype).mul_(theirs.total.unsqueeze(-1)))
        merge(mine.rows(first, first + theirs.acc.shape[2]), theirs)

    @property
    def lays_aside(self) -> bool:
        """Whether partials at home wait."""
        return self.home.deferred is not None

    def take_in_alone(self, lanes: Lanes, room: bool) -> None:
        """Partials at home come from several lanes."""
        if self.home.deferred:
            self.home.deferred.alone, self.home.deferred.side_by_side = lanes.alone, bool(lanes.streams)

    def settle_visiting(self) -> None:
        """Nothing waits: states that travel are merged at once."""

    def settle_arrived(self) -> None:
        """Nothing waits here either, where states travel."""

    def open_heads(self, count: int, dtype: torch.dtype, coming: int) -> None:
        """Make room to end the first heads, so many, before the last pieces of the others; and for what is coming."""
        self.kernel.open_heads(self.home, count, dtype, coming)

    def end_heads(self) -> None:
        """End the heads that this is for, to which no more comes."""
        self.kernel.finish_heads(self.home)

    def finish_heads(self, heads: int, key_heads: int) -> None:
        """Where no heads are left for a round at home, all are ended by their kernel."""


class BackwardWork:
    """How backward computes pieces and adds results: gradients grow at home; visiting ones are begun every round."""

    def __init__(self, kernel: TileKernel, scale: float, home: Mapping[str, Accumulator]) -> None:
        self.kernel, self.scale, self.home = kernel, scale, home
        self.visiting: dict[str, Accumulator] = {}
        self.sum_visiting = kernel.sum_parts
        self.room = False

    def of_heads(self, heads: Heads, key_heads: Heads) -> BackwardWork:
        """The same work at home for some heads."""
        parts = {name: total.heads(*(key_heads if name in KEY_SIDE else heads)) for name, total in self.home.items()}
        return BackwardWork(self.kernel, self.scale, parts)

    def compute(
        self, pieces: tuple[Piece, ...], x: Mapping[str, Tensor], visiting: Collection[str], last: bool = False
    ) -> None:
        """Add pieces to home's gradients and, for visiting tensors, to new ones."""
        inputs = BackwardInputs(x["dout"], x["q"], x["k"], x["v"], x["lse"], x["delta"], x.get("out"))
        begun = (name for name in GRADIENTS if name in visiting)
        self.visiting = {name: Accumulator(x[name], self.sum_visiting) for name in begun}
        here = {**self.home, **self.visiting}
        if not pieces:
            return
        self.kernel.backward(pieces, inputs, Gradients(*(here.get(name) for name in GRADIENTS)), self.scale)

    def combine(self, first: int, arrived: Mapping[str, Tensor], at_home: bool, visiting: Mapping[str, Tensor]) -> None:
        """Add gradients that have arrived, from row `first` on."""
        for name, part in arrived.items():
            (self.home if at_home else self.visiting)[name].add(first, part, borrowed=True)

    @property
    def lays_aside(self) -> bool:
        """Whether parts of gradients at home wait."""
        return all(total.waits for total in self.home.values())

    def take_in_alone(self, lanes: Lanes, room: bool) -> None:
        """Parts of gradients at home come from several lanes; sums are made beside the next round if there is room."""
        for total in self.home.values():
            total.alone, total.side_by_side = lanes.alone, bool(lanes.streams)
        self.room = room
        if lanes.streams and self.kernel.sum_parts is not None:
            self.sum_visiting = partial(sum_hurried, self.kernel.sum_parts, room)

    def settle_visiting(self) -> None:
        """Take in what waits for visitors."""
        for total in self.visiting.values():
            total.settle()

    def settle_arrived(self) -> None:
        """Take in what waits at home in buffers that are used again."""
        for total in self.home.values():
            total.settle_borrowed(self.room)

    def open_heads(self, count: int, dtype: torch.dtype, coming: int) -> None:
        """Gradients of the first heads end beside home's own last work instead: `finish_heads`."""

    def end_heads(self) -> None:
        """See there."""

    def finish_heads(self, heads: int, key_heads: int) -> None:
        """End the gradients of the first heads, for which nothing more is computed. Nobody visits any more."""
        self.visiting.clear()
        counts = {name: key_heads if name in KEY_SIDE else heads for name in self.home}
        opened = [total for name, total in self.home.items() if total.open_heads(counts[name])]
        # Sums in an order of their own take few cores long to read: they come last.
        opened.sort(key=lambda total: total.is_reordered)
        with hurried(opened[0].tensor) if opened else contextlib.nullcontext():
            for total in opened:
                # The last of them is under way when blocks of the round end: it may take all that they leave.
                total.finish_heads(beside=self.room and total is not opened[-1])


def sum_hurried(sum_parts: SumParts, beside: bool, target: Tensor, parts: Sequence[Part], load: bool) -> None:
    """Parts of a visitor's gradient, before what else there is to compute."""
    with hurried(target):
        sum_parts(target, parts, load=load, beside=beside)


Work = ForwardWork | BackwardWork
