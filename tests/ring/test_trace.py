"""A ring that is asked to keeps what every round took, and it can be drawn."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from burst_attention import Layout, Ring, burst_attention, full, plan
from burst_attention.launch import run_processes
from burst_attention.ring import TraceEvent
from burst_attention.trace import chrome_trace, timeline, write_chrome_trace

TOKENS, RANKS = 256, 4


@pytest.fixture(scope="module")
def traces() -> list[list[TraceEvent]]:
    def body(ring: Ring) -> list[TraceEvent]:
        again = Ring.from_group(trace=True)
        again.hosts = ("a", "a", "b", "b")
        layout = Layout.contiguous(TOKENS, RANKS)
        q, k, v = (torch.randn(1, 2, TOKENS // RANKS, 16, requires_grad=True) for _ in range(3))
        burst_attention(q, k, v, ring=again, layout=layout, head_groups=1).sum().backward()
        assert again is ring and again.trace is not None
        return again.trace

    return run_processes(body, RANKS, timeout=60)


def test_every_round_and_every_byte_is_there(traces: list[list[TraceEvent]]) -> None:
    made = plan(TOKENS, RANKS, heads=2, head_dim=16, dtype=torch.float32, mask=full(), ranks_per_host=2, head_groups=1)
    for rank, events in enumerate(traces):
        for phase in ("forward", "backward"):
            mine = [event for event in events if event.phase == phase]
            assert [event.round for event in mine] == list(range(len(made.phase(phase).rounds[rank])))
            assert sum(t.sent_bytes for event in mine for t in event.transfers) == made.bytes_sent(rank, phase)
        assert any(t.lane == 1 for event in events for t in event.transfers)
        for event in events:
            assert event.compute >= 0 and event.wait >= 0 and event.waited_from >= event.started
            assert all(t.posted <= t.done <= event.waited_from + event.wait + 1e-3 for t in event.transfers)


def test_a_chrome_trace_has_a_process_per_rank(traces: list[list[TraceEvent]], tmp_path: Path) -> None:
    write_chrome_trace(tmp_path / "trace.json", traces)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(RANKS))
    drawn = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in drawn} == {"compute", "wait", "inside", "between"}
    assert min(event["ts"] for event in drawn) == 0 and all(event["dur"] >= 0 for event in drawn)


def test_a_timeline_is_a_picture_of_all_ranks(traces: list[list[TraceEvent]]) -> None:
    root = ElementTree.fromstring(timeline(traces))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {f"rank {rank}" for rank in range(RANKS)} <= set(texts)
    bars = len(list(root.iter("{http://www.w3.org/2000/svg}title")))
    assert bars == sum(event["ph"] == "X" for event in chrome_trace(traces)["traceEvents"])


def test_no_trace_is_kept_unless_asked() -> None:
    assert run_processes(lambda ring: ring.trace, 2, timeout=60) == [None, None]
    assert timeline([]).startswith("<svg") and chrome_trace([])["traceEvents"] == []
