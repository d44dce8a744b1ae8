"""`python benchmarks/gpu_tests.py --output benchmarks/results/gpu.jsonl`: what tests/gpu and the sanitizer say here.

Each file of tests is a process, several at once; a row has what pytest counted. Set PYTHONPATH as for the tests.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from burst_attention.bench import machine

ROOT = Path(__file__).parents[1]
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|error)")


def run(name: str, command: list[str], logs: Path, limit: float) -> dict[str, Any]:
    """One process, its output kept in a file of its name."""
    started = time.perf_counter()
    log = logs / f"{name}.log"
    with log.open("w") as output:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            code = -1
    last = log.read_text().strip().rpartition("\n")[2]
    found = {what: int(count) for count, what in COUNTED.findall(last)}
    return {"suite": "gpu-tests", "what": name, "exit": code, "seconds": round(time.perf_counter() - started), **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines to append to")
    parser.add_argument("--logs", type=Path, default=Path("runs/gpu_tests"), help="a folder for what tests print")
    parser.add_argument("--jobs", type=int, default=8, help="processes at once")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for each")
    parser.add_argument("--only", nargs="*", default=[], help="names of files, without test_ and .py")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    pytest = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider"]
    commands = {
        path.stem.removeprefix("test_"): [*pytest, str(path.relative_to(ROOT))]
        for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    }
    commands["sanitize"] = [sys.executable, "-m", "tests.gpu.sanitize"]
    chosen = {name: command for name, command in commands.items() if not options.only or name in options.only}
    facts = machine() | {"gpu": torch.cuda.get_device_name()}
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = pool.map(lambda item: run(*item, options.logs, options.limit) | facts, chosen.items())
        failed = 0
        for row in rows:
            failed += row["exit"] != 0
            print({name: row[name] for name in row if name not in facts}, flush=True)
            with options.output.open("a") as output:
                output.write(json.dumps(row) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
