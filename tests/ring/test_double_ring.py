"""A ring between hosts and one inside each: exact as a flat one, moves what its plan says, refuses uneven hosts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from burst_attention import Layout, Ring, burst_attention, causal, plan, run_ranks
from burst_attention.api import per_host_of
from burst_attention.exactness import Sharding, gather, judge, run_rank
from burst_attention.launch import run_processes
from tests.ring import matrix
from tests.ring.fault_injection import inputs
from tests.ring.matrix import problem_of, require_exact, run_cell

COVER = [cell for cell in matrix.pairwise_cover() if cell[4] in (4, 8) and cell[7] <= 1000]
FACTORS = [(2, 2), (3, 2), (2, 3), (2, 4), (4, 2)]


@pytest.mark.parametrize("cell", COVER, ids=lambda cell: "-".join(map(str, cell)))
def test_the_cover_is_exact_on_hosts(cell: matrix.Cell) -> None:
    layout, mask, heads, dtype, ring_size, forward, backward, tokens = cell
    problem = problem_of(mask, heads, dtype, tokens)
    for per_host in {2, ring_size // 2}:
        sharding = Sharding(ring_size, layout, forward, backward, per_host)
        require_exact(problem, sharding, run_cell(problem, sharding))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    tokens=st.integers(matrix.FEW_TOKENS, 300),
    mask=st.sampled_from(matrix.MASKS),
    heads=st.sampled_from(tuple(matrix.HEADS)),
    dtype=st.sampled_from(tuple(matrix.DTYPES)),
    factors=st.sampled_from(FACTORS),
    layout=st.sampled_from(matrix.LAYOUTS),
    forward=st.sampled_from(("kv", "query", "auto")),
    backward=st.sampled_from(("kv", "query", "auto")),
)
def test_anywhere_in_the_space_is_exact(
    tokens: int,
    mask: str,
    heads: str,
    dtype: str,
    factors: tuple[int, int],
    layout: str,
    forward: str,
    backward: str,
) -> None:
    hosts, per_host = factors
    problem = problem_of(mask, heads, dtype, tokens)
    sharding = Sharding(hosts * per_host, layout, forward, backward, per_host)
    require_exact(problem, sharding, run_cell(problem, sharding))


@pytest.mark.parametrize("direction", ["kv", "query"])
def test_processes_of_a_mesh_of_two_dimensions(direction: str) -> None:
    problem = problem_of("causal", "GQA4", "fp32", 257)
    sharding = Sharding(4, "zigzag", direction, direction, 2)

    def body(ring: Ring) -> tuple[tuple[torch.Tensor, ...], int, tuple[str, ...]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
        again = Ring.from_mesh(mesh, hosts="between", timeout=30)
        result = run_rank(again, problem, sharding)
        return result, again.bytes_sent, again.hosts

    parts = run_processes(body, 4, timeout=120)
    require_exact(problem, sharding, judge(problem, gather(problem, sharding, [part[0] for part in parts])))
    made = plan(
        problem.tokens, 4, heads=problem.heads, kv_heads=problem.kv_heads, head_dim=problem.head_dim,
        dtype=problem.dtype, mask=causal(), layout="zigzag", direction=direction, forward_direction=direction,
        ranks_per_host=2,
    )  # fmt: skip
    for rank, (_, moved, hosts) in enumerate(parts):
        assert hosts == ("0", "0", "1", "1")
        # run_rank makes one forward for lse, and one forward and backward.
        assert moved == 2 * made.bytes_sent(rank, "forward") + made.bytes_sent(rank, "backward")


def test_processes_of_one_machine_are_one_host() -> None:
    def body(ring: Ring) -> int:
        return ring.ranks_per_host()

    assert run_processes(body, 3, timeout=60) == [3, 3, 3]


def call(ring: Ring, **options: object) -> str | None:
    """What a call raises."""
    try:
        burst_attention(*inputs(ring.rank), ring=ring, **options)  # type: ignore[call-overload]
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (("a", "a", "b"), "as many ranks on every host, got 2 on a, 1 on b; use topology='flat'"),
        (("a", "b", "a", "b"), "ranks numbered host by host, and here hosts take turns"),
    ],
)
def test_hosts_that_differ_are_refused_by_name_and_left_flat_otherwise(hosts: tuple[str, ...], message: str) -> None:
    def body(ring: Ring) -> tuple[str | None, str | None]:
        ring.hosts = hosts
        return call(ring), call(ring, topology="double")

    for flat, double in run_ranks(body, len(hosts), timeout=30):
        assert flat is None
        assert double is not None and message in double


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": "torus"}, "topology must be one of 'auto', 'flat', 'double', got 'torus'"),
        ({"topology": "double", "coalesce": 2}, "coalesce=2 needs topology='flat'"),
    ],
)
def test_wrong_topologies_are_refused(options: dict[str, object], message: str) -> None:
    for text in run_ranks(lambda ring: call(ring, **options), 4, timeout=30, ranks_per_host=2):
        assert text is not None and message in text


def test_ranks_that_disagree_on_the_topology_are_told() -> None:
    def body(ring: Ring) -> str | None:
        return call(ring, topology="flat" if ring.rank == 1 else "double")

    for text in run_ranks(body, 4, timeout=30, ranks_per_host=2):
        assert text is not None and "ranks disagree on options" in text and "ranks per host=2" in text


@pytest.mark.parametrize("per_host", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("direction", ["kv", "query"])
def test_groups_of_heads_that_take_turns_change_neither_results_nor_bytes(
    direction: str, groups: int, per_host: int
) -> None:
    layout, generator = Layout.zigzag(64, 4), torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, n, 64, 8, generator=generator, dtype=torch.float64) for n in (8, 4, 4, 8))
    sides = {"direction": direction, "forward_direction": direction}

    def body(ring: Ring) -> tuple[list[torch.Tensor], int]:
        leaves = [layout.shard(x, ring.rank, 2).requires_grad_() for x in (q, k, v)]
        topology = "flat" if per_host == 1 else "double"
        options = {"mask": causal(), "layout": layout, "topology": topology, "head_groups": groups, **sides}
        out = burst_attention(*leaves, ring=ring, **options)  # type: ignore[call-overload]
        gradients = torch.autograd.grad(out, leaves, layout.shard(dout, ring.rank, 2))
        return [out.detach(), *gradients], ring.bytes_sent

    made = plan(
        64, 4, heads=8, kv_heads=4, head_dim=8, batch=2, dtype=torch.float64, mask=causal(), layout=layout,
        ranks_per_host=per_host, head_groups=groups, **sides,
    )  # type: ignore[arg-type]  # fmt: skip
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    expected = [whole.detach(), *torch.autograd.grad(whole, leaves, dout)]
    parts = run_ranks(body, 4, timeout=30, ranks_per_host=2)
    for index, exact in enumerate(expected):
        torch.testing.assert_close(layout.unshard([results[index] for results, _ in parts], 2), exact)
    for rank, (_, moved) in enumerate(parts):
        assert moved == made.bytes_sent(rank, "forward") + made.bytes_sent(rank, "backward")
    ungrouped = plan(
        64, 4, heads=8, kv_heads=4, head_dim=8, batch=2, dtype=torch.float64, mask=causal(), layout=layout,
        ranks_per_host=per_host, head_groups=1, **sides,
    )  # type: ignore[arg-type]  # fmt: skip
    for phase in ("forward", "backward"):
        assert made.bytes_sent(1, phase) == ungrouped.bytes_sent(1, phase)
        assert made.flops(1, phase) == ungrouped.flops(1, phase)


@pytest.mark.parametrize("groups", [0, 3, "two", True])
def test_wrong_groups_are_refused(groups: object) -> None:
    for text in run_ranks(lambda ring: call(ring, head_groups=groups), 2, timeout=30):
        assert (
            text is not None and f"head_groups must be 'auto' or a divisor of the 2 key heads, got {groups!r}" in text
        )


@pytest.mark.parametrize(("size", "per_host"), [(4, 4), (4, 1)])
def test_a_double_ring_of_one_host_or_of_single_ranks_is_a_flat_one(size: int, per_host: int) -> None:
    def body(ring: Ring) -> tuple[str | None, int]:
        return call(ring, topology="double"), per_host_of(ring, "double")

    assert run_ranks(body, size, timeout=30, ranks_per_host=per_host) == [(None, 1)] * size


def test_a_plan_for_one_host_is_that_of_the_call() -> None:
    flat, one_host = (
        plan(64, 4, heads=4, head_dim=8, ranks_per_host=ranks, coalesce=coalesce)
        for ranks, coalesce in ((1, 2), (4, 2))
    )
    assert one_host == flat and one_host.groups == 1


def test_meshes_have_rings_of_their_own_made_once() -> None:
    def body(ring: Ring) -> tuple[list[str], int, tuple[str, ...]]:
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "between", "inside"))
        rings = [Ring.from_mesh(mesh["between", "inside"], hosts="between", timeout=20) for _ in range(2)]
        with pytest.raises(ValueError, match="ranks ascend row by row"):
            Ring.from_mesh(DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b")), hosts="a")
        return [made.name for made in rings], ring.ranks_per_host(), rings[0].hosts

    for names, world_per_host, hosts in run_processes(body, 4, timeout=60):
        assert len(set(names)) == 1
        assert world_per_host == 4 and hosts == ("0", "0", "1", "1")
