"""Ranks and what they share: a mesh with axes dp, cp and tp, weights sharded over dp and cp by FSDP2, heads over tp.

Who sums gradients: a rank's loss is its own tokens' part of the mean over all, so the gradient of the mean is the *sum*
over dp and cp. FSDP2 reduces gradients over exactly these ranks, and divides by their number; `loss_scale` undoes that.
Nothing else sums them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from burst_attention.ring import Ring
from burst_attention.train.config import TrainConfig
from burst_attention.train.model import TrainedModel

Result = TypeVar("Result")
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")
HEAD_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True)
class Ranks:
    """This rank's place among all."""

    mesh: DeviceMesh
    device: torch.device

    @property
    def dp(self) -> int:
        return int(self.mesh["dp"].get_local_rank())

    @property
    def cp(self) -> int:
        return int(self.mesh["cp"].get_local_rank())

    @property
    def loss_scale(self) -> int:
        """Ranks over which FSDP2 averages what is to be summed."""
        return int(self.mesh["dp"].size() * self.mesh["cp"].size())

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == 0

    def sum(self, value: Tensor) -> Tensor:
        """A number summed over dp and cp; ranks of tp have the same."""
        total = value.detach().double().to(self.device)
        dist.all_reduce(total)
        return total / self.mesh["tp"].size()


def agreed(act: Callable[[], Result]) -> Result:
    """What `act` gives; a ValueError on any rank, a file that its host has not, is the same ValueError on all."""
    fault: str | None = None
    try:
        result = act()
    except ValueError as error:
        fault = str(error)
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    if any(faults):
        rank, said = next((rank, said) for rank, said in enumerate(faults) if said)
        raise ValueError(said if len(set(faults)) == 1 else f"rank {rank}: {said}")
    return result


def make_ranks(config: TrainConfig, device: torch.device) -> Ranks:
    """The mesh of a run; ranks of one sequence are neighbours, and those of tp are nearest."""
    mesh = init_device_mesh(device.type, (config.dp, config.cp, config.tp), mesh_dim_names=("dp", "cp", "tp"))
    return Ranks(mesh, device)


def make_ring(ranks: Ranks, config: TrainConfig) -> Ring:
    """The ring of this rank's sequence; it finds out by itself which ranks share a host, unless that is told."""
    group = ranks.mesh["cp"].get_group()
    ring = Ring.from_group(group, timeout=config.timeout, trace=True)
    if config.hosts:
        per_host = config.ranks // config.hosts
        ring.hosts = tuple(str(rank // per_host) for rank in dist.get_process_group_ranks(group))
    return ring


def shard_model(model: TrainedModel, ranks: Ranks, config: TrainConfig) -> None:
    """Heads and features over tp, then every layer's weights over dp and cp; the root holds the embeddings."""
    if config.tp > 1:
        split_features(model, ranks.mesh["tp"], config)
    if config.compile:
        for layer in model.layers:
            layer.compile()
    policy = MixedPrecisionPolicy()
    if config.dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # A flat mesh of both axes has no public maker.
    flat = ranks.mesh["dp", "cp"]._flatten("dp_cp")
    for layer in model.layers:
        fully_shard(layer, mesh=flat, mp_policy=policy)
    fully_shard(model, mesh=flat, mp_policy=policy)


def split_features(model: TrainedModel, mesh: DeviceMesh, config: TrainConfig) -> None:
    """Tensor parallelism by torch's own styles, for layers whose projections have the usual names."""
    inner = model.model.config
    heads, kv_heads = inner.num_attention_heads, getattr(inner, "num_key_value_heads", inner.num_attention_heads)
    if heads % config.tp or kv_heads % config.tp:
        raise ValueError(f"tp {config.tp} must divide the model's {heads} heads and {kv_heads} key heads")
    head_dim = getattr(inner, "head_dim", None) or inner.hidden_size // heads
    for layer in model.layers:
        styles = _styles(layer, head_dim)
        if {name.rpartition(".")[2] for name in styles} - {*HEAD_NORMS} != {*COLUMNS, *ROWS}:
            raise ValueError(
                f"tp knows layers with {', '.join((*COLUMNS, *ROWS))}; {type(model.model).__name__} has others: "
                "use --tp 1"
            )
        _refuse_unknown(layer, styles)
        parallelize_module(layer, mesh, styles)


def _styles(layer: nn.Module, head_dim: int) -> dict[str, Any]:
    """How each part of a layer is split, by its name in the layer."""
    styles: dict[str, Any] = {}
    for name, module in layer.named_modules():
        last = name.rpartition(".")[2]
        if last in COLUMNS:
            styles[name] = ColwiseParallel()
        elif last in ROWS:
            styles[name] = RowwiseParallel()
        elif last in HEAD_NORMS and [tuple(p.shape) for p in module.parameters()] == [(head_dim,)]:
            # Every rank norms its own heads with the same weight, whose gradient is the sum over ranks. This style
            # tells DTensor so; which dimension holds the heads makes no difference to it.
            styles[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return styles


def _refuse_unknown(layer: nn.Module, styles: dict[str, Any]) -> None:
    """What else has weights beside split projections would see some of the features only, and nothing would tell."""
    split = {name.rpartition(".")[0] for name in styles}
    for name, _ in layer.named_parameters():
        module = name.rpartition(".")[0]
        if module not in styles and any(f"{module}.".startswith(f"{parent}.") for parent in split):
            raise ValueError(f"tp does not know how to split {name} of {type(layer).__name__}: use --tp 1")


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale all gradients so that the norm of all of them together is at most `limit`; gives the norm before.

    Weights of one model may lie on different meshes (tp, or not), which torch's own function does not take together.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    squares: dict[Any, Tensor] = {}
    for gradient in gradients:
        where = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        square = torch.linalg.vector_norm(local, dtype=torch.float32).double().square()
        squares[where] = squares[where] + square if where in squares else square
    for where, square in squares.items():
        if where is not None:
            mesh, placements = where
            for dim in (dim for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)):
                dist.all_reduce(square, group=mesh.get_group(dim))
    norm = torch.stack(list(squares.values())).sum().sqrt()
    if limit > 0:
        scale = torch.clamp(limit / (norm + 1e-6), max=1.0).float()
        for gradient in gradients:
            gradient.mul_(scale)
    return norm
