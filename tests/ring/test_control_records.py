"""A control record that makes no sense is an error that names its sender."""

from __future__ import annotations

import threading

import pytest

from burst_attention import Ring, burst_attention, run_ranks
from tests.ring.fault_injection import QUICK, TIMEOUT, attempt, inputs

RECORDS = {
    "text": b"garbage",
    "nothing": b"",
    "zeros": bytes(1024),
    "beyond-utf-8": b"\xff\xfe\x00",
    "a-list": b"[1, 2]",
    "a-number": b"7",
    "no-call": b'{"kind": "call"}',
    "no-kind": b'{"call": 1}',
    "call-is-text": b'{"kind": "call", "call": "first"}',
    "call-is-null": b'{"kind": "call", "call": null}',
    "call-is-infinite": b'{"kind": "call", "call": Infinity}',
    "nested-too-deep": b"[" * 1024,
}


def after_record(data: bytes, source: int) -> str:
    """What a rank of two says in its first call when the other's record was `data`."""
    done = threading.Event()

    def body(ring: Ring) -> str:
        if ring.rank == source:
            done.wait(TIMEOUT)
            return "sent it"
        try:
            ring._inbox.deliver(source, data)
            return attempt(ring, lambda: burst_attention(*inputs(ring.rank), ring=ring))[0]
        finally:
            done.set()

    return run_ranks(body, 2, timeout=QUICK)[1 - source]


@pytest.mark.parametrize("data", RECORDS.values(), ids=RECORDS.keys())
@pytest.mark.parametrize("source", [0, 1], ids=["from-0", "from-1"])
def test_a_control_record_that_cannot_be_read(data: bytes, source: int) -> None:
    text = after_record(data, source)
    assert text.startswith("RingError: ") and f"rank {source} sent a control record that cannot be read" in text


@pytest.mark.parametrize("source", [0, 1], ids=["from-0", "from-1"])
@pytest.mark.parametrize(
    "data",
    [b'{"kind": "call", "call": 1}', b'{"kind": "call", "call": 1, "phase": ["forward"]}'],
    ids=["no-fields", "field-of-another-type"],
)
def test_a_control_record_that_lacks_what_a_call_has(data: bytes, source: int) -> None:
    """It can be read, so it is a disagreement at least; a KeyError or TypeError would say nothing to anybody."""
    assert after_record(data, source).startswith(("RingError: ", "ValueError: "))
