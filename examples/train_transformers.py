"""A transformers model trained on a sequence that two processes share, against one process on the whole sequence.

Run it with `.venv/bin/python examples/train_transformers.py`; it takes some seconds on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from burst_attention import Layout, Ring
from burst_attention.integrations.transformers import enable, shard_batch
from burst_attention.launch import run_processes

TOKENS, RANKS, STEPS = 257, 2, 5
DOCUMENTS = (100, 57, 100)


def make_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=TOKENS,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(ring: Ring) -> list[float]:
    """The losses of a few steps; every rank holds the weights, and a shard of the tokens."""
    model = enable(make_model(), ring=ring)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    layout = Layout.zigzag(TOKENS, ring.size)
    ids = torch.randint(0, 97, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(STEPS):
        batch = shard_batch({"input_ids": ids, "documents": DOCUMENTS}, layout, ring.rank)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        # A rank's loss is its part of the mean, so gradients, and losses, are summed.
        total = loss.detach()
        for x in (total, *(p.grad for p in model.parameters())):
            dist.all_reduce(x)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def main() -> None:
    sharded, whole = run_processes(train, RANKS)[0], run_processes(train, 1)[0]
    print(f"{'step':>4} {'one process':>12} {f'{RANKS} ranks':>12} {'difference':>12}")
    for step, (one, many) in enumerate(zip(whole, sharded, strict=True), 1):
        print(f"{step:>4} {one:12.6f} {many:12.6f} {abs(one - many):12.1e}")
    assert all(abs(one - many) <= 1e-5 * one for one, many in zip(whole, sharded, strict=True))


if __name__ == "__main__":
    main()
