"""The LM head and its loss over chunks of rows, so that the logits of a long sequence never exist whole.

Shapes: N rows (tokens of the whole batch), C hidden width, V vocabulary.

One operator gives four numbers of every row's logits (logits/rows.py). Every loss here is a few lines over them, and
its gradient is autograd's. The operator's backward computes each chunk's logits again, since only then is the incoming
gradient known. That is a fourth product beside three. It holds four numbers per token between the phases, where
gradients computed ahead in forward would hold as much as hidden and weight, and it serves scalars, per-token losses,
log-probabilities and entropies alike.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from burst_attention.logits import (
    ENTROPY,
    LABEL,
    LSE,
    MEAN,
    LogitOptions,
    accumulate_dtype,
    head_gradients,
    head_statistics,
)
from burst_attention.operators import as_operator
from burst_attention.tiles.pick import has_triton

FORWARD, BACKWARD = "burst_attention::head_statistics", "burst_attention::head_statistics_backward"
# LogitOptions, one by one: torch.compile follows numbers and names, not a dataclass or JSON.
OPTIONS = "int chunk, str backend, float? softcap, float temperature, bool wants_mean, bool wants_entropy"
torch.library.define(FORWARD, f"(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, {OPTIONS}) -> Tensor")
torch.library.define(
    BACKWARD,
    "(Tensor dstatistics, Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor statistics, str needs,"
    f" {OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
forward_op = torch.ops.burst_attention.head_statistics.default
backward_op = torch.ops.burst_attention.head_statistics_backward.default
REDUCTIONS, BACKENDS = ("mean", "sum", "none"), ("auto", "torch", "triton")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    chunk: int | str = "auto",
    backend: str = "auto",
) -> Tensor:
    """cross_entropy(hidden @ weight.T + bias, labels) without its logits: those of one chunk of rows exist at a time.

    hidden: (..., T, C) hidden states. weight: (V, C), the head's, in hidden's dtype. bias: (V,).
    labels: (..., T) integers, each the token that its row is to predict: shifted already, before sharding.
    ignore_index: rows with this label give loss 0 and gradient 0.
    label_smoothing: as torch.nn.functional.cross_entropy has it.
    z_loss: each loss has z_loss * lse^2 added, lse being the logarithm of the softmax's denominator.
    softcap: logits are softcap * tanh(logits / softcap) first.
    reduction: "mean" over the labels that are not ignored (0 where all are), "sum", or "none" for (..., T) losses.
    num_items: divide the sum by this instead: the count over all ranks, so that the ranks' losses sum to the mean.
    chunk: rows whose logits exist at a time, or "auto" for as many as logits/chunks.py finds room for.
    backend: what passes over a chunk's logits: "torch", "triton" (on a GPU), or the faster that is there.

    Losses and sums are fp32, fp64 for fp64 inputs. Under autocast inputs are cast as those of F.linear are.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if reduction == "none" and num_items is not None:
        raise ValueError("num_items divides a sum, and reduction='none' has none; leave it out or divide the losses")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is between 0 and 1, got {label_smoothing}")
    if not (z_loss >= 0.0 and math.isfinite(z_loss)):
        raise ValueError(f"z_loss is a number not below 0, got {z_loss}")
    valid = labels != ignore_index
    rows = _statistics(
        hidden, weight, bias, labels, valid, chunk=chunk, backend=backend, softcap=softcap,
        wants_mean=label_smoothing > 0,
    )  # fmt: skip
    losses = -(1 - label_smoothing) * rows[LABEL]
    if label_smoothing:
        losses = losses - label_smoothing * rows[MEAN]
    if z_loss:
        losses = losses + z_loss * rows[LSE].square()
    losses = torch.where(valid, losses, 0.0)
    if reduction == "none":
        return losses
    if num_items is not None:
        return losses.sum() / _at_least_one(num_items)
    return losses.sum() / valid.sum().clamp(min=1) if reduction == "mean" else losses.sum()


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    softcap: float | None = None,
    return_entropy: bool = False,
    chunk: int | str = "auto",
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """(..., T) log-probabilities of the labels under softmax((hidden @ weight.T + bias) / temperature).

    Differentiable, with any gradient per token. Rows whose label is ignore_index give 0 and no gradient.
    return_entropy: the entropies of the rows' distributions too, (..., T), differentiable, 0 for ignored rows.
    A softcap comes before the temperature. The other arguments are those of linear_cross_entropy.
    """
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature is a number above 0, got {temperature}; for greedy choices take the argmax")
    valid = labels != ignore_index
    rows = _statistics(
        hidden, weight, bias, labels, valid, chunk=chunk, backend=backend, softcap=softcap, temperature=temperature,
        wants_entropy=return_entropy,
    )  # fmt: skip
    log_probs = torch.where(valid, rows[LABEL], 0.0)
    return (log_probs, torch.where(valid, rows[ENTROPY], 0.0)) if return_entropy else log_probs


def _at_least_one(count: int | Tensor) -> int | Tensor:
    """A divisor: where nothing was counted the sum is 0, and so is the loss."""
    if isinstance(count, Tensor):
        if count.dim():
            raise ValueError(f"num_items is one number, got a tensor of shape {tuple(count.shape)}")
        return count.clamp(min=1)
    if count < 0:
        raise ValueError(f"num_items counts labels and is not below 0, got {count}")
    return max(count, 1)


