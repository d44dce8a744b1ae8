"""What stays of a training run: a folder with its curves, its settings, the versions it ran on and a summary."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch

from burst_attention.train.record import HIDDEN, LOSS, MEMORY, MFU, TFLOPS, TOKENS_PER_SECOND, write_aside
from burst_attention.version import __version__

Row = dict[str, Any]
Points = list[tuple[int, float | None]]
"""Steps and values in order; None where a value is missing or not finite, which leaves a gap in the curve."""

WIDTH, HEIGHT, LEFT, RIGHT = 880, 570, 74, 24
INK, FAINT, GRID = "#212529", "#6c757d", "#e9ecef"
SHARDED, UNSHARDED = "#0b6e99", "#e8590c"
MOST_POINTS = 2000


def write_report(
    folder: Path,
    settings: dict[str, Any],
    rows: list[Row],
    compare_rows: list[Row] | None,
    versions: dict[str, str] | None = None,
) -> str:
    """Write the folder's files, each whole or not at all, and return the summary to print.

    `rows` are those of `read_log`; `compare_rows` those of the unsharded model on the same data, or None.
    """
    found = summarise(rows, compare_rows)
    text = summary_text(found)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "settings.json", settings)
    write_json(folder / "versions.json", installed_versions() if versions is None else versions)
    write_json(folder / "summary.json", found)
    write_aside(folder / "summary.md", text)
    write_aside(folder / "curves.svg", curves(settings, rows, compare_rows))
    return text


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write settings as they are; what JSON does not know, a path or a dtype, as its text."""
    write_aside(path, json.dumps(content, indent=2, default=str) + "\n")


def installed_versions() -> dict[str, str]:
    """What the run ran on."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "burst-attention": __version__,
        "platform": platform.platform(),
    }
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["transformers"] = importlib.metadata.version("transformers")
    return found


def points_of(rows: Sequence[Row], name: str) -> Points:
    """A value against the step."""
    return [(row["step"], finite(row.get(name))) for row in rows]


def finite(value: Any) -> float | None:
    """A number, or None where there is none: the log writes null for a loss that diverged."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def known(points: Points) -> list[float]:
    """The values that there are."""
    return [value for _, value in points if value is not None]


def summarise(rows: Sequence[Row], compare_rows: Sequence[Row] | None) -> Row:
    """The summary's numbers; what is not known is left out, and a loss that is not finite is None."""
    losses = points_of(rows, LOSS)
    found: Row = {"steps": len(rows)}
    if rows:
        first, last = losses[0][1], losses[-1][1]
        found |= {"first_loss": first, "last_loss": last}
        if first and last is not None:
            found["loss_fall_percent"] = 100 * (first - last) / first
    # The first step compiles and allocates, so the medians are over those after it.
    medians = {
        "tokens_per_second": TOKENS_PER_SECOND,
        "tflops_per_rank": TFLOPS,
        "mfu_percent": MFU,
        "communication_hidden_percent": HIDDEN,
    }
    for key, name in medians.items():
        if values := known(points_of(rows[1:], name)):
            found[key] = statistics.median(values)
    if values := known(points_of(rows, MEMORY)):
        found["peak_memory_gib"] = max(values)
    return found if compare_rows is None else found | difference(losses, points_of(compare_rows, LOSS))


def difference(losses: Points, unsharded: Points) -> Row:
    """How far the losses are from those of the unsharded run, over the steps that both have."""
    theirs = dict(unsharded)
    pairs = [(step, loss, theirs[step]) for step, loss in losses if step in theirs]
    apart = [(relative(a, b), step) for step, a, b in pairs if a is not None and b is not None]
    found: Row = {"compared_steps": len(apart)}
    # A run that diverges where the other does not is no small difference: it is said, not skipped.
    if diverged := sum((a is None) != (b is None) for _, a, b in pairs):
        found["steps_where_one_run_is_not_finite"] = diverged
    if apart:
        largest, step = max(apart, key=lambda pair: pair[0])
        found |= {"largest_relative_difference": largest, "largest_relative_difference_at_step": step}
    return found


def relative(value: float, reference: float) -> float:
    """|value - reference| as a fraction of the reference; of the larger of the two where the reference is 0."""
    return 0.0 if value == reference else abs(value - reference) / (abs(reference) or abs(value))


