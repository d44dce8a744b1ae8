"""Faults between hosts at random moments, many times over: part of `make soak`; a row per kind is kept."""

from __future__ import annotations

import os
import random
import time

import pytest

from burst_attention.namespaces import owned
from tests.hosts.faults import KINDS, once
from tests.ring.test_soak import FAULTS, SEED, keep

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("kind", KINDS)
def test_faults_between_hosts(kind: str) -> None:
    chance, started, wrong, hangs = random.Random(SEED), time.perf_counter(), [], 0
    for _ in range(FAULTS):
        found = once(kind, chance)
        if left := owned(f"burst-{os.getpid()}-"):
            found = f"namespaces {left} are left"
        hangs += found is not None and "not done after" in found
        wrong += [] if found is None else [found]
    keep(f"hosts: {kind}", FAULTS, hangs, wrong, started)
    assert not wrong, wrong[:3]
