"""Ranks on hosts get the same attention as one process has, over links that carry what is said of them."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest
import torch

from burst_attention import Ring
from burst_attention.hosts import Hosts, HostsError
from burst_attention.launch import RankFailedError
from burst_attention.namespaces import inside
from burst_attention.ring.base import Parcel
from tests.hosts.rank_bodies import LIMIT, step_error


@pytest.mark.parametrize(("count", "ranks"), [(2, 1), (2, 2), (3, 1)], ids=["2x1", "2x2", "3x1"])
def test_attention_across_hosts_is_exact(count: int, ranks: int) -> None:
    with Hosts(count) as hosts:
        errors = hosts.run(step_error, ranks, timeout=40, ring_timeout=20)
    assert len(errors) == count * ranks
    assert max(errors) < LIMIT


def test_ranks_are_laid_host_by_host_and_see_one_interface() -> None:
    with Hosts(2) as hosts:
        results = hosts.run(lambda ring: (ring.rank, os.stat("/proc/self/ns/net").st_ino, interfaces()), 2, timeout=40)
    spaces = [space for _, space, _ in results]
    assert [rank for rank, _, _ in results] == [0, 1, 2, 3]
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3]
    assert os.stat("/proc/self/ns/net").st_ino not in spaces
    assert all(names == ["eth0", "lo"] for _, _, names in results)


def interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def test_the_machine_s_own_interfaces_stay_as_they_were() -> None:
    before = interfaces()
    with Hosts(2, mbit=100) as hosts:
        assert interfaces() == before
        hosts.link_rate(0.05)
        assert interfaces() == before


@pytest.mark.parametrize("mbit", [100, 800])
def test_a_link_carries_nearly_what_it_is_limited_to(mbit: int) -> None:
    with Hosts(2, mbit=mbit) as hosts:
        rate = hosts.link_rate()
    assert 0.75 * mbit < rate < 1.02 * mbit


@pytest.mark.parametrize("sending", [True, False], ids=["sending", "receiving"])
def test_sending_and_receiving_are_limited_each(sending: bool) -> None:
    """Host 0 deals with two others at once, at the rate of its own link."""
    size = 1024 * 1024

    def body(ring: Ring) -> float:
        peers = [0] if ring.rank else [1, 2]
        parcels = [Parcel(peer, 0, torch.zeros(size, dtype=torch.uint8), "block") for peer in peers]
        ring.exchange({}, "start")
        started = time.monotonic()
        ring.wait(ring.post(parcels, [], "test") if sending == (ring.rank == 0) else ring.post([], parcels, "test"))
        return time.monotonic() - started

    with Hosts(3, mbit=100) as hosts:
        seconds = max(hosts.run(body, 1, timeout=40))
        sent = [hosts.bytes_sent(host) / size for host in range(3)]
    assert sent == pytest.approx([2, 0, 0] if sending else [0, 1, 1], abs=0.1)
    # Less what a full bucket lets through at once.
    assert seconds > 0.9 * (2 * size - 128 * 1024) * 8 / 100e6


def test_bytes_on_the_link_are_those_the_ring_sent() -> None:
    def body(ring: Ring) -> int:
        step_error(ring, tokens=4096, heads=4, dim=64)
        return ring.bytes_sent

    with Hosts(2) as hosts:
        before = [hosts.bytes_sent(host) for host in range(2)]
        sent = hosts.run(body, 1, timeout=40)
        counted = [hosts.bytes_sent(host) - before[host] for host in range(2)]
        repeated = [hosts.bytes_repeated(host) for host in range(2)]
    for host in range(2):
        assert sent[host] > 2_000_000
        assert sent[host] < counted[host] < 1.03 * sent[host] + repeated[host], (sent, counted, repeated)


def test_what_tcp_sends_again_is_told() -> None:
    message = bytes(64 * 1024)
    with Hosts(2) as hosts:
        with inside(hosts.namespaces[1]):
            server = socket.create_server((hosts.addresses[1], 0))
        with inside(hosts.namespaces[0]):
            sender = socket.create_connection(server.getsockname(), timeout=10)
        receiver, _ = server.accept()
        with server, sender, receiver:
            assert hosts.bytes_repeated(0) == 0
            hosts.cut(1)
            sender.sendall(message)
            deadline = time.monotonic() + 10
            while hosts.bytes_repeated(0) == 0 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert hosts.bytes_repeated(0) > 0
            hosts.restore(1)
            receiver.settimeout(10)
            with receiver.makefile("rb") as arriving:
                assert len(arriving.read(len(message))) == len(message)
        assert hosts.bytes_repeated(1) == 0


def test_ranks_of_one_host_do_not_use_its_link() -> None:
    with Hosts(1) as hosts:
        assert max(hosts.run(lambda ring: step_error(ring, tokens=2048), 2, timeout=40)) < LIMIT
        assert hosts.bytes_sent(0) < 10_000


def test_two_sets_of_hosts_are_strangers_to_each_other() -> None:
    with Hosts(2, name="one") as one, Hosts(2, name="other") as other:
        assert not set(one.namespaces) & set(other.namespaces)
        assert all("-one-" in name for name in one.namespaces)
        one.cut(1)
        assert max(other.run(step_error, 1, timeout=40)) < LIMIT
        one.restore(1)
        before = other.bytes_sent(0)
        assert max(one.run(step_error, 1, timeout=40)) < LIMIT
        assert other.bytes_sent(0) - before < 1000


def test_times_that_are_none_are_refused() -> None:
    with Hosts(2) as hosts:
        for name, value in (("timeout", -1.0), ("timeout", float("nan")), ("ring_timeout", 0.0), ("threads", 0)):
            with pytest.raises(ValueError, match=f"{name} must be positive"):
                hosts.run(step_error, 1, **{name: value})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="timeout must be positive"):
            hosts.torchrun(["script.py"], 1, timeout=float("nan"))
        with pytest.raises(ValueError, match="seconds must be positive"):
            hosts.link_rate(0)


def test_a_rank_that_raises_is_reported_with_its_words() -> None:
    def body(ring: Ring) -> None:
        if ring.rank == 1:
            raise ValueError("of its own")

    with Hosts(2) as hosts, pytest.raises(RankFailedError) as caught:
        hosts.run(body, 1, timeout=40)
    assert caught.value.errors == {1: "ValueError: of its own"}


def test_what_runs_meanwhile_raises_in_the_caller() -> None:
    def meanwhile(processes: list[Any]) -> None:
        assert [process.is_alive() for process in processes] == [True, True]
        raise ValueError("of its own")

    with Hosts(2) as hosts, pytest.raises(ValueError, match="of its own"):
        hosts.run(step_error, 1, timeout=40, meanwhile=meanwhile)


def test_hosts_are_gone_after_their_block() -> None:
    with Hosts(1) as hosts:
        pass
    with pytest.raises(HostsError, match="only inside"):
        hosts.run(step_error, 1)
