"""A GPU's streams without a GPU: whether all that touches the same memory is in order, whatever the streams' speed.

Streams here only count: each knows how much of every other it comes after, by the events it has waited for. Everything
computes at once, on the CPU, while the memory that it reads and writes is written down with the stream it would have
run on. Two that touch the same bytes, one of them writing, must be in order. And memory goes back to the stream that it
was allocated on, as torch's allocator has it: that stream must come after all who have used it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READ, WRITE, ADD = "read", "write", "add"
"""Additions are atomic: they may come in any order among themselves."""


class Stream:
    """Counts what it is given, and how much of others that comes after."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.cuda_stream, self.device = machine, number, torch.device("cuda", 0)
        self.after: dict[int, int] = {number: 0}

    def record_event(self) -> dict[int, int]:
        with self.machine.locked():
            return dict(self.after)

    def wait_event(self, event: dict[int, int]) -> None:
        with self.machine.locked():
            for number, count in event.items():
                self.after[number] = max(self.after.get(number, 0), count)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def comes_after(self, access: Access) -> bool:
        return self.after.get(access.stream, 0) >= access.number


class Access(NamedTuple):
    """Of bytes [first, last) of a storage, by the `number`-th thing on a stream."""

    kind: str
    first: int
    last: int
    stream: int
    number: int
    name: str

    def disturbs(self, other: Access) -> bool:
        same = self.first < other.last and other.first < self.last
        return same and not self.kind == other.kind == READ and not self.kind == other.kind == ADD


@dataclass
class Block:
    """A storage: whose it is, and who has used it."""

    alive: StorageWeakRef
    owner: Stream | None
    """None where it was allocated before anything was written down."""
    holder: str
    """The thread that has allocated it."""
    nbytes: int
    accesses: list[Access] = field(default_factory=list)


class Machine:
    """All streams, all memory, and what was found wrong."""

    def __init__(self, pool: int) -> None:
        self.found: list[str] = []
        self._lock = threading.RLock()
        self._blocks: dict[int, Block] = {}
        self._pool = [Stream(self, number) for number in range(pool)]
        self._given = 0
        self.local = threading.local()
        self._held: dict[str, int] = {}
        self.peaks: dict[str, int] = {}
        """The most bytes that each thread has held at once, of what was allocated since this began."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """What was freed is looked at first: streams are as they were then."""
        with self._lock:
            self.look_at_freed()
            yield

    def stream(self, device: Any = None, priority: int = 0) -> Stream:
        """The next of a pool, as torch gives them: they come again when all are used."""
        with self._lock:
            self._given += 1
            return self._pool[(self._given - 1) % len(self._pool)]

    def current(self, device: Any = None) -> Stream:
        stream: Stream = self.local.stream
        return stream

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """What is enqueued in here goes to a stream; with none, to the one it would."""
        before = getattr(self.local, "stream", None)
        self.local.stream = stream or before
        try:
            yield
        finally:
            self.local.stream = before

    def go_on(self, stream: Stream) -> None:
        """What is enqueued from now on goes to a stream."""
        self.local.stream = stream

    def look_at_freed(self) -> None:
        for key in [key for key, block in self._blocks.items() if block.alive.expired()]:
            block = self._blocks.pop(key)
            if block.owner is not None:
                self._hold(block.holder, -block.nbytes)
            for access in block.accesses:
                if block.owner is not None and not block.owner.comes_after(access):
                    owner = block.owner.cuda_stream
                    self.found.append(f"stream {owner} gets back what stream {access.stream} has yet to {access.name}")

    def touch(self, name: str, made: Sequence[Tensor] = (), **touched: Sequence[Tensor]) -> None:
        """One thing on the current stream: tensors that it has made, and by `kind` those that it has touched."""
        with self.locked():
            stream = self.current()
            stream.after[stream.cuda_stream] = number = stream.after[stream.cuda_stream] + 1
            for tensor in made:
                self._block(tensor, stream)
            for kind, tensors in ((WRITE, made), *touched.items()):
                for tensor in tensors:
                    self._access(stream, kind, tensor, number, name)

    def _block(self, tensor: Tensor, owner: Stream | None) -> Block:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            name = threading.current_thread().name
            self._blocks[storage._cdata] = Block(StorageWeakRef(storage), owner, name, storage.nbytes())
            if owner is not None:
                self._hold(name, storage.nbytes())
        return self._blocks[storage._cdata]

    def _hold(self, name: str, nbytes: int) -> None:
        self._held[name] = self._held.get(name, 0) + nbytes
        self.peaks[name] = max(self.peaks.get(name, 0), self._held[name])

    def _access(self, stream: Stream, kind: str, tensor: Tensor, number: int, name: str) -> None:
        if not tensor.numel():
            return
        if tensor.dim() > 1 and tensor.shape[0] > 1 and not tensor.is_contiguous():
            # Between the heads of one batch entry and of the next lie those of others.
            for entry in tensor.unbind():
                self._access(stream, kind, entry, number, name)
            return
        first = tensor.storage_offset() * tensor.itemsize
        length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        mine = Access(kind, first, first + length * tensor.itemsize, stream.cuda_stream, number, name)
        block = self._block(tensor, None)
        for other in block.accesses:
            if mine.disturbs(other) and not stream.comes_after(other):
                what = f"stream {mine.stream}: {name} ({kind})", f"stream {other.stream}: {other.name} ({other.kind})"
                self.found.append(f"{what[0]} does not wait for {what[1]}")
        block.accesses.append(mine)

    def kernel(self, fn: Callable[..., Any], touches: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
        """`fn` as one launch: `touches(result, *its arguments)` gives the arguments of `touch`."""

        def launch(*arguments: Any, **options: Any) -> Any:
            self.local.inside = True
            try:
                result = fn(*arguments, **options)
            finally:
                self.local.inside = False
            lists = touches(result, *arguments, **options)
            self.touch(fn.__name__, **{name: _tensors(given) for name, given in lists.items()})
            return result

        return launch


def _tensors(given: Any) -> list[Tensor]:
    return [x for x in tree_leaves(given) if isinstance(x, Tensor)]


class Written(TorchDispatchMode):
    """Writes down what torch's own operators touch."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(self.machine.local, "inside", False):
            return result
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        made = [x for x in _tensors(result) if x.untyped_storage()._cdata not in given]
        named = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        written = [
            x
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for x in _tensors(named.get(argument.name))
        ]
        # Views touch nothing, and of what new memory is modelled on nothing is read.
        if made or written:
            read = [] if "empty" in func.name() else [x for x in _tensors(named) if all(x is not y for y in written)]
            self.machine.touch(func.name(), made, write=written, read=read)
        return result
