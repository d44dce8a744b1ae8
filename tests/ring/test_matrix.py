"""Every cell of the exactness matrix: `make test-all`. A row per problem is kept as JSON lines.

It takes hours on two cores. BURST_MATRIX_PART="2/8" runs the third of eight parts, for as many cores or machines.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path

import pytest

from burst_attention.bench import machine
from burst_attention.check import share_of_limit
from tests.ring import matrix
from tests.ring.matrix import problem_of, require_exact, run_directions

RESULTS = Path(os.environ.get("BURST_MATRIX_RESULTS", "benchmarks/results/exactness.jsonl"))
PART, PARTS = map(int, os.environ.get("BURST_MATRIX_PART", "0/1").split("/"))
PROBLEMS = list(itertools.product(matrix.LENGTHS, matrix.MASKS, matrix.HEADS, matrix.DTYPES))[PART::PARTS]
RINGS = list(itertools.product(matrix.RING_SIZES, matrix.LAYOUTS))


@pytest.mark.matrix
@pytest.mark.parametrize(("tokens", "mask", "heads", "dtype"), PROBLEMS)
def test_every_sharding_is_exact(tokens: int, mask: str, heads: str, dtype: str) -> None:
    problem = problem_of(mask, heads, dtype, tokens)
    started, worst, where, cells = time.perf_counter(), 0.0, "", 0
    for ring_size, layout in RINGS:
        for sharding, findings in run_directions(problem, ring_size, layout).items():
            require_exact(problem, sharding, findings)
            cells += 1
            for finding in findings:
                if (share := share_of_limit(finding)) > worst:
                    worst, where = share, f"{finding.name} {sharding}"
    row = {"suite": "exactness", "tokens": tokens, "mask": mask, "heads": heads, "dtype": dtype, "cells": cells}
    row |= {"commit": machine()["commit"], "date": time.strftime("%Y-%m-%d")}
    row |= {"worst_share_of_limit": round(worst, 4), "at": where, "seconds": round(time.perf_counter() - started, 1)}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
