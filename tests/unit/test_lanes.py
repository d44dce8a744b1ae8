"""Which stream waits for which, with streams that only count: each knows what it comes after."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from burst_attention import lanes as module
from burst_attention.lanes import Lanes


class FakeStream:
    """What was enqueued on a stream comes after a set of other work, by name."""

    numbers = itertools.count()

    def __init__(self, device: str = "cuda:0", priority: int = 0) -> None:
        self.priority, self.device, self.cuda_stream = priority, device, next(FakeStream.numbers)
        self.after: frozenset[str] = frozenset()

    def enqueue(self, work: str) -> frozenset[str]:
        """Returns what the work comes after."""
        before = self.after
        self.after |= {work}
        return before

    def record_event(self) -> frozenset[str]:
        return self.after

    def wait_event(self, event: frozenset[str]) -> None:
        self.after |= event

    def wait_stream(self, other: FakeStream) -> None:
        self.after |= other.after


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """The current stream of a GPU that is not there."""
    streams = [FakeStream()]

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        streams.append(stream)
        try:
            yield
        finally:
            streams.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[-1])
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: streams.__setitem__(-1, stream))
    monkeypatch.setattr(module, "_lanes", {})
    return streams[0]


def current() -> Any:
    return torch.cuda.current_stream()


def run_rounds(count: int, caller: FakeStream) -> tuple[Lanes, list[frozenset[str]], list[frozenset[str]]]:
    """As the engine runs them: what each round, and each round's transfers, come after."""
    lanes, rounds, posts = Lanes(torch.device("cuda:0")), [], []
    for index in range(count):
        caller.enqueue(f"block {index} is there")
        ready = lanes.ready()
        lanes.join()
        posts.append(caller.enqueue(f"post {index}"))
        with lanes.turn(ready):
            rounds.append(current().enqueue(f"round {index}"))
    lanes.join()
    return lanes, rounds, posts


def test_a_round_waits_for_its_block_and_not_for_the_round_before(caller: FakeStream) -> None:
    _, rounds, posts = run_rounds(4, caller)
    for index in range(4):
        assert f"block {index} is there" in rounds[index]
        assert f"round {index - 1}" not in rounds[index]
        # Its lane's own, and what transfers of the round before waited for.
        assert {f"round {other}" for other in range(index - 1)} <= rounds[index]
        assert {f"round {other}" for other in range(index)} <= posts[index]
    assert {f"round {index}" for index in range(4)} <= caller.after


def test_what_is_alone_comes_after_all_and_before_all(caller: FakeStream) -> None:
    lanes, _, _ = run_rounds(2, caller)
    with lanes.turn(lanes.ready()):
        with lanes.alone():
            before = current().enqueue("sum")
        current().enqueue("round 2")
    assert {"round 0", "round 1"} <= before
    with lanes.turn(frozenset()):
        assert "sum" in current().after and "round 2" not in current().after
    assert "sum" in caller.after and "round 2" not in caller.after
    with lanes.alone():
        assert "round 2" in caller.after


def test_what_is_joined_is_not_waited_for_again(caller: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between passes at the end of a phase take time; lanes wait for each pass all the same."""
    lanes, _, _ = run_rounds(2, caller)
    waits: list[FakeStream] = []
    wait = FakeStream.wait_stream
    monkeypatch.setattr(FakeStream, "wait_stream", lambda self, other: (waits.append(self), wait(self, other)))
    for index in range(2):
        with lanes.alone():
            caller.enqueue(f"sum {index}")
        assert all(f"sum {index}" in lane.after for lane in lanes.streams)
    lanes.join()
    assert caller not in waits
    with lanes.turn(frozenset()):
        current().enqueue("round 2")
    with lanes.alone():
        assert "round 2" in caller.after


def test_a_turn_comes_after_what_begins_the_last(caller: FakeStream) -> None:
    """But not after its tile."""
    lanes, x = Lanes(torch.device("cuda:0")), torch.zeros(1)
    ready = lanes.ready()
    with lanes.turn(ready):
        current().enqueue("cleared")
        module.begins(x)
        current().enqueue("tile 0")
    with lanes.turn(ready):
        assert current().after == {"cleared"}
    module.begins(x)  # outside of a turn nothing is to be overtaken


def test_a_hurried_pass_keeps_its_place(caller: FakeStream) -> None:
    lanes, x = Lanes(torch.device("cuda:0")), torch.zeros(1)

    def hurry(work: str) -> tuple[int, frozenset[str]]:
        stream = current()
        stream.enqueue(f"before {work}")
        with module.hurried(x):
            other, before = current(), current().enqueue(work)
            assert other is not stream
        assert work in stream.after
        return other.priority, before

    with lanes.beside():
        assert hurry("packing") == (module.HURRIED, {"before packing"})
    with lanes.turn(frozenset()):
        lane = current()
        with module.hurried(x):
            assert current() is lane, "there is no tile yet to come before"
        module.begins(x)
        assert hurry("on a lane") == (module.HURRIED, {"before on a lane"})
    with lanes.turn(frozenset()):
        assert hurry("before a tile") == (module.HURRIED, {"before before a tile"})
        with module.hurried(x):
            other = current()
            with pytest.MonkeyPatch.context() as patch:
                patch.delattr(FakeStream, "wait_stream")
                with module.hurried(x):
                    assert current() is other, "it hurries already"
        assert hurry("after it") == (module.HURRIED, current().after - {"after it"})
    with lanes.beside():
        earlier = {"before packing", "packing", "before on the caller's stream"}
        assert hurry("on the caller's stream") == (module.HURRIED, earlier)
    with module.hurried(x):
        assert current() is caller, "nothing computes beside it"


def test_a_pass_that_fails_is_waited_for(caller: FakeStream) -> None:
    lanes = Lanes(torch.device("cuda:0"))

    def fail() -> None:
        with lanes.beside(), module.hurried(torch.zeros(1)):
            current().enqueue("half a pass")
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        fail()
    assert "half a pass" in caller.after


def test_lanes_belong_to_a_stream(caller: FakeStream) -> None:
    first, second = Lanes(torch.device("cuda:0")), Lanes(torch.device("cuda:0"))
    assert first.streams == second.streams, "memory that was allocated on a lane is found again"
    with torch.cuda.stream(FakeStream()):  # type: ignore[arg-type]
        assert not set(Lanes(torch.device("cuda:0")).streams) & set(first.streams)


def test_lanes_without_a_turn_are_not_waited_for(caller: FakeStream) -> None:
    """A CUDA graph may be recorded: what is not part of it must not be waited for."""
    lanes = Lanes(torch.device("cuda:0"))
    for stream in lanes.streams:
        stream.enqueue("of another call")
    lanes.join()
    with lanes.alone():
        pass
    assert not caller.after


def test_without_a_gpu_nothing_is_asked_of_one() -> None:
    lanes = Lanes()
    assert lanes.ready() is None
    with lanes.turn(None), lanes.alone():
        lanes.join()
