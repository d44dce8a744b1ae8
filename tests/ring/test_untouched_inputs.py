"""A call leaves its inputs as they were and gives the same bits when it is repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention import Mask, Ring, burst_attention, causal, full, run_ranks, window
from tests.ring.call_variants import each_direction, each_forward_direction, each_kernel
from tests.ring.lone_calls import TIMEOUT, alone, assert_identical, shards


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


@each_kernel
@each_direction
@each_forward_direction
def test_results_repeat_bit_for_bit(forward_direction: str, direction: str, kernel: str) -> None:
    options: dict[str, Any] = {"mask": causal(), "layout": "striped", "kernel": kernel}
    options |= {"direction": direction, "forward_direction": forward_direction}
    assert_identical(alone(4, **options), alone(4, **options))
