"""Write the tables of docs/benchmarks.md from the rows under benchmarks/results: `python benchmarks/tables.py`."""

from __future__ import annotations

from collections.abc import Callable

from table_rows import PAGE, latest, rows_of
from tables_gpu import (
    gpu_breakdown_table,
    gpu_busy_table,
    gpu_forward_table,
    gpu_goals_table,
    gpu_grid_table,
    gpu_masks_table,
    gpu_memory_table,
    gpu_million_table,
    gpu_sizes_plot,
    gpu_tax_table,
    gpu_tests_table,
    gpu_tiles_table,
)
from tables_hosts import (
    hosts_directions_table,
    hosts_hidden_table,
    hosts_links_table,
    hosts_peers_table,
    hosts_sockets_table,
    hosts_speed_table,
)
from tables_train import (
    loss_chunks_table,
    loss_memory_table,
    loss_speed_table,
    loss_trials_table,
    train_ablation_table,
    train_exact_table,
    train_local_table,
)


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


TABLES: dict[str, Callable[[], list[str]]] = {
    "local": local_table,
    "exactness": exactness_table,
    "claims": claims_table,
    "soak": soak_table,
    "gpu-goals": gpu_goals_table,
    "gpu-busy": gpu_busy_table,
    "gpu-tax": gpu_tax_table,
    "gpu-grid": gpu_grid_table,
    "gpu-memory": gpu_memory_table,
    "gpu-breakdown": gpu_breakdown_table,
    "gpu-tiles": gpu_tiles_table,
    "gpu-forward": gpu_forward_table,
    "gpu-sizes": gpu_sizes_plot,
    "gpu-masks": gpu_masks_table,
    "gpu-million": gpu_million_table,
    "gpu-tests": gpu_tests_table,
    "hosts-speed": hosts_speed_table,
    "hosts-directions": hosts_directions_table,
    "hosts-hidden": hosts_hidden_table,
    "hosts-sockets": hosts_sockets_table,
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


def with_tables(text: str) -> str:
    """The page with every table made anew."""
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise ValueError(f"the page needs {start} and {end} once each")
        head, _, rest = text.partition(start)
        _, _, tail = rest.partition(end)
        text = f"{head}{start}\n" + "\n".join(table()) + f"\n{end}{tail}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
