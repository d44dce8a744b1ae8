"""What the engine asks of a tile kernel: all pieces of a round in one call, results added into given tensors.

Shapes: B batch, H query heads, G key heads, S query rows, K key rows, D head dim, E value head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from burst_attention.geometry import Piece
from burst_attention.merge import State, finish
from burst_attention.schedule import PhasePlan, Round

GRADIENTS = ("dq", "dk", "dv")


class BackwardInputs(NamedTuple):
    """What backward starts from: lse and delta = rowsum(out * dout) - dlse of the whole rows.

    `out` is there where the rows are at home, for kernels that want it; delta says all that is needed of it.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    delta: Tensor
    out: Tensor | None


class Gradients:
    """Accumulators (B, H, S, D), (B, G, K, D), (B, G, K, E) to add to; None where a gradient is not wanted.

    Those named in `untouched` are memory that nothing has been written to: the first part is written there, not added.
    """

    def __init__(
        self, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, untouched: set[str] | None = None
    ) -> None:
        self.dq, self.dk, self.dv = dq, dk, dv
        self.untouched = set() if untouched is None else untouched

    def settle(self) -> None:
        """Make every accumulator one that can be added to."""
        for name in GRADIENTS:
            x = getattr(self, name)
            if x is not None and name in self.untouched:
                x.zero_()
                self.untouched.discard(name)

    def add(self, name: str, rows: slice, part: Tensor) -> None:
        """Add to some rows of "dq", "dk" or "dv", where it is wanted."""
        total: Tensor | None = getattr(self, name)
        if total is None:
            return
        if name not in self.untouched:
            total[:, :, rows].add_(part)
            return
        self.untouched.discard(name)
        if part.shape[2] != total.shape[2]:
            total.zero_()
        total[:, :, rows].copy_(part)


class TileKernel(ABC):
    """Computes pieces on one device. Tensors may be strided views; inputs are never written."""

    name: str
    defers = False
    """Whether forward may leave partials in `state.deferred`, which `finish` then takes in."""

    def serves(self, piece: Piece) -> bool:
        """Whether it can compute a piece; kernels that serve only some are used by name."""
        return True

    @abstractmethod
    def workspace_bytes(self, phase: PhasePlan, step: Round, visiting: bool) -> int:
        """Bytes that the kernel allocates for itself, at most at once, to compute a round on one device."""

    @abstractmethod
    def forward(self, pieces: Sequence[Piece], q: Tensor, k: Tensor, v: Tensor, state: State, scale: float) -> None:
        """Add the pieces' keys to the state of q's rows. `scale` multiplies the scores."""

    def finish(self, state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out, lse) of a state that has seen all its keys; the state is used up."""
        return finish(state, dtype)

    def row_delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
        """(B, H, S): rowsum(out * dout) - dlse, which is all that backward needs to know of out."""
        # Where a row sees few keys, dq is what is left after delta cancels: fp64 sums keep that difference.
        precise = torch.float64 if out.dtype == torch.float32 and out.device.type == "cpu" else dtype
        delta: Tensor = torch.linalg.vecdot(out.to(precise), dout.to(precise)).to(dtype)
        return delta if dlse is None else delta - dlse

    @abstractmethod
    def backward(self, pieces: Sequence[Piece], x: BackwardInputs, gradients: Gradients, scale: float) -> None:
        """Add the pieces' part of the gradients."""
