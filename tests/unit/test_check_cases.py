"""What `burst check` runs, and what it says that ranks will send."""

from __future__ import annotations

import pytest
import torch

from burst_attention import parse_mask
from burst_attention.check import STEADY_HEAD_DIM, Case, make_cases, predicted_bytes
from burst_attention.exactness import Problem, Sharding
from burst_attention.tiles import has_triton


def test_a_gpu_has_cases_for_its_vendors_kernels_and_every_dtype() -> None:
    """Those of a CPU go to our own kernels alone: shards are short and heads narrow."""
    from burst_attention.tiles.policy import STEADY_MULTIPLE, STEADY_ROWS

    on_cpu, on_gpu = (make_cases(3, None, None, None, None, device) for device in ("cpu", "cuda"))
    assert len({case.name + case.directions for case in on_gpu}) == len(on_gpu), "names tell cases apart"
    assert {case.problem.dtype for case in on_cpu} == {torch.float32, torch.bfloat16}
    assert {case.problem.dtype for case in on_gpu} == {torch.float32, torch.bfloat16, torch.float16}
    steady = [case for case in on_gpu if case.problem.head_dim == STEADY_HEAD_DIM]
    assert {(case.problem.mask, case.problem.kv_heads) for case in steady} == {
        ("full()", 8), ("full()", 2), ("causal()", 8), ("causal()", 2),
    }  # fmt: skip
    for case in steady:
        half = case.problem.tokens // (2 * case.sharding.ring_size)
        assert half >= STEADY_ROWS and half % STEADY_MULTIPLE == 0, "halves of a zigzag shard are pieces"
    assert not [case for case in on_cpu if case.problem.head_dim == STEADY_HEAD_DIM]


def test_a_mask_alone_has_steady_cases_too() -> None:
    cases = make_cases(2, None, "causal()", None, "kv", "cuda")
    assert {case.problem.tokens for case in cases} == {1000, 4096}


def test_a_mask_or_a_length_is_that_of_every_case() -> None:
    """Documents of 1000 tokens say nothing of others."""
    for tokens, mask in ((777, None), (777, "documents([700, 77])"), (None, "documents([700, 300])")):
        cases = make_cases(2, tokens, mask, None, "kv", "cuda")
        assert {case.problem.tokens for case in cases} == {tokens or 1000}
        assert mask is None or {case.problem.mask for case in cases} == {mask}
        for case in cases:
            parse_mask(case.problem.mask).require_cover(case.problem.tokens, case.problem.tokens)


@pytest.mark.skipif(not has_triton(), reason="a plan for GPUs needs triton")
def test_bytes_are_predicted_for_the_device_that_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs of one host gradients of keys go straight home in bf16, where CPUs send sums in fp32."""
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    case = Case(Problem(8192, "full()", 8, 8, 32, torch.bfloat16), Sharding(2, "zigzag", "kv", "kv"))
    keys = 8192 * 8 * 32 * 2
    # k and v in two forwards and in backward, and their gradients, in twice as many bytes or in as many.
    assert predicted_bytes(case, "cpu") == (3 * 2 + 2 * 2) * keys
    assert predicted_bytes(case, "cuda") == (3 * 2 + 2) * keys
