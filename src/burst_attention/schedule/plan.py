"""The plan: for each rank, rounds of pieces to compute and transfers to make. Data only; nothing here runs it.

In round t a rank posts the transfers listed there, computes the round's pieces, then waits for those transfers.
Operands posted in round t are computed with in round t + 1. Results computed in round t are posted in round t + 1,
towards the next visitor or home. Round 0 and the last round compute home's own pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from burst_attention.geometry import Piece, Rows, count_rows
from burst_attention.layout import Layout
from burst_attention.mask import Mask
from burst_attention.schedule.bundles import Bundle, Shapes
from burst_attention.topology import FlatRing

OPERAND = "operand"
RESULT = "result"


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

    @property
    def row_count(self) -> int:
        return count_rows(self.rows)


@dataclass(frozen=True)
class Round:
    """What one rank does in a round. `held` are the rows of `block` at hand, `result_rows` those its results cover."""

    index: int
    block: int
    pieces: tuple[Piece, ...]
    held: Rows
    result_rows: Rows
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


@dataclass(frozen=True)
class PhasePlan:
    """One phase, forward or backward, with one side moving: the rounds of every rank."""

    phase: str
    direction: str
    topology: FlatRing
    operands: Bundle
    results: Bundle
    shapes: Shapes
    needs: str
    local_rows: tuple[int, ...]
    """Rows of the moving side that each rank is home to."""
    rounds: tuple[tuple[Round, ...], ...]

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

    def pairs(self, rank: int) -> int:
        """Allowed (query, key) pairs that a rank computes."""
        return sum(piece.pairs for step in self.rounds[rank] for piece in step.pieces)

    def flops(self, rank: int) -> int:
        """Floating-point operations of the matrix products this rank needs for its pairs."""
        dim, value = self.shapes.head_dim, self.shapes.value_dim
        if self.phase == "forward":
            per_pair = 2 * dim + 2 * value
        else:
            # Scores and dP are always rebuilt; then one product per gradient that is wanted.
            per_pair = 2 * dim + 2 * value
            per_pair += 2 * dim * (("q" in self.needs) + ("k" in self.needs)) + 2 * value * ("v" in self.needs)
        return self.pairs(rank) * per_pair * self.shapes.heads * self.shapes.batch

    @cached_property
    def imbalance(self) -> float:
        """The busiest rank's pairs over the mean, less 1."""
        pairs = [self.pairs(rank) for rank in range(self.topology.size)]
        return max(pairs) * len(pairs) / sum(pairs) - 1 if sum(pairs) else 0.0

    def slot_rows(self, rank: int) -> tuple[int, ...]:
        """Rows of each operand buffer of a rank: two in turn, and one more for what home sends after round 0."""
        sizes = [0, 0, 0]
        for step in self.rounds[rank]:
            for transfer in step.receives:
                if transfer.channel == OPERAND:
                    slot = (step.index + 1) % 2
                    sizes[slot] = max(sizes[slot], transfer.row_count)
            for transfer in step.sends:
                if transfer.channel == OPERAND and transfer.block == rank:
                    # Round 0 packs home's block into the slot that is received into one round later.
                    slot = 0 if step.index == 0 else 2
                    sizes[slot] = max(sizes[slot], transfer.row_count)
        return tuple(sizes)

    def result_slot_rows(self, rank: int) -> tuple[int, int, int]:
        """Rows of the buffers for results: being computed, received for a visiting block, and received for home.

        The two kinds of receives share one buffer unless some round has both.
        """
        steps = self.rounds[rank]
        computed = max((count_rows(step.result_rows) for step in steps), default=0)
        arrivals = [(step.index, t) for step in steps for t in step.receives if t.channel == RESULT]
        home = {index: t.row_count for index, t in arrivals if t.block == rank}
        visiting = {index: t.row_count for index, t in arrivals if t.block != rank}
        if home.keys() & visiting.keys():
            return computed, max(visiting.values()), max(home.values())
        return computed, max((*home.values(), *visiting.values()), default=0), 0


@dataclass(frozen=True)
class Plan:
    """What a call runs, forward and backward, on every rank."""

    mask: Mask
    layout: Layout
    key_layout: Layout
    forward: PhasePlan
    backward: PhasePlan | None
    workspace: Callable[[PhasePlan, Round, bool], int] | None = None
    """Bytes that the kernel allocates for itself in a round, visiting or at home; `plan()` fills it in."""

    def phase(self, name: str) -> PhasePlan:
        """The plan of "forward" or "backward"."""
        if name == "forward":
            return self.forward
        if name != "backward":
            raise ValueError(f"phase must be 'forward' or 'backward', got {name!r}")
        if self.backward is None:
            raise ValueError("there is no backward: no input requires a gradient (requires_grad='')")
        return self.backward

    def bytes_sent(self, rank: int, phase: str) -> int:
        """Bytes that `rank` hands to the transport in a phase, without the control channel."""
        return self.phase(phase).bytes_sent(self._require_rank(rank))

    def flops(self, rank: int, phase: str) -> int:
        """Floating-point operations of the matrix products that `rank` computes in a phase."""
        return self.phase(phase).flops(self._require_rank(rank))

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

        return peak_bytes(self, self._require_rank(rank), self.workspace or (lambda phase, step, visiting: 0))

    def _require_rank(self, rank: int) -> int:
        if not 0 <= rank < self.layout.ring_size:
            raise ValueError(f"rank {rank} is outside a ring of {self.layout.ring_size}")
        return rank

    def __str__(self) -> str:
        from burst_attention.schedule.describe import describe

        return describe(self)
