"""The chunked LM head and loss: gradients by gradcheck, errors against fp64 beside plain torch's, refusals, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, log_softmax
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import burst_attention.loss as loss_module
from burst_attention import Layout, linear_cross_entropy, linear_log_probs
from burst_attention.logits import chunks
from burst_attention.logits.chunks import chunk_rows

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]
TOKENS, WIDTH, VOCABULARY = 37, 6, 19


def problem(
    dtype: torch.dtype = torch.float64,
    tokens: int = TOKENS,
    width: int = WIDTH,
    vocabulary: int = VOCABULARY,
    batch: int = 2,
) -> Tensors:
    """hidden, weight, bias, and labels of which a fifth are ignored."""
    torch.manual_seed(0)
    hidden = torch.randn(batch, tokens, width).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width) * 2).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (batch, tokens))
    labels[torch.rand(labels.shape) < 0.2] = -100
    return hidden, weight, bias, labels


def plain_losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, **options: Any) -> Tensor:
    """The losses from whole logits, in the inputs' dtype."""
    cap, z_loss = options.get("softcap"), options.get("z_loss", 0.0)
    logits = linear(hidden, weight, bias)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    smoothing = options.get("label_smoothing", 0.0)
    losses = cross_entropy(
        logits.flatten(0, -2), labels.flatten(), reduction="none", label_smoothing=smoothing
    ).view(labels.shape)  # fmt: skip
    return losses + torch.where(labels == -100, 0.0, z_loss * torch.logsumexp(logits, -1).square())


