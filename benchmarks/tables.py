"""Write the tables of docs/benchmarks.md from the rows under benchmarks/results: `python benchmarks/tables.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
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
        found[tuple(row[key] for key in keys)] = row
    return list(found.values())


def local_table() -> list[str]:
    lines = [
        "| case | T | phase | one process, 2 threads | ring of 2 processes | ratio | imbalance | torch, CPU, commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in latest(rows_of("local"), "case", "tokens"):
        for phase in ("forward", "forward_backward"):
            part = row[phase]
            lines.append(
                f"| {row['case']} | {row['tokens']} | {phase.replace('_', ' + ')} | {part['one_process_s']:.2f} s "
                f"({part['one_process_spread'][0]:.2f} to {part['one_process_spread'][1]:.2f}) | "
                f"{part['ring_s']:.2f} s ({part['ring_spread'][0]:.2f} to {part['ring_spread'][1]:.2f}) | "
                f"{part['ratio']:.3f} | {row['imbalance']:.1%} | {row['torch']}, {row['cpu']}, {row['commit']} |"
            )
    return lines


def exactness_table() -> list[str]:
    lines = [
        "| T | problems | cells | worst share of what the rule allows | at | commit |",
        "|---|---|---|---|---|---|",
    ]
    rows = latest(rows_of("exactness"), "tokens", "mask", "heads", "dtype")
    for tokens in sorted({row["tokens"] for row in rows}):
        some = [row for row in rows if row["tokens"] == tokens]
        worst = max(some, key=lambda row: row["worst_share_of_limit"])
        cells = sum(row["cells"] for row in some)
        commits = ", ".join(sorted({row["commit"] for row in some}))
        where = f"{worst['mask']} {worst['heads']} {worst['dtype']}, {worst['at']}"
        lines.append(
            f"| {tokens} | {len(some)} of 66 | {cells:,} | {worst['worst_share_of_limit']:.2f} | {where} | {commits} |"
        )
    return lines


def soak_table() -> list[str]:
    lines = ["| run | repetitions | hangs | wrong results | seconds | date |", "|---|---|---|---|---|---|"]
    for row in latest(rows_of("soak"), "run"):
        lines.append(
            f"| {row['run']} | {row['repetitions']} | {row['hangs']} | {row['wrong']} | {row['seconds']:.0f} | "
            f"{row['date']} |"
        )
    return lines


def claims_table() -> list[str]:
    lines = ["| claim | measured | torch, CPU, commit |", "|---|---|---|"]
    for row in latest(rows_of("claims"), "claim"):
        lines.append(f"| {row['claim']} | {row['measured']} | {row['torch']}, {row['cpu']}, {row['commit']} |")
    return lines


TABLES: dict[str, Callable[[], list[str]]] = {
    "local": local_table,
    "exactness": exactness_table,
    "claims": claims_table,
    "soak": soak_table,
}


def main() -> None:
    text = PAGE.read_text()
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        head, _, rest = text.partition(start)
        _, _, tail = rest.partition(end)
        text = f"{head}{start}\n" + "\n".join(table()) + f"\n{end}{tail}"
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
