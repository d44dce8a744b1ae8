"""The exactness matrix as data: its axes, a pairwise cover of them, and how one cell is run."""

from __future__ import annotations

import itertools
import os
import random
from functools import partial
from typing import Any

import torch
from torch import Tensor

from burst_attention import Ring, blocks, run_ranks
from burst_attention.exactness import Finding, Problem, Sharding, gather, judge, run_rank

HEAD_DIM = 16
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
HEADS = {"MHA": (4, 4), "GQA4": (8, 2), "MQA": (4, 1)}
LONG, LONG_HEADS = 4096, {"MHA": (2, 2), "GQA4": (4, 1), "MQA": (2, 1)}
"""The longest sequences have half the heads: heads do not meet, and the whole matrix takes hours as it is."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RING_SIZES = (1, 2, 3, 4, 8)
DIRECTIONS = ("kv", "query")
LENGTHS = (1, 37, 111, 257, 1000, 4096)
FEW_TOKENS, FEW_TOKENS_BATCH = 16, 32


def document_lengths(tokens: int) -> list[int]:
    """Consecutive documents of uneven lengths, among them one of a single token."""
    lengths = [1, tokens // 5, tokens // 2]
    return [length for length in (*lengths, tokens - sum(lengths)) if length > 0] if tokens > 4 else [tokens]


def block_matrix(tokens: int) -> str:
    """A random block mask whose second row of blocks is empty where there is one: those queries see nothing."""
    block = max(tokens // 7, 1)
    count = -(-tokens // block)
    chance = random.Random(count)
    matrix = [[chance.random() < 0.45 or row == col == 0 for col in range(count)] for row in range(count)]
    if count > 2:
        matrix[1] = [False] * count
    return str(blocks(matrix, block))


def masks(tokens: int) -> dict[str, str]:
    """Every mask of the matrix for a length, by a short name."""
    # At least two keys per row: where every row sees one, dq and dk are 0 and the rule leaves no room for rounding.
    size, head = max(tokens // 6, 2), max(tokens // 9, 2)
    packed = f"documents({document_lengths(tokens)})"
    return {
        "full": "full()",
        "causal": "causal()",
        "window": f"window({size})",
        "documents": packed,
        "prefix": f"prefix({head})",
        "blocks": block_matrix(tokens),
        "causal-window": f"causal() & window({size})",
        "causal-documents": f"causal() & {packed}",
        "prefix-lm": f"causal() | prefix({head})",
        "streaming": f"causal() & (window({size}) | prefix(4))",
        "packed-window": f"causal() & {packed} & window({size})",
    }


MASKS = tuple(masks(37))
AXES = (LAYOUTS, MASKS, tuple(HEADS), tuple(DTYPES), RING_SIZES, DIRECTIONS, DIRECTIONS, LENGTHS)
Cell = tuple[str, str, str, str, int, str, str, int]


def pairwise_cover(seed: int = 0, axes: tuple[tuple[Any, ...], ...] = AXES) -> list[Any]:
    """Few cells in which every pair of values of any two axes occurs together, chosen greedily."""
    chance = random.Random(seed)
    wanted = {(a, x, b, y) for a, b in itertools.combinations(range(len(axes)), 2) for x in axes[a] for y in axes[b]}
    cells = []
    while wanted:
        a, x, b, y = min(wanted, key=repr)
        candidates = []
        for _ in range(60):
            cell = [chance.choice(axis) for axis in axes]
            cell[a], cell[b] = x, y
            candidates.append(tuple(cell))
        best = max(candidates, key=lambda cell: len(_pairs(cell) & wanted))
        wanted -= _pairs(best)
        cells.append(best)
    return cells


def _pairs(cell: tuple[object, ...]) -> set[tuple[object, ...]]:
    return {(a, cell[a], b, cell[b]) for a, b in itertools.combinations(range(len(cell)), 2)}


def problem_of(mask: str, heads: str, dtype: str, tokens: int, seed: int = 0) -> Problem:
    """The whole problem of a cell. A few tokens come in a batch: the rule compares errors of many numbers."""
    batch = FEW_TOKENS_BATCH if 1 < tokens < FEW_TOKENS else 1
    counts = (LONG_HEADS if tokens >= LONG else HEADS)[heads]
    return Problem(tokens, masks(tokens)[mask], *counts, HEAD_DIM, DTYPES[dtype], seed, batch)


def run_cell(problem: Problem, sharding: Sharding) -> list[Finding]:
    """Run one cell on threads and judge it."""
    per_host = sharding.per_host if sharding.per_host > 1 else None
    return judge(problem, gather(problem, sharding, run_on_threads(problem, sharding, per_host)))


def run_on_threads(problem: Problem, sharding: Sharding, ranks_per_host: int | None = None) -> list[tuple[Tensor, ...]]:
    """Every rank's results. Ranks stay on one core: on two they fight for Python's lock, and take twice as long."""
    body = partial(run_rank, problem=problem, sharding=sharding)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    try:
        if cores:
            os.sched_setaffinity(0, {max(cores)})
        return run_ranks(body, sharding.ring_size, timeout=120, ranks_per_host=ranks_per_host)
    finally:
        if cores:
            os.sched_setaffinity(0, cores)


def run_directions(problem: Problem, ring_size: int, layout: str) -> dict[Sharding, list[Finding]]:
    """Both directions in both phases on one ring of threads."""
    shardings = [Sharding(ring_size, layout, *pair) for pair in itertools.product(DIRECTIONS, repeat=2)]

    def body(ring: Ring) -> list[tuple[Tensor, ...]]:
        found: list[tuple[Tensor, ...]] = []
        lse: dict[str, Tensor] = {}
        for sharding in shardings:
            found.append(run_rank(ring, problem, sharding, lse.get(sharding.forward_direction)))
            lse[sharding.forward_direction] = found[-1][1]
        return found

    shards = run_ranks(body, ring_size, timeout=600)
    return {
        sharding: judge(problem, gather(problem, sharding, [shard[index] for shard in shards]))
        for index, sharding in enumerate(shardings)
    }


def require_exact(problem: Problem, sharding: Sharding, findings: list[Finding]) -> None:
    """Fail with every broken rule by name."""
    broken = [finding for finding in findings if not finding.holds]
    assert not broken, f"{problem} {sharding}: {broken}"
