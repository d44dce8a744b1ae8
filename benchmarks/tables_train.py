"""Tables of `burst bench loss`, `burst bench train` and of training runs."""

from __future__ import annotations

from table_rows import latest, machine_cells, of_suite, rows_of

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
    rows = latest(rows_of("train_exact"), "suite", "cell", "seed")
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
    what = "mean error of the loss against fp32, over that of bf16 unsharded with the same seed"
    where = f"{worst['cell']}, seed {worst['seed']}"
    lines.append(f"| {len(rounded)}, bf16 | {what} | **{worst['ratio']:.2f}** | {where} | {worst['commit']} |")
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
