"""Starting Triton's kernels from several threads: one of them compiles, the others wait and take the result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

_ONE_AT_A_TIME = threading.Lock()


def start(launch: Callable[..., Any]) -> Callable[..., Any]:
    """What calls `launch`. Ranks that are threads meet a new kernel together, and would each
    compile it; FlashAttention-4's compiler ends the process where two threads are in it.
    """

    def launch_alone(*arguments: Any, **options: Any) -> Any:
        with _ONE_AT_A_TIME:
            return launch(*arguments, **options)

    return launch_alone


def start_kernel(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """The same of one of Triton's; from 3.10 on that makes one instruction of product and sum only if asked to."""
    return partial(start(kernel[grid]), enable_fp_fusion=True)
