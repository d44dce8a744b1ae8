"""Long random and fault runs: `make soak`. One row per run is kept as JSON lines."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from burst_attention import Ring, burst_attention, full
from burst_attention.bench import machine
from burst_attention.exactness import Sharding, gather, judge, run_rank
from burst_attention.launch import RankFailedError, run_processes
from tests.ring import matrix
from tests.ring.fault_injection import fail_at_call
from tests.ring.matrix import problem_of, run_cell

pytestmark = pytest.mark.soak
RESULTS = Path(os.environ.get("BURST_SOAK_RESULTS", "benchmarks/results/soak.jsonl"))
SECONDS = float(os.environ.get("BURST_SOAK_SECONDS", "300"))
FAULTS = int(os.environ.get("BURST_SOAK_FAULTS", "20"))
RING_TIMEOUT = 5.0


SEED = int(os.environ.get("BURST_SOAK_SEED", time.time_ns()))


def keep(run: str, repetitions: int, hangs: int, wrong: list[Any], started: float) -> None:
    """Append the outcome of a run, with its seed and its first wrong cases: BURST_SOAK_SEED repeats it."""
    row = {"suite": "soak", "run": run, "repetitions": repetitions, "hangs": hangs, "wrong": len(wrong)}
    row |= {"seed": SEED, "cases": [str(case) for case in wrong[:5]], "commit": machine()["commit"]}
    row |= {"seconds": round(time.perf_counter() - started, 1), "date": time.strftime("%Y-%m-%d")}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


def random_case(chance: random.Random) -> tuple[Any, Sharding]:
    """Any mask, heads, dtype, layout, ring size, directions and length."""
    heads, dtype = chance.choice(tuple(matrix.HEADS)), chance.choice(tuple(matrix.DTYPES))
    problem = problem_of(
        chance.choice(matrix.MASKS),
        heads,
        dtype,
        chance.choice((chance.randint(1, 20), chance.randint(1, 600))),
        chance.randint(0, 10**6),
    )
    sides = [chance.choice(("kv", "query", "auto")) for _ in range(2)]
    return problem, Sharding(chance.randint(1, 9), chance.choice(matrix.LAYOUTS), *sides)


def test_random_cases_on_threads() -> None:
    chance, started, done, wrong = random.Random(SEED), time.perf_counter(), 0, []
    while time.perf_counter() - started < SECONDS:
        problem, sharding = random_case(chance)
        wrong += [(problem, sharding, finding) for finding in run_cell(problem, sharding) if not finding.holds]
        done += 1
    keep("random cases on threads", done, 0, wrong, started)
    assert not wrong, wrong[:5]


def test_random_cases_on_processes() -> None:
    chance, started, done, wrong = random.Random(SEED), time.perf_counter(), 0, []
    while time.perf_counter() - started < SECONDS:
        problem, sharding = random_case(chance)
        shards = run_processes(
            lambda ring, p=problem, s=sharding: run_rank(ring, p, s),  # type: ignore[misc]
            sharding.ring_size,
            timeout=120,
        )
        findings = judge(problem, gather(problem, sharding, shards))
        wrong += [(problem, sharding, finding) for finding in findings if not finding.holds]
        done += 1
    keep("random cases on processes", done, 0, wrong, started)
    assert not wrong, wrong[:5]


def kill_self() -> None:
    os.kill(os.getpid(), 9)


def raise_error() -> None:
    raise RuntimeError("injected")


def stay_silent() -> None:
    time.sleep(60)


@pytest.mark.parametrize("fault", [kill_self, raise_error, stay_silent], ids=["killed", "raising", "silent"])
def test_a_failing_rank_is_named_by_every_survivor(fault: Callable[[], None]) -> None:
    """One of four ranks fails at a random kernel call of forward or backward; the others raise within the timeout."""
    chance, started, hangs, wrong = random.Random(SEED), time.perf_counter(), 0, []
    for _ in range(FAULTS):
        victim, call, direction = chance.randrange(4), chance.randrange(1, 4), chance.choice(("kv", "query"))
        phase = chance.choice(("forward", "backward"))

        def body(
            ring: Ring, victim: int = victim, call: int = call, direction: str = direction, phase: str = phase
        ) -> None:
            if ring.rank == victim:
                fail_at_call(phase, call, fault)
            q, k, v = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3))
            sides = {"direction": direction, "forward_direction": "query"}
            burst_attention(q, k, v, ring=ring, mask=full(), **sides).sum().backward()

        begun = time.perf_counter()
        try:
            run_processes(body, 4, timeout=RING_TIMEOUT + 15, ring_timeout=RING_TIMEOUT)
            wrong.append("no rank raised")
        except RankFailedError as error:
            survivors = {rank: text for rank, text in error.errors.items() if rank != victim}
            hangs += sum("not done after" in text for text in survivors.values())
            wrong += [text for text in survivors.values() if "RingError" not in text or "rank" not in text]
        hangs += time.perf_counter() - begun > RING_TIMEOUT + 14 and fault is not stay_silent
    keep(f"a rank {fault.__name__.replace('_', ' ')}", FAULTS, hangs, wrong, started)
    assert not hangs and not wrong, wrong[:3]
