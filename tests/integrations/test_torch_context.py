"""context_parallel: SDPA inside runs on the ring, buffers are this rank's, and nothing is recomputed outside."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from burst_attention import Layout, Ring, causal, run_ranks, window
from burst_attention.integrations.torch_context import context_parallel
from burst_attention.launch import run_processes
from tests.integrations.tiny_decoder import MICRO_BATCHES, REPLICAS, TOKENS, Decoder, alone, batch

RANKS = 2
TIMEOUT = 30.0
RECOMPUTE = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def whole_qkv(heads: int = 4, kv_heads: int = 4) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(2, count, TOKENS, 8) for count in (heads, kv_heads, kv_heads)]


def wrap_ddp(model: Decoder, mesh: Any) -> torch.nn.Module:
    return DistributedDataParallel(model)


def wrap_fsdp(model: Decoder, mesh: Any) -> torch.nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("wrap", [wrap_ddp, wrap_fsdp], ids=["ddp", "fsdp2"])
def test_training_matches_one_process(wrap: Callable[[Decoder, Any], torch.nn.Module]) -> None:
    """Two replicas of two ranks each, two micro-batches, without checkpoints and with both kinds."""
    world = REPLICAS * RANKS

    def body(ring: Ring) -> list[tuple[list[float], dict[str, Tensor]]]:
        mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("dp", "cp"))
        everyone = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
        found = []
        for recompute in (None, True, False):
            model = wrap(Decoder(recompute), everyone)
            losses = []
            for micro in range(MICRO_BATCHES):
                buffers = list(batch(micro, mesh.get_local_rank("dp")))
                with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 1]):
                    loss = model(*buffers)
                    # DDP and FSDP average over all ranks; over cp the gradients are to be summed.
                    (loss * RANKS / MICRO_BATCHES).backward()
                    losses.append(loss.item())
            gradients = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
            whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}
            found.append((losses, whole))
        return found

    losses, gradients = alone()
    ranks = run_processes(body, world)
    for variant in range(3):
        for micro in range(MICRO_BATCHES):
            for replica in range(REPLICAS):
                parts = [ranks[replica * RANKS + rank][variant][0][micro] for rank in range(RANKS)]
                assert sum(parts) == pytest.approx(losses[micro][replica], rel=1e-5)
        for rank in range(world):
            found = ranks[rank][variant][1]
            assert found.keys() == gradients.keys()
            for name, expected in gradients.items():
                close(found[name], expected)


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # the context's arguments, the call's, and the same for one process
    "full": ({}, {}, {}),
    "causal": ({}, {"is_causal": True}, {"is_causal": True}),
    "scale": ({}, {"scale": 0.7, "is_causal": True}, {"scale": 0.7, "is_causal": True}),
    "gqa": ({}, {"enable_gqa": True}, {"enable_gqa": True}),
    "striped": ({"layout": "striped"}, {"is_causal": True}, {"is_causal": True}),
    "mask": ({"mask": causal()}, {}, {"is_causal": True}),
    "mask-and-causal": (
        {"mask": window(5)},
        {"is_causal": True},
        {"attn_mask": torch.ones(TOKENS, TOKENS).tril().triu(-4).bool()},
    ),
    "options": ({"heads": 2}, {"is_causal": True}, {"is_causal": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_honoured(name: str) -> None:
    context, call, expected_call = CALLS[name]
    inputs = whole_qkv(kv_heads=2 if name == "gqa" else 4)
    layout = Layout(context.get("layout", "zigzag"), TOKENS, RANKS)

    def body(ring: Ring) -> list[Tensor]:
        q, k, v = (x.clone() for x in inputs)
        with context_parallel(ring, buffers=[q, k, v], buffer_seq_dims=[2, 2, -2], **context):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            # A name that was imported before is seen as well.
            out = scaled_dot_product_attention(*leaves, **call)
            out.square().sum().backward()
        return [out.detach(), *(x.grad for x in leaves)]  # type: ignore[list-item]

    ranks = run_ranks(body, RANKS, timeout=TIMEOUT)
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = scaled_dot_product_attention(*leaves, **expected_call)
    out.square().sum().backward()
    for index, expected in enumerate([out.detach(), *(x.grad for x in leaves)]):
        assert expected is not None
        close(layout.unshard([found[index] for found in ranks], dim=2), expected)


def test_multihead_attention_without_weights() -> None:
    torch.manual_seed(5)
    layer, x = torch.nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, TOKENS, 16)
    layout = Layout.zigzag(TOKENS, RANKS)

    def body(ring: Ring) -> Tensor:
        mine = x.clone()
        with torch.no_grad(), context_parallel(ring, buffers=[mine], buffer_seq_dims=[1]):
            return layer.eval()(mine, mine, mine, need_weights=False)[0]

    with torch.no_grad():
        expected = layer.eval()(x, x, x, need_weights=False)[0]
    close(layout.unshard(run_ranks(body, RANKS, timeout=TIMEOUT), dim=1), expected)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "dense-mask": (
        lambda x: scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(x.shape[2], x.shape[2])),
        "attn_mask=a tensor of shape .* is refused: a dense mask is not taken",
    ),
    "dropout": (lambda x: scaled_dot_product_attention(x, x, x, dropout_p=0.1), "dropout_p=0.1 is refused"),
    "heads": (
        lambda x: scaled_dot_product_attention(x, x[:, :2], x[:, :2]),
        "q has 4 heads and k has 2; pass enable_gqa=True",
    ),
    "length": (
        lambda x: scaled_dot_product_attention(x[:, :, 1:], x, x),
        "query tokens, but layout zigzag.37, 2. gives it",
    ),
    "flex": (lambda x: flex_attention(x, x, x), "flex_attention.* would attend within this rank's shard"),
    "kernel": (
        lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x),
        "_scaled_dot_product_flash_attention_for_cpu.* would attend within this rank's shard",
    ),
    "weights": (
        lambda x: torch.nn.MultiheadAttention(8, 2)(x[0, 0], x[0, 0], x[0, 0]),
        "attention weights are not formed; call MultiheadAttention with need_weights=False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused(name: str) -> None:
    call, message = REFUSED[name]

    def body(ring: Ring) -> None:
        x = whole_qkv()[0]
        # flex_attention compiles itself, and the compiler wraps what is raised.
        kind = RuntimeError if name == "flex" else ValueError
        with context_parallel(ring, buffers=[x], buffer_seq_dims=[2]), pytest.raises(kind, match=message):
            call(x)

    run_ranks(body, RANKS, timeout=TIMEOUT)


def outside(ring: Ring, forward: Callable[[Tensor], Tensor], **options: Any) -> None:
    """Forward inside the context, backward after it."""
    x = whole_qkv()[0]
    with context_parallel(ring, buffers=[x], buffer_seq_dims=[2], **options):
        loss = forward(x.clone().requires_grad_()).sum()
    with pytest.raises(RuntimeError, match=r"backward ran outside the context_parallel\(\) that forward ran in"):
        loss.backward()


def attend(x: Tensor) -> Tensor:
    return scaled_dot_product_attention(x * 2, x, x, is_causal=True) * 3


@RECOMPUTE
def test_a_checkpoint_recomputed_outside_raises(reentrant: bool) -> None:
    def body(ring: Ring) -> None:
        outside(ring, lambda x: checkpoint(attend, x, use_reentrant=reentrant))

    run_ranks(body, RANKS, timeout=TIMEOUT)


@RECOMPUTE
def test_a_checkpoint_that_does_not_train_attention_raises_too(reentrant: bool) -> None:
    """Only what follows attention has gradients: its recomputed input would be wrong, and no ring would know."""

    def body(ring: Ring) -> None:
        weight = torch.ones(8, requires_grad=True)

        def frozen(x: Tensor, weight: Tensor) -> Tensor:
            return scaled_dot_product_attention(x, x, x) * weight

        outside(ring, lambda x: checkpoint(frozen, x.detach(), weight, use_reentrant=reentrant))

    run_ranks(body, RANKS, timeout=TIMEOUT)


def test_the_callers_own_hooks_hide_nothing() -> None:
    def offloaded(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return checkpoint(attend, x, use_reentrant=False)  # type: ignore[no-any-return]

    run_ranks(lambda ring: outside(ring, offloaded), RANKS, timeout=TIMEOUT)


def test_another_context_is_outside_too() -> None:
    def body(ring: Ring) -> None:
        x = whole_qkv()[0]
        with context_parallel(ring, buffers=[x], buffer_seq_dims=[2]):
            loss = checkpoint(attend, x.clone().requires_grad_(), use_reentrant=False).sum()
        with context_parallel(ring), pytest.raises(RuntimeError, match="backward ran outside"):
            loss.backward()

    run_ranks(body, RANKS, timeout=TIMEOUT)


@pytest.mark.parametrize("way", ["backward", "autograd.backward", "autograd.grad"])
def test_every_way_to_run_backward_recomputes_on_the_ring(way: str) -> None:
    x = whole_qkv()[0].double()
    layout = Layout.zigzag(TOKENS, RANKS)

    def body(ring: Ring) -> Tensor:
        mine = x.clone()
        with context_parallel(ring, buffers=[mine], buffer_seq_dims=[2]):
            leaf = mine.clone().requires_grad_()
            loss = checkpoint(lambda x: attend(x).square(), leaf, use_reentrant=False).sum()
            if way == "backward":
                loss.backward()
            elif way == "autograd.backward":
                torch.autograd.backward(loss)
            else:
                return torch.autograd.grad(loss, leaf)[0]
            assert leaf.grad is not None
            return leaf.grad

    leaf = x.clone().requires_grad_()
    attend(leaf).square().sum().backward()
    assert leaf.grad is not None
    close(layout.unshard(run_ranks(body, RANKS, timeout=TIMEOUT), dim=2), leaf.grad)


@pytest.mark.parametrize("fullgraph", [False, True], ids=["parts", "fullgraph"])
def test_a_compiled_model_attends_on_the_ring_or_raises(fullgraph: bool) -> None:
    x = whole_qkv()[0]

    def body(ring: Ring) -> Tensor | str:
        compiled, mine = torch.compile(attend, backend="eager", fullgraph=fullgraph), x.clone()
        with context_parallel(ring, buffers=[mine], buffer_seq_dims=[2]):
            try:
                return compiled(mine)
            except RuntimeError as error:
                return str(error)

    found = run_processes(body, RANKS)
    if fullgraph:
        assert all("a ring cannot be compiled" in str(error) for error in found)
    else:
        close(Layout.zigzag(TOKENS, RANKS).unshard(found, dim=2), attend(x))  # type: ignore[arg-type]


def test_buffers_are_sharded_in_place_and_restored() -> None:
    def body(ring: Ring) -> None:
        tokens = torch.arange(2 * TOKENS + 1)
        # Inputs and labels as views of one memory: writing either in place would change the other.
        ids, labels = tokens[:-1].view(2, TOKENS), tokens[1:].view(2, TOKENS)
        table = torch.randn(TOKENS, 3)
        whole = [x.clone() for x in (ids, labels, table)]
        layout = Layout.zigzag(TOKENS, RANKS)
        buffers = [ids, labels, table]
        seen = []

        def fail() -> None:
            with context_parallel(ring, buffers=buffers, buffer_seq_dims=[1, -1, 0], no_restore_buffers={labels}):
                seen.extend(x.clone() for x in buffers)
                ids.add_(1)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        for x, before, dim in zip(seen, whole, (1, 1, 0), strict=True):
            assert torch.equal(x, layout.shard(before, ring.rank, dim))
        assert torch.equal(ids, whole[0]) and torch.equal(table, whole[2])
        assert torch.equal(labels, layout.shard(whole[1], ring.rank, 1))
        assert torch.equal(tokens, torch.arange(2 * TOKENS + 1))

    run_ranks(body, RANKS, timeout=TIMEOUT)


SEVEN, EIGHT = torch.zeros(1, 7), torch.zeros(1, 8)
WRONG_BUFFERS: dict[str, tuple[dict[str, Any], str]] = {
    "lists": ({"buffers": [SEVEN, EIGHT], "buffer_seq_dims": [1]}, "2 buffers need as many buffer_seq_dims, got 1"),
    "lengths": (
        {"buffers": [SEVEN, EIGHT], "buffer_seq_dims": [1, 1]},
        r"buffers must be whole tensors of one length, got \[7, 8\] along \[1, 1\]",
    ),
    "dimension": ({"buffers": [SEVEN], "buffer_seq_dims": [2]}, r"buffer 0 of shape \(1, 7\) has no dimension 2"),
    "foreign": (
        {"buffers": [SEVEN], "buffer_seq_dims": [1], "no_restore_buffers": {EIGHT}},
        r"no_restore_buffers has a tensor of shape \(1, 8\) that is not among buffers",
    ),
    "grad": (
        {"buffers": [torch.zeros(1, 7, requires_grad=True)], "buffer_seq_dims": [1]},
        "buffer 0 requires grad and cannot be sharded in place",
    ),
    "layout": (
        {"buffers": [SEVEN], "buffer_seq_dims": [1], "layout": Layout.zigzag(8, 1)},
        r"buffers have 7 tokens, layout zigzag\(8, 1\) holds 8",
    ),
    "name": ({"buffers": [SEVEN], "buffer_seq_dims": [1], "layout": "zag"}, "zag"),
    "mask": ({"mask": torch.ones(7, 7)}, r"mask must be a Mask such as causal\(\), or None, got Tensor"),
    "option": ({"return_lse": True}, "context_parallel takes no return_lse"),
}


@pytest.mark.parametrize("name", WRONG_BUFFERS)
def test_wrong_arguments_are_refused(name: str) -> None:
    arguments, message = WRONG_BUFFERS[name]

    def body(ring: Ring) -> None:
        with pytest.raises(ValueError, match=message), context_parallel(ring, **arguments):
            pass

    run_ranks(body, 1, timeout=TIMEOUT)
    assert SEVEN.shape == (1, 7) and EIGHT.shape == (1, 8)


def test_a_saved_tensor_changed_in_place_is_noticed() -> None:
    def body(ring: Ring) -> None:
        with context_parallel(ring):
            leaf = torch.ones(3, requires_grad=True)
            y = leaf * 1
            loss = (y * y).sum()
            y.add_(1)
            with pytest.raises(RuntimeError, match="changed in place after it was saved"):
                loss.backward()

    run_ranks(body, 1, timeout=TIMEOUT)


def test_a_context_without_attention_warns() -> None:
    def body(ring: Ring) -> None:
        x = torch.zeros(1, 7)
        with (
            pytest.warns(UserWarning, match="no scaled_dot_product_attention ran inside"),
            context_parallel(ring, buffers=[x], buffer_seq_dims=[1]),
        ):
            pass

    run_ranks(body, 1, timeout=TIMEOUT)


def test_torch_has_the_same_keywords_and_the_same_shards() -> None:
    experimental = pytest.importorskip("torch.distributed.tensor.experimental")
    balancer = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    theirs = inspect.signature(experimental.context_parallel).parameters
    ours = inspect.signature(context_parallel).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == theirs[name].default and ours[name].kind == theirs[name].kind for name in theirs)
    order = balancer._HeadTailLoadBalancer(24, 3, "cpu")._generate_indices()[0]
    layout = Layout.zigzag(24, 3)
    assert torch.equal(order, torch.cat([layout.positions(rank) for rank in range(3)]))
