"""Ten minutes on a laptop: from one call of attention to a model that trains on a sequence no rank holds whole.

Read it from top to bottom and run it with `.venv/bin/python examples/tutorial.py`; every step prints what it found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from burst_attention import Layout, Ring, burst_attention, causal, documents, plan, run_ranks, window
from burst_attention.integrations.checkpointing import keep_attention
from burst_attention.integrations.transformers import enable, shard_batch

TOKENS, RANKS = 1000, 4


def step_1_attention() -> None:
    """Four ranks share 1000 tokens; each calls attention with its own shard and gets its own rows."""
    q, k, v = (torch.randn(1, heads, TOKENS, 64) for heads in (8, 2, 2))
    layout = Layout.zigzag(TOKENS, RANKS)

    def attend(ring: Ring) -> Tensor:
        mine = [layout.shard(x, ring.rank, dim=2) for x in (q, k, v)]
        return burst_attention(*mine, ring=ring, mask=causal(), layout=layout)

    # Ranks are threads here; in a job they are processes, and the ring is Ring.from_group().
    out = layout.unshard(run_ranks(attend, RANKS), dim=2)
    whole = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    print(f"1. four ranks against one device: largest difference {(out - whole).abs().max():.1e}")


def step_2_plan() -> None:
    """What a call would move and hold is known before it runs. A narrow mask moves little."""
    shapes: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 64}
    for name, mask in (("causal", causal()), ("a window of 64", causal() & window(64))):
        made = plan(65536, RANKS, mask=mask, layout="contiguous", **shapes)
        print(f"2. {name}: rank 1 sends {made.bytes_sent(1, 'forward') / 1e6:.2f} MB in forward")


def step_3_documents() -> None:
    """Packed documents need no padding: a mask keeps them apart, and `Layout.best` shares the work evenly."""
    mask = causal() & documents([700, 200, 100])
    layout = Layout.best(TOKENS, RANKS, mask)
    made = plan(TOKENS, RANKS, heads=8, head_dim=64, mask=mask, layout=layout)
    print(f"3. {layout.name} is the layout for these documents; the busiest rank has {made.imbalance:.1%} more")


def step_4_model() -> None:
    """A transformers model on the ring. Layers are recomputed in backward, attention is not."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=97, num_key_value_heads=2, max_position_embeddings=TOKENS, **shape)
    weights = LlamaForCausalLM(config).state_dict()
    ids = torch.randint(0, 97, (1, TOKENS))

    def train_step(ring: Ring) -> tuple[float, Tensor]:
        model: Any = LlamaForCausalLM(config)
        model.load_state_dict(weights)
        enable(model, ring=ring)
        recompute = {"use_reentrant": False, "context_fn": keep_attention()}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=recompute)
        batch = shard_batch({"input_ids": ids, "documents": [700, 300]}, Layout.zigzag(TOKENS, ring.size), ring.rank)
        loss = model.train()(**batch, use_cache=False).loss
        loss.backward()
        return loss.item(), model.model.embed_tokens.weight.grad

    many, one = run_ranks(train_step, RANKS), run_ranks(train_step, 1)
    # A rank's loss is its part of the mean, so losses and gradients of all ranks are summed.
    gradient = sum(part[1] for part in many)
    difference = (gradient - one[0][1]).norm() / one[0][1].norm()
    print(f"4. loss {sum(part[0] for part in many):.6f} on four ranks, {one[0][0]:.6f} on one")
    print(f"   gradient of the embedding: relative difference {difference:.1e}")


def main() -> None:
    torch.manual_seed(0)
    step_1_attention()
    step_2_plan()
    step_3_documents()
    step_4_model()
    print("5. now train: `burst train`, or `burst train --tokens 16384 --data your-texts/` (docs/training.md)")


if __name__ == "__main__":
    main()
