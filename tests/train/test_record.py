"""A step in the log, on the screen and in the mirrors: right ratios, nothing made up, nothing half-written."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import struct
import sys
import termios
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from burst_attention.train import record as record_module
from burst_attention.train.record import (
    Display,
    Headline,
    Log,
    Mirrors,
    StepRecord,
    clock_text,
    columns,
    read_log,
    scalars,
    short,
    write_aside,
)

STEP = StepRecord(
    step=3,
    steps=100,
    loss=2.5,
    grad_norm=0.75,
    lr=1e-3,
    tokens=8000,
    seconds=2.0,
    flops=16e12,
    ranks=4,
    memory_bytes=3 * 2**29,
    hidden=0.875,
    peak_flops=8e12,
    documents=5,
)
UNKNOWN = replace(
    STEP, grad_norm=None, flops=None, memory_bytes=None, hidden=None, peak_flops=None, documents=None, ranks=1
)
HEADLINE = Headline("tiny", 1_234_567, 4, "dp=1 cp=4", 4096, "zigzag", "causal()")


def at(step: int, **changes: Any) -> StepRecord:
    return replace(STEP, step=step, **changes)


class Terminal(io.StringIO):
    """A terminal that keeps what was written; its width is that of a stream without a descriptor, 80."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


class Plain(Terminal):
    encoding = "ascii"  # type: ignore[assignment]


def bare(text: str) -> str:
    """What is left to see of a text: without colours and clearing."""
    return re.sub(r"\x1b\[[0-9;]*[mK]", "", text)


def live_lines(out: Terminal) -> list[str]:
    return [bare(part) for part in out.getvalue().split("\r")[1:]]


# The scalars


def test_names_and_ratios_are_torchtitans() -> None:
    assert scalars(STEP) == {
        "step": 3,
        "loss_metrics/global_avg_loss": 2.5,
        "grad_norm": 0.75,
        "lr": 1e-3,
        "tokens": 8000,
        "documents": 5,
        "time_metrics/end_to_end(s)": 2.0,
        "tokens/s": 4000.0,
        "throughput(tps)": 1000.0,
        "tflops": 2.0,
        "mfu(%)": 25.0,
        "memory/max_active(GiB)": 1.5,
        "communication/hidden(%)": 87.5,
    }


def test_what_is_not_known_is_left_out() -> None:
    known = {"step", "loss_metrics/global_avg_loss", "lr", "tokens", "time_metrics/end_to_end(s)", "tokens/s"}
    assert set(scalars(UNKNOWN)) == known | {"throughput(tps)"}
    assert "tflops" in scalars(replace(STEP, peak_flops=None)) and "mfu(%)" not in scalars(
        replace(STEP, peak_flops=None)
    )
    assert "tokens/s" not in scalars(replace(STEP, seconds=0.0))


def test_nothing_hidden_is_known_and_written() -> None:
    assert scalars(replace(STEP, hidden=0.0))["communication/hidden(%)"] == 0.0


# The log


def test_a_line_is_on_its_way_before_the_next_step(tmp_path: Path) -> None:
    log = Log(tmp_path / "new" / "log.jsonl")
    for step in (1, 2):
        log.write(at(step))
        assert [row["step"] for row in read_log(log.path)] == list(range(1, step + 1))
    log.close()
    assert read_log(log.path)[1] == scalars(at(2))


