"""Every GPU kernel of ours, on small odd tiles and tensors: `make sanitize` runs this under compute-sanitizer."""

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


def pass_over_memory(dtype: torch.dtype, dim: int) -> None:
    """What vendors' kernels need beside them: merging partials, sums of parts, delta, the stand-in for out."""
    from burst_attention.merge import Part, Partial, State
    from burst_attention.tiles.fused import (
        copy_on_gpu,
        fused_delta,
        merge_partials,
        padded_statistics,
        stand_in_for_out,
        sum_parts,
    )

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    rows = 129
    state = State(*(torch.empty(shape, device="cuda") for shape in ((1, 2, rows, dim), (1, 2, rows), (1, 2, rows))))
    parts = [Partial(first, random(1, 2, 57, dim), random(1, 2, 57).float()) for first in (0, 31, 72)]
    merge_partials(state, parts, load=False)
    out, lse = random(1, 2, rows, dim), torch.empty(1, 2, rows, device="cuda")
    merge_partials(state, parts[:1], load=True, finished=(out, lse))
    dout = random(1, rows, 2, dim).transpose(1, 2)
    delta = fused_delta(out, dout, lse)
    total = torch.empty(1, 2, rows, dim, device="cuda")
    sum_parts(total, [Part(0, 0, stand_in_for_out(dout, delta)), Part(40, 1, random(1, 1, 57, dim))], load=False)
    sum_parts(total, [Part(0, 0, out)], load=True, out=torch.empty_like(out))
    copy_on_gpu(torch.empty_like(dout), out)
    padded_statistics(lse, delta, 160, per_key=2, dim=64)
    assert all(x.isfinite().all() for x in (out, lse, delta, total))


def main() -> None:
    for dtype, dim, mask in CASES:
        run_ranks(lambda ring, case=(dtype, dim, mask): attend(ring, *case), 2, timeout=300)  # type: ignore[misc]
        pass_over_memory(dtype, dim)
        torch.cuda.synchronize()
        print(dtype, dim, mask, "done", flush=True)


if __name__ == "__main__":
    main()
