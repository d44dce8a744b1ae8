"""A line chart as SVG text, with nothing but the standard library: sizes double from left to right."""

from __future__ import annotations

import math
from html import escape

Series = dict[str, list[tuple[float, float]]]

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 400, 60, 20, 200, 50
COLOURS = ("#0b6e99", "#d9480f", "#2b8a3e", "#862e9c", "#5c5f66", "#c92a2a")


def line_chart(series: Series, x_label: str, y_label: str) -> str:
    """Every name a line; those of one kernel, by the words before the comma, share a colour, the second is dashed."""
    xs = sorted({x for points in series.values() for x, _ in points})
    top = 100 * math.ceil(max((y for points in series.values() for _, y in points), default=100) / 100)
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - math.log2(xs[0])) / max(math.log2(xs[-1]) - math.log2(xs[0]), 1)
        return LEFT + across * inner_width, TOP + (1 - y / top) * inner_height

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for y in range(0, top + 1, 100):
        _, place = at(xs[0], y) if xs else (0, 0)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}" stroke="#e0e0e0"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{place + 4:.1f}" text-anchor="end">{y}</text>')
    for x in xs:
        place, _ = at(x, 0)
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:g}</text>')
    kernels = list(dict.fromkeys(name.split(",")[0] for name in series))
    for index, (name, points) in enumerate(series.items()):
        colour = COLOURS[kernels.index(name.split(",")[0]) % len(COLOURS)]
        dashed = ' stroke-dasharray="6 4"' if "backward" in name else ""
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (at(*point) for point in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>')
        place = TOP + 10 + 20 * index
        edge = WIDTH - RIGHT + 14
        parts.append(
            f'<line x1="{edge}" x2="{edge + 24}" y1="{place}" y2="{place}" stroke="{colour}" stroke-width="2"{dashed}/>'
        )
        parts.append(f'<text x="{edge + 30}" y="{place + 4}">{escape(name)}</text>')
    middle = TOP + inner_height / 2
    parts.append(f'<text x="{LEFT + inner_width / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(y_label)}</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"
