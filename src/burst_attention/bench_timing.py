"""How `burst bench gpu` times, in two manners.

- **Alone**: one call after a pause, between its own events. The device is kept from beginning until all is enqueued, as
  it is ahead of the host in the middle of a training step; `host_ms` says what enqueuing costs.
- **Busy**: several calls in a row on a chip that has just made products of matrices.

They may differ where short calls are compared with long ones. A chip at its limit of power lowers its clock; after a
pause a short call is through before that, and a long one is not. So busy calls are timed in turns, and of short ones as
many in a row as make up a long one.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

WARM_UPS = 3
LONG_MS = 200.0
"""What takes longer is timed twice, after once that warms up."""
PAUSE_CYCLES = 20_000_000
PAUSES = (1, 4, 16)
"""Times so many cycles, until everything is enqueued before the device is through with them."""
BUSY_MS = 20.0
"""Of products at least; as much as it takes the host to enqueue, where that is more."""
LONGER_HEADS = 2
"""Times that they are doubled, where they were not enough."""
MOST_IN_A_ROW = 8
"""Calls: a driver takes some thousand launches before it lets the host wait."""
PRODUCT_ROWS = 8192

Call = Callable[[], Any]
Key = TypeVar("Key", bound=Hashable)


def median_ms(run: Call, repeat: int) -> float:
    """Median milliseconds of a call alone."""
    run()
    first = _alone_ms(run)
    if first > LONG_MS:
        return (first + _alone_ms(run)) / 2
    for _ in range(WARM_UPS - 2):
        run()
    return statistics.median(_alone_ms(run) for _ in range(repeat))


def _alone_ms(run: Call) -> float:
    for factor in PAUSES:
        found, ahead = _timed(run, 1, functools.partial(pause, factor * PAUSE_CYCLES))
        if ahead:
            break
    return found


def pause(cycles: int) -> None:
    """Have the device do nothing for so long."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def busy_medians_ms(calls: Mapping[Key, tuple[Call, int]], repeat: int) -> dict[Key, float]:
    """Median milliseconds of a call on a busy chip; of each so many in a row, and all of them in turns.

    All come after the same products, which are more where the device was through with them before all was enqueued.
    """
    head = BUSY_MS
    for run, times in calls.values():
        run()
        head = max(head, 1.3 * times * host_ms(run, 1))
    for _ in range(LONGER_HEADS):
        if all(ahead for _, ahead in _one_turn(calls, head).values()):
            break
        head *= 2
    found: dict[Key, list[float]] = {key: [] for key in calls}
    turns = 0
    while turns < repeat:
        timed = _one_turn(calls, head)
        for key, (milliseconds, _) in timed.items():
            found[key].append(milliseconds / calls[key][1])
        longest = max(milliseconds for milliseconds, _ in timed.values())
        turns += 1 if longest < LONG_MS else math.ceil(repeat / 2)
    return {key: statistics.median(times) for key, times in found.items()}


def _one_turn(calls: Mapping[Key, tuple[Call, int]], head: float) -> dict[Key, tuple[float, bool]]:
    """(milliseconds of all its calls, whether they were enqueued in time) of each, after so many of products."""
    before = functools.partial(make_products, head)
    return {key: _timed(run, times, before) for key, (run, times) in calls.items()}


def _timed(run: Call, times: int, before: Call) -> tuple[float, bool]:
    """(milliseconds on the device of calls that come after what it is given `before`, whether that was long enough)."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before()
    start.record()
    for _ in range(times):
        run()
    end.record()
    ahead = not start.query()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)), ahead


def make_products(milliseconds: float) -> None:
    """Give the device so many milliseconds of matrix products to do."""
    first, second, result, each = _products()
    for _ in range(math.ceil(milliseconds / each)):
        torch.mm(first, second, out=result)


@functools.lru_cache(maxsize=1)
def _products() -> tuple[Tensor, Tensor, Tensor, float]:
    """Two matrices, room for their product, and the milliseconds that it takes."""
    first, second = (torch.randn(PRODUCT_ROWS, PRODUCT_ROWS, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    result = torch.mm(first, second)
    return first, second, result, _timed(lambda: torch.mm(first, second, out=result), 1, torch.cuda.synchronize)[0]


def host_ms(run: Call, repeat: int) -> float:
    """Median milliseconds until a call returns to the host, with nothing on the device to wait for."""
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - started))
    torch.cuda.synchronize()
    return statistics.median(times)
