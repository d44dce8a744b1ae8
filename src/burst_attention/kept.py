"""Results that are computed once and kept, also where ranks are threads and ask for the same thing together."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_LOCKS = {"computing": threading.RLock()}


def kept(count: int) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Keep a function's last `count` results. A cache alone would let W threads compute the same plan W times over."""

    def keep(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        cached = lru_cache(maxsize=count)(function)

        @wraps(function)
        def ask(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
            with _LOCKS["computing"]:
                return cached(*arguments, **options)  # type: ignore[arg-type]

        return ask

    return keep


def _renew_lock() -> None:
    """A process forked while another thread computes would wait for that thread, which it does not have."""
    _LOCKS["computing"] = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_lock)
