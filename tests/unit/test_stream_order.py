"""Rounds that take turns on streams, on streams that only count: nothing is touched out of order, nothing freed early.

What GPUs make of it is for tests/gpu/test_lanes_on_cuda.py.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention import (
    Layout,
    Ring,
    burst_attention,
    causal,
    documents,
    engine,
    full,
    lanes,
    run_ranks,
    window,
    work,
)
from burst_attention.lanes import Lanes
from burst_attention.reference import allowed_pairs, reference_gradients
from burst_attention.ring import threads
from burst_attention.schedule import plan as planning
from tests.unit.stream_order import Machine

pytest.importorskip("triton")
from burst_attention.tiles import accumulator, cuda, flash4, fused, gpu, hopper, hopper_kernel, policy, vendor
from tests.unit import fake_gpu, gluon_on_cpu

HEADS, DIM = 4, 16
DOCUMENTS = [13, 30, 21]
MASKS = {"causal": causal(), "full": full(), "window": window(21), "documents": causal() & documents(DOCUMENTS)}
TILES = ("attend", "launch", "gradients", "continue_state", "add_gradients")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Machine:
    """Its pool has as many streams as the test asks for."""
    return fake_gpu.pretend_gpu(monkeypatch, getattr(request, "param", 100))


class CountedLanes(Lanes):
    turns_of_all: list[tuple[Lanes, Any]] = []  # noqa: RUF012
    """Each with what it waits for."""

    @contextlib.contextmanager
    def turn(self, ready: Any) -> Iterator[None]:
        if self.streams:
            CountedLanes.turns_of_all.append((self, ready))
        with super().turn(ready):
            yield


STRAIGHT: dict[str, Any] = {"direction": "kv", "results": "straight", "wire_dtype": torch.float16}


def run(
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    kernel: str,
    ranks: int,
    mask_name: str,
    kv_heads: int,
    options: dict[str, Any] = STRAIGHT,
    batch: int = 1,
    needs: str = "qkv",
    layout_name: str = "zigzag",
) -> int:
    """Two calls on each rank, the second in memory of the first; returns how many turns lanes had."""
    fake_gpu.use_kernel(monkeypatch, kernel)
    monkeypatch.setattr("burst_attention.engine.Lanes", CountedLanes)
    CountedLanes.turns_of_all.clear()
    tokens, mask = 16 * ranks, MASKS[mask_name]
    layout, generator = Layout(layout_name, tokens, ranks), torch.Generator().manual_seed(0)
    heads = HEADS, kv_heads, kv_heads, HEADS
    tensors = [torch.randn(batch, count, tokens, DIM, generator=generator).half() for count in heads]

    def body(ring: Ring) -> list[Tensor]:
        *inputs, dout = (layout.shard(x, ring.rank, 2) for x in tensors)
        leaves = [x.requires_grad_() for name, x in zip("qkv", inputs, strict=True) if name in needs]
        for _ in range(2):
            out = burst_attention(*inputs, ring=ring, mask=mask, layout=layout, coalesce=2, **options)
            gradients = torch.autograd.grad(out, leaves, dout)
        return [out.detach(), *gradients]

    found = run_ranks(body, ranks, timeout=120)
    exact = reference_gradients(*tensors, allowed_pairs(mask, torch.arange(tokens), torch.arange(tokens)))
    for index, name in enumerate(("out", *(f"d{name}" for name in needs))):
        whole, right = layout.unshard([rank[index] for rank in found], 2).double(), getattr(exact, name)
        assert (whole - right).norm() < 3e-3 * right.norm(), name
    gc.collect()
    machine.look_at_freed()
    return len(CountedLanes.turns_of_all)


@pytest.mark.parametrize(
    ("machine", "ranks", "mask", "kv_heads"),
    [
        (100, 2, "causal", 4),
        (100, 3, "full", 2),
        (100, 4, "causal", 4),
        (5, 4, "causal", 2),
        (5, 10, "causal", 4),
        (100, 10, "full", 2),
    ],
    indirect=["machine"],
    ids=["2-causal", "3-full-GQA", "4-causal", "4-causal-GQA-shared", "10-causal-shared", "10-full-GQA"],
)
@pytest.mark.parametrize("kernel", ["FA4", "cuDNN", "hopper"])
def test_everything_is_in_order(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, kernel: str, ranks: int, mask: str, kv_heads: int
) -> None:
    turns = run(monkeypatch, machine, kernel, ranks, mask, kv_heads)
    assert turns >= 4 * ranks, "no round went to a lane"
    assert not machine.found, "\n".join(sorted(set(machine.found))[:10])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 4), (8, 4)])
@pytest.mark.parametrize("mask", ["window", "documents"])
def test_our_kernel_for_hopper_is_in_order_with_any_mask(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, mask: str, heads: int, kv_heads: int
) -> None:
    """Of 8 heads home's own work gives parts of dk and dv for two key heads, in two parts each."""
    monkeypatch.setattr(f"{__name__}.HEADS", heads)
    assert run(monkeypatch, machine, "hopper", 4, mask, kv_heads) >= 4 * 4
    assert not machine.found, "\n".join(sorted(set(machine.found))[:10])


