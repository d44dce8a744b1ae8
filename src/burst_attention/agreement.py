"""The agreement: before the first hop every rank learns what every other was called with, and all decide alike."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from burst_attention.options import Options
from burst_attention.ring import Ring
from burst_attention.schedule import Shapes

Lengths = tuple[tuple[int, ...], tuple[int, ...]]


class Agreed(NamedTuple):
    """What ranks learn from each other."""

    lengths: Lengths
    """The tokens of q, and of k, that every rank holds."""
    tiles_alike: bool
    """Whether all ranks' kernels choose alike: not on GPUs that differ."""


FIELDS = (
    "phase", "batch", "heads", "kv_heads", "head_dim", "value_dim", "dtype", "device", "requires_grad",
    "mask", "layout", "key_layout", "scale", "direction", "options", "check",
)  # fmt: skip
"""What must be equal on all ranks, in the order in which differences are told."""

MOST_AGREED = 1024
"""Calls that check="first" remembers: documents may differ every step."""

REMEDY = "every rank must make the same call"


@dataclass(frozen=True)
class LocalCall:
    """What one rank was called with: all of it but the contents of the tensors."""

    phase: str
    shapes: Shapes
    device_type: str
    query_tokens: int
    key_tokens: int
    options: Options
    needs: str
    tiles: str = ""
    """What this rank's kernel chooses by, apart from the call."""

    def record(self) -> dict[str, Any]:
        """The fixed fields that cross the control channel."""
        shapes, options = self.shapes, self.options
        names = {
            "kernel": "kernel", "wire_dtype": "wire_dtype", "return_lse": "returns_lse", "coalesce": "coalesce",
            "ranks per host": "per_host", "head_groups": "head_groups", "heads": "head_degree",
            "results": "results",
        }  # fmt: skip
        rest = " ".join(f"{name}={getattr(options, field)}" for name, field in names.items())
        return {
            "phase": self.phase,
            "batch": shapes.batch,
            "heads": shapes.heads,
            "kv_heads": shapes.kv_heads,
            "head_dim": shapes.head_dim,
            "value_dim": shapes.value_dim,
            "dtype": str(shapes.dtype).removeprefix("torch."),
            "device": self.device_type,
            "requires_grad": self.needs,
            "mask": shorten(options.mask),
            "layout": shorten(options.layout),
            "key_layout": shorten(str(options.key_layout)),
            "scale": options.scale,
            "direction": f"{options.direction}, forward {options.forward_direction}",
            "options": rest,
            "check": options.check,
            "query_tokens": self.query_tokens,
            "key_tokens": self.key_tokens,
            "tiles": self.tiles,
        }


def agree(ring: Ring, call: LocalCall) -> Agreed:
    """What there is to learn, after all ranks were found to make the same call."""
    ring.next_call()
    options = call.options
    known: Agreed | None = ring.agreed.get(call)
    if options.check == "first" and known is not None:
        return known
    if options.check == "off":
        return Agreed(options.lengths(ring.size), True)
    records = ring.exchange(call.record(), f"{call.phase} agreement")
    error = find_disagreement(records)
    if error is not None:
        raise ValueError(error)
    lengths = tuple(r["query_tokens"] for r in records), tuple(r["key_tokens"] for r in records)
    agreed = Agreed(lengths, len({record.get("tiles") for record in records}) == 1)
    if options.check == "first":
        if len(ring.agreed) >= MOST_AGREED:
            # All ranks made the same calls, so all forget at the same one.
            ring.agreed.clear()
        ring.agreed[call] = agreed
    return agreed


def refuse(ring: Ring, error: Exception, check: object) -> ValueError:
    """The error that every rank raises because this one, at least, was called wrongly."""
    if ring.size == 1:
        return ValueError(str(error))
    if check in ("first", "off"):
        # The others may not be listening for records: tell them and do not wait for theirs.
        ring.abort(f"rank {ring.rank} was called wrongly: {error}")
        return ValueError(str(error))
    ring.next_call()
    record = {"phase": "forward", "error": str(error)}
    found = find_disagreement(ring.exchange(record, "forward agreement"))
    return ValueError(found or str(error))


def find_disagreement(records: Sequence[dict[str, Any]]) -> str | None:
    """The first difference between the ranks' records as one sentence, the same on every rank; None if they agree."""
    for rank, record in enumerate(records):
        if "error" in record:
            return f"rank {rank} was called wrongly: {record['error']}" if len(records) > 1 else record["error"]
    for name in FIELDS:
        values: dict[str, list[int]] = {}
        for rank, record in enumerate(records):
            values.setdefault(repr(record.get(name)), []).append(rank)
        if len(values) > 1:
            parts = (f"{_ranks(ranks)} {value}" for value, ranks in values.items())
            return f"ranks disagree on {name}: {', '.join(parts)}; {REMEDY}"
    for rank, record in enumerate(records):
        if not all(isinstance(record.get(name), int) for name in ("query_tokens", "key_tokens")):
            return f"rank {rank} sent a record without its number of tokens; {REMEDY}"
    return None


def shorten(text: str, limit: int = 80) -> str:
    """Long texts keep their beginning and get a digest, so that they compare and print in a fixed record."""
    if len(text) <= limit:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text[: limit - 20]}... #{digest}"


def shapes_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Shapes:
    """Shapes from a call's q (B, H, S, D), k (B, G, K, D) and v (B, G, K, E)."""
    return Shapes(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
