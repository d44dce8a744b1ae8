"""The boundary: forward and backward as one torch.library operator each, taking tensors and two strings.

Shapes: B batch, H query heads, G key heads, S local query tokens, K local key tokens, D head dim, E value head dim.

An operator, unlike an autograd.Function, can be kept by torch's selective checkpointing instead of being recomputed:
name `torch.ops.burst_attention.forward.default` in the policy. The operators are defined through torch.library's plain
calls: its `custom_op` decorator does the same but imports the compiler at the first call, in every process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from burst_attention.agreement import LocalCall, agree, refuse, shapes_of
from burst_attention.engine import PhaseRun, ask_for_room, run_phase
from burst_attention.kept import kept
from burst_attention.layout import Layout
from burst_attention.mask import Mask
from burst_attention.merge import Deferred, State, clear
from burst_attention.operators import as_operator
from burst_attention.options import WIRE_DTYPES, Options, parse_options
from burst_attention.ring import Ring, ring_named
from burst_attention.schedule import HeadsPlan, PhasePlan, Plan, Shapes, build_heads_plan, build_plan
from burst_attention.schedule.bundles import KEY_SIDE
from burst_attention.schedule.plan import sign_of
from burst_attention.tiles import Accumulator, TileKernel, TileRequest, pick_kernel
from burst_attention.work import BackwardWork, ForwardWork, Work

TENSORS = ("q", "k", "v", "out", "lse", "dout")
"""What backward works from: what forward saved, and its output's gradient."""

FORWARD, BACKWARD = "burst_attention::forward", "burst_attention::backward"
torch.library.define(FORWARD, "(Tensor q, Tensor k, Tensor v, str options, str ring) -> (Tensor, Tensor)")
torch.library.define(
    BACKWARD,
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, str options, str ring,"
    " str needs) -> (Tensor, Tensor, Tensor)",
)
forward_op = torch.ops.burst_attention.forward.default
backward_op = torch.ops.burst_attention.backward.default


@torch.library.impl(FORWARD, "default")
def _forward_impl(q: Tensor, k: Tensor, v: Tensor, options: str, ring: str) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries over the keys of all ranks."""
    with as_operator(q):
        return run_forward(q, k, v, options, ring_named(ring))


@torch.library.impl(BACKWARD, "default")
def _backward_impl(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: str,
    ring: str,
    needs: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this rank's tokens; an empty tensor for each letter of "qkv" that is not in `needs`."""
    with as_operator(q):
        return run_backward(dout, dlse, (q, k, v, out, lse), options, ring_named(ring), needs)


def run_forward(q: Tensor, k: Tensor, v: Tensor, text: str, ring: Ring) -> tuple[Tensor, Tensor]:
    """Agree, plan, run the rounds, and normalise."""
    options, plan, kernel = prepare("forward", shapes_of(q, k, v), q.device, (q.shape[2], k.shape[2]), text, ring)
    assert isinstance(plan, Plan)
    with told_to_all(ring, "forward"):
        return attention(q, k, v, options.scale, plan, kernel, ring)


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, plan: Plan, kernel: TileKernel, ring: Ring
) -> tuple[Tensor, Tensor]:
    """(out, lse) by the rounds of a plan that all ranks agree on."""
    shapes = plan.forward.shapes
    accumulate = shapes.accumulate_dtype
    q_order, k_order = row_orders(plan, ring.rank, q.device)
    q, k, v = in_order(q, q_order), in_order(k, k_order), in_order(v, k_order)
    rows = q.shape[:3]
    state = State(
        q.new_empty((*rows, shapes.value_dim), dtype=accumulate),
        q.new_empty(rows, dtype=accumulate),
        q.new_empty(rows, dtype=accumulate),
        Deferred() if kernel.defers and plan.forward.direction == "kv" and plan.groups == 1 else None,
    )
    if state.deferred is None:
        clear(state)
    home = {"q": q, "k": k, "v": v, "acc": state.acc, "peak": state.peak, "total": state.total}
    run_groups(plan, plan.forward, ring, home, ForwardWork(kernel, scale, state))
    out, lse = kernel.finish(state, q.dtype)
    return back_in_place(out, q_order), back_in_place(lse, q_order)


