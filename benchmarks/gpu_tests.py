"""`python benchmarks/gpu_tests.py --output benchmarks/results/gpu.jsonl`: what tests/gpu and the sanitizer say here.

Most of the time goes to compilers, each on one core, so the tests of a file are shared out to processes. A row has what
pytest counted in all of a file.
"""

from __future__ import annotations

import argparse
import itertools
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
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-m", "not matrix and not soak"]
TOGETHER = {"exactness_on_cuda": 2, "threads_on_cuda": 9, "lanes_on_cuda": 1}
"""Tests of a file that one process runs, where they compile much; of others 40."""
WORDS = ("PASSED", "FAILED", "SKIPPED", "ERROR")
SANITIZED = {
    "memcheck_errors": re.compile(r"memcheck: .*ERROR SUMMARY: (\d+) error"),
    "races": re.compile(r"racecheck: (\d+) races"),
    "handshake_reports": re.compile(r"reports on the handshake: (\d+)"),
}
"""What tests/gpu/sanitize.py prints."""
STOPPED = -1
"""The exit of what ran out of time."""


def collected() -> dict[str, list[str]]:
    """The tests of each file."""
    found = subprocess.run([*PYTEST, "--collect-only", "-q", "tests/gpu"], cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"some tests cannot be collected:\n{found.stdout}{found.stderr}")
    names = [line for line in found.stdout.splitlines() if "::" in line]
    return {file: list(group) for file, group in itertools.groupby(names, lambda name: name.partition("::")[0])}


def run(name: str, command: list[str], logs: Path, limit: float) -> dict[str, Any]:
    """One process, its output kept in a file of its name."""
    started = time.perf_counter()
    log = logs / f"{name}.log"
    with log.open("w") as output:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            code = STOPPED
    text, what = log.read_text(), name.partition(".")[0]
    counted = {word.lower(): len(re.findall(rf"^tests/\S+::.* {word}\b", text, re.M)) for word in WORDS}
    if what == "sanitize":
        counted = {word: int(found[1]) for word, line in SANITIZED.items() if (found := line.search(text))}
    tests = sum("::" in argument for argument in command)
    return {"what": what, "exit": code, "seconds": time.perf_counter() - started, "collected": tests, **counted}


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The processes of one file as a row; a failure counts for more than time that ran out."""
    words = [word for word in parts[0] if word not in ("what", "exit", "seconds")]
    exits = sorted({part["exit"] for part in parts if part["exit"]}, key=lambda code: code == STOPPED)
    return {
        "suite": "gpu-tests",
        "what": parts[0]["what"],
        "exit": exits[0] if exits else 0,
        "seconds": round(sum(part["seconds"] for part in parts)),
        **{word: sum(part[word] for part in parts) for word in words},
    }


def commands(only: list[str]) -> dict[str, list[str]]:
    """What each process runs, by the name of its file and a number."""
    made = {}
    for file, tests in collected().items():
        name = Path(file).stem.removeprefix("test_")
        size = TOGETHER.get(name, 40)
        for first in range(0, len(tests), size):
            made[f"{name}.{first // size}"] = [*PYTEST, "-v", *tests[first : first + size]]
    made["sanitize.0"] = [sys.executable, "-m", "tests.gpu.sanitize"]
    return {name: command for name, command in made.items() if not only or name.partition(".")[0] in only}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines to append to")
    parser.add_argument("--logs", type=Path, default=Path("runs/gpu_tests"), help="a folder for what tests print")
    parser.add_argument("--jobs", type=int, default=8, help="processes at once")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for each")
    parser.add_argument("--only", nargs="*", default=[], help="names of files, without test_ and .py, or sanitize")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    facts = machine() | {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
    chosen = commands(options.only)
    failed = False
    with ThreadPoolExecutor(options.jobs) as pool, options.output.open("a") as output:
        parts = pool.map(lambda item: run(*item, options.logs, options.limit), chosen.items())
        for _, group in itertools.groupby(parts, lambda part: part["what"]):
            row = together(list(group))
            print(row, flush=True)
            # Whoever ends this early keeps the files that are through.
            output.write(json.dumps(row | facts) + "\n")
            output.flush()
            failed |= bool(row["exit"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
