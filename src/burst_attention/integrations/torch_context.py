"""`context_parallel` with the arguments of torch's own: inside it, scaled_dot_product_attention runs on the ring.

    with context_parallel(mesh["cp"], buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 1]):
        loss = model(ids, positions, labels)
        loss.backward()

torch's own cuts a sequence in 2 W chunks and gives rank r the chunks r and 2 W - 1 - r: the layout zigzag, the default
here too. Where the length is a multiple of 2 W both hold the same tokens; here any length and any layout will do.

Calls are seen by a TorchFunctionMode, so it does not matter by which name a model reaches the function, and other
threads are left alone. A mode ends with its context: a checkpoint that recomputed its part later would run plain
attention on the shard, and gradients would be wrong in silence. So what autograd saves inside is not unpacked outside.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from burst_attention.agreement import refuse
from burst_attention.api import burst_attention
from burst_attention.layout import Layout
from burst_attention.mask import Mask, causal
from burst_attention.options import resolve_layout
from burst_attention.ring import Ring

OUTSIDE = (
    "backward ran outside the context_parallel() that forward ran in; there, a checkpoint would recompute attention "
    "over this rank's shard alone. Call backward inside the with block"
)

_KEPT: dict[str, tuple[Any, Ring]] = {}
"""By name: the world a ring was made in, and the ring. A context lasts a step, and a new ring costs connections."""


@contextlib.contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[Tensor] | None = None,
    layout: Layout | str = "zigzag",
    mask: Mask | None = None,
    **options: Any,
) -> Iterator[None]:
    """Shard the buffers and run scaled_dot_product_attention on the ring; backward must run inside too.

    Every attention call inside is over the sharded sequence: q (B, H, S, D), k and v (B, G, S, D) with this rank's S
    tokens. `is_causal` is by global positions, `scale` and `enable_gqa` are honoured; a dense `attn_mask`, dropout, and
    attention by any other function are refused. nn.MultiheadAttention works with `need_weights=False`.

    Parameters' gradients are those of this rank's tokens: sum them over the ring. DDP or FSDP over dp and cp average
    over all ranks; multiply the loss by the ring's size there.

    Args:
        mesh: a DeviceMesh of one dimension, such as `mesh["cp"]`; a `Ring` will do as well.
        buffers: whole tensors of one length, the same on all ranks: inputs, labels shifted before, positions. Inside
            they are this rank's shard, in place; other tensors that share their memory are not touched.
        buffer_seq_dims: the sequence dimension of each.
        no_restore_buffers: those of `buffers` that stay sharded afterwards.
        layout: who holds which tokens, a `Layout` or "contiguous", "zigzag", "striped".
        mask: which pairs exist, for all calls inside; with `is_causal=True` those of them that are causal.
        options: further options of `burst_attention`, such as `heads=`, `wire_dtype=`, `check=`.

    Raises:
        ValueError: for buffers that do not fit, and for calls that cannot be honoured, on every rank.
        RuntimeError: when backward runs after the context has ended.
    """
    ring = mesh if isinstance(mesh, Ring) else _ring_of(mesh)
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept = list(no_restore_buffers or ())
    whole = _layout_of(ring, layout, buffers, dims, kept)
    mode = RingAttention(ring, layout if whole is None else whole, mask, options)
    shards = [whole.shard(x, ring.rank, dim).clone() for x, dim in zip(buffers, dims, strict=True)] if whole else []
    restored = [(x, x.detach()) for x in buffers if not any(x is other for other in kept)]
    try:
        for x, shard in zip(buffers, shards, strict=True):
            # New memory for the same object: writing to the old would change views of it, such as labels of inputs.
            x.data = shard
        with mode, torch.autograd.graph.saved_tensors_hooks(mode.pack, mode.unpack):
            yield
    finally:
        mode.ended = True
        for x, original in restored:
            x.data = original
    if shards and not mode.calls:
        warnings.warn(
            "context_parallel() sharded its buffers, but no scaled_dot_product_attention ran inside: attention by any "
            "other function sees this rank's tokens alone",
            stacklevel=3,
        )


class RingAttention(TorchFunctionMode):
    """While it is entered, scaled_dot_product_attention runs on a ring; what backward saves knows when it ended."""

    def __init__(self, ring: Ring, layout: Layout | str, mask: Mask | None, options: dict[str, Any]) -> None:
        super().__init__()
        for name in ("return_lse", "key_layout", "scale"):
            if name in options:
                raise ValueError(f"context_parallel takes no {name}: calls inside are those of torch's function")
        if mask is not None and not isinstance(mask, Mask):
            raise ValueError(f"mask must be a Mask such as causal(), or None, got {type(mask).__name__}")
        self.ring, self.layout, self.options = ring, layout, options
        self.masks = {False: mask, True: causal() if mask is None else causal() & mask}
        self.calls = 0
        self.ended = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Attention goes to the ring; functions that may call it in their bodies run with the mode on."""
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            if torch.compiler.is_compiling():
                # The compiler then leaves the calling function as it is; it must not trace the ring's messages.
                raise ValueError("a ring cannot be compiled; compile with fullgraph=False, or leave attention out")
            if "torch._dynamo" in sys.modules:
                return torch.compiler.disable(self.attend)(*args, **kwargs)  # type: ignore[no-untyped-call]
            return self.attend(*args, **kwargs)
        if func in _LOCAL:
            raise ValueError(f"{func} would attend within this rank's shard; call scaled_dot_product_attention")
        if func not in _CALLERS:
            return func(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["need_weights"]:
                raise ValueError("attention weights are not formed; call MultiheadAttention with need_weights=False")
        with self:
            return _body_of(func)(*args, **kwargs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """torch's function of the same arguments, over the sharded sequence."""
        self.calls += 1
        if not enable_gqa and query.dim() == key.dim() == 4 and query.shape[1] != key.shape[1]:
            raise self._refuse(
                f"q has {query.shape[1]} heads and k has {key.shape[1]}; pass enable_gqa=True, as torch wants it too"
            )
        out: Tensor = burst_attention(
            query, key, value, ring=self.ring, mask=self.masks[bool(is_causal)], layout=self.layout, scale=scale,
            attn_mask=attn_mask, dropout_p=dropout_p, **self.options,
        )  # fmt: skip
        if out.grad_fn is not None:
            # Where the caller's own hooks, such as save_on_cpu, keep ours from seeing what is saved.
            out.grad_fn.register_prehook(lambda grads: self.require_inside())
        return out

    def pack(self, x: Tensor) -> tuple[Tensor, int]:
        """What autograd keeps. With hooks it does not watch for changes in place; the version serves for that."""
        return x, x._version

    def unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        """What backward gets, while the context lasts."""
        self.require_inside()
        x, version = packed
        if x._version != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(x.shape)} that backward needs was changed in place after it was saved "
                f"(version {x._version}, expected {version})"
            )
        return x

    def require_inside(self) -> None:
        """Raise where the context has ended."""
        if self.ended:
            raise RuntimeError(OUTSIDE)

    def _refuse(self, message: str) -> ValueError:
        return refuse(self.ring, ValueError(message), self.options.get("check", "always"))


