"""`burst train` as a user runs it, in a process group of its own that can be signalled, killed and looked at.

A real start imports torch and transformers in every rank, which takes seconds. `Command` forks this process instead,
which has them already, and lets the command fork its ranks; everything else is the command's own. `real` is the slow
way, for what only it can show.
"""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from burst_attention.cli import main
from burst_attention.launch import _let_threads_end
from burst_attention.train import processes
from tests.interpreters import environment

# Once here is cheaper than in every forked rank.
for _module in (
    "transformers.models.llama.modeling_llama",
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
    "safetensors.torch",
    "burst_attention.train.loop",
):
    importlib.import_module(_module)

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
SECONDS = 120.0
"""No test waits longer for a command; on a busy machine a start alone may take half a minute."""


def arguments(out: Path, **settings: Any) -> list[str]:
    """A command line for a model that trains in moments; settings replace its own, and True is an option alone."""
    data = out.parent / "data.jsonl"
    if not data.exists():
        documents = [f"{number} is {number * number} squared. " * (number % 7 + 1) for number in range(40)]
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    given = {
        "model_config": json.dumps(TINY), "data": data, "tokens": 128, "steps": 4, "lr": 3e-3, "device": "cpu",
        "timeout": 60, "out": out, **settings,
    }  # fmt: skip
    words = ["train"]
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        words += [option] if value is True else [option, str(value)]
    return words


class Command:
    """A `burst` command under way; `with` leaves none of its processes behind."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.files = [folder / name for name in ("stdout", "stderr")]
        _let_threads_end()
        self.process: Any = multiprocessing.get_context("fork").Process(target=self._run, args=(words,))
        self.process.start()

    def _run(self, words: list[str]) -> None:
        os.setsid()
        os.environ["OMP_NUM_THREADS"] = "1"
        processes.START_METHOD = "fork"
        for number, path in enumerate(self.files, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        # torch's loggers know the stderr of before, and pytest keeps warnings for itself.
        for logger in [logging.getLogger(name) for name in logging.root.manager.loggerDict if "torch" in name]:
            for handler in logger.handlers:
                if type(handler) is logging.StreamHandler:  # not one of pytest's own
                    handler.setStream(sys.stderr)
        warnings.resetwarnings()
        warnings.showwarning = lambda *warning: sys.stderr.write(warnings.formatwarning(*warning[:4]))
        try:
            status = main(words)
        except SystemExit as error:
            status = int(error.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in members(self.process.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.join()

    def wait(self, seconds: float = SECONDS) -> int:
        """The exit status, and none of its processes is left."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"not done after {seconds:g} s: {self.stderr}"
        none_left(self.process.pid)
        return int(self.process.exitcode)

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in their order."""
        return sorted(pid for pid, stat in _processes().items() if stat[1] == self.process.pid)

    def signal_all(self, number: int) -> None:
        """As a terminal does, or a machine that goes down: all processes of the command at once."""
        os.killpg(self.process.pid, number)

    @property
    def stdout(self) -> str:
        return self.files[0].read_text()

    @property
    def stderr(self) -> str:
        return self.files[1].read_text()


def run(words: list[str], folder: Path) -> tuple[int, str]:
    """A command's exit status and what it wrote to stderr."""
    with Command(words, folder) as command:
        return command.wait(), command.stderr


def trained(out: Path, **settings: Any) -> list[dict[str, Any]]:
    """Run to the end, in silence, and give the log."""
    assert run(arguments(out, **settings), out.parent) == (0, "")
    return rows(out)


def real(words: list[str], env: Mapping[str, str] | None = None, starter: tuple[str, ...] = ()) -> Any:
    """The command in a new interpreter, with processes that it spawns; `starter` is what runs the module."""
    command = [sys.executable, *(starter or ()), "-m", "burst_attention.cli", *words]
    return subprocess.Popen(
        command, env=environment(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def rows(out: Path) -> list[dict[str, Any]]:
    """The log's rows, but for what a clock or a meter says."""
    kept = ("step", "loss_metrics/global_avg_loss", "grad_norm", "lr", "tokens", "documents")
    lines = (out / "log.jsonl").read_text().splitlines()
    return [{name: row[name] for name in kept} for row in map(json.loads, lines)]


def losses(found: list[dict[str, Any]]) -> list[float]:
    return [row["loss_metrics/global_avg_loss"] for row in found]


def until(condition: Callable[[], object], what: str, pause: float = 0.002) -> None:
    """Wait for it to come true."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {SECONDS:g} s: {what}"
        time.sleep(pause)


def logged(out: Path) -> int:
    """Steps in the log so far."""
    path = out / "log.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saved(out: Path) -> list[str]:
    """What lies in the folder of checkpoints."""
    folder = out / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def members(session: int) -> list[int]:
    """Processes of a session that are still running."""
    return [pid for pid, (state, _, of) in _processes().items() if of == session and state != "Z"]


def none_left(session: int) -> None:
    """No process of the session runs any more; Python's own tracker of resources ends a moment after the last."""
    deadline = time.monotonic() + 5
    while left := members(session):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def _processes() -> dict[int, tuple[str, int, int]]:
    """State, parent and session of every process."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                stat = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # ended meanwhile
                continue
            found[int(path.name)] = (stat[0], int(stat[1]), int(stat[3]))
    return found
