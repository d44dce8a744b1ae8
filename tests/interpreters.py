"""New interpreters that tests start; imports nothing heavy, for ranks are forked from whoever imports it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of a new interpreter: this source tree, one thread a rank."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(more or {})}
