"""Every GPU kernel of ours once, on small odd tiles: `make sanitize` runs this under compute-sanitizer."""

from __future__ import annotations

import torch

from burst_attention import Ring, burst_attention, causal, documents, run_ranks, window

CASES = (
    (torch.bfloat16, 128, causal() & documents([70, 130, 57])),
    (torch.float16, 64, causal() & window(40)),
    (torch.float32, 32, causal()),
)


def attend(ring: Ring, dtype: torch.dtype, dim: int, mask: object) -> None:
    """Forward and backward of one rank's shard, GQA, with our own kernel."""
    torch.manual_seed(ring.rank)
    tokens = (129, 128)[ring.rank]
    q, k, v = (torch.randn(1, heads, tokens, dim, device="cuda", dtype=dtype) for heads in (2, 1, 1))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for direction in ("kv", "query"):
        out = burst_attention(
            *leaves, ring=ring, mask=mask, kernel="triton", direction=direction, forward_direction=direction
        )
        gradients = torch.autograd.grad(out.sum(), leaves)
        assert all(x.isfinite().all() for x in (out, *gradients))


def main() -> None:
    for dtype, dim, mask in CASES:
        run_ranks(lambda ring, case=(dtype, dim, mask): attend(ring, *case), 2, timeout=300)  # type: ignore[misc]
        torch.cuda.synchronize()
        print(dtype, dim, mask, "done", flush=True)


if __name__ == "__main__":
    main()
