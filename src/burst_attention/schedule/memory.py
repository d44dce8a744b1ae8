"""What a phase holds at once: the accumulators and buffers that the engine allocates, and the kernel's workspace.

Counted beyond the caller's q, k, v and dout. Buffers are allocated once per call, so the peak is their sum plus the
largest workspace of any round. For full and causal masks, one block at a time, they do not depend on the number of
ranks; with two blocks they are the same from 4 on in rings of evenly many, and with what vendors' kernels let wait from
4 or from 8 on (docs/limits.md).
"""

from __future__ import annotations

from dataclasses import replace

from burst_attention.schedule.bundles import KEY_SIDE, make_bundle
from burst_attention.schedule.plan import PhasePlan, Plan, TileCosts

COPIES = {
    "forward": {"query": ("q",), "kv": ("k", "v")},
    "backward": {"query": ("q", "dout", "out", "lse"), "kv": ("k", "v")},
}
"""What is copied where the plan counts a side's rows in another order than the shard has them."""

ANY_SCALE = 1.0
"""Of scores: kernels ask only whether it is positive."""


def peak_bytes(plan: Plan, rank: int) -> int:
    """The larger of the two phases. Backward also holds what forward kept for it: out and lse."""
    forward = accumulator_bytes(plan, rank, "forward") + phase_bytes(plan.forward, rank, plan.kernel, plan.groups)
    if plan.backward is None:
        return forward
    kept = _row_bytes(plan.forward, ("out", "lse"), rank, plan)
    rounds = phase_bytes(plan.backward, rank, plan.kernel, plan.groups)
    backward = accumulator_bytes(plan, rank, "backward") + max(rounds, ending_bytes(plan, plan.backward, rank))
    return max(forward, kept + backward)


def ending_bytes(plan: Plan, phase: PhasePlan, rank: int) -> int:
    """Of the end of backward: most buffers are gone, what waits is still there, and there are results.

    Gradients end one after the other, and each is gone before the next; but for those that end beside a last round.
    """
    if plan.kernel is None:
        return 0
    rows = phase.result_slot_rows
    arrived = (phase.arrival_slots * rows.received + rows.received_long) * phase.results.row_bytes
    gradients = [f"d{name}" for name in "qkv" if name in phase.needs]
    beside = phase.rounds[rank][-1].heads is not None and phase.straight
    ended = tuple(gradients if beside else gradients[:1])
    precise, narrow = phase.shapes.accumulate_dtype.itemsize, phase.shapes.dtype.itemsize
    # Those that are in their own dtype already are not copied.
    results = _row_bytes(phase, ended, rank, plan) * narrow // precise if narrow < precise else 0
    computed = [index for index, step in enumerate(phase.rounds[rank]) if step.pieces]
    work = workspaces(phase, rank, plan.kernel)[computed[-1]] if computed else 0
    return plan.groups * (arrived + work) + results


def room_at_the_end(plan: Plan, rank: int, name: str) -> int:
    """What the end of a phase takes beyond all that there is while rounds run."""
    phase = plan.phase(name)
    if name == "forward":
        return _row_bytes(phase, ("out", "lse"), rank, plan) if plan.kernel is not None and plan.kernel.defers else 0
    return max(ending_bytes(plan, phase, rank) - phase_bytes(phase, rank, plan.kernel, plan.groups), 0)


def phase_bytes(phase: PhasePlan, rank: int, kernel: TileCosts | None, groups: int) -> int:
    """Travelling buffers of all groups of heads, and the largest workspace."""
    operands = sum(phase.slot_rows) * phase.operands.row_bytes
    operands += max(phase.slot_rows) * sum(field.row_bytes for field in phase.operands.statistics)
    rows = phase.result_slot_rows
    computed = make_bundle(phase.results.names, phase.shapes)
    if kernel is not None:
        computed = phase.computed_results(rank, kernel, ANY_SCALE)
    results = rows.computed * computed.row_bytes
    arrived = phase.arrival_slots * rows.received + rows.received_long
    results += (rows.computed + rows.held + arrived) * phase.results.row_bytes
    work = workspaces(phase, rank, kernel) if kernel is not None else []
    # Groups of heads compute one after the other, but parts of gradients that wait are there for all of them.
    waits = kernel is not None and kernel.parts_wait and phase.phase == "backward"
    at_once = groups if waits else 1
    return groups * (operands + results) + at_once * max(work, default=0)


def workspaces(phase: PhasePlan, rank: int, kernel: TileCosts) -> list[int]:
    """What the kernel allocates for itself in each round, with what it still has from those before."""
    computed = phase.computed_results(rank, kernel, ANY_SCALE)
    return [
        kernel.workspace_bytes(
            replace(phase, shapes=phase.shapes.of_heads(step.heads)), step, computed if step.row_count else None
        )
        if step.pieces
        else 0
        for step in phase.rounds[rank]
    ]


def growth_by_round(phase: PhasePlan, rank: int, kernel: TileCosts) -> list[int]:
    """By how much the largest workspace so far grows in each round."""
    works = workspaces(phase, rank, kernel)
    return [max(work - max(works[:index], default=0), 0) for index, work in enumerate(works)]


def accumulator_bytes(plan: Plan, rank: int, phase: str) -> int:
    """What a phase holds at home: copies in another order, and what it accumulates.

    That is the state of the queries, or delta and the gradients that are wanted.
    """
    copies = tuple(x for side, names in COPIES[phase].items() if plan.row_order(rank, side) is not None for x in names)
    wanted = plan.backward.needs if plan.backward else ""
    kept = ("acc", "peak", "total") if phase == "forward" else ("delta", *(f"d{name}" for name in wanted))
    if phase == "forward" and plan.kernel is not None and plan.kernel.defers:
        # A state that defers is ended, with all that waits, into results of their own.
        kept = (*kept, "out", "lse")
    return _row_bytes(plan.phase(phase), (*kept, *copies), rank, plan)


def _row_bytes(phase: PhasePlan, names: tuple[str, ...], rank: int, plan: Plan) -> int:
    """Bytes of home tensors with a row for each of a rank's queries or keys."""
    fields = make_bundle(names, phase.shapes).fields
    rows = {True: plan.key_layout.local_tokens(rank), False: plan.layout.local_tokens(rank)}
    return plan.groups * sum(field.row_bytes * rows[field.name in KEY_SIDE] for field in fields)
