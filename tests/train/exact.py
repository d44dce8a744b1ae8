"""What sharded training is held against: the same run in one process, written with torch and transformers alone.

Weights, data and the schedule of the learning rate are the trainer's own. Labels, masks, the loss, the sum of
gradients, clipping and the optimiser are not: a dense mask, whole logits, torch's own cross entropy, clip_grad_norm_
and AdamW.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from burst_attention import Ring
from burst_attention.launch import run_processes
from burst_attention.train.config import TrainConfig
from burst_attention.train.data import load_data, load_tokenizer
from burst_attention.train.loop import Trainer, learning_rate
from burst_attention.train.model import make_model
from burst_attention.train.parallel import make_ranks

# FSDP2 and transformers import these at their first use: once here is cheaper than in every forked rank.
for _module in ("torch._dynamo", "transformers.models.llama.modeling_llama"):
    importlib.import_module(_module)

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    # With the usual 0.02 so small a model hardly attends: wrong positions would change its loss by 1e-5 only.
    "initializer_range": 0.2,
}
LOSS, PARAMETERS = 1e-5, 1e-4
"""How far sharded training may be from unsharded: every step's loss, relative, and every tensor, by relative norm."""
BETAS, EPSILON, DECAY = (0.9, 0.95), 1e-8, 0.1


@dataclass(frozen=True)
class Trained:
    """A run: the loss and the norm of all gradients before clipping of every step, and the weights after the last."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Apart:
    """The largest relative differences between two runs."""

    loss: float
    norm: float
    weights: float
    worst: str


def tiny(folder: Path, **changes: Any) -> TrainConfig:
    """Settings of a run that takes milliseconds a step; `shape` changes the model's."""
    shape = json.dumps({**TINY, **changes.pop("shape", {})})
    given: dict[str, Any] = {"model_config": shape, "data": str(texts(folder)), "out": str(folder / "run")}
    return TrainConfig(**{**given, "tokens": 61, "warmup": 2, "device": "cpu", **changes})


def texts(folder: Path) -> Path:
    """Documents of 1 to 40 tokens, so that every sequence has several, some cut by shards' edges, some ending there."""
    path = folder / "texts.jsonl"
    if not path.exists():
        chance = random.Random(0)
        lines = ["".join(chance.choices("abcdefgh ", k=chance.randrange(40))) or "a" for _ in range(400)]
        path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def allowed_pairs(config: TrainConfig, documents: tuple[int, ...]) -> Tensor:
    """Which key each query may see, (T, T), written as the words of the settings say it."""
    i, j = torch.arange(config.tokens)[:, None], torch.arange(config.tokens)[None]
    allowed = i >= j
    if "documents" in config.mask:
        ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
        allowed = allowed & (ids[:, None] == ids[None])
    return allowed & (i - j < config.window) if "window" in config.mask else allowed


def next_tokens(config: TrainConfig, ids: Tensor, documents: tuple[int, ...]) -> Tensor:
    """Every token's label, (T,), one after the other."""
    ends = {sum(documents[: n + 1]) - 1 for n in range(len(documents))} if "documents" in config.mask else set()
    last = config.tokens - 1
    return torch.tensor([-100 if at == last or at in ends else int(ids[at + 1]) for at in range(config.tokens)])


