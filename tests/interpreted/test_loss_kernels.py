"""The Triton passes over logits against their twins in plain torch, on the CPU by Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from burst_attention.logits import LogitOptions
from burst_attention.logits.rows import plain_gradient, plain_statistics
from burst_attention.loss import forward_op

if os.environ.get("TRITON_INTERPRET") != "1":
    # The variable must be set before triton is imported, so these tests have a process of their own.
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

pytest.importorskip("triton")
from burst_attention.logits import fused
from burst_attention.logits.fused import fused_gradient, fused_statistics

OPTIONS = {
    "plain": LogitOptions(),
    "mean": LogitOptions(wants_mean=True),
    "entropy": LogitOptions(wants_entropy=True),
    "softcap": LogitOptions(softcap=3.0),
    "everything": LogitOptions(softcap=3.0, temperature=0.7, wants_mean=True, wants_entropy=True),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in a row of a small vocabulary."""
    monkeypatch.setattr(fused, "BLOCK", 64)


def chunk() -> tuple[torch.Tensor, torch.Tensor]:
    """(R, V) logits as a part of a larger buffer, with tokens that cannot be chosen and a peak in the last block."""
    torch.manual_seed(0)
    logits = (torch.randn(11, 333) * 4)[:9]
    logits[:, 130:195] = -torch.inf
    logits[4, 332] = 20.0
    labels = torch.randint(0, 130, (9,))
    labels[4] = 332
    return logits, labels


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_statistics_and_gradients_equal_their_twins(options: LogitOptions) -> None:
    logits, labels = chunk()
    if options.wants_mean:
        logits = logits.nan_to_num(neginf=-9.0)
    found, expected = torch.zeros(4, 20)[:, 5:14], torch.zeros(4, 9)
    fused_statistics(logits, labels, options, found)
    plain_statistics(logits.clone(), labels, options, expected)
    torch.testing.assert_close(found, expected, atol=4e-6, rtol=1e-6)
    # A gradient that is a view with strides, as a loss over one statistic has it.
    dstatistics = torch.randn(9, 4).T
    dstatistics = dstatistics * torch.tensor([1, 1, options.wants_mean, options.wants_entropy])[:, None]
    right = logits.clone()
    plain_gradient(right, labels, expected, dstatistics, options, right)
    half = torch.empty(logits.shape, dtype=torch.float16)
    for out, tolerance in ((half, 2e-3), (logits, 4e-6)):
        fused_gradient(logits, labels, found, dstatistics, options, out)
        torch.testing.assert_close(out.float(), right, atol=tolerance, rtol=tolerance)


def test_the_whole_operator_on_them() -> None:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(21, 5), torch.randn(101, 5), torch.randn(101)
    labels = torch.randint(0, 101, (21,))
    options = OPTIONS["everything"]._replace(chunk=8)
    results = []
    for backend in ("torch", "triton"):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        found = forward_op(*leaves, labels, *options._replace(backend=backend))
        torch.manual_seed(1)
        results.append((found, *torch.autograd.grad(found, leaves, torch.randn(found.shape))))
    torch.testing.assert_close(*results, atol=2e-5, rtol=1e-5)