def run_backward(
    dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...], text: str, ring: Ring, needs: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Agree, plan, run the rounds, and cast the gradients."""
    q, k, v, *_ = saved
    lengths = q.shape[2], k.shape[2]
    options, plan, kernel = prepare("backward", shapes_of(q, k, v), q.device, lengths, text, ring, needs)
    assert isinstance(plan, Plan)
    with told_to_all(ring, "backward"):
        return attention_gradients(dout, dlse, saved, options.scale, plan, kernel, ring)


def attention_gradients(
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, ...],
    scale: float,
    plan: Plan,
    kernel: TileKernel,
    ring: Ring,
    key_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) by the rounds of a plan that all ranks agree on; dk and dv in `key_dtype`, if given."""
    phase = plan.backward
    assert phase is not None
    needs, accumulate = phase.needs, phase.shapes.accumulate_dtype
    q_order, k_order = row_orders(plan, ring.rank, dout.device)
    home = dict(zip(TENSORS, (*saved, dout), strict=True))
    home["delta"] = kernel.row_delta(home["out"], dout, dlse, accumulate)
    home = {name: in_order(x, k_order if name in KEY_SIDE else q_order) for name, x in home.items()}
    dtypes = {"q": dout.dtype, "k": key_dtype or dout.dtype, "v": key_dtype or dout.dtype}
    totals = {
        f"d{name}": Accumulator(
            torch.empty(x.shape, dtype=accumulate, device=x.device), kernel.sum_parts, result_dtype=dtypes[name]
        )
        for name, x in zip("qkv", saved, strict=False)
        if name in needs
    }
    home |= {name: total.tensor for name, total in totals.items()}
    run_groups(plan, phase, ring, home, BackwardWork(kernel, scale, totals))
    # Each accumulator goes as soon as it is cast.
    home.clear()
    dq, dk, dv = (
        back_in_place(totals.pop(f"d{name}").finish(dtypes[name]), order) if name in needs else dout.new_empty(0)
        for name, order in zip("qkv", (q_order, k_order, k_order), strict=True)
    )
    return dq, dk, dv


def run_groups(plan: Plan, phase: PhasePlan, ring: Ring, home: dict[str, Tensor], work: Work) -> None:
    """Run a phase, all heads together or in groups of them."""
    runs = []
    if plan.groups == 1:
        runs.append(PhaseRun(phase, ring, home, work))
    for group in range(plan.groups) if plan.groups > 1 else ():
        heads, key_heads = (
            (group * count, (group + 1) * count) for count in (phase.shapes.heads, phase.shapes.kv_heads)
        )
        part = {name: x[:, slice(*(key_heads if name in KEY_SIDE else heads))] for name, x in home.items()}
        runs.append(PhaseRun(phase, ring, part, work.of_heads(heads, key_heads), group))
    ask_for_room(plan, runs)
    run_phase(runs)


