"""What a training step was: a line of the log, a line for the eye, and the same scalars for TensorBoard and W&B.

Only rank 0 makes a `Log`, a `Display` or `Mirrors`; the numbers it gives them are already those of all ranks. Names in
the log are torchtitan's where torchtitan has one, so that its tools read our logs.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

GIB = 2**30
LOSS, TOKENS_PER_SECOND, TFLOPS, MFU = "loss_metrics/global_avg_loss", "tokens/s", "tflops", "mfu(%)"
MEMORY, HIDDEN = "memory/max_active(GiB)", "communication/hidden(%)"

BAR_CELLS, LEAST_BAR_CELLS = 24, 6
SECONDS_BETWEEN_REDRAWS = 0.1


@dataclass(frozen=True)
class StepRecord:
    """One step of training, of all ranks together unless said otherwise. None is what nobody knows."""

    step: int
    """Counted from 1."""
    steps: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens: int
    seconds: float
    flops: float | None
    """Model FLOPs: what the model asks for, without recomputation."""
    ranks: int
    memory_bytes: int | None
    """The peak of this rank."""
    hidden: float | None
    """The fraction of communication that computing hid, 0 to 1."""
    peak_flops: float | None
    """FLOP/s that one device can reach; the MFU is a fraction of it."""
    documents: int | None = None


def scalars(record: StepRecord) -> dict[str, float]:
    """The log's numbers under their names; those that are not known are left out.

    As in torchtitan throughput(tps) and tflops are of one device, so that jobs of different sizes compare; tokens/s is
    the whole job's.
    """
    found: dict[str, float | None] = {
        "step": record.step,
        LOSS: record.loss,
        "grad_norm": record.grad_norm,
        "lr": record.lr,
        "tokens": record.tokens,
        "documents": record.documents,
        "time_metrics/end_to_end(s)": record.seconds,
    }
    if record.seconds > 0:
        found[TOKENS_PER_SECOND] = record.tokens / record.seconds
        found["throughput(tps)"] = record.tokens / record.seconds / record.ranks
        if record.flops is not None:
            per_device = record.flops / record.seconds / record.ranks
            found[TFLOPS] = per_device / 1e12
            found[MFU] = None if record.peak_flops is None else 100 * per_device / record.peak_flops
    found[MEMORY] = None if record.memory_bytes is None else record.memory_bytes / GIB
    found[HIDDEN] = None if record.hidden is None else 100 * record.hidden
    return {name: value for name, value in found.items() if value is not None}


def write_aside(path: Path, text: str) -> None:
    """Write a file whole or not at all: a reader, or a run after a kill, sees the old text or the new one."""
    aside = path.with_name(path.name + ".partial")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        # Without this a machine that goes down may keep the new name and lose what was written under it.
        os.fsync(file.fileno())
    os.replace(aside, path)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log. The last line may have been cut by a kill and is then left out; any other must be whole."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("no step")
            rows.append(row)
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is not a row of a log; repair or remove the file") from error
    return rows


def line_of(row: dict[str, Any]) -> str:
    """A row as a line of JSON, which has no word for NaN or infinity: a loss that diverged is null, not left out."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


class Log:
    """A file of JSON lines, one per step, each whole on its way to the disk before the next step begins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # A line that a kill cut would swallow the next one; rewriting cuts it off.
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            self._rewrite(read_log(path))
        self.file = path.open("a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        """Append a step."""
        self.file.write(line_of(scalars(record)))
        self.file.flush()

    def truncate(self, step: int) -> None:
        """Drop the steps after this one, which a resumed run makes again; 0 drops all."""
        self.file.close()
        self._rewrite([row for row in read_log(self.path) if row["step"] <= step])
        self.file = self.path.open("a", encoding="utf-8")

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        write_aside(self.path, "".join(map(line_of, rows)))

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class Headline:
    """What is trained, for the first line of the display."""

    model: str
    parameters: int
    ranks: int
    mesh: str
    """As in "dp=1 cp=4"."""
    tokens: int
    """Of one sequence, over all ranks of a ring."""
    layout: str
    mask: str

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return (
            f"Training {self.model}, {short(self.parameters)} parameters, on {ranks} ({self.mesh}): "
            f"sequences of {self.tokens:,} tokens, layout {self.layout}, mask {self.mask}"
        )


def short(number: float) -> str:
    """Three digits and a letter: 12345 is 12.3k."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        # 999.5 of the smaller letter would round to 1000 of it.
        if abs(number) >= 0.9995 * size:
            return f"{number / size:#.3g}".rstrip(".") + letter
    return f"{number:.3g}"


def clock_text(seconds: float) -> str:
    """A duration as 0:07, 12:34 or 5:00:09."""
    whole = max(round(seconds), 0)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def readings(record: StepRecord) -> list[str]:
    """What the display says of a step, the most important first; what is not known is left out."""
    known = scalars(record)
    written: dict[str, Callable[[float], str]] = {
        LOSS: lambda value: f"loss {value:.4f}",
        TOKENS_PER_SECOND: lambda value: f"{short(value)} tokens/s",
        # Of one device, unlike the tokens; with a single rank there is nothing to tell apart.
        TFLOPS: lambda value: f"{value:.3g} TFLOP/s" + ("" if record.ranks == 1 else " a rank"),
        MFU: lambda value: f"MFU {value:.1f}%",
        MEMORY: lambda value: f"{value:.2f} GiB",
        HIDDEN: lambda value: f"hidden {value:.0f}%",
    }
    return [write(known[name]) for name, write in written.items() if name in known]


