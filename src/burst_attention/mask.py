"""Masks: which (query position i, key position j) pairs exist, whatever the layout.

A mask is a small expression, printed as it is written in Python, and reduces to disjoint bands:

    causal()          window(2)         documents([2, 2])   prefix(1)         causal() | prefix(2)
    j 0 1 2 3         j 0 1 2 3         j 0 1 2 3           j 0 1 2 3         j 0 1 2 3
    0 # . . .         0 # # . .         0 # # . .           0 # . . .         0 # # . .
    1 # # . .         1 # # # .         1 # # . .           1 # . . .         1 # # . .
    2 # # # .         2 . # # #         2 . . # #           2 # . . .         2 # # # .
    3 # # # #         3 . . # #         3 . . # #           3 # . . .         3 # # # #
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from burst_attention.geometry import UNBOUNDED, Band, intersect, subtract


@dataclass(frozen=True)
class Mask:
    """An attention mask by global positions. Build it with `causal()`, `window()`, ... and compose with `&` and `|`."""

    name: str
    args: tuple[Any, ...] = ()

    def __and__(self, other: Mask) -> Mask:
        return Mask("&", (self, _mask_operand(other, "&")))

    def __or__(self, other: Mask) -> Mask:
        return Mask("|", (self, _mask_operand(other, "|")))

    def __str__(self) -> str:
        if self.name not in "&|":
            return f"{self.name}({', '.join(_argument_text(arg) for arg in self.args)})"
        sides = (f"({side})" if side.name in "&|" and side.name != self.name else str(side) for side in self.args)
        # Both operators associate to the left when the text is parsed, so a right operand keeps its brackets.
        left, right = sides
        if self.args[1].name == self.name:
            right = f"({right})"
        return f"{left} {self.name} {right}"

    def __repr__(self) -> str:
        return str(self)

    @cached_property
    def bands(self) -> tuple[Band, ...]:
        """The mask as disjoint bands."""
        if self.name == "&":
            left, right = (side.bands for side in self.args)
            return tuple(both for a in left for b in right if (both := intersect(a, b)))
        if self.name == "|":
            left, right = (side.bands for side in self.args)
            rest = list(right)
            for a in left:
                rest = [part for b in rest for part in subtract(b, a)]
            return (*left, *rest)
        return tuple(_BANDS[self.name](*self.args))

    def require_cover(self, query_end: int, key_end: int) -> None:
        """Refuse positions that documents or blocks in this mask say nothing about."""
        for part in self._parts():
            if part.name == "documents":
                total = sum(part.args[0])
                if max(query_end, key_end) > total:
                    raise ValueError(
                        f"documents(...) covers {total} tokens but positions go up to {max(query_end, key_end)}; "
                        "give every token a document (the rest can be one more document)"
                    )
            if part.name == "blocks":
                matrix, block = part.args
                rows, cols = len(matrix) * block, len(matrix[0]) * block
                if query_end > rows or key_end > cols:
                    raise ValueError(
                        f"blocks(...) of {len(matrix)} x {len(matrix[0])} blocks of {block} covers {rows} queries and "
                        f"{cols} keys, but positions go up to {max(query_end, key_end)}; give a larger matrix"
                    )

    def _parts(self) -> Iterator[Mask]:
        if self.name in "&|":
            for side in self.args:
                yield from side._parts()
        else:
            yield self


def full() -> Mask:
    """Every pair: the same as `mask=None`."""
    return Mask("full")


def causal() -> Mask:
    """Keys at or before the query: j <= i."""
    return Mask("causal")


def window(size: int) -> Mask:
    """Keys nearer than `size` on either side: |i - j| < size. With `causal() &` it looks back over `size` keys."""
    return Mask("window", (_whole(size, "window(size)", 1),))


def documents(lengths: Sequence[int]) -> Mask:
    """Pairs inside one document, for consecutive documents of these lengths in tokens."""
    if not hasattr(lengths, "__len__") and not hasattr(lengths, "__iter__"):
        raise ValueError(f"documents(lengths) takes a list of lengths in tokens, got {lengths!r}")
    values = [value.tolist() if hasattr(value, "tolist") else value for value in lengths]
    if any(isinstance(value, list | tuple) for value in values):
        raise ValueError(
            "documents(lengths) takes one list of lengths for the whole batch, not one per batch row; "
            "pack the rows into B = 1, one after the other, and list all their documents"
        )
    if not values:
        raise ValueError("documents(lengths) needs at least one document, got an empty list")
    return Mask("documents", (tuple(_whole(value, "documents(lengths)", 1) for value in values),))


def prefix(length: int) -> Mask:
    """The first `length` keys, for every query: j < length. `causal() | prefix(n)` is a prefix-LM."""
    return Mask("prefix", (_whole(length, "prefix(length)", 0),))


def blocks(matrix: Sequence[Sequence[Any]] | Any, block: int) -> Mask:
    """Block-sparse: pairs where matrix[i // block, j // block] is true. A nested list or a 2-D tensor."""
    rows = matrix.tolist() if hasattr(matrix, "tolist") else matrix
    rows = list(rows) if hasattr(rows, "__iter__") else []
    flat = all(hasattr(row, "__len__") and len(row) == len(rows[0]) > 0 for row in rows)
    if (
        not rows
        or not flat
        or any(hasattr(cell, "__len__") and not isinstance(cell, str) for row in rows for cell in row)
    ):
        raise ValueError("blocks(matrix, block) needs a 2-D matrix with at least one row and rows of equal length")
    bits = tuple("".join("1" if cell not in (0, False, "0") else "0" for cell in row) for row in rows)
    return Mask("blocks", (bits, _whole(block, "blocks(matrix, block)", 1)))


def _full_bands() -> list[Band]:
    return [Band(0, UNBOUNDED, 0, UNBOUNDED)]


def _causal_bands() -> list[Band]:
    return [Band(0, UNBOUNDED, 0, UNBOUNDED, low=0)]


def _window_bands(size: int) -> list[Band]:
    return [Band(0, UNBOUNDED, 0, UNBOUNDED, low=1 - size, high=size)]


def _document_bands(lengths: tuple[int, ...]) -> list[Band]:
    ends = list(accumulate(lengths))
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    return [Band(start, end, start, end) for start, end in zip(starts, ends, strict=True)]


def _prefix_bands(length: int) -> list[Band]:
    return [Band(0, UNBOUNDED, 0, length)] if length else []


def _block_bands(matrix: tuple[str, ...], block: int) -> list[Band]:
    """Rectangles: runs of ones in a row, joined with the same run in the rows below."""
    done: list[Band] = []
    growing: dict[tuple[int, int], int] = {}
    for row, bits in enumerate((*matrix, "")):
        runs = set(_runs_of_ones(bits))
        for j0, j1 in [run for run in growing if run not in runs]:
            done.append(Band(growing.pop((j0, j1)) * block, row * block, j0 * block, j1 * block))
        for run in runs:
            growing.setdefault(run, row)
    return sorted(done)


def _runs_of_ones(bits: str) -> Iterator[tuple[int, int]]:
    start = bits.find("1")
    while start >= 0:
        end = bits.find("0", start)
        end = len(bits) if end < 0 else end
        yield start, end
        start = bits.find("1", end)


_BANDS: dict[str, Callable[..., list[Band]]] = {
    "full": _full_bands,
    "causal": _causal_bands,
    "window": _window_bands,
    "documents": _document_bands,
    "prefix": _prefix_bands,
    "blocks": _block_bands,
}

_PARSING = threading.Lock()

_BUILDERS: dict[str, Callable[..., Mask]] = {
    "full": full,
    "causal": causal,
    "window": window,
    "documents": documents,
    "prefix": prefix,
    "blocks": blocks,
}


def parse_mask(text: str) -> Mask:
    """Read a mask back from its text, e.g. "causal() & (window(64) | prefix(4))". Nothing is evaluated."""
    try:
        return mask_from_node(parse_expression(text))
    except (SyntaxError, ValueError, TypeError) as error:
        names = ", ".join(_BUILDERS)
        raise ValueError(f"cannot read mask {text!r}: {error}; use {names}, composed with & and |") from None


def parse_expression(text: str) -> ast.expr:
    """The syntax tree of an expression. Python 3.11's parser can fail when two threads are in it: one at a time."""
    with _PARSING:
        return ast.parse(text.strip(), mode="eval").body


def mask_from_node(node: ast.AST) -> Mask:
    """Build a mask from a parsed expression of calls, `&` and `|`; a bare name is a call without arguments."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        left, right = mask_from_node(node.left), mask_from_node(node.right)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    if isinstance(node, ast.Name) and node.id in _BUILDERS:
        return _BUILDERS[node.id]()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BUILDERS:
        if node.keywords:
            raise ValueError("arguments go by position")
        return _BUILDERS[node.func.id](*(ast.literal_eval(arg) for arg in node.args))
    raise ValueError(f"{ast.unparse(node)!r} is not a mask")


def _argument_text(arg: Any) -> str:
    return repr(list(arg)) if isinstance(arg, tuple) else repr(arg)


def _mask_operand(value: object, operator: str) -> Mask:
    if not isinstance(value, Mask):
        raise TypeError(f"a mask composes by {operator} with another mask, not with {type(value).__name__}")
    return value


def _whole(value: Any, where: str, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < least:
        raise ValueError(f"{where} takes whole numbers of at least {least}, got {value!r}")
    return int(value.__index__())
