"""Starting Triton's kernels from several threads: one of them compiles, the others wait and take the result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_ONE_AT_A_TIME = threading.Lock()


def start(launch: Callable[..., Any]) -> Callable[..., Any]:
    """What calls `launch`, such as `kernel[grid]`. Ranks that are threads meet a new kernel together, and would each
    compile it; FlashAttention-4's compiler ends the process where two threads are in it.
    """

    def launch_alone(*arguments: Any, **options: Any) -> Any:
        with _ONE_AT_A_TIME:
            return launch(*arguments, **options)

    return launch_alone
