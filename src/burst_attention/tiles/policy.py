"""Which implementation computes a piece on a GPU: one pure function over a table, each row with its reason.

Figures in reasons are from an H200, bf16, D = 128, H = 32 (docs/benchmarks.md); TFLOP/s unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

FLASH_CHIPS = {"FA3": (9,), "FA4": (9, 10)}
"""Major capabilities that torch lets what was activated under its flash operator run on; all, where none are listed."""
PLANNED_FOR = (9, 0), "FA4"
"""A chip and what is under torch's flash operator, where there is no GPU, as on a laptop that plans."""
STEADY_ROWS = 1024
STEADY_MULTIPLE = 128
FLASH_DIMS = 256


@dataclass(frozen=True)
class Case:
    """What the choice of an implementation for one piece hangs on."""

    phase: str
    kind: str
    """"full", "causal" (a square triangle) or "masked"."""
    q_count: int
    k_count: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    capability: tuple[int, int]
    flash: str
    """"FA2", what torch ships, or the name of what was activated in its place."""
    scale: float = 1.0
    deterministic: bool = False
    """Whether torch was asked for deterministic algorithms."""
    gluon: bool = True
    """Whether triton has what our Hopper kernels are written in."""

    @property
    def steady(self) -> bool:
        """Large and round: a shape that will come again, as whole shards and halves of them do."""
        return all(count >= STEADY_ROWS and count % STEADY_MULTIPLE == 0 for count in (self.q_count, self.k_count))

    @property
    def flash_runs(self) -> bool:
        """Whether what is under torch's flash operator runs on this chip: it takes FA2's place on every one."""
        return runs_on(self.flash, self.capability)

    @property
    def vendor(self) -> bool:
        """Whether any vendor kernel can serve it."""
        return self.kind != "masked" and self.half and self.steady and self.scale > 0 and self.capability >= (8, 0)

    @property
    def half(self) -> bool:
        return self.dtype in (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Row:
    """One line of the policy."""

    name: str
    when: Callable[[Case], bool]
    reason: str


CHOICES = (
    Row(
        "triton",
        lambda c: c.phase == "backward" and c.deterministic,
        "adds in one order, so that gradients are the same bits every time",
    ),
    Row(
        "flash",
        lambda c: c.vendor and c.flash not in ("FA2", "") and c.flash_runs and c.head_dim == c.value_dim
        and c.head_dim in (64, 128),
        "FA4 on 8192 x 8192: 717 forward, 609 backward with its sums; cuDNN 674 and 551, ours 673 and 565. A ring of 8 "
        "with 4096 tokens each takes 4.3 ms backward, on ours 5.3. Measured in bf16 and D = 128 alone",
    ),
    Row(
        "hopper",
        lambda c: c.phase == "backward" and c.gluon and c.half and c.capability == (9, 0) and c.scale > 0
        and c.head_dim == c.value_dim == 128,
        "565 on 8192 x 8192, 474 on 2048 x 2048, cuDNN's with its sums 551 and 377. A causal ring of 8 with 4096 "
        "tokens each takes 5.3 ms (GQA 4: 4.9), on cuDNN 5.4 (5.3); with 8192 20.1, on cuDNN 19.7 in more memory",
    ),
    Row(
        "cudnn",
        lambda c: c.vendor and c.capability >= (9, 0) and cudnn_takes(c.capability, c.head_dim, c.value_dim),
        "forward on 8192 x 8192, 8192 x 4096, 4096 x 2048: 674, 663, 624; ours 673, 639, 561; FlashAttention-2 takes "
        "1.9 times as long. Partials merge several at once. A new shape costs it 150 ms, so steady ones only",
    ),
    Row(
        "flash",
        lambda c: c.vendor and c.flash in ("FA2", "") and c.head_dim == c.value_dim and c.head_dim % 8 == 0
        and c.head_dim <= FLASH_DIMS and (c.phase == "forward" or flash2_trains(c.capability, c.head_dim)),
        "Ampere and Ada, for which FlashAttention-2 was written, and heads too wide for cuDNN: not measured here",
    ),
    Row(
        "triton",
        lambda c: True,
        "every mask, shape and dtype: 1.4 to 1.6 times FlexAttention forward, 1.1 to 1.4 backward; nothing is merged",
    ),
)  # fmt: skip


def cudnn_takes(capability: tuple[int, int], head_dim: int, value_dim: int) -> bool:
    """Head dims that torch's own choice goes to cuDNN with on a chip since Ampere: through aten nothing asks.

    On Hopper that has grown, to 256 with cuDNN 9.10; on Blackwell for data centers 192 beside 128 are an exception.
    """
    dims = head_dim, value_dim
    widest = 256 if capability == (9, 0) else 192 if capability[0] == 10 and dims == (192, 128) else 128
    return max(dims) <= widest and not any(dim % 8 for dim in dims)


def flash2_trains(capability: tuple[int, int], head_dim: int) -> bool:
    """Whether FlashAttention-2 has a backward there: on chips with little fast memory it raises for some heads."""
    small = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    return not (small and 192 < head_dim <= 224)


def runs_on(flash: str, capability: tuple[int, int]) -> bool:
    """Whether torch lets a version of flash run on a chip."""
    return flash not in FLASH_CHIPS or capability[0] in FLASH_CHIPS[flash]


def capability_of(device: torch.device | None) -> tuple[int, int] | None:
    """Of a GPU, or of the current one, also for those who ask for a CPU; None where there is none."""
    if device is not None and device.type == "cuda" and device.index is not None:
        return _known_capability(device.index)
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


@lru_cache(maxsize=64)
def _known_capability(number: int) -> tuple[int, int]:
    """It does not change, and is asked for with every piece."""
    return torch.cuda.get_device_capability(number)


def active_flash() -> str:
    """What serves torch's flash operator now."""
    from torch.nn import attention

    current = getattr(attention, "current_flash_attention_impl", None)
    return (current() if current else None) or "FA2"


def choose(case: Case) -> Row:
    """The first row that serves a piece."""
    return next(row for row in CHOICES if row.when(case))
