"""Tables and the plot of `burst bench gpu`."""

from __future__ import annotations

import fnmatch
import itertools

from line_chart import line_chart
from table_rows import PAGE, Row, heads_of, latest, of_suite

PLOT = PAGE.parent / "plots" / "tile_sizes.svg"

KERNELS = {
    ("auto", "FA4"): "FA4",
    ("auto", "FA2"): "cuDNN, ours",
    ("cudnn", "FA2"): "cuDNN",
    ("hopper", "FA2"): "ours, in turns",
}
"""What serves the pieces, by the kernel that was asked for and what is under torch's flash operator."""

GOALS = {("forward", 8192): 1.00, ("backward", 8192): 1.02, ("forward", 4096): 1.08, ("backward", 4096): 1.06}
"""What was asked of a ring of 8, zigzag causal, two blocks at once, by reference; of grouped heads no less."""

GOALS_OF = ("FA4", "cuDNN, ours", "cuDNN")
"""Of the kernels above, which are held against them."""

TAX_KEYS = ("tokens_per_rank", "kv_heads", "coalesce", "copies", "flash", "kernel", "results", "direction")


def gpu_goals_table() -> list[str]:
    """Each against the fastest whole attention of its run, and what is made without FA4 against cuDNN's."""
    found = {}
    for row in _main_rows():
        plain = not row["copies"] and "results" not in row
        if row["coalesce"] == 2 and plain:
            found[row["tokens_per_rank"], row["kv_heads"], KERNELS[row["kernel"], row["flash"]]] = row
    titles = [f"{name} | " for name in GOALS_OF]
    lines = [f"| S | heads | phase | goal | {' | '.join(titles)} |", "|" + "---|" * (4 + 2 * len(titles))]
    for (phase, tokens), goal in GOALS.items():
        for kv_heads in (32, 8):
            rows = [found[tokens, kv_heads, name] for name in GOALS_OF]
            whole = [
                min(_wholes(row, phase)) if row["flash"] != "FA2" else row[f"whole_cudnn_{phase}_ms"] for row in rows
            ]
            taxes = [8 * row[f"{phase}_ms"] / ms for row, ms in zip(rows, whole, strict=True)]
            cells = " | ".join(f"**{tax:.3f}** | {'holds' if tax <= goal else 'missed'}" for tax in taxes)
            lines.append(f"| {tokens} | {heads_of(rows[0])} | {phase} | {goal:.2f} | {cells} |")
    return lines


def _wholes(row: Row, phase: str, manner: str = "") -> list[float]:
    """Milliseconds of one whole attention by each that was timed."""
    return [row[key] for key in row if fnmatch.fnmatchcase(key, f"{manner}whole_*_{phase}_ms")]


def gpu_busy_table() -> list[str]:
    """What was timed in both manners (bench_timing.py), the latest of each."""
    titles = ["S", "heads", "kernels", "phase", "tax: calls alone", "busy", "ms of the slowest rank: alone", "busy"]
    titles += ["whole, fastest, ms: alone", "busy", "GPU, torch, commit"]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    rows = latest([row for row in _main_rows() if "busy_forward_tax" in row], *TAX_KEYS)
    for row, phase in itertools.product(sorted(rows, key=_tax_order), ("forward", "backward")):
        timed = [(row[f"{manner}{phase}_ms"], min(_wholes(row, phase, manner))) for manner in ("", "busy_")]
        cells = [f"{row['tokens_per_rank']} | {heads_of(row)} | {KERNELS[row['kernel'], row['flash']]} | {phase}"]
        cells += [f"**{row[f'{manner}{phase}_tax']:.3f}**" for manner in ("", "busy_")]
        cells += [f"{ms:.2f}" for ms, _ in timed] + [f"{whole:.1f}" for _, whole in timed]
        lines.append(f"| {' | '.join(cells)} | {row['gpu']}, {row['torch']}, {row['commit']} |")
    return lines


def _main_rows() -> list[Row]:
    """Those of the cases that goals were set for; the others are the grid's."""
    rows = [row for row in of_suite("gpu-tax") if row["ranks"] == 8 and row["causal"]]
    return [row for row in rows if row["tokens_per_rank"] in (4096, 8192)]


