"""Pieces as a table that a GPU kernel walks: for each block of rows, which ranges of the other side it meets.

An entry is a piece inside one block of rows, with four bounds on the other side. Between `some` and `every` a pair may
be missing and the kernel compares positions; inside `every` all pairs exist and it does not; outside `some` there is
nothing, and nothing is visited.

    one block of rows, keys left to right:    . . m m # # # # m . .
                                                  |   |       | |
                                         some_first   every   some_last
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from burst_attention.geometry import Piece

ENTRY_FIELDS = 9
"""some_first, every_first, every_last, some_last, row0, rows, col0, low, high."""
UNEVEN = 0.75
"""Of the heaviest block's work: where the mean of all is less, heads take turns."""
MOST_BLOCKS, MOST_GROUPS = 65532, 65535
"""Of one launch: a grid's second and third size may be 65535. A multiple of 4 blocks, so that those of the next launch
are aligned as the first's are."""
MOST_PARTS, NEARLY = 4, 1.05
"""Of the query heads of a key head; and times a share that a core may have."""
INTERPRETED = 50 * 2**20
"""Bytes of a cache where there is no GPU: that of an H100."""


class BlockTable(NamedTuple):
    """`blocks` (n, 3): row block, first entry, last entry; heaviest first. `entries` (m, ENTRY_FIELDS), int32 both."""

    blocks: Tensor
    entries: Tensor
    uneven: bool
    """Whether some blocks are much lighter than others."""
    heaviest: int
    """Rows of the other side that the first block meets."""
    work: int
    """And all of them."""

    def launches(self, pairs: int, walked: Sequence[Tensor]) -> Iterator[tuple[tuple[int, int, int], Tensor]]:
        """(grid, blocks) of each launch for B * H heads, mostly one; the grid is (heads in turns, blocks, groups).

        A chip begins programs in order. Head by head the last head's heaviest block begins when all others are nearly
        done; where heads take turns at their blocks, the lightest of all are last. What blocks of these heads walk
        over, tensors (B, heads, rows, D), is to fit the cache. Three heads of three blocks on four cores, a digit for
        each step:

            head by head    000222    in turns    00022
                            00122                 11102
                            0112                  2221
                            111                   0011
        """
        together = 1
        if self.uneven:
            # Heads of a group are walked over one after the other, or all walk over the same.
            head_bytes = sum(x.shape[2] * x.shape[3] * x.element_size() for x in walked)
            most = min(_cache_bytes(self.blocks.device) // head_bytes, pairs)
            together = max((count for count in range(1, most + 1) if pairs % count == 0), default=1)
        if pairs // together > MOST_GROUPS:
            fitting = (count for count in range(together, pairs + 1) if pairs // count <= MOST_GROUPS)
            together = next(count for count in fitting if pairs % count == 0)
        parts = (self.blocks,) if len(self.blocks) <= MOST_BLOCKS else torch.split(self.blocks, MOST_BLOCKS)
        for blocks in parts:
            yield (together, len(blocks), pairs // together), blocks


def parts_of_heads(table: BlockTable, pairs: int, heads: int, device: torch.device) -> int:
    """In how many parts query heads that a program walks over one after the other are better cut, each a program.

    As few as keep the heaviest program from taking longer than all take on average; uncut a block has `pairs` of them.
    """
    share = NEARLY * table.work * heads * pairs / _cores(device)
    fitting = [parts for parts in range(1, min(heads, MOST_PARTS) + 1) if heads % parts == 0]
    return next((parts for parts in fitting if table.heaviest * heads / parts <= share), fitting[-1])


@lru_cache(maxsize=16)
def _cores(device: torch.device) -> int:
    """Of a GPU; where there is none, those of an H100."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=16)
def _cache_bytes(device: torch.device) -> int:
    """Of the cache that all cores of a GPU share."""
    if device.type != "cuda":
        return INTERPRETED
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


@lru_cache(maxsize=256)
def block_table(
    pieces: tuple[Piece, ...], by_keys: bool, row_block: int, col_block: int, device: torch.device
) -> BlockTable:
    """The table of a round's pieces by blocks of query rows, or of key rows, on a device.

    Built once for the same pieces: a plan's rounds come again in every layer and step.
    """
    parts = [_entries(_transposed(piece) if by_keys else piece, row_block, col_block) for piece in pieces]
    owners, entries = torch.cat([owner for owner, _ in parts]), torch.cat([entry for _, entry in parts])
    order = torch.argsort(owners, stable=True)
    owners, entries = owners[order], entries[order]
    blocks, counts = torch.unique_consecutive(owners, return_counts=True)
    last = counts.cumsum(0)
    work = torch.zeros(len(blocks), dtype=torch.int64)
    work.index_add_(0, torch.repeat_interleave(torch.arange(len(blocks)), counts), entries[:, 3] - entries[:, 0])
    table = torch.stack([blocks, last - counts, last], 1)[torch.argsort(work, descending=True, stable=True)]
    uneven = bool(work.double().mean() < UNEVEN * work.max())
    # From pinned memory the copy would need an event to outlive; a blocking copy happens once per table.
    heaviest, total = int(work.max()), int(work.sum())
    return BlockTable(table.int().to(device), entries.int().to(device), uneven, heaviest, total)


def _transposed(piece: Piece) -> Piece:
    """The same pairs with rows and columns exchanged: low <= x - y < high is -high < y - x <= -low."""
    return Piece(piece.k_first, piece.k_count, piece.q_first, piece.q_count, 1 - piece.high, 1 - piece.low)


def _entries(piece: Piece, row_block: int, col_block: int) -> tuple[Tensor, Tensor]:
    """(row block of each entry, entries) of one piece whose rows are cut into blocks."""
    first, last = piece.q_first // row_block, (piece.q_first + piece.q_count - 1) // row_block + 1
    blocks = torch.arange(first, last)
    # Rows of the piece in each block, counted from the piece's first.
    x0 = (blocks * row_block - piece.q_first).clamp(min=0)
    x1 = (blocks * row_block + row_block - piece.q_first).clamp(max=piece.q_count) - 1
    some_first, every_last = _key_range(piece, x0)
    every_first, some_last = _key_range(piece, x1)
    # Rows of the block outside the piece see nothing of it, so no pair of columns is seen by every row.
    whole = x1 - x0 == row_block - 1
    every_first = torch.where(whole, every_first, some_last)
    # Whole blocks of columns, counted from the first one visited.
    steps = -(-(every_first - some_first) // col_block)
    every_first = torch.minimum(some_first + steps * col_block, some_last)
    steps = (every_last - every_first).clamp(min=0) // col_block
    every_last = torch.where(whole, every_first + steps * col_block, every_first)
    constants = (piece.q_first, piece.q_count, piece.k_first, piece.low, piece.high)
    columns = [bound + piece.k_first for bound in (some_first, every_first, every_last, some_last)]
    columns += [torch.full_like(blocks, value) for value in constants]
    entries = torch.stack(columns, 1)
    wanted = some_last > some_first
    return blocks[wanted], entries[wanted]


def _key_range(piece: Piece, x: Tensor) -> tuple[Tensor, Tensor]:
    """`Piece.key_range` of many rows."""
    return (x - piece.high + 1).clamp(min=0), (x - piece.low + 1).clamp(max=piece.k_count)
