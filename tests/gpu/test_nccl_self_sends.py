"""NCCL on one GPU: a rank that sends to itself proves packing, order, streams and events of the process ring."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from burst_attention import Ring
from burst_attention.ring import Parcel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MIB = 1 << 20


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield Ring.from_group()
    dist.destroy_process_group()


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


def test_a_message_is_what_was_computed_before_it_was_posted(ring: Ring) -> None:
    """Long kernels before and after the post, on the same stream: the message lies between them, and wait ends it."""
    block = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    got = torch.empty_like(block)
    torch.cuda._sleep(50_000_000)
    block.fill_(7)
    pending = ring.post([Parcel(0, 0, block, "block")], [Parcel(0, 0, got, "block")], "forward round 0")
    torch.cuda._sleep(50_000_000)
    ring.wait(pending)
    block.fill_(9)
    assert int(got.min()) == int(got.max()) == 7
