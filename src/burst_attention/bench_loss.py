"""`burst bench loss`: memory and time of the chunked LM head and loss, beside logits that exist whole.

On a GPU if there is one, in bf16 and at a real width; else on this CPU in fp32, with fewer columns of hidden states so
that it takes minutes. Every measurement of memory on a CPU has a process of its own.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.profiler import ProfilerActivity, profile

from burst_attention.bench import append_rows, machine
from burst_attention.launch import run_processes
from burst_attention.logits import LABEL, LogitOptions, chunks
from burst_attention.logits.chunks import Chunks, row_passes
from burst_attention.loss import linear_cross_entropy

VOCABULARY = 131072
WIDTHS = {"cpu": (64, 256), "cuda": (4096, 4096)}
"""Columns of hidden states where memory is measured, and where time is."""
LENGTHS = tuple(1024 * count for count in (8, 16, 32, 64, 128))
PLAIN_LENGTHS = {"cpu": LENGTHS[:1], "cuda": LENGTHS[:3]}
"""Where whole logits fit."""
SPEED_TOKENS, WARM_UP_TOKENS = 8192, 16
CHUNK_TOKENS = {"cpu": 2048, "cuda": 8192}
CHUNK_MIB = (64, 128, 256, 512, 1024)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]
Found = TypeVar("Found")


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The loss as it is mostly written: whole logits, in fp32 before the softmax."""
    return cross_entropy(linear(hidden, weight).float(), labels)


class Ahead(torch.autograd.Function):
    """What was weighed and left: gradients computed in forward, chunk by chunk, three products instead of four."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        options = LogitOptions(backend="triton" if hidden.is_cuda else "torch")
        statistics_of, gradient_of = row_passes(options.backend)
        parts = Chunks(hidden, weight, None, options)
        dhidden, dweight = torch.empty_like(hidden), hidden.new_zeros(weight.shape, dtype=parts.accumulate)
        dlogits = parts.buffer if parts.product == parts.accumulate else parts.buffer.to(parts.product)
        losses = hidden.new_zeros(4, len(hidden), dtype=parts.accumulate)
        incoming = torch.zeros_like(losses)
        incoming[LABEL] = -1 / len(hidden)
        for rows, hidden_rows, logits in parts:
            out = dlogits[: len(logits)]
            if hidden.is_cuda:
                statistics_of(logits, labels[rows], options, losses[:, rows])
                gradient_of(logits, labels[rows], losses[:, rows], incoming[:, rows], options, out)
                torch.addmm(dweight, out.T, hidden_rows, out_dtype=dweight.dtype, out=dweight)
            else:
                # Plain torch's statistics leave p behind, but for the sum, so that its gradient is two passes more.
                label = torch.arange(len(logits)), labels[rows]
                statistics_of(logits, labels[rows], options, losses[:, rows])
                logits.div_(logits.sum(1, keepdim=True))[label] -= 1
                dweight.addmm_(logits.mul_(1 / len(hidden)).T, hidden_rows)
            dhidden[rows] = out @ parts.weight
        ctx.save_for_backward(dhidden, dweight)
        return -losses[LABEL].mean()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Any:
        dhidden, dweight = ctx.saved_tensors
        return dhidden * incoming, (dweight * incoming).to(dhidden.dtype), None


LOSSES: dict[str, Loss] = {"chunked": linear_cross_entropy, "plain": plain, "ahead": Ahead.apply}


def problem(tokens: int, width: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight and labels."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(tokens, width, device=device, dtype=dtype)
    weight = torch.randn(VOCABULARY, width, device=device, dtype=dtype) / width**0.5
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, VOCABULARY, (tokens,), device=device)


def step(what: str, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[float, float]:
    """Seconds of forward, and of forward and backward; on a CPU those that its one thread worked, so that others on a
    shared machine hardly show."""
    clock = time.perf_counter if hidden.is_cuda else time.process_time

    def wait() -> None:
        if hidden.is_cuda:
            torch.cuda.synchronize()

    wait()
    started = clock()
    loss = LOSSES[what](hidden, weight, labels)
    wait()
    forward = clock() - started
    torch.autograd.grad(loss, (hidden, weight))
    wait()
    return forward, clock() - started


def own_process(body: Callable[[], Found], device: str) -> Found:
    """What a fresh process of one thread finds; on a GPU, whose allocator counts by itself, this one."""
    if device == "cuda":
        return body()
    return run_processes(lambda _: body(), 1, timeout=3600)[0]


def memory_rows(device: str, repeat: int) -> Iterator[Row]:
    """Peak memory of one step beyond the hidden states and their gradient, by length."""
    width = WIDTHS[device][0]
    for what, lengths in (("chunked", LENGTHS), ("plain", PLAIN_LENGTHS[device])):
        for tokens in lengths:
            measured = own_process(partial(peaks, what, tokens, width, device), device)
            yield {"suite": "loss-memory", "what": what, "tokens": tokens, "width": width, **measured}


def peaks(what: str, tokens: int, width: int, device: str) -> Row:
    """Peaks in MiB by the allocator's count, and on a CPU by what the process held; and the step's seconds."""
    step(what, *problem(WARM_UP_TOKENS, width, device))
    inputs = problem(tokens, width, device)
    gradient = inputs[0].nbytes
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _, seconds = step(what, *inputs)
        return {"peak_mib": (torch.cuda.max_memory_allocated() - before - gradient) / 2**20, "seconds": seconds}
    before = resident("VmRSS")
    forget_peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        _, seconds = step(what, *inputs)
    highest = resident("VmHWM")
    assert trace.profiler is not None
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = list(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    return {
        "peak_mib": (max(held) - gradient) / 2**20,
        "resident_mib": (highest - before - gradient) / 2**20,
        "seconds": seconds,
    }


def resident(field: str) -> int:
    """Bytes that this process holds (VmRSS), or has held at most (VmHWM)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def forget_peak() -> None:
    """Linux starts VmHWM anew."""
    Path("/proc/self/clear_refs").write_text("5")


