"""Measure what docs and comments say in passing, and keep it as rows: `python benchmarks/claims.py`."""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from burst_attention import plan
from burst_attention.bench import machine
from burst_attention.exactness import Problem, judge, truth

RESULTS = Path(__file__).parent / "results" / "claims.jsonl"
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def best_seconds(run: Callable[[], object], repeat: int = 7) -> float:
    """The quickest of some runs, after one to warm up."""
    run()
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def rows_of_tokens(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v (1, 8, 1024, 64) as views of rows that hold all of a token, as a visiting block has them."""
    block = torch.randn(1024, 3, 8, 64).to(dtype)
    return [block[:, index].permute(1, 0, 2).unsqueeze(0) for index in range(3)]


def scattered_rows() -> str:
    strided = rows_of_tokens()
    dense = [x.contiguous() for x in strided]
    return f"{best_seconds(lambda: FLASH(*strided)) / best_seconds(lambda: FLASH(*dense)):.2f} times the time"


def half_precision() -> str:
    single, half = ([x.contiguous() for x in rows_of_tokens(dtype)] for dtype in (torch.float32, torch.float16))
    return f"{best_seconds(lambda: FLASH(*half), 2) / best_seconds(lambda: FLASH(*single)):.1f} times the time"


def bf16_backward() -> str:
    q, k, v = (x.contiguous() for x in rows_of_tokens(torch.bfloat16))
    out, lse = FLASH(q, k, v)
    half = best_seconds(lambda: FLASH_BACKWARD(out, q, k, v, out, lse, 0.0, False))
    wide = best_seconds(lambda: FLASH_BACKWARD(*(x.float() for x in (out, q, k, v, out)), lse, 0.0, False))
    return f"{half / wide:.1f} times the time"


def lse_ulp(dtype: torch.dtype) -> str:
    problem = Problem(1000, "causal()", 4, 4, 64, dtype)
    finding = next(found for found in judge(problem, truth(problem)[1]) if found.name == "lse")
    return f"{finding.largest:.1f} ulp at worst"


def peak_shards(tokens: int, direction: str, coalesce: int = 1) -> str:
    made = plan(4 * tokens, 4, heads=8, head_dim=64, dtype=torch.float32, direction=direction, coalesce=coalesce)
    return f"{made.peak_bytes(1) / (8 * tokens * 64 * 4):.1f} shards of q"


def slowest_core(together: int, heads: int = 16, blocks: int = 32, cores: int = 132) -> str:
    """Of a backward triangle in blocks of 128 keys, `together` heads at once: their longest blocks first, then shorter.

    Steps of 128 x 128; a core that is through with a block begins the next one.
    """
    busy = [0] * cores
    for _ in range(heads // together):
        for steps in range(blocks, 0, -1):
            for _ in range(together):
                heapq.heappush(busy, heapq.heappop(busy) + steps)
    return f"{max(busy)} steps, {sum(busy) / cores:.0f} on average"


CLAIMS: dict[str, Callable[[], str]] = {
    "torch's CPU flash operator on rows of all fields against dense rows, fp32": scattered_rows,
    "torch's CPU flash operator in fp16 against fp32": half_precision,
    "backward of torch's CPU flash operator in bf16 against fp32 with its casts": bf16_backward,
    "lse of torch's CPU flash operator, bf16, T=1000, D=64, causal": lambda: lse_ulp(torch.bfloat16),
    "lse of torch's CPU flash operator, fp32, T=1000, D=64, causal": lambda: lse_ulp(torch.float32),
    "planned peak of backward, W=4, S=1024, fp32 MHA, key side": lambda: peak_shards(1024, "kv"),
    "planned peak of backward, W=4, S=1024, fp32 MHA, query side": lambda: peak_shards(1024, "query"),
    "planned peak of backward, W=4, S=16384, fp32 MHA, query side": lambda: peak_shards(16384, "query"),
    "planned peak of backward, W=4, S=1024, fp32 MHA, query side, coalesce=2": lambda: peak_shards(1024, "query", 2),
    "planned peak of backward, W=4, S=16384, fp32 MHA, query side, coalesce=2": lambda: peak_shards(16384, "query", 2),
    "slowest of 132 cores, 16 triangles of 4096 x 4096 head by head": lambda: slowest_core(1),
    "slowest of 132 cores, 16 triangles of 4096 x 4096, 8 together": lambda: slowest_core(8),
    "slowest of 132 cores, 8 triangles of 4096 x 4096 head by head": lambda: slowest_core(1, heads=8),
    "slowest of 132 cores, 8 triangles of 4096 x 4096, all together": lambda: slowest_core(8, heads=8),
}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as file:
        for claim, measure in CLAIMS.items():
            row = {"suite": "claims", "claim": claim, "measured": measure(), **machine()}
            print(f"{claim}: {row['measured']}", flush=True)
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
