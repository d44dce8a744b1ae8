"""Every shape, dtype, scale and kernel that a call takes agrees with an fp64 oracle, with and without autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burst_attention import Layout, Mask, Ring, blocks, burst_attention, causal, documents, prefix, run_ranks, window
from tests.ring.call_variants import each_direction, each_forward_direction, each_kernel
from tests.ring.problems import TIMEOUT, TOLERANCE, Problem, assert_close, check, local_leaves, ranks_results


@pytest.mark.parametrize("region", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float16),
        (torch.float64, torch.float64, torch.float64),
    ],
    ids=["fp32", "mixed", "fp64"],
)
def test_autocast_as_scaled_dot_product_attention_does_it(dtypes: tuple[torch.dtype, ...], region: torch.dtype) -> None:
    whole = [x.to(dtype) for x, dtype in zip(Problem(kv_heads=4).whole()[:3], dtypes, strict=True)]

    def attend(tensors: list[Tensor], ring: Ring | None) -> tuple[Tensor, list[Tensor]]:
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        with torch.autocast("cpu", region):
            out = burst_attention(*leaves, ring=ring) if ring else scaled_dot_product_attention(*leaves)
        return out.detach(), list(torch.autograd.grad(out, leaves, torch.ones_like(out)))

    expected, wanted = attend(whole, None)
    layout = Layout.contiguous(21, 3)
    results = run_ranks(lambda ring: attend([layout.shard(x, ring.rank, 2) for x in whole], ring), 3, timeout=TIMEOUT)
    for out, gradients in results:
        assert out.dtype == expected.dtype == (torch.float64 if dtypes[0] == torch.float64 else region)
        assert [x.dtype for x in gradients] == [x.dtype for x in wanted] == list(dtypes)
    found = layout.unshard([out for out, _ in results], 2)
    assert_close({"out": found}, {"out": expected.double()}, TOLERANCE[expected.dtype])


@each_kernel
def test_autocast_casts_the_inputs_and_nothing_inside(kernel: str) -> None:
    """The same bits as a call with inputs that were cast before: no product inside is made less precise."""

    def body(ring: Ring) -> None:
        q, k, v, dout = local_leaves(Problem(), ring.rank, "qkv")
        low = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
        expected = burst_attention(*low, ring=ring, mask=causal(), kernel=kernel)
        wanted = torch.autograd.grad(expected, low, dout.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            found = burst_attention(q, k, v, ring=ring, mask=causal(), kernel=kernel)
            gradients = torch.autograd.grad(found, (q, k, v), dout.bfloat16())
        assert torch.equal(found, expected)
        for a, b in zip(gradients, wanted, strict=True):
            assert a.dtype == torch.float32 and torch.equal(a, b.float())

    run_ranks(body, 3, timeout=TIMEOUT)


@each_direction
@each_forward_direction
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16], ids=["fp16", "fp64", "bf16"])
def test_dtypes(dtype: torch.dtype, forward_direction: str, direction: str) -> None:
    problem = Problem(mask=causal(), layout="zigzag", dtype=dtype)
    check(problem, direction=direction, forward_direction=forward_direction)


SHAPES = {
    "mla": Problem(dim=24, value_dim=16, kv_heads=1, mask=causal()),
    "wider-values": Problem(dim=8, value_dim=40, mask=causal(), layout="zigzag"),
    "batch-of-3": Problem(batch=3, mask=causal(), layout="striped"),
    "gqa": Problem(heads=6, kv_heads=2, mask=causal(), layout="zigzag"),
    "mqa": Problem(heads=5, kv_heads=1),
    "multi-head": Problem(heads=3, kv_heads=3, mask=window(4)),
    "batch-of-2-gqa-mla": Problem(batch=2, heads=6, kv_heads=3, dim=24, value_dim=8, layout="striped", mask=causal()),
    "odd-head-dim": Problem(dim=5, heads=1, kv_heads=1, mask=causal()),
    "head-dim-1": Problem(dim=1, heads=2, kv_heads=1),
    "ring-of-1": Problem(size=1, mask=causal()),
    "ring-of-5": Problem(size=5, mask=causal() | prefix(4), layout="striped"),
}


@each_direction
@each_forward_direction
@pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES.keys())
def test_shapes(problem: Problem, forward_direction: str, direction: str) -> None:
    check(problem, direction=direction, forward_direction=forward_direction)


@each_direction
@each_forward_direction
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_fewer_tokens_than_ranks(tokens: int, layout: str, forward_direction: str, direction: str) -> None:
    problem = Problem(tokens=tokens, size=4, layout=layout, mask=causal(), dtype=torch.float64)
    counts = [problem.layouts[0].local_tokens(rank) for rank in range(4)]
    assert sum(counts) == tokens and (tokens > 4 or 0 in counts)
    check(problem, direction=direction, forward_direction=forward_direction)


def test_no_tokens_at_all() -> None:
    def body(ring: Ring) -> list[torch.Size]:
        q, k, v, dout = local_leaves(Problem(tokens=0), ring.rank, "qkv")
        out = burst_attention(q, k, v, ring=ring, mask=causal())
        out.backward(dout)
        assert ring.bytes_sent == 0
        return [x.shape for x in (out, q.grad, k.grad, v.grad) if x is not None]

    wide, narrow = torch.Size([1, 4, 0, 16]), torch.Size([1, 2, 0, 16])
    assert run_ranks(body, 3, timeout=TIMEOUT) == [[wide, wide, narrow, narrow]] * 3


NO_KEYS = {
    "empty-block-row": (blocks([[1, 0, 1], [0, 0, 0], [0, 1, 1]], 7), range(7, 14)),
    "later-documents-without-prefix": (documents([8, 13]) & prefix(3), range(8, 21)),
    "nothing-allowed": (prefix(0), range(21)),
    "window-and-far-block": (window(3) & blocks([[0, 1], [1, 0]], 11), [*range(9), *range(13, 21)]),
}


@each_direction
@each_forward_direction
@pytest.mark.parametrize("layout", ["contiguous", "striped"])
@pytest.mark.parametrize("kernel", ["auto", "plain", "lse-gradient"])
@pytest.mark.parametrize(("mask", "rows"), NO_KEYS.values(), ids=NO_KEYS.keys())
def test_rows_without_keys(
    mask: Mask, rows: list[int], layout: str, kernel: str, forward_direction: str, direction: str
) -> None:
    problem = Problem(mask=mask, layout=layout)
    assert torch.equal((~problem.allowed().any(-1)).nonzero()[:, 0], torch.tensor(list(rows)))
    through, options = ("both", {}) if kernel == "lse-gradient" else ("out", {"kernel": kernel})
    found = check(problem, through, direction=direction, forward_direction=forward_direction, **options)
    for name, value in (("out", 0.0), ("lse", float("-inf")), ("dq", 0.0)):
        assert (found[name][:, :, list(rows)] == value).all()


CROSS = {
    "more-keys": Problem(tokens=10, key_tokens=23, layout="striped", key_layout="zigzag"),
    "more-queries": Problem(tokens=23, key_tokens=10, layout="zigzag", key_layout="contiguous"),
    "one-name-for-both": Problem(tokens=10, key_tokens=23, layout="zigzag"),
    "few-keys": Problem(tokens=11, key_tokens=2, layout="contiguous", key_layout="striped"),
    "causal": Problem(tokens=10, key_tokens=23, layout="striped", key_layout="zigzag", mask=causal()),
    "window": Problem(tokens=23, key_tokens=10, layout="zigzag", key_layout="striped", mask=window(6)),
    "narrow-window": Problem(tokens=30, key_tokens=23, layout="striped", key_layout="zigzag", mask=window(2), size=5),
    "narrow-window-reversed": Problem(
        tokens=30, key_tokens=41, layout="zigzag", key_layout="striped", mask=causal() & window(2), size=5
    ),
    "chunk-of-queries": Problem(
        tokens=9, key_tokens=23, layout=Layout.zigzag(9, 3, 14), key_layout=Layout.striped(23, 3), mask=causal()
    ),
    "both-later": Problem(
        tokens=9, key_tokens=12, layout=Layout.contiguous(9, 3, 14), key_layout=Layout.zigzag(12, 3, 11),
        mask=causal() & documents([16, 8]),
    ),
    "blocks": Problem(tokens=10, key_tokens=21, key_layout="striped", mask=blocks([[1, 0, 1], [0, 1, 0]], 7)),
}  # fmt: skip


@each_direction
@each_forward_direction
@pytest.mark.parametrize("problem", CROSS.values(), ids=CROSS.keys())
def test_cross_attention(problem: Problem, forward_direction: str, direction: str) -> None:
    check(problem, direction=direction, forward_direction=forward_direction)


@each_kernel
@pytest.mark.parametrize("scale", [0.37, 3, 1e-4, 0.0, -0.5], ids=lambda scale: f"scale={scale}")
@pytest.mark.parametrize(
    ("mask", "layout"),
    [(None, "contiguous"), (causal(), "zigzag"), (causal() & window(5), "striped")],
    ids=["full", "causal", "window"],
)
def test_scale(scale: float, mask: Mask | None, layout: str, kernel: str) -> None:
    problem = Problem(mask=mask, layout=layout, scale=scale)
    # torch's flash operator gives NaN for a causal tile with scale <= 0, so it is not chosen there.
    found = check(problem, kernel=kernel if scale > 0 else "auto", tolerance=2e-5)
    if scale == 0:
        assert found["dq"].abs().max() == 0 and found["dk"].abs().max() == 0


@each_direction
@each_forward_direction
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_plain_and_flash_agree(dtype: torch.dtype, forward_direction: str, direction: str) -> None:
    problem = Problem(tokens=40, dtype=dtype, mask=causal() | prefix(5), layout="zigzag")
    options = {"direction": direction, "forward_direction": forward_direction}
    plain = ranks_results(problem, kernel="plain", **options)
    flash = ranks_results(problem, kernel="flash", **options)
    assert_close(flash, {name: plain[name].double() for name in ("out", "dq", "dk", "dv")}, TOLERANCE[dtype])
    assert any(not torch.equal(flash[name], plain[name]) for name in plain), "one kernel served both"
