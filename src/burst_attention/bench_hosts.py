"""`burst bench hosts`: rings between hosts with limited links, made as network namespaces on this machine.

What is compared runs in turns within one run, on the same hosts: the links' real rate cancels in every ratio.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burst_attention import engine
from burst_attention.api import burst_attention, plan
from burst_attention.bench import append_rows, machine
from burst_attention.bench_peers import peer_rows, spread
from burst_attention.hosts import Hosts, hosts_refusal
from burst_attention.layout import Layout
from burst_attention.mask import causal, full
from burst_attention.namespaces import inside
from burst_attention.ring import Pending, Ring, TraceEvent
from burst_attention.schedule import Plan
from burst_attention.trace import timeline, write_chrome_trace

Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class HostsCase:
    """Hosts, their links, and the attention of one comparison."""

    hosts: int
    per_host: int
    mbit: float
    tokens_per_rank: int
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 64
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    @property
    def call(self) -> dict[str, Any]:
        layout = Layout("zigzag" if self.causal else "contiguous", self.ranks * self.tokens_per_rank, self.ranks)
        return {"mask": causal() if self.causal else full(), "layout": layout}

    def plan(self, topology: str = "flat", **options: Any) -> Plan:
        shapes: dict[str, Any] = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        per_host = self.per_host if topology == "double" else 1
        tokens = self.ranks * self.tokens_per_rank
        shapes |= {"dtype": self.dtype, "ranks_per_host": per_host}
        made: Plan = plan(tokens, self.ranks, **shapes, **self.call, **options)
        return made

    def fields(self) -> dict[str, Any]:
        return {
            "hosts": self.hosts, "per_host": self.per_host, "mbit": self.mbit, "causal": self.causal,
            "tokens_per_rank": self.tokens_per_rank, "heads": self.heads, "kv_heads": self.kv_heads,
            "head_dim": self.head_dim, "dtype": str(self.dtype).removeprefix("torch."),
        }  # fmt: skip

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        q, k, v, dout = (
            torch.randn(1, count, self.tokens_per_rank, self.head_dim).to(self.dtype).requires_grad_()
            for count in heads
        )
        return q, k, v, dout.detach()


Variant = dict[str, Any]
"""Options of a call, and "stub": what is left out, "compute", "transfer", or "posting" of one before compute."""


def attend(ring: Ring, case: HostsCase, options: Variant, backward: bool) -> float:
    """Seconds of one forward, with backward if asked, on this rank, from a common start."""
    q, k, v, dout = case.inputs()
    with torch.set_grad_enabled(backward):
        dist.barrier()
        started = time.perf_counter()
        out = burst_attention(q, k, v, ring=ring, check="off", **case.call, **options)
        if backward:
            torch.autograd.grad(out, (q, k, v), dout)
        return time.perf_counter() - started


class Buffers:
    """A ring's buffers, kept from one call for the next: without transfers they hold what arrived before.

    Zeros would not do, for compute depends on its data.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], list[Tensor]] = {}
        self.taken: dict[tuple[str, int], int] = {}

    def start_call(self) -> None:
        self.taken.clear()

    def __call__(self, nbytes: int, device: torch.device, what: str) -> Tensor:
        key = what, nbytes
        index = self.taken[key] = self.taken.get(key, -1) + 1
        kept = self.kept.setdefault(key, [])
        if index == len(kept):
            kept.append(torch.zeros(nbytes, dtype=torch.uint8, device=device))
        return kept[index]


@contextlib.contextmanager
def stubbed(ring: Ring, what: str | None, buffers: Buffers) -> Iterator[None]:
    """Leave out what a rank computes, or what it transfers, so that the other can be timed alone."""
    buffers.start_call()
    with _attributes(ring, buffer=buffers):
        yield from _without(ring, what) if what else iter([None])


@contextlib.contextmanager
def _attributes(ring: Ring, **given: Any) -> Iterator[None]:
    """A ring with other attributes for a while."""
    ring.__dict__.update(given)
    try:
        yield
    finally:
        for name in given:
            del ring.__dict__[name]


