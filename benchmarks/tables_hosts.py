"""Tables of `burst bench hosts`."""

from __future__ import annotations

from table_rows import Row, heads_of, latest, of_suite

HOST_KEYS = ("hosts", "per_host", "mbit", "causal", "kv_heads", "tokens_per_rank")


def host_cells(row: Row) -> str:
    mask = "causal" if row["causal"] else "full"
    return f"{row['hosts']} x {row['per_host']} | {row['mbit']:.0f}, {row['link_mbit']:.0f} | {mask}"


def shape_cell(row: Row) -> str:
    return f"{row['tokens_per_rank']}, {row['heads']}, {row['head_dim']}"


def seconds(spent: Row) -> str:
    return f"{spent['median']:.2f} ({spent['least']:.2f} to {spent['most']:.2f})"


def hosts_speed_table() -> list[str]:
    lines = [
        "| hosts x ranks | Mbit/s: asked, found | mask | S, H, D | flat ring, s | double ring, s | flat / double "
        "| planned | transfers alone: flat, double, s | compute alone, s | bytes a host sent over planned | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in latest(of_suite("hosts-speed"), *HOST_KEYS):
        alone = row["alone_s"]
        lines.append(
            f"| {host_cells(row)} | {shape_cell(row)} | {seconds(row['flat_s'])} | {seconds(row['double_s'])} | "
            f"**{row['ratio']:.2f}** | {row['planned_ratio']:.2f} | "
            f"{alone['flat transfer']:.2f}, {alone['double transfer']:.2f} | {alone['double compute']:.2f} | "
            f"{row['sent_bytes'] / row['planned_sent_bytes']:.3f} | {row['commit']} |"
        )
    return lines


def hosts_directions_table() -> list[str]:
    lines = [
        "| hosts x ranks | Mbit/s: asked, found | mask | S, H, D | heads | query side, s | key side, s | key / query "
        "| planned | chosen over the better | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in latest(of_suite("hosts-directions"), *HOST_KEYS):
        lines.append(
            f"| {host_cells(row)} | {shape_cell(row)} | {heads_of(row)} | {seconds(row['query_s'])} | "
            f"{seconds(row['kv_s'])} | **{row['ratio']:.2f}** | {row['planned_ratio']:.2f} | "
            f"{row['auto_over_better']:.3f} | {row['commit']} |"
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


def hosts_sockets_table() -> list[str]:
    lines = [
        "| a socket's buffers, at most | bytes of a message | both, s | posted only when waited for, s "
        "| compute alone, s | transfers alone, s | hidden | hidden, posted late | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in latest(of_suite("hosts-sockets"), "socket_kib", "message_bytes"):
        room = "the system's" if row["socket_kib"] is None else f"{row['socket_kib']:,} KiB"
        cells = " | ".join(seconds(row[f"{name}_s"]) for name in ("both", "late", "compute", "transfer"))
        lines.append(
            f"| {room} | {row['message_bytes']:,} | {cells} | **{row['hidden']:.2f}** | {row['hidden_late']:.2f} | "
            f"{row['commit']} |"
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
    rows = latest(of_suite("hosts-peers"), *keys)
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
        lines.append(
            f"| {row['hosts']} x {row['per_host']} | {row['tokens_per_rank']}, {row['heads']} | "
            f"{row['mask'].replace('()', '')}, {row['layout']} | {heads_of(row)} | {' | '.join(cells)} | "
            f"**{ratio:.2f}**, {best} | {behind(row, best) if ratio > EQUAL else ''} | "
            f"{row['busy_elsewhere']:.0%} | {row['commit']} |"
        )
    return lines


def nearest(row: Row) -> tuple[float, str]:
    """Ours over the peer that did best against it, and that peer."""
    return max((ratio, name) for name, ratio in row["ours_over"].items())


OTHER_PLANS = {"all-gather kept": ("ours, bf16 gradients", "ours, heads exchanged")}
"""What a caller of ours may choose against a peer instead, where that is not the exchange of heads alone."""


def behind(row: Row, best: str) -> str:
    """Why a peer is ahead, from what each has sent, and how another plan of ours does against it."""
    times = {name: spent["median"] for name, spent in row["seconds"].items()}
    ours, theirs = (8e-6 * row["sent_bytes"][name]["busiest"] / row["link_mbit"] for name in ("ours", best))
    if ours <= theirs:
        why = f"cores are the bound: the link is busy for {ours:.2f} s of ours, {theirs:.2f} s of its"
    else:
        kept = "; it keeps W shards of keys and sums gradients in bf16" if best == "all-gather kept" else ""
        why = f"its bytes take the link {theirs:.2f} s, ours {ours:.2f}{kept}"
    others = [name for name in OTHER_PLANS.get(best, ("ours, heads exchanged",)) if name in times]
    return why + "".join(f"; {name}: **{times[name] / times[best]:.2f}**" for name in others)
