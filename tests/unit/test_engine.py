"""What the engine tells of a failure, with runs that do nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from burst_attention.engine import run_phase


@pytest.mark.parametrize(("fails", "where"), [(("begin", 0), 0), (("end", 1), 1), (("begin", 2), 2), (("end", 2), 2)])
def test_a_failure_is_told_with_the_round_it_is_in(fails: tuple[str, int], where: int) -> None:
    told: list[str] = []

    def act(name: str) -> Any:
        def at(index: int) -> None:
            if (name, index) == fails:
                raise ValueError("no")

        return at

    ring = SimpleNamespace(fail=lambda place, error: told.append(place))
    plan = SimpleNamespace(phase="forward")
    run: Any = SimpleNamespace(rounds=(0, 1, 2), ring=ring, plan=plan, begin=act("begin"), end=act("end"))
    with pytest.raises(ValueError, match="no"):
        run_phase([run])
    assert told == [f"forward round {where}"]
