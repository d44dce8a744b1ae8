"""A training job small enough to be saved, killed and resumed many times: two layers, AdamW, a scheduler, noise."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from burst_attention import Ring
from burst_attention.launch import run_processes
from burst_attention.train.checkpoint import load, save

# FSDP2 and safetensors import these at their first use: once here is cheaper than in every forked rank.
for _module in ("torch._dynamo", "safetensors.torch"):
    importlib.import_module(_module)

ROWS = 12


class Tied(nn.Module):
    """Sizes that no number of ranks divides, fewer rows than ranks, a tied weight, a frozen one and an unused one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(5, width)
        self.narrow = nn.Linear(width, 2)
        self.back = nn.Linear(2, width)
        self.tied = nn.Linear(5, width, bias=False)
        self.tied.weight = self.inner.weight
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.back(torch.tanh(self.narrow(torch.tanh(self.inner(x)))))
        return (hidden * self.frozen + self.tied(x)) * self.scale


class Job:
    """`kind` is plain (replicated), fsdp, or fsdp+tp on a mesh of 2 by 2."""

    def __init__(self, kind: str = "plain", width: int = 7, seed: int = 1) -> None:
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        torch.manual_seed(seed)
        self.kind = kind
        self.model: nn.Module = Tied(width).double()
        if kind == "fsdp":
            fully_shard(self.model.narrow)
            # What stays gathered after forward must still be saved as shards.
            fully_shard(self.model, reshard_after_forward=False)
        if kind == "fsdp+tp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(self.model.back, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
            fully_shard(self.model, mesh=mesh["dp"])
        # Ranks of one tensor-parallel pair take the same rows.
        self.share, self.shares = (self.rank // 2, 2) if kind == "fsdp+tp" else (self.rank, self.size)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [{"params": trained[:2], "lr": 0.02}, {"params": trained[2:]}], lr=0.01, betas=(0.8, 0.95)
        )
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.step = 0
        torch.manual_seed(100 + self.rank)

    def train(self, steps: int) -> list[float]:
        """Losses over all rows; every rank takes its share of them."""
        losses = []
        for _ in range(steps):
            data = torch.randn(ROWS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(self.step))
            mine = data[self.share :: self.shares]
            loss = (self.model(mine) - 1).square().sum() / ROWS
            (loss * self.shares).backward()
            if self.kind == "plain" and self.size > 1:
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad)
                        parameter.grad /= self.size
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            total = loss.detach().clone()
            if self.size > 1:
                dist.all_reduce(total)
            losses.append(total.item() * self.shares / self.size)
            self.step += 1
            torch.rand(3)
        return losses

    def evaluate(self) -> None:
        """A forward without a backward, which leaves parameters gathered under FSDP2."""
        with torch.no_grad():
            self.model(torch.ones(1, 5, dtype=torch.float64))

    def save(self, folder: Path, **options: Any) -> Path:
        state = {"scheduler": self.scheduler.state_dict(), "data": {"position": self.step * ROWS}}
        return save(folder, self.step, self.model, self.optimizer, state, **options)

    def load(self, path: Path) -> Job:
        state = load(path, self.model, self.optimizer)
        self.step = state["step"]
        assert state["data"] == {"position": self.step * ROWS}
        self.scheduler.load_state_dict(state["scheduler"])
        return self

    def contents(self, noise: bool = True) -> dict[str, Any]:
        """Everything that decides how training goes on, whole: parameters, moments, settings, random state."""
        found: dict[str, Any] = {f"model.{name}": whole(value) for name, value in self.model.state_dict().items()}
        for number, parameter in enumerate(self.optimizer.param_groups[0]["params"]):
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{number}.{key}"] = whole(value)
        found["states"] = len(self.optimizer.state)
        found["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        if noise:
            found["random"] = torch.get_rng_state()
        return found


def whole(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Names under which two contents are not the same to the last bit."""
    assert left.keys() == right.keys()
    same = {
        name: torch.equal(value, right[name]) if isinstance(value, torch.Tensor) else value == right[name]
        for name, value in left.items()
    }
    return [name for name, equal in same.items() if not equal]


def saved(folder: Path, steps: int = 1, ranks: int = 2, kind: str = "plain", more: int = 0) -> list[list[float]]:
    """Save a job after `steps`; the losses of `more` steps that follow, by rank."""

    def body(ring: Ring) -> list[float]:
        job = Job(kind)
        job.train(steps)
        job.save(folder)
        return job.train(more)

    return run_processes(body, ranks)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
