"""Every cell of the exactness matrix: `make test-all`. A row per problem is kept as JSON lines."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path

import pytest

from burst_attention.check import _share_of_limit
from burst_attention.exactness import Sharding
from tests.ring import matrix
from tests.ring.matrix import problem_of, require_exact, run_cell

RESULTS = Path(os.environ.get("BURST_MATRIX_RESULTS", "benchmarks/results/exactness.jsonl"))
PROBLEMS = list(itertools.product(matrix.LENGTHS, matrix.MASKS, matrix.HEADS, matrix.DTYPES))
SHARDINGS = [
    Sharding(ring_size, layout, forward, backward)
    for ring_size in matrix.RING_SIZES
    for layout in matrix.LAYOUTS
    for forward in matrix.DIRECTIONS
    for backward in matrix.DIRECTIONS
]


@pytest.mark.matrix
@pytest.mark.parametrize(("tokens", "mask", "heads", "dtype"), PROBLEMS)
def test_every_sharding_is_exact(tokens: int, mask: str, heads: str, dtype: str) -> None:
    problem = problem_of(mask, heads, dtype, tokens)
    started, worst, where = time.perf_counter(), 0.0, ""
    for sharding in SHARDINGS:
        findings = run_cell(problem, sharding)
        require_exact(problem, sharding, findings)
        for finding in findings:
            if (share := _share_of_limit(finding)) > worst:
                worst, where = share, f"{finding.name} {sharding}"
    row = {
        "suite": "exactness",
        "tokens": tokens,
        "mask": mask,
        "heads": heads,
        "dtype": dtype,
        "cells": len(SHARDINGS),
    }
    row |= {"worst_share_of_limit": round(worst, 4), "at": where, "seconds": round(time.perf_counter() - started, 1)}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
