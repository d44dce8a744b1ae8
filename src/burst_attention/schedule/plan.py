"""The plan: for each rank, rounds of pieces to compute and transfers to make. Data only; nothing here runs it.

A block's rows go only to ranks that need them: from the rank that computed with them just before where that needed
them too, else straight from home. Results take the same ways back.

In round t a rank posts the transfers listed there, computes the round's pieces, then waits for the transfers that are
due. In a flat ring all are due in the round they are posted in; in a double ring those between hosts have a whole turn
of the host. Operands are computed with in the round after they are due. Results computed in round t are posted in round
t + 1, towards the next visitor or home. Round 0 and the last round compute home's own pieces, half of the heads each
where results travel.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from burst_attention.geometry import Packed, Piece, Rows, count_rows, join_pieces, moved_rows, row_offset, unite_rows
from burst_attention.layout import Layout
from burst_attention.mask import Mask
from burst_attention.merge import MAX_PARTIALS, MAX_SHARES
from burst_attention.schedule.bundles import Bundle, Heads, Shapes, make_bundle
from burst_attention.topology import BETWEEN, DoubleRing

OPERAND = "operand"
RESULT = "result"
MOST_ARRIVALS = 2
"""Rounds whose results, where they come straight home, may wait there to be added together.

As many as a ring of 4 has with two blocks at once, so that larger rings hold no more. With 4 of them a ring of 8 would
add up once, and hold a quarter more.
"""
PACKING = 4
"""The operand buffer for what a rank sends of its own block."""


class ResultRows(NamedTuple):
    """Rows of a rank's result buffers."""

    computed: int
    """Of each of two: being computed, and being sent in the next round."""
    held: int
    """Of one that is sent during a whole turn."""
    received: int
    """Received and due in one round; of each buffer for those."""
    received_long: int
    """Received during a whole turn."""


@dataclass(frozen=True)
class Transfer:
    """Some rows of one home's block, from one rank to another."""

    channel: str
    block: int
    rows: Rows
    source: int
    target: int
    link: str
    round: int
    """The round in which both ends post it."""
    due: int
    """The round at whose end both wait for it."""

    @property
    def row_count(self) -> int:
        return count_rows(self.rows)

    @property
    def spans(self) -> bool:
        """Whether it may take more than one round."""
        return self.due > self.round


@dataclass(frozen=True)
class Visit:
    """A block at a rank: the rows of it that ranks of the host need, and the rank's pieces, in the block's own rows.

    At home all rows are at hand and `rows` is empty. There `heads` may name the query heads that are computed, while
    another round has the others; None is all.
    """

    block: int
    rows: Rows
    pieces: tuple[Piece, ...]
    heads: Heads | None = None


@dataclass(frozen=True)
class Round:
    """What one rank does in a round: computes with the blocks that visit, or with its own, and makes transfers.

    The rows of visiting blocks lie packed in one buffer, in the order of `visits`; their results likewise.
    """

    index: int
    visits: tuple[Visit, ...]
    moving: str
    """The side whose blocks visit: "kv" or "query"."""
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What a kernel is asked to compute: the visits' pieces, in rows of the buffer.

        Found when asked for: a rank computes with its own alone, and of plans that were weighed one is run.
        """
        return packed_pieces(self.visits, self.moving)

    @property
    def heads(self) -> Heads | None:
        """The query heads that are computed; None is all."""
        return self.visits[0].heads if self.visits else None

    @cached_property
    def row_count(self) -> int:
        """Rows in the buffer of visiting blocks."""
        return sum(count_rows(visit.rows) for visit in self.visits)

    def offset(self, block: int, row: int) -> int:
        """Where a row of a visiting block lies in the buffer."""
        start = 0
        for visit in self.visits:
            if visit.block == block:
                return start + row_offset(visit.rows, row)
            start += count_rows(visit.rows)
        raise AssertionError(f"block {block} does not visit in round {self.index}")


def packed_pieces(visits: tuple[Visit, ...], direction: str) -> tuple[Piece, ...]:
    """All pieces of a round with the moving side's rows counted in the buffer, joined where they touch there."""
    packed: list[Piece] = []
    start = 0
    for visit in visits:
        buffer = Packed(visit.rows)
        for piece in visit.pieces:
            first, last = moved_rows(piece, direction)
            at = start + buffer.offset(first) if visit.rows else first
            packed.append(piece._replace(**{"k_first" if direction == "kv" else "q_first": at}))
            assert not visit.rows or buffer.offset(last - 1) + start - at == last - 1 - first
        start += count_rows(visit.rows)
    return join_pieces(packed) if start else tuple(packed)


