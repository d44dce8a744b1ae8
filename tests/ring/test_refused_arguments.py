"""A wrong argument raises one clear error on every rank before anything moves."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_attention import Layout, Ring, blocks, burst_attention, documents, prefix, run_ranks, window
from burst_attention.launch import run_processes
from tests.ring.refusals import SIZE, TIMEOUT, TOKENS, WRONG, attempt, correct_call, inputs, refused_everywhere
from tests.ring.wrong_calls import BAD, DIFFERENCES, Bad, Difference


@pytest.mark.parametrize("case", [case for case in BAD if case.names_rank], ids=lambda case: case.name)
def test_one_wrong_argument_is_told_to_every_rank(case: Bad) -> None:
    text = refused_everywhere(lambda ring: case.call(ring, wrong=ring.rank == WRONG))
    assert text.startswith("rank 1 was called wrongly: ")
    for part in case.says:
        assert part in text


@pytest.mark.parametrize("case", [case for case in BAD if not case.names_rank], ids=lambda case: case.name)
def test_what_only_all_lengths_show_is_told_to_every_rank(case: Bad) -> None:
    text = refused_everywhere(lambda ring: case.call(ring, wrong=True))
    for part in case.says:
        assert part in text


@pytest.mark.parametrize(
    "case", [case for case in BAD if case.names_rank and "12" not in case.says[0]], ids=lambda case: case.name
)
def test_a_wrong_argument_on_a_ring_of_one(case: Bad) -> None:
    """No other rank to blame: the message alone. Those that speak of the length of three shards are left out."""
    text = refused_everywhere(lambda ring: case.call(ring, wrong=True), size=1)
    assert text.startswith(case.says[0].split(" ")[0]) or case.says[0].startswith("'flash'")
    for part in case.says:
        assert part in text


def test_the_lowest_wrong_rank_is_named_when_several_are_wrong() -> None:
    def call(ring: Ring) -> Any:
        direction, scale = {0: ("auto", None), 1: ("sideways", None), 2: ("auto", float("nan"))}[ring.rank]
        return burst_attention(*inputs(ring.rank), ring=ring, direction=direction, scale=scale)

    assert refused_everywhere(call).startswith("rank 1 was called wrongly: direction must be")


@pytest.mark.parametrize(
    "value",
    [torch.arange(900.0).view(30, 30), "x" * 3000, "é" * 300, '"' * 1500],
    ids=["large-tensor", "long-text", "text-beyond-ascii", "quotes"],
)
def test_a_long_message_is_the_same_on_every_rank(value: Any) -> None:
    """A record has a fixed size; what does not fit must be cut alike where it was sent and where it arrived."""
    text = refused_everywhere(
        lambda ring: burst_attention(*inputs(ring.rank), ring=ring, **({"bias": value} if ring.rank == WRONG else {}))
    )
    assert text.startswith("rank 1 was called wrongly: bias=")


def test_calls_with_the_longest_texts_still_agree() -> None:
    mask = documents([1] * TOKENS) | window(3) | prefix(2) | blocks([[1, 0] * 30] * 60, 4)
    layout = Layout.balanced(TOKENS, SIZE, mask)

    def body(ring: Ring) -> float:
        q, k, v = (layout.shard(torch.ones(1, 2, TOKENS, 8), ring.rank, 2) for _ in range(3))
        out = burst_attention(
            q, k, v, ring=ring, mask=mask, layout=layout, key_layout=layout, wire_dtype=torch.bfloat16, scale=1 / 3,
            direction="query", forward_direction="query", kernel="plain", return_lse=True,
        )[0]  # fmt: skip
        return (out - 1).abs().max().item()

    assert max(run_ranks(body, SIZE, timeout=TIMEOUT)) < 1e-2


@pytest.mark.parametrize(
    "harmless",
    [
        {"softcap": None}, {"softcap": 0.0}, {"dropout_p": 0.0}, {"dropout": 0}, {"is_causal": False},
        {"attn_mask": None}, {"bias": None}, {"window_size": None},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)  # fmt: skip
def test_harmless_values_of_refused_arguments_pass(harmless: dict[str, Any]) -> None:
    def body(ring: Ring) -> tuple[Tensor, Tensor]:
        qkv = inputs(ring.rank)
        return burst_attention(*qkv, ring=ring, **harmless), burst_attention(*qkv, ring=ring)

    for found, expected in run_ranks(body, SIZE, timeout=TIMEOUT):
        assert torch.equal(found, expected)


def test_refusals_between_processes() -> None:
    """Mask, shapes and an argument, one after the other on the same ring, with a correct call after each."""
    narrow = [case for case in DIFFERENCES if case.name in ("mask", "head-dim", "query-tokens")]
    bad = [case for case in BAD if case.name in ("direction", "q-is-a-list", "layout-for-another-ring")]

    def body(ring: Ring) -> list[str]:
        texts = []
        for case in narrow + bad:
            before = ring.bytes_sent
            wrong = () if isinstance(case, Difference) else (ring.rank == WRONG,)
            texts.append(attempt(ring, partial(case.call, ring, *wrong)))
            assert ring.bytes_sent == before
            correct_call(ring)
        return texts

    found = run_processes(body, SIZE, timeout=50, ring_timeout=TIMEOUT)
    assert found[0] == found[1] == found[2]
    for case, text in zip(narrow + bad, found[0], strict=True):
        disagree = case.name in ("mask", "head-dim")
        assert text.startswith("ValueError: ranks disagree" if disagree else "ValueError: rank 1 ")
        for part in case.says:
            assert part in text


@pytest.mark.parametrize("ring", [None, 3, "world"], ids=["none", "number", "text"])
def test_ring_must_be_a_ring(ring: Any) -> None:
    expected = rf"ring must be a Ring, got {type(ring).__name__}; use Ring\.from_group\(\) or run_ranks\(\)"
    with pytest.raises(ValueError, match=expected):
        burst_attention(*inputs(0), ring=ring)


def test_from_group_needs_an_initialised_process_group() -> None:
    remedy = r"needs torch\.distributed: call .*init_process_group\(\) first, or use run_ranks"
    with pytest.raises(RuntimeError, match=remedy):
        Ring.from_group()


@pytest.mark.parametrize("hosts", [None, "cp", "tp"])
def test_from_mesh_needs_one_dimension_or_the_name_of_the_hosts(hosts: str | None) -> None:
    mesh = SimpleNamespace(ndim=2, mesh_dim_names=("dp", "cp"))
    says = rf"a mesh of one dimension, .*got 2 \(\('dp', 'cp'\)\) and hosts={hosts!r}; choose .*mesh\['cp'\]"
    with pytest.raises(ValueError, match=says):
        Ring.from_mesh(mesh, hosts=hosts)


@pytest.mark.parametrize("size", [0, -2])
def test_run_ranks_needs_a_rank(size: int) -> None:
    with pytest.raises(ValueError, match=f"ring_size must be at least 1, got {size}"):
        run_ranks(lambda ring: ring.rank, size)
