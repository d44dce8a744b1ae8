"""A plan as text: what moves, how much, and who computes with which block when."""

from __future__ import annotations

from burst_attention.schedule.bundles import make_bundle
from burst_attention.schedule.heads import HeadsPlan
from burst_attention.schedule.plan import PhasePlan, Plan

MAX_RANKS_DRAWN = 16


def describe(plan: Plan) -> str:
    """The plan in a few lines, with a small table of rounds per phase."""
    shapes = plan.forward.shapes
    heads = f"{plan.groups * shapes.heads}/{plan.groups * shapes.kv_heads}"
    heads += f" in {plan.groups} groups" if plan.groups > 1 else ""
    ranks = range(plan.layout.ring_size)
    peak = max(map(plan.peak_bytes, ranks))
    shard = plan.groups * make_bundle(("q",), shapes).row_bytes * max(map(plan.layout.local_tokens, ranks))
    kernel = f", kernel {plan.kernel.name}" if plan.kernel else ""
    head = [
        f"mask {_short(str(plan.mask))}",
        f"queries {_short(str(plan.layout))}"
        + ("" if plan.key_layout == plan.layout else f", keys {_short(str(plan.key_layout))}"),
        f"batch {shapes.batch}, heads {heads}, head dim {shapes.head_dim}/{shapes.value_dim}, "
        f"{str(shapes.dtype).removeprefix('torch.')}{kernel}; imbalance {plan.imbalance:.1%}; "
        f"peak {_size(peak)} per rank, {peak / max(shard, 1):.3g} shards of q",
    ]
    phases = [phase for phase in (plan.forward, plan.backward) if phase]
    return "\n".join([*head, *(line for phase in phases for line in _phase_lines(phase, plan.groups))])


def describe_heads(plan: HeadsPlan) -> str:
    """Who exchanges which heads and how much, and the plan of the first members' ring."""
    degree, groups = plan.split.degree, plan.layout.ring_size // plan.split.degree
    lines = [f"heads exchanged between {degree} neighbouring ranks, then {degree} rings of {groups} ranks"]
    for member, (first, last) in enumerate(plan.split.queries):
        ranks = ", ".join(map(str, plan.ring_members(member)))
        keys = ", ".join(map(str, plan.split.keys[member]))
        lines.append(f"  ranks {ranks}: query heads {first} to {last - 1}, key heads {keys}")
    for phase in ("forward", "backward") if plan.needs else ("forward",):
        most = max(plan.exchanged_bytes(rank, phase) for rank in range(plan.layout.ring_size))
        lines.append(f"{phase} exchange: at most {_size(most)} sent per rank")
    peak = max(plan.peak_bytes(rank) for rank in range(plan.layout.ring_size))
    return "\n".join([*lines, f"peak {_size(peak)} per rank; the ring of the first:", describe(plan.rings[0])])


def _phase_lines(phase: PhasePlan, groups: int) -> list[str]:
    ranks = range(phase.topology.size)
    sent = [groups * phase.bytes_sent(rank) for rank in ranks]
    flops = [groups * phase.flops(rank) for rank in ranks]
    way = "up" if phase.topology.step > 0 else "down"
    moved = ", ".join((*phase.operands.names, *phase.results.names))
    if phase.results.fields:
        dtype = str(phase.results.fields[0].dtype).removeprefix("torch.")
        moved += f"; results in {dtype}, {'straight home' if phase.straight else 'from visitor to visitor'}"
    lines = [
        f"{phase.phase}: the {'key' if phase.direction == 'kv' else 'query'} side moves {way} the ring ({moved}); "
        f"at most {_size(max(sent))} sent and {max(flops) / 1e9:.3g} GFLOP per rank"
    ]
    if phase.topology.size > MAX_RANKS_DRAWN:
        return lines
    width = max(3, (len(str(phase.topology.size)) + 1) * phase.topology.coalesce)
    count = max(len(phase.rounds[rank]) for rank in ranks)
    lines.append("  block computed in round  " + "".join(f"{index:>{width}}" for index in range(count)))
    for rank in ranks:
        cells = [
            ",".join(str(visit.block) for visit in step.visits if visit.pieces) or "." for step in phase.rounds[rank]
        ]
        lines.append(f"  rank {rank:<4}                " + "".join(f"{cell:>{width}}" for cell in cells))
    return lines


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _short(text: str) -> str:
    return text if len(text) <= 70 else f"{text[:67]}..."
