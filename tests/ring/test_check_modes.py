"""The check option decides when records are exchanged, and a rank that goes its own way still stops all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention import Layout, Mask, Ring, burst_attention, causal, full, run_ranks
from burst_attention.launch import run_processes
from burst_attention.ring.base import RECORD_BYTES
from tests.ring.refusals import SIZE, TIMEOUT, TOKENS, WRONG, attempt, inputs, wanting

NOT_CHECKED = [
    ("first", {"direction": "sideways"}, "direction must be one of 'auto', 'kv', 'query', got 'sideways'"),
    ("off", {}, "check='off' needs Layout objects, e.g. layout=Layout.contiguous(tokens, ring_size)"),
    ("off", {"layout": "zigzag"}, "without a check no rank learns the whole length"),
    ("off", {"layout": Layout.zigzag(TOKENS, SIZE), "key_layout": "zigzag"}, "check='off' needs Layout objects"),
]
not_checked = pytest.mark.parametrize(
    ("check", "options", "says"), NOT_CHECKED, ids=["first", "off", "off-with-name", "off-with-key-name"]
)


@not_checked
def test_one_wrong_rank_without_a_check_stops_all(check: str, options: dict[str, Any], says: str) -> None:
    """The others may not be listening for records, so they are told as of a failure, and the ring ends."""
    given = {"check": check, "layout": Layout.zigzag(TOKENS, SIZE)}

    def body(ring: Ring) -> str:
        own = {"check": check, **options} if ring.rank == WRONG else given
        return attempt(ring, lambda: burst_attention(*inputs(ring.rank), ring=ring, forward_direction="kv", **own))

    texts = run_ranks(body, SIZE, timeout=TIMEOUT)
    for rank, text in enumerate(texts):
        assert says in text
        assert text.startswith("ValueError: " if rank == WRONG else "RingError: ")
        assert rank == WRONG or "rank 1 was called wrongly" in text


@not_checked
def test_the_same_wrong_call_without_a_check_is_a_value_error_on_every_rank(
    check: str, options: dict[str, Any], says: str
) -> None:
    def body(ring: Ring) -> str:
        return attempt(ring, lambda: burst_attention(*inputs(ring.rank), ring=ring, check=check, **options))

    texts = run_ranks(body, SIZE, timeout=TIMEOUT)
    for text in texts:
        assert text.startswith("ValueError: ") and says in text


def control_bytes(ring: Ring, call: Callable[[], Any]) -> int:
    before = ring.control_bytes
    call()
    return ring.control_bytes - before


@pytest.mark.parametrize(
    ("check", "first", "second"), [("always", 1, 1), ("first", 1, 0), ("off", 0, 0)], ids=["always", "first", "off"]
)
def test_when_records_are_exchanged(check: str, first: int, second: int) -> None:
    layout = Layout.zigzag(TOKENS, SIZE)

    def body(ring: Ring) -> list[int]:
        counts = []
        for _ in range(2):
            q, k, v = wanting("qkv")(inputs(ring.rank))
            outs: list[Tensor] = []

            def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v, outs: list[Tensor] = outs) -> None:
                outs.append(burst_attention(q, k, v, ring=ring, mask=causal(), layout=layout, check=check))

            counts.append(control_bytes(ring, forward))
            counts.append(control_bytes(ring, outs[0].sum().backward))
        # A call that was not seen before: other tokens.
        other = [x[:, :, :0] for x in inputs(ring.rank)]
        empty = Layout.zigzag(0, SIZE)
        counts.append(control_bytes(ring, lambda: burst_attention(*other, ring=ring, layout=empty, check=check)))
        return counts

    record = RECORD_BYTES * (SIZE - 1)
    expected = [record * first] * 2 + [record * second] * 2 + [record * first]
    assert run_ranks(body, SIZE, timeout=TIMEOUT) == [expected] * SIZE


@pytest.mark.parametrize("forward_direction", ["kv", "query"])
@pytest.mark.parametrize(
    "changed", [{"mask": causal()}, {"scale": 0.5}, {"mask": "causal"}], ids=["mask", "scale", "bad-argument"]
)
def test_a_rank_that_leaves_an_agreed_call_stops_all(changed: dict[str, Any], forward_direction: str) -> None:
    # One that fails ends the ring for those still in the call before, so all come out of it first.
    agreed = threading.Barrier(SIZE, timeout=TIMEOUT)

    def body(ring: Ring) -> str:
        options: dict[str, Any] = {"check": "first", "forward_direction": forward_direction}
        for _ in range(2):
            burst_attention(*inputs(ring.rank), ring=ring, **options)
        agreed.wait()
        if ring.rank == WRONG:
            options |= changed
        return attempt(ring, lambda: burst_attention(*inputs(ring.rank), ring=ring, **options))

    texts = run_ranks(body, SIZE, timeout=TIMEOUT)
    bad = isinstance(changed.get("mask"), str)
    for rank, text in enumerate(texts):
        if bad and rank == WRONG:
            assert text.startswith("ValueError: mask must be")
        else:
            # In the call, or before it when another rank was quicker to find out.
            assert text.startswith((f"RingError: rank {rank}, ", f"RingError: rank {rank}: this ring failed earlier"))
    others = [text for rank, text in enumerate(texts) if rank != WRONG]
    assert any("rank 1 does not follow" in text or "rank 1 was called wrongly" in text for text in others)


@pytest.mark.parametrize("check", ["first", "off"])
def test_a_rank_that_checks_alone_stops_all(check: str) -> None:
    """One rank exchanges records, the others do not: both kinds hear of it at once."""
    layout = Layout.contiguous(TOKENS, SIZE)
    agreed = threading.Barrier(SIZE, timeout=TIMEOUT)

    def body(ring: Ring) -> str:
        burst_attention(*inputs(ring.rank), ring=ring, layout=layout, check=check)
        agreed.wait()
        own = "always" if ring.rank == WRONG else check
        return attempt(ring, lambda: burst_attention(*inputs(ring.rank), ring=ring, layout=layout, check=own))

    for text in run_ranks(body, SIZE, timeout=TIMEOUT):
        assert text.startswith("RingError: ") and "rank 1 does not follow" in text


def test_a_rank_that_changes_its_mask_in_training_stops_all() -> None:
    """After steps whose forward and backward were agreed on: no rank is left waiting."""

    def step_once(ring: Ring, qkv: list[Tensor], mask: Mask) -> None:
        burst_attention(*qkv, ring=ring, mask=mask, check="first").sum().backward()

    agreed = threading.Barrier(SIZE, timeout=TIMEOUT)

    def body(ring: Ring) -> list[str]:
        texts = []
        for step in range(3):
            agreed.wait()
            mask = causal() if step == 2 and ring.rank == WRONG else full()
            qkv = wanting("qkv")(inputs(ring.rank))
            texts.append(attempt(ring, partial(step_once, ring, qkv, mask)))
        return texts

    for texts in run_ranks(body, SIZE, timeout=TIMEOUT):
        assert texts[:2] == ["no error", "no error"]
        assert texts[2].startswith("RingError: ") and "rank 1" in texts[2]


def test_a_rank_that_leaves_an_agreed_call_stops_all_processes() -> None:
    def body(ring: Ring) -> tuple[int, str]:
        burst_attention(*inputs(ring.rank), ring=ring, check="first")
        second = control_bytes(ring, lambda: burst_attention(*inputs(ring.rank), ring=ring, check="first"))
        torch.distributed.barrier()
        mask = causal() if ring.rank == WRONG else None
        return second, attempt(ring, lambda: burst_attention(*inputs(ring.rank), ring=ring, mask=mask, check="first"))

    for rank, (second, text) in enumerate(run_processes(body, SIZE, timeout=50, ring_timeout=TIMEOUT)):
        assert second == 0
        assert text.startswith((f"RingError: rank {rank}, ", f"RingError: rank {rank}: this ring failed earlier"))
