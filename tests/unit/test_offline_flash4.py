"""FlashAttention-4 takes what we start it with and compiles for a Hopper chip, without one: each version has to.

What the kernels compute is for tests/gpu/test_flash4.py.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flash_attn.cute", reason="needs FlashAttention-4, the extra fa4")

from burst_attention.tiles import flash4
from tests.unit import offline_flash4
from tests.unit.test_offline_compile import disassembled, spills

ORDERED = [name for name in offline_flash4.CASES if name.startswith("triangle") and "too large" not in name]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bool], Path]:
    """By name, whether the blocks of a kernel are numbered in one direction; and where machine code is."""
    folder = tmp_path_factory.mktemp("kernels")
    command = [sys.executable, "-m", offline_flash4.__name__, str(folder)]
    root = Path(__file__).parents[2]
    made = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=300)
    assert made.returncode == 0, made.stderr[-2000:]
    rows = [json.loads(line) for line in made.stdout.splitlines() if line.startswith("{")]
    return {row["kernel"]: row["in_one_direction"] for row in rows}, folder


def test_the_installed_version_is_one_that_is_started_by_itself() -> None:
    assert flash4.installed_version() in flash4.KNOWN


def test_kernels_compile(kernels: tuple[dict[str, bool], Path]) -> None:
    """Triangles without spills: to begin their longest blocks first takes numbers that must not push others out."""
    made, folder = kernels
    assert set(made) == {*offline_flash4.CASES, "sums cast"}
    for name in made:
        most = 4 if name in ("rectangle", "triangle that is too large") else 0
        assert spills(disassembled(folder / f"{name}.cubin")) <= most, name


def test_triangles_begin_their_longest_blocks_first(kernels: tuple[dict[str, bool], Path]) -> None:
    """Where the package counts a head's bytes in 32 bits, a larger one goes head by head."""
    assert [name for name, in_one_direction in kernels[0].items() if in_one_direction] == ORDERED


def test_forward_takes_what_it_is_given() -> None:
    from flash_attn.cute import interface

    parameters = inspect.signature(interface._flash_attn_fwd).parameters
    assert list(parameters)[:3] == ["q", "k", "v"]
    assert {"softmax_scale", "causal", "return_lse"} <= set(parameters)