def summary_text(found: Row) -> str:
    """The summary as a table in Markdown, in columns that also line up on a terminal."""
    lines: list[tuple[str, str]] = [("steps", str(found["steps"]))]
    for key, word in (("first_loss", "first loss"), ("last_loss", "last loss")):
        if key in found:
            lines.append((word, "not finite" if found[key] is None else f"{found[key]:.4f}"))
    written = {
        "loss_fall_percent": ("fall of the loss", "{:.1f}%"),
        "tokens_per_second": ("tokens/s, median after the first step", "{:,.0f}"),
        "tflops_per_rank": ("TFLOP/s a rank, median", "{:.3g}"),
        "mfu_percent": ("MFU, median", "{:.1f}%"),
        "peak_memory_gib": ("peak memory of rank 0", "{:.2f} GiB"),
        "communication_hidden_percent": ("communication hidden, median", "{:.0f}%"),
        "compared_steps": ("steps compared with the unsharded run", "{}"),
        "steps_where_one_run_is_not_finite": ("steps where only one of the two is finite", "{}"),
    }
    lines += [(word, form.format(found[key])) for key, (word, form) in written.items() if key in found]
    if "largest_relative_difference" in found:
        largest, step = found["largest_relative_difference"], found["largest_relative_difference_at_step"]
        lines.append(("largest relative difference of the loss", f"{largest:.2g} (step {step})"))
    left, right = (max(len(line[side]) for line in lines) for side in (0, 1))
    table = [f"| {word:<{left}} | {value:>{right}} |" for word, value in lines]
    head = [f"| {'':<{left}} | {'':>{right}} |", f"|{'-' * (left + 2)}|{'-' * (right + 1)}:|"]
    return "\n".join([*head, *table]) + "\n"


@dataclass(frozen=True)
class Panel:
    """A part of the picture with its own vertical axis; all panels share the steps."""

    top: float
    height: float
    label: str
    low: float
    high: float
    first: int
    last: int

    def at(self, step: float, value: float) -> tuple[float, float]:
        """Where a value is drawn. A run of one step stands in the middle."""
        across = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        up = (value - self.low) / (self.high - self.low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), self.top + (1 - up) * self.height

    def frame(self) -> Iterator[str]:
        """The grid, the numbers and the label of the vertical axis."""
        for value in ticks(self.low, self.high, int(self.height / 35)):
            _, y = self.at(self.first, value)
            word = f"{value:g}" if abs(value) < 10000 else f"{value:,.0f}"
            yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
            yield f'<text x="{LEFT - 9}" y="{y + 4:.1f}" text-anchor="end" fill="{FAINT}">{word}</text>'
        bottom = self.top + self.height
        for step in whole_ticks(self.first, self.last):
            x, _ = self.at(step, self.low)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{bottom}" stroke="{GRID}"/>'
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}" stroke="{FAINT}"/>'
        middle = self.top + self.height / 2
        yield (
            f'<text x="18" y="{middle}" text-anchor="middle" fill="{INK}" transform="rotate(-90 18 {middle})">'
            f"{escape(self.label)}</text>"
        )

    def nothing(self) -> Iterator[str]:
        """What stands where there is no value: an empty axis with numbers would look like a measurement."""
        x, y = (LEFT + WIDTH - RIGHT) / 2, self.top + self.height / 2
        yield f'<text x="{x}" y="{y}" text-anchor="middle" fill="{FAINT}">{escape(self.label)}: nothing to draw</text>'

    def curve(self, points: Points, colour: str, width: float, dash: str = "") -> Iterator[str]:
        """The points as lines, broken where values are missing; a point without neighbours is a dot."""
        for part in unbroken(points):
            placed = [self.at(*point) for point in thinned(part)]
            if len(placed) == 1:
                yield f'<circle cx="{placed[0][0]:.2f}" cy="{placed[0][1]:.2f}" r="{width}" fill="{colour}"/>'
                continue
            path = " ".join(f"{x:.2f},{y:.2f}" for x, y in placed)
            yield (
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
                f'stroke-linejoin="round"{dash}/>'
            )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from low to high, about as many as asked."""
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough * 0.999)
    # Rounded, as multiples of 0.1 come out as 0.30000000000000004.
    digits = max(1 - math.floor(math.log10(step)), 0)
    return [round(index * step, digits) for index in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def whole_ticks(first: int, last: int) -> list[int]:
    """Steps to write under the axis; there is no step and a half."""
    if last <= first:
        return [first]
    return sorted({int(value) for value in ticks(first, last, 10) if value == int(value)})


def unbroken(points: Points) -> Iterator[list[tuple[int, float]]]:
    """The stretches without a missing value."""
    part: list[tuple[int, float]] = []
    for step, value in points:
        if value is not None:
            part.append((step, value))
        elif part:
            yield part
            part = []
    if part:
        yield part


def thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """No more points than an eye can tell apart: the least and the largest of every bucket, so that spikes stay."""
    if len(points) <= MOST_POINTS:
        return points
    buckets = MOST_POINTS // 2
    kept: list[tuple[int, float]] = []
    for index in range(buckets):
        bucket = points[index * len(points) // buckets : (index + 1) * len(points) // buckets]
        low, high = (pick(bucket, key=lambda point: point[1]) for pick in (min, max))
        kept += sorted({low, high})
    return kept


def spread(values: list[float], from_zero: bool) -> tuple[float, float]:
    """The range of an axis, a little wider than the values; never empty."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    room = max(0.06 * (high - low), 1e-3 * abs(high)) or 1.0
    return (min(0.0, low) if from_zero else low - room), high + room


