"""What ranks did when: a ring's trace as a Chrome trace (chrome://tracing, ui.perfetto.dev) and as a picture.

A ring keeps a trace when asked: `Ring.from_group(trace=True)`. Times are seconds of a clock that ranks of one machine
share; ranks of several machines begin at their own zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from burst_attention.ring import TraceEvent, TransferTime
from burst_attention.topology import BETWEEN, INSIDE

Traces = Sequence[Sequence[TraceEvent]]
"""Every rank's trace, in rank order."""

COLOURS = {"compute": "#4c78a8", "wait": "#e45756", INSIDE: "#72b7b2", BETWEEN: "#f2a93b"}
WIDTH, LEFT, ROW, BAR = 1000, 70, 44, 18


class Span(NamedTuple):
    """Something that a rank did, or that was under way for it, from one moment to another."""

    rank: int
    kind: str
    """"compute", "wait", or for transfers the links they go over: "inside" a host, or "between" hosts."""
    name: str
    start: float
    end: float
    details: dict[str, Any]


def spans(traces: Traces) -> Iterator[Span]:
    """All that happened, rank by rank. Transfers posted together that are of both kinds are a span of each."""
    for rank, events in enumerate(traces):
        grouped = any(event.group for event in events)
        for event in events:
            about = {"phase": event.phase, "round": event.round, "blocks": list(event.blocks), "group": event.group}
            name = f"{event.phase} {event.round}" + (f", heads' group {event.group}" if grouped else "")
            yield Span(rank, "compute", name, event.started, event.started + event.compute, about)
            yield Span(rank, "wait", name, event.waited_from, event.waited_from + event.wait, about)
            for moved in event.transfers:
                for kind, (sent, received) in _by_link(moved).items():
                    sizes = {"sent_bytes": sent, "received_bytes": received}
                    yield Span(rank, kind, name, moved.posted, moved.done, about | sizes)


def _by_link(moved: TransferTime) -> dict[str, tuple[int, int]]:
    """Bytes sent and received over each kind of link that transfers went over."""
    between = moved.sent_between, moved.received_between
    inside = moved.sent_bytes - between[0], moved.received_bytes - between[1]
    return {kind: sizes for kind, sizes in ((INSIDE, inside), (BETWEEN, between)) if any(sizes)}


def chrome_trace(traces: Traces) -> dict[str, Any]:
    """The Trace Event Format: a process per rank, with a line for compute and waits, and lines for each kind of link.

    Slices of a line must not overlap, or viewers drop them: transfers under way together are on lines of their own.
    """
    found = sorted(spans(traces), key=lambda span: span.start)
    zero = min((span.start for span in found), default=0.0)
    lines: dict[tuple[int, str], list[float]] = {}
    """When each line of a rank and a kind of link is free again."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(len(traces))
    ]
    for span in found:
        place = {"pid": span.rank, "tid": _line(lines, span), "ts": 1e6 * (span.start - zero)}
        events.append(
            {"ph": "X", "name": f"{span.kind} {span.name}", "cat": span.kind, "dur": 1e6 * (span.end - span.start)}
            | place
            | {"args": span.details}
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _line(lines: dict[tuple[int, str], list[float]], span: Span) -> int:
    """The number of the first line that is free for a span."""
    if span.kind not in (INSIDE, BETWEEN):
        return 0
    free = lines.setdefault((span.rank, span.kind), [])
    at = next((at for at, end in enumerate(free) if end <= span.start), len(free))
    free[at:] = [span.end, *free[at + 1 :]]
    return 1 + 2 * at + (span.kind == BETWEEN)


def write_chrome_trace(path: str | Path, traces: Traces) -> None:
    """Write every rank's trace into one file."""
    Path(path).write_text(json.dumps(chrome_trace(traces)))


def timeline(traces: Traces) -> str:
    """An SVG: a band per rank, above what it computes (and waits for), below the transfers that are under way."""
    found = list(spans(traces))
    zero = min((span.start for span in found), default=0.0)
    length = max((span.end for span in found), default=1.0) - zero or 1.0
    height = ROW * len(traces) + 60
    scale = (WIDTH - LEFT - 20) / length
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for rank in range(len(traces)):
        parts.append(f'<text x="{LEFT - 10}" y="{rank * ROW + 26}" text-anchor="end">rank {rank}</text>')
    for span in found:
        top = span.rank * ROW + {INSIDE: 8 + BAR, BETWEEN: 8 + 1.5 * BAR}.get(span.kind, 8.0)
        tall = BAR if span.kind in ("compute", "wait") else BAR / 2 - 1
        left, wide = LEFT + scale * (span.start - zero), max(scale * (span.end - span.start), 0.3)
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{tall}" fill="{COLOURS[span.kind]}" '
            f'stroke="white" stroke-width="0.4"><title>{span.kind}, {span.name}, {1e3 * (span.end - span.start):.1f} ms'
            "</title></rect>"
        )
    for index, (kind, colour) in enumerate(COLOURS.items()):
        left = LEFT + 160 * index
        word = {INSIDE: "transfer inside a host", BETWEEN: "transfer between hosts"}.get(kind, kind)
        parts.append(f'<rect x="{left}" y="{height - 34}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{left + 20}" y="{height - 22}">{word}</text>')
    parts.append(f'<text x="{WIDTH - 20}" y="{height - 22}" text-anchor="end">{length:.2f} s</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
