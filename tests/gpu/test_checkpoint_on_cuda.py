"""On a GPU a job resumes to the last bit too: its tensors, its random state, and the optimiser's counters there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from burst_attention.train.checkpoint import load, save

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(9, 7), nn.Dropout(0.5), nn.Linear(7, 3)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1, device="cuda"), fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(3):
        loss = model(torch.ones(4, 9, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_job_on_a_gpu_resumes_to_the_last_bit(tmp_path: Path) -> None:
    model, optimizer = made(1)
    train(model, optimizer)
    path = save(tmp_path, 3, model, optimizer, {})
    losses = train(model, optimizer)
    other, restored = made(2)
    load(path, other, restored)
    assert {value.device.type for state in restored.state.values() for value in state.values()} == {"cuda"}
    assert train(other, restored) == losses
