"""Each kind of fault between hosts, at a moment that chance chooses, and what every rank must say of it.

Four ranks on two hosts train on a double ring. After each fault the hosts must be empty and serve another run.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from burst_attention import Ring, RingError, burst_attention
from burst_attention.hosts import Hosts
from burst_attention.launch import RankFailedError
from burst_attention.namespaces import inside, processes_in
from tests.hosts.rank_bodies import LIMIT, await_traffic, step_error
from tests.ring.fault_injection import fail_at_call
from tests.ring.listening import listening
from tests.ring.strangers import await_ports, await_store, damage, intrude, late

PER_HOST, RANKS = 2, 4
LONGEST = 60.0
SLACK = 2.0
"""Seconds that a rank may take beyond its timeout: to compute what came before, and for its turn on a busy core."""
WAITED = r"(forward|backward) (round \d+|agreement): .*\brank \d.* \[(?P<seconds>[\d.]+) s after its call\]"
"""What a survivor says: the place, whom it waited for and for what, and how long its call took."""
OTHER_TOKENS = "ValueError: rank {rank} holds 128 query tokens, but .* gives it 256"
WELL, BADLY, EITHER = "well", "badly", "either"


@dataclass(frozen=True)
class Conduct:
    """What one rank does at one step, all others doing as they should."""

    rank: int = -1
    step: int = 0
    deed: Callable[[], None] = lambda: None
    tokens: int = 1024


@dataclass(frozen=True)
class Kind:
    """A fault: what a rank does, or what is done to hosts meanwhile, and how the run must end."""

    ends: str
    conduct: Callable[[random.Random, int, float], Conduct] = lambda chance, steps, timeout: Conduct()
    act: Callable[[Hosts, list[Any], random.Random], None] | None = None
    meeting: bool = False
    """Whether it befalls the rendezvous: ranks then come at different times."""
    dies: bool = False
    """Whether a rank is killed by it."""
    refused: str | None = None
    """What all ranks say of arguments that are refused, and of the rank that gave them."""


def train(ring: Ring, conduct: Conduct, steps: int) -> float:
    """Steps of forward and backward, then the error of one more that is compared with torch's."""
    for step in range(steps):
        mine = ring.rank == conduct.rank and step == conduct.step
        if mine:
            conduct.deed()
        tokens = conduct.tokens if mine else 1024
        q, k, v = (torch.ones(1, 2, tokens // ring.size, 64, requires_grad=True) for _ in range(3))
        called = time.monotonic()
        try:
            burst_attention(q, k, v, ring=ring, topology="double").sum().backward()
        except RingError as error:
            raise RingError(f"{error} [{time.monotonic() - called:.1f} s after its call]") from error
    return step_error(ring)


def killed(phase: str | None) -> Callable[[random.Random, int, float], Conduct]:
    """In a phase, while the others wait for its blocks and send theirs; or between two steps."""

    def conduct(chance: random.Random, steps: int, timeout: float) -> Conduct:
        call, pause = chance.randrange(1, 5), chance.uniform(0.0, 0.05)

        def die() -> None:
            time.sleep(pause)
            os.kill(os.getpid(), signal.SIGKILL)

        deed = die if phase is None else lambda: fail_at_call(phase, call, die)
        return Conduct(chance.randrange(RANKS), chance.randrange(1, steps), deed)

    return conduct


def sleeps(timeouts: float) -> Callable[[random.Random, int, float], Conduct]:
    def conduct(chance: random.Random, steps: int, timeout: float) -> Conduct:
        return Conduct(chance.randrange(RANKS), chance.randrange(steps), lambda: time.sleep(timeouts * timeout))

    return conduct


def other_arguments(chance: random.Random, steps: int, timeout: float) -> Conduct:
    return Conduct(chance.randrange(RANKS), chance.randrange(steps), tokens=512)


def at_some_moment(hosts: Hosts, chance: random.Random) -> None:
    await_traffic(hosts, 200_000)
    time.sleep(chance.uniform(0.0, 0.3))


def cut_for_good(hosts: Hosts, processes: list[Any], chance: random.Random) -> None:
    at_some_moment(hosts, chance)
    hosts.cut(chance.randrange(2))


def cut_for_a_moment(hosts: Hosts, processes: list[Any], chance: random.Random) -> None:
    at_some_moment(hosts, chance)
    host = chance.randrange(2)
    hosts.cut(host)
    time.sleep(chance.uniform(0.1, 0.8))
    hosts.restore(host)


def damage_the_store(hosts: Hosts, processes: list[Any], chance: random.Random) -> None:
    store = await_store(Path(tempfile.gettempdir()))
    time.sleep(chance.uniform(0.0, 0.2))
    damage(store, chance)


def speak_at_a_port(hosts: Hosts, processes: list[Any], chance: random.Random) -> None:
    with inside(hosts.namespaces[chance.randrange(2)]):
        ports = await_ports(None)
        time.sleep(chance.uniform(0.0, 0.2))
        # A rank may have given up in the meantime.
        made: list[socket.socket] = []
        with suppress(ConnectionError):
            made = intrude(ports, chance)
    time.sleep(chance.choice((0.0, 0.5)))
    for connection in made:
        connection.close()


KINDS = {
    "killed in forward": Kind(BADLY, killed("forward"), dies=True),
    "killed in backward": Kind(BADLY, killed("backward"), dies=True),
    "killed between steps": Kind(BADLY, killed(None), dies=True),
    "link cut for good": Kind(BADLY, act=cut_for_good),
    "link cut for a moment": Kind(WELL, act=cut_for_a_moment),
    "slow rank": Kind(WELL, sleeps(0.5)),
    "other arguments on one rank": Kind(BADLY, other_arguments, refused=OTHER_TOKENS),
    "a rank that does not enter": Kind(BADLY, sleeps(2.0)),
    "a damaged store": Kind(EITHER, act=damage_the_store, meeting=True),
    "a stranger at a rank's port": Kind(EITHER, act=speak_at_a_port, meeting=True),
}


@contextmanager
def ranks_come_at_different_times(needed: bool) -> Iterator[None]:
    """With their store in a folder of its own, where it can be found."""
    if not needed:
        yield
        return

    def moment() -> float:
        return random.Random(os.getpid()).uniform(0.0, 0.3)

    with tempfile.TemporaryDirectory(prefix="burst-fault-") as folder, mock.patch.object(tempfile, "tempdir", folder):
        with late("FileStore", moment), late("init_process_group", moment):
            yield
        assert list(Path(folder).iterdir()) == [], "a run has left its store behind"


def judge(errors: dict[int, str], kind: Kind, timeout: float, culprit: int = -1) -> str | None:
    """What is wrong with how a run ended that failed; None if every survivor told in time what it waited for."""
    if kind.ends == WELL:
        return f"it failed: {errors}"
    for rank, text in errors.items():
        named = re.match(rf"RingError: rank {rank}, {WAITED}", text, re.DOTALL)
        late = named is not None and float(named["seconds"]) > timeout + SLACK
        named = re.match(kind.refused.format(rank=culprit), text) if kind.refused else named
        unmet = kind.meeting and re.match(rf"RingError: rank {rank}(, rendezvous|: no ring of {RANKS} ranks)", text)
        if late or (not named and not unmet and text != "died with exit code -9"):
            return f"rank {rank}: {text}"
    died = sum(text.startswith("died") for text in errors.values())
    if died > 1 or (died != kind.dies and not kind.meeting):
        return f"{died} ranks died: {errors}"
    return None if len(errors) == RANKS else f"only ranks {sorted(errors)} ended with an error: {errors}"


def left_on(hosts: Hosts) -> list[Any]:
    """Processes and ports that a run has left on hosts."""
    found: list[Any] = processes_in(hosts.namespaces)
    for space in hosts.namespaces:
        with inside(space):
            found += listening()
    return found


def once(name: str, chance: random.Random, *, ring_timeout: float = 3.0, steps: int = 12) -> str | None:
    """One fault on fresh hosts, and a run on the same hosts after it; what was wrong."""
    kind, wrong = KINDS[name], None
    conduct = kind.conduct(chance, steps, ring_timeout)
    act, started = kind.act, time.monotonic()
    # What must end well may take its time on a busy machine; until a fault from outside comes there must be work.
    timeout = 4 * ring_timeout if kind.ends == WELL else ring_timeout
    rounds = 200 if act is not None and kind.ends == BADLY else steps
    with Hosts(2, mbit=200) as hosts:
        with ranks_come_at_different_times(kind.meeting):
            try:
                errors = hosts.run(
                    lambda ring: train(ring, conduct, rounds),
                    PER_HOST,
                    timeout=LONGEST,
                    ring_timeout=timeout,
                    meanwhile=None if act is None else lambda processes: act(hosts, processes, chance),
                )
                if kind.ends == BADLY or max(errors) >= LIMIT:
                    wrong = f"it ended with errors {errors}"
            except RankFailedError as error:
                wrong = judge(error.errors, kind, timeout, conduct.rank)
        if left := left_on(hosts):
            wrong = f"left on hosts: {left}"
        if time.monotonic() - started > LONGEST / 2:
            wrong = f"it took {time.monotonic() - started:.0f} s: {wrong}"
        for host in range(2):
            hosts.restore(host)
        again = hosts.run(step_error, PER_HOST, timeout=LONGEST)
        if max(again) >= LIMIT:
            wrong = f"after it: {again}"
    return wrong