def _tax_order(row: Row) -> tuple[bool, int, int]:
    return row["flash"] == "FA2", -row["tokens_per_rank"], -row["kv_heads"]


def gpu_tax_table() -> list[str]:
    rows = latest([row for row in _main_rows() if "peak_gib" in row], *TAX_KEYS)
    titles = ["S", "heads", "kernels", "blocks at once", "receives, ms by themselves", "tax: forward, backward"]
    titles += [
        "ms of the slowest rank",
        "whole, fastest, ms",
        "host, ms",
        "peak: measured, planned",
        "GPU, torch, commit",
    ]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for row in sorted(rows, key=_tax_order):
        receives = "by reference"
        if row["copies"]:
            receives = f"copied, {row['forward_copies_ms']:.2f} / {row['backward_copies_ms']:.2f}"
        sent = f", results={row['results']!r}" if "results" in row else ""
        cells = [
            f"{row['tokens_per_rank']} | {heads_of(row)} | {KERNELS[row['kernel'], row['flash']]}{sent}",
            f"{row['coalesce']} | {receives}",
            _of_phases(row, "{phase}_tax", "**{:.3f}**"),
            _of_phases(row, "{phase}_ms", "{:.2f}"),
            _of_phases(row, "whole_*_{phase}_ms", "{:.1f}"),
            _of_phases(row, "{phase}_host_ms", "{:.1f}"),
            f"{row['peak_gib']:.2f}, {row['planned_peak_gib']:.2f} GiB | {row['gpu']}, {row['torch']}, {row['commit']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _of_phases(row: Row, pattern: str, form: str) -> str:
    """A number of forward and of backward, the smallest of those that fit; nothing where a row does not have them."""
    found = [
        [row[key] for key in row if fnmatch.fnmatchcase(key, pattern.format(phase=phase))]
        for phase in ("forward", "backward")
    ]
    return " / ".join(form.format(min(values)) for values in found if values)


def gpu_memory_table() -> list[str]:
    """What rings of several sizes hold, in shards of q."""
    sizes = (2, 4, 8, 16)
    lines = ["| kernels | mask, heads | " + " | ".join(f"W = {size}" for size in sizes) + " | GPU, torch, commit |"]
    lines.append("|---|---|" + "---|" * (len(sizes) + 1))
    keys = ("ranks", "kv_heads", "causal", "kernel", "flash")
    rows = latest([row for row in of_suite("gpu-memory") if "shard_gib" in row], *keys)
    if not rows:
        return ["No row has this in shards yet."]
    found = {tuple(row[key] for key in keys): row for row in rows}
    for kernel, flash, kv_heads, causal in dict.fromkeys(
        (row["kernel"], row["flash"], row["kv_heads"], row["causal"]) for row in rows
    ):
        of_sizes = [found.get((size, kv_heads, causal, kernel, flash)) for size in sizes]
        cells = [
            f"{row['peak_gib']:.2f}, {row['planned_peak_gib']:.2f} GiB; {row['peak_gib'] / row['shard_gib']:.1f} shards"
            if row
            else ""
            for row in of_sizes
        ]
        some = next(row for row in of_sizes if row)
        lines.append(
            f"| {KERNELS[kernel, flash]} | {'causal' if causal else 'full'}, {heads_of(some)} | "
            f"{' | '.join(cells)} | {some['gpu']}, {some['torch']}, {some['commit']} |"
        )
    return lines


def gpu_grid_table() -> list[str]:
    """Forward and backward tax by W and S."""
    sizes = (2048, 4096, 8192, 16384)
    lines = ["| mask, heads | W | " + " | ".join(f"S = {size}" for size in sizes) + " | GPU, torch, commit |"]
    lines.append("|---|---|" + "---|" * (len(sizes) + 1))
    keys = ("ranks", "tokens_per_rank", "causal", "kv_heads")
    rows = [row for row in of_suite("gpu-tax") if row["flash"] == "FA4" and row["coalesce"] == 2 and not row["copies"]]
    rows = [row for row in rows if "results" not in row and row["kernel"] == "auto"]
    found = {tuple(row[key] for key in keys): row for row in rows}
    for causal, kv_heads, ranks in itertools.product((True, False), (32, 8), (2, 4, 8, 16)):
        line = {size: found.get((ranks, size, causal, kv_heads)) for size in sizes}
        cells = [f"{row['forward_tax']:.2f}, {row['backward_tax']:.2f}" if row else "" for row in line.values()]
        some = next(row for row in line.values() if row)
        commits = " and ".join(dict.fromkeys(row["commit"] for row in line.values() if row))
        lines.append(
            f"| {'causal, zigzag' if causal else 'full'}, {heads_of(some)} | {ranks} | {' | '.join(cells)} | "
            f"{some['gpu']}, {some['torch']}, {commits} |"
        )
    return lines


def gpu_breakdown_table() -> list[str]:
    kinds = (
        "attention", "attention's own passes", "merge", "sums and packing", "stand-in and delta", "clearing", "copies",
        "other", "idle",
    )  # fmt: skip
    lines = [
        f"| S | heads | phase | what | {' | '.join(kinds)} | all | not profiled | launches | GPU, torch, commit |",
        "|---|---|---|---|" + "---|" * (len(kinds) + 4),
    ]
    rows = [row for row in of_suite("gpu-breakdown") if row["what"] in ("whole", "slowest rank")]
    rows = latest(rows, "tokens_per_rank", "kv_heads", "flash", "phase", "kernel", "what")
    for row in sorted(rows, key=lambda row: (row["flash"] == "FA2", -row["tokens_per_rank"], -row["kv_heads"])):
        spent = row["microseconds"]
        if row["what"] == "whole":
            what = f"{kernel_name(row)}, whole by {row['ranks']}"
        else:
            what = f"{KERNELS[row['kernel'], row['flash']]}, rank {row['rank']}"
        cells = " | ".join(f"{spent.get(kind, 0):,}" for kind in kinds)
        lines.append(
            f"| {row['tokens_per_rank']} | {heads_of(row)} | {row['phase']} | {what} | "
            f"{cells} | {sum(spent.values()):,} | {row['unprofiled_us']:,} | {row['launches']} | "
            f"{row['gpu']}, {row['torch']}, {row['commit']} |"
        )
    return lines


def gpu_tests_table() -> list[str]:
    lines = [
        "| tests/gpu | passed | failed | errors | skipped | end | GPU, torch, commit |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(latest(of_suite("gpu-tests"), "what"), key=lambda row: row["what"]):
        end = "done" if row["exit"] == 0 else "out of time" if row["exit"] == -1 else f"exit {row['exit']}"
        passed = str(row.get("passed", 0))
        if row.get("collected", 0) > sum(row.get(word, 0) for word in ("passed", "failed", "skipped")):
            passed += f" of {row['collected']}"
        counted = " | ".join((passed, *(str(row.get(word, 0)) for word in ("failed", "error", "skipped"))))
        if "memcheck_errors" in row:
            counted = f"{row['memcheck_errors']} errors of memory, {row['races']} races, "
            counted += f"{row['handshake_reports']} false reports | | |"
        lines.append(f"| {row['what']} | {counted} | {end} | {row['gpu']}, {row['torch']}, {row['commit']} |")
    return lines


def kernel_name(row: Row) -> str:
    """Ours, or the vendor's by the name of what serves it."""
    flash = row.get("flash", "FA2")
    names = {"triton": "ours", "cudnn": "cuDNN", "flash": flash, "flash4": "FA4 by itself", "flex": "FlexAttention"}
    return names[row["kernel"]]


def named(rows: list[Row]) -> list[Row]:
    """With the kernel's name, for ours and cuDNN are measured again beside each version of flash: the last serves."""
    return [row | {"name": kernel_name(row)} for row in rows]


def gpu_tiles_table() -> list[str]:
    lines = [
        "| queries x keys | kernel | forward, state carried | forward, plain | backward, added | backward, plain "
        "| GPU, torch, commit |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = latest(named(of_suite("gpu-tiles")), "rows", "cols", "causal", "name")
    for row in sorted(rows, key=lambda row: (-row["rows"], -row["cols"], row["causal"])):
        rates = (row.get(f"{name}_tflops") for name in ("forward", "plain_forward", "backward", "plain_backward"))
        lines.append(
            f"| {row['rows']} x {row['cols']}{', causal' if row['causal'] else ''} | {row['name']} | "
            f"{' | '.join(f'{rate:.0f}' if rate else '' for rate in rates)} | "
            f"{row['gpu']}, {row['torch']}, {row['commit']} |"
        )
    return lines


def gpu_forward_table() -> list[str]:
    lines = [
        "| queries x keys | forward: ours, cuDNN, ratio | ours with the state carried, which costs "
        "| backward: ours, cuDNN, ratio | GPU, torch, commit |",
        "|---|---|---|---|---|",
    ]
    found = {(row["rows"], row["cols"], row["causal"], row["kernel"]): row for row in of_suite("gpu-tiles")}
    for rows, cols, causal in dict.fromkeys(key[:3] for key in found):
        ours, cudnn = (found[rows, cols, causal, kernel] for kernel in ("triton", "cudnn"))
        forward, backward = (
            f"{ours[key]:.0f}, {cudnn[key]:.0f}, **{ours[key] / cudnn[key]:.2f}**"
            for key in ("plain_forward_tflops", "backward_tflops")
        )
        carried = ours["forward_tflops"]
        lines.append(
            f"| {rows} x {cols}{', causal' if causal else ''} | {forward} | {carried:.0f}, "
            f"{ours['plain_forward_tflops'] / carried - 1:.1%} | {backward} | "
            f"{ours['gpu']}, {ours['torch']}, {ours['commit']} |"
        )
    return lines


def gpu_masks_table() -> list[str]:
    lines = [
        "| mask, T = 16384 | forward: ours, FlexAttention, ratio | backward: ours, FlexAttention, ratio "
        "| GPU, torch, commit |",
        "|---|---|---|---|",
    ]
    found = {(row["mask"], row["kernel"]): row for row in of_suite("gpu-masks")}
    for mask in dict.fromkeys(mask for mask, _ in found):
        ours, flex = found[mask, "triton"], found[mask, "flex"]
        cells = [
            f"{ours[key]:.0f}, {flex[key]:.0f}, **{ours[key] / flex[key]:.2f}**"
            for key in ("forward_tflops", "backward_tflops")
        ]
        lines.append(f"| {mask} | {cells[0]} | {cells[1]} | {ours['gpu']}, {ours['torch']}, {ours['commit']} |")
    return lines


def gpu_million_table() -> list[str]:
    lines = [
        "| tokens | heads | forward, s | backward, s | TFLOP/s | peak beyond inputs, planned | rms error of one head: "
        "out, dq, dk, dv | GPU, torch, commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in latest(of_suite("gpu-million"), "tokens", "kv_heads"):
        if not row.get("fits", True):
            lines.append(
                f"| {row['tokens']:,} | {row['heads']}/{row['kv_heads']} | does not fit | | | planned "
                f"{row['planned_peak_gib']:.2f} GiB, inputs {row['inputs_gib']:.0f}, the card {row['card_gib']:.1f} "
                "| | "
                f"{row['gpu']}, {row['torch']}, {row['commit']} |"
            )
            continue
        errors = ", ".join(f"{value:.2%}" for value in row["rms_errors"].values())
        lines.append(
            f"| {row['tokens']:,} | {row['heads']}/{row['kv_heads']} | {row['forward_s']:.1f} "
            f"| {row['backward_s']:.1f} | {row['forward_tflops']:.0f} / {row['backward_tflops']:.0f} | "
            f"{row['peak_gib']:.2f} GiB, {row['planned_peak_gib']:.2f} GiB | {errors} | "
            f"{row['gpu']}, {row['torch']}, {row['commit']} |"
        )
    return lines


def gpu_sizes_plot() -> list[str]:
    """Rates by size of a full square tile, as an SVG beside the page."""
    rows = latest(named(of_suite("gpu-sizes")), "size", "name")
    lines = {
        f"{row['name']}, {phase}": [
            (other["size"], other[f"{phase}_tflops"])
            for other in sorted(rows, key=lambda other: other["size"])
            if other["name"] == row["name"]
        ]
        for row in rows
        for phase in ("forward", "backward")
    }
    PLOT.parent.mkdir(exist_ok=True)
    PLOT.write_text(line_chart(lines, "rows and columns of a full tile", "TFLOP/s"))
    return [f"![TFLOP/s by tile size]({PLOT.relative_to(PAGE.parent)})"]