class Plain:
    """The unsharded run, step by step."""

    def __init__(self, config: TrainConfig) -> None:
        tokenizer = load_tokenizer(config.tokenizer)
        self.model = make_model(config, tokenizer.vocab_size).train()
        self.model.set_attn_implementation("sdpa")
        self.config, self.dtype = config, getattr(torch, config.dtype)
        self.data = load_data(config.data, tokenizer, config.tokens, config.seed)
        weights = list(self.model.parameters())
        groups = [
            {"params": [w for w in weights if w.dim() > 1], "weight_decay": DECAY},
            {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON)

    def gradients(self, step: int) -> float:
        """Sum the gradients of a step's mean loss; gives the loss."""
        per_step = self.config.accumulate * self.config.dp
        packed = [self.data.sequence(step * per_step + index) for index in range(per_step)]
        labels = [next_tokens(self.config, each.input_ids, each.documents) for each in packed]
        count = sum(int((each != -100).sum()) for each in labels)
        total = 0.0
        for each, expected in zip(packed, labels, strict=True):
            allowed = allowed_pairs(self.config, each.documents)
            bias = torch.zeros(allowed.shape, dtype=self.dtype).masked_fill(~allowed, float("-inf"))[None, None]
            # As FSDP2 does it: weights are kept in fp32 and cast for every use.
            cast = {name: weight.to(self.dtype) for name, weight in self.model.named_parameters()}
            given = {"input_ids": each.input_ids[None], "attention_mask": bias, "use_cache": False}
            logits = torch.func.functional_call(self.model, cast, kwargs=given).logits[0].float()
            loss = torch.nn.functional.cross_entropy(logits, expected, reduction="sum") / count
            loss.backward()
            total += loss.item()
        return total

    def step(self, step: int) -> tuple[float, float]:
        """Train; gives the loss and the norm of the gradients."""
        loss = self.gradients(step)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm.item()

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.model.named_parameters()}


def unsharded(config: TrainConfig) -> Trained:
    """The run in one process; runs that differ only in how ranks share the work are the same one."""
    alike = {
        "cp": 1,
        "tp": 1,
        "dp": 1,
        "heads": 1,
        "hosts": 0,
        "layout": "zigzag",
        "checkpointing": "none",
        "offload": False,
    }
    whole = replace(config, accumulate=config.accumulate * config.dp, mlp_chunks=1, compile=False, **alike)
    return _unsharded(whole)


@lru_cache(maxsize=64)
def _unsharded(config: TrainConfig) -> Trained:
    def body(ring: Ring) -> Trained:
        plain = Plain(config)
        losses, norms = zip(*(plain.step(step) for step in range(config.steps)), strict=True)
        return Trained(list(losses), list(norms), plain.weights())

    return run_processes(body, 1)[0]


def sharded(config: TrainConfig, prepare: Callable[[Trainer], None] = lambda trainer: None) -> Trained:
    """The run of `burst train`'s own trainer, in one process per rank; `prepare` may look into it before it starts."""
    ranks = config.dp * config.cp * config.tp

    def body(ring: Ring) -> Trained:
        trainer = Trainer(config, make_ranks(config, torch.device("cpu")))
        prepare(trainer)
        records = []
        for _ in range(config.steps):
            records.append(trainer._train_step())
            trainer.step += 1
        weights = {name: full(weight) for name, weight in trainer.model.model.named_parameters()}
        return Trained([each.loss for each in records], [each.grad_norm for each in records], weights)

    runs = run_processes(body, ranks, timeout=900, ring_timeout=300)
    for rank, other in enumerate(runs[1:], start=1):
        # Not to the last bit: ranks of tp each compute what they have in common, and products may round differently.
        difference = apart(other, runs[0])
        assert max(difference.loss, difference.norm) <= LOSS and difference.weights <= PARAMETERS, (
            f"ranks 0 and {rank} are apart by {difference}: {runs[0].losses} and {other.losses}"
        )
    return runs[0]


def full(weight: Tensor) -> Tensor:
    whole: Tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return whole.detach().clone()


def apart(found: Trained, expected: Trained) -> Apart:
    """How far two runs are from each other."""

    def largest(a: list[float], b: list[float]) -> float:
        return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))

    assert found.weights.keys() == expected.weights.keys()
    weights = {name: distance(found.weights[name], weight) for name, weight in expected.weights.items()}
    worst = max(weights, key=weights.__getitem__)
    return Apart(largest(found.losses, expected.losses), largest(found.norms, expected.norms), weights[worst], worst)


def distance(found: Tensor, expected: Tensor) -> float:
    """The relative norm of a difference."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def require_same(found: Trained, expected: Trained) -> None:
    """Loss and norm of every step and the weights after the last."""
    difference = apart(found, expected)
    assert difference.loss <= LOSS and difference.norm <= LOSS and difference.weights <= PARAMETERS, difference
