"""The rows that tables are made of, from the files under benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def latest(rows: list[Row], *keys: str) -> list[Row]:
    """The last row of each distinct combination of keys, in order of first appearance."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        found[tuple(row.get(key) for key in keys)] = row
    return list(found.values())


def of_suite(suite: str) -> list[Row]:
    """All rows of a part of a benchmark, from the file of the benchmark's name."""
    return [row for row in rows_of(suite.partition("-")[0]) if row["suite"] == suite]


def heads_of(row: Row) -> str:
    return "MHA" if row["heads"] == row["kv_heads"] else f"GQA {row['heads'] // row['kv_heads']}"


def machine_cells(row: Row) -> str:
    return f"{row.get('gpu', row['cpu'])}, {row['torch']}, {row['commit']}"
