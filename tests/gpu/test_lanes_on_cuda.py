"""Rounds that take turns on streams give what rounds one after another give, whichever stream is late."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention

from burst_attention import Layout, Ring, burst_attention, causal, full, run_ranks
from burst_attention import engine as engines
from burst_attention.lanes import Lanes
from burst_attention.ring import threads

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LATE_CYCLES = 10_000_000
"""Some 5 ms: longer than all rounds of a small ring."""
TOKENS = 2048
"""Of a rank: vendors' kernels serve it and its halves."""
ALLOWED = (
    {"out": 0.0, "dq": 2e-3, "dk": 2e-3, "dv": 2e-3},
    {"out": 5e-3, "dq": 3e-3, "dk": 3e-3, "dv": 3e-3},
)
"""By how much lanes may change results. dq is added up in any order, and so is what is rounded then. Side by side our
kernels for Hopper round a round's partials, and what home gives to dk and dv, which one after another they do not."""


@pytest.fixture(params=["FA4", "cudnn", "hopper"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    if request.param != "FA4":
        yield request.param
        return
    try:
        attention.activate_flash_attention_impl("FA4")
    except (ImportError, AttributeError) as error:
        pytest.skip(f"FA4 is not installed: {str(error).splitlines()[0]}")
    yield "flash"
    attention.restore_flash_attention_impl()


def late(who: str) -> type[Lanes]:
    """Lanes of which one, or the caller's stream, is late in every round."""

    class Late(Lanes):
        used_at_all = False

        def ready(self) -> Any:
            if who == "caller":
                torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]
            return super().ready()

        @contextlib.contextmanager
        def turn(self, ready: Any) -> Iterator[None]:
            with super().turn(ready):
                type(self).used_at_all |= bool(self.streams)
                if who == f"lane {self.turns % 2}":
                    torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]
                yield

    return Late


def run(kernel: str, ranks: int, mask: str, kv_heads: int) -> list[list[Tensor]]:
    """Output and gradients of every rank, computed twice: the second call gets the memory of the first."""
    layout = Layout("zigzag" if mask == "causal" else "contiguous", ranks * TOKENS, ranks)
    torch.manual_seed(0)
    heads = (4, kv_heads, kv_heads, 4)
    whole = [torch.randn(1, count, layout.tokens, 128, device="cuda", dtype=torch.bfloat16) for count in heads]
    allowed = causal() if mask == "causal" else full()

    def body(ring: Ring) -> list[Tensor]:
        *leaves, dout = (layout.shard(x, ring.rank, 2).contiguous() for x in whole)
        leaves = [x.requires_grad_() for x in leaves]
        for _ in range(2):
            out = burst_attention(*leaves, ring=ring, mask=allowed, layout=layout, kernel=kernel)
            gradients = torch.autograd.grad(out, leaves, dout)
        return [out.detach(), *gradients]

    found = run_ranks(body, ranks, timeout=300)
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize(
    ("ranks", "mask", "kv_heads"),
    [(4, "causal", 4), (4, "full", 2), (8, "causal", 1), (8, "causal", 4), (16, "causal", 4), (16, "full", 2)],
)
def test_no_stream_may_be_late(
    kernel: str, ranks: int, mask: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 16 ranks more waits than may, and is taken in while rounds are under way."""
    monkeypatch.setattr(engines.PhaseRun, "_rounds_are_apart", lambda self: False)
    wanted = run(kernel, ranks, mask, kv_heads)
    monkeypatch.undo()
    first: list[list[Tensor]] = []
    for who in ("nobody", "lane 0", "lane 1", "caller", "copies"):
        with monkeypatch.context() as patched:
            patched.setattr(engines, "Lanes", lanes := late(who))
            if who == "copies":
                patched.setattr(threads.ThreadRing, "_copy_on_gpu", late_copy)
            found = run(kernel, ranks, mask, kv_heads)
        assert lanes.used_at_all
        first = first or found
        for rank, (mine, others) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(mine[0], first[rank][0]), (who, rank)
            for name, x, y in zip(("out", "dq", "dk", "dv"), mine, others, strict=True):
                error = (x.double() - y.double()).norm() / y.double().norm()
                assert error <= ALLOWED[kernel == "hopper"][name], (who, rank, name, error)


copy_on_gpu = threads.ThreadRing._copy_on_gpu


def late_copy(ring: threads.ThreadRing, *arguments: Any) -> None:
    """A receive that takes its time."""
    if ring._copy_stream is not None:
        with torch.cuda.stream(ring._copy_stream):
            torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]
    copy_on_gpu(ring, *arguments)
