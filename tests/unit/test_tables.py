"""The tables and the plot of docs/benchmarks.md are what the script makes of the rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_rows_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables
    import tables_gpu

    page, plot = tables.PAGE, tables_gpu.PLOT
    monkeypatch.setattr(tables_gpu, "PAGE", tmp_path / page.name)
    monkeypatch.setattr(tables_gpu, "PLOT", tmp_path / "plots" / plot.name)
    text = page.read_text()
    assert tables.with_tables(text) == text, "run python benchmarks/tables.py"
    assert tables_gpu.PLOT.read_text() == plot.read_text(), "run python benchmarks/tables.py"
    for spoilt in (text.replace("<!-- gpu-tax -->", ""), text + "<!-- end of gpu-tax -->"):
        with pytest.raises(ValueError, match="the page needs <!-- gpu-tax --> and <!-- end of gpu-tax --> once each"):
            tables.with_tables(spoilt)
    for name in ("tables", "tables_gpu"):
        sys.modules.pop(name)
