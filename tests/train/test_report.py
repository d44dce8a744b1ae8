"""The folder that a run leaves: right numbers, pictures that are XML with every point, files whole or absent."""

from __future__ import annotations

import json
import math
import os
import platform
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from burst_attention.train.report import (
    HEIGHT,
    LEFT,
    MOST_POINTS,
    RIGHT,
    WIDTH,
    installed_versions,
    ticks,
    write_report,
)
from burst_attention.version import __version__

SETTINGS = {"model": "tiny <a&b>", "ranks": 4, "tokens": 4096, "layout": "zigzag", "mask": "causal()", "lr": 1e-3}
SVG = "{http://www.w3.org/2000/svg}"


def row(step: int, loss: float | None, speed: float | None = 1000.0, **more: float) -> dict[str, Any]:
    names = {"memory": "memory/max_active(GiB)", "mfu": "mfu(%)", "hidden": "communication/hidden(%)"}
    found = {"step": step, "loss_metrics/global_avg_loss": loss} | {names[key]: value for key, value in more.items()}
    return found if speed is None else found | {"tokens/s": speed}


def falling(steps: int, factor: float = 1.0) -> list[dict[str, Any]]:
    return [row(step, factor * (2 + 8 / step), 1000.0 + step) for step in range(1, steps + 1)]


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def picture(folder: Path) -> ElementTree.Element:
    return ElementTree.parse(folder / "curves.svg").getroot()


def lines_of(folder: Path) -> list[list[tuple[float, float]]]:
    found = []
    for line in picture(folder).iter(f"{SVG}polyline"):
        found.append([(float(x), float(y)) for x, y in (pair.split(",") for pair in line.attrib["points"].split())])
    return found


def test_the_summary_has_the_right_numbers(tmp_path: Path) -> None:
    rows = [
        row(1, 10.0, 1.0, memory=1.0, mfu=1.0, hidden=1.0),
        row(2, 8.0, 100.0, memory=2.5, mfu=30.0, hidden=90.0),
        row(3, 6.0, 400.0, memory=2.0, mfu=40.0, hidden=80.0),
        row(4, 4.0, 200.0, memory=2.0, mfu=50.0, hidden=70.0),
    ]
    text = write_report(tmp_path, SETTINGS, rows, None)
    assert summary(tmp_path) == {
        "steps": 4,
        "first_loss": 10.0,
        "last_loss": 4.0,
        "loss_fall_percent": 60.0,
        "tokens_per_second": 200.0,
        "mfu_percent": 40.0,
        "communication_hidden_percent": 80.0,
        "peak_memory_gib": 2.5,
    }
    assert text == (tmp_path / "summary.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    assert cells == [
        ["steps", "4"],
        ["first loss", "10.0000"],
        ["last loss", "4.0000"],
        ["fall of the loss", "60.0%"],
        ["tokens/s, median after the first step", "200"],
        ["MFU, median", "40.0%"],
        ["peak memory of rank 0", "2.50 GiB"],
        ["communication hidden, median", "80%"],
    ]
    assert len({len(line) for line in text.splitlines()}) == 1


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    text = write_report(tmp_path, {}, [row(1, 3.0, None), row(2, 2.0, None)], None)
    assert set(summary(tmp_path)) == {"steps", "first_loss", "last_loss", "loss_fall_percent"}
    assert "MFU" not in text and "tokens/s" not in text and "unsharded" not in text
    words = [element.text for element in picture(tmp_path).iter(f"{SVG}text")]
    assert "tokens/s: nothing to draw" in words and "tokens/s" not in words and len(lines_of(tmp_path)) == 1


def test_one_step_has_no_median(tmp_path: Path) -> None:
    write_report(tmp_path, SETTINGS, [row(1, 3.0)], None)
    assert "tokens_per_second" not in summary(tmp_path)
    assert len(list(picture(tmp_path).iter(f"{SVG}circle"))) == 2 and lines_of(tmp_path) == []


def test_no_steps_are_said(tmp_path: Path) -> None:
    write_report(tmp_path, SETTINGS, [], None)
    assert summary(tmp_path) == {"steps": 0}
    assert "loss: nothing to draw" in [element.text for element in picture(tmp_path).iter(f"{SVG}text")]


