"""What the engine asks of a tile kernel: all pieces of a round in one call, results added into given tensors.

Shapes: B batch, H query heads, G key heads, S query rows, K key rows, D head dim, E value head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from burst_attention.geometry import Piece
from burst_attention.merge import State, finish
from burst_attention.schedule import Bundle, PhasePlan, Round
from burst_attention.tiles.accumulator import Accumulator, SumParts

GRADIENTS = ("dq", "dk", "dv")
DELTA_ENTRIES = 2**16
"""Of out and dout, that are held in fp64 at once."""


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
    """Where the gradients of q, k and v are added; None where one is not wanted."""

    dq: Accumulator | None
    dk: Accumulator | None
    dv: Accumulator | None


class TileKernel(ABC):
    """Computes pieces on one device. Tensors may be strided views; inputs are never written."""

    name: str
    defers = False
    """Whether forward takes a state with `deferred`: memory that is not cleared, partials that wait for `finish`."""

    def serves(self, piece: Piece) -> bool:
        """Whether it can compute a piece; kernels that serve only some are used by name."""
        return True

    @abstractmethod
    def workspace_bytes(self, phase: PhasePlan, step: Round, visiting: Bundle | None) -> int:
        """Bytes that the kernel allocates for itself, at most at once, to compute a round on one device.

        `visiting` is what results of visitors are computed in; None where nobody visits.
        """

    @abstractmethod
    def forward(self, pieces: Sequence[Piece], q: Tensor, k: Tensor, v: Tensor, state: State, scale: float) -> None:
        """Add the pieces' keys to the state of q's rows. `scale` multiplies the scores."""

    def finish(self, state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out, lse) of a state that has seen all its keys; the state is used up."""
        return finish(state, dtype)

    def open_heads(self, state: State, count: int, dtype: torch.dtype, coming: int) -> None:
        """Make room to finish the first heads of a state that defers, and for the last partials that are coming."""
        raise AssertionError(f"kernel {self.name!r} does not defer")

    def finish_heads(self, state: State) -> None:
        """Finish a state that is these heads; `finish` does the rest. Allocates nothing."""
        raise AssertionError(f"kernel {self.name!r} does not defer")

    def row_delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
        """(B, H, S): rowsum(out * dout) - dlse, which is all that backward needs to know of out."""
        # Where a row sees few keys, dq is what is left after delta cancels: fp64 sums keep that difference.
        precise = torch.float64 if out.device.type == "cpu" else dtype
        batch, heads, rows, dim = out.shape
        delta = torch.empty(batch, heads, rows, dtype=dtype, device=out.device)
        # In parts on a CPU alone, for fp64; on a GPU each would be a launch.
        entries = DELTA_ENTRIES if out.device.type == "cpu" else out.numel()
        step = max(entries // max(batch * heads * dim, 1), 1)
        for first in range(0, rows, step):
            part = slice(first, first + step)
            delta[:, :, part] = torch.linalg.vecdot(out[:, :, part].to(precise), dout[:, :, part].to(precise))
        return delta if dlse is None else delta - dlse

    def facts(self, device: torch.device | None = None) -> tuple[Hashable, ...]:
        """What its choices hang on apart from the call: of the chip, and of what is installed and switched on."""
        return ()

    def gives_parts(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        """Whether what a round gives is laid aside, or added to by all at once: nothing waits for another round.

        In backward gradients of visitors then come in the dtype of the inputs, rounded once.
        """
        return False

    def one_launch(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        """Whether on a GPU all pieces of a round are one launch."""
        return False

    def partials(self, phase: PhasePlan, step: Round, scale: float) -> int:
        """How many a round of forward leaves for a head, where it leaves some."""
        return len(step.pieces)

    def leaves_room(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        """Whether on a GPU a round's kernels give up parts of the chip before they end, for passes over memory."""
        return True

    sum_parts: SumParts | None = None
    """How several parts of a gradient are added in one pass, for kernels that let them wait."""

    @property
    def parts_wait(self) -> bool:
        """Whether parts of gradients wait to be added together."""
        return self.sum_parts is not None

    def copy(self, target: Tensor, source: Tensor, beside: bool = False) -> None:
        """Copy (B, H, S, D) or (B, H, S) into another order of memory, maybe `beside` something that computes."""
        target.copy_(source)

    @abstractmethod
    def backward(self, pieces: Sequence[Piece], x: BackwardInputs, gradients: Gradients, scale: float) -> None:
        """Add the pieces' part of the gradients."""
