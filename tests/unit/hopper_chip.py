"""A Hopper chip that is not there: runs our Gluon kernels, as they are written, on a CPU.

A program's groups of warps are threads here that take turns where they wait. What they compute is torch's; what they
share is judged. Every read and write of shared memory, by a group, a matrix product or the copy engine, must come
after those before it by way of a barrier, a wait or a fence. So a race is found in whatever order groups happen to run:

    agent           its work is done, as far as a group knows, when the group
    a group         has passed a barrier that the other arrived at
    a load          has passed the barrier that counts its bytes
    a product       has waited for its own products
    an addition     has waited for its own stores

Products and the copy engine see what a group stored only behind a fence. Programs run one after another, and none may
load or store what another of its launch has stored (gluon_on_cpu.py). What is not judged: registers and layouts
(test_offline_compile.py), and threads of one group among themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Clock = dict[Hashable, int]
"""How much of each agent's work is known to be done."""


class WrongOrderError(AssertionError):
    """Something is read or written that others may still be at, or nobody can go on."""


class _EndedError(Exception):
    """Another group has failed."""


def join(clock: Clock, other: Clock) -> None:
    """What `other` knows is known to `clock` too."""
    for agent, time in other.items():
        clock[agent] = max(clock.get(agent, 0), time)


class Memory:
    """Numbers that groups share, a view of them, and when each was last read and written by whom."""

    def __init__(self, values: Tensor, places: Tensor, accesses: dict[tuple[Hashable, bool], Tensor], name: str):
        self.values, self.places, self.accesses, self.name = values, places, accesses, name

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype, name: str) -> Memory:
        count = torch.Size(shape).numel()
        return Memory(torch.full(tuple(shape), torch.nan, dtype=dtype), torch.arange(count).view(*shape), {}, name)

    def _view(self, change: Callable[[Tensor], Tensor]) -> Memory:
        return Memory(change(self.values), change(self.places), self.accesses, self.name)

    def index(self, at: int) -> Memory:
        return self._view(lambda x: x[at])

    def reshape(self, shape: Sequence[int]) -> Memory:
        return self._view(lambda x: x.view(*shape))

    def permute(self, order: Sequence[int]) -> Memory:
        return self._view(lambda x: x.permute(*order))

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return self._view(lambda x: x.narrow(dim, start, length))

    def load(self, layout: Any = None) -> Tensor:
        group = current()
        self.touch(group.clock, group, group.begin(), writes=False)
        return self.values.clone()

    def store(self, value: Tensor) -> None:
        assert value.shape == self.values.shape and value.dtype == self.values.dtype, (value.shape, self.values.shape)
        group = current()
        self.touch(group.clock, group, group.begin(), writes=True)
        self.values.copy_(value)

    def touch(self, known: Clock, agent: Hashable, time: int, *, writes: bool, by_engine: bool = False) -> None:
        """Note an access of an agent that comes after what is `known`, or say what it may come too early for."""
        if (other := self._too_early(known, agent, writes, by_engine)) is not None:
            verb, did = ("writes" if writes else "reads"), ("written" if other[1] else "read")
            raise WrongOrderError(f"{agent} {verb} {self.name}, which {other[0]} may not yet have {did}")
        whole = self.accesses.setdefault((agent, writes), torch.zeros(self._count(), dtype=torch.int64))
        whole[self.places.reshape(-1)] = time

    def _too_early(self, known: Clock, agent: Hashable, writes: bool, by_engine: bool) -> tuple[Hashable, bool] | None:
        """Who may still be at it, and whether they write."""
        for (other, wrote), times in self.accesses.items():
            if not (writes or wrote) or other is agent:
                continue
            # A group's stores reach products and the copy engine by way of a fence.
            limit = known.get(("fence", other) if by_engine and wrote and isinstance(other, Group) else other, 0)
            if bool((times.take(self.places) > limit).any()):
                return other, wrote
        return None

    def is_there_for(self, known: Clock, agent: Hashable) -> bool:
        """Whether all of it has been written by what is `known`, as a product of an agent sees it."""
        writers = [times.take(self.places) for (_, wrote), times in self.accesses.items() if wrote]
        written = bool(writers) and bool((torch.stack(writers).amax(0) > 0).all())
        return written and self._too_early(known, agent, False, True) is None

    def _count(self) -> int:
        return self.values.untyped_storage().nbytes() // self.values.element_size()


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have come; whoever waits learns what they knew."""

    def __init__(self, name: str) -> None:
        self.name, self.count, self.phases = name, 0, 0
        self.missing = self.bytes = self.loads = 0
        self.gathered: Clock = {}
        self.known: Clock = {}

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, group: Group) -> None:
        join(self.gathered, group.clock)
        self.missing -= 1
        self.end_phase()

    def end_phase(self) -> None:
        assert self.missing >= 0, f"too many arrive at {self.name}"
        if self.missing == self.bytes == 0:
            self.known, self.gathered = self.gathered, {("load for", self): self.loads}
            self.missing, self.phases = self.count, self.phases + 1

    def __repr__(self) -> str:
        return self.name


class Barriers:
    """Shared memory that barriers stand in."""

    def __init__(self, shape: Sequence[int], name: str) -> None:
        self.all = [Barrier(f"{name}[{index}]") for index in range(shape[0])]

    def index(self, at: int) -> Barrier:
        return self.all[at]


def one(barrier: Barrier | Barriers) -> Barrier:
    return barrier if isinstance(barrier, Barrier) else barrier.all[0]


class Group(threading.Thread):
    """A group of warps: runs until it waits for something that is not there, then it is another's turn."""

    def __init__(self, number: int, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        super().__init__(daemon=True)
        self.number, self.body, self.arguments = number, body, arguments
        self.clock: Clock = {}
        self.time = self.products = self.additions = 0
        self.turn, self.back = threading.Semaphore(0), threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for = "its turn"
        self.done = self.ended = False
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        return f"group {self.number}"

    def begin(self) -> int:
        """The time of the next thing that the group does, which it knows itself."""
        self.time += 1
        self.clock[self] = self.time
        return self.time

    def run(self) -> None:
        self.turn.acquire()
        _running.group = self
        try:
            with torch.no_grad():
                self.body(*self.arguments)
            late = self.clock.get(("addition of", self), 0)
            if late < self.additions:
                raise WrongOrderError(f"{self} ends before what it adds has left its memory")
        except BaseException as error:
            self.error = error
        self.done = True
        self.back.release()

    def pause(self, ready: Callable[[], bool], what: str) -> None:
        """Give others their turn until this group can go on."""
        self.ready, self.waits_for = ready, what
        self.back.release()
        self.turn.acquire()
        if self.ended:
            raise _EndedError

    def go_on(self) -> None:
        self.turn.release()
        self.back.acquire()


_running = threading.local()


def current() -> Group:
    return _running.group


def run_groups(bodies: Iterable[tuple[Callable[..., None], tuple[Any, ...]]], order: Sequence[int]) -> None:
    """Run them all to their ends, the first of `order` that can go on each time."""
    groups = [Group(number, body, arguments) for number, (body, arguments) in enumerate(bodies)]
    for group in groups:
        group.start()
    failed: BaseException | None = None
    while failed is None and not all(group.done for group in groups):
        able = [groups[number] for number in order if not groups[number].done and groups[number].ready()]
        if able:
            able[0].go_on()
            failed = able[0].error
        else:
            waiting = ", ".join(f"{group} for {group.waits_for}" for group in groups if not group.done)
            failed = WrongOrderError(f"nobody can go on: {waiting}")
    for group in (group for group in groups if not group.done):
        group.ended = True
        group.go_on()
    for group in groups:
        group.join()
    if failed is not None:
        raise failed


class Product:
    """What a matrix product will give: not a number to compute with before its group has waited for it."""

    def __init__(self, value: Tensor, group: Group, number: int) -> None:
        self.value, self.group, self.number = value, group, number


def multiply(a: Tensor | Memory, b: Memory, c: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Product:
    """`warpgroup_mma`, begun: its operands in shared memory are read until the group has waited for it.

    Of operands that may not be there yet it makes NaN: a group may begin a product whose numbers it will not use.
    """
    assert is_async
    group = current()
    group.products += 1
    agent, shared = ("product of", group), [x for x in (a, b) if isinstance(x, Memory)]
    there = all(operand.is_there_for(group.clock, agent) for operand in shared)
    for operand in shared if there else ():
        operand.touch(group.clock, agent, group.products, writes=False, by_engine=True)
    left, right = ((x.values if isinstance(x, Memory) else x) for x in (a, b))
    assert left.dtype == right.dtype and left.shape[0] == 64 and (left.shape[0], right.shape[1]) == tuple(c.shape)
    value = left.float() @ right.float() if there else torch.full(c.shape, torch.nan)
    return Product(value + c if use_acc else value, group, group.products)


def wait_for_products(most: int, deps: Sequence[Any]) -> Any:
    """`warpgroup_mma_wait`: all but the last `most` are done."""
    group = current()
    group.clock["product of", group] = group.products - most
    made = tuple(x.value if isinstance(x, Product) and x.number <= group.products - most else x for x in deps)
    return made[0] if len(made) == 1 else made


def fence() -> None:
    """`fence_async_shared`: products and the copy engine see what the group has stored."""
    group = current()
    group.clock["fence", group] = group.time


class Descriptor:
    """Blocks of (1, 1, rows, columns) of a (B, heads, rows, D) tensor, for the copy engine."""

    def __init__(self, x: Tensor, rows: int, dim: int | None = None) -> None:
        self.x, self.dtype, self.layout = x, x.dtype, None
        self.block_type = BlockType((1, 1, rows, dim or x.shape[3]), x.element_size())

    def block(self, places: Sequence[int]) -> tuple[Tensor, int]:
        """The part of a block that exists, and how many rows it has."""
        batch, head, row, column = places
        _, _, rows, columns = self.block_type.shape
        assert 0 <= batch < self.x.shape[0] and 0 <= head < self.x.shape[1] and row >= 0, places
        assert 0 <= column <= column + columns <= self.x.shape[3], places
        return self.x[batch, head, row : row + rows, column : column + columns], rows


class BlockType:
    """A block's shape and how many bytes the engine counts for it, rows beyond the tensor among them."""

    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        self.shape, self.nbytes = shape, torch.Size(shape).numel() * size


def load_block(desc: Descriptor, places: Sequence[int], barrier: Barrier | Barriers, memory: Memory) -> None:
    """Begin a load to shared memory; rows that do not exist become 0."""
    group, barrier = current(), one(barrier)
    barrier.loads += 1
    memory.touch(group.clock, ("load for", barrier), barrier.loads, writes=True)
    part, rows = desc.block(places)
    assert tuple(memory.values.shape) == desc.block_type.shape and memory.values.dtype == desc.dtype
    memory.values.zero_()
    memory.values[0, 0, : part.shape[0]] = part
    assert part.shape[0] <= rows
    barrier.bytes -= desc.block_type.nbytes
    barrier.gathered["load for", barrier] = barrier.loads
    barrier.end_phase()


def add_block(desc: Descriptor, places: Sequence[int], memory: Memory) -> None:
    """Begin to add a block of shared memory to the tensor; it is read until the group has waited for its stores."""
    group = current()
    group.additions += 1
    memory.touch(group.clock, ("addition of", group), group.additions, writes=False, by_engine=True)
    assert tuple(memory.values.shape) == desc.block_type.shape and memory.values.dtype == desc.dtype
    part, _ = desc.block(places)
    part += memory.values[0, 0, : part.shape[0]]


class CopyEngine:
    """`tma`."""

    @staticmethod
    def store_wait(most: int) -> None:
        group = current()
        group.clock["addition of", group] = group.additions - most


class BarrierNames:
    """`mbarrier`."""

    MBarrierLayout = staticmethod(lambda: None)

    @staticmethod
    def init(barrier: Barrier | Barriers, count: int) -> None:
        one(barrier).init(count)

    @staticmethod
    def expect(barrier: Barrier | Barriers, count: int) -> None:
        one(barrier).bytes += count
        one(barrier).arrive(current())

    @staticmethod
    def arrive(barrier: Barrier | Barriers, *, pred: bool = True) -> None:
        if pred:
            one(barrier).arrive(current())

    @staticmethod
    def wait(barrier: Barrier | Barriers, phase: int, *, pred: bool = True) -> None:
        """Until the phase of this parity has ended."""
        if not pred:
            return
        group, waited = current(), one(barrier)
        if waited.phases % 2 == phase:
            group.pause(lambda: waited.phases % 2 != phase, f"{waited}, phase {phase}")
        join(group.clock, waited.known)
