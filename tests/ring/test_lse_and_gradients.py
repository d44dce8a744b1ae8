"""The lse and all gradients, also through lse and of some inputs only, agree with an fp64 oracle."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from burst_attention import Layout, Ring, burst_attention, causal, run_ranks, window
from tests.ring.call_variants import each_direction, each_forward_direction
from tests.ring.problems import TIMEOUT, TOLERANCE, Problem, assert_close, check, local_leaves, oracle


@each_direction
@each_forward_direction
@pytest.mark.parametrize("through", ["out", "lse", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_gradient_through_out_and_lse(through: str, forward_direction: str, direction: str, dtype: torch.dtype) -> None:
    problem = Problem(mask=causal(), layout="zigzag", dtype=dtype)
    found = check(problem, through, direction=direction, forward_direction=forward_direction)
    # lse does not depend on v.
    assert (found["dv"].abs().max() == 0) == (through == "lse")


def test_lse_is_the_natural_logarithm() -> None:
    def body(ring: Ring) -> tuple[Tensor, Tensor]:
        q, k, v = (torch.zeros(2, 3, 5, 8) for _ in range(3))
        return burst_attention(q, k, v, ring=ring, return_lse=True)

    for _, lse in run_ranks(body, 3, timeout=TIMEOUT):
        assert lse.shape == (2, 3, 5) and lse.dtype == torch.float32
        torch.testing.assert_close(lse, torch.full((2, 3, 5), math.log(15)))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=["fp32", "bf16", "fp16", "fp64"],
)
def test_dtypes_of_out_and_lse(dtype: torch.dtype, expected: torch.dtype) -> None:
    def body(ring: Ring) -> tuple[torch.dtype, torch.dtype]:
        q, k, v = (torch.ones(1, 2, 3, 8, dtype=dtype) for _ in range(3))
        out, lse = burst_attention(q, k, v, ring=ring, return_lse=True)
        return out.dtype, lse.dtype

    assert run_ranks(body, 2, timeout=TIMEOUT) == [(dtype, expected)] * 2


@each_direction
def test_a_learned_sink_on_top_of_lse(direction: str) -> None:
    """An extra logit per head that takes weight and gives no value: out * sigmoid(lse - sink)."""
    problem = Problem(mask=causal() & window(6), layout="striped", dtype=torch.float64)
    logits = torch.linspace(-1, 2, problem.heads, dtype=torch.float64)
    query, key = problem.layouts

    q, k, v, dout, _ = problem.whole()
    sink = logits.clone().requires_grad_()
    for x in (q, k, v):
        x.requires_grad_()
    wide_k, wide_v = (x.repeat_interleave(problem.heads // problem.kv_heads, 1) for x in (k, v))
    scores = (q @ wide_k.transpose(-1, -2) / math.sqrt(problem.dim)).masked_fill(~problem.allowed(), float("-inf"))
    column = sink[None, :, None, None].expand(problem.batch, problem.heads, problem.tokens, 1)
    expected = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ wide_v
    wanted = torch.autograd.grad(expected, (q, k, v, sink), dout)

    def body(ring: Ring) -> list[Tensor]:
        layouts = (query, key, key, query)
        mine = [y.shard(x.detach(), ring.rank, 2).clone() for y, x in zip(layouts, (q, k, v, dout), strict=True)]
        own = [*(x.requires_grad_() for x in mine[:3]), logits.clone().requires_grad_()]
        out, lse = burst_attention(*own[:3], ring=ring, return_lse=True, direction=direction, **problem.options())
        result = out * torch.sigmoid(lse - own[3][:, None]).unsqueeze(-1)
        return [result.detach(), *torch.autograd.grad(result, own, mine[3])]

    out, dq, dk, dv, dsink = zip(*run_ranks(body, problem.size, timeout=TIMEOUT), strict=True)
    found = {
        "out": query.unshard(out, 2),
        "dq": query.unshard(dq, 2),
        "dk": key.unshard(dk, 2),
        "dv": key.unshard(dv, 2),
    }
    # Every rank has a copy of the sink, and the gradient of its own queries.
    found["dsink"] = torch.stack(dsink).sum(0)
    names = ("out", "dq", "dk", "dv", "dsink")
    assert_close(found, dict(zip(names, (expected.detach(), *wanted), strict=True)), 1e-12)


SUBSETS = ["".join(letters) for count in (1, 2, 3) for letters in itertools.combinations("qkv", count)]


@each_direction
@each_forward_direction
@pytest.mark.parametrize("needs", SUBSETS)
def test_inputs_without_gradient_get_none_and_move_none(needs: str, forward_direction: str, direction: str) -> None:
    problem = Problem(tokens=12, size=4, kv_heads=4, value_dim=8)
    options = {"direction": direction, "forward_direction": forward_direction}

    def body(ring: Ring) -> tuple[list[Tensor | None], int, int]:
        q, k, v, dout = local_leaves(problem, ring.rank, needs)
        out = burst_attention(q, k, v, ring=ring, **options)
        forward = ring.bytes_sent
        out.backward(dout)
        return [x.grad for x in (q, k, v)], forward, ring.bytes_sent - forward

    expected = oracle(problem)
    predicted = problem.predict(requires_grad=needs, **options)
    query, _ = problem.layouts
    results = run_ranks(body, problem.size, timeout=TIMEOUT)
    for rank, (_, forward, backward) in enumerate(results):
        assert forward == predicted.bytes_sent(rank, "forward") > 0
        assert backward == predicted.bytes_sent(rank, "backward") > 0
        # Three hops of a block of three tokens, each with four heads of 16 (q, k) or 8 (v, out) numbers in fp32.
        wide, narrow, statistic = 4 * 16 * 4, 4 * 8 * 4, 4 * 4
        moved = {"kv": wide + narrow, "query": wide + narrow + 2 * statistic}[direction]
        moved += {"kv": wide * ("k" in needs) + narrow * ("v" in needs), "query": wide * ("q" in needs)}[direction]
        assert backward == 3 * 3 * moved
    for index, name in enumerate("qkv"):
        gradients = [gradients[index] for gradients, *_ in results]
        if name in needs:
            whole = query.unshard([x for x in gradients if x is not None], 2)
            assert_close({f"d{name}": whole}, {f"d{name}": expected[f"d{name}"]}, TOLERANCE[torch.float32])
        else:
            assert gradients == [None] * problem.size


@each_direction
def test_gradient_with_respect_to_queries_only(direction: str) -> None:
    """All inputs want gradients and this backward is asked for one: autograd does not say so, and all are computed."""
    problem = Problem(mask=causal(), layout="zigzag")

    def body(ring: Ring) -> tuple[Tensor, int, list[Tensor | None]]:
        q, k, v, dout = local_leaves(problem, ring.rank, "qkv")
        out = burst_attention(q, k, v, ring=ring, direction=direction, **problem.options())
        before = ring.bytes_sent
        (dq,) = torch.autograd.grad(out, q, dout)
        return dq, ring.bytes_sent - before, [x.grad for x in (q, k, v)]

    results = run_ranks(body, problem.size, timeout=TIMEOUT)
    found = {"dq": problem.layouts[0].unshard([dq for dq, *_ in results], 2)}
    assert_close(found, {"dq": oracle(problem)["dq"]}, TOLERANCE[torch.float32])
    expected = problem.predict(requires_grad="qkv", direction=direction)
    for rank, (_, moved, gradients) in enumerate(results):
        assert moved == expected.bytes_sent(rank, "backward") > 0
        assert gradients == [None] * 3


@pytest.mark.parametrize("of", ["dq", "dk", "dv"])
def test_double_backward_is_refused_by_name(of: str) -> None:
    def body(ring: Ring) -> str:
        q, k, v, dout = local_leaves(Problem(), ring.rank, "qkv")
        out = burst_attention(q, k, v, ring=ring)
        gradients = dict(
            zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout, create_graph=True), strict=True)
        )
        with pytest.raises(RuntimeError) as caught:
            gradients[of].sum().backward()
        return str(caught.value)

    for text in run_ranks(body, 3, timeout=TIMEOUT):
        assert "burst_attention has no double backward" in text


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("coalesce", [1, 2])
def test_a_narrow_wire_carries_large_sums_and_an_exact_lse(dtype: torch.dtype, coalesce: int) -> None:
    """Equal scores and values of 200: the sum over 1000 keys is more than fp16 holds, their mean is not."""
    layout = Layout.contiguous(1000, 4)
    q, v = torch.zeros(1, 1, 1000, 8, dtype=dtype), torch.full((1, 1, 1000, 8), 200.0, dtype=dtype)

    def body(ring: Ring) -> tuple[torch.Tensor, torch.Tensor]:
        mine = (layout.shard(x, ring.rank, 2) for x in (q, q, v))
        wire = {"forward_direction": "query", "wire_dtype": torch.float16, "coalesce": coalesce}
        return burst_attention(*mine, ring=ring, layout=layout, return_lse=True, **wire)

    for out, lse in run_ranks(body, 4, timeout=TIMEOUT):
        torch.testing.assert_close(out, torch.full_like(out, 200.0), atol=0.2, rtol=0.0)
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(1000)), atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_key_that_is_alone_has_its_score_as_lse_and_a_weight_of_one(dtype: torch.dtype) -> None:
    """To the bit, whatever rounding does: then dv is dout, and dq and dk are 0."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 256, 1, 64, generator=generator).mul(2).to(dtype) for _ in range(4))

    def attend(ring: Ring) -> tuple[torch.Tensor, ...]:
        shards = [Layout.contiguous(1, 2).shard(x, ring.rank, 2).clone() for x in (q, k, v, dout)]
        leaves = [x.requires_grad_() for x in shards[:3]]
        out, lse = burst_attention(*leaves, ring=ring, return_lse=True)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, shards[3])

    out, lse, dq, dk, dv = run_ranks(attend, 2)[0]
    score = (q.double() * k.double()).sum(-1) * 64**-0.5
    assert torch.equal(lse, score.float())
    assert torch.equal(out, v) and torch.equal(dv, dout)
    assert not dq.any() and not dk.any()
