"""Rows of training on this machine: `python benchmarks/training_runs.py`.

`make train` in a fresh clone, from nothing installed to the summary; then two ranks beside one process of two threads.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from burst_attention.bench import append_rows, machine
from burst_attention.train.loop import LOG
from burst_attention.train.record import read_log
from burst_attention.train.report import summarise
from burst_attention.train.start import UNSHARDED

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "train.jsonl"
COMPARED = "burst train --compare --steps 8 --save-every 0"


def run(command: list[str], folder: Path) -> float:
    """Seconds that a command takes."""
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True)
    return time.perf_counter() - started


def settings_of(run_folder: Path) -> dict[str, Any]:
    settings = json.loads((run_folder / "settings.json").read_text())
    return {name: settings[name] for name in ("tokens", "ranks", "parameters")}


def made(clone: Path) -> dict[str, Any]:
    """`make train` on a machine that has nothing yet but Python."""
    seconds = run(["make", "train"], clone)
    folder = clone / "runs" / "latest"
    found = summarise(read_log(folder / LOG), None)
    kept = {name: round(found[name], 4) for name in ("steps", "first_loss", "last_loss")}
    return {"suite": "train-make", "command": "make train", "seconds": round(seconds, 1), **kept, **settings_of(folder)}


def compared(clone: Path) -> dict[str, Any]:
    """Two ranks, and one process with two threads and the same features."""
    folder = clone / "runs" / "compared"
    run([str(clone / ".venv" / "bin" / "burst"), *COMPARED.split()[1:], "--out", str(folder)], clone)
    row = {"suite": "train-local", "command": COMPARED, **settings_of(folder)}
    for prefix, log in (("", folder / LOG), ("unsharded_", folder / UNSHARDED / LOG)):
        found = summarise(read_log(log), None)
        row |= {f"{prefix}tokens_per_s": found["tokens_per_second"], f"{prefix}peak_gib": found["peak_memory_gib"]}
    return row


def main() -> None:
    with tempfile.TemporaryDirectory() as parent:
        clone = Path(parent) / "clone"
        run(["git", "clone", "--quiet", str(ROOT), str(clone)], ROOT)
        for measure in (made, compared):
            append_rows(str(RESULTS), [measure(clone) | machine()])


if __name__ == "__main__":
    main()