def test_a_diverged_loss_is_null_in_json(tmp_path: Path) -> None:
    with Log(tmp_path / "log.jsonl") as log:
        log.write(at(1, loss=float("nan"), grad_norm=float("inf")))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    row = json.loads(log.path.read_text(), parse_constant=refuse)
    assert row["loss_metrics/global_avg_loss"] is None and row["grad_norm"] is None and row["lr"] == 1e-3


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_line_cut_by_a_kill_is_dropped_and_the_next_one_is_whole(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "log.jsonl"
    with Log(path) as log:
        for step in (1, 2, 3):
            log.write(at(step))
    path.write_bytes(path.read_bytes()[:-cut])
    # Cut by one, the line lost nothing but its end of line.
    kept = [1, 2, 3] if cut == 1 else [1, 2]
    assert [row["step"] for row in read_log(path)] == kept
    with Log(path) as log:
        log.write(at(9))
    assert [row["step"] for row in read_log(path)] == [*kept, 9]


def test_a_cut_line_that_ends_is_dropped_too(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo\n')
    assert read_log(path) == [{"step": 1}]
    with Log(path) as log:
        log.truncate(5)
        log.write(at(2))
    assert [row["step"] for row in read_log(path)] == [1, 2]


@pytest.mark.parametrize("line", ["{", "7", '{"loss": 1}', '{"step": "2"}'])
def test_a_bad_line_before_the_last_is_an_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl, line 2 is not a row of a log; repair or remove the file"):
        read_log(path)


def test_an_empty_log_has_no_rows(tmp_path: Path) -> None:
    with Log(tmp_path / "log.jsonl") as log:
        assert read_log(log.path) == []


@pytest.mark.parametrize("resumed", [0, 2, 4, 9])
def test_resuming_drops_later_steps(tmp_path: Path, resumed: int) -> None:
    path = tmp_path / "log.jsonl"
    with Log(path) as log:
        for step in range(1, 5):
            log.write(at(step))
    before = path.read_text().splitlines()
    with Log(path) as log:
        log.truncate(resumed)
        assert path.read_text().splitlines() == before[:resumed]
        log.write(at(resumed + 1, loss=1.0))
    assert [row["step"] for row in read_log(path)] == [*range(1, min(resumed, 4) + 1), resumed + 1]
    assert [file.name for file in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_kill_while_truncating_leaves_the_old_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    with Log(path) as log:
        log.write(at(1))
        log.write(at(2))
        before = path.read_bytes()

        def killed(source: Path, target: Path) -> None:
            assert read_log(source) == read_log(target)[:1]
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            log.truncate(1)
    assert path.read_bytes() == before


def test_writing_aside_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("something long that was there")
    (tmp_path / "a.json.partial").write_text("left by a kill, and longer than what comes now")
    write_aside(path, "short ö")
    assert path.read_text(encoding="utf-8") == "short ö" and list(tmp_path.iterdir()) == [path]


# The display


def test_the_first_line_says_what_is_trained() -> None:
    out = io.StringIO()
    Display(HEADLINE, out)
    assert out.getvalue() == (
        "Training tiny, 1.23M parameters, on 4 ranks (dp=1 cp=4): "
        "sequences of 4,096 tokens, layout zigzag, mask causal()\n"
    )
    assert "on 1 rank (" in str(replace(HEADLINE, ranks=1))


def test_without_a_terminal_every_few_steps_are_lines() -> None:
    out = io.StringIO()
    with Display("x", out, every=10) as display:
        for step in range(3, 26):
            display.step(at(step, steps=25))
        display.note("saved")
    _, *lines, note = out.getvalue().splitlines()
    assert note == "saved"
    assert [line.split("  ")[0] for line in lines] == ["step 3/25", "step 10/25", "step 20/25", "step 25/25"]
    assert lines[0] == (
        "step 3/25  loss 2.5000  4.00k tokens/s  2 TFLOP/s a rank  MFU 25.0%  1.50 GiB  hidden 88%  0:44 left"
    )
    assert "\r" not in out.getvalue() and "\x1b" not in out.getvalue()


def test_readings_that_are_not_known_are_not_shown() -> None:
    out = io.StringIO()
    Display("x", out).step(UNKNOWN)
    assert out.getvalue().splitlines()[1] == "step 3/100  loss 2.5000  4.00k tokens/s  3:14 left"
    out = io.StringIO()
    Display("x", out).step(replace(UNKNOWN, flops=3e11))
    assert "  0.15 TFLOP/s  " in out.getvalue()


def test_a_terminal_has_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(record_module, "columns", lambda out: 200)
    out = Terminal()
    with Display(HEADLINE, out, clock=iter(range(1000)).__next__) as display:
        for step in (25, 50, 100):
            display.step(at(step))
    assert out.getvalue().count("\n") == 2 and out.getvalue().endswith("\x1b[K\n")
    lines = live_lines(out)
    assert [line[:14] for line in lines] == ["step  25/100  ", "step  50/100  ", "step 100/100  "]
    assert [line.count("━") for line in lines] == [6, 12, 24] and [line.count("─") for line in lines] == [18, 12, 0]
    assert "  2 TFLOP/s a rank  MFU 25.0%  1.50 GiB  hidden 88%  2:30 left" in lines[0]


NARROW = {
    1: "",
    8: "3/100  ",
    20: "3/100  loss 2.5000",
    40: "3/100  loss 2.5000  3:14 left",
    60: "3/100  loss 2.5000  4.00k tok/s  2 TF/s  3:14 left",
    80: "3/100  loss 2.5000  4.00k tok/s  2 TF/s  MFU 25.0%  1.50 GiB  3:14 left",
    86: "3/100  loss 2.5000  4.00k tok/s  2 TF/s  MFU 25.0%  1.50 GiB  hid 88%  3:14 left",
    105: "step   3/100  loss 2.5000  4.00k tokens/s  2 TFLOP/s a rank  MFU 25.0%  1.50 GiB  hidden 88%  3:14 left",
}


@pytest.mark.parametrize("width", NARROW)
def test_a_live_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(record_module, "columns", lambda out: width)
    out = Terminal()
    Display("x", out).step(STEP)
    (line,) = live_lines(out)
    assert len(line) < width
    assert re.sub("  [━─]+", "", line) == NARROW[width]


def test_a_terminal_is_not_redrawn_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    times = iter([0.0, 0.05, 0.12, 0.13, 0.14])
    display = Display("x", out, clock=times.__next__)
    for step in range(1, 6):
        display.step(at(step, steps=5))
    assert [line.split("  ")[0] for line in live_lines(out)] == ["1/5", "3/5", "5/5"]


def test_the_time_left_forgets_the_first_step_and_outliers() -> None:
    out = io.StringIO()
    display = Display("x", out, every=1)
    for step, seconds in enumerate((100.0, 2.0, 2.0, 50.0, 2.0), 1):
        display.step(at(step, steps=15, seconds=seconds))
    assert [line.split("  ")[-1] for line in out.getvalue().splitlines()[1:]] == [
        "23:20 left",
        "0:26 left",
        "0:24 left",
        "0:22 left",
        "0:20 left",
    ]


def test_a_note_stands_above_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    display = Display("x", out)
    display.note("begin")
    display.step(STEP)
    display.note("saved")
    display.close()
    assert out.getvalue().startswith("x\nbegin\n\r3/100")
    cleared, again = out.getvalue().split("\r\x1b[K")
    assert again.startswith("saved\n\r3/100") and again.endswith("\x1b[K\n") and "\n" not in cleared[8:]


def test_a_terminal_of_ascii_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(record_module, "columns", lambda out: 200)
    out = Plain()
    Display("x", out).step(at(50))
    assert out.getvalue().isascii() and bare(out.getvalue()).count("#") == 12


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    Display("x", out).step(STEP)
    assert "\r" not in out.getvalue() and out.getvalue().count("\n") == 2


def test_the_width_is_the_terminals(tmp_path: Path) -> None:
    leader, follower = os.openpty()
    with open(leader, "rb", buffering=0), open(follower, "w") as terminal:
        for width in (132, 61):
            fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
            assert columns(terminal) == width
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        assert columns(terminal) == 80
    assert columns(io.StringIO()) == 80
    with (tmp_path / "file").open("w") as file:
        assert columns(file) == 80


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (7, "7"), (999, "999"), (999.6, "1.00k"), (12345, "12.3k"), (999_999, "1.00M"), (7.1e9, "7.10B")],
)
def test_short_numbers(number: float, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (18009, "5:00:09")])
def test_durations(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


# The mirrors


class Writer:
    """Stands for SummaryWriter and for wandb: keeps what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, **options: Any) -> Writer:
        self.calls.append(("made", options))
        return self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.calls.append((name, value, step))

    def close(self) -> None:
        self.calls.append(("closed",))


def test_tensorboard_gets_the_logs_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, writer = ModuleType("torch.utils.tensorboard"), Writer()
    module.SummaryWriter = writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with Mirrors(tmp_path, {}, tensorboard=True, resumed_step=2) as mirrors:
        mirrors.write(STEP)
    (_, options), *sent, closed = writer.calls
    assert options == {"log_dir": str(tmp_path / "tensorboard"), "purge_step": 3}
    expected = {name: value for name, value in scalars(STEP).items() if name != "step"}
    assert {name: value for name, value, _ in sent} == expected and {step for *_, step in sent} == {3}
    assert closed == ("closed",)


def test_wandb_gets_the_logs_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("wandb")
    calls: list[tuple[Any, ...]] = []
    module.init = lambda **options: calls.append(("init", options))  # type: ignore[attr-defined]
    module.log = lambda values, step: calls.append((values, step))  # type: ignore[attr-defined]
    module.finish = lambda: calls.append(("finish",))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    folder = tmp_path / "run"
    with Mirrors(folder, {"lr": 1}, wandb=True) as mirrors:
        mirrors.write(STEP)
    begun, (values, step), ended = calls
    assert begun == ("init", {"project": "burst-attention", "dir": str(folder), "config": {"lr": 1}})
    assert (
        "step" not in values and values | {"step": step} == scalars(STEP) and ended == ("finish",) and folder.is_dir()
    )


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_what_is_asked_and_not_installed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(package, package), None)
    with pytest.raises(ValueError, match=f"^--{package} needs the package {package}: pip install {package}"):
        Mirrors(tmp_path, {}, tensorboard=package == "tensorboard", wandb=package == "wandb")


def test_wandbs_own_folder_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    with pytest.raises(ValueError, match=r"^--wandb needs the package wandb: pip install wandb$"):
        Mirrors(tmp_path, {}, wandb=True)


def test_a_refusal_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, writer = ModuleType("torch.utils.tensorboard"), Writer()
    module.SummaryWriter = writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="--wandb"):
        Mirrors(tmp_path, {}, tensorboard=True, wandb=True)
    assert writer.calls == []


def test_nothing_asked_is_nothing_done(tmp_path: Path) -> None:
    with Mirrors(tmp_path, {}) as mirrors:
        mirrors.write(STEP)
    assert list(tmp_path.iterdir()) == []
