"""Which implementation serves a piece on which GPU, and what is refused by name there."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from burst_attention import causal, plan
from burst_attention.geometry import Piece, full_piece
from burst_attention.tiles.pick import TileRequest, pick_kernel
from burst_attention.tiles.policy import Case, capability_of, choose

CASE = Case("forward", "full", 8192, 4096, 128, 128, torch.bfloat16, (9, 0), "FA2")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "cudnn"),
        ({"flash": "FA4"}, "flash"),
        ({"flash": "FA4", "head_dim": 96, "value_dim": 96}, "cudnn"),
        ({"flash": "FA4", "capability": (8, 0)}, "triton"),
        ({"flash": "FA4", "capability": (8, 0), "head_dim": 96, "value_dim": 96}, "triton"),
        ({"flash": "FA4", "capability": (12, 0)}, "cudnn"),
        ({"flash": "FA3", "capability": (10, 0)}, "cudnn"),
        ({"flash": "FA4", "capability": (10, 0)}, "flash"),
        ({"capability": (8, 0)}, "flash"),
        ({"capability": (7, 5)}, "triton"),
        ({"capability": (0, 0)}, "triton"),
        ({"kind": "masked"}, "triton"),
        ({"kind": "causal", "q_count": 4096}, "cudnn"),
        ({"dtype": torch.float32}, "triton"),
        ({"q_count": 8191}, "triton"),
        ({"k_count": 512}, "triton"),
        ({"head_dim": 192}, "cudnn"),
        ({"head_dim": 192, "capability": (8, 0)}, "triton"),
        ({"head_dim": 256, "value_dim": 256}, "cudnn"),
        ({"head_dim": 256, "value_dim": 256, "phase": "backward"}, "cudnn"),
        ({"head_dim": 160, "value_dim": 160}, "cudnn"),
        ({"head_dim": 160, "value_dim": 160, "flash": "FA4"}, "cudnn"),
        ({"head_dim": 160, "value_dim": 128}, "cudnn"),
        ({"head_dim": 192, "capability": (10, 0)}, "cudnn"),
        ({"head_dim": 192, "capability": (10, 3)}, "cudnn"),
        ({"head_dim": 160, "capability": (10, 0)}, "triton"),
        ({"head_dim": 160, "value_dim": 160, "capability": (10, 0), "flash": "FA4"}, "triton"),
        ({"head_dim": 256, "value_dim": 256, "capability": (10, 3)}, "flash"),
        ({"head_dim": 192, "capability": (12, 0)}, "triton"),
        ({"head_dim": 136, "value_dim": 136, "capability": (12, 0)}, "flash"),
        ({"head_dim": 208, "value_dim": 208, "capability": (12, 1)}, "flash"),
        ({"head_dim": 208, "value_dim": 208, "capability": (12, 1), "phase": "backward"}, "triton"),
        ({"head_dim": 224, "value_dim": 224, "capability": (8, 6), "phase": "backward"}, "triton"),
        ({"head_dim": 192, "value_dim": 192, "capability": (8, 6), "phase": "backward"}, "flash"),
        ({"head_dim": 208, "value_dim": 208, "capability": (8, 7), "phase": "backward"}, "triton"),
        ({"head_dim": 256, "value_dim": 256, "capability": (8, 9), "phase": "backward"}, "flash"),
        ({"head_dim": 200, "value_dim": 200, "capability": (8, 0), "phase": "backward"}, "flash"),
        ({"head_dim": 100, "value_dim": 100}, "triton"),
        ({"scale": -1.0}, "triton"),
        ({"phase": "backward"}, "hopper"),
        ({"phase": "backward", "kind": "masked", "q_count": 100}, "hopper"),
        ({"phase": "backward", "kind": "masked", "flash": "FA4"}, "hopper"),
        ({"phase": "backward", "dtype": torch.float32}, "triton"),
        ({"phase": "backward", "gluon": False}, "cudnn"),
        ({"phase": "backward", "capability": (10, 0)}, "cudnn"),
        ({"phase": "backward", "head_dim": 64, "value_dim": 64}, "cudnn"),
        ({"phase": "backward", "flash": "FA4"}, "flash"),
        ({"deterministic": True}, "cudnn"),
        ({"deterministic": True, "phase": "backward"}, "triton"),
        ({"deterministic": True, "phase": "backward", "flash": "FA4"}, "triton"),
    ],
    ids=str,
)
def test_the_policy_for_pieces(changes: dict[str, object], expected: str) -> None:
    assert choose(replace(CASE, **changes)).name == expected  # type: ignore[arg-type]


def test_flash_by_name_is_refused_where_what_is_activated_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burst_attention.tiles.pick.has_triton", lambda: True)
    monkeypatch.setattr("burst_attention.tiles.pick.active_flash", lambda: "FA4")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(ValueError, match=r"FA4 is activated, which does not run on this GPU \(8\.0\)"):
        pick_kernel("flash", TileRequest("cuda", torch.bfloat16, 64, 64))


@pytest.mark.parametrize(
    ("name", "chip", "dims", "message"),
    [
        ("cudnn", (12, 0), (136, 136), r"it has no head dims 136 and 136 on this GPU \(12\.0\)"),
        ("cudnn", (10, 0), (192, 192), r"it has no head dims 192 and 192 on this GPU \(10\.0\)"),
        ("cudnn", (9, 0), (192, 192), ""),
        ("flash", (8, 6), (208, 208), r"its backward takes no head dim 208 on this GPU \(8\.6\)"),
        ("cudnn", (9, 0), (192, 128), ""),
        ("cudnn", (8, 0), (128, 128), ""),
        ("flash", (8, 6), (256, 256), ""),
    ],
    ids=str,
)
def test_vendors_by_name_are_refused_for_heads_that_they_do_not_take_on_a_chip(
    monkeypatch: pytest.MonkeyPatch, name: str, chip: tuple[int, int], dims: tuple[int, int], message: str
) -> None:
    pytest.importorskip("triton", reason="vendors' kernels need it")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: chip)
    expectation = pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()
    with expectation:
        assert pick_kernel(name, TileRequest("cuda", torch.bfloat16, *dims)).name == name


@pytest.mark.parametrize(
    ("chip", "changes", "message"),
    [
        ((9, 0), {}, ""),
        ((9, 0), {"dtype": torch.float16}, ""),
        ((9, 0), {"dtype": torch.float32}, "it serves bfloat16 and float16, the tensors are torch.float32"),
        ((9, 0), {"head_dim": 64, "value_dim": 64}, ""),
        ((9, 0), {"head_dim": 96, "value_dim": 96}, "it serves head dims 64 and 128, got 96 for q, k and 96 for v"),
        ((9, 0), {"value_dim": 64}, "it serves head dims 64 and 128, got 128 for q, k and 64 for v"),
        ((9, 0), {"scale": -1.0}, r"it needs a positive scale, got -1\.0"),
        ((9, 0), {"device_type": "cpu"}, "it runs on a GPU, the tensors are on cpu"),
        ((10, 0), {}, r"it is written for Hopper \(9\.0\), and this GPU is 10\.0"),
    ],
    ids=str,
)
def test_our_backward_for_hopper_by_name_is_refused_for_what_it_does_not_take(
    monkeypatch: pytest.MonkeyPatch, chip: tuple[int, int], changes: dict[str, object], message: str
) -> None:
    pytest.importorskip("triton", reason="it needs it")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: chip)
    request = replace(TileRequest("cuda", torch.bfloat16, 128, 128), **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        assert pick_kernel("hopper", request).name == "hopper"


def test_a_gpu_without_a_number_is_the_current_one_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may have changed; and where there is none, a CPU's caller learns that."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = []
    for chip in ((8, 0), (9, 0)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None, chip=chip: chip)
        found += [capability_of(torch.device("cuda")), capability_of(torch.device("cpu")), capability_of(None)]
    assert found == [(8, 0)] * 3 + [(9, 0)] * 3
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert capability_of(None) is None


def test_without_a_gpu_what_is_planned_for_is_refused_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="vendors' kernels need it")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("burst_attention.tiles.pick.PLANNED_FOR", ((10, 0), "FA4"))
    with pytest.raises(ValueError, match="it has no head dims 192 and 192"):
        pick_kernel("cudnn", TileRequest("cuda", torch.bfloat16, 192, 192))


def test_a_piece_below_a_diagonal_leaves_two_partials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rectangle and a triangle: what has to have room to wait is more than pieces."""
    pytest.importorskip("triton", reason="vendors' kernels need it")
    from burst_attention.tiles.cuda import CudaKernel

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    pieces = Piece(0, 4096, 0, 6144, -2048, 4096), full_piece(0, 4096, 6144, 2048)
    made = plan(8192, 2, mask=causal(), device="cuda", heads=8, head_dim=128, dtype=torch.bfloat16)
    step = SimpleNamespace(pieces=pieces)
    assert CudaKernel().gives_parts(made.forward, step, 1.0)  # type: ignore[arg-type]
    assert CudaKernel().partials(made.forward, step, 1.0) == 3  # type: ignore[arg-type]
