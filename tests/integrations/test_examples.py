"""The examples of integrations run as they are, and print what one process computes beside what the ring does."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


NO_COMPILER = "import sys, deepspeed; sys.modules['deepspeed.comm.torch'].build_shm_op = lambda: None"
"""What DeepSpeed would compile for most of a minute on a fresh machine, to speed up what is small here."""


def run(name: str, before: str = "") -> str:
    script: tuple[object, ...] = (EXAMPLES / name,)
    if before:
        script = ("-c", f"{before}; import runpy; runpy.run_path({str(script[0])!r}, run_name='__main__')")
    command = [sys.executable, "-W", "ignore", *map(str, script)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def numbers(line: str) -> list[float]:
    return [float(text) for text in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", line)]


def test_torch_context() -> None:
    losses, difference = run("torch_context.py").splitlines()
    whole, on_ring = numbers(losses)
    assert on_ring == pytest.approx(whole, rel=1e-5)
    assert numbers(difference)[0] < 1e-5


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("accelerate", "transformers"))),
    reason="accelerate or transformers is not installed",
)
def test_accelerate_trainer() -> None:
    whole, on_ring = map(numbers, run("accelerate_trainer.py").splitlines()[-2:])
    assert len(whole) == 3 and on_ring == pytest.approx(whole, rel=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    whole, on_rings = map(numbers, run("deepspeed_zero.py", NO_COMPILER).splitlines()[-2:])
    assert len(whole) == 3 and on_rings == pytest.approx(whole, rel=1e-5)


def test_one_page() -> None:
    assert numbers(run("one_page.py"))


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_train_transformers() -> None:
    for line in run("train_transformers.py").splitlines()[1:]:
        one, many, _ = numbers(line)
        assert many == pytest.approx(one, rel=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_tutorial() -> None:
    lines = run("tutorial.py").splitlines()
    many, one = numbers(next(line for line in lines if line.startswith("4.")))
    assert many == pytest.approx(one, rel=1e-5)
    assert all(numbers(line)[-1] < 1e-5 for line in lines if "difference" in line)
