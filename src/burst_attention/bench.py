"""`burst bench local`: a ring of single-threaded processes against one process with as many threads, on this CPU.

Both do the same attention, forward and backward, in turns within one run; a row holds the medians and their ratio.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burst_attention.api import burst_attention, plan
from burst_attention.launch import run_processes
from burst_attention.layout import Layout
from burst_attention.mask import causal, full
from burst_attention.ring import Ring
from burst_attention.version import __version__

HEADS, HEAD_DIM, RANKS = 8, 64, 2
WARM_UP_TOKENS = 512


@dataclass(frozen=True)
class LocalCase:
    """One comparison."""

    name: str
    dtype: torch.dtype
    causal: bool
    layout: str


CASES = (
    LocalCase("fp32 causal zigzag", torch.float32, True, "zigzag"),
    LocalCase("fp32 full contiguous", torch.float32, False, "contiguous"),
    LocalCase("bf16 causal zigzag", torch.bfloat16, True, "zigzag"),
)


def local(tokens: int, repeat: int, output: str | None = None) -> list[dict[str, Any]]:
    """Run every case, print a table, and append rows to `output` when it is given."""
    if tokens < 1 or repeat < 1:
        raise ValueError(f"--tokens and --repeat must be at least 1, got {tokens} and {repeat}")
    print(f"T={tokens} H={HEADS} D={HEAD_DIM}, {RANKS} processes of 1 thread against 1 process of {RANKS} threads")
    print(f"{'case':22} {'':18} {'one process':>12} {'ring':>9} {'ratio':>7} {'imbalance':>10}")
    rows = [measure(case, tokens, repeat) for case in CASES]
    append_rows(output, rows)
    return rows


def append_rows(output: str | None, rows: list[dict[str, Any]]) -> None:
    """Append rows as JSON lines to a file, when one is given."""
    if not output:
        return
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def measure(case: LocalCase, tokens: int, repeat: int) -> dict[str, Any]:
    """One case, baseline and ring in turns."""
    whole, ring = [], []
    for _ in range(repeat):
        whole.append(run_processes(lambda _: time_whole(case, tokens), 1, threads=RANKS, timeout=900)[0])
        ring.append(run_processes(lambda ring: time_ring(ring, case, tokens), RANKS, timeout=900, ring_timeout=600))
    row: dict[str, Any] = {"suite": "local", "case": case.name, "tokens": tokens, "heads": HEADS, "head_dim": HEAD_DIM}
    row |= {"ranks": RANKS, "repeat": repeat}
    for index, phase in enumerate(("forward", "forward_backward")):
        one = [times[index] for times in whole]
        many = [max(rank["times"][index] for rank in ranks) for ranks in ring]
        row[phase] = {
            "one_process_s": statistics.median(one),
            "ring_s": statistics.median(many),
            "ratio": statistics.median(many) / statistics.median(one),
            "one_process_spread": [min(one), max(one)],
            "ring_spread": [min(many), max(many)],
        }
    computes = [[rank["compute"] for rank in ranks] for ranks in ring]
    row["imbalance"] = statistics.median(max(times) * len(times) / sum(times) - 1 for times in computes)
    row["planned_imbalance"] = _plan(case, tokens).imbalance
    row["gflops_per_rank"] = sum(_plan(case, tokens).flops(0, phase) for phase in ("forward", "backward")) / 1e9
    row |= machine()
    for phase in ("forward", "forward_backward"):
        part, label = row[phase], phase.replace("_", " + ")
        print(
            f"{case.name:22} {label:18} {part['one_process_s']:11.2f}s {part['ring_s']:8.2f}s {part['ratio']:7.3f} "
            f"{row['imbalance']:10.1%}",
            flush=True,
        )
    return row


def time_whole(case: LocalCase, tokens: int) -> tuple[float, float]:
    """Seconds of one SDPA over the whole sequence: forward, forward + backward."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=case.causal)

    _time(attend, case.dtype, WARM_UP_TOKENS)
    return _time(attend, case.dtype, tokens)


def time_ring(ring: Ring, case: LocalCase, tokens: int) -> dict[str, Any]:
    """This rank's seconds for the same work on its shard, and how long it computed."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = causal() if case.causal else full()
        return burst_attention(q, k, v, ring=ring, mask=mask, layout=case.layout)

    _time(attend, case.dtype, WARM_UP_TOKENS)
    ring.trace = []
    times = _time(attend, case.dtype, Layout(case.layout, tokens, ring.size).local_tokens(ring.rank))
    return {"times": times, "compute": sum(event.compute for event in ring.trace)}


def _time(attend: Any, dtype: torch.dtype, tokens: int) -> tuple[float, float]:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, HEADS, tokens, HEAD_DIM).to(dtype) for _ in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    started = time.perf_counter()
    out = attend(q, k, v)
    forward = time.perf_counter() - started
    torch.autograd.grad(out, (q, k, v), dout)
    return forward, time.perf_counter() - started


def _plan(case: LocalCase, tokens: int) -> Any:
    mask = causal() if case.causal else full()
    shapes: dict[str, Any] = {"heads": HEADS, "head_dim": HEAD_DIM, "dtype": case.dtype}
    return plan(tokens, RANKS, mask=mask, layout=case.layout, **shapes)


@cache
def machine() -> dict[str, Any]:
    """What the rows of this run are measured on: commit, processor, versions."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        names = [
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ]
        cpu = names[0] if names else cpu
    return {
        "commit": commit,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "version": __version__,
        "date": time.strftime("%Y-%m-%d"),
    }
