"""`burst check --device cuda`, as a user runs it: every kernel family, and bytes as they are predicted."""

from __future__ import annotations

import json

import pytest
import torch

from burst_attention.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("ranks", ["2", "4"])
def test_all_cases_are_exact(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["check", "--device", "cuda", "--ranks", ranks, "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert not [(row["case"], row["directions"], row["verdict"]) for row in rows if row["verdict"] != "ok"]
    assert status == 0 and len(rows) == 3 * 12 + 8
