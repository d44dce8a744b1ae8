"""results="auto": where gradients of keys go straight home in the dtype of the inputs, and where they do not."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import pytest
import torch

from burst_attention import Layout, Ring, burst_attention, causal, full, ops, plan, run_ranks, window
from burst_attention.options import make_options
from burst_attention.schedule import PhasePlan, Round, Shapes, build_plan
from burst_attention.tiles import TileRequest, pick_kernel
from burst_attention.tiles.plain import PlainKernel

pytest.importorskip("triton", reason="without it other kernels are planned for")

SHARD, RANKS = 2048, 4
"""Vendors' kernels serve halves of it."""


@pytest.fixture(autouse=True)
def not_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests ask for deterministic algorithms, which our own kernels serve."""
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: False)


def backward(**changes: Any) -> PhasePlan:
    """Of a ring on one host of GPUs with FlashAttention-4, which is what is planned for where there is no GPU."""
    options: dict[str, Any] = {
        "tokens": SHARD * RANKS, "ring_size": RANKS, "heads": 8, "head_dim": 128, "mask": causal(), "layout": "zigzag",
        "device": "cuda",
    }  # fmt: skip
    found: PhasePlan = plan(**options | changes).phase("backward")
    return found


@pytest.mark.parametrize(("head_dim", "kv_heads"), [(128, 8), (128, 2), (80, 8)])
@pytest.mark.parametrize(("mask", "layout"), [(causal(), "zigzag"), (full(), "contiguous")], ids=str)
def test_gradients_of_keys_go_straight_home_as_the_kernel_gives_them(
    mask: Any, layout: str, head_dim: int, kv_heads: int
) -> None:
    options: dict[str, Any] = {"mask": mask, "layout": layout, "head_dim": head_dim, "kv_heads": kv_heads}
    found = backward(**options)
    assert found.straight and found.direction == "kv"
    assert {(field.name, field.dtype) for field in found.results.fields} == {
        ("dk", torch.bfloat16),
        ("dv", torch.bfloat16),
    }
    chain = backward(**options, results="chain")
    assert not chain.straight and found.total_bytes <= chain.total_bytes


@pytest.mark.parametrize("changes", [{"mask": causal() & window(1000)}, {"tokens": SHARD * RANKS - 4}], ids=str)
def test_what_vendors_do_not_serve_our_backward_for_hopper_gives_as_it_travels(changes: dict[str, Any]) -> None:
    """For heads that it was measured with."""
    assert backward(**changes).straight and not backward(**changes, head_dim=64).straight


@pytest.mark.parametrize("mask", [causal(), causal() & window(1000)], ids=str)
def test_our_backward_for_hopper_by_name_gives_gradients_of_any_mask_as_they_travel(mask: Any) -> None:
    """Where queries would move in a chain, and where keys would."""
    for kv_heads in (2, 8):
        assert backward(kernel="hopper", mask=mask, kv_heads=kv_heads).straight
    assert not backward(kernel="hopper", mask=mask, requires_grad="kv").straight


@pytest.mark.parametrize("kernel", ["hopper", "triton"])
def test_gradients_of_visiting_queries_are_summed_in_fp32(kernel: str) -> None:
    """In the kernel, which adds to them; they are rounded when they are sent."""
    options: dict[str, Any] = {"results": "straight", "wire_dtype": torch.bfloat16, "direction": "query"}
    found = backward(kernel=kernel, **options)
    tiles = pick_kernel(kernel, TileRequest("cuda", torch.bfloat16, 128, 128))
    assert [field.dtype for field in found.results.fields] == [torch.bfloat16]
    assert [field.dtype for field in found.computed_results(1, tiles, 1.0).fields] == [torch.float32]


@pytest.mark.parametrize(
    "changes",
    [
        {"results": "chain"},
        {"direction": "query"},
        {"wire_dtype": torch.float32},
        {"device": "cpu"},
        {"ranks_per_host": 2, "coalesce": 1},
        {"head_degree": 2},
        {"mask": causal() & window(1000), "head_dim": 64},
        {"tokens": SHARD * RANKS - 4, "head_dim": 64},
        {"dtype": torch.float32},
        {"head_dim": 20},
        {"kv_heads": 1},
        {"kernel": "triton"},
    ],
    ids=lambda changes: "-".join(f"{name} {value}" for name, value in changes.items()),
)
def test_elsewhere_it_is_a_chain(changes: dict[str, Any]) -> None:
    """Where it was asked for, where kernels add in fp32, or where a block's gradients cross hosts once, added up."""
    options = {name: value for name, value in changes.items() if name != "results"}
    if "head_degree" in changes:
        made = plan(
            SHARD * RANKS, RANKS, heads=8, head_dim=128, mask=causal(), layout="zigzag", device="cuda", **changes
        )
        assert not any(ring.phase("backward").straight for ring in made.rings)
        return
    found = backward(**changes)
    assert not found.straight
    assert found == backward(**options, results="chain")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "k, v, dk, dv; results in bfloat16, straight home"),
        ({"results": "chain"}, "lse, delta, dq; results in float32, from visitor to visitor"),
        ({"requires_grad": "q"}, "backward: the key side moves down the ring (k, v); at most"),
    ],
)
def test_a_plan_says_how_results_come_home(options: dict[str, Any], words: str) -> None:
    made = plan(SHARD * RANKS, RANKS, heads=8, head_dim=128, mask=causal(), layout="zigzag", device="cuda", **options)
    shard = 8 * SHARD * 128 * 2
    assert words in str(made)
    assert f"{max(map(made.peak_bytes, range(RANKS))) / shard:.3g} shards of q" in str(made)


