"""A decoder of two layers that calls scaled_dot_product_attention itself, and its loss and gradients on one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, HEADS, KV_HEADS = 29, 16, 4, 2
TOKENS = 37
MICRO_BATCHES, REPLICAS = 2, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * self.head_dim)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """`recompute` is what its layers' checkpoints are given as use_reentrant; None has no checkpoints."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.recompute = recompute
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        """The sum over this rank's tokens of the loss per token of a whole sequence."""
        x = self.embed(ids) + self.place(positions)
        for layer in self.layers:
            x = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=self.recompute)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum") / (TOKENS - 1)


def batch(micro: int, replica: int) -> tuple[Tensor, Tensor, Tensor]:
    """(1, TOKENS) each: ids, positions, and labels shifted beforehand."""
    ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(10 * micro + replica))
    labels = functional.pad(ids[:, 1:], (0, 1), value=-100)
    return ids, torch.arange(TOKENS)[None], labels


def alone(replicas: int = REPLICAS) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses of every micro-batch and replica, and gradients of their mean, on one process."""
    model = Decoder()
    losses = [[model(*batch(micro, replica)) for replica in range(replicas)] for micro in range(MICRO_BATCHES)]
    (sum(sum(row) for row in losses) / (MICRO_BATCHES * replicas)).backward()  # type: ignore[union-attr]
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return [[loss.item() for loss in row] for row in losses], {name: g for name, g in found.items() if g is not None}
