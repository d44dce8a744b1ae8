"""An integer simulator: walks any phase plan, without tensors, and proves that it can run.

It proves that a sender holds what it sends, that every send meets its receive in the same round and order, that no
buffer is written before what it held has left, that a rank gets the rows its pieces need and no others, and that every
contribution to a result reaches home exactly once. It knows rounds and transfers only, not how they were built.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from burst_attention.geometry import (
    Rows,
    contains_rows,
    intersect_rows,
    moved_rows,
    stretches,
    subtract_rows,
    unite_rows,
)
from burst_attention.schedule.buffers import PlanError, require_memory
from burst_attention.schedule.bundles import Heads
from burst_attention.schedule.plan import OPERAND, RESULT, PhasePlan, Round, Transfer, Visit

Contributions = Counter[tuple[int, int]]
"""How often (contributing rank, row of the block) is summed into a result."""


@dataclass
class _Waiting:
    """A result that waits to be sent: its rows, and what has been summed into them."""

    rows: Rows
    sums: Contributions


@dataclass
class _Rank:
    operands: dict[int, Rows] = field(default_factory=dict)
    """Rows at hand of each visiting block."""
    results: dict[int, _Waiting] = field(default_factory=dict)
    """What waits to be sent for each block, computed in the round before."""
    home: Contributions = field(default_factory=Counter)
    home_heads: list[Heads] = field(default_factory=list)
    """Query heads that its own pieces were computed for."""


def simulate(plan: PhasePlan) -> None:
    """Walk the plan and raise PlanError at the first thing that does not hold."""
    size = plan.topology.size
    ranks = [_Rank() for _ in range(size)]
    expected: list[Contributions] = [Counter() for _ in range(size)]
    under_way: list[tuple[Transfer, Contributions]] = []
    for index in range(max(len(steps) for steps in plan.rounds)):
        steps = [rounds[index] if index < len(rounds) else None for rounds in plan.rounds]
        for rank, step in enumerate(steps):
            if step is not None:
                _require_visits(plan, rank, step, index)
        _require_matched(steps, index)
        under_way += [(t, _sent(plan, ranks[t.source], t, index)) for step in steps if step for t in step.sends]
        for rank, step in enumerate(steps):
            _require(not ranks[rank].results, f"rank {rank} round {index}: a result is still waiting to be sent")
            if step is not None:
                _compute(plan, ranks[rank], rank, step, expected)
        for rank in range(size):
            _receive(ranks[rank], rank, [(t, sums) for t, sums in under_way if t.due == index and t.target == rank])
        under_way = [(t, sums) for t, sums in under_way if t.due != index]
    _require(not under_way, f"due after the last round: {under_way[:1]}")
    for transfer in (t for rounds in plan.rounds for step in rounds for t in step.sends):
        _require_one_stretch(plan, transfer)
    for rank in range(size):
        require_memory(plan, rank)
        edges = [0, *(edge for heads in sorted(ranks[rank].home_heads) for edge in heads), plan.shapes.heads]
        once = edges[::2] == edges[1::2] or not ranks[rank].home_heads
        _require(once, f"rank {rank} computes heads {ranks[rank].home_heads} of its own block")
        _require(not ranks[rank].operands, f"rank {rank} ends with a block that nobody computes with")
        _require(not ranks[rank].results, f"rank {rank} ends with a result that was never sent")
        if plan.results.fields:
            _require(ranks[rank].home == expected[rank], f"home {rank} did not get every contribution exactly once")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)


def _require_visits(plan: PhasePlan, rank: int, step: Round, index: int) -> None:
    """Home is computed alone, or visitors are: each once, with the rows that its pieces touch, or those of any rank."""
    where = f"rank {rank} round {index}"
    _require(step.index == index, f"{where} has index {step.index}")
    blocks = [visit.block for visit in step.visits]
    _require(len(set(blocks)) == len(blocks) and (rank not in blocks or len(blocks) == 1), f"{where}: visits {blocks}")
    for visit in step.visits:
        touched, anywhere = _touched_on_host(plan, rank, visit), _touched_anywhere(plan, visit.block)
        allowed = ((),) if visit.block == rank else (touched, anywhere) if touched else (touched,)
        _require(visit.heads is None or visit.block == rank, f"{where}: only some heads of a visiting block")
        _require(visit.rows in allowed, f"{where}: rows of {visit.block} are {visit.rows}, pieces touch {touched}")


def _touched_on_host(plan: PhasePlan, rank: int, visit: Visit) -> Rows:
    """Rows of a block that a visit's pieces touch, or those of other ranks of the host, its home left out."""
    begin = rank - rank % plan.topology.per_host
    others = set(range(begin, begin + plan.topology.per_host)) - {rank, visit.block}
    steps = (step for other in sorted(others) for step in plan.rounds[other])
    visits = (visit, *(other for step in steps for other in step.visits if other.block == visit.block))
    return unite_rows(moved_rows(piece, plan.direction) for each in visits for piece in each.pieces)


def _touched_anywhere(plan: PhasePlan, block: int) -> Rows:
    """Rows of a block that pieces of any rank touch but its home's."""
    steps = (step for rank, rounds in enumerate(plan.rounds) if rank != block for step in rounds)
    visits = (visit for step in steps for visit in step.visits if visit.block == block)
    return unite_rows(moved_rows(piece, plan.direction) for visit in visits for piece in visit.pieces)