@pytest.mark.parametrize("more", [1.25, 1.5])
@pytest.mark.parametrize("needs", ["qkv", "qk"])
def test_forward_is_what_it_is_with_a_chain(needs: str, more: float) -> None:
    """With more keys than queries, states in 16 bits would be fewer bytes: that is nobody's wish."""
    options: dict[str, Any] = {"heads": 8, "head_dim": 128, "device": "cuda", "direction": "kv", "requires_grad": needs}
    keys = int(more * SHARD) * RANKS
    auto, chain = (plan(SHARD * RANKS, RANKS, key_tokens=keys, results=way, **options) for way in ("auto", "chain"))
    assert auto.phase("backward").straight
    for rank in range(RANKS):
        assert auto.forward.bytes_sent(rank) == chain.forward.bytes_sent(rank)
    assert auto.direction("forward") == chain.direction("forward") == "kv"


def test_one_host_is_planned_as_it_is_called() -> None:
    assert backward(ranks_per_host=RANKS) == backward(ranks_per_host=1)


@pytest.mark.parametrize(
    ("mask", "head_dim", "plans"),
    [(causal() & window(999), 64, 1), (causal() & window(999), 128, 2), (causal(), 128, 2)],
    ids=str,
)
def test_at_most_one_plan_more_is_made(monkeypatch: pytest.MonkeyPatch, mask: Any, head_dim: int, plans: int) -> None:
    """Masks change with every batch of packed documents, and a plan takes a while."""
    made = []

    def build(*given: Any) -> Any:
        if given not in made:
            made.append(given)
        return build_plan(*given)

    # Without what it keeps: another test may have asked already.
    monkeypatch.setattr(ops, "saves_sums", ops.saves_sums.__wrapped__)  # type: ignore[attr-defined]
    monkeypatch.setattr(ops, "build_plan", build)
    backward(mask=mask, tokens=RANKS * SHARD, heads=4, head_dim=head_dim)
    assert len(made) == plans


def test_deterministic_gradients_are_our_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: True)
    assert not backward().straight and not backward(kernel="hopper").straight


class Tiles(PlainKernel):
    """Gives parts, and chooses by what it is told of its chip."""

    def __init__(self, chip: str) -> None:
        self.chip = chip

    def facts(self, device: torch.device | None = None) -> tuple[Hashable, ...]:
        return (self.chip,)

    def gives_parts(self, phase: PhasePlan, step: Round, scale: float) -> bool:
        return self.chip == "new"


