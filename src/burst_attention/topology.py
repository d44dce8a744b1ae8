"""Topology: in which order blocks visit ranks, and over which kind of link each hop goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FlatRing:
    """One ring of all ranks. With step +1 block b visits b + 1, b + 2, ...; with step -1 it visits b - 1, b - 2, ...

    A rank's **distance** from a block's home counts those hops. In one round a rank computes with `coalesce` blocks, of
    neighbouring distances, and each block goes on to the rank that is `coalesce` further. So with coalesce = 2:

        round      0      1       2       3
        distance   home   1, 2    3, 4    5, 6    ...
    """

    size: int
    step: int = 1
    coalesce: int = 1

    def visitor(self, block: int, distance: int) -> int:
        """The rank at this distance from a block's home."""
        return (block + self.step * distance) % self.size

    def visiting(self, rank: int, distance: int) -> int:
        """The block whose home is at this distance from a rank."""
        return (rank - self.step * distance) % self.size

    @property
    def visiting_rounds(self) -> int:
        """Rounds after the first in which ranks compute with blocks of others."""
        return -(-(self.size - 1) // self.coalesce)

    def distances(self, round_index: int) -> range:
        """The distances that are computed in a round; round 0 is home."""
        if round_index == 0:
            return range(1)
        first = self.coalesce * (round_index - 1) + 1
        return range(first, min(first + self.coalesce, self.size))

    def round_of(self, distance: int) -> int:
        """The round in which a block is computed with at this distance."""
        return -(-distance // self.coalesce)

    def link(self, source: int, target: int) -> str:
        """The kind of link between two ranks; a flat ring knows one kind."""
        return "ring"
