"""Heads exchanged inside groups, a ring between them: exact, moves what its plan says, refuses and fails by name."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burst_attention import Layout, Ring, burst_attention, causal, plan, run_ranks
from burst_attention.exactness import Sharding, gather, judge, run_rank
from burst_attention.launch import run_processes
from burst_attention.tiles.cpu_flash import CpuFlashKernel
from tests.ring import matrix
from tests.ring.fault_injection import inputs
from tests.ring.matrix import problem_of, require_exact, run_cell
from tests.ring.problems import Problem, check

COVER = [cell for cell in matrix.pairwise_cover(1) if cell[4] in (2, 4) and cell[7] <= 1000]
PLACES = [(2, 2, 1), (4, 2, 1), (4, 4, 1), (4, 2, 2), (6, 3, 1), (6, 2, 3), (8, 2, 4), (8, 4, 4)]
"""Ranks, neighbours that exchange heads, ranks per host."""


@pytest.mark.parametrize("cell", COVER, ids=lambda cell: "-".join(map(str, cell)))
def test_the_cover_is_exact(cell: matrix.Cell) -> None:
    layout, mask, heads, dtype, ring_size, forward, backward, tokens = cell
    problem = problem_of(mask, heads, dtype, tokens)
    for degree in {2, ring_size}:
        sharding = Sharding(ring_size, layout, forward, backward, heads=degree)
        require_exact(problem, sharding, run_cell(problem, sharding))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    tokens=st.integers(matrix.FEW_TOKENS, 300),
    mask=st.sampled_from(matrix.MASKS),
    heads=st.sampled_from(tuple(matrix.HEADS)),
    dtype=st.sampled_from(tuple(matrix.DTYPES)),
    place=st.sampled_from(PLACES),
    layout=st.sampled_from(matrix.LAYOUTS),
    forward=st.sampled_from(("kv", "query", "auto")),
    backward=st.sampled_from(("kv", "query", "auto")),
)
def test_anywhere_in_the_space_is_exact(
    tokens: int,
    mask: str,
    heads: str,
    dtype: str,
    place: tuple[int, int, int],
    layout: str,
    forward: str,
    backward: str,
) -> None:
    ranks, degree, per_host = place
    problem = problem_of(mask, heads, dtype, tokens)
    sharding = Sharding(ranks, layout, forward, backward, per_host, degree)
    require_exact(problem, sharding, run_cell(problem, sharding))


@pytest.mark.parametrize("through", ["out", "lse", "both"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 7), (6, 2), (10, 2), (5, 1)])
def test_uneven_heads_and_gradients_through_lse(heads: int, kv_heads: int, through: str) -> None:
    """Heads that do not divide: some ranks have more, key heads are on several ranks or there several times."""
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "size": 6, "batch": 2, "dtype": torch.float64}
    check(Problem(mask=causal(), layout="zigzag", **shape), through, heads=3)


def test_sums_of_shared_key_heads_are_as_precise_as_a_rings_own() -> None:
    """Gradients of one key head come from four ranks; rounded before they are summed, they would err by 1.7 times."""
    problem = problem_of("causal", "MQA", "bf16", 1000)
    ring, exchanged = (run_cell(problem, Sharding(4, "zigzag", heads=degree)) for degree in (1, 4))
    for expected, found in zip(ring, exchanged, strict=True):
        assert found.rms <= 1.05 * expected.rms, found.name
    made = plan(1000, 4, heads=4, kv_heads=1, head_dim=16, mask=causal(), head_degree=4, requires_grad="k")
    queries, keys = made.bundles("backward", "to tokens", 0)
    assert not queries.fields and keys.fields[0].dtype == torch.float32


@pytest.mark.parametrize("cross", [("striped", "contiguous"), ("zigzag", "striped")])
def test_cross_attention(cross: tuple[str, str]) -> None:
    layout, key_layout = cross
    check(Problem(tokens=37, key_tokens=53, size=4, layout=layout, key_layout=key_layout, value_dim=24), heads=2)


@pytest.mark.parametrize("needs", ["q", "k", "v", "kv", "qk"])
def test_only_wanted_gradients_travel(needs: str) -> None:
    layout = Layout.zigzag(64, 4)

    def body(ring: Ring) -> int:
        x = {name: torch.ones(1, 4, 16, 8, requires_grad=name in needs) for name in "qkv"}
        burst_attention(*x.values(), ring=ring, mask=causal(), layout=layout, heads=2).sum().backward()
        assert all((x[name].grad is not None) == (name in needs) for name in "qkv")
        return ring.bytes_sent

    made = plan(
        64, 4, heads=4, head_dim=8, dtype=torch.float32, mask=causal(), layout=layout, head_degree=2,
        requires_grad=needs,
    )  # fmt: skip
    for rank, moved in enumerate(run_ranks(body, 4, timeout=30)):
        assert moved == made.bytes_sent(rank, "forward") + made.bytes_sent(rank, "backward")


def test_processes_move_what_the_plan_says() -> None:
    problem = problem_of("causal", "GQA4", "bf16", 257)
    sharding = Sharding(4, "zigzag", heads=2)

    def body(ring: Ring) -> tuple[tuple[torch.Tensor, ...], int]:
        return run_rank(ring, problem, sharding), ring.bytes_sent

    parts = run_processes(body, 4, timeout=120)
    require_exact(problem, sharding, judge(problem, gather(problem, sharding, [part for part, _ in parts])))
    shapes: dict[str, Any] = {"heads": problem.heads, "kv_heads": problem.kv_heads, "head_dim": problem.head_dim}
    made = plan(257, 4, dtype=problem.dtype, mask=causal(), layout="zigzag", head_degree=2, **shapes)
    for rank, (_, moved) in enumerate(parts):
        assert moved == 2 * made.bytes_sent(rank, "forward") + made.bytes_sent(rank, "backward")


def call(ring: Ring, **options: Any) -> str | None:
    """What a call raises."""
    try:
        burst_attention(*inputs(ring.rank), ring=ring, **options)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "heads must say how many neighbouring ranks exchange heads, a divisor of the ring's 4 ranks"),
        ({"heads": True}, "heads must say how many"),
        ({"heads": 4}, "heads=4 exchanges heads over 4 ranks, and q has only 2"),
        ({"heads": 2, "head_groups": 2}, "head_groups must be 'auto' or a divisor of the 1 key heads, got 2"),
    ],
)
def test_wrong_calls_are_refused_on_every_rank(options: dict[str, Any], message: str) -> None:
    for text in run_ranks(lambda ring: call(ring, **options), 4, timeout=30, ranks_per_host=2):
        assert text is not None and message in text


def test_ranks_that_disagree_are_told() -> None:
    for text in run_ranks(lambda ring: call(ring, heads=1 + (ring.rank == 1)), 2, timeout=30):
        assert text is not None and "ranks disagree on options" in text and "heads=2" in text


def test_a_kernel_that_fails_is_told_by_the_rank_of_the_whole_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    before = CpuFlashKernel.forward

    def body(ring: Ring) -> str:
        q, k, v = (torch.ones(1, 4, 8, 8) for _ in range(3))

        def forward(self: Any, *args: Any, **options: Any) -> Any:
            if ring_of_thread.rank == 3:
                raise RuntimeError("out of luck")
            return before(self, *args, **options)

        ring_of_thread.rank = ring.rank
        monkeypatch.setattr(CpuFlashKernel, "forward", forward)
        try:
            burst_attention(q, k, v, ring=ring, heads=2)
        except Exception as error:
            return str(error)
        return ""

    ring_of_thread = threading.local()
    found = run_ranks(body, 4, timeout=10)
    assert found[3] == "out of luck"
    assert "rank 3 failed in forward round" in found[1] and "out of luck" in found[1]


def test_the_trace_shows_the_exchange() -> None:
    def body(ring: Ring) -> list[str]:
        ring.trace = []
        burst_attention(*(torch.ones(1, 4, 8, 8) for _ in range(3)), ring=ring, heads=2)
        return [event.phase for event in ring.trace]

    for phases in run_ranks(body, 4, timeout=30):
        assert phases == ["forward exchange of heads", "forward", "forward", "forward exchange of heads"]


def test_the_callers_tensors_stay_and_a_second_call_gives_the_same_bits() -> None:
    def body(ring: Ring) -> bool:
        generator = torch.Generator().manual_seed(ring.rank)
        leaves = [torch.randn(1, 4, 8, 8, generator=generator).requires_grad_() for _ in range(3)]
        before = [x.detach().clone() for x in leaves]
        found = []
        for _ in range(2):
            out = burst_attention(*leaves, ring=ring, heads=2, mask=causal())
            found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        return same and all(torch.equal(a, b) for a, b in zip(before, leaves, strict=True))

    assert all(run_ranks(body, 4, timeout=30))