def plain_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    logits = linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logs = log_softmax(logits / temperature, -1)
    picked = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    ignored = labels == -100
    return picked.masked_fill(ignored, 0.0), -(logs.exp() * logs).sum(-1).masked_fill(ignored, 0.0)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "softcap": {"softcap": 3.0},
    "everything": {"label_smoothing": 0.3, "z_loss": 0.02, "softcap": 2.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_gradcheck_of_the_loss(options: dict[str, Any], reduction: str) -> None:
    hidden, weight, bias, labels = problem(tokens=7, width=3, vocabulary=5)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction, chunk=4, **options)

    torch.autograd.gradcheck(loss, (hidden, weight, bias))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradcheck_of_log_probs_and_entropies(softcap: float | None, temperature: float) -> None:
    hidden, weight, bias, labels = problem(tokens=7, width=3, vocabulary=5)
    options: dict[str, Any] = {"temperature": temperature, "softcap": softcap, "chunk": 4}

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return linear_log_probs(hidden, weight, labels, bias=bias, return_entropy=True, **options)  # type: ignore[return-value]

    torch.autograd.gradcheck(both, (hidden, weight, bias))
    torch.autograd.gradcheck(
        lambda *x: linear_log_probs(x[0], x[1], labels, bias=x[2], **options), (hidden, weight, bias)
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("chunk", [1, 10, 74, 1000, "auto"])
def test_equals_plain_torch_in_fp64(options: dict[str, Any], chunk: int | str) -> None:
    hidden, weight, bias, labels = problem()
    expected = plain_losses(hidden, weight, bias, labels, **options)
    found = linear_cross_entropy(hidden, weight, labels, bias=bias, reduction="none", chunk=chunk, **options)
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=1e-13)
    # The mean is the one of torch: over labels that are not ignored.
    mean = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk=chunk, **options)
    wanted = expected.sum() / (labels != -100).sum()
    torch.testing.assert_close(mean, wanted, atol=1e-13, rtol=1e-13)
    leaves = hidden, weight, bias
    for mine, right in zip(torch.autograd.grad(mean, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_log_probs_equal_plain_torch_in_fp64(softcap: float | None) -> None:
    hidden, weight, bias, labels = problem()
    expected = plain_log_probs(hidden, weight, bias, labels, 0.7, softcap)
    options: dict[str, Any] = {"bias": bias, "temperature": 0.7, "softcap": softcap, "chunk": 10}
    found = linear_log_probs(hidden, weight, labels, return_entropy=True, **options)
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=1e-13)
    assert torch.equal(linear_log_probs(hidden, weight, labels, **options), found[0])
    # Any gradient per token, as policy gradients have.
    leaves, incoming = (hidden, weight, bias), [torch.randn(labels.shape, dtype=torch.float64) for _ in range(2)]
    mine, right = (torch.autograd.grad(both, leaves, incoming) for both in (found, expected))
    for one, other in zip(mine, right, strict=True):
        torch.testing.assert_close(one, other, atol=1e-13, rtol=1e-13)


def errors(run: Callable[..., Tensor], dtype: torch.dtype, exact: tuple[Tensor, ...]) -> list[float]:
    """rms errors of the loss and of the gradients of hidden, weight and bias."""
    hidden, weight, bias, labels = problem(dtype, tokens=111, width=32, vocabulary=301)
    loss = run(hidden, weight, bias, labels)
    found = loss, *torch.autograd.grad(loss, (hidden, weight, bias))
    return [float((x.detach().double() - y).square().mean().sqrt()) for x, y in zip(found, exact, strict=True)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_errors_are_no_larger_than_plain_torch_has(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Against fp64 on the same inputs: at most twice plain torch's error, and 2 ulp of the result's size."""
    inputs = problem(dtype, tokens=111, width=32, vocabulary=301)
    leaves = [x.detach().double().requires_grad_() for x in inputs[:3]]
    whole = plain_losses(*leaves, inputs[3], **options).sum() / (inputs[3] != -100).sum()
    exact = whole.detach(), *torch.autograd.grad(whole, leaves)

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        return plain_losses(hidden, weight, bias, labels, **options).float().sum() / (labels != -100).sum()

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, bias=bias, chunk=50, **options)

    # The loss itself is fp32 whatever the inputs.
    eps = [torch.finfo(torch.float32).eps, *[torch.finfo(dtype).eps] * 3]
    limits = [
        2 * error + 2 * ulp * float(right.square().mean().sqrt())
        for error, ulp, right in zip(errors(plain, dtype, exact), eps, exact, strict=True)
    ]
    for name, error, limit in zip(
        ("loss", "hidden", "weight", "bias"), errors(ours, dtype, exact), limits, strict=True
    ):
        assert error <= limit, f"{name}: {error} where {limit} is allowed"


def test_results_are_fp32_and_gradients_of_the_inputs_dtype() -> None:
    hidden, weight, bias, labels = problem(torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias)
    assert loss.dtype == torch.float32
    assert all(x.dtype == torch.bfloat16 for x in torch.autograd.grad(loss, (hidden, weight, bias)))


def test_the_weight_gradient_is_summed_in_fp32() -> None:
    """A thousand chunks: a sum in bf16 would stop growing at 256 times its terms."""
    hidden, weight = torch.ones(1000, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    weight.requires_grad_()
    labels = torch.zeros(1000, dtype=torch.long)
    linear_cross_entropy(hidden, weight, labels, reduction="sum", chunk=1).backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == [-500.0, 500.0]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_but_ignored_labels_is_zero(reduction: str) -> None:
    hidden, weight, bias, labels = problem()
    nothing = torch.full_like(labels, 7)
    loss = linear_cross_entropy(
        hidden, weight, nothing, bias=bias, ignore_index=7, reduction=reduction, z_loss=0.1, label_smoothing=0.1
    )
    assert torch.equal(loss, torch.zeros_like(loss))
    for gradient in torch.autograd.grad(loss.sum(), (hidden, weight, bias)):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    for found in linear_log_probs(hidden, weight, nothing, ignore_index=7, return_entropy=True):
        assert torch.equal(found, torch.zeros_like(found))
    assert linear_cross_entropy(hidden, weight, nothing, ignore_index=7, num_items=0).item() == 0.0
    assert linear_cross_entropy(hidden, weight, nothing, ignore_index=7, num_items=torch.tensor(0)).item() == 0.0


def test_no_tokens_are_zero() -> None:
    hidden, weight, _, _ = problem()
    loss = linear_cross_entropy(hidden[:, :0], weight, torch.zeros(2, 0, dtype=torch.long))
    assert loss.item() == 0.0
    assert torch.equal(torch.autograd.grad(loss, weight)[0], torch.zeros_like(weight))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
def test_losses_of_shards_sum_to_the_whole(layout: str, as_tensor: bool) -> None:
    hidden, weight, bias, labels = problem()
    count = int((labels != -100).sum())
    cut = Layout(layout, TOKENS, 3)
    whole = linear_cross_entropy(hidden, weight, labels, bias=bias)
    leaves = hidden, weight, bias
    parts = [
        linear_cross_entropy(
            cut.shard(hidden, rank, dim=1),
            weight,
            cut.shard(labels, rank, dim=1),
            bias=bias,
            num_items=torch.tensor(count) if as_tensor else count,
        )
        for rank in range(3)
    ]
    torch.testing.assert_close(sum(parts), whole)
    found = [sum(x) for x in zip(*(torch.autograd.grad(part, leaves) for part in parts), strict=True)]
    torch.testing.assert_close(found, list(torch.autograd.grad(whole, leaves)))


@pytest.mark.parametrize("wanted", ["h", "w", "b", "hw", "hb", "wb"])
def test_frozen_inputs_get_no_gradient(wanted: str) -> None:
    hidden, weight, bias, labels = problem()
    right = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, bias=bias), (hidden, weight, bias))
    leaves = [x.detach().requires_grad_(name in wanted) for name, x in zip("hwb", (hidden, weight, bias), strict=True)]
    linear_cross_entropy(leaves[0], leaves[1], labels, bias=leaves[2], chunk=11).backward()
    for name, leaf, gradient in zip("hwb", leaves, right, strict=True):
        assert (leaf.grad is not None) == (name in wanted)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, gradient)


def test_incoming_gradients_scale_and_accumulate_and_come_twice() -> None:
    hidden, weight, _, labels = problem()
    loss = linear_cross_entropy(hidden, weight, labels, chunk=11)
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    # Scaled, and a second time over the same graph.
    (loss * -3.5).backward(retain_graph=True)
    loss.backward()
    for leaf, gradient in zip((hidden, weight), once, strict=True):
        torch.testing.assert_close(leaf.grad, -2.5 * gradient)


def test_double_backward_is_refused() -> None:
    hidden, weight, _, labels = problem()
    loss = linear_cross_entropy(hidden, weight, labels)
    gradient = torch.autograd.grad(loss, hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no double backward"):
        gradient.sum().backward()


def test_inputs_are_never_written() -> None:
    hidden, weight, bias, labels = problem()
    before = [x.detach().clone() for x in (hidden, weight, bias, labels)]
    options: dict[str, Any] = {"bias": bias, "softcap": 3.0}
    linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, z_loss=0.1, **options).backward()
    sum(linear_log_probs(hidden, weight, labels, return_entropy=True, **options)).sum().backward()  # type: ignore[union-attr]
    for x, y in zip((hidden, weight, bias, labels), before, strict=True):
        assert torch.equal(x.detach(), y)


def test_autocast_casts_as_linear_does() -> None:
    hidden, weight, bias, labels = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias)
        wide = linear_cross_entropy(hidden.double(), weight.double(), labels, bias=bias.double())
    low = [x.to(torch.bfloat16) for x in (hidden, weight, bias)]
    expected = linear_cross_entropy(low[0], low[1], labels, bias=low[2])
    assert torch.equal(loss, expected) and wide.dtype == torch.float64
    # Outside the context, as backward mostly is, and inside, where its products would be cast.
    leaves = hidden, weight, bias
    right = torch.autograd.grad(expected, leaves)
    for inside in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            found = torch.autograd.grad(loss, leaves, retain_graph=True)
        assert all(mine.dtype == torch.float32 and torch.equal(mine, x) for mine, x in zip(found, right, strict=True))


def test_a_tied_embedding_gets_both_gradients() -> None:
    _, weight, _, labels = problem()
    tokens = torch.randint(0, VOCABULARY, labels.shape)
    gradients = [
        torch.autograd.grad(loss(torch.nn.functional.embedding(tokens, weight)), weight)[0]
        for loss in (
            lambda hidden: linear_cross_entropy(hidden, weight, labels, chunk=11),
            lambda hidden: cross_entropy(linear(hidden, weight).flatten(0, 1), labels.flatten()),
        )
    ]
    torch.testing.assert_close(*gradients)


def test_tokens_that_cannot_be_chosen_have_no_weight() -> None:
    """A bias of -inf takes a token out; p * log(p) is 0 there, and nothing is NaN."""
    hidden, weight, bias, labels = problem()
    bias = bias.detach().clone()
    bias[3] = -torch.inf
    labels = labels.masked_fill(labels == 3, 4)
    log_probs, entropy = linear_log_probs(hidden, weight, labels, bias=bias, return_entropy=True, chunk=11)
    kept = [x for x in range(VOCABULARY) if x != 3]
    expected = linear_log_probs(
        hidden, weight[kept], labels - (labels > 3).long(), bias=bias[kept], return_entropy=True
    )
    torch.testing.assert_close((log_probs, entropy), expected)
    assert torch.autograd.grad((log_probs + entropy).sum(), hidden)[0].isfinite().all()


def test_a_changed_weight_is_noticed_in_backward() -> None:
    hidden, weight, _, labels = problem()
    loss = linear_cross_entropy(hidden, weight, labels)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(dynamic: bool) -> None:
    hidden, weight, bias, labels = problem()

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, bias=bias, label_smoothing=0.1, z_loss=0.1, chunk=11)

    whole = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    leaves = hidden, weight, bias
    found, right = (run(*leaves, labels) for run in (whole, loss))
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(right, leaves))


def test_selective_checkpointing_can_keep_the_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, labels = problem()
    calls: list[int] = []
    monkeypatch.setattr(loss_module, "head_statistics", lambda *x: calls.append(1) or chunks.head_statistics(*x))

    def policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        kept = operator == torch.ops.burst_attention.head_statistics.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    checkpoint(
        lambda: linear_cross_entropy(hidden, weight, labels),
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    ).backward()  # type: ignore[union-attr]
    assert len(calls) == 1
    torch.testing.assert_close(
        hidden.grad, torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), hidden)[0]
    )


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "label-above": (
        {"labels": torch.full((2, TOKENS), VOCABULARY)},
        "labels are from 0 to 18, or ignore_index, got 19",
    ),
    "label-below": ({"labels": torch.full((2, TOKENS), -1)}, "labels are from 0 to 18, or ignore_index, got -1"),
    "label-shape": ({"labels": torch.zeros(2, TOKENS - 1, dtype=torch.long)}, "one label per row of hidden"),
    "label-dtype": ({"labels": torch.zeros(2, TOKENS)}, "labels are integers, got torch.float32"),
    "weight-dtype": ({"weight": torch.zeros(VOCABULARY, WIDTH)}, "one dtype, got torch.float64 and torch.float32"),
    "weight-shape": ({"weight": torch.zeros(WIDTH, VOCABULARY).double()}, r"weight \(V, C\), got .* and \(6, 19\)"),
    "bias-shape": ({"bias": torch.zeros(3).double()}, "one number per row of weight, 19, got"),
    "bias-dtype": ({"bias": torch.zeros(VOCABULARY)}, "hidden and bias have one dtype"),
    "integers": ({"hidden": torch.zeros(2, TOKENS, WIDTH, dtype=torch.long)}, "floating dtype, got torch.int64"),
    "reduction": ({"reduction": "average"}, "reduction is one of mean, sum, none, got 'average'"),
    "smoothing": ({"label_smoothing": 1.5}, "label_smoothing is between 0 and 1, got 1.5"),
    "z-loss": ({"z_loss": -1.0}, "z_loss is a number not below 0, got -1.0"),
    "softcap": ({"softcap": 0.0}, "softcap is a number above 0, or None for none, got 0.0"),
    "none-of-many": ({"reduction": "none", "num_items": 3}, "reduction='none' has none"),
    "num-items": ({"num_items": -3}, "not below 0, got -3"),
    "num-items-shape": ({"num_items": torch.ones(2)}, r"one number, got a tensor of shape \(2,\)"),
    "chunk": ({"chunk": 0}, "chunk is a number of rows from 1, or 'auto', got 0"),
    "backend": ({"backend": "liger"}, "backend is one of auto, torch, triton, got 'liger'"),
    "triton-on-cpu": ({"backend": "triton"}, "it runs on a GPU, the tensors are on cpu; use backend='auto'"),
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS)
def test_wrong_arguments_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    hidden, weight, bias, labels = problem()
    arguments = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias} | change
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf")])
def test_a_wrong_temperature_is_refused(temperature: float) -> None:
    hidden, weight, _, labels = problem()
    with pytest.raises(ValueError, match="temperature is a number above 0"):
        linear_log_probs(hidden, weight, labels, temperature=temperature)


def test_chunks_stay_within_their_bytes_and_are_about_equal() -> None:
    assert chunk_rows(1 << 17, 1 << 17, torch.bfloat16) == 1024
    assert chunk_rows(1025, 1 << 17, torch.float32) == 513
    assert chunk_rows(1024, 1 << 17, torch.float64) == 512
    assert chunk_rows(5, 1 << 17, torch.float32) == 5
    assert chunk_rows(5, 1 << 40, torch.float32) == 1
    assert chunk_rows(0, 10, torch.float32) == 1


def traced_peak(run: Callable[[], object]) -> int:
    """Most bytes allocated at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        run()
    assert trace.profiler is not None
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_memory_beyond_the_hidden_gradient_is_flat(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole logits of 4096 tokens would be 64 MiB; a chunk's are 1, and what grows is a hundred bytes a token."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1 << 20)
    peaks = []
    for tokens in (512, 4096):
        hidden, weight, _, labels = problem(dtype, tokens, 16, 4096, batch=1)

        def step(hidden: Tensor = hidden, weight: Tensor = weight, labels: Tensor = labels) -> tuple[Tensor, ...]:
            loss = linear_cross_entropy(hidden, weight, labels, z_loss=0.1, label_smoothing=0.1)
            return torch.autograd.grad(loss, (hidden, weight))

        peaks.append(traced_peak(step) - hidden.numel() * hidden.element_size())
    assert 1 << 20 < peaks[0] < 3 << 20
    assert peaks[1] - peaks[0] < 100 * (4096 - 512), peaks
