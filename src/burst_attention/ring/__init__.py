"""Rings move bundles of tensors between ranks: processes over torch.distributed, or threads."""

from burst_attention.ring.base import Parcel, Pending, Ring, RingError, TraceEvent, TransferTime, ring_named
from burst_attention.ring.part import PartOfRing
from burst_attention.ring.threads import run_ranks

__all__ = [
    "Parcel",
    "PartOfRing",
    "Pending",
    "Ring",
    "RingError",
    "TraceEvent",
    "TransferTime",
    "ring_named",
    "run_ranks",
]
