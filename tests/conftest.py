"""Shared settings of the tests: one thread per rank, and uninitialised memory that would show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

# The asserts of modules that several test files share show their values too.
pytest.register_assert_rewrite("tests.unit", "tests.ring", "tests.train")


@pytest.fixture(autouse=True, scope="session")
def one_thread_per_rank() -> None:
    """Ranks are threads here; more threads inside each would only fight for the same cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN, so that reading it before writing it fails a test."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    mode = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(mode)
