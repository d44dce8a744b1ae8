"""Faults between hosts at random moments, many times over: part of `make soak`; a row per kind is kept."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from burst_attention import Ring, burst_attention
from burst_attention.hosts import Hosts
from burst_attention.launch import RankFailedError
from tests.hosts.rank_bodies import LIMIT, await_traffic, step_error
from tests.ring.test_soak import FAULTS, SEED, keep

pytestmark = pytest.mark.soak
RING_TIMEOUT, STEPS, LONGEST = 3.0, 12, 60.0
PER_HOST = 2

Act = Callable[[Hosts, list[Any], random.Random], None]


def train(
    ring: Ring, steps: int = STEPS, slow: int | None = None, other: int | None = None, absent: int | None = None
) -> float:
    """Steps of forward and backward on a double ring, then the error of one more that is compared with torch's."""
    for turn in range(steps):
        tokens = 512 if other == ring.rank and turn == steps // 2 else 1024
        q, k, v = (torch.ones(1, 2, tokens // ring.size, 64, requires_grad=True) for _ in range(3))
        if slow == ring.rank:
            time.sleep(0.3)
        if absent == ring.rank and turn == steps // 2:
            time.sleep(2 * RING_TIMEOUT)
        burst_attention(q, k, v, ring=ring, topology="double").sum().backward()
    return step_error(ring)


def at_some_moment(hosts: Hosts, chance: random.Random) -> None:
    await_traffic(hosts, 200_000)
    time.sleep(chance.uniform(0.0, 1.0))


def kill_a_rank(hosts: Hosts, processes: list[Any], chance: random.Random) -> None:
    at_some_moment(hosts, chance)
    chance.choice(processes).kill()


def cut_for_good(hosts: Hosts, processes: list[Any], chance: random.Random) -> None:
    at_some_moment(hosts, chance)
    hosts.cut(chance.randrange(2))


def cut_for_a_moment(hosts: Hosts, processes: list[Any], chance: random.Random) -> None:
    at_some_moment(hosts, chance)
    host = chance.randrange(2)
    hosts.cut(host)
    time.sleep(chance.uniform(0.1, 0.8))
    hosts.restore(host)


def nothing(hosts: Hosts, processes: list[Any], chance: random.Random) -> None:
    """The rank itself does what is wrong."""


KINDS: dict[str, tuple[Act, dict[str, int], bool]] = {
    "killed rank": (kill_a_rank, {"steps": 200}, False),
    "link cut for good": (cut_for_good, {"steps": 200}, False),
    "link cut for a moment": (cut_for_a_moment, {}, True),
    "slow rank": (nothing, {"slow": 2}, True),
    "other arguments on one rank": (nothing, {"other": 1}, False),
    "a rank that does not enter": (nothing, {"absent": 3}, False),
}
"""What happens, how ranks take part, and whether it must end well."""


def judge_failure(errors: dict[int, str]) -> str | None:
    """What is wrong with how a run ended that had to fail; None if every survivor told what it waited for."""
    for rank, text in errors.items():
        died = text.startswith("died with exit code -9")
        named = re.match(rf"RingError: rank {rank}, .*\brank \d|ValueError: rank \d holds", text)
        if not died and not named:
            return f"rank {rank}: {text}"
    return None if len(errors) == 2 * PER_HOST else f"only ranks {sorted(errors)} ended with an error"


def once(kind: str, chance: random.Random) -> str | None:
    """One fault on fresh hosts, and a run on the same hosts after it; what was wrong."""
    act, options, ends_well = KINDS[kind]
    timeout = 20.0 if ends_well else RING_TIMEOUT
    with Hosts(2, mbit=200) as hosts:
        try:
            errors = hosts.run(
                lambda ring: train(ring, **options), PER_HOST, timeout=LONGEST, ring_timeout=timeout,
                meanwhile=lambda processes: act(hosts, processes, chance),
            )  # fmt: skip
            wrong = None if ends_well and max(errors) < LIMIT else f"it ended with errors {errors}"
        except RankFailedError as error:
            wrong = str(error) if ends_well else judge_failure(error.errors)
        for host in range(2):
            hosts.restore(host)
        again = hosts.run(step_error, PER_HOST, timeout=LONGEST)
        if max(again) >= LIMIT:
            wrong = f"after it: {again}"
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_faults_between_hosts(kind: str) -> None:
    chance, started, wrong, hangs = random.Random(SEED), time.perf_counter(), [], 0
    for _ in range(FAULTS):
        found = once(kind, chance)
        hangs += found is not None and "not done after" in found
        wrong += [] if found is None else [found]
    keep(f"hosts: {kind}", FAULTS, hangs, wrong, started)
    assert not wrong, wrong[:3]
