"""Calls that share a ring, a process or a tensor do not meet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from burst_attention import Ring, burst_attention, causal, run_ranks, window
from burst_attention.launch import run_processes
from tests.ring.call_variants import each_direction
from tests.ring.lone_calls import TIMEOUT, alone, assert_identical, shards, train

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
