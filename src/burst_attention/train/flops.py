"""How many floating-point operations a step asks for, and how many a device can do: the two ends of MFU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

PEAK_FLOPS = {
    ("H200", "bfloat16"): 989e12,
    ("H100", "bfloat16"): 989e12,
    ("A100", "bfloat16"): 312e12,
}
"""Dense peaks as the makers give them, by a part of the device's name; MFU is said of no other device."""


def step_flops(shape: Any, parameters: int, sequences: Sequence[Sequence[int]], window: int | None = None) -> float:
    """Operations of a step, forward and backward, nothing recomputed: 6 per weight and token, 12 per pair and feature.

    The embedding's rows are looked up, not multiplied. `sequences` are the lengths of each sequence's documents.
    """
    tokens = sum(sum(documents) for documents in sequences)
    weights = parameters - (0 if getattr(shape, "tie_word_embeddings", False) else shape.vocab_size * shape.hidden_size)
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    features = shape.num_hidden_layers * shape.num_attention_heads * head_dim
    pairs = sum(causal_pairs(length, window) for documents in sequences for length in documents)
    return float(6 * weights * tokens + 12 * features * pairs)


def causal_pairs(tokens: int, window: int | None) -> int:
    """Pairs of a token and one that it sees: itself and those before it, as far as a window reaches."""
    reach = min(window or tokens, tokens)
    return reach * (reach + 1) // 2 + (tokens - reach) * reach


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """What a device can do; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for (part, kind), peak in PEAK_FLOPS.items() if part in name and kind == dtype), None)
