"""Checkpoints of a training job: everything needed to go on, whole at every moment, for any number of ranks.

A checkpoint is a folder, `step-00000042`:

    state.json               step, data position and whatever else the caller gave, the optimiser's settings, a table of
                             the tensors, size and SHA-256 of every file, and a digest of itself
    tensors/*.safetensors    parameters, optimiser moments and random states, each rank's shards in files of its own

Tensors are written and read by torch.distributed.checkpoint, which reshards them, through its safetensors storage. Its
usual storage keeps its metadata as a pickle; this one needs no metadata file (offsets stand in the headers), so nothing
here is ever unpickled, and a checkpoint from elsewhere can at worst hold wrong numbers. That storage holds tensors
only: what is not a tensor stands in state.json.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.tensor import DTensor

from burst_attention.train.contents import (
    compare,
    model_tensors,
    optimizer_state,
    random_kinds,
    random_states,
    ready,
    set_groups,
    table,
)
from burst_attention.train.export import export
from burst_attention.train.folders import (
    RECORD,
    REMOVING,
    REPLACED,
    WRITING,
    CheckpointError,
    begin,
    beside,
    check_files,
    commit,
    described,
    digest_of,
    free_space,
    rank_and_size,
    read_record,
    remove,
    summed_up,
    together,
    write_record,
)
from burst_attention.train.stopping import Stopper
from burst_attention.version import __version__

__all__ = ["CheckpointError", "Stopper", "check", "export", "latest", "load", "save"]

FORMAT = 1
TENSORS = "tensors"
# While a file is written it is in memory twice, as tensors on the CPU and as bytes; one file at a time.
FILE_BYTES = 2**30
NAME = re.compile(rf"step-\d+({re.escape(REPLACED)})?")


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    keep: int = 2,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a checkpoint as `folder/step-...` and return its path; every rank of `group` calls this at the same step.

    `state` is what the caller wants back from `load` (data position, scheduler, settings), rank 0's: what JSON can
    hold. `folder` is one that all ranks see, with room for `keep` checkpoints and one more, and one job's alone. The
    checkpoint is written aside and renamed when every byte is on the disk; then all but the last `keep` are removed.
    Where any rank fails, every rank raises the same CheckpointError, and the checkpoints that existed are untouched.
    """
    if keep < 1:
        raise ValueError(f"keep {keep} must be at least 1")
    rank, size = rank_and_size(group)
    names, tensors = model_tensors(model)
    settings, moments = optimizer_state(optimizer, names)
    tensors |= moments
    json.dumps([state, settings])  # Before anything is written: what JSON cannot hold is the caller's mistake.
    final = folder / f"step-{step:08d}"
    aside = beside(final, WRITING)
    try:
        together(group, lambda rank, _: _begin(final, rank))
        _write(aside / TENSORS, tensors | random_states(rank, random_kinds()), _files(tensors, size), group)
        files = together(group, lambda rank, _: _written_by(aside, rank))
        record = {
            "format": FORMAT,
            "step": step,
            "ranks": size,
            "seed": torch.initial_seed(),
            "random": random_kinds(),
            "state": state,
            "optimizer": settings,
            "tensors": table(tensors),
            "files": {name: digest for part in files for name, digest in part.items()},
            "versions": {"burst": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }
        together(group, lambda rank, _: _publish(aside, final, record, keep) if rank == 0 else None)
    except CheckpointError as error:
        # Every rank is here, with the same error, and none writes any more.
        free = together(group, lambda rank, _: _give_up(aside) if rank == 0 else "")[0]
        raise CheckpointError(f"{final} was not saved: {error} ({free}); earlier checkpoints are untouched") from None
    return final


def latest(folder: Path, *, group: dist.ProcessGroup | None = None) -> Path | None:
    """The newest whole checkpoint in `folder`, or None where there is none yet; every rank gets the same answer.

    Names, sizes and digests of all files are checked, each rank reading its share. A damaged checkpoint is passed over
    with a warning; where only damaged ones are left, CheckpointError.
    """
    damage = []
    for name in together(group, lambda rank, _: [path.name for path in _history(folder)] if rank == 0 else [])[0]:
        try:
            check(folder / name, group=group)
        except CheckpointError as error:
            damage.append(str(error))
        else:
            for each in damage if rank_and_size(group)[0] == 0 else []:
                warnings.warn(f"{each}; {name}, saved before it, is taken", RuntimeWarning, stacklevel=2)
            return folder / name
    if damage:
        raise CheckpointError(f"no whole checkpoint is left in {folder}: {damage[0]}")
    return None


def newest_state(folder: Path) -> dict[str, Any]:
    """The `state` of the newest checkpoint that can be read, its tensors not looked at; empty where there is none."""
    readable = _readable(_history(folder))
    state: dict[str, Any] = readable[0][1]["state"] if readable else {}
    return state


def check(path: Path, *, group: dist.ProcessGroup | None = None) -> None:
    """Read the whole checkpoint, each rank its share of the files, and raise CheckpointError where it is damaged."""
    together(group, lambda rank, size: check_files(path, _record(path), rank, size))


def load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    group: dist.ProcessGroup | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Restore model, optimiser and random state in place from a checkpoint, and return its `state` with its step.

    Every rank of `group` calls this; their number and the sharding may differ from those it was saved with. On as many
    ranks the random state of each is restored; on another number each is seeded anew from the job's seed, the step and
    its rank. Damage or another model raises the same CheckpointError on every rank. `verify=False` leaves out reading
    every file for its digest, for a path that `latest` or `check` has just read. `optimizer=None` loads the model only.
    """
    rank, size = rank_and_size(group)
    record: dict[str, Any] = {}
    together(group, lambda *_: record.update(_record(path)))
    if verify:
        check(path, group=group)
    names, tensors = model_tensors(model)

    def prepare(rank: int, size: int) -> None:
        _needs_safetensors()
        if optimizer is not None:
            tensors.update(ready(optimizer, model, names, record["optimizer"], path))
        compare(path, record["tensors"], table(tensors), whole=optimizer is not None)

    together(group, prepare)
    # Also for a kind of random state that the checkpoint does not have.
    torch.manual_seed((record["seed"] + record["step"] + rank) % 2**63)
    random = random_states(rank, record["random"]) if size == record["ranks"] else {}
    try:
        with _one_line():
            load_tensors(
                tensors | random,
                storage_reader=HuggingFaceStorageReader(str(path / TENSORS)),
                process_group=group,
            )
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from None
    if optimizer is not None:
        set_groups(optimizer, record["optimizer"]["groups"])
    for name, value in random.items():
        (torch.set_rng_state if ".cpu." in name else torch.cuda.set_rng_state)(value)
    return {**record["state"], "step": record["step"]}


def _begin(final: Path, rank: int) -> None:
    _needs_safetensors()
    if rank == 0:
        for stale in final.parent.glob(f"step-*{WRITING}"):
            shutil.rmtree(stale)  # Left by a job that was killed; its room may be needed now.
        begin(final)


def _write(
    folder: Path, tensors: dict[str, torch.Tensor], files: dict[str, int], group: dist.ProcessGroup | None
) -> None:
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    with _one_line():
        # Safetensors holds contiguous tensors only.
        held = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_tensors(held, storage_writer=writer, process_group=group)


def _written_by(aside: Path, rank: int) -> dict[str, list[Any]]:
    """Size and digest of each file that this rank wrote; torch numbers the ranks' files from 1."""
    paths = sorted((aside / TENSORS).glob(f"shard-{rank + 1:05d}-*.safetensors"))
    return {f"{TENSORS}/{path.name}": digest_of(path) for path in paths}


def _publish(aside: Path, final: Path, record: dict[str, Any], keep: int) -> None:
    for name in record["files"]:
        if not (aside / name).is_file():
            raise CheckpointError(f"rank 0 does not see {aside / name}: all ranks must write to one file system")
    history = _history(final.parent)
    order = max((record["order"] for _, record in _readable(history)), default=0) + 1
    write_record(aside, {**record, "order": order})
    commit(final)
    kept = [path for path, _ in _readable(_history(final.parent)) if not path.name.endswith(REPLACED)][:keep]
    for path in [*_history(final.parent), *final.parent.glob(f"step-*{REMOVING}")]:
        if path not in kept:
            remove(path)


def _give_up(aside: Path) -> str:
    free = free_space(aside.parent)
    shutil.rmtree(aside, ignore_errors=True)
    return free


def _record(path: Path) -> dict[str, Any]:
    record = read_record(path)
    if record.get("format") != FORMAT:
        raise CheckpointError(f"{path / RECORD} has format {record.get('format')}; this version reads {FORMAT}")
    return record


def _history(folder: Path) -> list[Path]:
    """Checkpoints in the order in which they were saved, newest first; the unreadable come before all.

    Not by step: after going back to an earlier one, a job's newest checkpoint may have the smaller step.
    """
    paths = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name)]
    orders = {path: record["order"] for path, record in _readable(paths)}
    return sorted(paths, key=lambda path: (orders.get(path, float("inf")), path.name), reverse=True)


def _readable(paths: list[Path]) -> list[tuple[Path, dict[str, Any]]]:
    found = []
    for path in paths:
        try:
            found.append((path, _record(path)))
        except CheckpointError:
            continue
    return found


def _files(tensors: dict[str, torch.Tensor], size: int) -> dict[str, int]:
    """In which of a rank's files, numbered from 1, each tensor goes; random states of all ranks in the first."""
    files = {f"random.{kind}.{rank}": 1 for kind in random_kinds() for rank in range(size)}
    number, filled = 1, 0
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if filled and filled + local.nbytes > FILE_BYTES:
            number, filled = number + 1, 0
        files[name] = number
        filled += local.nbytes
    return files


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn what torch's checkpointing raises, alike on every rank, into a CheckpointError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        failures = [f"rank {rank}: {described(failure)}" for rank, (failure, _) in sorted(error.failures.items())]
        raise CheckpointError(summed_up(failures)) from None


def _needs_safetensors() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise CheckpointError("checkpoints are safetensors files; install safetensors")
