"""Every test here needs hosts, skips with the reason where none can be made, and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator

import pytest

from burst_attention.hosts import hosts_refusal
from burst_attention.namespaces import owned


@pytest.fixture(autouse=True)
def hosts_can_be_made() -> None:
    if reason := hosts_refusal():
        pytest.skip(f"no hosts can be made here: {reason}")


@pytest.fixture(autouse=True)
def nothing_is_left(hosts_can_be_made: None) -> Iterator[None]:
    """Neither a namespace, and with it every bridge and link, nor a process."""
    yield
    assert owned(f"burst-{os.getpid()}-") == []
    assert multiprocessing.active_children() == []
