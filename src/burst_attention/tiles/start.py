"""Starting Triton's kernels from several threads: one of them compiles, the others wait and take the result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_ONE_AT_A_TIME = threading.Lock()


def start(kernel_on_grid: Callable[..., Any]) -> Callable[..., None]:
    """What launches `kernel[grid]`. Ranks that are threads meet a new kernel together, and would each compile it."""

    def launch(*arguments: Any, **options: Any) -> None:
        with _ONE_AT_A_TIME:
            kernel_on_grid(*arguments, **options)

    return launch