def test_the_largest_difference_is_relative_to_the_unsharded_run(tmp_path: Path) -> None:
    rows = [row(1, 8.0), row(2, 5.0), row(3, 4.0), row(4, 99.0)]
    text = write_report(tmp_path, SETTINGS, rows, [row(1, 8.0), row(2, 4.0), row(3, 5.0), row(7, 1.0)])
    found = summary(tmp_path)
    assert found["largest_relative_difference"] == 0.25 and found["largest_relative_difference_at_step"] == 2
    assert found["compared_steps"] == 3 and "steps_where_one_run_is_not_finite" not in found
    assert "0.25 (step 2)" in text


def test_equal_runs_differ_by_nothing(tmp_path: Path) -> None:
    write_report(tmp_path, SETTINGS, [row(1, 0.0), row(2, 1.0)], [row(1, 0.0), row(2, 1.0)])
    assert summary(tmp_path)["largest_relative_difference"] == 0.0


def test_one_run_that_diverges_is_said(tmp_path: Path) -> None:
    text = write_report(tmp_path, SETTINGS, [row(1, 2.0), row(2, None)], [row(1, 2.0), row(2, 1.0)])
    found = summary(tmp_path)
    assert found["last_loss"] is None and found["compared_steps"] == 1
    assert found["steps_where_one_run_is_not_finite"] == 1 and "loss_fall_percent" not in found
    assert "not finite" in text and "only one of the two is finite" in text


def test_runs_without_a_common_step_are_not_compared(tmp_path: Path) -> None:
    text = write_report(tmp_path, SETTINGS, [row(1, 2.0)], [row(5, 2.0)])
    assert summary(tmp_path)["compared_steps"] == 0 and "largest" not in text


def test_every_step_is_a_point_at_its_place(tmp_path: Path) -> None:
    rows = falling(50)
    write_report(tmp_path, SETTINGS, rows, None)
    loss, speed = lines_of(tmp_path)
    assert len(loss) == len(speed) == 50
    assert loss[0][0] == LEFT and loss[-1][0] == WIDTH - RIGHT
    # The loss falls and the picture's y grows downwards; equal steps are equally far apart.
    assert all(a[1] < b[1] for a, b in pairwise(loss))
    assert all(abs((b[0] - a[0]) - (loss[1][0] - loss[0][0])) < 0.1 for a, b in pairwise(loss))
    top, bottom = loss[0][1], loss[-1][1]
    half = (rows[0]["loss_metrics/global_avg_loss"] - rows[3]["loss_metrics/global_avg_loss"]) / (8 - 8 / 50)
    assert (loss[3][1] - top) / (bottom - top) == pytest.approx(half, abs=1e-3)
    assert max(y for _, y in loss) < min(y for _, y in speed) and max(y for _, y in speed) < HEIGHT


def test_a_compared_run_is_dashed_and_on_top(tmp_path: Path) -> None:
    write_report(tmp_path, SETTINGS, falling(20), falling(30, factor=1.1))
    drawn = list(picture(tmp_path).iter(f"{SVG}polyline"))
    assert [len(line) for line in lines_of(tmp_path)] == [20, 30, 20, 30]
    assert ["stroke-dasharray" in line.attrib for line in drawn] == [False, True, False, True]
    words = [element.text for element in picture(tmp_path).iter(f"{SVG}text")]
    assert {"sharded over 4 ranks", "unsharded", "step", "loss", "tokens/s"} <= set(words)
    assert "tiny <a&b>, 4 ranks, sequences of 4096 tokens, zigzag, causal()" in words


def test_a_run_alone_has_no_second_name(tmp_path: Path) -> None:
    write_report(tmp_path, {}, falling(5), None)
    words = [element.text for element in picture(tmp_path).iter(f"{SVG}text")]
    assert "sharded" in words and "unsharded" not in words and len(lines_of(tmp_path)) == 2


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_a_loss_that_is_not_finite_breaks_the_line(tmp_path: Path, missing: float | None) -> None:
    losses = [5.0, 4.0, missing, 3.0, missing, 2.0, 1.5, 1.0]
    write_report(tmp_path, SETTINGS, [row(step, loss) for step, loss in enumerate(losses, 1)], None)
    assert [len(line) for line in lines_of(tmp_path)] == [2, 3, 8]
    assert len(list(picture(tmp_path).iter(f"{SVG}circle"))) == 1
    assert "nan" not in (tmp_path / "curves.svg").read_text() and "inf" not in (tmp_path / "curves.svg").read_text()


