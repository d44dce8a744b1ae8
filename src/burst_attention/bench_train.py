"""`burst bench train`: what chunked loss and selective checkpointing are worth on one GPU, at lengths that need them.

The model has Llama-3.2-1B's shape, bf16 weights and AdamW; the ring has one rank, so attention is the kernel alone. A
step is forward, backward and update of one sequence.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from burst_attention.bench import append_rows, machine
from burst_attention.integrations.batch import shard_batch
from burst_attention.layout import Layout
from burst_attention.ring import Ring, run_ranks
from burst_attention.train.config import TrainConfig
from burst_attention.train.flops import step_flops
from burst_attention.train.model import TrainedModel

SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
WARM_UP_TOKENS = 8192
DEVICE = "cuda"


@dataclass(frozen=True)
class Variant:
    """One row of the ablation."""

    name: str
    chunked_loss: bool
    checkpointing: str
    mlp_chunks: int = 1
    keep_last: float = 1.0


BASELINE = Variant("full recomputation, whole logits", False, "full")
CHUNKED = Variant("+ chunked loss", True, "full")
SELECTIVE = Variant("+ selective checkpointing", True, "selective")
HALF = Variant("+ of the last half alone", True, "selective", keep_last=0.5)
NARROW = Variant("+ MLP in 8 parts", True, "selective", 8)
CASES = (
    (32768, (BASELINE, CHUNKED, SELECTIVE)),
    (131072, (BASELINE, CHUNKED, SELECTIVE, NARROW, HALF)),
    (262144, (CHUNKED, SELECTIVE, NARROW)),
    (524288, (NARROW,)),
)


def bench_train(repeat: int, output: str | None, only: str | None = None) -> None:
    """Measure every case and print its rows as they come; `only` is one length, or one variant's name."""
    parts = dict.fromkeys(str(name) for tokens, variants in CASES for name in (tokens, *(v.name for v in variants)))
    if only not in (None, *parts):
        raise ValueError(f"--only takes one of {', '.join(map(repr, parts))}, got {only!r}")
    if not torch.cuda.is_available():
        raise ValueError("bench train needs a GPU that torch can use, and there is none here")
    for tokens, variants in CASES:
        for variant in variants:
            if only and only not in (str(tokens), variant.name):
                continue
            row = run_ranks(partial(measure, tokens=tokens, variant=variant, repeat=repeat), 1, timeout=3600)[0]
            print(json.dumps(row), flush=True)
            append_rows(output, [row])


def measure(ring: Ring, tokens: int, variant: Variant, repeat: int) -> dict[str, Any]:
    """One row: seconds and peak memory of a step, or that it does not fit."""
    row = {"suite": "train-ablation", "tokens": tokens, "variant": variant.name, **machine()}
    row["gpu"] = torch.cuda.get_device_name()
    try:
        return row | dict(_steps(ring, tokens, variant, repeat))
    except torch.OutOfMemoryError:
        return row | {"fits": False}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _steps(ring: Ring, tokens: int, variant: Variant, repeat: int) -> Iterator[tuple[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device(DEVICE)
    config = TrainConfig(
        tokens=tokens,
        mask="causal",
        checkpointing=variant.checkpointing,
        mlp_chunks=variant.mlp_chunks,
        keep_last=variant.keep_last,
    )
    torch.manual_seed(0)
    shape = AutoConfig.for_model("llama", **SHAPE, max_position_embeddings=tokens)
    with device:
        inner = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model = TrainedModel(inner, ring, config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(count: int) -> Tensor:
        batch = _batch(count, device)
        loss: Tensor = model(batch) if variant.chunked_loss else inner(**batch, use_cache=False).loss
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step(WARM_UP_TOKENS)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeat):
        started = time.perf_counter()
        loss = step(tokens)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    parameters = sum(p.numel() for p in inner.parameters())
    flops = step_flops(shape, parameters, [[tokens]])
    yield from {
        "fits": True, "seconds": round(median, 3), "seconds_all": [round(s, 3) for s in seconds],
        "tokens_per_s": round(tokens / median), "model_tflops": round(flops / median / 1e12, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2), "loss": round(float(loss), 5),
        "parameters": parameters,
    }.items()  # fmt: skip


def _batch(tokens: int, device: torch.device) -> dict[str, Any]:
    ids = torch.randint(0, SHAPE["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(tokens))
    batch = shard_batch({"input_ids": ids}, Layout.contiguous(tokens, 1), 0)
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}
