"""Attention over a sequence spread on four ranks, forward and backward, on any machine with torch."""

import torch

from burst_attention import Layout, burst_attention, causal, run_ranks

tokens, ranks = 1000, 4
q, k, v = (torch.randn(1, heads, tokens, 64) for heads in (8, 2, 2))
layout = Layout.zigzag(tokens, ranks)


def attend(ring):
    mine = [layout.shard(x, ring.rank, dim=2).requires_grad_() for x in (q, k, v)]
    out = burst_attention(*mine, ring=ring, mask=causal(), layout=layout)
    out.sum().backward()
    return out.detach()


out = layout.unshard(run_ranks(attend, ranks), dim=2)
whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
print("largest difference from one device:", (out - whole).abs().max().item())