def _without(ring: Ring, what: str) -> Iterator[None]:
    if what == "compute":
        kept = {name: getattr(engine.PhaseRun, name) for name in ("_compute_round", "_combine")}
        for name in kept:
            setattr(engine.PhaseRun, name, lambda *args: None)
        try:
            yield
        finally:
            for name, method in kept.items():
                setattr(engine.PhaseRun, name, method)
        return
    start, finish = ring._start, ring._finish

    def finish_late(pending: Pending) -> None:
        start(pending)
        finish(pending)

    with _attributes(
        ring, _start=lambda pending: None, _finish=finish_late if what == "posting" else lambda pending: None
    ):
        yield


def compare(
    hosts: Hosts, case: HostsCase, variants: dict[str, Variant], repeat: int, backward: bool
) -> dict[str, list[float]]:
    """Seconds of each variant, the slowest rank's, turn by turn."""

    def body(ring: Ring) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in variants}
        # Where something is timed alone, all keep their buffers, so that nothing else differs.
        buffers, alone = Buffers(), any("stub" in variant for variant in variants.values())
        for turn in range(repeat + 1):
            for name, variant in variants.items():
                options = {key: value for key, value in variant.items() if key != "stub"}
                with stubbed(ring, variant.get("stub"), buffers) if alone else contextlib.nullcontext():
                    spent = attend(ring, case, options, backward)
                if turn:
                    times[name].append(spent)
        return times

    ranks = hosts.run(body, case.per_host, timeout=900, ring_timeout=300)
    return {name: [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)] for name in variants}


def of_turns(measure: Callable[..., float], *times: list[float]) -> float:
    """The median of a measure that each turn gives: what else runs on this machine slows neighbours in time alike."""
    return round(statistics.median(measure(*turn) for turn in zip(*times, strict=True)), 3)


def hidden_share(both: float, compute: float, transfer: float) -> float:
    return (compute + transfer - both) / min(compute, transfer)


def between_bytes(made: Plan, case: HostsCase) -> int:
    """Bytes that the busiest host sends to others, both phases."""
    return max(leaving_bytes(made, case, host) for host in range(case.hosts))


