"""What the engine asks of a tile kernel: all pieces of a round in one call, results added into given tensors.

Shapes: B batch, H query heads, G key heads, S query rows, K key rows, D head dim, E value head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from burst_attention.geometry import Piece
from burst_attention.merge import State
from burst_attention.schedule import PhasePlan, Round


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


class Gradients(NamedTuple):
    """Accumulators (B, H, S, D), (B, G, K, D), (B, G, K, E) to add to; None where a gradient is not wanted."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


class TileKernel(ABC):
    """Computes pieces on one device. Tensors may be strided views; inputs are never written."""

    name: str

    @abstractmethod
    def workspace_bytes(self, phase: PhasePlan, step: Round, visiting: bool) -> int:
        """Bytes that the kernel allocates for itself, at most at once, to compute a round on one device."""

    @abstractmethod
    def forward(self, pieces: Sequence[Piece], q: Tensor, k: Tensor, v: Tensor, state: State, scale: float) -> None:
        """Add the pieces' keys to the state of q's rows. `scale` multiplies the scores."""

    @abstractmethod
    def backward(self, pieces: Sequence[Piece], x: BackwardInputs, gradients: Gradients, scale: float) -> None:
        """Add the pieces' part of the gradients."""
