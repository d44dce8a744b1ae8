"""Exact attention over sequences that no single device can hold."""

from burst_attention.api import burst_attention, plan
from burst_attention.layout import Layout
from burst_attention.loss import linear_cross_entropy, linear_log_probs
from burst_attention.mask import Mask, blocks, causal, documents, full, parse_mask, prefix, window
from burst_attention.ring import Ring, RingError, run_ranks
from burst_attention.schedule import Plan
from burst_attention.version import __version__

__all__ = [
    "Layout",
    "Mask",
    "Plan",
    "Ring",
    "RingError",
    "__version__",
    "blocks",
    "burst_attention",
    "causal",
    "documents",
    "full",
    "linear_cross_entropy",
    "linear_log_probs",
    "parse_mask",
    "plan",
    "prefix",
    "run_ranks",
    "window",
]
