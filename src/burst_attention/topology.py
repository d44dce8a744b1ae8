"""Topology: in which order blocks visit ranks, and over which kind of link each hop goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

INSIDE, BETWEEN = "inside", "between"
"""Links inside a host, and between hosts."""


class Stop(NamedTuple):
    """A place on a block's way: a host, by its distance from the block's own, and the turn of a rank there."""

    distance: int
    inner: int


@dataclass(frozen=True)
class DoubleRing:
    """A ring between hosts, and in each host a ring of its ranks; with one rank per host it is a flat ring.

    Ranks are numbered host by host. A block goes from host to host, up with step +1 and down with step -1; at each host
    it makes one **turn** over the ranks there, one a round. Its transfer to the next host begins with the turn and may
    take the whole of it. With two hosts of three ranks, block 0 is computed with

        round    0      1      2        3      4      5
        rank     0      1      2        3      4      5
                 home's turn            another host's turn

    A flat ring may compute with `coalesce` blocks in one round, of neighbouring distances: each then goes on to the
    rank that is `coalesce` further.

        round      0      1       2       3
        distance   home   1, 2    3, 4    5, 6    ...

    Under a causal mask blocks of earlier tokens give other pieces than blocks of later ones: in the zigzag layout all
    queries with half of the keys, or half of the queries with all keys. Two of one kind join to a large piece, which
    the first and the last block of the ring never do. So of two blocks at once, in a ring of evenly many ranks, every
    other block may begin with a round `alone`; then no rank has those two in one round:

        round      0      1       2       3
        distance   home   1       2, 3    4, 5    ...
    """

    size: int
    per_host: int = 1
    step: int = 1
    coalesce: int = 1
    staggered: bool = False
    """Whether every other block begins alone."""

    def __post_init__(self) -> None:
        if self.size % self.per_host:
            raise ValueError(f"{self.size} ranks cannot be {self.per_host} on every host")
        if self.per_host > 1 and self.coalesce > 1:
            raise ValueError(f"coalesce={self.coalesce} needs a flat ring; a double ring computes one block a round")
        if self.staggered and not self.can_be_staggered:
            raise ValueError("blocks begin alone only where two are computed at once, in a ring of evenly many ranks")

    @property
    def can_be_staggered(self) -> bool:
        return self.coalesce == 2 and self.size % 2 == 0

    @property
    def hosts(self) -> int:
        return self.size // self.per_host

    def rank_at(self, block: int, stop: Stop) -> int:
        """The rank that a block visits at a stop."""
        host, local = divmod(block, self.per_host)
        host = (host + self.step * stop.distance) % self.hosts
        return host * self.per_host + (local + stop.inner) % self.per_host

    def block_at(self, rank: int, stop: Stop) -> int:
        """The block that visits a rank at a stop."""
        host, local = divmod(rank, self.per_host)
        host = (host - self.step * stop.distance) % self.hosts
        return host * self.per_host + (local - stop.inner) % self.per_host

    @property
    def turns(self) -> int:
        """Turns of all ranks of a host: home's, and those of other hosts' blocks."""
        return 1 - (-(self.hosts - 1) // self.coalesce)

    @property
    def visiting_rounds(self) -> int:
        """Rounds after the first in which ranks compute with blocks of others."""
        return self.turns * self.per_host - 1

    def alone(self, block: int) -> bool:
        """Whether a block visits one rank in its first round where others visit two."""
        return self.staggered and block % 2 == (self.step > 0)

    def distances(self, turn: int, block: int) -> range:
        """The distances of the hosts that compute with a block in a turn; turn 0 is home's."""
        if turn == 0:
            return range(1)
        first = self.coalesce * (turn - 1) + 1 - self.alone(block)
        return range(max(first, 1), min(first + self.coalesce, self.hosts))

    def visitors(self, round_index: int, rank: int) -> list[tuple[int, Stop]]:
        """The blocks that a rank computes with in a round, each with the stop that it makes there."""
        turn, inner = divmod(round_index, self.per_host)
        near = range(max(self.coalesce * (turn - 1), 1), min(self.coalesce * turn + 1, self.hosts)) if turn else (0,)
        pairs = ((self.block_at(rank, Stop(distance, inner)), Stop(distance, inner)) for distance in near)
        return [(block, stop) for block, stop in pairs if stop.distance in self.distances(turn, block)]

    def before(self, distance: int, block: int) -> int:
        """The distance that a block comes from; 0 is home.

        One that was alone at a rank goes on from there to both of the next round, for home has its room for others.
        """
        return 1 if self.alone(block) and distance == 2 else max(distance - self.coalesce, 0)

    def first_round(self, distance: int, block: int) -> int:
        """The round in which a block's turn at a distance begins."""
        return -(-(distance + self.alone(block) * (distance > 0)) // self.coalesce) * self.per_host

    def ends_turn(self, round_index: int) -> bool:
        """Whether a round is the last of a turn, in a ring whose turns have several."""
        return self.per_host > 1 and (round_index + 1) % self.per_host == 0

    def link(self, source: int, target: int) -> str:
        """The kind of link between two ranks."""
        return INSIDE if source // self.per_host == target // self.per_host else BETWEEN
