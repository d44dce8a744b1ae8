"""A call leaves no trace: inputs stay as they were, and calls that share a ring, a graph or a tensor do not meet."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from burst_attention import Mask, Ring, burst_attention, causal, documents, full, run_ranks, window
from burst_attention.launch import run_processes
from burst_attention.tiles.cpu_flash import CpuFlashKernel
from burst_attention.tiles.plain import PlainKernel

TIMEOUT = 30.0
SIDES = ("kv", "query")
ATTENTION = torch.ops.burst_attention.forward.default

each_direction = pytest.mark.parametrize("direction", SIDES, ids=lambda side: f"backward-{side}")
each_forward_direction = pytest.mark.parametrize("forward_direction", SIDES, ids=lambda side: f"forward-{side}")
each_kernel = pytest.mark.parametrize("kernel", ["flash", "plain"])


def shards(rank: int, seed: int = 0, tokens: int = 9, heads: int = 4, kv_heads: int = 2, dim: int = 16) -> list[Tensor]:
    """[q, k, v, dout] of one rank; the first three want gradients."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    shapes = [(1, count, tokens, dim) for count in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(shape, generator=generator) for shape in shapes)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout]


def train(ring: Ring, seed: int = 0, **options: Any) -> list[Tensor]:
    """[out, dq, dk, dv] of one call with nothing else on the ring."""
    q, k, v, dout = shards(ring.rank, seed)
    out = burst_attention(q, k, v, ring=ring, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def alone(size: int, seed: int = 0, **options: Any) -> list[list[Tensor]]:
    """What each rank gets from that call on a ring of its own."""
    return run_ranks(lambda ring: train(ring, seed, **options), size, timeout=TIMEOUT)


def assert_identical(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    """Every tensor of every rank, bit for bit, and none of them trivial."""
    assert len(found) == len(expected)
    for rank, (mine, other) in enumerate(zip(found, expected, strict=True)):
        for index, (a, b) in enumerate(zip(mine, other, strict=True)):
            assert torch.equal(a, b), f"rank {rank}, tensor {index}: differs by {(a - b).abs().max()}"
            assert a.isfinite().all() and a.abs().max() > 0, f"rank {rank}, tensor {index}: says nothing"


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """Counts (rank's thread, phase) for every call of either tile kernel."""
    calls: Counter[tuple[str, str]] = Counter()

    def counting(phase: str, original: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: Any, **kwargs: Any) -> None:
            calls[threading.current_thread().name, phase] += 1
            original(*args, **kwargs)

        return counted

    for kernel in (CpuFlashKernel, PlainKernel):
        for phase in ("forward", "backward"):
            monkeypatch.setattr(kernel, phase, counting(phase, getattr(kernel, phase)))
    return calls


@each_kernel
@each_direction
@each_forward_direction
@pytest.mark.parametrize(
    ("size", "mask", "layout"),
    [(3, full(), "contiguous"), (4, causal(), "zigzag"), (4, causal() & window(11), "contiguous")],
    ids=["three-full-contiguous", "four-causal-zigzag", "four-window-contiguous"],
)
def test_inputs_are_bit_identical_after_forward_and_backward(
    size: int, mask: Mask, layout: str, forward_direction: str, direction: str, kernel: str
) -> None:
    def body(ring: Ring) -> None:
        given = shards(ring.rank)
        q, k, v, dout = given
        before = [x.detach().clone() for x in given]
        versions = [x._version for x in given]
        # Only the plain kernel gives lse.
        result = burst_attention(
            q, k, v, ring=ring, mask=mask, layout=layout, kernel=kernel, return_lse=kernel == "plain",
            direction=direction, forward_direction=forward_direction,
        )  # fmt: skip
        outputs = list(result) if isinstance(result, tuple) else [result]
        results = [x.detach().clone() for x in outputs]
        result_versions = [x._version for x in outputs]
        assert_untouched(given, before, versions)
        outputs[0].backward(dout)
        assert_untouched(given, before, versions)
        assert_untouched(outputs, results, result_versions)

    run_ranks(body, size, timeout=TIMEOUT)


def assert_untouched(tensors: list[Tensor], before: list[Tensor], versions: list[int]) -> None:
    for index, (x, was) in enumerate(zip(tensors, before, strict=True)):
        assert torch.equal(x.detach(), was), f"tensor {index} was written to"
    assert [x._version for x in tensors] == versions


@each_kernel
@each_direction
@each_forward_direction
def test_second_backward_equals_the_first(forward_direction: str, direction: str, kernel: str) -> None:
    def body(ring: Ring) -> tuple[list[Tensor], list[Tensor]]:
        q, k, v, dout = shards(ring.rank)
        out = burst_attention(
            q, k, v, ring=ring, mask=causal(), layout="zigzag", kernel=kernel,
            direction=direction, forward_direction=forward_direction,
        )  # fmt: skip
        first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        second = torch.autograd.grad(out, (q, k, v), dout)
        return list(first), list(second)

    pairs = run_ranks(body, 3, timeout=TIMEOUT)
    assert_identical([second for _, second in pairs], [first for first, _ in pairs])


def test_backward_twice_accumulates_into_leaves() -> None:
    def body(ring: Ring) -> list[Tensor]:
        q, k, v, dout = shards(ring.rank)
        out = burst_attention(q, k, v, ring=ring, mask=causal())
        out.backward(dout, retain_graph=True)
        out.backward(dout)
        return [x.grad / 2 for x in (q, k, v) if x.grad is not None]

    expected = [gradients for _, *gradients in alone(3, mask=causal())]
    assert_identical(run_ranks(body, 3, timeout=TIMEOUT), expected)


FIRST: dict[str, Any] = {"seed": 1, "mask": causal(), "layout": "zigzag", "forward_direction": "query"}
SECOND: dict[str, Any] = {"seed": 2, "mask": window(5), "layout": "striped", "direction": "query"}


def start(ring: Ring, options: dict[str, Any]) -> tuple[Tensor, Callable[[], list[Tensor]]]:
    """Run forward now; the second value runs backward later and gives [out, dq, dk, dv]."""
    options = dict(options)
    q, k, v, dout = shards(ring.rank, options.pop("seed"))
    out = burst_attention(q, k, v, ring=ring, **options)
    return out, lambda: [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize("first_ends_first", [True, False], ids=["ABAB", "ABBA"])
def test_two_interleaved_models_equal_separate_runs(first_ends_first: bool) -> None:
    def body(ring: Ring) -> list[list[Tensor]]:
        _, finish_first = start(ring, FIRST)
        _, finish_second = start(ring, SECOND)
        if first_ends_first:
            return [finish_first(), finish_second()]
        second = finish_second()
        return [finish_first(), second]

    found = run_ranks(body, 3, timeout=TIMEOUT)
    assert_identical([first for first, _ in found], alone(3, **FIRST))
    assert_identical([second for _, second in found], alone(3, **SECOND))


def test_eval_between_train_steps_changes_nothing() -> None:
    def body(ring: Ring) -> list[list[Tensor]]:
        q, k, v, _ = shards(ring.rank, 7, tokens=4)
        results = []
        for options in (FIRST, SECOND):
            _, finish = start(ring, options)
            with torch.no_grad():
                # Between forward and backward, with other shapes and another direction.
                between = burst_attention(q, k, v, ring=ring, forward_direction="query")
            results.append(finish())
            with torch.no_grad():
                after = burst_attention(q, k, v, ring=ring, forward_direction="query")
            assert torch.equal(between, after)
        return results

    found = run_ranks(body, 3, timeout=TIMEOUT)
    assert_identical([first for first, _ in found], alone(3, **FIRST))
    assert_identical([second for _, second in found], alone(3, **SECOND))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@each_direction
def test_micro_batch_recomputed_after_the_next_forward(
    reentrant: bool, direction: str, kernel_calls: Counter[tuple[str, str]]
) -> None:
    options: dict[str, Any] = {"mask": causal(), "layout": "zigzag", "direction": direction}

    def body(ring: Ring) -> list[list[Tensor]]:
        micro = [shards(ring.rank, seed) for seed in (1, 2)]
        outs = [
            checkpoint(
                lambda *x: burst_attention(*x, ring=ring, **options), *qkv, use_reentrant=reentrant,
                preserve_rng_state=False,
            )
            for *qkv, _ in micro
        ]  # fmt: skip
        forwards = kernel_calls[f"ring-rank-{ring.rank}", "forward"]
        for out, (*_, dout) in zip(outs, micro, strict=True):
            out.backward(dout)
        assert kernel_calls[f"ring-rank-{ring.rank}", "forward"] == 2 * forwards > 0
        return [[out.detach(), *(x.grad for x in qkv)] for out, (*qkv, _) in zip(outs, micro, strict=True)]

    found = run_ranks(body, 3, timeout=TIMEOUT)
    for index, seed in enumerate((1, 2)):
        assert_identical([results[index] for results in found], alone(3, seed, **options))


@each_direction
def test_keys_that_are_also_values(direction: str) -> None:
    def shared(ring: Ring) -> list[Tensor]:
        q, k, _, dout = shards(ring.rank)
        out = burst_attention(q, k, k, ring=ring, mask=causal(), direction=direction)
        return [out.detach(), *torch.autograd.grad(out, (q, k), dout)]

    def separate(ring: Ring) -> list[Tensor]:
        q, k, _, dout = shards(ring.rank)
        v = k.detach().clone().requires_grad_()
        out = burst_attention(q, k, v, ring=ring, mask=causal(), direction=direction)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        return [out.detach(), dq, dk + dv]

    assert_identical(run_ranks(shared, 3, timeout=TIMEOUT), run_ranks(separate, 3, timeout=TIMEOUT))


def test_queries_used_in_two_calls() -> None:
    def shared(ring: Ring) -> list[Tensor]:
        q, k, v, dout = shards(ring.rank, 1)
        _, k2, v2, dout2 = shards(ring.rank, 2)
        first = burst_attention(q, k, v, ring=ring, mask=causal())
        second = burst_attention(q, k2, v2, ring=ring, direction="query")
        torch.autograd.backward((first, second), (dout, dout2))
        return [x.grad for x in (q, k, v, k2, v2) if x.grad is not None]

    def separate(ring: Ring) -> list[Tensor]:
        q, k, v, dout = shards(ring.rank, 1)
        _, k2, v2, dout2 = shards(ring.rank, 2)
        dq, dk, dv = torch.autograd.grad(burst_attention(q, k, v, ring=ring, mask=causal()), (q, k, v), dout)
        second = burst_attention(q, k2, v2, ring=ring, direction="query")
        dq2, dk2, dv2 = torch.autograd.grad(second, (q, k2, v2), dout2)
        return [dq + dq2, dk, dv, dk2, dv2]

    assert_identical(run_ranks(shared, 3, timeout=TIMEOUT), run_ranks(separate, 3, timeout=TIMEOUT))


def keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator == ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("selective", "times"), [(True, 1), (False, 2)], ids=["kept-by-policy", "recomputed"])
def test_selective_checkpointing_keeps_attention(
    selective: bool, times: int, kernel_calls: Counter[tuple[str, str]]
) -> None:
    options: dict[str, Any] = {"mask": causal(), "layout": "zigzag"}

    def body(ring: Ring) -> list[Tensor]:
        q, k, v, dout = shards(ring.rank)
        context: dict[str, Any] = {}
        if selective:
            context["context_fn"] = lambda: create_selective_checkpoint_contexts(keep_attention)
        # The products around attention are what such a checkpoint recomputes.
        out = checkpoint(
            lambda q, k, v: burst_attention(q * 1.0, k * 1.0, v * 1.0, ring=ring, **options) * 1.0, q, k, v,
            use_reentrant=False, preserve_rng_state=False, **context,
        )  # fmt: skip
        out.backward(dout)
        return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]

    expected = alone(3, **options)
    once = {rank: kernel_calls[f"ring-rank-{rank}", "forward"] for rank in range(3)}
    kernel_calls.clear()
    assert_identical(run_ranks(body, 3, timeout=TIMEOUT), expected)
    for rank in range(3):
        assert kernel_calls[f"ring-rank-{rank}", "forward"] == times * once[rank] > 0


@pytest.mark.parametrize(("mode", "saved"), [("no-grad", 0), ("inputs-without-grad", 0), ("training", 5)])
def test_only_training_saves_tensors(mode: str, saved: int) -> None:
    def body(ring: Ring) -> tuple[bool, int]:
        q, k, v, _ = shards(ring.rank)
        if mode == "inputs-without-grad":
            q, k, v = q.detach(), k.detach(), v.detach()
        packed: list[Tensor] = []

        def pack(x: Tensor) -> Tensor:
            packed.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.set_grad_enabled(mode != "no-grad"):
            out, lse = burst_attention(q, k, v, ring=ring, return_lse=True)
        assert (out.grad_fn is None) == (lse.grad_fn is None) == (not out.requires_grad)
        return out.grad_fn is not None, len(packed)

    assert run_ranks(body, 3, timeout=TIMEOUT) == [(saved > 0, saved)] * 3


@each_kernel
@each_direction
@each_forward_direction
def test_results_repeat_bit_for_bit(forward_direction: str, direction: str, kernel: str) -> None:
    options: dict[str, Any] = {"mask": causal(), "layout": "striped", "kernel": kernel}
    options |= {"direction": direction, "forward_direction": forward_direction}
    assert_identical(alone(4, **options), alone(4, **options))


def test_two_rings_of_threads_at_once() -> None:
    both_inside = threading.Barrier(5, timeout=TIMEOUT)

    def body(ring: Ring) -> list[Tensor]:
        both_inside.wait()
        results = train(ring, ring.size, mask=causal(), layout="zigzag")
        for _ in range(3):
            both_inside.wait()
            results = train(ring, ring.size, mask=causal(), layout="zigzag")
        return results

    with ThreadPoolExecutor(2) as pool:
        runs = {size: pool.submit(run_ranks, body, size, timeout=TIMEOUT) for size in (2, 3)}
        found = {size: run.result() for size, run in runs.items()}
    for size in (2, 3):
        assert_identical(found[size], alone(size, size, mask=causal(), layout="zigzag"))


def test_two_rings_over_the_same_processes() -> None:
    """A ring of all three processes and one of two of them: forwards and backwards take turns."""

    def body(ring: Ring) -> list[list[list[float]]]:
        pair = dist.new_group([0, 1])
        small = Ring.from_group(pair, timeout=TIMEOUT) if ring.rank < 2 else None
        assert small is None or (small.size, small.rank) == (2, ring.rank)
        _, finish_large = start(ring, FIRST)
        finish_small = start(small, SECOND)[1] if small is not None else None
        results = [finish_large()]
        if finish_small is not None:
            results.append(finish_small())
        # Plain numbers: what a process returns must not refer to its memory.
        return [[x.flatten().tolist() for x in tensors] for tensors in results]

    found = run_processes(body, 3, timeout=50, ring_timeout=TIMEOUT)
    large, small = alone(3, **FIRST), alone(2, **SECOND)
    assert [len(results) for results in found] == [2, 2, 1]
    assert [results[0] for results in found] == [[x.flatten().tolist() for x in tensors] for tensors in large]
    assert [results[1] for results in found[:2]] == [[x.flatten().tolist() for x in tensors] for tensors in small]


@each_kernel
@each_direction
@each_forward_direction
def test_strided_inputs_equal_contiguous_ones(forward_direction: str, direction: str, kernel: str) -> None:
    def strided(ring: Ring) -> list[Tensor]:
        views = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in shards(ring.rank)]
        assert not any(x.is_contiguous() for x in views)
        q, k, v, dout = views
        for x in (q, k, v):
            x.requires_grad_()
        out = burst_attention(q, k, v, ring=ring, **options)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    options: dict[str, Any] = {"mask": causal(), "layout": "zigzag", "kernel": kernel}
    options |= {"direction": direction, "forward_direction": forward_direction}
    for found, expected in zip(run_ranks(strided, 3, timeout=TIMEOUT), alone(3, **options), strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_views_of_one_fused_projection() -> None:
    """q, k and v cut from one (B, S, 3, H, D) tensor: their gradients meet in it again."""

    def fused(ring: Ring) -> list[Tensor]:
        q, k, v, dout = (x.detach() for x in shards(ring.rank, kv_heads=4))
        qkv = torch.stack([q, k, v], 2).permute(0, 3, 2, 1, 4).contiguous().requires_grad_()
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = burst_attention(q, k, v, ring=ring, mask=documents([20, 7]))
        (gradient,) = torch.autograd.grad(out, qkv, dout)
        return [out.detach(), *gradient.permute(2, 0, 3, 1, 4).unbind(0)]

    def apart(ring: Ring) -> list[Tensor]:
        q, k, v, dout = shards(ring.rank, kv_heads=4)
        out = burst_attention(q, k, v, ring=ring, mask=documents([20, 7]))
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    found, expected = run_ranks(fused, 3, timeout=TIMEOUT), run_ranks(apart, 3, timeout=TIMEOUT)
    for mine, other in zip(found, expected, strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@each_kernel
@each_direction
@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced"])
def test_dout_need_not_be_contiguous(kind: str, direction: str, kernel: str) -> None:
    def gradients(ring: Ring, strided: bool) -> list[Tensor]:
        q, k, v, dout = shards(ring.rank)
        if kind == "expanded":
            dout = torch.ones((), dtype=dout.dtype).expand(dout.shape)
        elif kind == "transposed":
            dout = dout.transpose(1, 3).contiguous().transpose(1, 3)
        else:
            dout = torch.stack([dout, dout.neg()], -1)[..., 0]
        assert not dout.is_contiguous()
        seen: list[bool] = []
        out = burst_attention(q, k, v, ring=ring, mask=causal(), direction=direction, kernel=kernel)
        out.register_hook(lambda gradient: seen.append(gradient.is_contiguous()))
        if strided and kind == "expanded":
            out.sum().backward()
        else:
            out.backward(dout if strided else dout.contiguous())
        # The hook shows that what reached the operator was strided, or was not.
        assert seen == [not strided]
        return [x.grad for x in (q, k, v) if x.grad is not None]

    found = run_ranks(lambda ring: gradients(ring, True), 3, timeout=TIMEOUT)
    expected = run_ranks(lambda ring: gradients(ring, False), 3, timeout=TIMEOUT)
    for mine, other in zip(found, expected, strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
