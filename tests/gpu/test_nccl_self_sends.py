"""NCCL on one GPU: a rank that sends to itself proves packing, order, streams and events of the process ring.

Where all shards are equal and every query sees every key, all ranks of a ring send the same messages in the same order.
So one rank that gets back what it sends runs the whole plan of such a ring: every round, both channels, and in a double
ring both communicators. The same test with copies on the CPU shows that the test itself works.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_attention import Layout, Ring, burst_attention, full, plan
from burst_attention.lanes import Lanes
from burst_attention.reference import allowed_pairs, reference_gradients
from burst_attention.ring import Parcel
from burst_attention.ring.base import Pending
from burst_attention.ring.process import ProcessRing

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MIB = 1 << 20
RANKS, TOKENS = 4, 300


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A world of one process, and the device that its backend is for."""
    backend, device = getattr(request, "param", ("nccl", "cuda"))
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    where = {"device_id": torch.device("cuda", 0)} if backend == "nccl" else {}
    dist.init_process_group(backend, store=store, rank=0, world_size=1, **where)
    yield device
    dist.destroy_process_group()


@pytest.fixture
def ring(world: str) -> Ring:
    return Ring.from_group()


class MirrorRing(ProcessRing):
    """Rank 0 of several, all of which are itself."""

    def __init__(self, per_host: int, device: str) -> None:
        super().__init__(f"mirror-{per_host}-{device}", dist.group.WORLD, 60.0)
        self.size = RANKS
        self.hosts = tuple(str(rank // per_host) for rank in range(RANKS))
        self.lanes_used: set[int] = set()

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel], where: str) -> Pending:
        mine = ([replace(parcel, peer=0) for parcel in parcels] for parcels in (sends, receives))
        pending = super().post(*mine, where)
        self.lanes_used |= {pending.lane} if sends else set()
        return pending

    def _start(self, pending: Pending) -> None:
        if any(parcel.tensor.is_cuda for parcel in pending.sends):
            super()._start(pending)
            return
        for sent, received in zip(pending.sends, pending.receives, strict=True):
            received.tensor.copy_(sent.tensor)

    def _finish(self, pending: Pending) -> None:
        if pending.grouped:
            super()._finish(pending)


ANYWHERE = pytest.mark.parametrize(
    "world",
    [pytest.param(("nccl", "cuda"), marks=ON_GPU), ("gloo", "cpu")],
    indirect=True,
    ids=["nccl", "copies"],
)


@ANYWHERE
@pytest.mark.parametrize("direction", ["kv", "query"])
@pytest.mark.parametrize(
    ("per_host", "coalesce", "results"),
    [(1, 1, "chain"), (1, 2, "chain"), (2, 1, "chain"), (1, 2, "straight")],
    ids=["flat", "two-blocks", "double", "straight"],
)
def test_a_whole_plan_over_self_sends(world: str, per_host: int, coalesce: int, results: str, direction: str) -> None:
    ring = MirrorRing(per_host, world)
    run_whole_plan(ring, world, TOKENS, coalesce=coalesce, results=results, **both_ways(direction))
    assert ring.lanes_used == ({0, 1} if per_host > 1 else {0})


@pytest.mark.gpu
@ON_GPU[1]
def test_rounds_take_turns_on_streams_beside_nccl(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, and backward with results that go straight home in 16 bits, as cuDNN gives them."""
    turn, turns = Lanes.turn, []

    def counted(self: Lanes, ready: Any) -> Any:
        turns.append(bool(self.streams))
        return turn(self, ready)

    monkeypatch.setattr(Lanes, "turn", counted)
    options = {"kernel": "cudnn", "coalesce": 2, "results": "straight", "wire_dtype": torch.bfloat16}
    run_whole_plan(MirrorRing(1, world), world, 1024, **options, **both_ways("kv"))
    assert all(turns) and len(turns) >= 6


def both_ways(direction: str) -> dict[str, str]:
    return {"direction": direction, "forward_direction": direction}


def run_whole_plan(ring: MirrorRing, world: str, tokens: int, **options: Any) -> None:
    """A call forward and backward: right, and as many bytes as its plan says."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, heads, tokens, 128, generator=generator).to(torch.bfloat16) for heads in (4, 2, 2, 4)
    )
    leaves = [x.to(world).requires_grad_() for x in (q, k, v)]
    options |= {"mask": full(), "layout": Layout.contiguous(RANKS * tokens, RANKS)}
    before = ring.bytes_sent
    out = burst_attention(*leaves, ring=ring, check="off", **options)
    gradients = torch.autograd.grad(out, leaves, dout.to(world))
    sent = ring.bytes_sent - before
    positions = torch.arange(tokens)
    # Every key comes once from every rank: rows see the same values in the same proportions, RANKS times over.
    exact = reference_gradients(q, k, v, dout, allowed_pairs(full(), positions, positions))
    for name, found in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        wanted = getattr(exact, name)
        assert (found.detach().cpu().double() - wanted).norm() <= 1e-2 * wanted.norm(), name
    if "kernel" not in options:
        with torch.no_grad():
            _, lse = burst_attention(*leaves, ring=ring, check="off", return_lse=True, **options)
        assert (lse.cpu().double() - exact.lse - math.log(RANKS)).abs().max() < 1e-4
    per_host = RANKS // len(set(ring.hosts))
    shapes = {"heads": 4, "kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16, "device": world}
    made = plan(RANKS * tokens, RANKS, ranks_per_host=per_host, **shapes, **options)
    assert sent == made.bytes_sent(0, "forward") + made.bytes_sent(0, "backward")


@pytest.mark.gpu
@ON_GPU[1]
def test_several_messages_keep_their_order(ring: Ring) -> None:
    sent = [torch.full((MIB,), value, dtype=torch.uint8, device="cuda") for value in (1, 2, 3)]
    got = [torch.zeros(MIB, dtype=torch.uint8, device="cuda") for _ in sent]
    pending = ring.post(
        [Parcel(0, channel, x, f"message {channel}") for channel, x in enumerate(sent)],
        [Parcel(0, channel, x, f"message {channel}") for channel, x in enumerate(got)],
        "forward round 0",
    )
    ring.wait(pending)
    assert [int(x.min()) for x in got] == [int(x.max()) for x in got] == [1, 2, 3]
    assert ring.bytes_sent == 3 * MIB


@pytest.mark.gpu
@ON_GPU[1]
def test_a_message_is_what_was_computed_before_it_was_posted(ring: Ring) -> None:
    """A long kernel before the post, and a write at once after wait: the message lies between them.

    Nothing long stands after the post, or a wait that does not wait would go unseen.
    """
    block = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    got = torch.empty_like(block)
    torch.cuda._sleep(50_000_000)
    block.fill_(7)
    pending = ring.post([Parcel(0, 0, block, "block")], [Parcel(0, 0, got, "block")], "forward round 0")
    ring.wait(pending)
    block.fill_(9)
    assert int(got.min()) == int(got.max()) == 7
