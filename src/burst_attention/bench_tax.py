"""The ring's part of `burst bench gpu`: what a rank costs, against the fastest whole attention in the same run.

The ring tax is W x (time of the slowest rank) / (time of one whole attention by the fastest kernel). Each rank is timed
alone: what other ranks would send is handed over by reference, or copied on a stream of its own as a receive would be.
It is measured in two manners (bench_timing.py): each call alone, and calls of a rank in a row against the whole.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from burst_attention import ops
from burst_attention.api import burst_attention, plan
from burst_attention.bench_timing import MOST_IN_A_ROW, Call, busy_medians_ms, host_ms, median_ms
from burst_attention.engine import RowBuffer
from burst_attention.geometry import Piece, full_piece
from burst_attention.layout import Layout
from burst_attention.mask import causal, full
from burst_attention.ring.lone import LoneRing
from burst_attention.schedule import PhasePlan, Plan
from burst_attention.tiles import Accumulator, BackwardInputs, Gradients, TileKernel


@dataclass(frozen=True)
class TaxCase:
    """A ring and the attention it computes."""

    ranks: int = 8
    tokens_per_rank: int = 8192
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    causal: bool = True
    dtype: torch.dtype = torch.bfloat16

    @property
    def tokens(self) -> int:
        return self.ranks * self.tokens_per_rank

    @property
    def options(self) -> dict[str, Any]:
        layout = Layout("zigzag" if self.causal else "contiguous", self.tokens, self.ranks)
        return {"mask": causal() if self.causal else full(), "layout": layout}

    def plan(self, **options: Any) -> Plan:
        shapes: dict[str, Any] = {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
        }
        made: Plan = plan(self.tokens, self.ranks, device="cuda", **shapes, **self.options, **options)
        return made


MAIN_CASES = tuple(
    TaxCase(tokens_per_rank=tokens, kv_heads=kv_heads) for kv_heads in (32, 8) for tokens in (8192, 4096)
)
"""Those that are measured in all variants."""
GRID_CASES = tuple(
    case
    for ranks, tokens in sorted(itertools.product((2, 4, 8, 16), (2048, 4096, 8192, 16384)), key=math.prod)
    for kv_heads in (32, 8)
    for causal in (True, False)
    if (case := TaxCase(ranks, tokens, kv_heads=kv_heads, causal=causal)) not in MAIN_CASES
)
"""The rest of the grid, the shortest first."""
VARIANTS: tuple[dict[str, Any], ...] = (
    {"kernel": "auto", "coalesce": 2, "copies": False},
    {"kernel": "auto", "coalesce": 2, "copies": True},
    {"kernel": "cudnn", "coalesce": 2, "copies": False},
    {"kernel": "cudnn", "coalesce": 2, "copies": True},
)
"""Options of a call, and whether receives are copies; kernels by name only where no faster flash was activated."""
OTHER_VARIANTS: tuple[dict[str, Any], ...] = (
    {"kernel": "auto", "coalesce": 1, "copies": False},
    {"kernel": "auto", "coalesce": 2, "copies": False, "results": "chain"},
    {"kernel": "hopper", "coalesce": 2, "copies": False},
    {"kernel": "hopper", "coalesce": 2, "copies": True},
)
RANKS_TIMED = (*range(8), 11, 15)
"""Of a ring of up to 8 all: mostly forward the last are slowest, backward the first, whose tiles have few queries."""
GRID_RANKS = (1, 2, 4, 7, 15, 0)
"""Of the grid, for time: those that were slowest in the main cases, and both ends."""
HOST_REPEAT = 5
BUSY_REPEAT = 3
"""Of a rank's calls in a row, which are many already; only where receives are by reference."""
NEARLY = 1.1
"""Times the fastest of all: who else may be that on a busy chip."""


