"""Only training saves tensors, and checkpoints recompute attention or keep it, as they are told."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from burst_attention import Ring, burst_attention, causal, run_ranks
from burst_attention.tiles.cpu_flash import CpuFlashKernel
from burst_attention.tiles.plain import PlainKernel
from tests.ring.call_variants import each_direction
from tests.ring.lone_calls import TIMEOUT, alone, assert_identical, shards

ATTENTION = torch.ops.burst_attention.forward.default


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