def _statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    valid: Tensor,
    *,
    chunk: int | str,
    backend: str,
    softcap: float | None,
    **wanted: Any,
) -> tuple[Tensor, ...]:
    """Every row's statistics, each in labels' shape; those of ignored rows mean nothing."""
    hidden, weight, bias = _autocast(hidden), _autocast(weight), None if bias is None else _autocast(bias)
    _require_shapes(hidden, weight, bias, labels)
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap is a number above 0, or None for none, got {softcap}")
    if chunk != "auto" and (not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk is a number of rows from 1, or 'auto', got {chunk!r}")
    options = LogitOptions(chunk if isinstance(chunk, int) else 0, _pick_backend(backend, hidden), softcap, **wanted)
    rows = hidden.reshape(-1, hidden.shape[-1])
    safe = torch.where(valid, labels, 0).reshape(-1).long()
    found = forward_op(rows, weight, bias, safe, *options)
    return tuple(x.reshape(labels.shape) for x in found.unbind(0))


def _autocast(x: Tensor) -> Tensor:
    """An input as F.linear would take it."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x


def _require_shapes(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> None:
    if hidden.dim() < 2 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or not len(weight):
        raise ValueError(
            f"hidden is (..., T, C) and weight (V, C), got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels has one label per row of hidden {tuple(hidden.shape)}, got {tuple(labels.shape)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels are integers, got {labels.dtype}; probabilities as labels are not supported")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has one number per row of weight, {len(weight)}, got {tuple(bias.shape)}")
    if not hidden.is_floating_point():
        raise ValueError(f"hidden is of a floating dtype, got {hidden.dtype}")
    for name, x in (("weight", weight), ("bias", bias), ("labels", labels)):
        if x is not None and x.device != hidden.device:
            raise ValueError(f"hidden and {name} are on one device, got {hidden.device} and {x.device}")
        if x is not None and x is not labels and x.dtype != hidden.dtype:
            raise ValueError(
                f"hidden and {name} have one dtype, got {hidden.dtype} and {x.dtype}; cast one or use torch.autocast"
            )


def _pick_backend(name: str, hidden: Tensor) -> str:
    if name not in BACKENDS:
        raise ValueError(f"backend is one of {', '.join(BACKENDS)}, got {name!r}")
    refusal = None
    if not hidden.is_cuda:
        refusal = f"it runs on a GPU, the tensors are on {hidden.device.type}"
    elif hidden.dtype == torch.float64:
        refusal = "its sums are fp32, the tensors are torch.float64"
    elif not torch.compiler.is_compiling() and not has_triton():
        # Compiled for a GPU triton is there, and looking for it cannot be compiled.
        refusal = "triton cannot be imported here"
    if name == "triton" and refusal:
        raise ValueError(f"backend 'triton' cannot serve this call: {refusal}; use backend='auto'")
    return "torch" if name == "torch" or refusal else "triton"


def _require_labels(labels: Tensor, vocabulary: int) -> None:
    """Labels are tokens. On a GPU nothing waits for the answer: a wrong one is torch's device-side assertion."""
    inside = ((labels >= 0) & (labels < vocabulary)).all()
    if labels.is_cuda:
        torch._assert_async(inside, f"labels are from 0 to {vocabulary - 1}, or ignore_index")
    elif not inside:
        raise ValueError(
            f"labels are from 0 to {vocabulary - 1}, or ignore_index, got {labels.min()} to {labels.max()}"
        )


@torch.library.impl(FORWARD, "default")
def _forward_impl(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *options: Any) -> Tensor:
    _require_labels(labels, len(weight))
    with as_operator(hidden):
        return head_statistics(hidden, weight, bias, labels, LogitOptions(*options))


@torch.library.impl(BACKWARD, "default")
def _backward_impl(
    dstatistics: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    statistics: Tensor,
    needs: str,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; an empty tensor for each letter of "hwb" that is not in `needs`."""
    saved = hidden, weight, bias, labels, statistics
    with as_operator(hidden):
        found = head_gradients(dstatistics, saved, LogitOptions(*options), needs)
    dhidden, dweight, dbias = (hidden.new_empty(0) if x is None else x.to(hidden.dtype) for x in found)
    return dhidden, dweight, dbias


@torch.library.register_fake(FORWARD)
def _forward_fake(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *options: Any) -> Tensor:
    return hidden.new_empty((4, hidden.shape[0]), dtype=accumulate_dtype(hidden.dtype))


@torch.library.register_fake(BACKWARD)
def _backward_fake(
    dstatistics: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    statistics: Tensor,
    needs: str,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = {"h": hidden.shape, "w": weight.shape, "b": weight.shape[:1]}
    dhidden, dweight, dbias = (hidden.new_empty(shapes[name] if name in needs else (0,)) for name in "hwb")
    return dhidden, dweight, dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.options = inputs[4:]
    ctx.save_for_backward(*inputs[:4], output)


def _backward(ctx: Any, dstatistics: Tensor) -> tuple[Tensor | None, ...]:
    needs = "".join(name for name, wanted in zip("hwb", ctx.needs_input_grad, strict=False) if wanted)
    found = backward_op(dstatistics, *ctx.saved_tensors, needs, *ctx.options)
    gradients = (x if name in needs else None for name, x in zip("hwb", found, strict=True))
    return *gradients, None, *[None] * len(ctx.options)


torch.library.register_autograd(FORWARD, _backward, setup_context=_save)


def _refuse_double_backward(ctx: Any, *gradients: Tensor | None) -> Any:
    raise RuntimeError("the chunked loss has no double backward: gradients of its gradients are not implemented")


torch.library.register_autograd(BACKWARD, _refuse_double_backward)