def shortened(reading: str) -> str:
    """A reading in fewer letters, for a narrow terminal."""
    for long, brief in (
        ("step ", ""),
        ("tokens/s", "tok/s"),
        (" TFLOP/s", " TF/s"),
        (" a rank", ""),
        ("hidden", "hid"),
    ):
        reading = reading.replace(long, brief)
    return reading.strip()


class Display:
    """A live line on a terminal; elsewhere, as in a file or a job's log, a plain line every few steps."""

    def __init__(
        self,
        headline: Headline | str,
        out: TextIO | None = None,
        every: int = 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.out = sys.stdout if out is None else out
        self.every = max(every, 1)
        self.clock = clock
        self.live = self.out.isatty() and os.environ.get("TERM") != "dumb"
        self.filled, self.empty = ("━", "─") if encodes(self.out, "━─") else ("#", "-")
        self.seconds: deque[float] = deque(maxlen=20)
        self.shown = ""
        self.drawn_at = -math.inf
        self.shown_steps = 0
        self._print(str(headline))

    def step(self, record: StepRecord) -> None:
        """Show a step. The first, the last and every few are printed plainly; a terminal is not redrawn too often."""
        first, last = self.shown_steps == 0, record.step >= record.steps
        # The first step compiles and allocates: it says little about how long those that follow take.
        if self.shown_steps == 1:
            self.seconds.clear()
        self.shown_steps += 1
        self.seconds.append(record.seconds)
        if self.live:
            now = self.clock()
            if first or last or now - self.drawn_at >= SECONDS_BETWEEN_REDRAWS:
                self.drawn_at = now
                self._draw(record)
        elif first or last or record.step % self.every == 0:
            self._print("  ".join([f"step {record.step}/{record.steps}", *readings(record), self._left(record)]))

    def note(self, text: str) -> None:
        """Say something else, as that a checkpoint was written, above the live line."""
        if self.shown:
            self.out.write("\r\x1b[K")
        self._print(text)
        if self.shown:
            self.out.write(self.shown)
            self.out.flush()

    def close(self) -> None:
        """Leave the last live line where it is and go on below it."""
        if self.shown:
            self._print("")
        self.shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _left(self, record: StepRecord) -> str:
        return f"{clock_text(statistics.median(self.seconds) * (record.steps - record.step))} left"

    def _draw(self, record: StepRecord) -> None:
        # A line that fills the last column would wrap on some terminals, and a carriage return then keeps half of it.
        width = columns(self.out) - 1
        parts = [
            f"step {record.step:>{len(str(record.steps))}}/{record.steps}",
            *readings(record),
            self._left(record),
        ]
        if len("  ".join(parts)) > width:
            parts = [shortened(part) for part in parts]
        while len(parts) > 2 and len("  ".join(parts)) > width:
            # The time left stands last but matters more than the last readings.
            parts.pop(-2 if len(parts) > 3 else -1)
        cells = min(width - len("  ".join(parts)) - 2, BAR_CELLS)
        if cells >= LEAST_BAR_CELLS:
            full = round(cells * min(record.step / max(record.steps, 1), 1.0))
            bar = f"\x1b[36m{self.filled * full}\x1b[2m{self.empty * (cells - full)}\x1b[0m"
            text = "  ".join([parts[0], bar, *parts[1:]])
        else:
            text = "  ".join(parts)[: max(width, 0)]
        self.shown = f"\r{text}\x1b[K"
        self.out.write(self.shown)
        self.out.flush()

    def _print(self, text: str) -> None:
        self.out.write(text + "\n")
        self.out.flush()


def encodes(out: TextIO, text: str) -> bool:
    """Whether a stream can write a text: a terminal of plain ASCII would raise in the middle of a run."""
    try:
        text.encode(getattr(out, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def columns(out: TextIO) -> int:
    """How wide a terminal is now; it may have been resized since the last line."""
    try:
        return os.get_terminal_size(out.fileno()).columns or 80
    except OSError:
        return 80


class Mirrors:
    """TensorBoard and W&B, where asked: the scalars of the log, under the same names."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        *,
        tensorboard: bool = False,
        wandb: bool = False,
        resumed_step: int = 0,
    ) -> None:
        """Refuse what is asked and not installed. `resumed_step` hides later points of TensorBoard, as the log's."""
        # Both are looked for before either starts, so that a refusal leaves no half-begun run behind.
        boards = wanted("torch.utils.tensorboard", "SummaryWriter", "tensorboard") if tensorboard else None
        self.wandb = wanted("wandb", "init", "wandb") if wandb else None
        self.board = None
        if boards is not None:
            self.board = boards.SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=resumed_step + 1)
        if self.wandb is not None:
            folder.mkdir(parents=True, exist_ok=True)
            project = os.environ.get("WANDB_PROJECT", "burst-attention")
            self.wandb.init(project=project, dir=str(folder), config=settings)

    def write(self, record: StepRecord) -> None:
        """Send a step on."""
        found = scalars(record)
        del found["step"]
        if self.board is not None:
            for name, value in found.items():
                self.board.add_scalar(name, value, record.step)
        if self.wandb is not None:
            self.wandb.log(found, step=record.step)

    def close(self) -> None:
        """Write out what is still held."""
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def wanted(module: str, attribute: str, package: str) -> Any:
    """Import what an option asked for, or say how to install it."""
    refusal = f"--{package} needs the package {package}: pip install {package}"
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{refusal} ({error})") from error
    # W&B leaves a folder "wandb" behind, which Python imports as an empty package where the real one is missing.
    if not hasattr(found, attribute):
        raise ValueError(refusal)
    return found
