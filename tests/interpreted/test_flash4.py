"""How FlashAttention-4 is started by itself: sums that pieces share, heads as a batch. Its kernels are torch here.

What the real ones do is for tests/gpu/test_flash4.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention import Layout, Mask, Ring, burst_attention, causal, full, ops, plan, run_ranks
from burst_attention.geometry import Piece, full_piece
from burst_attention.reference import allowed_pairs, reference_gradients
from burst_attention.tiles import Accumulator, BackwardInputs, Gradients
from burst_attention.tiles.plain import PlainKernel
from tests.unit.gpu_kernels_in_torch import BLOCK, attend, cast, launch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

pytest.importorskip("triton")
from burst_attention.tiles import flash4
from burst_attention.tiles.vendor import FlashKernel

MADE: dict[int, list[int]] = {}
"""Numbers in the sums that each thread has made."""


class CountedSums(flash4.QuerySums):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        MADE.setdefault(threading.get_ident(), []).append(self.sums.numel())


@pytest.fixture(autouse=True)
def kernels_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, made in (("_launch", launch), ("_cast", cast), ("attend", attend), ("QuerySums", CountedSums)):
        monkeypatch.setattr(flash4, name, made)
    monkeypatch.setattr(flash4, "_orders", {})
    monkeypatch.setattr(flash4, "LARGEST_BLOCK", {16: BLOCK})
    monkeypatch.setattr(flash4, "_config", lambda dim, triangle: SimpleNamespace(m_block_size=BLOCK))
    monkeypatch.setattr(flash4, "serves", lambda piece, x, scale: x.q.shape[0] == 1 or x.q.shape[1] == x.k.shape[1])
    monkeypatch.setattr(flash4, "serves_forward", lambda q, k, v: True)
    MADE.clear()


PIECES = {
    "rectangles": (full_piece(0, 21, 0, 10), full_piece(0, 21, 10, 13), full_piece(5, 16, 23, 7)),
    "triangle": (Piece(2, 19, 4, 19, 0, 19),),
}


@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 4), (2, 4), (1, 2), (1, 1)])
@pytest.mark.parametrize("name", PIECES)
def test_pieces_against_the_plain_kernel(name: str, batch: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    q, dout = (torch.randn(batch, 4, 21, 16) for _ in range(2))
    k, v = (torch.randn(batch, kv_heads, 30, 16) for _ in range(2))
    lse, delta = torch.rand(batch, 4, 21) + 3.0, torch.randn(batch, 4, 21)
    inputs = BackwardInputs(dout, q, k, v, lse, delta, None)
    kernel = FlashKernel()
    found = [Accumulator(torch.full(x.shape, math.nan), kernel.sum_parts) for x in (q, k, v)]
    wanted = [Accumulator(torch.full(x.shape, math.nan)) for x in (q, k, v)]
    for piece in PIECES[name]:
        kernel.backward([piece], inputs, Gradients(*found), 0.2)
    PlainKernel().backward(PIECES[name], inputs, Gradients(*wanted), 0.2)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.finish(torch.float16), theirs.finish(torch.float16), atol=4e-3, rtol=4e-3)
    # Two rectangles of the same queries share what they add to.
    assert len(next(iter(MADE.values()))) == (2 if name == "rectangles" else 1)


@pytest.mark.parametrize("results", ["chain", "straight"])
@pytest.mark.parametrize("direction", ["kv", "query"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("mask", [full(), causal()], ids=str)
def test_a_ring_and_what_its_plan_counts(
    monkeypatch: pytest.MonkeyPatch, mask: Mask, kv_heads: int, direction: str, results: str
) -> None:
    monkeypatch.setattr(ops, "pick_kernel", lambda name, request: FlashKernel())
    layout, generator = Layout.zigzag(96, 3), torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, 96, 16, generator=generator).half() for heads in (4, kv_heads, kv_heads, 4)]
    options: dict[str, Any] = {"mask": mask, "layout": layout, "direction": direction, "coalesce": 2}
    options |= {"results": results, "wire_dtype": torch.float16 if results == "straight" else None}

    def body(ring: Ring) -> tuple[int, list[Tensor]]:
        q, k, v, dout = (layout.shard(x, ring.rank, 2) for x in tensors)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = burst_attention(*leaves, ring=ring, **options)
        gradients = torch.autograd.grad(out, leaves, dout)
        return sum(MADE[threading.get_ident()]), [out.detach(), *gradients]

    ranks = run_ranks(body, 3, timeout=120)
    positions = torch.arange(96)
    exact = reference_gradients(*tensors, allowed_pairs(mask, positions, positions))
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        found = layout.unshard([tensors[index] for _, tensors in ranks], 2).double()
        right = getattr(exact, name)
        assert (found - right).norm() < 3e-3 * right.norm(), name
    phase = plan(96, 3, heads=4, kv_heads=kv_heads, head_dim=16, dtype=torch.float16, **options).phase("backward")
    for rank, (made, _) in enumerate(ranks) if direction == "kv" else ():
        triangles = sum(p.q_count for step in phase.rounds[rank] for p in step.pieces if not p.is_full)
        # A triangle at home is computed in two halves of the heads, the one after the other.
        sums = flash4._rectangle_rows(phase, phase.rounds[rank])
        assert made == (sums + triangles // 2) * 4 * 16, f"rank {rank}"


def test_the_order_of_sums_is_asked_of_the_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block with more numbers than bf16 can tell apart; once, and for triangles apart."""
    places, asked = torch.randperm(80 * 128), []

    def cast(config: Any, sums: Tensor, dq: Tensor, scale: float) -> None:
        asked.append(dq.dtype)
        dq.copy_((sums.flatten()[places] * scale).view(dq.shape))

    monkeypatch.setattr(flash4, "_cast", cast)
    config = SimpleNamespace(m_block_size=80)
    for triangle in (False, True, False):
        order = flash4.order_of_sums(config, triangle, 128, torch.device("cpu"))
        assert order.dtype == torch.int32 and torch.equal(order, places.int())
    assert asked == [torch.bfloat16] * 4


def test_the_package_gets_its_scheduler_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its compiler fails: what others compile is left as it is."""
    package = SimpleNamespace(SingleTileScheduler="by head", SingleTileLPTBwdScheduler="longest first")
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=SimpleNamespace(flash_bwd_sm90=package)))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", sys.modules["flash_attn"].cute)
    inside: list[str] = []
    with contextlib.suppress(RuntimeError), flash4._longest_first():
        inside.append(package.SingleTileScheduler)
        raise RuntimeError("does not compile")
    assert inside == ["longest first"]
    assert package.SingleTileScheduler == "by head"
