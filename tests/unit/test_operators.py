"""Our operators run as torch's own do: on the device of their tensors, and without autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from burst_attention import heads_ops, loss, ops
from burst_attention.logits import LogitOptions
from burst_attention.operators import as_operator


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices of GPUs that are current now."""
    devices: list[torch.device] = []

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        devices.append(device)
        try:
            yield
        finally:
            devices.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    return devices


def test_the_gpu_of_the_tensors_is_the_current_one_inside(entered: list[torch.device]) -> None:
    x = cast(Tensor, SimpleNamespace(device=torch.device("cuda:3")))
    with as_operator(x):
        assert entered == [torch.device("cuda:3")]
    assert not entered


def test_on_a_cpu_no_gpu_is_asked_for(entered: list[torch.device]) -> None:
    with as_operator(torch.ones(1)):
        assert not entered


X, LABELS = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
OPERATORS: dict[str, tuple[Any, str, Any, tuple[Any, ...]]] = {
    "attention": (ops, "run_forward", ops.forward_op, (X, X, X, "", "")),
    "attention-backward": (ops, "run_backward", ops.backward_op, (X, None, X, X, X, X, X, "", "", "qkv")),
    "heads": (heads_ops, "run_forward", heads_ops.heads_forward_op, (X, X, X, "", "")),
    "heads-backward": (
        heads_ops,
        "run_backward",
        heads_ops.heads_backward_op,
        (X, None, X, X, X, X, X, [1], "", "", "qkv"),
    ),
    "loss-backward": (loss, "head_gradients", loss.backward_op, (X, X, X, None, LABELS, X, "hwb", *LogitOptions())),
    "loss": (loss, "head_statistics", loss.forward_op, (X, X, None, LABELS, *LogitOptions())),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_runs_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast would change what matrix products inside compute in; and kernels go to the GPU that is current."""
    module, inner, op, given = OPERATORS[name]
    inside: list[str] = []

    @contextlib.contextmanager
    def entered(x: torch.Tensor) -> Iterator[None]:
        inside.append("entered")
        with as_operator(x):
            yield

    def note(*given: Any) -> None:
        inside.append("autocast" if torch.is_autocast_enabled("cpu") else "no autocast")
        raise InterruptedError

    monkeypatch.setattr(module, "as_operator", entered)
    monkeypatch.setattr(module, inner, note)
    monkeypatch.setattr(module, "ring_named", lambda name: None, raising=False)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InterruptedError):
        op(*given)
    assert inside == ["entered", "no autocast"]
