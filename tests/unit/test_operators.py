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


@pytest.mark.parametrize(
    ("module", "op"),
    [(ops, ops.forward_op), (heads_ops, heads_ops.heads_forward_op), (loss, loss.forward_op)],
    ids=["attention", "heads", "loss"],
)
def test_every_operator_runs_so(module: Any, op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast would change what matrix products inside compute in."""
    seen: list[bool] = []

    def note(*given: Any) -> None:
        seen.append(torch.is_autocast_enabled("cpu"))
        raise InterruptedError

    for inner in ("run_forward", "head_statistics"):
        monkeypatch.setattr(module, inner, note, raising=False)
    monkeypatch.setattr(module, "ring_named", lambda name: None, raising=False)
    x, labels = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
    given = (x, x, None, labels, *LogitOptions()) if module is loss else (x, x, x, "", "")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InterruptedError):
        op(*given)
    assert seen == [False]