def made_up_blocks(case: TaxCase, made: Plan, device: str) -> Callable[[str, int], Tensor]:
    """What other ranks would send: random operands with plausible statistics, and results of 0.

    Buffers of one call are different memory; the next call gets the same ones again.
    """
    kept: dict[tuple[str, int], list[Tensor]] = {}
    given: dict[tuple[str, int], int] = {}

    def make(what: str, nbytes: int) -> Tensor:
        phase, channel, *copied = what.split()
        key = what, nbytes
        # Results are computed, sent, and received into one buffer or several.
        buffers = 2 + made.phase(phase).arrival_slots if channel == "result" else 3
        turn = given[key] = (given.get(key, -1) + 1) % (1 if copied else buffers)
        pool = kept.setdefault(key, [])
        if turn >= len(pool):
            pool.append(_made_up_block(case, made.phase(phase), channel == "result", nbytes, device))
        return pool[turn]

    return make


def _made_up_block(case: TaxCase, phase: PhasePlan, result: bool, nbytes: int, device: str) -> Tensor:
    memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if result:
        return memory
    rows = nbytes // phase.operands.row_bytes
    for name, view in RowBuffer(phase.operands, memory).fields(0, rows).items():
        if name == "lse":
            view.fill_(math.log(case.tokens) + 0.5)
        elif name == "delta":
            view.normal_(std=0.01)
        else:
            view.normal_()
    return memory


def lone_calls(case: TaxCase, rank: int, copies: bool, **options: Any) -> dict[str, Callable[[], Any]]:
    """One rank's forward and backward, by themselves."""
    made = case.plan(**_of_plan(options))
    ring = LoneRing(rank, case.ranks, made_up_blocks(case, made, "cuda"), copies)
    return _calls_on(ring, case, as_agreed(made, options))


def _of_plan(options: dict[str, Any]) -> dict[str, Any]:
    names = ("kernel", "coalesce", "direction", "results", "wire_dtype")
    return {name: value for name, value in options.items() if name in names}


def as_agreed(made: Plan, options: dict[str, Any]) -> dict[str, Any]:
    """Options under which a rank that has nobody to agree with runs a plan that all ranks would have agreed on."""
    phase = made.phase("backward")
    results, wire_dtype = "straight" if phase.straight else "chain", phase.results.fields[0].dtype
    return options | {"results": results, "direction": phase.direction, "wire_dtype": wire_dtype}


