"""How our operators run: as torch's own do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def as_operator(x: Tensor) -> Iterator[None]:
    """Without autocast, and on the GPU that tensors such as x are on, whichever is current.

    Kernels in Triton, and streams by their numbers, go to the current one.
    """
    on_device = torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()
    with on_device, torch.autocast(x.device.type, enabled=False):
        yield
