"""The chunked LM head on a GPU: both backends against fp64, beside plain torch's error there, and flat memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention import linear_cross_entropy, linear_log_probs
from tests.unit.test_loss import OPTIONS, plain_log_probs, plain_losses, problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def on_gpu(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    *leaves, labels = problem(dtype, tokens=111, width=64, vocabulary=9001)
    return [x.detach().cuda().requires_grad_() for x in leaves], labels.cuda()


def require_close(found: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> None:
    """At most twice plain torch's rms error, and 2 ulp of the result's size."""
    for index, (ours, theirs, right) in enumerate(zip(found, plain, exact, strict=True)):
        error, other = (float((x.double() - right).square().mean().sqrt()) for x in (ours, theirs))
        limit = 2 * other + 2 * torch.finfo(ours.dtype).eps * float(right.square().mean().sqrt())
        assert error <= limit, f"result {index}: {error} where {limit} is allowed"


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_losses_and_gradients(dtype: torch.dtype, options: dict[str, Any], backend: str) -> None:
    leaves, labels = on_gpu(dtype)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    incoming = torch.rand(labels.shape, device="cuda")

    def results(inputs: list[Tensor], losses: Tensor) -> list[Tensor]:
        return [losses.detach(), *torch.autograd.grad(losses, inputs, incoming.to(losses.dtype))]

    hidden, weight, bias = leaves
    ours = linear_cross_entropy(
        hidden, weight, labels, bias=bias, chunk=50, reduction="none", backend=backend, **options
    )
    plain, exact = (plain_losses(*x, labels, **options) for x in (leaves, wide))
    require_close(results(leaves, ours), results(leaves, plain), results(wide, exact))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_log_probs_and_entropies(dtype: torch.dtype, backend: str) -> None:
    leaves, labels = on_gpu(dtype)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    incoming = torch.randn((2, *labels.shape), device="cuda")

    def results(inputs: list[Tensor], both: Any) -> list[Tensor]:
        gradients = torch.autograd.grad(both, inputs, [x.to(both[0].dtype) for x in incoming])
        return [*(x.detach() for x in both), *gradients]

    hidden, weight, bias = leaves
    ours = linear_log_probs(
        hidden, weight, labels, bias=bias, temperature=0.7, return_entropy=True, chunk=50, backend=backend
    )
    plain, exact = (plain_log_probs(*x, labels, 0.7, None) for x in (leaves, wide))
    require_close(results(leaves, ours), results(leaves, plain), results(wide, exact))


def test_memory_beyond_the_hidden_gradient_is_flat() -> None:
    peaks = []
    weight = torch.randn(32768, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for tokens in (8192, 65536):
        hidden = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(0, 32768, (tokens,), device="cuda")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, chunk=1024), (hidden, weight))
        peaks.append(torch.cuda.max_memory_allocated() - before - gradients[0].nbytes)
        del gradients
    assert peaks[1] - peaks[0] < 100 * (65536 - 8192), peaks


def test_a_compiled_loss_is_the_same() -> None:
    (hidden, weight, bias), labels = on_gpu(torch.bfloat16)
    right = linear_cross_entropy(hidden, weight, labels, bias=bias)
    found = torch.compile(linear_cross_entropy, fullgraph=True)(hidden, weight, labels, bias=bias)
    torch.testing.assert_close(found, right)
