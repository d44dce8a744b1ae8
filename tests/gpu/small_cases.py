"""Every GPU kernel of ours, on small odd tiles and tensors: `make sanitize` runs this under compute-sanitizer."""

from __future__ import annotations

import torch

from burst_attention import (
    Ring,
    burst_attention,
    causal,
    documents,
    linear_cross_entropy,
    linear_log_probs,
    run_ranks,
    window,
)

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
        FEW_PARTS,
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
    padded_statistics(lse, delta, 160, dim=64)
    # Beside a tile few programs take blocks in turn, where there are more blocks than programs.
    wide = torch.empty(1, 8, 641, dim, device="cuda")
    for count in (FEW_PARTS, FEW_PARTS + 1):
        parts_beside = [Part(0, 0, random(1, 8, 641, dim)) for _ in range(count)]
        sum_parts(wide, parts_beside, load=False, out=random(1, 8, 641, dim), beside=True)
        sum_parts(wide, parts_beside, load=False, beside=True)
    assert all(x.isfinite().all() for x in (out, lse, delta, total, wide))


def head_and_loss(dtype: torch.dtype) -> None:
    """The passes over logits, more than one block of them wide."""
    hidden, weight = (torch.randn(rows, 64, device="cuda", dtype=dtype).requires_grad_() for rows in (37, 5001))
    labels = torch.randint(5001, (37,), device="cuda")
    losses = linear_cross_entropy(
        hidden, weight, labels, softcap=5.0, label_smoothing=0.1, reduction="none", backend="triton"
    )
    both = linear_log_probs(hidden, weight, labels, temperature=0.7, return_entropy=True, backend="triton")
    for results in (losses, torch.stack(both)):
        gradients = torch.autograd.grad(results.sum(), (hidden, weight))
        assert all(x.isfinite().all() for x in (results, *gradients))


def main() -> None:
    for dtype, dim, mask in CASES:
        run_ranks(lambda ring, case=(dtype, dim, mask): attend(ring, *case), 2, timeout=300)  # type: ignore[misc]
        pass_over_memory(dtype, dim)
        head_and_loss(dtype)
        torch.cuda.synchronize()
        print(dtype, dim, mask, "done", flush=True)


if __name__ == "__main__":
    main()
