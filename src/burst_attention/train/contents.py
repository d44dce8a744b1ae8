"""What of a training job its checkpoint holds: tensors by name, the job's own so that they load in place; the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from burst_attention.train.folders import CheckpointError


def model_tensors(model: nn.Module) -> tuple[dict[int, str], dict[str, torch.Tensor]]:
    """The names of the parameters by id, and all tensors of the model by name; tied ones under their first name."""
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    held = model.state_dict()  # Before naming the parameters: here FSDP2 puts its shards in their places.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names: dict[int, str] = {}
    tensors = {}
    for raw_name, value in held.items():
        # What torch.compile and activation checkpointing put into names comes and goes with settings.
        name = raw_name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{name} of the model is a {type(value).__name__}; checkpoints hold tensors")
        if raw_name not in parameters or id(parameters[raw_name]) not in names:
            tensors[f"model.{name}"] = value
        if raw_name in parameters:
            names.setdefault(id(parameters[raw_name]), name)
    return names, tensors


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What of the optimiser fits into JSON, and its tensors; the latter are its own, so that loading is in place.

    Not by the optimiser's `load_state_dict`, which would cast fp32 moments of bf16 parameters to bf16, and on saving
    not by torch's `get_optimizer_state_dict`, which would make a step of an optimiser that has made none.
    """
    groups: list[dict[str, Any]] = []
    states: dict[str, Any] = {}
    tensors = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        plain = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in settings.items()}
        groups.append({**plain, "params": [_name_of(parameter, names) for parameter in group["params"]]})
        for parameter in group["params"]:
            name, state = _name_of(parameter, names), optimizer.state.get(parameter)
            if state is not None:
                held = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
                tensors.update({f"optimizer.{name}.{key}": value for key, value in held.items()})
                states[name] = {key: value for key, value in state.items() if key not in held}
    return {"groups": groups, "states": states}, tensors


def _name_of(parameter: torch.Tensor, names: dict[int, str]) -> str:
    if id(parameter) not in names:
        raise CheckpointError(f"the optimiser holds a parameter {list(parameter.shape)} that the model does not")
    return names[id(parameter)]


def ready(
    optimizer: torch.optim.Optimizer, model: nn.Module, names: dict[int, str], saved: dict[str, Any], path: Path
) -> dict[str, torch.Tensor]:
    """Give the optimiser state for exactly the parameters that had it, and return its tensors, to be loaded into."""
    groups = [[_name_of(parameter, names) for parameter in group["params"]] for group in optimizer.param_groups]
    if groups != [group["params"] for group in saved["groups"]]:
        raise CheckpointError(f"{path} is of another model or optimiser: its groups of parameters differ")
    optimizer.zero_grad(set_to_none=True)
    if saved["states"] and not optimizer.state:
        get_optimizer_state_dict(model, optimizer)  # For what it does first: a step without effect makes the state.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = saved["states"].get(names[id(parameter)])
            if state is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter].update(state)
    return optimizer_state(optimizer, names)[1]


def set_groups(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        for key, value in settings.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            elif key != "params":
                group[key] = tuple(value) if isinstance(value, list) else value


def table(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" for name, value in tensors.items()}


def compare(path: Path, saved: dict[str, str], here: dict[str, str], whole: bool) -> None:
    there = {name: kind for name, kind in saved.items() if whole or name.startswith("model.")}
    wrong = [name for name in sorted(there | here) if there.get(name) != here.get(name)]
    if wrong:
        kinds = f"{there.get(wrong[0], 'absent')} there, {here.get(wrong[0], 'absent')} here"
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise CheckpointError(f"{path} is of another model or optimiser: {wrong[0]} is {kinds}{more}")


def random_kinds() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_initialized() else ["cpu"]  # type: ignore[no-untyped-call]


def random_states(rank: int, kinds: list[str]) -> dict[str, torch.Tensor]:
    """The random states of this rank, of those kinds that it has."""
    getters = {"cpu": torch.get_rng_state, "cuda": torch.cuda.get_rng_state}
    return {f"random.{kind}.{rank}": getters[kind]() for kind in random_kinds() if kind in kinds}