def row_orders(plan: Plan, rank: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """The plan's order of a rank's query rows and of its key rows; None where it is the shard's own."""
    orders = (plan.row_order(rank, side) for side in ("query", "kv"))
    queries, keys = (None if order is None else order.to(device) for order in orders)
    return queries, keys


def in_order(x: Tensor, order: Tensor | None) -> Tensor:
    """A shard's (B, heads, rows, ...) with its rows as the plan counts them."""
    return x if order is None else x.index_select(2, order)


def back_in_place(x: Tensor, order: Tensor | None) -> Tensor:
    """The shard's own order again."""
    return x if order is None else torch.empty_like(x).index_copy_(2, order, x)


@contextlib.contextmanager
def told_to_all(ring: Ring, phase: str) -> Iterator[None]:
    """After the agreement the others count on this rank: whatever ends its call, also outside a round, is told."""
    try:
        yield
    except BaseException as error:
        ring.fail(f"{phase}, outside its rounds", error)
        raise


def prepare(
    phase: str,
    shapes: Shapes,
    device: torch.device,
    lengths: tuple[int, int],
    text: str,
    ring: Ring,
    needs: str | None = None,
) -> tuple[Options, Plan | HeadsPlan, TileKernel]:
    """Everything before the first hop: the agreement of all ranks, the plan, the kernel.

    `lengths` are this rank's tokens of q and of k.
    """
    options, mask = parse_options(text)
    needs = options.needs if needs is None else needs
    dims = shapes.head_dim, shapes.value_dim
    request = TileRequest(device.type, shapes.dtype, *dims, options.returns_lse, options.scale)
    try:
        kernel = pick_kernel(options.kernel, request)
    except ValueError as error:
        raise refuse(ring, error, options.check) from None
    tiles = repr(kernel.facts(device)) if options.results == "auto" else ""
    agreed = agree(ring, LocalCall(phase, shapes, device.type, *lengths, options, needs, tiles))
    if not agreed.tiles_alike:
        options = replace(options, results="chain")
    plan = plan_of(options, mask, *options.layouts(*agreed.lengths), shapes, needs, kernel)
    for ring_plan in ring_plans(plan):
        require_served(kernel, ring_plan)
    return options, plan, kernel


def plan_of(
    options: Options,
    mask: Mask,
    layout: Layout,
    key_layout: Layout,
    shapes: Shapes,
    needs: str,
    kernel: TileKernel,
) -> Plan | HeadsPlan:
    """What a call with these options runs."""
    wire_dtype = WIRE_DTYPES[options.wire_dtype] if options.wire_dtype else None
    sides = options.forward_direction, options.direction
    ways = options.coalesce, options.per_host, options.head_groups
    straight = options.results == "straight"
    if options.head_degree > 1:
        rest = sides, wire_dtype, needs, ways, straight, options.head_degree, options.returns_lse
        return build_heads_plan(mask, layout, key_layout, shapes, *rest)
    as_given = mask, layout, key_layout, shapes
    asked = *as_given, *sides, wire_dtype, needs, *ways, straight
    if options.results == "auto" and wire_dtype in (None, shapes.dtype) and options.direction != "query":
        narrow = *as_given, "kv", "kv", shapes.dtype, needs, *ways, True
        if saves_sums(narrow, asked, kernel, sign_of(options.scale), kernel.facts()):
            return build_plan(*narrow)
    return build_plan(*asked)


@kept(64)
def saves_sums(
    narrow: tuple[Any, ...], chain: tuple[Any, ...], kernel: TileKernel, scale: float, facts: tuple[Hashable, ...]
) -> bool:
    """Whether gradients of keys had better go straight home as the kernel gives them, in the dtype of the inputs.

    A chain adds to them in fp32 on the way, a pass over memory in every round. Plans are given by what they are built
    of, and asked for all ranks, so that all decide alike; `facts` are what else the kernel chooses by.
    """
    other = build_plan(*chain)
    backward, forward = other.backward, other.forward
    if backward is None or backward.topology.size == 1 or forward.direction == "query":
        return False
    # Keys visit in forward as they would in backward: where a mask needs our own kernels, that is seen without a plan.
    of_keys = replace(backward, direction="kv")
    if not all(kernel.gives_parts(of_keys, step, scale) for steps in forward.rounds for step in steps if step.pieces):
        return False
    phase = build_plan(*narrow).phase("backward")
    rounds = [step for steps in phase.rounds for step in steps if step.pieces]
    return phase.rounds_alone(kernel, rounds, scale) and phase.total_bytes <= backward.total_bytes


def ring_plans(plan: Plan | HeadsPlan) -> tuple[Plan, ...]:
    """One, or where heads are exchanged one of each member."""
    return plan.rings if isinstance(plan, HeadsPlan) else (plan,)


def require_served(kernel: TileKernel, plan: Plan) -> None:
    """A kernel that was asked for by name must serve every piece of every rank, so that all ranks refuse alike."""
    if type(kernel).serves is TileKernel.serves:
        return
    for phase in (plan.forward, plan.backward):
        if phase and not all(map(kernel.serves, phase.all_pieces)):
            raise ValueError(
                f"kernel {kernel.name!r} serves full and square causal pieces only, and mask {plan.mask} in "
                f"layout {plan.layout} has others; use kernel='auto'"
            )


@torch.library.register_fake(FORWARD)
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, options: str, ring: str) -> tuple[Tensor, Tensor]:
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=accumulate)


@torch.library.register_fake(BACKWARD)
def _backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: str,
    ring: str,
    needs: str,
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (x.shape if name in needs else (0,) for name, x in (("q", q), ("k", k), ("v", v)))
    dq, dk, dv = (q.new_empty(shape) for shape in shapes)
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.options, ctx.ring_name = inputs
    # The ring must outlive the graph: backward moves blocks over it.
    ctx.ring = ring_named(ctx.ring_name)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    needs = "".join(name for name, wanted in zip("qkv", ctx.needs_input_grad, strict=False) if wanted)
    dout = torch.zeros_like(out) if dout is None else dout
    gradients = backward_op(dout, dlse, q, k, v, out, lse, ctx.options, ctx.ring_name, needs)
    return *(x if name in needs else None for name, x in zip("qkv", gradients, strict=True)), None, None


torch.library.register_autograd(FORWARD, _backward, setup_context=_save)


def refuse_double_backward(ctx: Any, *gradients: Tensor | None) -> Any:
    """What backward's own backward says."""
    raise RuntimeError("burst_attention has no double backward: gradients of its gradients are not implemented")


torch.library.register_autograd(BACKWARD, refuse_double_backward)
