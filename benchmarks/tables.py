"""Write the tables of docs/benchmarks.md from the rows under benchmarks/results: `python benchmarks/tables.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from line_chart import line_chart

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
PLOT = ROOT / "docs" / "plots" / "tile_sizes.svg"
Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def latest(rows: list[Row], *keys: str) -> list[Row]:
    """The last row of each distinct combination of keys, in order of first appearance."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        found[tuple(row[key] for key in keys)] = row
    return list(found.values())


def local_table() -> list[str]:
    lines = [
        "| case | T | phase | one process, 2 threads | ring of 2 processes | ratio | imbalance | torch, CPU, commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in latest(rows_of("local"), "case", "tokens"):
        for phase in ("forward", "forward_backward"):
            part = row[phase]
            lines.append(
                f"| {row['case']} | {row['tokens']} | {phase.replace('_', ' + ')} | {part['one_process_s']:.2f} s "
                f"({part['one_process_spread'][0]:.2f} to {part['one_process_spread'][1]:.2f}) | "
                f"{part['ring_s']:.2f} s ({part['ring_spread'][0]:.2f} to {part['ring_spread'][1]:.2f}) | "
                f"{part['ratio']:.3f} | {row['imbalance']:.1%} | {row['torch']}, {row['cpu']}, {row['commit']} |"
            )
    return lines


def exactness_table() -> list[str]:
    lines = [
        "| T | problems | cells | worst share of what the rule allows | at | commit |",
        "|---|---|---|---|---|---|",
    ]
    rows = latest(rows_of("exactness"), "tokens", "mask", "heads", "dtype")
    for tokens in sorted({row["tokens"] for row in rows}):
        some = [row for row in rows if row["tokens"] == tokens]
        worst = max(some, key=lambda row: row["worst_share_of_limit"])
        cells = sum(row["cells"] for row in some)
        commits = ", ".join(sorted({row["commit"] for row in some}))
        where = f"{worst['mask']} {worst['heads']} {worst['dtype']}, {worst['at']}"
        lines.append(
            f"| {tokens} | {len(some)} of 66 | {cells:,} | {worst['worst_share_of_limit']:.2f} | {where} | {commits} |"
        )
    return lines


def soak_table() -> list[str]:
    lines = [
        "| run | repetitions | hangs | wrong results | seconds | date, seed, commit |",
        "|---|---|---|---|---|---|",
    ]
    for row in latest(rows_of("soak"), "run"):
        lines.append(
            f"| {row['run']} | {row['repetitions']} | {row['hangs']} | {row['wrong']} | {row['seconds']:.0f} | "
            f"{row['date']}, {row.get('seed', 'seed not kept')}, {row.get('commit', 'commit not kept')} |"
        )
    return lines


def claims_table() -> list[str]:
    lines = ["| claim | measured | torch, CPU, commit |", "|---|---|---|"]
    for row in latest(rows_of("claims"), "claim"):
        lines.append(f"| {row['claim']} | {row['measured']} | {row['torch']}, {row['cpu']}, {row['commit']} |")
    return lines


def of_suite(suite: str) -> list[Row]:
    """All rows of a part of a benchmark, from the file of the benchmark's name."""
    return [row for row in rows_of(suite.partition("-")[0]) if row["suite"] == suite]


def heads_of(row: Row) -> str:
    return "MHA" if row["heads"] == row["kv_heads"] else f"GQA {row['heads'] // row['kv_heads']}"


KERNELS = {("auto", "FA4"): "FA4", ("auto", "FA2"): "cuDNN, ours", ("cudnn", "FA2"): "cuDNN"}
"""What serves the pieces, by the kernel that was asked for and what is under torch's flash operator."""


def gpu_tax_table() -> list[str]:
    lines = [
        "| W | S | mask | heads | kernels | blocks at once | receives | forward tax | backward tax "
        "| ms of the slowest rank | whole, fastest, ms | host, ms | planned peak | GPU, torch, commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = ("ranks", "tokens_per_rank", "causal", "kv_heads", "coalesce", "copies", "flash", "kernel")
    for row in latest(of_suite("gpu-tax"), *keys):
        whole = [
            min(row[key] for key in row if key.startswith("whole_") and key.endswith(f"{phase}_ms"))
            for phase in ("forward", "backward")
        ]
        lines.append(
            f"| {row['ranks']} | {row['tokens_per_rank']} | {'causal, zigzag' if row['causal'] else 'full'} | "
            f"{heads_of(row)} | {KERNELS[row['kernel'], row['flash']]} | {row['coalesce']} | "
            f"{'copied' if row['copies'] else 'by reference'} | "
            f"**{row['forward_tax']:.3f}** | **{row['backward_tax']:.3f}** | "
            f"{row['forward_ms']:.2f} / {row['backward_ms']:.2f} | {whole[0]:.1f} / {whole[1]:.1f} | "
            f"{row['forward_host_ms']:.1f} / {row['backward_host_ms']:.1f} | {row['planned_peak_gib']:.2f} GiB | "
            f"{row['gpu']}, {row['torch']}, {row['commit']} |"
        )
    return lines


def gpu_breakdown_table() -> list[str]:
    kinds = ("attention", "attention's own passes", "merge", "sums and packing", "stand-in and delta", "other", "idle")
    lines = [
        f"| S | kernels | phase | what | {' | '.join(kinds)} | all | not profiled | launches | GPU, torch, commit |",
        "|---|---|---|---|" + "---|" * (len(kinds) + 4),
    ]
    for row in latest(of_suite("gpu-breakdown"), "tokens_per_rank", "flash", "phase", "what"):
        spent = row["microseconds"]
        cells = " | ".join(f"{spent.get(kind, 0):,}" for kind in kinds)
        lines.append(
            f"| {row['tokens_per_rank']} | {KERNELS['auto', row['flash']]} | {row['phase']} | {row['what']} | "
            f"{cells} | {sum(spent.values()):,} | {row['unprofiled_us']:,} | {row['launches']} | "
            f"{row['gpu']}, {row['torch']}, {row['commit']} |"
        )
    return lines


def kernel_name(row: Row) -> str:
    """Ours, or the vendor's by the name of what serves it."""
    return {"triton": "ours", "cudnn": "cuDNN", "flash": row.get("flash", "FA2"), "flex": "FlexAttention"}[
        row["kernel"]
    ]


def gpu_tiles_table() -> list[str]:
    lines = [
        "| queries x keys | kernel | forward, state carried | forward, plain | backward | GPU, torch, commit |",
        "|---|---|---|---|---|---|",
    ]
    rows = latest(of_suite("gpu-tiles"), "rows", "cols", "causal", "kernel", "flash")
    for row in sorted(rows, key=lambda row: (-row["rows"], -row["cols"], row["causal"])):
        plain = row.get("plain_forward_tflops")
        lines.append(
            f"| {row['rows']} x {row['cols']}{', causal' if row['causal'] else ''} | {kernel_name(row)} | "
            f"{row['forward_tflops']:.0f} | {f'{plain:.0f}' if plain else ''} | {row['backward_tflops']:.0f} | "
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
    rows = latest(of_suite("gpu-sizes"), "size", "kernel", "flash")
    lines = {
        f"{kernel_name(row)}, {phase}": [
            (other["size"], other[f"{phase}_tflops"])
            for other in sorted(rows, key=lambda other: other["size"])
            if kernel_name(other) == kernel_name(row)
        ]
        for row in rows
        for phase in ("forward", "backward")
    }
    PLOT.parent.mkdir(exist_ok=True)
    PLOT.write_text(line_chart(lines, "rows and columns of a full tile", "TFLOP/s"))
    return [f"![TFLOP/s by tile size]({PLOT.relative_to(PAGE.parent)})"]


HOST_KEYS = ("hosts", "per_host", "mbit", "causal", "kv_heads", "tokens_per_rank")


def host_cells(row: Row) -> str:
    mask = "causal" if row["causal"] else "full"
    return f"{row['hosts']} x {row['per_host']} | {row['mbit']:.0f}, {row['link_mbit']:.0f} | {mask}"


def seconds(spent: Row) -> str:
    return f"{spent['median']:.2f} ({spent['least']:.2f} to {spent['most']:.2f})"


def hosts_speed_table() -> list[str]:
    lines = [
        "| hosts x ranks | Mbit/s: asked, found | mask | flat ring, s | double ring, s | flat / double | planned "
        "| transfers alone: flat, double, s | compute alone, s | bytes a host sent over planned | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in latest(of_suite("hosts-speed"), *HOST_KEYS):
        alone = row["alone_s"]
        lines.append(
            f"| {host_cells(row)} | {seconds(row['flat_s'])} | {seconds(row['double_s'])} | **{row['ratio']:.2f}** | "
            f"{row['planned_ratio']:.2f} | {alone['flat transfer']:.2f}, {alone['double transfer']:.2f} | "
            f"{alone['double compute']:.2f} | {row['sent_bytes'] / row['planned_sent_bytes']:.3f} | {row['commit']} |"
        )
    return lines


def hosts_directions_table() -> list[str]:
    lines = [
        "| hosts x ranks | Mbit/s: asked, found | mask | heads | query side, s | key side, s | key / query | planned "
        "| chosen over the better | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in latest(of_suite("hosts-directions"), *HOST_KEYS):
        lines.append(
            f"| {host_cells(row)} | {heads_of(row)} | {seconds(row['query_s'])} | {seconds(row['kv_s'])} | "
            f"**{row['ratio']:.2f}** | {row['planned_ratio']:.2f} | {row['auto_over_better']:.3f} | {row['commit']} |"
        )
    return lines


def hosts_hidden_table() -> list[str]:
    lines = [
        "| hosts x ranks | Mbit/s: asked, found | mask | S, H | phases | both, s | compute alone, s "
        "| transfers alone, s | hidden | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in latest(of_suite("hosts-hidden"), *HOST_KEYS, "backward"):
        phases = "forward + backward" if row["backward"] else "forward"
        lines.append(
            f"| {host_cells(row)} | {row['tokens_per_rank']}, {row['heads']} | {phases} | {seconds(row['both_s'])} | "
            f"{seconds(row['compute_s'])} | {seconds(row['transfer_s'])} | **{row['hidden']:.2f}** | {row['commit']} |"
        )
    return lines


def hosts_links_table() -> list[str]:
    rows = latest(of_suite("hosts-links"), "mbit")
    lines = ["| asked, Mbit/s | a socket gets | commit |", "|---|---|---|"]
    return lines + [f"| {row['mbit']:.0f} | {row['link_mbit']:.0f} | {row['commit']} |" for row in rows]


EQUAL = 1.03
"""Up to this ratio two times count as equal."""


def hosts_peers_table() -> list[str]:
    keys = ("hosts", "per_host", "tokens_per_rank", "mask", "kv_heads")
    found = of_suite("hosts-peers")
    rows = latest(found, *keys)
    variants = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    lines = [
        f"| hosts x ranks | S, H | mask, layout | heads | {' | '.join(variants)} | ours over the best peer "
        "| where it is not first: why | cores busy elsewhere | commit |",
        "|---|---|---|---|" + "---|" * (len(variants) + 4),
    ]
    for row in rows:
        cells = [
            f"{seconds(row['seconds'][name])}, {row['sent_bytes'][name]['busiest'] / 1e6:.1f} MB"
            if name in row["seconds"]
            else ""
            for name in variants
        ]
        ratio, best = nearest(row)
        runs = [nearest(other) for other in found if all(other[key] == row[key] for key in keys)]
        earlier = f" (before: {', '.join(f'{ratio:.2f}, {name}' for ratio, name in runs[:-1])})" if runs[1:] else ""
        lines.append(
            f"| {row['hosts']} x {row['per_host']} | {row['tokens_per_rank']}, {row['heads']} | "
            f"{row['mask'].replace('()', '')}, {row['layout']} | {heads_of(row)} | {' | '.join(cells)} | "
            f"**{ratio:.2f}**, {best}{earlier} | {behind(row, best) if ratio > EQUAL else ''} | "
            f"{row['busy_elsewhere']:.0%} | {row['commit']} |"
        )
    return lines


def nearest(row: Row) -> tuple[float, str]:
    """Ours over the peer that did best against it, and that peer."""
    return max((ratio, name) for name, ratio in row["ours_over"].items())


def behind(row: Row, best: str) -> str:
    """Why a peer is ahead, from what each has sent."""
    ours, theirs = (row["sent_bytes"][name]["busiest"] for name in ("ours", best))
    on_link = [8e-6 * count / row["link_mbit"] for count in (ours, theirs)]
    if ours <= theirs:
        return "not explained: ours sends fewer bytes; to be repeated on a quiet machine"
    kept = "; it keeps W shards of keys and sums gradients in bf16" if best == "all-gather kept" else ""
    return f"its bytes take the link {on_link[1]:.2f} s, ours {on_link[0]:.2f}{kept}"


def machine_cells(row: Row) -> str:
    return f"{row.get('gpu', row['cpu'])}, {row['torch']}, {row['commit']}"


LOSSES = {
    "chunked": "in chunks (`linear_cross_entropy`)",
    "plain": "whole logits (`cross_entropy`)",
    "ahead": "in chunks, gradients computed in forward (a trial)",
}


def loss_memory_table() -> list[str]:
    lines = [
        "| loss | T | C, dtype | peak beyond hidden states and their gradient, MiB | the process's, MiB "
        "| machine, torch, commit |",
        "|---|---|---|---|---|---|",
    ]
    for row in latest(of_suite("loss-memory"), "device", "what", "tokens", "width"):
        resident = f"{row['resident_mib']:,.0f}" if "resident_mib" in row else ""
        dtype = "bf16" if row["device"] == "cuda" else "fp32"
        lines.append(
            f"| {LOSSES[row['what']]} | {row['tokens']:,} | {row['width']}, {dtype} | **{row['peak_mib']:,.1f}** | "
            f"{resident} | {machine_cells(row)} |"
        )
    return lines


def loss_speed_table() -> list[str]:
    lines = [
        "| loss | T | C | forward, s | forward + backward, s | over whole logits | machine, torch, commit |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = latest(of_suite("loss-speed"), "device", "what", "tokens", "width")
    whole = {row["device"]: row["step_s"] for row in rows if row["what"] == "plain"}
    for row in rows:
        lines.append(
            f"| {LOSSES[row['what']]} | {row['tokens']:,} | {row['width']} | {row['forward_s']:.3g} | "
            f"{row['step_s']:.3g} ({row['spread'][0]:.3g} to {row['spread'][1]:.3g}) | "
            f"**{row['step_s'] / whole[row['device']]:.2f}** | {machine_cells(row)} |"
        )
    return lines


def loss_chunks_table() -> list[str]:
    lines = ["| logits of a chunk | T | C | forward + backward, s | machine, torch, commit |", "|---|---|---|---|---|"]
    for row in latest(of_suite("loss-chunks"), "device", "chunk_mib", "tokens", "width"):
        lines.append(
            f"| {row['chunk_mib']} MiB | {row['tokens']:,} | {row['width']} | {row['step_s']:.3g} "
            f"({row['spread'][0]:.3g} to {row['spread'][1]:.3g}) | {machine_cells(row)} |"
        )
    return lines


def loss_trials_table() -> list[str]:
    lines = [
        "| rows of a chunk (logits) | logits, ms | gradient of hidden, ms | of weight, added in fp32, ms "
        "| four products | three products | machine, torch |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in of_suite("loss-trials"):
        logits, dhidden, dweight = (row[f"{name}_ms"] for name in ("logits", "dhidden", "dweight"))
        lines.append(
            f"| {row['rows']} ({row['rows'] * row['vocabulary'] * 4 >> 20} MiB) | {logits:.1f} | {dhidden:.1f} | "
            f"{dweight:.1f} | **{2 * logits + dhidden + dweight:.1f}** | {logits + dhidden + dweight:.1f} | "
            f"{row['gpu']}, {row['torch']} |"
        )
    return lines


def train_ablation_table() -> list[str]:
    lines = [
        "| tokens | | seconds a step | speed over row above | tokens/s | TFLOP/s | peak, GiB | GPU, torch, commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    before: tuple[int, float] | None = None
    for row in latest(of_suite("train-ablation"), "tokens", "variant"):
        about = f"{row['gpu']}, {row['torch']}, {row['commit']}"
        if not row["fits"]:
            lines.append(f"| {row['tokens']:,} | {row['variant']} | does not fit | | | | | {about} |")
            continue
        faster = before[1] / row["seconds"] if before and before[0] == row["tokens"] else None
        lines.append(
            f"| {row['tokens']:,} | {row['variant']} | {row['seconds']:.4g} | "
            f"{f'{faster:.2f}' if faster else ''} | **{row['tokens_per_s']:,}** | {row['model_tflops']:.0f} | "
            f"**{row['peak_gib']:.1f}** | {about} |"
        )
        before = row["tokens"], row["seconds"]
    return lines


def train_exact_table() -> list[str]:
    rows = latest(rows_of("train_exact"), "suite", "cell")
    exact = [row for row in rows if row["suite"] == "train-exact"]
    rounded = [row for row in rows if row["suite"] == "train-bf16"]
    lines = ["| runs | what | largest | in | commit |", "|---|---|---|---|---|"]
    for what, key in (
        ("relative difference of a step's loss", "loss"),
        ("relative difference of a step's gradient norm, before clipping", "norm"),
        ("difference of a weight tensor at the end, by relative norm", "weights"),
    ):
        worst = max(exact, key=lambda row, key=key: row[key])  # type: ignore[misc]
        lines.append(f"| {len(exact)}, fp32 | {what} | **{worst[key]:.1e}** | {worst['cell']} | {worst['commit']} |")
    worst = max(rounded, key=lambda row: row["ratio"])
    what = "mean error of the loss against fp32, over that of bf16 unsharded"
    lines.append(f"| {len(rounded)}, bf16 | {what} | **{worst['ratio']:.2f}** | {worst['cell']} | {worst['commit']} |")
    return lines


def train_local_table() -> list[str]:
    lines = ["| command | what | two ranks | one process, two threads | ratio | commit |", "|---|---|---|---|---|---|"]
    for row in of_suite("train-make")[-1:]:
        fall = 100 * (1 - row["last_loss"] / row["first_loss"])
        what = f"seconds from nothing to the summary; {row['steps']} steps, the loss falls by {fall:.0f}%"
        lines.append(f"| `{row['command']}` | {what} | **{row['seconds']:.0f}** | | | {row['commit']} |")
    for row in of_suite("train-local")[-1:]:
        for what, key in (("tokens/s, median", "tokens_per_s"), ("peak memory beyond imports, GiB a rank", "peak_gib")):
            many, one = row[key], row[f"unsharded_{key}"]
            lines.append(
                f"| `{row['command']}` | {what} | {many:,.4g} | {one:,.4g} | **{many / one:.2f}** | {row['commit']} |"
            )
    return lines


TABLES: dict[str, Callable[[], list[str]]] = {
    "local": local_table,
    "exactness": exactness_table,
    "claims": claims_table,
    "soak": soak_table,
    "gpu-tax": gpu_tax_table,
    "gpu-breakdown": gpu_breakdown_table,
    "gpu-tiles": gpu_tiles_table,
    "gpu-forward": gpu_forward_table,
    "gpu-sizes": gpu_sizes_plot,
    "gpu-masks": gpu_masks_table,
    "gpu-million": gpu_million_table,
    "hosts-speed": hosts_speed_table,
    "hosts-directions": hosts_directions_table,
    "hosts-hidden": hosts_hidden_table,
    "hosts-links": hosts_links_table,
    "loss-memory": loss_memory_table,
    "loss-speed": loss_speed_table,
    "loss-chunks": loss_chunks_table,
    "loss-trials": loss_trials_table,
    "hosts-peers": hosts_peers_table,
    "train-ablation": train_ablation_table,
    "train-exact": train_exact_table,
    "train-local": train_local_table,
}


def main() -> None:
    text = PAGE.read_text()
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        head, _, rest = text.partition(start)
        _, _, tail = rest.partition(end)
        text = f"{head}{start}\n" + "\n".join(table()) + f"\n{end}{tail}"
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
