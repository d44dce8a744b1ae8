"""A ring that is asked to keeps what every round took, and it can be drawn."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from burst_attention import Layout, Plan, Ring, burst_attention, full, plan
from burst_attention.launch import run_processes
from burst_attention.ring import TraceEvent
from burst_attention.trace import chrome_trace, timeline, write_chrome_trace

TOKENS, RANKS = 256, 4


HOSTS = ("a", "a", "b", "b")
LINKS = ("inside", "between")


def trace_of(ring: Ring, **options: Any) -> list[TraceEvent]:
    """What a rank keeps of one forward and backward."""
    again = Ring.from_group(trace=True)
    again.hosts = HOSTS
    layout = Layout.contiguous(TOKENS, RANKS)
    q, k, v = (torch.randn(1, 2, TOKENS // RANKS, 16, requires_grad=True) for _ in range(3))
    burst_attention(q, k, v, ring=again, layout=layout, **options).sum().backward()
    assert again is ring and again.trace is not None
    return again.trace


@pytest.fixture(scope="module")
def traces() -> list[list[TraceEvent]]:
    return run_processes(lambda ring: trace_of(ring, head_groups=1), RANKS, timeout=60)


def test_every_round_and_every_byte_is_there(traces: list[list[TraceEvent]]) -> None:
    made = plan(TOKENS, RANKS, heads=2, head_dim=16, dtype=torch.float32, mask=full(), ranks_per_host=2, head_groups=1)
    for rank, events in enumerate(traces):
        for phase in ("forward", "backward"):
            mine = [event for event in events if event.phase == phase]
            assert [event.round for event in mine] == list(range(len(made.phase(phase).rounds[rank])))
            assert sum(t.sent_bytes for event in mine for t in event.transfers) == made.bytes_sent(rank, phase)
        for event in events:
            assert event.compute >= 0 and event.wait >= 0 and event.waited_from >= event.started
            assert all(t.posted <= t.done <= event.waited_from + event.wait + 1e-3 for t in event.transfers)


def drawn_bytes(traces: list[list[TraceEvent]]) -> dict[tuple[int, str, str], list[int]]:
    """Bytes sent and received by rank, round and kind of link, as the Chrome trace has them."""
    found: dict[tuple[int, str, str], list[int]] = {}
    for event in chrome_trace(traces)["traceEvents"]:
        if event.get("cat") in LINKS:
            key = event["pid"], "{phase} {round}".format(**event["args"]), event["cat"]
            sizes = found.setdefault(key, [0, 0])
            for end, name in enumerate(("sent_bytes", "received_bytes")):
                sizes[end] += event["args"][name]
    return found


def planned_bytes(made: Plan) -> dict[tuple[int, str, str], list[int]]:
    """The same from the plan: transfers end in the round that they are due in."""
    found: dict[tuple[int, str, str], list[int]] = {}
    for name in ("forward", "backward"):
        phase = made.phase(name)
        for transfer in (t for rounds in phase.rounds for step in rounds for t in step.sends):
            kind = LINKS[HOSTS[transfer.source] != HOSTS[transfer.target]]
            for end, rank in enumerate((transfer.source, transfer.target)):
                found.setdefault((rank, f"{name} {transfer.due}", kind), [0, 0])[end] += phase.nbytes(transfer)
    return found


def test_a_transfer_is_drawn_by_the_hosts_at_its_ends(traces: list[list[TraceEvent]]) -> None:
    """Also the last results, which cross to another host and have one round for it, as those inside have."""
    made = plan(TOKENS, RANKS, heads=2, head_dim=16, dtype=torch.float32, mask=full(), ranks_per_host=2, head_groups=1)
    drawn = drawn_bytes(traces)
    assert drawn == planned_bytes(made)
    last = made.phase("backward").rounds[0][-1]
    assert [(t.channel, t.link, t.spans) for t in last.sends] == [("result", "between", False)]
    for rank in range(RANKS):
        assert (rank, f"backward {last.index}", "between") in drawn
        assert (rank, f"backward {last.index}", "inside") not in drawn


def test_transfers_posted_together_are_drawn_by_both_kinds_of_link() -> None:
    """In a flat ring a rank sends to the next host what it receives inside its own, or the reverse."""
    traces = run_processes(lambda ring: trace_of(ring, topology="flat"), RANKS, timeout=60)
    made = plan(TOKENS, RANKS, heads=2, head_dim=16, dtype=torch.float32, mask=full())
    drawn = drawn_bytes(traces)
    assert drawn == planned_bytes(made)
    assert drawn[1, "forward 0", "inside"][1] and drawn[1, "forward 0", "between"][0]


def test_heads_exchanged_inside_a_host_are_drawn_there() -> None:
    """And what the rings between such groups move crosses to another host: those rings number their ranks anew."""
    traces = run_processes(lambda ring: trace_of(ring, heads=2), RANKS, timeout=60)
    kinds = {(name.startswith("exchange", name.index(" ") + 1), kind) for _, name, kind in drawn_bytes(traces)}
    assert kinds == {(True, "inside"), (False, "between")}


def test_a_chrome_trace_has_a_process_per_rank(traces: list[list[TraceEvent]], tmp_path: Path) -> None:
    write_chrome_trace(tmp_path / "trace.json", traces)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(RANKS))
    drawn = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in drawn} == {"compute", "wait", "inside", "between"}
    assert min(event["ts"] for event in drawn) == 0 and all(event["dur"] >= 0 for event in drawn)


def test_transfers_under_way_together_do_not_share_a_line() -> None:
    """Groups of heads overlap; viewers drop slices of a line that do."""
    found = run_processes(lambda ring: trace_of(ring, head_groups=2), RANKS, timeout=60)
    events = [event for event in chrome_trace(found)["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["group"] for event in events} == {0, 1}
    assert all("heads' group" in event["name"] for event in events)
    lines: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["cat"] in LINKS:
            lines.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert max(tid for _, tid in lines) > 2, "nothing overlapped, so nothing was tried"
    for slices in lines.values():
        ordered = sorted(slices)
        assert all(before[1] <= after[0] + 1e-3 for before, after in itertools.pairwise(ordered))


def test_a_timeline_is_a_picture_of_all_ranks(traces: list[list[TraceEvent]]) -> None:
    root = ElementTree.fromstring(timeline(traces))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {f"rank {rank}" for rank in range(RANKS)} <= set(texts)
    bars = len(list(root.iter("{http://www.w3.org/2000/svg}title")))
    assert bars == sum(event["ph"] == "X" for event in chrome_trace(traces)["traceEvents"])


def test_no_trace_is_kept_unless_asked() -> None:
    assert run_processes(lambda ring: ring.trace, 2, timeout=60) == [None, None]
    assert timeline([]).startswith("<svg") and chrome_trace([])["traceEvents"] == []
