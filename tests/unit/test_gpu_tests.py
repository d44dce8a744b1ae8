"""Tests of tests/gpu, as they are, on the GPU that is not there: what they ask of the library is still there."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("triton")
from tests.interpreters import environment

ROOT = Path(__file__).parents[2]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("name", "chosen", "fewest"),
    [
        ("lanes_on_cuda", "not 16", 12),
        ("steady_state", "", 14),
        ("flash4", "", 87),
        ("threads_on_cuda", "", 72),
        ("exactness_on_cuda", "cover and (0 or 5)", 4),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_they_pass_where_there_is_no_gpu(name: str, chosen: str, fewest: int) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "tests.pretended_cuda", f"tests/gpu/test_{name}.py", "-k", chosen]
    ran = run(command)
    if ran.returncode < 0:
        # A signal (SIGSEGV) ended one of some 25 runs of lanes_on_cuda; why is not known. What fails runs once.
        warnings.warn(f"{name}: signal {-ran.returncode}\n{ran.stderr[:4000]}", stacklevel=1)
        ran = run(command)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[:4000]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed and int(passed[1]) >= fewest and "skipped" not in ran.stdout, ran.stdout[-2000:]
