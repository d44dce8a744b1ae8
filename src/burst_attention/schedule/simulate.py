"""An integer simulator: walks any phase plan, without tensors, and proves that it can run.

It proves that a sender holds what it sends, that every send meets its receive in the same round and order, that
buffers stay bounded, that pieces lie in rows at hand, and that every contribution to a result reaches home exactly
once. It knows rounds and transfers only, not how they were built.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from burst_attention.geometry import Rows, contains_rows
from burst_attention.schedule.plan import OPERAND, RESULT, PhasePlan, Round, Transfer

Contributions = Counter[tuple[int, int]]
"""How often (contributing rank, row of the block) is summed into a result."""


class PlanError(AssertionError):
    """A plan that cannot run, or would compute something else."""


@dataclass
class _Rank:
    operand: tuple[int, Rows] | None = None
    result: tuple[int, Contributions] | None = None
    home: Contributions = field(default_factory=Counter)


def simulate(plan: PhasePlan) -> None:
    """Walk the plan and raise PlanError at the first thing that does not hold."""
    size = plan.topology.size
    ranks = [_Rank() for _ in range(size)]
    expected: list[Contributions] = [Counter() for _ in range(size)]
    for index in range(max(len(steps) for steps in plan.rounds)):
        steps = [rounds[index] if index < len(rounds) else None for rounds in plan.rounds]
        _require_matched(steps, index)
        arrived = {t: _sent(plan, ranks[t.source], t, index) for step in steps if step for t in step.sends}
        for rank, step in enumerate(steps):
            if step is not None:
                _compute(plan, ranks[rank], rank, step, expected)
        for rank, step in enumerate(steps):
            if step is not None:
                _receive(ranks[rank], rank, step, arrived)
    for rank in range(size):
        _require(ranks[rank].result is None, f"rank {rank} ends with a result that was never sent")
        if plan.results.fields:
            _require(ranks[rank].home == expected[rank], f"home {rank} did not get every contribution exactly once")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)


def _require_matched(steps: list[Round | None], index: int) -> None:
    """Between any two ranks, on each channel, both ends list the same transfers in the same order."""
    ends: list[dict[tuple[int, int, str], list[Transfer]]] = [{}, {}]
    for rank, step in enumerate(steps):
        for side, transfers in enumerate((step.sends, step.receives) if step else ()):
            for transfer in transfers:
                _require(transfer.round == index, f"{transfer} is listed in round {index}")
                _require(transfer.source != transfer.target, f"{transfer} goes to its own sender")
                _require(rank == (transfer.source, transfer.target)[side], f"rank {rank} lists {transfer}")
                ends[side].setdefault((transfer.source, transfer.target, transfer.channel), []).append(transfer)
    _require(ends[0] == ends[1], f"round {index}: sends and receives differ")


def _sent(plan: PhasePlan, rank: _Rank, transfer: Transfer, index: int) -> tuple[int, Rows | Contributions]:
    """What the wire carries, after proving that the sender has it."""
    if transfer.channel == OPERAND:
        if transfer.block == transfer.source:
            held: Rows = ((0, plan.local_rows[transfer.block]),)
        else:
            _require(rank.operand is not None and rank.operand[0] == transfer.block, f"{transfer}: not held")
            assert rank.operand is not None
            held = rank.operand[1]
        _require(contains_rows(held, transfer.rows), f"{transfer}: sender holds only {held}")
        return transfer.block, transfer.rows
    _require(
        rank.result is not None and rank.result[0] == transfer.block, f"{transfer}: no such result in round {index}"
    )
    assert rank.result is not None
    contributions = rank.result[1]
    rows = {row for _, row in contributions}
    _require(
        rows == {row for first, last in transfer.rows for row in range(first, last)}, f"{transfer}: its rows are {rows}"
    )
    rank.result = None
    return transfer.block, contributions


def _compute(plan: PhasePlan, rank: _Rank, index: int, step: Round, expected: list[Contributions]) -> None:
    """Contribute every row of the moving side that the round's pieces touch."""
    at_home = step.block == index
    touched: Contributions = Counter()
    for piece in step.pieces:
        first, count = (piece.k_first, piece.k_count) if plan.direction == "kv" else (piece.q_first, piece.q_count)
        held: Rows = ((0, plan.local_rows[index]),) if at_home else (rank.operand[1] if rank.operand else ())
        _require(at_home or (rank.operand or (None,))[0] == step.block, f"rank {index} lacks block {step.block}")
        _require(
            contains_rows(held, ((first, first + count),)), f"rank {index} round {step.index} lacks rows of {piece}"
        )
        _require(at_home or held == step.held, f"rank {index} round {step.index}: held rows are {held}")
        touched.update({(index, row): 1 for row in range(first, first + count)})
    if not plan.results.fields:
        return
    # The same rank may touch a row by several pieces and, at home, in two rounds: one contribution each.
    touched = Counter(dict.fromkeys(touched, 1))
    if at_home:
        new = touched - rank.home
        rank.home.update(new)
        expected[index].update(new)
        return
    expected[step.block].update(touched)
    if touched:
        _require(rank.result is None, f"rank {index} round {step.index}: a result is still waiting to be sent")
        rank.result = step.block, touched


def _receive(rank: _Rank, index: int, step: Round, arrived: dict[Transfer, tuple[int, Rows | Contributions]]) -> None:
    """Take in what was posted this round: one operand at most, and results for the block just computed or for home."""
    operands = [t for t in step.receives if t.channel == OPERAND]
    _require(len(operands) <= 1, f"rank {index} round {step.index} receives {len(operands)} blocks into one slot")
    rank.operand = None
    for transfer in step.receives:
        _, content = arrived[transfer]
        if transfer.channel == OPERAND:
            _require(transfer.block != index, f"rank {index} receives its own block")
            rank.operand = transfer.block, transfer.rows
            continue
        assert isinstance(content, Counter)
        if transfer.block == index:
            rank.home.update(content)
            continue
        _require(rank.result is not None and rank.result[0] == transfer.block, f"{transfer}: nothing to add it to")
        assert rank.result is not None
        rank.result[1].update(content)
    for at_home in (True, False):
        count = sum(1 for t in step.receives if t.channel == RESULT and (t.block == index) == at_home)
        _require(count <= 1, f"rank {index} round {step.index} receives {count} results into one buffer")
