"""Topology: in which order blocks visit ranks, and over which kind of link each hop goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FlatRing:
    """One ring of all ranks. With step +1 block b visits b + 1, b + 2, ...; with step -1 it visits b - 1, b - 2, ..."""

    size: int
    step: int = 1

    def visitor(self, block: int, round_index: int) -> int:
        """The rank that computes with `block` in this round; round 0 is its home."""
        return (block + self.step * round_index) % self.size

    def visiting(self, rank: int, round_index: int) -> int:
        """The block that `rank` computes with in this round."""
        return (rank - self.step * round_index) % self.size

    def link(self, source: int, target: int) -> str:
        """The kind of link between two ranks; a flat ring knows one kind."""
        return "ring"