def _calls_on(ring: LoneRing, case: TaxCase, options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    q, k, v, dout = made_inputs(case, case.tokens_per_rank)
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def attend() -> Tensor:
        out: Tensor = burst_attention(q, k, v, ring=ring, check="off", **case.options, **options)
        return out

    out = attend()
    return {
        "forward": attend,
        "backward": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
    }


def copies_ms(case: TaxCase, rank: int, repeat: int, **options: Any) -> dict[str, float]:
    """Milliseconds of a rank's receives by themselves, as device copies with nothing beside them."""
    made = case.plan(**_of_plan(options))
    ring = LoneRing(rank, case.ranks, made_up_blocks(case, made, "cuda"), copies=True)
    found = {}
    for phase, call in _calls_on(ring, case, as_agreed(made, options)).items():
        ring.copied.clear()
        call()
        copied = list(ring.copied)
        found[phase] = median_ms(lambda copied=copied: [target.copy_(made) for target, made in copied], repeat)  # type: ignore[misc]
    return found


def peak_gib(case: TaxCase, rank: int, **options: Any) -> float:
    """What one rank's forward and backward hold at most beyond their inputs, buffers of the ring among it.

    That is what rounds allocate, not what is asked for before them, which is what is planned.
    """
    ring = LoneRing(rank, case.ranks, lambda what, nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
    q, k, v, dout = made_inputs(case, case.tokens_per_rank)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    options = as_agreed(case.plan(**_of_plan(options)), options)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with nothing_asked_for(), torch.autograd.set_multithreading_enabled(False):
        out = burst_attention(q, k, v, ring=ring, check="off", **case.options, **options)
        torch.autograd.grad(out, (q, k, v), dout)
    return (torch.cuda.max_memory_allocated() - before) / 2**30


@contextlib.contextmanager
def nothing_asked_for() -> Iterator[None]:
    """Calls in here allocate what they need when they need it."""
    names = vars(ops)
    before = names["ask_for_room"]
    names["ask_for_room"] = lambda plan, runs: None
    try:
        yield
    finally:
        names["ask_for_room"] = before


def made_inputs(case: TaxCase, tokens: int) -> tuple[Tensor, ...]:
    """Random q, k, v and dout."""
    torch.manual_seed(0)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    return tuple(torch.randn(1, h, tokens, case.head_dim, device="cuda", dtype=case.dtype) for h in heads)


def whole_calls(case: TaxCase, name: str) -> dict[str, Callable[[], Any]]:
    """One whole attention by a vendor's kernel, forward and backward by themselves.

    "flash" has its backward through torch's operator, "flash4" as a ring starts it: from lse and delta.
    """
    from burst_attention.tiles.vendor import CudnnKernel, FlashKernel

    kernel = CudnnKernel() if name == "cudnn" else FlashKernel()
    q, k, v, dout = made_inputs(case, case.tokens)
    scale = case.head_dim**-0.5
    out, lse = kernel.attend(q, k, v, case.causal, scale)
    out, lse = out.contiguous(), lse.contiguous()
    piece = full_piece(0, case.tokens, 0, case.tokens)
    piece = piece if not case.causal else piece._replace(low=0)
    if name == "flash4":
        return {"backward": lambda: _gradients(kernel, piece, (dout, q, k, v, out, lse), scale)}
    return {
        "forward": lambda: kernel.attend(q, k, v, case.causal, scale),
        "backward": lambda: kernel.gradients(dout, q, k, v, out, lse, case.causal, scale),
    }


def _gradients(kernel: TileKernel, piece: Piece, given: tuple[Tensor, ...], scale: float) -> list[Tensor]:
    """(dq, dk, dv) of one piece that is everything, in the dtype of the inputs."""
    dout, q, k, v, out, lse = given
    delta = kernel.row_delta(out, dout, None, torch.float32)
    totals = [Accumulator(torch.empty_like(x), kernel.sum_parts) for x in (q, k, v)]
    kernel.backward([piece], BackwardInputs(dout, q, k, v, lse, delta, out), Gradients(*totals), scale)
    return [total.finish(q.dtype) for total in totals]


def tax_rows(
    cases: Sequence[TaxCase],
    repeat: int,
    variants: Sequence[dict[str, Any]] = VARIANTS,
    ranks: Sequence[int] = RANKS_TIMED,
) -> Iterator[dict[str, Any]]:
    """The ring tax of each case in each variant; the slowest of the `ranks` that exist is taken.

    Rings of different sizes may split the same attention, which is timed alone once then; with a full mask ranks are
    alike.
    """
    wholes: dict[TaxCase, Wholes] = {}
    for case in cases:
        alone = replace(case, ranks=1, tokens_per_rank=case.tokens)
        whole = wholes[alone] = wholes.get(alone) or Wholes(alone, repeat)
        row = case_fields(case) | {"suite": "gpu-tax", "flash": flash_name(), "repeat": repeat} | whole.fields()
        chosen = [rank for rank in ranks if rank < case.ranks][: None if case.causal else 2]
        for variant in variants:
            options = {name: value for name, value in variant.items() if name != "copies"}
            if options["kernel"] != "auto" and flash_name() != "FA2":
                continue
            calls = {rank: lone_calls(case, rank, variant["copies"], **options) for rank in chosen}
            times = _times_of_ranks(case, calls, whole, repeat)
            times |= {} if variant["copies"] else _busy_times(case, calls, whole, min(repeat, BUSY_REPEAT))
            del calls
            copying = copies_ms(case, times["backward_slowest"], repeat, **options) if variant["copies"] else {}
            yield row | {
                **variant_fields(variant),
                "ranks_timed": chosen,
                **{f"{phase}_copies_ms": round(value, 4) for phase, value in copying.items()},
                "peak_gib": round(max(peak_gib(case, rank, **options) for rank in chosen), 3),
                **times,
                "planned_peak_gib": round(max(map(case.plan(**options).peak_bytes, chosen)) / 2**30, 3),
            }


class Wholes:
    """One whole attention by each vendor's kernel that can compute it, timed alone."""

    def __init__(self, case: TaxCase, repeat: int) -> None:
        self.case = case
        self.times: dict[str, dict[str, float]] = {}
        for name in ("cudnn", "flash", "flash4") if has_flash4(case) else ("cudnn", "flash"):
            try:
                calls = whole_calls(case, name)
                self.times[name] = {phase: median_ms(call, repeat) for phase, call in calls.items()}
            except RuntimeError as error:
                print(f"{name} cannot compute the whole of {case}: {error}")

    def fields(self) -> dict[str, float]:
        """As a row has them."""
        return {f"whole_{name}_{phase}_ms": ms for name, times in self.times.items() for phase, ms in times.items()}

    def fastest(self, phase: str) -> float:
        """Milliseconds of the fastest."""
        return min(times[phase] for times in self.times.values() if phase in times)

    def fast_ones(self, phase: str) -> dict[str, Call]:
        """Those that may be the fastest on a busy chip too, and cuDNN."""
        near = NEARLY * self.fastest(phase)
        names = [name for name, times in self.times.items() if times.get(phase, math.inf) <= near or name == "cudnn"]
        return {name: whole_calls(self.case, name)[phase] for name in names}


def _times_of_ranks(case: TaxCase, calls: dict[int, dict[str, Call]], whole: Wholes, repeat: int) -> dict[str, Any]:
    """Milliseconds of the slowest rank alone, the tax, and milliseconds on the host."""
    found: dict[str, Any] = {}
    for phase in ("forward", "backward"):
        of_ranks = {rank: given[phase] for rank, given in calls.items()}
        alone = {rank: median_ms(call, repeat) for rank, call in of_ranks.items()}
        found[f"{phase}_slowest"] = max(alone, key=alone.__getitem__)
        slowest = max(alone.values())
        found[f"{phase}_ms"] = round(slowest, 4)
        found[f"{phase}_tax"] = round(case.ranks * slowest / whole.fastest(phase), 4)
        host = max(host_ms(call, min(repeat, HOST_REPEAT)) for call in of_ranks.values())
        found[f"{phase}_host_ms"] = round(host, 4)
    return found


def _busy_times(case: TaxCase, calls: dict[int, dict[str, Call]], whole: Wholes, repeat: int) -> dict[str, Any]:
    """The same on a busy chip, for each rank's calls in a row."""
    found: dict[str, Any] = {"busy_repeat": repeat}
    for phase in ("forward", "backward"):
        of_ranks = {rank: given[phase] for rank, given in calls.items()}
        times = min(case.ranks, MOST_IN_A_ROW)
        in_turns: dict[int | str, tuple[Call, int]] = {rank: (call, times) for rank, call in of_ranks.items()}
        in_turns |= {name: (call, 1) for name, call in whole.fast_ones(phase).items()}
        busy = busy_medians_ms(in_turns, repeat)
        slowest = max(busy[rank] for rank in of_ranks)
        fastest = min(ms for name, ms in busy.items() if name not in of_ranks)
        found[f"busy_{phase}_ms"] = round(slowest, 4)
        found |= {f"busy_whole_{name}_{phase}_ms": round(ms, 4) for name, ms in busy.items() if name not in of_ranks}
        found[f"busy_{phase}_tax"] = round(case.ranks * slowest / fastest, 4)
    return found


def variant_fields(variant: dict[str, Any]) -> dict[str, Any]:
    """A variant as a row has it."""
    dtype = {"wire_dtype": str(variant["wire_dtype"]).removeprefix("torch.")} if "wire_dtype" in variant else {}
    return variant | dtype


def case_fields(case: TaxCase) -> dict[str, Any]:
    """A case as a row has it."""
    return {**asdict(case), "dtype": str(case.dtype).removeprefix("torch.")}


def has_flash4(case: TaxCase) -> bool:
    """Whether FlashAttention-4 is started by itself here."""
    from burst_attention.tiles.flash4 import serves_backward

    return serves_backward(case.plan().forward.shapes)


def flash_name() -> str:
    """What serves torch's flash operator now."""
    from burst_attention.tiles.policy import active_flash

    return active_flash()
