"""`burst check` proves on this machine that a ring computes what one device would, and moves what it says.

Each case runs on W processes and is judged against the fp64 oracle, beside the error of torch's own flash operator on
one device (exactness.py has the rule). Bytes that the plan predicts must equal the bytes that the transport counted.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TextIO

import torch
from torch import Tensor

from burst_attention.api import plan
from burst_attention.exactness import Finding, Problem, Sharding, gather, judge, run_rank
from burst_attention.launch import RankFailedError, run_processes
from burst_attention.mask import parse_mask
from burst_attention.ring import Ring, RingError, run_ranks

HEADS, HEAD_DIM = 8, 32
TOKENS = 1000
STEADY_TOKENS, STEADY_HEAD_DIM = 2048, 128
"""Of a rank, and of a head, in cases for a GPU whose pieces vendors' kernels and our own for Hopper serve."""
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    problem: Problem
    sharding: Sharding

    @property
    def name(self) -> str:
        groups = {1: "MHA", HEADS: "MQA"}.get(HEADS // self.problem.kv_heads, f"GQA {HEADS // self.problem.kv_heads}")
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.problem.dtype]
        steady = f" {self.problem.tokens} x {STEADY_HEAD_DIM}" if self.problem.head_dim == STEADY_HEAD_DIM else ""
        return f"{self.problem.mask} {self.sharding.layout} {groups} {dtype}{steady}"

    @property
    def directions(self) -> str:
        return f"{self.sharding.forward_direction}/{self.sharding.direction}"


@dataclass(frozen=True)
class Row:
    """A case's outcome."""

    case: str
    directions: str
    ranks: int
    tokens: int
    error: float = math.nan
    torch_error: float = math.nan
    worst: float = math.nan
    bytes_predicted: int = 0
    bytes_counted: int = 0
    control_bytes: int = 0
    seconds: float = 0.0
    verdict: str = "not run"


