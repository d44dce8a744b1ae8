"""The settings of a training run: one frozen value, from a TOML file, from the command line, or from both."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from burst_attention.layout import LAYOUT_NAMES

MASKS = ("causal", "documents", "window", "documents-window")
DTYPES = ("float32", "bfloat16")
CHECKPOINTING = ("none", "full", "selective")
CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run's."""
LIST = "list"
"""In place of a model: print the families that there are."""


KEPT_ON_RESUME = (
    "model", "model_config", "data", "text_key", "tokenizer", "tokens", "steps", "lr", "warmup", "weight_decay", "clip",
    "seed", "dtype", "mask", "window", "accumulate", "save_every", "keep",
)  # fmt: skip
"""Settings that a resumed run has from its checkpoint unless they are given."""


def _setting(
    default: Any, help: str, choices: tuple[str, ...] = (), least: float | None = None, most: float = math.inf
) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "least": least, "most": most})


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of `burst train`; the command line's names are these, with - for _."""

    model: str = _setting(
        "llama", "a family made from a config (llama, qwen3, ...), a folder, a hub id; list: all families"
    )
    model_config: str = _setting("", "settings of such a config as JSON, or the path of a JSON file")
    data: str = _setting("stdlib", "a text file, a folder, JSON lines, a datasets folder; stdlib: Python's own source")
    text_key: str = _setting("text", "the key of a document's text in JSON lines")
    tokenizer: str = _setting("bytes", "bytes, a folder with a tokenizer.json, or a hub id")
    tokens: int = _setting(8192, "tokens of one whole sequence", least=2)
    steps: int = _setting(30, "optimiser steps", least=1)
    accumulate: int = _setting(1, "sequences of each data-parallel rank in a step", least=1)
    lr: float = _setting(1e-3, "peak learning rate", least=0)
    warmup: int = _setting(5, "steps until the peak", least=0)
    weight_decay: float = _setting(0.1, "AdamW's weight decay, on matrices", least=0)
    clip: float = _setting(1.0, "largest norm of all gradients", least=0)
    seed: int = _setting(0, "of weights and of the order of documents", least=-(2**63), most=2**63 - 1)
    dtype: str = _setting("float32", "dtype of compute; weights and sums stay in float32", choices=DTYPES)
    cp: int = _setting(0, "ranks that share a sequence; 0: all that dp and tp leave", least=0)
    dp: int = _setting(1, "ranks, or groups of them, with sequences of their own", least=1)
    tp: int = _setting(1, "ranks that share heads and hidden features", least=1)
    hosts: int = _setting(0, "hosts that the ranks are on, as many on each, host by host; 0: found out", least=0)
    layout: str = _setting("zigzag", "how a sequence is spread over cp", choices=LAYOUT_NAMES)
    mask: str = _setting(
        "documents", "what a token sees before it: all, its document, a window, or both of these", choices=MASKS
    )
    window: int = _setting(1024, "tokens that a window looks back over", least=1)
    heads: int = _setting(1, "neighbouring cp ranks that exchange heads before the ring", least=1)
    checkpointing: str = _setting(
        "none", "what layers recompute: nothing, all, all but attention", choices=CHECKPOINTING
    )
    keep_last: float = _setting(1.0, "fraction of the sequence whose attention selective keeps; the rest is recomputed")
    offload: bool = _setting(False, "keep what layers save for backward in host memory")
    mlp_chunks: int = _setting(1, "parts of its tokens that a layer's MLP is computed in", least=1)
    deterministic: bool = _setting(False, "on a GPU, the same bits in every run; slower. On CPUs they are in any case")
    compile: bool = _setting(False, "torch.compile every layer; attention stays as it is")
    out: str = _setting("runs/latest", "folder of the run: log, curves, checkpoints, summary")
    save_every: int = _setting(20, "steps between checkpoints; 0: only at the end", least=0)
    keep: int = _setting(2, "checkpoints that are kept", least=1)
    resume: bool = _setting(False, "go on from the newest whole checkpoint in --out, with the settings it had")
    compare: bool = _setting(False, "also train unsharded, on the same data, and draw both curves")
    device: str = _setting("auto", "cuda: one rank per GPU; cpu: gloo", choices=("auto", "cpu", "cuda"))
    timeout: float = _setting(600.0, "seconds until a silent rank is given up", least=1, most=1e8)
    tensorboard: bool = _setting(False, "also write TensorBoard's files")
    wandb: bool = _setting(False, "also log to Weights & Biases")

    def __post_init__(self) -> None:
        for each in fields(self):
            value, rules = getattr(self, each.name), each.metadata
            wanted = type(each.default)
            if wanted is float and isinstance(value, int) and not isinstance(value, bool):
                # A whole number that no float holds is none either.
                value = float(value) if abs(value) < 1e300 else math.inf
                object.__setattr__(self, each.name, value)
            elif type(value) is not wanted:
                raise ValueError(f"{each.name} must be {_kind(wanted)}, got {value!r}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{each.name} must be a finite number, got {value!r}")
            if rules["choices"] and value not in rules["choices"]:
                raise ValueError(f"{each.name} must be one of {', '.join(rules['choices'])}, got {value!r}")
            if rules["least"] is not None and value < rules["least"]:
                raise ValueError(f"{each.name} must be at least {rules['least']:g}, got {value!r}")
            if isinstance(value, int | float) and value > rules["most"]:
                raise ValueError(f"{each.name} must be at most {rules['most']:g}, got {value!r}")

    @property
    def ranks(self) -> int:
        """All ranks of the run; 0 while cp is to be found."""
        return self.dp * self.cp * self.tp

    def on(self, ranks: int) -> TrainConfig:
        """The settings with cp filled in for so many ranks; ValueError where they do not fit."""
        others = self.dp * self.tp
        cp = self.cp or max(ranks // others, 1)
        if others * cp != ranks:
            raise ValueError(
                f"dp {self.dp} x cp {cp} x tp {self.tp} = {others * cp} ranks, but {ranks} are there; "
                "change --dp, --cp or --tp"
            )
        if self.tokens < cp:
            raise ValueError(f"{self.tokens} tokens cannot be spread over {cp} ranks; give --tokens at least {cp}")
        if self.hosts:
            self._require_even_hosts(ranks, cp * self.tp)
        if cp % self.heads:
            raise ValueError(f"heads {self.heads} must divide the {cp} ranks that share a sequence")
        return replace(self, cp=cp)

    def _require_even_hosts(self, ranks: int, together: int) -> None:
        """Every host must have as many of the ranks that share a sequence, or all of them."""
        per_host = ranks / self.hosts
        if not per_host.is_integer():
            raise ValueError(f"{ranks} ranks cannot be spread evenly over {self.hosts} hosts")
        if per_host % together and (together % per_host or per_host % self.tp):
            raise ValueError(
                f"cp x tp = {together} ranks share a sequence, and {self.hosts} hosts have {per_host:g} ranks each; "
                "choose cp so that they fill hosts, or a host holds several such groups"
            )


def _kind(wanted: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[wanted]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option per setting; none has a default here, so that only what was given replaces the file's."""
    parser.add_argument("--config", metavar="FILE", help="settings as TOML; the command line wins")
    for each in fields(TrainConfig):
        name, rules = f"--{each.name.replace('_', '-')}", each.metadata
        shown = f"{rules['help']} (default {each.default})" if each.default not in ("", False) else rules["help"]
        shown = shown.replace("%", "%%")
        if isinstance(each.default, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=None, help=shown)
        else:
            parser.add_argument(name, type=type(each.default), choices=rules["choices"] or None, help=shown)


def read_config(args: argparse.Namespace) -> TrainConfig:
    """The settings of a command line, over those of its file, over those of the run that it resumes."""
    names = [each.name for each in fields(TrainConfig)]
    given = read_file(Path(args.config), names) if args.config else {}
    given |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    config = TrainConfig(**given)
    if config.resume:
        config = TrainConfig(**{**_kept(Path(config.out)), **given})
    config = replace(config, model_config=_content(config.model_config))
    if "window" in given and "window" not in config.mask:
        raise ValueError(f"window {config.window} needs a mask with a window, and mask is {config.mask}")
    if "keep_last" in given and config.checkpointing != "selective":
        raise ValueError(f"keep_last needs checkpointing selective, which is {config.checkpointing}")
    return config


def _content(text: str) -> str:
    """A model's settings themselves where a file with them was named: a resumed run must find them as they were."""
    if not text or text.lstrip().startswith("{") or not os.path.isfile(text):
        return text
    try:
        return json.dumps(json.loads(Path(text).read_text()))
    except (OSError, ValueError):
        return text  # What is wrong with it is told where the model is made.


def _kept(folder: Path) -> dict[str, Any]:
    """What a run's folder says of the settings that a resumed one keeps."""
    from burst_attention.train.checkpoint import newest_state

    before = newest_state(folder / CHECKPOINTS).get("settings", {})
    return {name: before[name] for name in KEPT_ON_RESUME if name in before}


def read_file(path: Path, names: list[str]) -> dict[str, Any]:
    """A TOML file's settings; a name that is not one is told with the nearest that is."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"cannot read the settings in {path}: {error}") from None
    for name in found:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            raise ValueError(f"{path}: there is no setting {name!r}" + (f"; is {near[0]!r} meant?" if near else ""))
    return found