def leaving_bytes(made: Plan, case: HostsCase, host: int) -> int:
    """Bytes that a host sends to others, both phases; in a flat ring laid host by host too."""
    phases = (phase for phase in (made.forward, made.backward) if phase)
    sends = ((phase, t) for phase in phases for rounds in phase.rounds for step in rounds for t in step.sends)
    of = case.per_host
    leaving = (phase.nbytes(t) for phase, t in sends if t.source // of == host and t.target // of != host)
    return made.groups * sum(leaving)


SMALL: dict[str, Any] = {"tokens_per_rank": 32, "heads": 128, "kv_heads": 128, "head_dim": 256}
"""Few operations per byte, so that two cores for all ranks are faster than the links."""
SPEED = tuple(HostsCase(2, per_host, 200, causal=masked, **SMALL) for per_host in (2, 4) for masked in (False, True))


STUBBED: dict[str, Variant] = {
    "flat transfer": {"topology": "flat", "stub": "compute"},
    "double transfer": {"topology": "double", "stub": "compute"},
    "double compute": {"topology": "double", "stub": "transfer"},
}


def speed_rows(repeat: int) -> Rows:
    """Flat against double ring, forward + backward, and what each takes without its compute or its transfers."""
    # Four groups of heads, as a double ring has by itself, in both: what differs is the ring.
    variants: dict[str, Variant] = {name: {"topology": name, "head_groups": 4} for name in ("flat", "double")}
    for case in SPEED:
        with Hosts(case.hosts, mbit=case.mbit) as hosts:
            rate = hosts.link_rate()
            before = hosts.bytes_sent(0)
            times = compare(hosts, case, variants, repeat, True)
            sent = hosts.bytes_sent(0) - before
            alone = compare(hosts, case, STUBBED, repeat, True)
        planned = {name: between_bytes(case.plan(name), case) for name in ("flat", "double")}
        yield {
            "suite": "hosts-speed", **case.fields(), "repeat": repeat, "link_mbit": round(rate, 1),
            "flat_s": spread(times["flat"]), "double_s": spread(times["double"]),
            "alone_s": {name: statistics.median(spent) for name, spent in alone.items()},
            "ratio": of_turns(truediv, times["flat"], times["double"]),
            "planned_ratio": round(planned["flat"] / planned["double"], 3),
            "planned_bytes": planned, "floor_s": {name: 8e-6 * count / rate for name, count in planned.items()},
            "sent_bytes": sent,
            "planned_sent_bytes": (repeat + 1) * sum(leaving_bytes(case.plan(name), case, 0) for name in variants),
        }  # fmt: skip


DIRECTIONS = tuple(
    HostsCase(4, 1, 200, causal=masked, **(SMALL | {"kv_heads": kv_heads}))
    for kv_heads in (128, 32)
    for masked in (False, True)
)


def direction_rows(repeat: int) -> Rows:
    """Backward with the query side or the key side moving, and what is chosen, forward + backward."""
    sides = ("query", "kv", "auto")
    for case in DIRECTIONS:
        with Hosts(case.hosts, mbit=case.mbit) as hosts:
            rate = hosts.link_rate()
            times = compare(hosts, case, {side: {"direction": side} for side in sides}, repeat, True)
        planned = {side: between_bytes(case.plan(direction=side), case) for side in sides}
        better = min(times["query"], times["kv"], key=statistics.median)
        yield {
            "suite": "hosts-directions", **case.fields(), "repeat": repeat, "link_mbit": round(rate, 1),
            **{f"{side}_s": spread(times[side]) for side in sides}, "planned_bytes": planned,
            "ratio": of_turns(truediv, times["kv"], times["query"]),
            "planned_ratio": round(planned["kv"] / planned["query"], 3),
            "auto_over_better": of_turns(truediv, times["auto"], better),
        }  # fmt: skip


# A hop is hidden by the compute of a round, half of all with two ranks: the later rows are at that edge, or beyond.
HIDDEN = (
    (HostsCase(2, 1, 200, 4096, heads=8, kv_heads=8), False),
    (HostsCase(2, 1, 100, 8192, heads=4, kv_heads=4), False),
    (HostsCase(2, 1, 200, 4096, heads=8, kv_heads=8), True),
    (HostsCase(2, 1, 200, 2048, heads=16, kv_heads=16), False),
    (HostsCase(2, 1, 100, 4096, heads=8, kv_heads=8), False),
    (HostsCase(2, 1, 125, 4096, heads=8, kv_heads=8), True),
    (HostsCase(2, 1, 100, 4096, heads=8, kv_heads=8), True),
    (HostsCase(2, 1, 800, 2048, heads=16, kv_heads=16), False),
)


def hidden_rows(repeat: int) -> Rows:
    """How much of the transfers is hidden behind compute, from three timings of one run."""
    variants: dict[str, Variant] = {"both": {}, "compute": {"stub": "transfer"}, "transfer": {"stub": "compute"}}
    for case, backward in HIDDEN:
        with Hosts(case.hosts, mbit=case.mbit) as hosts:
            rate = hosts.link_rate()
            times = compare(hosts, case, variants, repeat, backward)
        yield {
            "suite": "hosts-hidden", **case.fields(), "repeat": repeat, "link_mbit": round(rate, 1),
            "backward": backward, **{f"{name}_s": spread(times[name]) for name in variants},
            "hidden": of_turns(hidden_share, *(times[name] for name in variants)),
        }  # fmt: skip


FAST = HostsCase(2, 1, 800, 2048, heads=16, kv_heads=16)
SOCKETS = (None, 64, 16384)
"""Most KiB of a socket's buffers, each way; None is what the system gives."""


def limit_sockets(hosts: Hosts, kib: int) -> None:
    """Bound the buffers of sockets that are made on hosts."""
    for space in hosts.namespaces:
        with inside(space):
            for way in ("tcp_rmem", "tcp_wmem"):
                Path(f"/proc/sys/net/ipv4/{way}").write_text(f"4096 {min(kib, 64) * 1024} {kib * 1024}")


def socket_rows(repeat: int) -> Rows:
    """What posting early, the size of messages and sockets' buffers do for what is hidden, on a fast link."""
    variants: dict[str, Variant] = {"both": {}, "compute": {"stub": "transfer"}, "transfer": {"stub": "compute"}}
    variants["late"] = {"stub": "posting"}
    for kib, groups in itertools.product(SOCKETS, (1, 4)):
        with Hosts(FAST.hosts, mbit=FAST.mbit) as hosts:
            if kib is not None:
                limit_sockets(hosts, kib)
            grouped = {name: {**options, "head_groups": groups} for name, options in variants.items()}
            times = compare(hosts, FAST, grouped, repeat, False)
        message = between_bytes(FAST.plan(head_groups=groups, requires_grad=""), FAST) // groups
        yield {
            "suite": "hosts-sockets", **FAST.fields(), "repeat": repeat, "socket_kib": kib, "message_bytes": message,
            **{f"{name}_s": spread(times[name]) for name in variants},
            "hidden": of_turns(hidden_share, times["both"], times["compute"], times["transfer"]),
            "hidden_late": of_turns(hidden_share, times["late"], times["compute"], times["transfer"]),
        }  # fmt: skip


LINKS = (100, 200, 400, 800)


def link_rows(repeat: int) -> Rows:
    """What a plain socket gets of a link's rate, the best of the repetitions: others use this machine too."""
    for mbit in LINKS:
        with Hosts(2, mbit=mbit) as hosts:
            rate = max(hosts.link_rate() for _ in range(repeat))
        yield {"suite": "hosts-links", "mbit": mbit, "link_mbit": round(rate, 1), "repeat": repeat}


PARTS: dict[str, Callable[[int], Rows]] = {
    "links": link_rows,
    "speed": speed_rows,
    "directions": direction_rows,
    "hidden": hidden_rows,
    "sockets": socket_rows,
    "peers": peer_rows,
}


def draw_timeline(case: HostsCase, prefix: str) -> None:
    """Trace one forward and backward of a double ring, print each round, and write PREFIX.json and PREFIX.svg."""

    def body(ring: Ring) -> list[TraceEvent]:
        attend(ring, case, {"topology": "double"}, True)
        kept: list[TraceEvent] = []
        ring.trace = kept
        attend(ring, case, {"topology": "double"}, True)
        return kept

    with Hosts(case.hosts, mbit=case.mbit) as made:
        traces = made.run(body, case.per_host, timeout=900, ring_timeout=300)
    write_chrome_trace(f"{prefix}.json", traces)
    Path(f"{prefix}.svg").write_text(timeline(traces))
    due = "transfers due, ms (bytes sent)"
    print(f"{'rank':>4} {'phase':8} {'round':>5} {'heads':>5} {'compute, ms':>12} {'wait, ms':>9} {due}")
    for rank, events in enumerate(traces):
        for event in events:
            moved = ", ".join(f"{1e3 * (t.done - t.posted):.0f} ({t.sent_bytes:,})" for t in event.transfers)
            times = f"{1e3 * event.compute:12.1f} {1e3 * event.wait:9.1f}"
            print(f"{rank:4} {event.phase:8} {event.round:5} {event.group:5} {times} {moved}")
    print(f"wrote {prefix}.json (open it in ui.perfetto.dev) and {prefix}.svg")


def hosts(
    repeat: int, output: str | None = None, only: str | None = None, trace: str | None = None
) -> list[dict[str, Any]]:
    """Measure on hosts of this machine, print the rows, and append each to `output` when it is given.

    With `trace`, a double ring's rounds are drawn instead.
    """
    if only not in (None, *PARTS):
        raise ValueError(f"--only takes one of {', '.join(PARTS)}, got {only!r}")
    if repeat < 1:
        raise ValueError(f"--repeat must be at least 1, got {repeat}")
    if reason := hosts_refusal():
        raise ValueError(f"bench hosts cannot make hosts here: {reason}")
    if trace is not None:
        draw_timeline(SPEED[0], trace)
        return []
    rows = []
    for part, make in PARTS.items():
        if only in (None, part):
            for row in make(repeat):
                rows.append(row | machine())
                print(json.dumps(row), flush=True)
                append_rows(output, rows[-1:])
    return rows