def speed_rows(device: str, repeat: int) -> Iterator[Row]:
    """Seconds of the three losses, in turns."""
    width = WIDTHS[device][1]

    def body() -> Row:
        inputs = problem(SPEED_TOKENS, width, device)
        times: dict[str, list[tuple[float, float]]] = {what: [] for what in LOSSES}
        for what in LOSSES:
            step(what, *problem(WARM_UP_TOKENS, width, device))
        for _ in range(repeat):
            for what, found in times.items():
                found.append(step(what, *inputs))
        return {what: [list(column) for column in zip(*found, strict=True)] for what, found in times.items()}

    for what, (forward, both) in own_process(body, device).items():
        yield {
            "suite": "loss-speed", "what": what, "tokens": SPEED_TOKENS, "width": width, "repeat": repeat,
            "forward_s": statistics.median(forward), "step_s": statistics.median(both),
            "spread": [min(both), max(both)],
        }  # fmt: skip


def chunk_size_rows(device: str, repeat: int) -> Iterator[Row]:
    """Seconds of the chunked loss by the size of a chunk's logits, in turns."""
    width = WIDTHS[device][1]

    def body() -> dict[int, list[float]]:
        inputs = problem(CHUNK_TOKENS[device], width, device)
        times: dict[int, list[float]] = {mib: [] for mib in CHUNK_MIB}
        for _ in range(repeat):
            for mib, found in times.items():
                chunks.CHUNK_BYTES = mib << 20
                found.append(step("chunked", *inputs)[1])
        return times

    for mib, found in own_process(body, device).items():
        yield {
            "suite": "loss-chunks", "chunk_mib": mib, "tokens": CHUNK_TOKENS[device], "width": width, "repeat": repeat,
            "step_s": statistics.median(found), "spread": [min(found), max(found)],
        }  # fmt: skip


PARTS: dict[str, Callable[[str, int], Iterator[Row]]] = {
    "memory": memory_rows,
    "speed": speed_rows,
    "chunks": chunk_size_rows,
}


def loss(repeat: int, output: str | None = None, only: str | None = None) -> list[Row]:
    """Measure, print the rows, and append each to `output` when it is given."""
    if only not in (None, *PARTS):
        raise ValueError(f"--only takes one of {', '.join(PARTS)}, got {only!r}")
    if not Path("/proc/self/clear_refs").exists():
        raise ValueError("bench loss reads a process's peak memory from /proc, and this system has none")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = machine() | {"device": device, "vocabulary": VOCABULARY}
    about |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if device == "cuda" else {}
    rows = []
    for row in itertools.chain(*(make(device, repeat) for part, make in PARTS.items() if only in (None, part))):
        rows.append(row | about)
        print(json.dumps(row), flush=True)
        append_rows(output, rows[-1:])
    return rows
