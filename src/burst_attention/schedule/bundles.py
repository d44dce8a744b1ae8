"""What travels: bundles of named fields, one row per token, every field padded to 16 bytes.

A direction is a choice of bundle, not another loop. The moving side's operands go out from their home and visit
ranks; results (gradients, or partial attention states) are born at the first remote rank and end at home.

    row of a key-side block:    | k: B G D | v: B G E |          result:  | dk | dv |
    row of a query-side block:  | q: B H D | dout: B H E | lse: B H | delta: B H |   result:  | dq |

Rows are token-major with all fields of a token together, so the rows a later rank needs are one slice of the block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

ROW_ALIGNMENT = 16

Heads = tuple[int, int]
"""Query heads [first, last) of some work."""

DIRECTIONS = ("kv", "query")

KEY_SIDE = ("k", "v", "dk", "dv")
"""Tensors with a row for each key; the others have one for each query."""

OPERANDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("forward", "kv"): ("k", "v"),
    ("forward", "query"): ("q",),
    ("backward", "kv"): ("k", "v"),
    ("backward", "query"): ("q", "dout", "lse", "delta"),
}

RESULTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("forward", "kv"): (),
    ("forward", "query"): ("acc", "peak", "total"),
    ("backward", "kv"): ("dk", "dv"),
    ("backward", "query"): ("dq",),
}


@dataclass(frozen=True)
class Shapes:
    """Everything about the tensors but their lengths."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype

    def halves(self) -> tuple[Heads, Heads] | None:
        """The query heads in two near-equal parts that share no key head, if there are two; None for a single head."""
        middle = (self.kv_heads + 1) // 2 * (self.heads // self.kv_heads) if self.kv_heads > 1 else self.heads // 2
        return ((0, middle), (middle, self.heads)) if 0 < middle < self.heads else None

    def key_heads(self, heads: Heads) -> Heads:
        """The key heads that some query heads attend to."""
        per_key = self.heads // self.kv_heads
        return heads[0] // per_key, -(-heads[1] // per_key)

    def of_heads(self, heads: Heads | None) -> Shapes:
        """The shapes with some of the query heads, and their key heads, alone."""
        if heads is None:
            return self
        first, last = self.key_heads(heads)
        return replace(self, heads=heads[1] - heads[0], kv_heads=last - first)

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """What outputs, gradients and row statistics accumulate in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Field:
    """One tensor (batch, heads, rows, dim) inside a bundle's rows; dim 0 is a row statistic (batch, heads, rows)."""

    name: str
    batch: int
    heads: int
    dim: int
    dtype: torch.dtype
    offset: int

    @property
    def row_bytes(self) -> int:
        return self.batch * self.heads * max(self.dim, 1) * self.dtype.itemsize


@dataclass(frozen=True)
class Bundle:
    """The fields of one token's row, in order."""

    fields: tuple[Field, ...]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes per token on the wire and in a buffer, padding included."""
        last = self.fields[-1] if self.fields else None
        return _aligned(last.offset + last.row_bytes) if last else 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    @property
    def statistics(self) -> tuple[Field, ...]:
        """Its fields with one number per row and head."""
        return tuple(field for field in self.fields if not field.dim)


def make_bundle(names: tuple[str, ...], shapes: Shapes, wire_dtype: torch.dtype | None = None) -> Bundle:
    """Lay out named fields in a row. `wire_dtype` replaces the accumulators' dtype, never that of row statistics."""
    accumulate = shapes.accumulate_dtype
    wire = wire_dtype or accumulate
    query, value, key = (
        (shapes.heads, shapes.head_dim),
        (shapes.heads, shapes.value_dim),
        (shapes.kv_heads, shapes.head_dim),
    )
    kinds: dict[str, tuple[int, int, torch.dtype]] = {
        "q": (*query, shapes.dtype),
        "k": (*key, shapes.dtype),
        "v": (shapes.kv_heads, shapes.value_dim, shapes.dtype),
        "out": (*value, shapes.dtype),
        "dout": (*value, shapes.dtype),
        "dq": (*query, wire),
        "dk": (*key, wire),
        "dv": (shapes.kv_heads, shapes.value_dim, wire),
        "acc": (*value, wire),
        "lse": (shapes.heads, 0, accumulate),
        "dlse": (shapes.heads, 0, accumulate),
        "delta": (shapes.heads, 0, accumulate),
        "peak": (shapes.heads, 0, accumulate),
        "total": (shapes.heads, 0, accumulate),
    }
    fields: list[Field] = []
    offset = 0
    for name in names:
        heads, dim, dtype = kinds[name]
        fields.append(Field(name, shapes.batch, heads, dim, dtype, offset))
        offset = _aligned(offset + fields[-1].row_bytes)
    return Bundle(tuple(fields))


def moved_fields(phase: str, direction: str, needs: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(operands, results) that travel when the inputs in `needs`, letters of "qkv", want gradients."""
    operands, results = OPERANDS[phase, direction], RESULTS[phase, direction]
    if phase == "backward":
        results = tuple(name for name in results if name[1] in needs)
    return operands, results


def _aligned(size: int) -> int:
    return -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT
