"""`burst bench hosts --only peers`: ours against other ways to spread an attention, on the same hosts and tiles.

All variants of a case run in turns within one run, forward and backward, and what leaves each host is counted.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burst_attention.api import burst_attention, plan
from burst_attention.hosts import INTERFACE, Hosts
from burst_attention.layout import Layout
from burst_attention.mask import Mask, causal, window
from burst_attention.peers import PEERS
from burst_attention.ring import Ring
from burst_attention.schedule import HeadsPlan, Plan

WINDOWS_IN_SEQUENCE = 32
"""The sequence over the window, as 128K tokens over 4K; so `Layout.best` of any such case is contiguous."""


@dataclass(frozen=True)
class PeersCase:
    """Hosts, their links, and the attention that all variants compute."""

    hosts: int
    per_host: int
    tokens_per_rank: int
    heads: int
    kv_heads: int
    windowed: bool
    head_dim: int = 64
    mbit: float = 200
    dtype: torch.dtype = torch.bfloat16

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    @property
    def tokens(self) -> int:
        return self.ranks * self.tokens_per_rank

    @property
    def mask(self) -> Mask:
        return causal() & window(self.tokens // WINDOWS_IN_SEQUENCE) if self.windowed else causal()

    @property
    def layout(self) -> Layout:
        """What a user would take, for ours and for every peer that can."""
        return Layout.best(self.tokens, self.ranks, self.mask)

    @property
    def shapes(self) -> dict[str, Any]:
        fields = ("heads", "kv_heads", "head_dim", "dtype")
        return {name: getattr(self, name) for name in fields}

    def fields(self) -> dict[str, Any]:
        names = ("hosts", "per_host", "mbit", "tokens_per_rank", "heads", "kv_heads", "head_dim")
        texts = {"mask": str(self.mask), "layout": self.layout.name, "dtype": str(self.dtype).removeprefix("torch.")}
        return {name: getattr(self, name) for name in names} | texts

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """This rank's q, k, v and dout; time does not depend on which tokens they stand for."""
        torch.manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        q, k, v, dout = (torch.randn(1, count, self.tokens_per_rank, self.head_dim).to(self.dtype) for count in heads)
        return q, k, v, dout


Options = dict[str, Any]
OURS: dict[str, Callable[[PeersCase], Options]] = {
    "ours": lambda case: {},
    "ours, bf16 gradients": lambda case: {"wire_dtype": torch.bfloat16},
    # Inside each host where it has several ranks; else over all hosts, which is Ulysses.
    "ours, heads exchanged": lambda case: {"heads": case.per_host if case.per_host > 1 else case.ranks},
}
"""Variants of ours, by the options they add to a plain call."""

