"""`burst bench gpu`: kernels and whole rings on one GPU, as rows."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import activate_flash_attention_impl, list_flash_attention_impls

from burst_attention.bench import append_rows, machine
from burst_attention.bench_breakdown import breakdown_rows
from burst_attention.bench_kernels import flash_rows, mask_rows, size_rows, tile_rows
from burst_attention.bench_memory import memory_rows
from burst_attention.bench_million import million_rows
from burst_attention.bench_tax import GRID_CASES, GRID_RANKS, MAIN_CASES, OTHER_VARIANTS, VARIANTS, tax_rows

Rows = Iterator[dict[str, Any]]
PARTS: dict[str, Callable[[int], Rows]] = {
    "tax": lambda repeat: tax_rows(MAIN_CASES, repeat),
    "variants": lambda repeat: tax_rows(MAIN_CASES, repeat, OTHER_VARIANTS),
    "grid": lambda repeat: tax_rows(GRID_CASES, repeat, VARIANTS[:1], GRID_RANKS),
    "memory": memory_rows,
    "breakdown": breakdown_rows,
    "tiles": tile_rows,
    "sizes": size_rows,
    "masks": mask_rows,
    "million": million_rows,
}


def gpu(
    repeat: int, output: str | None = None, flash: str | None = None, only: str | None = None
) -> list[dict[str, Any]]:
    """Measure on the current GPU, print the rows, and append each to `output` when it is given."""
    if only not in (None, *PARTS):
        raise ValueError(f"--only takes one of {', '.join(PARTS)}, got {only!r}")
    known = list_flash_attention_impls()
    if flash not in (None, *known):
        raise ValueError(
            f"--flash takes what torch can put under its flash operator, {', '.join(known)}; got {flash!r}"
        )
    if not torch.cuda.is_available():
        raise ValueError("bench gpu needs a GPU that torch can use, and there is none here")
    about = machine() | {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, **_versions()}
    rows = []
    for row in itertools.chain(_before(repeat, flash, only), _rows(repeat, flash, only)):
        rows.append(row | about)
        print(json.dumps(row), flush=True)
        append_rows(output, rows[-1:])
    return rows


def _before(repeat: int, flash: str | None, only: str | None) -> Rows:
    """Tiles by the flash operator that torch ships, before another is put under it."""
    return flash_rows(repeat) if flash and only in (None, "tiles") else iter(())


def _rows(repeat: int, flash: str | None, only: str | None) -> Rows:
    if flash:
        try:
            activate_flash_attention_impl(flash)
        except ImportError as error:
            raise ValueError(f"--flash {flash} cannot be activated: {error}; FA4 is in burst-attention[fa4]") from None
    for part, make in PARTS.items():
        if only in (None, part):
            yield from make(repeat)


def _versions() -> dict[str, str]:
    """Of what computes beside torch, where it is installed."""
    found = {"cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
    for package in ("triton", "flash-attn-4"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
