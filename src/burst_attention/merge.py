"""The running state of online softmax, and how partial attentions merge into it.

Shapes: B batch, H query heads, S local query tokens, E value head dim.

A state is (acc_BHSE, peak_BHS, total_BHS): over the keys seen so far, with s the scaled scores,

    peak = some bound near max(s)      total = sum exp(s - peak)      acc = sum exp(s - peak) v

so out = acc / total and lse = peak + log(total). Keeping peak and total apart, instead of one rounded lse, keeps
weights exact to fp32's relative error however many partials are merged: a stored lse near 10 loses four bits.
A row that has seen no key has peak = -inf, total = 0 and acc = 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

MAX_PARTIALS = 5
"""Partials that wait to be merged at once, whatever the number of ranks: what a ring of 8 has, two blocks at once."""

MAX_PARTS = 12
"""Parts of a gradient that wait to be added at once, whatever the number of ranks."""

MAX_SHARES = 5
"""Times a gradient's own size that parts may hold while they wait: what a ring of 8 needs, two blocks at once."""


SUMS_COUNT = 2
"""Times that a part in an order of its own counts among these: it is in fp32, where other parts are in 16 bits."""


class Partial(NamedTuple):
    """A kernel's normalised (out, lse): for the rows from `first` on and the heads from `head` on."""

    first: int
    out: Tensor
    lse: Tensor
    head: int = 0

    def heads(self, first: int, last: int) -> Partial | None:
        """What it has of these heads, which is all or nothing."""
        begin, end = first - self.head, last - self.head
        if end <= 0 or begin >= self.out.shape[1]:
            return None
        assert begin >= 0 and end <= self.out.shape[1], "it has some of these heads"
        all_of_them = end - begin == self.out.shape[1]
        out, lse = (x if all_of_them else x[:, begin:end] for x in (self.out, self.lse))
        return Partial(self.first, out, lse, first)


class BlockOrder(NamedTuple):
    """An order of a kernel's own: block of rows after block of rows, and in each of them the numbers as a table says.

    `table` has, for every number of a block (rows, dim), where in the block it is.
    """

    table: Tensor
    rows: int
    scale: float
    """That its numbers are yet to be multiplied by."""


class Part(NamedTuple):
    """A kernel's part of a gradient (B, heads, rows, dim): for the rows from `row` on and the heads from `head` on.

    With an order its rows lie next to each other as far as strides tell.
    """

    row: int
    head: int
    tensor: Tensor
    order: BlockOrder | None = None


@dataclass
class Deferred:
    """What a state still has to take in, for kernels that merge several partials in one pass."""

    untouched: bool = True
    """Whether acc, peak and total are memory that nothing has been written to yet."""
    partials: list[Partial] = field(default_factory=list)
    last: bool = False
    """Whether the pieces that come now are the last, so that a kernel may end the state itself."""
    finished: tuple[Tensor, Tensor] | None = None
    """(out, lse), where it did."""
    results: tuple[Tensor, Tensor] | None = None
    """Room for (out, lse), where the first heads, so many, are `ended` before others."""
    ended: int = 0
    alone: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """What partials are taken in under, where several streams of a GPU make them (lanes.py)."""
    side_by_side: bool = False
    """Whether several do, so that none may continue what another has written."""


class State(NamedTuple):
    """Unnormalised attention over some keys; every tensor is updated in place."""

    acc: Tensor
    peak: Tensor
    total: Tensor
    deferred: Deferred | None = None
    """None: the tensors say all. Only kernels that defer are given a state that defers."""
    head: int = 0
    """The first of its heads among those of `deferred`."""

    def heads(self, first: int, last: int) -> State:
        """Views of some heads. What they defer waits with that of the others."""
        views = self.acc[:, first:last], self.peak[:, first:last], self.total[:, first:last]
        return State(*views, self.deferred, self.head + first)

    def rows(self, first: int, last: int) -> State:
        """Views of some query rows."""
        return State(self.acc[:, :, first:last], self.peak[:, :, first:last], self.total[:, :, first:last])


def clear(state: State) -> None:
    """Make it the state of no keys."""
    state.acc.zero_()
    state.peak.fill_(float("-inf"))
    state.total.zero_()


def merge(state: State, other: State) -> None:
    """Add the keys of `other`, a state over other keys for the same rows, in place."""
    peak = torch.maximum(state.peak, other.peak)
    # Rows without keys on both sides: any finite shift gives exp(-inf) = 0 instead of NaN.
    shift = peak.masked_fill(peak == float("-inf"), 0.0)
    mine, theirs = torch.exp(state.peak - shift), torch.exp(other.peak - shift)
    state.acc.mul_(mine.unsqueeze(-1)).addcmul_(other.acc.to(state.acc.dtype), theirs.unsqueeze(-1))
    state.total.mul_(mine).addcmul_(other.total.to(state.total.dtype), theirs)
    state.peak.copy_(peak)


def merge_partial(state: State, out: Tensor, lse: Tensor) -> None:
    """Add a kernel's normalised (out, lse): it is the state with peak = lse and total = 1 (0 where lse = -inf)."""
    merge(state, State(out, lse, (lse != float("-inf")).to(state.total.dtype)))


def normalised(state: State) -> Tensor:
    """out = acc / total, as acc travels in another dtype; 0 for rows without keys."""
    return state.acc / torch.where(state.total > 0, state.total, 1.0).unsqueeze(-1)


def finish(state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out, lse): rows without keys give 0 and -inf. The state is used up."""
    empty = state.total == 0
    total = state.total.masked_fill(empty, 1.0)
    out = state.acc.div_(total.unsqueeze(-1)).to(dtype)
    # Where peak and log(total) nearly cancel, their rounding would be many ulp of lse: fp64, which all but MPS have.
    wide = total.dtype if total.device.type == "mps" else torch.float64
    log_total = torch.log(total.to(wide))
    # A key that is alone has its own score as lse, to the bit, so that backward's weight of it is 1. Peak is that score
    # rounded, and total rounds the difference: what those two can add up to is not another key.
    size = state.peak.abs()
    roundings = (torch.nextafter(size, torch.full_like(size, torch.inf)) - size + torch.finfo(size.dtype).eps) * 0.501
    log_total.masked_fill_(log_total.abs() <= roundings, 0.0)
    return out, (log_total + state.peak).to(total.dtype).masked_fill_(empty, float("-inf"))
