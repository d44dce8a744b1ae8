"""In which order the engine runs groups of heads, and what it tells of a failure, with runs that do nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from burst_attention.engine import run_phase
from burst_attention.lanes import Lanes
from burst_attention.merge import BlockOrder, Part
from burst_attention.tiles import Accumulator
from burst_attention.tiles.plain import PlainKernel
from burst_attention.topology import DoubleRing
from burst_attention.work import BackwardWork


@pytest.mark.parametrize(("fails", "where"), [(("begin", 0), 0), (("end", 1), 1), (("begin", 2), 2), (("end", 2), 2)])
def test_a_failure_is_told_with_the_round_it_is_in(fails: tuple[str, int], where: int) -> None:
    told: list[str] = []

    def act(name: str) -> Any:
        def at(index: int) -> None:
            if (name, index) == fails:
                raise ValueError("no")

        return at

    ring = SimpleNamespace(fail=lambda place, error: told.append(place))
    plan = SimpleNamespace(phase="forward", topology=DoubleRing(3))
    parts = {"begin": act("begin"), "end": act("end"), "lanes": Lanes()}
    run: Any = SimpleNamespace(rounds=(0, 1, 2), ring=ring, plan=plan, **parts)
    with pytest.raises(ValueError, match="no"):
        run_phase([run])
    assert told == [f"forward round {where}"]


@pytest.mark.parametrize(
    ("rounds", "per_host", "order"),
    [
        (3, 1, "a0 b0 a1 b1 a2 b2"),
        (5, 2, "a0 b0 a1 b1 a2 a3 a4 b2 b3 b4"),
        (6, 2, "a0 b0 a1 b1 a2 a3 a4 b2 b3 b4 a5 b5"),
        (10, 3, "a0 b0 a1 b1 a2 b2 a3 a4 a5 a6 b3 b4 b5 b6 a7 a8 a9 b7 b8 b9"),
        (4, 4, "a0 b0 a1 b1 a2 b2 a3 b3"),
        (1, 1, "a0 b0"),
    ],
)
def test_groups_of_heads_change_places_after_a_round_or_after_a_turn_of_a_host(
    rounds: int, per_host: int, order: str
) -> None:
    """Results of a turn leave the host, in the round after it, before the other group computes its own turn."""
    done: list[str] = []

    def group(name: str) -> Any:
        def end(index: int) -> None:
            assert done.index(f"{name}{index}") >= 0 and f"{name}{index + 1}" not in done

        plan = SimpleNamespace(phase="backward", topology=DoubleRing(3 * per_host, per_host))
        begin = lambda index: done.append(f"{name}{index}")  # noqa: E731
        return SimpleNamespace(
            rounds=range(rounds), ring=None, plan=plan, begin=begin, end=end, finish_heads=lambda: None, lanes=Lanes()
        )

    run_phase([group("a"), group("b")])
    assert done == order.split()


@pytest.mark.parametrize(
    ("reordered", "order"), [((), ["dq", "dk", "dv"]), (("dq",), ["dk", "dv", "dq"])], ids=["rows", "dq-reordered"]
)
def test_sums_in_an_order_of_their_own_end_last_beside_a_round(reordered: tuple[str, ...], order: list[str]) -> None:
    """They take few cores long to read; and the last pass has all that the round leaves."""
    ended: list[tuple[str, bool]] = []

    def total(name: str) -> Any:
        return SimpleNamespace(
            tensor=torch.empty(0),
            is_reordered=name in reordered,
            open_heads=lambda count: True,
            finish_heads=lambda beside: ended.append((name, beside)),
        )

    work = BackwardWork(PlainKernel(), 1.0, {name: total(name) for name in ("dq", "dk", "dv")})
    work.room = True
    work.finish_heads(2, 1)
    assert ended == [(name, name != order[-1]) for name in order]


def test_an_accumulator_knows_of_orders() -> None:
    total = Accumulator(torch.empty(1, 2, 4, 8), lambda *given, **options: None)
    total.add(0, torch.empty(1, 2, 4, 8))
    assert not total.is_reordered
    order = BlockOrder(torch.arange(32, dtype=torch.int32), 4, 1.0)
    total.growing("some", lambda: SimpleNamespace(part=lambda head: Part(0, head, torch.empty(1, 2, 4, 8), order)))
    assert total.is_reordered