@pytest.mark.parametrize("check", ["always", "first", "off"])
@pytest.mark.parametrize("chips", ["new", "old", "mixed"])
def test_ranks_on_chips_that_differ_choose_alike(monkeypatch: pytest.MonkeyPatch, chips: str, check: str) -> None:
    """Where nothing is checked they cannot know, and take the chain."""
    straight = chips == "new" and check != "off"
    tiles = {"new": Tiles("new"), "old": Tiles("old")}

    def pick(name: str, request: Any) -> Tiles:
        on_last = threading.current_thread().name == "ring-rank-2"
        return tiles[chips] if chips != "mixed" else tiles["old" if on_last else "new"]

    monkeypatch.setattr(ops, "pick_kernel", pick)
    options = make_options(
        mask=None, layout=Layout.contiguous(24, 3), key_layout=None, scale=None, head_dim=16, direction="auto",
        forward_direction="auto", wire_dtype=None, kernel="auto", check=check, needs="qkv", returns_lse=False,
        coalesce=2, per_host=1, head_groups=1, results="auto", one_host=True, head_degree=1, heads=4, kv_heads=4,
        device_type="cuda",
    )  # fmt: skip
    shapes = Shapes(1, 4, 4, 16, 16, torch.float16)

    def body(ring: Ring) -> list[bool]:
        found = []
        for _ in range(2):
            _, made, _ = ops.prepare("backward", shapes, torch.device("cpu"), (8, 8), str(options), ring)
            found.append(made.phase("backward").straight)  # type: ignore[union-attr]
        return found

    assert run_ranks(body, 3, timeout=30) == [[straight] * 2] * 3


def test_a_rank_that_cannot_have_its_kernel_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel chooses by is part of the agreement, so it is picked before: a refusal is the agreement's."""
    pick_kernel = ops.pick_kernel

    def pick(name: str, request: Any) -> Any:
        if threading.current_thread().name == "ring-rank-1":
            raise ValueError("no such kernel on this chip")
        return pick_kernel(name, request)

    monkeypatch.setattr(ops, "pick_kernel", pick)

    def body(ring: Ring) -> str:
        q = torch.randn(1, 4, 8, 16)
        with pytest.raises(ValueError, match="no such kernel") as refused:
            burst_attention(q, q, q, ring=ring)
        return str(refused.value)

    assert set(run_ranks(body, 3, timeout=30)) == {"rank 1 was called wrongly: no such kernel on this chip"}


def test_a_new_scale_with_every_call_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a scale only its sign is asked: neither who computes a piece nor how results come home is kept for each."""
    from burst_attention.tiles import cuda

    asked = []
    monkeypatch.setattr(ops, "saves_sums", lambda *given: bool(asked.append(given[3])))
    cuda._chosen_by.cache_clear()
    tiles, layout = cuda.CudaKernel(), Layout.zigzag(RANKS * SHARD, RANKS)
    shapes = Shapes(1, 8, 8, 128, 128, torch.bfloat16)
    for scale in (0.1, 0.2, -0.3):
        options = make_options(
            mask=causal(), layout=layout, key_layout=None, scale=scale, head_dim=128, direction="auto",
            forward_direction="auto", wire_dtype=None, kernel="auto", check="always", needs="qkv", returns_lse=False,
            coalesce="auto", per_host=1, head_groups="auto", results="auto", one_host=True, head_degree=1, heads=8,
            kv_heads=8, device_type="cuda",
        )  # fmt: skip
        phase = ops.plan_of(options, causal(), layout, layout, shapes, "qkv", tiles).phase("backward")
        tiles.gives_parts(phase, phase.rounds[0][0], scale)
        if scale == 0.1:
            kept_for_one = cuda._chosen_by.cache_info().currsize
    assert asked == [1.0, 1.0, -1.0]
    assert cuda._chosen_by.cache_info().currsize == 2 * kept_for_one