def curves(settings: dict[str, Any], rows: Sequence[Row], compare_rows: Sequence[Row] | None) -> str:
    """An SVG: the loss against the step, under it the throughput; the unsharded run dashed, on top."""
    runs = [(rows, SHARDED, 2.6, "")]
    if compare_rows is not None:
        runs.append((compare_rows, UNSHARDED, 1.6, ' stroke-dasharray="6 4"'))
    steps = [row["step"] for run, *_ in runs for row in run] or [0]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="30" font-size="17" font-weight="bold" fill="{INK}">Training loss and throughput</text>',
        f'<text x="{LEFT}" y="50" fill="{FAINT}">{escape(subtitle(settings))}</text>',
    ]
    named = [(LOSS, "loss", 88.0, 280.0, False), (TOKENS_PER_SECOND, "tokens/s", 400.0, 110.0, True)]
    for name, label, top, height, from_zero in named:
        lines = [points_of(run, name) for run, *_ in runs]
        values = [value for line in lines for value in known(line)]
        low, high = spread(values, from_zero)
        panel = Panel(top, height, label, low, high, min(steps), max(steps))
        parts += panel.frame() if values else panel.nothing()
        for line, (_, colour, width, dash) in zip(lines, runs, strict=True):
            parts += panel.curve(line, colour, width, dash)
    for step in whole_ticks(min(steps), max(steps)):
        x, _ = panel.at(step, low)
        parts.append(f'<text x="{x:.1f}" y="529" text-anchor="middle" fill="{FAINT}">{step}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="554" text-anchor="middle" fill="{INK}">step</text>')
    ranks = settings.get("ranks")
    names = ["sharded" if ranks is None else f"sharded over {ranks} ranks", "unsharded"]
    x = float(LEFT)
    for name, (_, colour, width, dash) in zip(names, runs, strict=False):
        parts.append(f'<line x1="{x}" x2="{x + 28}" y1="72" y2="72" stroke="{colour}" stroke-width="{width}"{dash}/>')
        parts.append(f'<text x="{x + 36}" y="76" fill="{INK}">{escape(name)}</text>')
        # SVG cannot measure text before it is drawn; seven to a letter is enough for this size.
        x += 36 + 7 * len(name) + 24
    return "\n".join([*parts, "</svg>"]) + "\n"


def subtitle(settings: dict[str, Any]) -> str:
    """What was trained, as far as the settings say."""
    forms = {"model": "{}", "ranks": "{} ranks", "tokens": "sequences of {} tokens", "layout": "{}", "mask": "{}"}
    said = [form.format(settings[key]) for key, form in forms.items() if settings.get(key) is not None]
    text = ", ".join(said)
    return text if len(text) <= 120 else text[:119] + "…"