@pytest.mark.parametrize("kernel", ["FA4", "cuDNN", "hopper"])
def test_batches_are_in_order(monkeypatch: pytest.MonkeyPatch, machine: Machine, kernel: str) -> None:
    assert run(monkeypatch, machine, kernel, 3, "causal", HEADS, batch=3) >= 4 * 3
    assert not machine.found, "\n".join(sorted(set(machine.found))[:10])


@pytest.mark.parametrize("needs", ["q", "k", "v", "qk", "kv"])
@pytest.mark.parametrize("kernel", ["hopper", "triton"])
def test_some_gradients_are_for_the_plain_kernels(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, kernel: str, needs: str
) -> None:
    # In two calls of 3 ranks forward has two rounds, the last in two halves.
    turns = 2 * 3 * 3 if kernel == "hopper" else 0
    assert run(monkeypatch, machine, kernel, 3, "causal", 2, needs=needs) == turns
    assert not machine.found, "\n".join(sorted(set(machine.found))[:10])


def test_all_pieces_of_a_round_are_one_launch_of_our_own(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Striped documents are a piece each, and vendors' kernels take them one by one."""
    launches: list[str] = []
    touch = machine.touch

    def count(name: str, *made: Any, **touched: Any) -> None:
        launches.append(name)
        touch(name, *made, **touched)

    monkeypatch.setattr(machine, "touch", count)
    turns = run(monkeypatch, machine, "hopper", 4, "documents", HEADS, layout_name="striped")
    # Two calls of 4 ranks: home and two rounds of visitors, in halves either the last of them or, backward, home.
    assert launches.count("continue_state") == launches.count("add_gradients") == 2 * 4 * 4
    assert turns == 2 * 2 * 4 * 4
    assert not machine.found, "\n".join(sorted(set(machine.found))[:10])


def test_what_cannot_be_loaded_is_copied_to_where_it_can() -> None:
    x = torch.zeros(1 + 2 * 4 * 8 * 128, dtype=torch.bfloat16)[1:].view(2, 4, 8, 128)
    assert not hopper.loadable(x) and x.is_contiguous()
    assert hopper.loadable(hopper_kernel.as_loaded(x))
    assert hopper_kernel.as_loaded(made := x.clone()) is made


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_the_policy_may_name_our_kernel_for_hopper(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, mask: str
) -> None:
    """Beside another for forward; by itself it is what it is by name."""
    row = policy.Row("hopper", lambda case: case.phase == "backward", "for a test")
    monkeypatch.setattr(policy, "CHOICES", (row, *policy.CHOICES[-1:]))
    cuda._chosen_by.cache_clear()
    assert run(monkeypatch, machine, "cuda", 3, mask, 2) >= 2 * 3
    assert not machine.found, "\n".join(sorted(set(machine.found))[:10])
    cuda._chosen_by.cache_clear()


@pytest.mark.parametrize(("mask", "kv_heads"), [("causal", 4), ("full", 2), ("documents", 4)])
def test_our_kernels_for_hopper_themselves_write_where_they_are_told(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, mask: str, kv_heads: int
) -> None:
    """Elsewhere here they are torch: gradients in 16 bits where they are sent from, parts of some heads at home."""
    for name, touches in (("launch_hopper_forward", fake_gpu.continues), ("launch_hopper_backward", fake_gpu.adds)):
        monkeypatch.setattr(hopper_kernel, name, machine.kernel(getattr(hopper, name), touches))
    gluon_on_cpu.use_chip(monkeypatch)
    monkeypatch.setattr(f"{__name__}.DIM", 128)
    assert run(monkeypatch, machine, "hopper", 3, mask, kv_heads) >= 4 * 3
    assert not machine.found, "\n".join(sorted(set(machine.found))[:10])


@pytest.mark.parametrize(("ranks", "most"), [(13, 7), (5, 1), (5, 2), (5, 3), (5, 4), (6, 5), (4, 1)])
def test_partials_are_merged_before_some_heads_are_ended(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, ranks: int, most: int
) -> None:
    """Rank 11 of 13 has six waiting before its last two visitors, a piece each: with both it would be eight."""
    for module in (gpu, planning):
        monkeypatch.setattr(module, "MAX_PARTIALS", most)
    assert run(monkeypatch, machine, "FA4", ranks, "causal", HEADS) >= 4 * ranks
    assert not machine.found, "\n".join(sorted(set(machine.found))[:10])


@pytest.mark.parametrize("kernel", ["FA4", "cuDNN", "hopper", "triton"])
@pytest.mark.parametrize(
    "options",
    [{"direction": "kv", "results": "chain"}, {"direction": "query", "results": "chain"},
     STRAIGHT | {"direction": "query"}, STRAIGHT | {"direction": "query", "forward_direction": "query"},
     STRAIGHT | {"head_groups": 2}],
    ids=["chain", "chain-queries", "queries", "queries-in-both", "groups"],
)  # fmt: skip
def test_rounds_that_add_to_each_other_have_no_lanes(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, options: dict[str, Any], kernel: str
) -> None:
    """A visitor adds in fp32, or to what comes from another; statistics lie in one place; groups take turns."""
    # Of 4 ranks that run 3 rounds, in two calls. But beside cuDNN's out of half of the heads is ended, which makes two
    # turns of the last.
    turns_of_forward = 2 * (4 * 3 + (4 if kernel != "cuDNN" else 0))
    turns_of_forward *= not {"forward_direction", "head_groups"} & options.keys() and kernel != "triton"
    assert run(monkeypatch, machine, kernel, 4, "causal", HEADS, options) == turns_of_forward
    assert not machine.found, "\n".join(sorted(set(machine.found))[:10])


def test_parts_are_added_up_in_the_lane_of_their_round(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Where they travel in fp32 they are not written where they are sent from."""
    assert run(monkeypatch, machine, "FA4", 4, "causal", HEADS, STRAIGHT | {"wire_dtype": torch.float32}) >= 4 * 4
    assert not machine.found, "\n".join(sorted(set(machine.found))[:10])


def test_rounds_of_kernels_that_add_have_no_lanes(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    monkeypatch.setattr(vendor.VendorKernel, "gives_parts", lambda self, phase, step, scale: step.index != 1)
    assert run(monkeypatch, machine, "FA4", 4, "causal", HEADS) == 0


@pytest.mark.parametrize("kernel", ["FA4", "cuDNN"])
def test_what_hides_the_way_home_of_results_does_not_wait_for_them(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, kernel: str
) -> None:
    """Home's own work, last in backward, was ready when the first was; a visitor's was not."""
    run(monkeypatch, machine, kernel, 4, "causal", HEADS)
    readies: dict[int, list[Any]] = {}
    for made, ready in CountedLanes.turns_of_all:
        readies.setdefault(id(made), []).append(ready)
    ended_at_home = [turns[-1] is turns[0] for turns in readies.values()]
    assert ended_at_home.count(True) == 2 * 4, "backward of two calls on 4 ranks"
    assert ended_at_home.count(False) == 2 * 4, "forward, which ends with a visitor"
    assert all(turns[1] is not turns[0] for turns in readies.values())


@pytest.mark.parametrize("kv_heads", [1, HEADS])
def test_the_last_pass_that_ends_heads_may_take_the_whole_chip(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, kv_heads: int
) -> None:
    """Those before it leave most of it to the round. A single key head is not complete: there dq's is the last."""
    passes: list[tuple[bool, str]] = []
    finish_heads = accumulator.Accumulator.finish_heads

    def note(self: accumulator.Accumulator, beside: bool = False) -> None:
        passes.append((beside, threading.current_thread().name))
        finish_heads(self, beside)

    monkeypatch.setattr(accumulator.Accumulator, "finish_heads", note)
    run(monkeypatch, machine, "FA4", 2, "causal", kv_heads)
    of_rank = [beside for beside, thread in passes if thread == passes[0][1]]
    # In two calls.
    assert of_rank == ([False] if kv_heads == 1 else [True, True, False]) * 2


def no_wait_for_what_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = CountedLanes.turn
    monkeypatch.setattr(CountedLanes, "turn", lambda self, ready: turn(self, {}))


def no_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedLanes, "join", lambda self: None)


def alone_without(monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    """Waits on one side are left out: before what is alone, or after it."""

    @contextlib.contextmanager
    def alone(self: Lanes) -> Iterator[None]:
        current = torch.cuda.current_stream()
        others = [stream for stream in (self.caller, *self.used) if stream not in (None, current)]
        for stream in () if before else others:
            current.wait_stream(stream)
        yield
        for stream in others if before else ():
            stream.wait_stream(current)

    monkeypatch.setattr(CountedLanes, "alone", alone)


def given_back_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partials are let go before the others wait for what reads them."""
    merge_partials = gpu.merge_partials

    def merge_and_free(state: Any, partials: list[Any], **options: Any) -> None:
        merge_partials(state, partials, **options)
        partials.clear()
        state.deferred.partials.clear()

    monkeypatch.setattr(gpu, "merge_partials", merge_and_free)


def heads_end_before_their_partials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedLanes, "gather", lambda self: None)


def turns_that_overtake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash4, "begins", lambda x: None)


def passes_that_do_not_wait(monkeypatch: pytest.MonkeyPatch, module: Any, before: bool) -> None:
    """What is hurried does not wait for its stream, or its stream does not wait for it."""

    @contextlib.contextmanager
    def hurried(x: Tensor) -> Iterator[None]:
        current, other = torch.cuda.current_stream(), lanes._now.hurried
        if other is None:
            yield
            return
        if not before:
            other.wait_stream(current)
        with torch.cuda.stream(other):
            yield
        if before:
            current.wait_stream(other)

    monkeypatch.setattr(module, "hurried", hurried)


def receives_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self: threads.ThreadRing, target: Tensor, letter: Any, pending: Any) -> None:
        stream = self._copy_stream = self._copy_stream or torch.cuda.Stream()
        for event in (letter.ready, pending.posted):
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            target.copy_(letter.tensor)
        letter.copied = stream.record_event()

    monkeypatch.setattr(threads.ThreadRing, "_copy_on_gpu", copy)


BROKEN: dict[str, tuple[str, int, Callable[[pytest.MonkeyPatch], None], str]] = {
    "a round does not wait until it is ready": ("FA4", 4, no_wait_for_what_is_ready, "aten::copy_ (write)"),
    "transfers do not wait for rounds": ("cuDNN", 4, no_join, "has yet to attend"),
    "what is alone does not wait": ("cuDNN", 10, lambda patch: alone_without(patch, before=True), "gradients (write)"),
    "rounds do not wait for what is alone": (
        "cuDNN", 8, lambda patch: alone_without(patch, before=False), "has yet to sum_parts",
    ),
    "memory goes back too early": ("cuDNN", 8, given_back_inside, "has yet to merge_partials"),
    "heads end before their partials": ("FA4", 4, heads_end_before_their_partials, "merge_partials (read)"),
    "sums grow before they are cleared": ("FA4", 4, turns_that_overtake, "statistics (write)"),
    "dq grows before it is cleared": (
        "hopper", 4, lambda patch: patch.setattr(hopper_kernel, "begins", lambda x: None), "aten::zero_ (write)",
    ),
    "receives are not waited for": ("FA4", 3, receives_not_waited_for, "has yet to aten::copy_"),
}  # fmt: skip
"""By what is left out: a kernel, a number of ranks, how it is left out, and what is to be said of it."""


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_out_of_order_is_seen(monkeypatch: pytest.MonkeyPatch, machine: Machine, name: str) -> None:
    kernel, ranks, break_it, wrong = BROKEN[name]
    break_it(monkeypatch)
    run(monkeypatch, machine, kernel, ranks, "causal", HEADS)
    assert any(wrong in found for found in machine.found), sorted(set(machine.found))[:10]


@pytest.mark.parametrize("before", [True, False], ids=["its-stream", "by-its-stream"])
@pytest.mark.parametrize(
    ("module", "kv_heads"),
    [(engine, HEADS), (work, 1), (accumulator, HEADS), (fused, HEADS), (gpu, HEADS)],
    ids=["packing", "visitors", "arrivals", "statistics", "ended-heads"],
)
def test_a_pass_that_waits_for_nothing_is_seen(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, module: Any, kv_heads: int, before: bool
) -> None:
    """What is hurried does not wait for its stream, or is not waited for by it."""
    passes_that_do_not_wait(monkeypatch, module, before)
    run(monkeypatch, machine, "FA4", 8, "causal", kv_heads)
    assert any("does not wait for" in found for found in machine.found)


@pytest.mark.parametrize("kernel", ["FA4", "cuDNN", "hopper"])
def test_every_tile_says_that_it_begins(monkeypatch: pytest.MonkeyPatch, machine: Machine, kernel: str) -> None:
    """Or the next would overtake it."""
    begun: list[Tensor] = []
    tiles: list[str] = []
    touch = machine.touch

    def count(name: str, *made: Any, **touched: Any) -> None:
        if name in TILES:
            tiles.append(name)
        touch(name, *made, **touched)

    monkeypatch.setattr(machine, "touch", count)
    for module in (flash4, vendor, hopper_kernel):
        monkeypatch.setattr(module, "begins", begun.append)
    run(monkeypatch, machine, kernel, 4, "causal", HEADS)
    assert len(begun) == len(tiles) > 0


@pytest.mark.parametrize(
    ("kernel", "which"),
    [("FA4", 2), ("FA4", 8), ("FA4", 11), ("cuDNN", 5), ("cuDNN", 8), ("hopper", 1), ("hopper", 3), ("hopper", 4)],
)
def test_after_an_error_nothing_is_freed_early(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, kernel: str, which: int
) -> None:
    """One launch on rank 1 fails; what its lanes have laid aside is let go behind all of them."""
    launches: list[str] = []
    touch = machine.touch

    def fail_once(name: str, *made: Any, **touched: Any) -> None:
        touch(name, *made, **touched)
        if threading.current_thread().name == "ring-rank-1" and name in (*TILES, "sum_parts"):
            launches.append(name)
            if len(launches) == which + 1:
                raise ValueError("a launch that fails")

    monkeypatch.setattr(machine, "touch", fail_once)
    with pytest.raises(ValueError, match="a launch that fails"):
        run(monkeypatch, machine, kernel, 4, "causal", HEADS)
    gc.collect()
    machine.look_at_freed()
    # A peer may still read what it was sent.
    found = {problem for problem in machine.found if not problem.endswith("aten::copy_")}
    assert not found, "\n".join(sorted(found)[:10])