@pytest.mark.parametrize("factor", [1.0, -1.0])
def test_a_long_run_is_thinned_and_keeps_its_spikes(tmp_path: Path, factor: float) -> None:
    rows = falling(3 * MOST_POINTS, factor)
    rows[4321]["loss_metrics/global_avg_loss"] = 50.0
    write_report(tmp_path, SETTINGS, rows, None)
    loss, _ = lines_of(tmp_path)
    assert MOST_POINTS / 2 < len(loss) <= MOST_POINTS and loss == sorted(loss, key=lambda point: point[0])
    spike = min(loss, key=lambda point: point[1])
    assert spike[0] == pytest.approx(LEFT + 4321 / (len(rows) - 1) * (WIDTH - LEFT - RIGHT), abs=0.02)


@pytest.mark.parametrize("losses", [(2.0, 2.0), (0.0, 0.0), (1e-9, 2e-9), (3.0, 3.0000000000000004), (1e6, 2.0)])
def test_any_range_can_be_drawn(tmp_path: Path, losses: tuple[float, float]) -> None:
    write_report(tmp_path, SETTINGS, [row(step, loss) for step, loss in enumerate(losses, 1)], None)
    loss, _ = lines_of(tmp_path)
    assert all(88 <= y <= 368 for _, y in loss)
    numbers = [
        element.text
        for element in picture(tmp_path).iter(f"{SVG}text")
        if element.attrib.get("text-anchor") == "end" and float(element.attrib["y"]) < 380
    ]
    assert len(numbers) > 1 and len(set(numbers)) == len(numbers)


def test_throughput_is_drawn_from_zero(tmp_path: Path) -> None:
    """Noise of a percent would otherwise fill the panel."""
    write_report(tmp_path, SETTINGS, [row(step, 1.0, 1000.0 + 10 * (step % 2)) for step in range(1, 9)], None)
    _, speed = lines_of(tmp_path)
    assert max(y for _, y in speed) - min(y for _, y in speed) < 2 and max(y for _, y in speed) < 420


def test_ticks_are_round() -> None:
    assert ticks(0.0, 1.0, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(1.93, 12.4, 6) == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert ticks(-0.1, 0.35, 5) == [-0.1, 0.0, 0.1, 0.2, 0.3]
    assert ticks(0.0, 43000.0, 3) == [0.0, 20000.0, 40000.0]


def test_settings_and_versions_are_kept(tmp_path: Path) -> None:
    write_report(tmp_path / "a", SETTINGS | {"out": tmp_path, "dtype": torch.bfloat16}, falling(2), None)
    settings = json.loads((tmp_path / "a" / "settings.json").read_text())
    assert settings == SETTINGS | {"out": str(tmp_path), "dtype": "torch.bfloat16"}
    versions = json.loads((tmp_path / "a" / "versions.json").read_text())
    assert versions == installed_versions()
    assert versions["python"] == platform.python_version() and versions["torch"] == torch.__version__
    assert versions["burst-attention"] == __version__ and versions["platform"] == platform.platform()
    write_report(tmp_path / "b", {}, falling(2), None, versions={"torch": "7"})
    assert json.loads((tmp_path / "b" / "versions.json").read_text()) == {"torch": "7"}


def test_files_are_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"summary.json", "summary.md", "curves.svg", "settings.json", "versions.json"}
    write_report(tmp_path, SETTINGS, falling(3), None)
    assert {file.name for file in tmp_path.iterdir()} == names
    before = {name: (tmp_path / name).read_bytes() for name in names}

    # A kill before each renaming: nothing that has a name may have changed.
    monkeypatch.setattr(os, "replace", lambda source, target: None)
    write_report(tmp_path, {}, falling(9), falling(9), versions={})
    assert {name: (tmp_path / name).read_bytes() for name in names} == before
