"""Small files in the tests' checkpoints, so that every rank writes several."""

from __future__ import annotations

import pytest

from burst_attention.train import checkpoint


@pytest.fixture(autouse=True)
def several_files_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 600)