def _local_attention() -> Iterator[Any]:
    """Attention that does not pass through scaled_dot_product_attention, and so would stay inside the shard."""
    yield from (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd)
    yield torch.ops.higher_order.flex_attention
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
        packet = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")
        yield from (packet, packet.default)


_LOCAL = frozenset(_local_attention())

# A mode is off while it handles a function, and these run models: checkpoints recompute in backward.
_CALLERS: frozenset[Callable[..., Any]] = frozenset(
    (Tensor.backward, torch.autograd.backward, torch.autograd.grad, functional.multi_head_attention_forward)
)


@functools.lru_cache(maxsize=len(_CALLERS))
def _body_of(func: FunctionType) -> FunctionType:
    """The function without the lines that ask for modes first: entered again, they would ask for ever."""
    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**func.__globals__, **dict.fromkeys(asks, lambda *args: False)}
    body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _ring_of(mesh: Any) -> Ring:
    """The ring over a mesh, kept while the world lasts that it was made in."""
    for name in [name for name, (world, _) in _KEPT.items() if world is not dist.group.WORLD]:
        del _KEPT[name]
    ring = Ring.from_mesh(mesh)
    _KEPT[ring.name] = dist.group.WORLD, ring
    return ring


def _layout_of(
    ring: Ring, layout: Layout | str, buffers: list[Tensor], dims: list[int], kept: list[Tensor]
) -> Layout | None:
    """The layout of the buffers' length; None without buffers, where each call's lengths say it."""
    if len(buffers) != len(dims):
        raise ValueError(f"{len(buffers)} buffers need as many buffer_seq_dims, got {len(dims)}")
    for x in kept:
        if not any(x is other for other in buffers):
            raise ValueError(f"no_restore_buffers has a tensor of shape {tuple(x.shape)} that is not among buffers")
    for index, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"buffer {index} of shape {tuple(x.shape)} has no dimension {dim}")
        if x.requires_grad:
            raise ValueError(
                f"buffer {index} requires grad and cannot be sharded in place; use Layout.shard, which is "
                "differentiable, or call requires_grad_() inside the context"
            )
    lengths = [x.size(dim) for x, dim in zip(buffers, dims, strict=True)]
    if len(set(lengths)) > 1:
        raise ValueError(f"buffers must be whole tensors of one length, got {lengths} along {dims}")
    if isinstance(layout, Layout):
        if lengths and layout.tokens != lengths[0]:
            raise ValueError(f"buffers have {lengths[0]} tokens, layout {layout} holds {layout.tokens}")
        return resolve_layout(str(layout), layout.tokens, ring.size)
    return resolve_layout(layout, lengths[0], ring.size) if lengths else None
