"""The logits of an LM head without the logits: statistics of their rows, a chunk at a time."""

from burst_attention.logits.chunks import accumulate_dtype, head_gradients, head_statistics
from burst_attention.logits.rows import ENTROPY, LABEL, LSE, MEAN, LogitOptions

__all__ = ["ENTROPY", "LABEL", "LSE", "MEAN", "LogitOptions", "accumulate_dtype", "head_gradients", "head_statistics"]
