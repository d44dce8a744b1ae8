"""A message of another size than was planned is an error at both ends; messages match as they were posted."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from burst_attention import Layout, Ring, RingError, burst_attention, run_ranks
from burst_attention.launch import RankFailedError, run_processes
from burst_attention.ring.base import Parcel

LENGTHS = [(100, 200), (200, 100), (1, 1 << 20), (1 << 20, 1)]


def pass_block(ring: Ring, sent: int, planned: int) -> None:
    """Rank 0 sends one size, rank 1 plans for another; a block of the right size goes ahead."""
    for lengths in ((64, 64), (sent, planned)):
        parcel = Parcel(1 - ring.rank, 0, torch.zeros(lengths[ring.rank], dtype=torch.uint8), "block 0")
        ring.wait(ring.post(*(([parcel], []) if ring.rank == 0 else ([], [parcel])), "round 1"))


def test_between_processes() -> None:
    """gloo alone takes a short message for a whole one, and ends the process at a long one."""

    def body(ring: Ring) -> str:
        said = []
        for sent, planned in LENGTHS:
            # Each on a ring of its own, for one that has failed is not used again.
            other = Ring.from_group(torch.distributed.new_group([0, 1]), timeout=0.5)
            with pytest.raises(RingError) as caught:
                pass_block(other, sent, planned)
            said.append(str(caught.value))
            ring.exchange({}, "next")
            ring.next_call()
        return "\n".join(said)

    sender, receiver = run_processes(body, 2, timeout=40)
    for (sent, planned), left, right in zip(LENGTHS, sender.splitlines(), receiver.splitlines(), strict=True):
        assert left == f"rank 0, round 1: rank 1 does not take block 0 of {sent} bytes within 0.5 s"
        assert right == f"rank 1, round 1: no block 0 of {planned} bytes from rank 0 within 0.5 s"


@pytest.mark.parametrize(("sent", "planned"), LENGTHS)
def test_between_threads(sent: int, planned: int) -> None:
    with pytest.raises(RingError, match=f"block 0 from rank 0 has {sent} bytes, {planned} were planned"):
        run_ranks(lambda ring: pass_block(ring, sent, planned), 2, timeout=5)


def test_calls_that_differ_and_are_not_checked() -> None:
    """Every rank is content with its own arguments, and nobody compares them."""

    def body(ring: Ring) -> None:
        layout = Layout.contiguous((64, 128)[ring.rank], 2)
        q, k, v = (torch.ones(1, 2, len(layout.positions(ring.rank)), 8) for _ in range(3))
        burst_attention(q, k, v, ring=ring, layout=layout, check="off")

    with pytest.raises(RankFailedError) as caught:
        run_processes(body, 2, timeout=40, ring_timeout=1)
    assert sorted(caught.value.errors) == [0, 1]
    for rank, text in caught.value.errors.items():
        assert re.match(rf"RingError: rank {rank}, forward round 0: .*rank {1 - rank}", text), text


@pytest.mark.parametrize("run", [run_ranks, run_processes], ids=["threads", "processes"])
def test_transfers_match_in_the_order_they_are_posted_and_may_end_in_another(run: Any) -> None:
    def body(ring: Ring) -> list[float]:
        tensors = [torch.full((4,), float(number if ring.rank == 0 else -1)) for number in range(3)]
        parcels = [[Parcel(1 - ring.rank, 0, tensor.view(torch.uint8), "block")] for tensor in tensors]
        under_way = [ring.post(*((one, []) if ring.rank == 0 else ([], one)), "round 1") for one in parcels]
        for pending in (under_way[1], under_way[2], under_way[0]):
            ring.wait(pending)
        return [float(tensor[0]) for tensor in tensors]

    assert run(body, 2, timeout=30) == [[0.0, 1.0, 2.0]] * 2
