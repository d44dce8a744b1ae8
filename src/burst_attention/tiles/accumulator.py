"""Where gradients are added up on one device: parts that wait, parts that grow, heads that are finished before others.

Shapes: B batch, H query heads, G key heads, S query rows, K key rows, D head dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from burst_attention.lanes import hurried
from burst_attention.merge import MAX_PARTS, MAX_SHARES, SUMS_COUNT, Part

SumParts = Callable[..., None]
"""sum_parts(target, parts, load, out, beside): see fused.py."""


class GrowingPart(Protocol):
    """What a kernel adds to until it is taken in."""

    def part(self, head: int) -> Part:
        """All that was added, for the heads from `head` on."""


Growing = TypeVar("Growing", bound=GrowingPart)


class Accumulator:
    """A gradient (B, heads, rows, dim) that parts are added to.

    While `untouched` its memory holds nothing: the first part is written there, not added. With `sum_parts` parts wait,
    and a few are added in one pass.
    """

    def __init__(
        self,
        tensor: Tensor,
        sum_parts: SumParts | None = None,
        untouched: bool = True,
        result_dtype: torch.dtype | None = None,
    ) -> None:
        self.tensor, self.untouched = tensor, untouched
        self._result_dtype = result_dtype
        """Of what it is to be finished as, where some heads may be finished before others."""
        self._result: Tensor | None = None
        self._finished = 0
        self._sum_parts = sum_parts
        self._waiting: list[Part] = []
        self._borrowed: list[Part] = []
        """Parts that wait in buffers which will be used again."""
        self._held = 0
        """Numbers in parts that wait and are not borrowed."""
        self._growing: dict[tuple[Hashable, int], GrowingPart] = {}
        self._placed: list[tuple[int, int]] = []
        self.side_by_side = False
        """Whether kernels on several streams of a GPU give it parts, or add to it, at once (lanes.py)."""
        self.alone: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """What parts are taken in under, where several streams of a GPU make them (lanes.py)."""

    def add(self, first: int, part: Tensor, borrowed: bool = False, head: int = 0) -> None:
        """Add to rows from `first` on, and heads from `head` on.

        A borrowed part must be taken in, by `settle_borrowed` or `settle`, before its memory is reused.
        """
        if self._sum_parts is None:
            self.settle()
            self.tensor[:, head : head + part.shape[1], first : first + part.shape[2]].add_(part)
            return
        if borrowed:
            # It lies in a buffer that is there anyway.
            self._make_room(0)
            self._borrowed.append(Part(first, head, part))
        else:
            self.wait(Part(first, head, part))

    def wait(self, part: Part) -> None:
        """Keep a part until it is taken in."""
        numbers = part.tensor.numel() * (1 if part.order is None else SUMS_COUNT)
        self._make_room(numbers)
        self._waiting.append(part)
        self._held += numbers

    def place(self, first: int, rows: int, dtype: torch.dtype) -> Tensor | None:
        """Where a kernel may write a part for all heads itself, instead of having it added: None where it may not.

        Only where nothing is yet, and what is written is stored as it is.
        """
        taken = any(first < last and begin < first + rows for begin, last in self._placed)
        if self._sum_parts is None or not self.untouched or taken or dtype != self.tensor.dtype:
            return None
        self._placed.append((first, first + rows))
        return self.tensor[:, :, first : first + rows]

    @property
    def waits(self) -> bool:
        """Whether parts may wait until this is settled."""
        return self._sum_parts is not None

    def growing(self, key: Hashable, make: Callable[[], Growing], head: int = 0) -> Growing:
        """The part of that key for the heads from `head` on; made, where there is none since this was settled."""
        assert self.waits, "a part that grows waits until this is settled"
        if (key, head) not in self._growing:
            self._growing[key, head] = make()
        return cast(Growing, self._growing[key, head])

    def make_room(self, rows: int) -> None:
        """For a part of so many rows, before it is computed: take in what waits, if it would be too much with it."""
        batch, heads, _, dim = self.tensor.shape
        self._make_room(batch * heads * rows * dim)

    def _make_room(self, numbers: int) -> None:
        # A narrow one is a visitor's: it is settled once, when the round ends, lest its sums be rounded on the way.
        narrow = self.tensor.dtype.itemsize < 4
        waiting = len(self._waiting) + len(self._borrowed)
        many = waiting >= MAX_PARTS or self._held + numbers > MAX_SHARES * self.tensor.numel()
        if waiting and many and not narrow:
            self.settle()

    def settle_borrowed(self, beside: bool = False) -> None:
        """Take in what is borrowed, so that its memory may be used again, maybe `beside` something that computes.

        Those who give other parts need not wait for it: what it touches is not theirs.
        """
        if self._placed:
            self.settle()
        elif self._borrowed and self._sum_parts is not None:
            with hurried(self.tensor):
                self._sum_parts(self.tensor, self._borrowed, load=not self.untouched, beside=beside)
            self._borrowed.clear()
            self.untouched = False

    def settle(self) -> Tensor:
        """Take in what waits and return the tensor, ready to be added to."""
        with self.alone():
            self._fill_gaps()
            if (parts := self._parts) and self._sum_parts is not None:
                self._sum_parts(self.tensor, parts, load=not self.untouched)
            elif self.untouched:
                self.tensor.zero_()
        # Not before: others may have their memory when what is alone has ended.
        self.untouched = False
        self._growing.clear()
        self._waiting.clear()
        self._borrowed.clear()
        self._held = 0
        return self.tensor

    def _fill_gaps(self) -> None:
        """After parts were written in place: nothing but zeros where none was."""
        if not self._placed:
            return
        edges = [0, *(edge for placed in sorted(self._placed) for edge in placed), self.tensor.shape[2]]
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            if first < last:
                self.tensor[:, :, first:last].zero_()
        self._placed.clear()
        self.untouched = False

    @property
    def _parts(self) -> list[Part]:
        grown = (grown.part(head) for (_, head), grown in self._growing.items())
        return [*self._waiting, *self._borrowed, *grown]

    @property
    def is_reordered(self) -> bool:
        """Whether some of what waits is in an order of its own."""
        return any(part.order is not None for part in self._parts)

    @property
    def fresh(self) -> bool:
        """Whether nothing has been added yet."""
        return self.untouched and not self._parts and not self._placed

    def shared(self) -> Tensor:
        """The tensor, for kernels whose additions are atomic, so that several may add at once."""
        if self.untouched:
            self.tensor.zero_()
            self.untouched = False
        return self.tensor

    def begin(self) -> Tensor:
        """The tensor of a fresh one, for a kernel that writes all of it instead of adding."""
        assert self.fresh, "something is there already, and would be lost"
        self.untouched = False
        return self.tensor

    def open_heads(self, count: int) -> bool:
        """Make room to finish the first heads, to which nothing more is added, before others; says if that helps."""
        if not count or self._sum_parts is None or self._result_dtype in (None, self.tensor.dtype):
            return False
        self._result, self._finished = torch.empty_like(self.tensor, dtype=self._result_dtype), count
        return True

    def finish_heads(self, beside: bool = False) -> None:
        """Finish the heads that were opened, while others are computed; `finish` does the rest. Allocates nothing."""
        self._sum_heads(0, self._finished, beside)

    def _sum_heads(self, first: int, last: int, beside: bool = False) -> None:
        """The result of some heads."""
        assert self._result is not None and self._sum_parts is not None
        parts = [
            Part(row, max(head - first, 0), x[:, max(first - head, 0) : last - head], order)
            for row, head, x, order in self._parts
            if head < last and first < head + x.shape[1]
        ]
        total, out = self.tensor[:, first:last], self._result[:, first:last]
        if parts:
            self._sum_parts(total, parts, load=not self.untouched, out=out, beside=beside)
        elif self.untouched:
            out.zero_()
        else:
            self._sum_parts(total, [Part(0, 0, total)], load=False, out=out, beside=beside)

    def finish(self, dtype: torch.dtype) -> Tensor:
        """The gradient in the dtype of its input, with what waits added in the same pass."""
        with self.alone():
            self._fill_gaps()
            if self._result is not None:
                result = self._result
                self._sum_heads(self._finished, result.shape[1])
            elif not (parts := self._parts) or self._sum_parts is None or self.tensor.dtype == dtype:
                result = self.settle().to(dtype)
            else:
                result = torch.empty_like(self.tensor, dtype=dtype)
                self._sum_parts(self.tensor, parts, load=not self.untouched, out=result)
        return result

    def heads(self, first: int, last: int) -> Accumulator:
        """Some of its heads."""
        return AccumulatorHeads(self, first, last)


class AccumulatorHeads(Accumulator):
    """Heads [first, last) of an accumulator, to add to."""

    def __init__(self, whole: Accumulator, first: int, last: int) -> None:
        super().__init__(whole.tensor[:, first:last])
        self._whole, self._first, self._last = whole, first, last
        self.side_by_side = whole.side_by_side

    def add(self, first: int, part: Tensor, borrowed: bool = False, head: int = 0) -> None:
        self._whole.add(first, part, borrowed, self._first + head)

    def wait(self, part: Part) -> None:
        self._whole.wait(part._replace(head=self._first + part.head))

    @property
    def waits(self) -> bool:
        return self._whole.waits

    def place(self, first: int, rows: int, dtype: torch.dtype) -> Tensor | None:
        return None

    def growing(self, key: Hashable, make: Callable[[], Growing], head: int = 0) -> Growing:
        return self._whole.growing(key, make, self._first + head)

    def _make_room(self, numbers: int) -> None:
        self._whole._make_room(numbers)

    def settle_borrowed(self, beside: bool = False) -> None:
        self._whole.settle_borrowed(beside)

    def settle(self) -> Tensor:
        return self._whole.settle()[:, self._first : self._last]

    @property
    def fresh(self) -> bool:
        return self._whole.fresh

    def shared(self) -> Tensor:
        return self._whole.shared()[:, self._first : self._last]

    def begin(self) -> Tensor:
        whole = self._whole.begin()
        for others in (slice(0, self._first), slice(self._last, None)):
            whole[:, others].zero_()
        return self.tensor

    def finish(self, dtype: torch.dtype) -> Tensor:
        raise AssertionError("an accumulator is finished as a whole")
