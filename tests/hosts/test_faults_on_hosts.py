"""A link that is cut and a rank that is killed end with a name on every survivor, soon; the hosts serve again after."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest

from burst_attention.hosts import Hosts
from burst_attention.launch import RankFailedError
from tests.hosts.faults import KINDS, once
from tests.hosts.rank_bodies import LIMIT, await_traffic, keep_stepping, step_error, steps_with_traffic

RING_TIMEOUT = 2.0
SLACK = 3.0
"""Seconds that a busy machine may add to a timeout."""


@pytest.mark.parametrize("ranks", [1, 2], ids=["2x1", "2x2"])
def test_a_link_cut_for_good_is_named_by_every_rank_within_the_timeout(ranks: int) -> None:
    cut_at = []

    def meanwhile(processes: list[Any]) -> None:
        await_traffic(hosts)
        cut_at.append(time.monotonic())
        hosts.cut(1)

    with Hosts(2, mbit=200) as hosts:
        with pytest.raises(RankFailedError) as caught:
            hosts.run(keep_stepping, ranks, timeout=30, ring_timeout=RING_TIMEOUT, meanwhile=meanwhile)
        seconds = time.monotonic() - cut_at[0]
        hosts.restore(1)
        assert max(hosts.run(step_error, ranks, timeout=40)) < LIMIT
    assert RING_TIMEOUT - 0.5 < seconds < RING_TIMEOUT + SLACK
    assert sorted(caught.value.errors) == list(range(2 * ranks))
    for rank, text in caught.value.errors.items():
        assert re.match(rf"RingError: rank {rank}, forward .*\brank [^{rank}]", text), text
        assert "within 2 s" in text


def test_a_link_cut_for_a_moment_ends_correctly() -> None:
    times = []

    def meanwhile(processes: list[Any]) -> None:
        await_traffic(hosts)
        hosts.cut(1)
        times.append(hosts.bytes_sent(1))
        time.sleep(0.5)
        times.append(hosts.bytes_sent(1))
        hosts.restore(1)

    with Hosts(2, mbit=200) as hosts:
        errors = hosts.run(steps_with_traffic, 1, timeout=40, ring_timeout=20, meanwhile=meanwhile)
        after = hosts.bytes_sent(1)
    assert max(errors) < LIMIT
    assert times[0] == times[1] < after - 1_000_000


@pytest.mark.parametrize("ranks", [1, 2], ids=["2x1", "2x2"])
def test_a_killed_rank_is_noticed_on_the_other_host(ranks: int) -> None:
    victim, killed_at = 2 * ranks - 1, []

    def meanwhile(processes: list[Any]) -> None:
        await_traffic(hosts)
        killed_at.append(time.monotonic())
        processes[victim].kill()

    with Hosts(2, mbit=200) as hosts:
        with pytest.raises(RankFailedError) as caught:
            hosts.run(keep_stepping, ranks, timeout=30, ring_timeout=20, meanwhile=meanwhile)
        # Long before the timeout: the kernel of the rank's own host closes its connections.
        assert time.monotonic() - killed_at[0] < SLACK
        assert max(hosts.run(step_error, ranks, timeout=40)) < LIMIT
    errors = caught.value.errors
    assert errors.pop(victim) == "died with exit code -9"
    assert sorted(errors) == list(range(2 * ranks - 1))
    for rank, text in errors.items():
        assert re.match(rf"RingError: rank {rank}, forward .*\brank [^{rank}]", text), text
    assert any(f"rank {victim}" in text for text in errors.values())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("link")])
def test_a_fault_ends_as_it_should(kind: str) -> None:
    """One of each kind that `make soak` has many of; links have tests of their own above."""
    assert once(kind, random.Random(7), ring_timeout=1.5, steps=4) is None


def test_ranks_that_take_too_long_are_ended() -> None:
    with Hosts(2) as hosts:
        with pytest.raises(RankFailedError, match="rank 0: not done after 1 s; rank 1: not done after 1 s"):
            hosts.run(lambda ring: time.sleep(60), 1, timeout=1)
        assert max(hosts.run(step_error, 1, timeout=40)) < LIMIT
