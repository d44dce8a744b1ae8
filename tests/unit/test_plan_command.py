"""`burst plan`: the command prints what `plan` gives for the same options, and refuses in one line."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from burst_attention import causal, full, plan, window
from burst_attention.cli import main
from burst_attention.tiles import has_triton
from burst_attention.tiles.pick import _warn_without_triton

NEEDS_TRITON = pytest.mark.skipif(not has_triton(), reason="a plan for GPUs needs triton")


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("", {"mask": full()}),
        ("--mask causal() --layout zigzag --kv-heads 8", {"mask": causal(), "layout": "zigzag", "kv_heads": 8}),
        ("--direction kv --dtype float32", {"direction": "kv", "dtype": torch.float32}),
        ("--coalesce 2 --head-dim 64", {"coalesce": 2, "head_dim": 64}),
        ("--ranks-per-host 2", {"ranks_per_host": 2}),
        ("--kernel plain", {"kernel": "plain"}),
        pytest.param("--device cuda", {"device": "cuda"}, marks=NEEDS_TRITON),
        pytest.param("--device cuda --kernel cudnn", {"device": "cuda", "kernel": "cudnn"}, marks=NEEDS_TRITON),
    ],
)
def test_it_prints_the_plan_of_its_options(
    words: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--tokens", "1024", "--ranks", "4", *words.split()]) == 0
    wanted = str(plan(1024, 4, **({"heads": 32, "head_dim": 128, "layout": "contiguous"} | options)))
    assert capsys.readouterr().out == wanted + "\n"
    assert options == {"mask": full()} or wanted != str(plan(1024, 4, heads=32, head_dim=128, layout="contiguous"))


def test_what_cannot_be_planned_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--tokens", "1024", "--ranks", "4", "--coalesce", "0"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.err == "burst plan: coalesce must be 'auto' or a whole number from 1 to 8, got 0\n" and not said.out


@NEEDS_TRITON
def test_it_says_what_it_plans_for_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a GPU it knows what is there, and a plan for a CPU is the same everywhere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    note = "burst plan: there is no GPU here; planned for Hopper with FlashAttention-4\n"
    for words, said in (("cuda", note), ("cuda --kernel cudnn", note), ("cuda --kernel plain", ""), ("cpu", "")):
        assert main(["plan", "--tokens", "1024", "--ranks", "4", "--device", *words.split()]) == 0
        assert capsys.readouterr().err == said


def test_gpus_are_not_planned_for_without_what_their_kernels_are_written_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kernel's plan would be one that no such GPU runs; who has GPUs without triton says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("burst_attention.tiles.pick.has_triton", lambda: False)
    shapes: dict[str, Any] = {"heads": 32, "head_dim": 128}
    for kernel in ("auto", "triton", "cudnn", "flash"):
        with pytest.raises(ValueError, match=r"takes triton here too: install burst-attention\[triton\]"):
            plan(1024, 4, device="cuda", kernel=kernel, **shapes)
    with pytest.raises(ValueError, match="there is no kernel 'other'"):
        plan(1024, 4, device="cuda", kernel="other", **shapes)
    for options in ({"kernel": "plain"}, {"dtype": torch.float64}, {"head_dim": 512}):
        assert "kernel plain" in str(plan(1024, 4, device="cuda", **(shapes | options)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _warn_without_triton.cache_clear()
    with pytest.warns(UserWarning, match="install triton"):
        made = plan(1024, 4, device="cuda", **shapes)
    assert "kernel plain" in str(made), "what that GPU would run"


@pytest.mark.parametrize("device", ["gpu", "cuda:0", "mps"])
def test_only_what_it_knows_is_planned_for(device: str) -> None:
    with pytest.raises(ValueError, match=f"device must be one of 'cpu', 'cuda', got '{device}'"):
        plan(1024, 4, heads=32, head_dim=128, device=device)


@NEEDS_TRITON
@pytest.mark.parametrize("degree", [1, 2])
def test_what_a_call_would_refuse_is_not_planned(degree: int) -> None:
    shapes: dict[str, Any] = {"heads": 32, "head_dim": 128, "head_degree": degree}
    with pytest.raises(ValueError, match="kernel 'cudnn' serves full and square causal pieces only"):
        plan(4096, 4, mask=causal() & window(100), device="cuda", kernel="cudnn", **shapes)


def test_a_reader_who_has_seen_enough_ends_it_quietly() -> None:
    command = [sys.executable, "-m", "burst_attention.cli", "plan", "--tokens", "1024", "--ranks", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 141 and said == b""


def test_a_pipe_that_breaks_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one to a rank that has died."""

    def fail(*_: Any, **__: Any) -> None:
        raise BrokenPipeError("of a rank")

    monkeypatch.setattr("burst_attention.api.plan", fail)
    with pytest.raises(BrokenPipeError, match="of a rank"):
        main(["plan", "--tokens", "1024", "--ranks", "4"])