def sign_of(scale: float) -> float:
    """All that is asked of a scale before scores are computed, so that nothing is kept for every scale of a caller."""
    return 1.0 if scale > 0 else -1.0


class TileCosts(Protocol):
    """What a plan asks of the kernel that runs it."""

    name: str
    defers: bool
    """Whether what forward leaves waits until it is ended."""

    @property
    def parts_wait(self) -> bool:
        """Whether parts of gradients wait to be added together."""

    def workspace_bytes(self, phase: PhasePlan, step: Round, visiting: Bundle | None) -> int:
        """Bytes that it allocates for itself in a round; `visiting` is what results of visitors are computed in."""

    def gives_parts(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        """Whether what a round gives is laid aside; gradients of visitors in the dtype of the inputs."""

    def one_launch(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        """Whether on a GPU all pieces of a round are one launch."""

    def partials(self, phase: PhasePlan, step: Round, scale: float) -> int:
        """How many a round of forward leaves for a head, where it leaves some."""

    def leaves_room(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        """Whether on a GPU a round's kernels give up parts of the chip before they end, for passes over memory."""


@dataclass(frozen=True)
class PhasePlan:
    """One phase, forward or backward, with one side moving: the rounds of every rank."""

    phase: str
    direction: str
    topology: DoubleRing
    operands: Bundle
    results: Bundle
    shapes: Shapes
    needs: str
    local_rows: tuple[int, ...]
    """Rows of the moving side that each rank is home to."""
    rounds: tuple[tuple[Round, ...], ...]
    straight: bool = False
    """Whether results go straight home from each visitor, not from visitor to visitor."""

    @property
    def arrival_slots(self) -> int:
        """Buffers that results are received into round by round: more than one where gradients may wait at home."""
        waits = self.straight and self.phase == "backward"
        return max(min(MOST_ARRIVALS, self.topology.visiting_rounds), 1) if waits else 1

    def arrival_slot(self, index: int) -> int:
        """The one of these for results that are posted in a round; the first are in round 2."""
        return (index - 2) % self.arrival_slots

    def rounds_alone(self, kernel: TileCosts, rounds: Iterable[Round], scale: float) -> bool:
        """Whether the kernel rounds gradients of these rounds to the dtype they travel in, and nothing else does."""
        narrow = self.straight and all(field.dtype == self.shapes.dtype for field in self.results.fields)
        # States are no parts; and of many query heads for one key head, a visitor's parts would take too much room.
        narrow &= self.phase == "backward" and self.shapes.heads <= MAX_SHARES * self.shapes.kv_heads
        return narrow and all(kernel.gives_parts(self, step, scale) for step in rounds)

    def computed_results(self, rank: int, kernel: TileCosts, scale: float) -> Bundle:
        """What a rank computes results in: precisely, or as they travel where nothing is lost by it."""
        visits = (step for step in self.rounds[rank] if step.row_count)
        if self.rounds_alone(kernel, visits, scale):
            return self.results
        return make_bundle(self.results.names, self.shapes)

    def last_halves(self, rank: int, kernel: TileCosts, scale: float) -> tuple[Heads, Heads] | None:
        """Heads of a rank's last visitors in two halves, where out of the first is ended beside the second.

        That is forward by kernels that lay partials aside, and leave room for passes beside them. All partials of the
        last visitors may wait: once some heads are ended nothing is merged for all.
        """
        steps = [step for step in self.rounds[rank] if step.pieces]
        if self.phase != "forward" or self.results.fields or len(steps) < 2 or not steps[-1].row_count:
            return None
        if not all(kernel.gives_parts(self, step, scale) and kernel.leaves_room(self, step, scale) for step in steps):
            return None
        if kernel.partials(self, steps[-1], scale) > MAX_PARTIALS:
            return None
        return self.shapes.halves()

    def row_bytes(self, channel: str) -> int:
        return (self.operands if channel == OPERAND else self.results).row_bytes

    def nbytes(self, transfer: Transfer) -> int:
        """Bytes of one transfer on the wire, padding included."""
        return transfer.row_count * self.row_bytes(transfer.channel)

    def bytes_sent(self, rank: int) -> int:
        """Bytes that a rank hands to the transport."""
        return sum(self.nbytes(transfer) for step in self.rounds[rank] for transfer in step.sends)

    @cached_property
    def total_bytes(self) -> int:
        return sum(self.bytes_sent(rank) for rank in range(self.topology.size))

    @cached_property
    def bytes_between_hosts(self) -> int:
        """Bytes that leave any host; in a flat ring every rank counts as one."""
        sends = (t for rounds in self.rounds for step in rounds for t in step.sends)
        return sum(self.nbytes(t) for t in sends if t.link == BETWEEN)

    @cached_property
    def setups(self) -> dict[Hashable, Any]:
        """What the engine has worked out for ranks of this plan (`RankSetup`), kept as long as the plan is."""
        return {}

    @cached_property
    def all_heads(self) -> int:
        """Query heads, also of a phase whose shapes are those of some."""
        last = [step.heads[1] for rounds in self.rounds for step in rounds if step.heads]
        return max(last, default=self.shapes.heads)

    @cached_property
    def all_pieces(self) -> frozenset[Piece]:
        """Every piece that any rank computes, as it is given to a kernel."""
        return frozenset(piece for rounds in self.rounds for step in rounds for piece in step.pieces)

    @cached_property
    def total_messages(self) -> int:
        return sum(len(step.sends) for rounds in self.rounds for step in rounds)

    def pairs(self, rank: int) -> int:
        """Allowed (query, key) pairs that a rank computes, counted for each query head."""
        return sum(
            piece.pairs * self.shapes.of_heads(visit.heads).heads
            for step in self.rounds[rank]
            for visit in step.visits
            for piece in visit.pieces
        )

    def flops(self, rank: int) -> int:
        """Floating-point operations of the matrix products this rank needs for its pairs."""
        dim, value = self.shapes.head_dim, self.shapes.value_dim
        if self.phase == "forward":
            per_pair = 2 * dim + 2 * value
        else:
            # Scores and dP are always rebuilt; then one product per gradient that is wanted.
            per_pair = 2 * dim + 2 * value
            per_pair += 2 * dim * (("q" in self.needs) + ("k" in self.needs)) + 2 * value * ("v" in self.needs)
        return self.pairs(rank) * per_pair * self.shapes.batch

    @cached_property
    def imbalance(self) -> float:
        """The busiest rank's pairs over the mean, less 1."""
        pairs = [self.pairs(rank) for rank in range(self.topology.size)]
        return max(pairs) * len(pairs) / sum(pairs) - 1 if sum(pairs) else 0.0

    def packed_at_home(self, rank: int, step: Round) -> Rows:
        """Rows of its own block that a rank sends in a round, packed once whoever gets them."""
        own = (t for t in step.sends if t.channel == OPERAND and t.block == rank)
        return unite_rows(pair for transfer in own for pair in transfer.rows)

    def slot_of(self, index: int) -> int:
        """The buffer that the blocks of a round lie in: two for those that begin a turn, two for those that go on."""
        turn, inner = divmod(index, self.topology.per_host)
        return turn % 2 if inner == 0 else 2 + inner % 2

    def packing_slot(self, index: int) -> int:
        """The buffer that a rank packs its own block in: in round 0 nobody visits yet, and the first is free."""
        return 0 if index == 0 else PACKING

    @cached_property
    def slot_rows(self) -> tuple[int, ...]:
        """Rows of a rank's operand buffers: two for blocks that begin a turn, two for others, one for what it sends.

        Those of a pair are as large as the larger, and all as large as any rank needs them, so that what fits as a
        small ring fits as a large one too. With masks that give ranks uneven work all hold as much as one needs.
        """
        sizes = [0] * (PACKING + 1)
        for rank, steps in enumerate(self.rounds):
            for step in steps:
                packed = self.packing_slot(step.index), count_rows(self.packed_at_home(rank, step))
                visiting = 0 < step.index <= self.topology.visiting_rounds
                for slot, rows in (packed, (self.slot_of(step.index), step.row_count if visiting else 0)):
                    sizes[slot] = max(sizes[slot], rows)
        return max(sizes[:2]), max(sizes[:2]), max(sizes[2:4]), max(sizes[2:4]), sizes[4]

    @cached_property
    def total_bytes_held(self) -> int:
        """Of a rank's buffers for what travels, results as they travel."""
        rows = self.result_slot_rows
        results = 2 * rows.computed + rows.held + self.arrival_slots * rows.received + rows.received_long
        return sum(self.slot_rows) * self.operands.row_bytes + results * self.results.row_bytes

    @cached_property
    def result_slot_rows(self) -> ResultRows:
        """Rows of a rank's buffers for results, as large as any rank needs them."""
        if not self.results.fields:
            return ResultRows(0, 0, 0, 0)
        steps = [step for rounds in self.rounds for step in rounds]
        arrived = [
            max(sum(t.row_count for t in step.receives if t.channel == RESULT and t.spans == spans) for step in steps)
            for spans in (False, True)
        ]
        computed = max(step.row_count for step in steps)
        return ResultRows(computed, computed if self.topology.per_host > 1 else 0, *arrived)


@dataclass(frozen=True)
class Plan:
    """What a call runs, forward and backward, on every rank."""

    mask: Mask
    layout: Layout
    key_layout: Layout
    forward: PhasePlan
    backward: PhasePlan | None
    kernel: TileCosts | None = None
    """Whose memory counts too; `plan()` fills it in."""
    groups: int = 1
    """Groups of heads that take turns; each phase is the plan of one of them."""

    def phase(self, name: str) -> PhasePlan:
        """The plan of "forward" or "backward"."""
        if name == "forward":
            return self.forward
        if name != "backward":
            raise ValueError(f"phase must be 'forward' or 'backward', got {name!r}")
        if self.backward is None:
            raise ValueError("there is no backward: no input requires a gradient (requires_grad='')")
        return self.backward

    def row_order(self, rank: int, side: str) -> Tensor | None:
        """The shard's rows in the order that pieces and transfers count them; None where that is the shard's own.

        Next to a striped layout, consecutive tokens are ordered by remainder: then all rows are one stride apart, and a
        narrow mask needs ranges of them. `side` is "query" or "kv".
        """
        layout = self.layout if side == "query" else self.key_layout
        return layout.order_by_remainder(max(self.layout.stride, self.key_layout.stride), rank)

    def bytes_sent(self, rank: int, phase: str) -> int:
        """Bytes that `rank` hands to the transport in a phase, without the control channel."""
        return self.groups * self.phase(phase).bytes_sent(self._require_rank(rank))

    def flops(self, rank: int, phase: str) -> int:
        """Floating-point operations of the matrix products that `rank` computes in a phase."""
        return self.groups * self.phase(phase).flops(self._require_rank(rank))

    def direction(self, phase: str) -> str:
        """Which side moves: "kv" or "query"."""
        return self.phase(phase).direction

    @property
    def imbalance(self) -> float:
        """The busiest rank's work over the mean, less 1, in the worse phase."""
        return max(phase.imbalance for phase in (self.forward, self.backward) if phase)

    def peak_bytes(self, rank: int) -> int:
        """Most bytes that a call holds at once beyond the caller's q, k, v and dout: outputs, buffers and workspace."""
        from burst_attention.schedule.memory import peak_bytes

        return peak_bytes(self, self._require_rank(rank))

    def _require_rank(self, rank: int) -> int:
        if not 0 <= rank < self.layout.ring_size:
            raise ValueError(f"rank {rank} is outside a ring of {self.layout.ring_size}")
        return rank

    def __str__(self) -> str:
        from burst_attention.schedule.describe import describe

        return describe(self)
