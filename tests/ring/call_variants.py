"""Tests of a call are repeated here for either side that moves and for each kernel."""

from __future__ import annotations

import pytest

SIDES = ("kv", "query")

each_direction = pytest.mark.parametrize("direction", SIDES, ids=lambda side: f"backward-{side}")
each_forward_direction = pytest.mark.parametrize("forward_direction", SIDES, ids=lambda side: f"forward-{side}")
each_kernel = pytest.mark.parametrize("kernel", ["flash", "plain"])