def _require_one_stretch(plan: PhasePlan, transfer: Transfer) -> None:
    """A transfer is one stretch of memory in the buffer it is read from and in the one it is written to."""
    rows, block, index = transfer.rows, transfer.block, transfer.round
    _require(bool(rows) and rows == unite_rows(rows), f"{transfer}: rows must be some, in order, each once")
    source, target = plan.rounds[transfer.source], plan.rounds[transfer.target]
    if transfer.channel == RESULT:
        memories = [_rows_of(source, index - 1, block)]
    else:
        at_home = transfer.source == block
        packed = plan.packed_at_home(block, source[index]) if at_home else _rows_of(source, index, block)
        memories = [packed, _rows_of(target, transfer.due + 1, block)]
    for memory in memories:
        _require(contains_rows(memory, rows), f"{transfer}: a buffer has place for {memory} only")
        _require(len(stretches(rows, memory)) == 1, f"{transfer}: its rows do not lie together among {memory}")


def _rows_of(rounds: tuple[Round, ...], index: int, block: int) -> Rows:
    """The rows of a block in a rank's buffer of a round."""
    visits = rounds[index].visits if 0 <= index < len(rounds) else ()
    return next((visit.rows for visit in visits if visit.block == block), ())


def _require_matched(steps: list[Round | None], index: int) -> None:
    """Between any two ranks, on each channel, both ends list the same transfers in the same order."""
    ends: list[dict[tuple[int, int, str], list[Transfer]]] = [{}, {}]
    for rank, step in enumerate(steps):
        for side, transfers in enumerate((step.sends, step.receives) if step else ()):
            for transfer in transfers:
                _require(transfer.round == index <= transfer.due, f"{transfer} is listed in round {index}")
                _require(transfer.source != transfer.target, f"{transfer} goes to its own sender")
                _require(rank == (transfer.source, transfer.target)[side], f"rank {rank} lists {transfer}")
                ends[side].setdefault((transfer.source, transfer.target, transfer.channel), []).append(transfer)
    _require(ends[0] == ends[1], f"round {index}: sends and receives differ")


def _sent(plan: PhasePlan, rank: _Rank, transfer: Transfer, index: int) -> Contributions:
    """The contributions that the wire carries, none for operands, after proving that the sender has the rows."""
    if transfer.channel == OPERAND:
        if transfer.block == transfer.source:
            held: Rows = ((0, plan.local_rows[transfer.block]),)
        else:
            _require(transfer.block in rank.operands, f"{transfer}: not held")
            held = rank.operands[transfer.block]
        _require(contains_rows(held, transfer.rows), f"{transfer}: sender holds only {held}")
        return Counter()
    _require(transfer.block in rank.results, f"{transfer}: no such result in round {index}")
    waiting = rank.results[transfer.block]
    _require(contains_rows(waiting.rows, transfer.rows), f"{transfer}: not all of its rows are waiting")
    rows = {row for first, last in transfer.rows for row in range(first, last)}
    carried = Counter({at: count for at, count in waiting.sums.items() if at[1] in rows})
    for at in carried:
        del waiting.sums[at]
    waiting.rows = subtract_rows(waiting.rows, transfer.rows)
    if not waiting.rows:
        del rank.results[transfer.block]
    return carried


def _compute(plan: PhasePlan, rank: _Rank, index: int, step: Round, expected: list[Contributions]) -> None:
    """Contribute every row of the moving side that the visits' pieces touch."""
    visitors = {visit.block for visit in step.visits} - {index}
    _require(set(rank.operands) <= visitors, f"rank {index} round {step.index}: nobody computes with a block at hand")
    _require(step.moving == plan.direction, f"rank {index} round {step.index}: {step.moving} moves")
    for visit in step.visits:
        at_home = visit.block == index
        _require(at_home or visit.block in rank.operands, f"rank {index} lacks block {visit.block}")
        held = ((0, plan.local_rows[index]),) if at_home else rank.operands[visit.block]
        _require(at_home or held == visit.rows, f"rank {index} round {step.index}: held rows are {held}")
        touched: Contributions = Counter()
        for piece in visit.pieces:
            first, last = moved_rows(piece, plan.direction)
            _require(contains_rows(held, ((first, last),)), f"rank {index} round {step.index} lacks rows of {piece}")
            # The same rank may touch a row by several pieces: one contribution.
            touched.update({(index, row): 1 for row in range(first, last) if (index, row) not in touched})
        if at_home and visit.pieces:
            rank.home_heads.append(visit.heads or (0, plan.shapes.heads))
        if not plan.results.fields:
            continue
        if at_home:
            # At home also in two rounds.
            new = touched - rank.home
            rank.home.update(new)
            expected[index].update(new)
            continue
        expected[visit.block].update(touched)
        rank.results[visit.block] = _Waiting(visit.rows, touched)


def _receive(rank: _Rank, index: int, arrived: list[tuple[Transfer, Contributions]]) -> None:
    """Take in what is due in a round: operands for the next, and results for blocks just computed or for home."""
    rank.operands = {}
    for transfer, sums in arrived:
        if transfer.channel == OPERAND:
            _require(transfer.block != index, f"rank {index} receives its own block")
            held = rank.operands.get(transfer.block, ())
            _require(not intersect_rows(held, transfer.rows), f"{transfer}: some of its rows arrive twice")
            rank.operands[transfer.block] = unite_rows((*held, *transfer.rows))
            continue
        if transfer.block == index:
            rank.home.update(sums)
            continue
        _require(transfer.block in rank.results, f"{transfer}: nothing to add it to")
        mine = rank.results[transfer.block]
        _require(contains_rows(mine.rows, transfer.rows), f"{transfer}: nothing to add some of its rows to")
        mine.sums.update(sums)
