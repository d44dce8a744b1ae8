"""Problems are solved here on a ring and by an fp64 oracle, and the two are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burst_attention import Layout, Mask, Ring, burst_attention, plan, run_ranks
from burst_attention.reference import allowed_pairs, reference_attention

TIMEOUT = 30.0
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error over the largest value, for out and gradients in each dtype."""


@dataclass(frozen=True)
class Problem:
    """Whole tensors and how they are spread over a ring."""

    tokens: int = 21
    key_tokens: int | None = None
    size: int = 3
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    mask: Mask | None = None
    layout: Layout | str | None = None
    key_layout: Layout | str | None = None
    scale: float | None = None

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Those of queries and of keys, as the call is documented to take them."""
        key_tokens = self.tokens if self.key_tokens is None else self.key_tokens
        given = self.layout or "contiguous"
        key_given = self.key_layout or given
        lengths = (given, self.tokens), (key_given, key_tokens)
        query, key = (x if isinstance(x, Layout) else Layout(x, count, self.size) for x, count in lengths)
        return query, key

    def whole(self) -> list[Tensor]:
        """[q, k, v, dout, dlse]"""
        generator = torch.Generator().manual_seed(self.tokens + 100 * self.dim)
        query, key = (layout.tokens for layout in self.layouts)
        value_dim = self.value_dim or self.dim
        shapes = [
            (self.batch, self.heads, query, self.dim),
            (self.batch, self.kv_heads, key, self.dim),
            (self.batch, self.kv_heads, key, value_dim),
            (self.batch, self.heads, query, value_dim),
        ]
        q, k, v, dout = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes
        )
        dlse = torch.randn(shapes[0][:3], generator=generator, dtype=torch.float64)
        return [q, k, v, dout, dlse if self.dtype == torch.float64 else dlse.float()]

    def allowed(self) -> Tensor:
        query, key = self.layouts
        positions = [torch.arange(layout.start, layout.end) for layout in (query, key)]
        return allowed_pairs(self.mask, *positions)

    def options(self) -> dict[str, Any]:
        names = ("mask", "layout", "key_layout", "scale")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def predict(self, **options: Any) -> Any:
        """`plan` with this problem's shapes."""
        given = self.options() | options
        given.pop("scale", None)
        query, key = self.layouts
        return plan(
            query.tokens, self.size, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.dim,
            value_dim=self.value_dim, batch=self.batch, dtype=self.dtype, key_tokens=key.tokens, **given,
        )  # fmt: skip


Results = dict[str, Tensor]


def oracle(problem: Problem, through: str = "out") -> Results:
    """out, lse, dq, dk and dv in fp64; the gradient comes through out, through lse, or through both."""
    q, k, v, dout, dlse = (x.double() for x in problem.whole())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = reference_attention(*leaves, problem.allowed(), problem.scale)
    gradients = torch.autograd.grad((out, lse), leaves, weigh(through, dout, dlse))
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *gradients), strict=True))


def weigh(through: str, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
    return (dout * (through != "lse"), dlse * (through != "out"))


def ranks_results(problem: Problem, through: str = "out", **options: Any) -> Results:
    """The same from a ring, put together again."""
    query, key = problem.layouts

    def body(ring: Ring) -> list[Tensor]:
        q, k, v, dout, dlse = problem.whole()
        layouts = (query, key, key, query, query)
        mine = [layout.shard(x, ring.rank, 2) for layout, x in zip(layouts, (q, k, v, dout, dlse), strict=True)]
        leaves = [x.detach().clone().requires_grad_() for x in mine[:3]]
        call: dict[str, Any] = {**problem.options(), **options}
        if through == "out":
            out = burst_attention(*leaves, ring=ring, **call)
            gradients = torch.autograd.grad(out, leaves, mine[3])
            # Not every kernel gives lse.
            with torch.no_grad():
                _, lse = burst_attention(*leaves, ring=ring, return_lse=True, **(call | {"kernel": "auto"}))
        else:
            out, lse = burst_attention(*leaves, ring=ring, return_lse=True, **call)
            if through == "lse":
                gradients = torch.autograd.grad(lse, leaves, mine[4])
            else:
                gradients = torch.autograd.grad((out, lse), leaves, (mine[3], mine[4]))
        assert out.dtype == problem.dtype and lse.dtype == mine[4].dtype
        assert all(gradient.dtype == problem.dtype for gradient in gradients)
        return [out.detach(), lse.detach(), *gradients]

    shards = zip(*run_ranks(body, problem.size, timeout=TIMEOUT), strict=True)
    layouts = (query, query, query, key, key)
    names = ("out", "lse", "dq", "dk", "dv")
    return {name: layout.unshard(parts, 2) for name, layout, parts in zip(names, layouts, shards, strict=True)}


def assert_close(found: Results, expected: Results, tolerance: float, lse_tolerance: float | None = None) -> None:
    """Every tensor, by its largest error over its largest value; lse where it is finite, and -inf where it is not."""
    for name, want in expected.items():
        got = found[name].double()
        assert got.shape == want.shape
        assert not got.isnan().any(), f"{name} has NaN"
        finite = want.isfinite()
        assert torch.equal(got.isfinite(), finite), f"{name} is infinite elsewhere"
        assert torch.equal(got[~finite], want[~finite])
        got, want = got[finite], want[finite]
        size = want.abs().max().item() if want.numel() else 0.0
        limit = lse_tolerance if name == "lse" and lse_tolerance is not None else tolerance
        error = (got - want).abs().max().item() if want.numel() else 0.0
        assert error <= limit * max(size, 1e-3), f"{name}: error {error:.3g} of {size:.3g}"


def check(problem: Problem, through: str = "out", tolerance: float | None = None, **options: Any) -> Results:
    """Run on a ring, compare with the oracle, and give what the ring found."""
    found = ranks_results(problem, through, **options)
    tolerance = TOLERANCE[problem.dtype] if tolerance is None else tolerance
    # Scores are sums in fp32 or better whatever the inputs' dtype, and so is lse.
    assert_close(found, oracle(problem, through), tolerance, max(TOLERANCE[torch.float64], min(tolerance, 5e-6)))
    return found


def local_leaves(problem: Problem, rank: int, needs: str) -> list[Tensor]:
    """[q, k, v, dout] of a rank, where only some want gradients."""
    query, key = problem.layouts
    tensors = problem.whole()[:4]
    mine = [y.shard(x, rank, 2).clone() for y, x in zip((query, key, key, query), tensors, strict=True)]
    return [*(x.requires_grad_(name in needs) for name, x in zip("qkv", mine[:3], strict=True)), mine[3]]