HOSTS = ((2, 1), (4, 1), (2, 2))
GROUPS = (1, 4)
"""Query heads per key head."""
EVEN = tuple(
    PeersCase(hosts, per_host, 1024, 16, 16 // group, windowed)
    for windowed in (False, True)
    for group in GROUPS
    for hosts, per_host in HOSTS
)
"""Links and cores have about as much to do."""
SHORT = tuple(PeersCase(hosts, per_host, 256, 64, 64 // group, False) for group in GROUPS for hosts, per_host in HOSTS)
"""The same bytes with a quarter of the compute: links are the bound."""
CASES = EVEN + SHORT


def make_variants(ring: Ring, case: PeersCase) -> dict[str, Callable[[], None]]:
    """One forward and backward of each variant, on this rank."""
    q, k, v, dout = case.inputs()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    layout = case.layout

    def run_ours(options: Options) -> None:
        out = burst_attention(*leaves, ring=ring, mask=case.mask, layout=layout, check="off", **options)
        torch.autograd.grad(out, leaves, dout)

    def run_peer(name: str) -> None:
        # Heads are exchanged for whole sequences, which must lie in order; their work is even as it is.
        taken = Layout.contiguous(case.tokens, case.ranks) if name == "Ulysses" else layout
        peer = PEERS[name](case.mask, taken, **case.shapes)
        peer.forward(q, k, v)
        peer.backward(dout)

    ours = {name: partial(run_ours, options(case)) for name, options in OURS.items()}
    return {**ours, **{name: partial(run_peer, name) for name in PEERS}}


Measured = dict[str, list[tuple[float, int]]]
"""By variant, seconds of a rank and bytes that left its host, for every turn."""


def bytes_sent_here() -> int:
    """Bytes that have left the host of this process on its link, headers and acknowledgements included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise RuntimeError(f"this process has no interface {INTERFACE}: it is not on a host")


def measure_rank(ring: Ring, case: PeersCase, repeat: int) -> Measured:
    """Seconds, and bytes that left this rank's host, of every repetition of every variant; all take turns."""
    variants = make_variants(ring, case)
    found: Measured = {name: [] for name in variants}
    for turn in range(repeat + 1):
        for name, variant in variants.items():
            dist.barrier()
            before, started = bytes_sent_here(), time.perf_counter()
            variant()
            spent = time.perf_counter() - started
            dist.barrier()
            # The first turn warms up.
            if turn:
                found[name].append((spent, bytes_sent_here() - before))
    return found


def planned_bytes(case: PeersCase, options: Options) -> int:
    """Bytes that leave all hosts by the plan of ours, both phases."""
    given = {"head_degree" if name == "heads" else name: value for name, value in options.items()}
    made: Plan | HeadsPlan = plan(
        case.tokens,
        case.ranks,
        mask=case.mask,
        layout=case.layout,
        ranks_per_host=case.per_host,
        **case.shapes,
        **given,
    )
    if isinstance(made, HeadsPlan):
        return sum(made.bytes_between_hosts(phase, case.per_host) for phase in ("forward", "backward"))
    return made.groups * sum(phase.bytes_between_hosts for phase in (made.forward, made.backward) if phase)


def cpu_seconds() -> float:
    """Seconds that all cores have worked, less those of this program and the ranks it has seen end.

    What others run on the machine, and the kernel for the links: a row is worth as much as this was small.
    """
    user, nice, system, _, _, irq, softirq, steal = (
        int(ticks) for ticks in Path("/proc/stat").read_text().split()[1:9]
    )
    worked = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    used = os.times()
    return worked - (used.user + used.system + used.children_user + used.children_system)


def peer_rows(repeat: int) -> Iterator[dict[str, Any]]:
    """Seconds of the slowest rank, and bytes that leave all hosts, for ours and for every peer."""
    for case in CASES:
        with Hosts(case.hosts, mbit=case.mbit) as hosts:
            rate = hosts.link_rate()
            started, before = time.perf_counter(), cpu_seconds()
            ranks = hosts.run(
                partial(measure_rank, case=case, repeat=repeat), case.per_host, timeout=900, ring_timeout=300
            )
            elsewhere = (cpu_seconds() - before) / (time.perf_counter() - started) / (os.cpu_count() or 1)
        yield {
            "suite": "hosts-peers", **case.fields(), "repeat": repeat, "link_mbit": round(rate, 1),
            "busy_elsewhere": round(elsewhere, 2),
            **summary(ranks, case.per_host),
            "planned_bytes": {name: planned_bytes(case, options(case)) for name, options in OURS.items()},
        }  # fmt: skip


def spread(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def summary(ranks: list[Measured], per_host: int) -> dict[str, Any]:
    """Medians, both ends, and how much longer ours takes than each peer in the same turn."""
    seconds, sent = {}, {}
    times = {
        name: [max(spent for spent, _ in turn) for turn in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }
    for name, spent in times.items():
        seconds[name] = spread(spent)
        by_host = [statistics.median(count for _, count in rank[name]) for rank in ranks[::per_host]]
        sent[name] = {"all": round(sum(by_host)), "busiest": round(max(by_host))}
    ratios = {
        name: statistics.median(ours / peer for ours, peer in zip(times["ours"], times[name], strict=True))
        for name in PEERS
    }
    # Turn by turn, for what else runs on this machine slows neighbours in time alike.
    over = {name: round(ratio, 3) for name, ratio in ratios.items()}
    return {"seconds": seconds, "sent_bytes": sent, "ours_over": over}
