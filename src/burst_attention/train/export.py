"""A trained model as others load it: by its own `save_pretrained`, with the files of its tokenizer beside it."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from burst_attention.train.folders import (
    WRITING,
    CheckpointError,
    begin,
    beside,
    commit,
    free_space,
    sync_file,
    together,
)
from burst_attention.version import __version__

MARK = "burst_export.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "vocab.txt", "merges.txt", "tekken.json",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
"""What transformers reads a tokenizer from, by name; a folder may hold weights, code and anything else besides."""


def export(
    folder: Path,
    model: nn.Module,
    tokenizer: Path | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write the model to `folder`, for `AutoModelForCausalLM.from_pretrained`; every rank calls this.

    Rank 0 gathers the weights in its CPU memory, writes them aside, with the tokenizer's files from the folder
    `tokenizer`, and renames. An earlier export of that name is replaced; any other folder that is not empty is refused,
    never removed.
    """
    together(group, lambda rank, _: refuse_foreign(folder) if rank == 0 else None)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)
    try:
        together(group, lambda rank, _: _write(folder, model, weights, tokenizer) if rank == 0 else None)
    except CheckpointError as error:
        free = together(group, lambda rank, _: _give_up(folder) if rank == 0 else "")[0]
        raise CheckpointError(f"{folder} was not exported: {error} ({free})") from None
    return folder


def refuse_foreign(folder: Path) -> None:
    """Raise where an export would replace what is none."""
    if folder.exists() and not (folder.is_dir() and ((folder / MARK).exists() or not any(folder.iterdir()))):
        raise CheckpointError(f"{folder} exists and is no earlier export; choose another folder")


def _write(folder: Path, model: nn.Module, weights: dict[str, Any], tokenizer: Path | None) -> None:
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    save_pretrained: Any = getattr(model, "save_pretrained", None)
    if save_pretrained is None:
        raise CheckpointError(
            f"a {type(model).__name__} has no save_pretrained; only transformers' models are exported"
        )
    aside = begin(folder)
    save_pretrained(aside, state_dict=weights)
    for path in tokenizer_files(tokenizer) if tokenizer else ():
        shutil.copyfile(path, aside / path.name)
    (aside / MARK).write_text(json.dumps({"burst": __version__, "torch": torch.__version__}) + "\n")
    for path in aside.iterdir():
        # safetensors makes files that their owner alone may read.
        path.chmod((aside / MARK).stat().st_mode)
        sync_file(path)
    commit(folder)


def tokenizer_files(folder: Path) -> list[Path]:
    """A tokenizer's own files in a folder, and none that lies elsewhere: an export may be given to others."""
    home = folder.resolve(strict=True)
    # The hub's cache keeps what a snapshot's links lead to beside the snapshots.
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    inside = [path for path in files if any(path.resolve().is_relative_to(home) for home in homes)]
    for path in files:
        if path not in inside:
            warnings.warn(f"{path} leads out of its folder, so it is not exported with the model", stacklevel=2)
    return inside


def _give_up(folder: Path) -> str:
    free = free_space(folder.parent)
    shutil.rmtree(beside(folder, WRITING), ignore_errors=True)
    return free