def make_cases(
    ranks: int, tokens: int | None, mask: str | None, layout: str | None, direction: str | None, device: str = "cpu"
) -> list[Case]:
    """The default table, narrowed to what the caller asks for; on a GPU large and round shards too, of wide heads."""
    length = TOKENS if tokens is None else tokens
    third = length // 3
    packed = [part for part in (third, length - 2 * third, third) if part]
    masks = [mask] if mask else [
        "full()", "causal()", f"causal() & window({max(length // 8, 1)})", f"causal() & documents({packed})",
        f"causal() | prefix({max(length // 10, 1)})", f"causal() & (window({max(length // 10, 1)}) | prefix(4))",
    ]  # fmt: skip
    layouts = ("contiguous", "zigzag", "striped", "balanced")
    heads = (HEADS, HEADS // 4, 1)
    sides = (direction,) if direction else ("kv", "query")
    cases = []
    for index, text in enumerate(masks):
        for dtype in DTYPES[device]:
            chosen = layout or layouts[(index + 1) % len(layouts)]
            problem = Problem(length, text, HEADS, heads[index % len(heads)], HEAD_DIM, dtype)
            cases += [Case(problem, Sharding(ranks, chosen, side, side)) for side in sides]
    steady = _steady_length(ranks, mask) if tokens is None else tokens
    for text, chosen in ((mask, "zigzag"),) if mask else (("full()", "contiguous"), ("causal()", "zigzag")):
        for kv_heads in (HEADS, HEADS // 4) if device == "cuda" else ():
            problem = Problem(steady, text, HEADS, kv_heads, STEADY_HEAD_DIM, torch.bfloat16)
            cases += [Case(problem, Sharding(ranks, layout or chosen, side, side)) for side in sides]
    return cases


def _steady_length(ranks: int, mask: str | None) -> int:
    """Of a sequence with large shards, where the mask says something about all of it."""
    try:
        parse_mask(mask or "full()").require_cover(ranks * STEADY_TOKENS, ranks * STEADY_TOKENS)
    except ValueError:
        return TOKENS
    return ranks * STEADY_TOKENS


def run_case(ring: Ring, case: Case, device: str) -> tuple[tuple[Tensor, ...], int, int, float]:
    """One rank's shards, the bytes its transport counted in one forward and backward, and its time."""
    started = time.perf_counter()
    before, control = ring.bytes_sent, ring.control_bytes
    shards = run_rank(ring, case.problem, case.sharding, device=device)
    return shards, ring.bytes_sent - before, ring.control_bytes - control, time.perf_counter() - started


def predicted_bytes(case: Case, device: str) -> int:
    """What all ranks together should send: run_rank makes one forward for lse and one forward and backward."""
    problem, sharding = case.problem, case.sharding
    planned = plan(
        problem.tokens,
        sharding.ring_size,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        dtype=problem.dtype,
        mask=parse_mask(problem.mask),
        layout=sharding.layout_for(problem),
        direction=sharding.direction,
        forward_direction=sharding.forward_direction,
        device=device,
    )
    ranks = range(sharding.ring_size)
    return sum(2 * planned.bytes_sent(rank, "forward") + planned.bytes_sent(rank, "backward") for rank in ranks)


def run_ring(case: Case, ranks: int, device: str) -> list[tuple[tuple[Tensor, ...], int, int, float]]:
    """Every rank's part: on processes, or on a GPU as threads that share it."""
    if device == "cuda":
        torch.zeros(1, device="cuda")
        return run_ranks(lambda ring: run_case(ring, case, device), ranks, timeout=600)
    return run_processes(lambda ring: run_case(ring, case, device), ranks, timeout=600)


def evaluate(case: Case, parts: list[tuple[tuple[Tensor, ...], int, int, float]], device: str) -> Row:
    """Judge what the ranks returned."""
    findings = judge(case.problem, gather(case.problem, case.sharding, [part[0] for part in parts]), device)
    counted, control = sum(part[1] for part in parts), sum(part[2] for part in parts)
    predicted = predicted_bytes(case, device)
    wrong = [finding.name for finding in findings if not finding.holds]
    if counted != predicted:
        wrong.append("bytes")
    worst = max((finding for finding in findings if finding.name != "lse"), key=share_of_limit)
    return Row(
        case=case.name,
        directions=case.directions,
        ranks=case.sharding.ring_size,
        tokens=case.problem.tokens,
        error=worst.rms,
        torch_error=worst.rms_yardstick,
        worst=max(share_of_limit(finding) for finding in findings),
        bytes_predicted=predicted,
        bytes_counted=counted,
        control_bytes=control,
        seconds=max(part[3] for part in parts),
        verdict="ok" if not wrong else "WRONG: " + ", ".join(wrong),
    )


def share_of_limit(finding: Finding) -> float:
    """How much of what the rule allows is used: at most 1 where it holds."""
    pairs = ((finding.rms, finding.rms_limit), (finding.largest, finding.largest_limit))
    return max((error / limit if limit else (0.0 if error == 0 else float("inf"))) for error, limit in pairs)


def check(cases: list[Case], ranks: int, as_json: bool, out: TextIO | None = None, device: str = "cpu") -> bool:
    """Run the table on `ranks` processes, or threads on a GPU, and print it; True when every verdict is ok."""
    out = out or sys.stdout
    printer: Callable[[Row], None] = _json_printer(out) if as_json else _table_printer(out, cases, ranks, device)
    passed = True
    for row in _rows(cases, ranks, device, _Progress(len(cases), sys.stderr)):
        printer(row)
        passed = passed and row.verdict == "ok"
    if not as_json:
        print(f"\n{'all cases are exact' if passed else 'NOT EXACT: see above'}", file=out)
    return passed


def _rows(cases: list[Case], ranks: int, device: str, progress: _Progress) -> Iterator[Row]:
    for index, case in enumerate(cases):
        progress.show(index, case.name)
        try:
            row = evaluate(case, run_ring(case, ranks, device), device)
        except (RankFailedError, RingError) as error:
            row = Row(case.name, case.directions, ranks, case.problem.tokens, verdict=f"FAILED: {error}")
        progress.clear()
        yield row


class _Progress:
    """A line that is rewritten on a terminal, and nothing elsewhere."""

    def __init__(self, total: int, out: TextIO) -> None:
        self.total, self.out = total, out if out.isatty() else None

    def show(self, done: int, name: str) -> None:
        if self.out:
            filled = 20 * done // self.total
            bar = "#" * filled + "-" * (20 - filled)
            print(f"\r\033[K[{bar}] {done}/{self.total} {name[:60]}", end="", file=self.out, flush=True)

    def clear(self) -> None:
        if self.out:
            print("\r\033[K", end="", file=self.out, flush=True)


def _json_printer(out: TextIO) -> Callable[[Row], None]:
    return lambda row: print(json.dumps({**asdict(row), **_no_nan(row)}), file=out, flush=True)


def _no_nan(row: Row) -> dict[str, None]:
    """JSON knows no NaN: a case that failed has no error to tell."""
    return {name: None for name, value in asdict(row).items() if isinstance(value, float) and math.isnan(value)}


def _table_printer(out: TextIO, cases: list[Case], ranks: int, device: str) -> Callable[[Row], None]:
    width = max(26, *(len(case.name) for case in cases))
    kind = "thread(s) on one GPU" if device == "cuda" else f"process{'es' if ranks > 1 else ''}"
    title = f"{ranks} {kind}, {cases[0].problem.tokens} tokens"
    print(f"{title}; rms error against fp64, worst of out, dq, dk, dv", file=out)
    head = f"{'mask, layout, heads, dtype':{width}}  {'moves':11}  {'error':>8}  {'torch':>8}"
    head += f"  {'bytes':>11}  {'counted':>11}"
    print(f"{head}  {'time':>7}  verdict", file=out)

    def show(row: Row) -> None:
        print(
            f"{row.case:{width}}  {row.directions:11}  {row.error:8.1e}  {row.torch_error:8.1e}  "
            f"{row.bytes_predicted:>11,}  {row.bytes_counted:>11,}  {row.seconds:6.2f}s  {row.verdict}",
            file=out,
            flush=True,
        )

    return show
