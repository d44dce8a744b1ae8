"""The public calls: `burst_attention` stands where scaled_dot_product_attention stood; `plan` says what it would do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from burst_attention.agreement import refuse
from burst_attention.heads_ops import heads_forward_op
from burst_attention.layout import Layout
from burst_attention.mask import Mask, full
from burst_attention.ops import forward_op, plan_of, require_served, ring_plans
from burst_attention.options import TOPOLOGIES, Options, make_options, require_head_degree, resolve_layout
from burst_attention.ring import Ring
from burst_attention.schedule import HeadsPlan, Plan, Shapes
from burst_attention.tiles import KERNEL_NAMES, TileRequest, lacks_triton, pick_kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PLANNED_DEVICES = ("cpu", "cuda")

REFUSED = {
    "softcap": "a cap on the scores is not implemented",
    "dropout": "dropout on the weights is not implemented",
    "dropout_p": "dropout on the weights is not implemented",
    "bias": "an additive bias on the scores is not implemented",
    "attn_bias": "an additive bias on the scores is not implemented",
    "alibi_slopes": "an additive bias on the scores is not implemented",
    "attn_mask": "a dense mask is not taken; write it as a Mask: causal(), window(n), documents([...]), blocks(...)",
    "is_causal": "say mask=causal() instead",
    "window_size": "say mask=causal() & window(size) instead",
    "sinks": "learned sinks are written on top of return_lse=True: lse is differentiable",
    "s_aux": "learned sinks are written on top of return_lse=True: lse is differentiable",
}


@overload
def burst_attention(
    q: Tensor, k: Tensor, v: Tensor, *, ring: Ring, return_lse: Literal[False] = ..., **options: Any
) -> Tensor: ...


@overload
def burst_attention(
    q: Tensor, k: Tensor, v: Tensor, *, ring: Ring, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...


def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ring: Ring,
    mask: Mask | None = None,
    layout: Layout | str | None = None,
    key_layout: Layout | str | None = None,
    scale: float | None = None,
    direction: str = "auto",
    forward_direction: str = "auto",
    wire_dtype: torch.dtype | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
    check: str = "always",
    coalesce: int | str = "auto",
    topology: str = "auto",
    head_groups: int | str = "auto",
    results: str = "auto",
    heads: int = 1,
    **refused: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention over a sequence that is spread over the ranks of a ring.

    Every rank calls it with its own shard and gets the output of its own queries. Differentiable in q, k, v.

    Args:
        q: (B, H, S, D) this rank's queries.
        k: (B, G, K, D) this rank's keys; H must be a multiple of G (GQA, MQA), and keys are never repeated.
        v: (B, G, K, E) this rank's values; E may differ from D.
        ring: from `Ring.from_group()`, `Ring.from_mesh()` or `run_ranks()`.
        mask: which pairs exist, by global positions; None is full attention.
        layout: how the sequence was sharded, a `Layout` or "contiguous", "zigzag", "striped"; None is contiguous, what
            `torch.chunk` gives. It is never guessed.
        key_layout: the same for k and v where it differs (cross-attention); None takes `layout`'s.
        scale: multiplies the scores; None is 1 / sqrt(D).
        direction: which side moves in backward, "kv" or "query"; "auto" moves fewer bytes.
        forward_direction: the same for forward.
        wire_dtype: dtype of gradients and partial outputs on the wire; None is what they accumulate in, fp32 (fp64 for
            fp64 inputs), but for gradients that `results="auto"` sends as a kernel gives them. Row statistics always
            travel in that; q, k, v and dout in their own dtype.
        kernel: "auto" takes the fastest for each piece. "plain" runs anywhere; "flash" is torch's own flash operator;
            on a GPU also "triton", our own, "hopper", ours for that chip in rounds that take turns (bf16 and fp16, head
            dims 64 and 128), and "cudnn". "flash" on a GPU and "cudnn" serve full and causal pieces.
        return_lse: also return lse (B, H, S), natural log, fp32 (fp64 for fp64 inputs), differentiable.
        check: "always" compares all ranks' calls before the first hop, "first" only for a call not seen before,
            "off" never (then `layout` must be a `Layout`). Where it does not compare, ranks whose messages differ in
            size still raise, but as RingError, and the ring is lost; other disagreements go unseen.
        coalesce: how many visiting blocks are computed as one; each more is one more shard in flight and in memory, and
            larger pieces for the kernel. "auto" is 2 on a GPU, 1 elsewhere.
        topology: "double" is a ring between hosts and one inside each: what goes to another host has the time of a
            whole turn inside; with one host, or one rank on each, it is a flat one. "flat" is one ring of all ranks.
            "auto" is double where the ring's hosts have several ranks each, as many on every host, numbered host by
            host.
        head_groups: in how many groups the heads are computed, which take turns: one computes while another's block is
            under way. "auto" is 4 in a double ring on CPU, or 2, as the heads can be divided; 1 elsewhere.
        results: how gradients of a block that visits, or partial outputs, come home: "chain" from visitor to visitor,
            each adding its part, or "straight" from each, added at home. No more bytes, and with a narrow `wire_dtype`
            each part is rounded once; for ranks that all reach each other alike, in a flat ring (on several hosts,
            with topology="flat"). "auto" is straight on GPUs of one host whose kernels give gradients in q's dtype, as
            FlashAttention-4 and cuDNN do for full and causal masks, and ours for Hopper for any: dk and dv travel as
            they are, keys and values with them, if that is no more bytes and H is at most 5 times G. Elsewhere, and
            with check="off", it is a chain.
        heads: how many neighbouring ranks exchange heads for tokens before the ring (Ulysses): with as many as a host
            has, blocks travel between hosts alone; with all of them there is no ring. A divisor of the ring's size and
            at most the number of query heads; key heads are split, or copied where there are too few.

    Returns:
        out (B, H, S, E) in q's dtype, or (out, lse). A row with no allowed key gives 0 and -inf.

    Raises:
        ValueError: on every rank, before the first hop, when any rank was called wrongly or ranks disagree; without a
            check, only on the rank that was called wrongly.
        RingError: when a rank fails or stays silent; names rank, round and peer.
    """
    if not isinstance(ring, Ring):
        raise ValueError(f"ring must be a Ring, got {type(ring).__name__}; use Ring.from_group() or run_ranks()")
    try:
        _refuse_arguments(refused)
        _require_tensors(q, k, v)
        require_head_degree(heads, ring.size)
        q, k, v = _autocast(q, k, v)
        needs = "".join(name for name, x in zip("qkv", (q, k, v), strict=True) if x.requires_grad)
        needs = needs if torch.is_grad_enabled() else ""
        options = make_options(
            mask=mask,
            layout=layout,
            key_layout=key_layout,
            scale=scale,
            head_dim=q.shape[3],
            direction=direction,
            forward_direction=forward_direction,
            wire_dtype=wire_dtype,
            kernel=kernel,
            check=check,
            needs=needs,
            returns_lse=return_lse,
            coalesce=coalesce,
            per_host=per_host_of(ring, topology, heads),
            head_groups=head_groups,
            results=results,
            one_host=len(set(ring.hosts)) == 1,
            head_degree=heads,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            device_type=q.device.type,
        )
        _require_shards(q, k, v, options, mask, ring)
    except Exception as error:
        raise refuse(ring, error, check) from None
    out, lse, *_ = (forward_op if heads == 1 else heads_forward_op)(q, k, v, str(options), ring.name)
    return (out, lse) if return_lse else out


@overload
def plan(tokens: int, ring_size: int, *, head_degree: Literal[1] = ..., **options: Any) -> Plan: ...


@overload
def plan(tokens: int, ring_size: int, *, head_degree: int, **options: Any) -> Plan | HeadsPlan: ...


# The overloads' options are the arguments below, not any that one likes.
def plan(  # type: ignore[misc]
    tokens: int,
    ring_size: int,
    *,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int,
    value_dim: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    mask: Mask | None = None,
    layout: Layout | str | None = None,
    key_tokens: int | None = None,
    key_layout: Layout | str | None = None,
    direction: str = "auto",
    forward_direction: str = "auto",
    wire_dtype: torch.dtype | None = None,
    requires_grad: str = "qkv",
    kernel: str = "auto",
    return_lse: bool = False,
    coalesce: int | str = "auto",
    ranks_per_host: int = 1,
    head_groups: int | str = "auto",
    results: str = "auto",
    head_degree: int = 1,
    device: str = "cpu",
) -> Plan | HeadsPlan:
    """The plan that a call with these shapes would run, on every rank; needs no process group.

    Print it, or ask `.bytes_sent(rank, phase)`, `.flops(rank, phase)`, `.peak_bytes(rank)`, `.imbalance` and
    `.direction(phase)`. `requires_grad` are the letters of "qkv" that want gradients; `device`, "cpu" or "cuda", is the
    tensors'; with `kernel` and `return_lse`, as the call takes them, it decides whose workspace counts as memory.
    With several `ranks_per_host` it is a double ring's, unless that is all of them; with 1 all are taken to reach each
    other alike. `head_degree` is the call's `heads`. For a call with check="off" ask for results="chain", its "auto".
    """
    if isinstance(ranks_per_host, bool) or not isinstance(ranks_per_host, int) or ranks_per_host < 1:
        raise ValueError(f"ranks_per_host must be a whole number of at least 1, got {ranks_per_host!r}")
    if ring_size % ranks_per_host:
        raise ValueError(
            f"ring_size {ring_size} is no multiple of ranks_per_host {ranks_per_host}; hosts must be alike"
        )
    kv_heads = heads if kv_heads is None else kv_heads
    shapes = Shapes(batch, heads, kv_heads, head_dim, head_dim if value_dim is None else value_dim, dtype)
    for name in ("batch", "heads", "kv_heads", "head_dim", "value_dim"):
        value = getattr(shapes, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    _require_heads(heads, kv_heads)
    require_head_degree(head_degree, ring_size)
    _require_dtype(dtype)
    request = TileRequest(device, dtype, shapes.head_dim, shapes.value_dim, return_lse)
    _require_known(request, kernel)
    if not isinstance(requires_grad, str) or set(requires_grad) - set("qkv"):
        raise ValueError(f"requires_grad takes letters of 'qkv', got {requires_grad!r}")
    needs = "".join(name for name in "qkv" if name in requires_grad)
    options = make_options(
        mask=mask, layout=layout, key_layout=key_layout, scale=None, head_dim=head_dim, direction=direction,
        forward_direction=forward_direction, wire_dtype=wire_dtype, kernel="auto", check="always", needs=needs,
        returns_lse=return_lse, coalesce=coalesce, head_groups=head_groups, results=results,
        one_host=ranks_per_host in (1, ring_size), per_host=_inner_ranks(ranks_per_host, ring_size, head_degree),
        head_degree=head_degree, heads=heads,
        kv_heads=kv_heads, device_type=device,
    )  # fmt: skip
    query_layout = resolve_layout(options.layout, tokens, ring_size)
    if options.key_layout is None and key_tokens not in (None, tokens) and isinstance(layout, Layout):
        raise ValueError(f"key_tokens {key_tokens} differs from tokens {tokens}: give key_layout too")
    key_text = options.key_layout or options.layout
    keys_layout = resolve_layout(key_text, tokens if key_tokens is None else key_tokens, ring_size, "key_layout")
    for name, given, found in (("tokens", tokens, query_layout), ("key_tokens", key_tokens, keys_layout)):
        if given is not None and given != found.tokens:
            raise ValueError(f"{name} {given} differs from the layout's {found.tokens} ({found})")
    tiles = pick_kernel(kernel, request)
    built = plan_of(options, mask or full(), query_layout, keys_layout, shapes, needs, tiles)
    for ring_plan in ring_plans(built):
        require_served(tiles, ring_plan)
    if isinstance(built, HeadsPlan):
        return replace(built, rings=tuple(replace(p, kernel=tiles) for p in built.rings))
    return replace(built, kernel=tiles)


def _require_known(request: TileRequest, kernel: str) -> None:
    """A device and a kernel that can be planned for here."""
    device = request.device_type
    if device not in PLANNED_DEVICES:
        raise ValueError(f"device must be one of {', '.join(map(repr, PLANNED_DEVICES))}, got {device!r}")
    written_in_triton = kernel in KERNEL_NAMES and kernel != "plain"
    if written_in_triton and not torch.cuda.is_available() and lacks_triton(request):
        raise ValueError(
            "device='cuda' is planned for GPUs with triton, and to know what its kernels do takes triton here too: "
            "install burst-attention[triton] (Linux), or plan with kernel='plain' for GPUs without it"
        )


def _inner_ranks(per_host: int, ring_size: int, degree: int) -> int:
    """Ranks per host of a ring between groups of `degree` ranks; 1 where it is flat."""
    inner = per_host // degree if per_host % degree == 0 else 1
    return 1 if inner == ring_size // degree else inner


def per_host_of(ring: Ring, topology: str, degree: int = 1) -> int:
    """Ranks per host of the double ring that a call asks for; 1 for a flat ring."""
    if topology not in TOPOLOGIES:
        raise ValueError(f"topology must be one of {', '.join(map(repr, TOPOLOGIES))}, got {topology!r}")
    if topology == "flat":
        return 1
    try:
        per_host = ring.ranks_per_host()
    except ValueError:
        if topology == "double":
            raise
        return 1
    return _inner_ranks(per_host, ring.size, degree)


def _refuse_arguments(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in REFUSED:
            raise ValueError(f"burst_attention takes no argument {name!r}")
        if value is None or value is False or (isinstance(value, int | float) and value == 0):
            continue
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name}={shown} is refused: {REFUSED[name]}")


def _require_tensors(q: Any, k: Any, v: Any) -> None:
    """Shapes, dtypes and devices of the three inputs fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.layout != torch.strided:
            raise ValueError(f"{name} has layout {x.layout}; make it dense with .to_dense()")
        if x.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, heads, tokens, head_dim), got shape {tuple(x.shape)}"
            )
        _require_dtype(x.dtype, name)
        if x.device != q.device:
            raise ValueError(f"q is on {q.device} but {name} on {x.device}; put all inputs on one device")
        if x.device.type == "meta":
            raise ValueError(f"{name} is on the meta device and holds no data; put it on a real device")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"q has batch {q.shape[0]} but {name} has {x.shape[0]}")
        if 0 in (x.shape[0], x.shape[1], x.shape[3]):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; only the number of tokens may be 0")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must agree in batch, heads and tokens")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q has head_dim {q.shape[3]} but k has {k.shape[3]}")
    _require_heads(q.shape[1], k.shape[1])


def _require_dtype(dtype: torch.dtype, name: str = "dtype") -> None:
    if dtype not in DTYPES:
        raise ValueError(f"{name} {dtype} is not supported; use float32, bfloat16, float16 or float64")


def _require_heads(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, k and v have {kv_heads}: query heads must be a multiple of key heads")


def _require_shards(q: Tensor, k: Tensor, v: Tensor, options: Options, mask: Mask | None, ring: Ring) -> None:
    """What one rank can know before the agreement: dtypes match, layouts fit the ring and this rank's lengths."""
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them, or use autocast"
        )
    request = TileRequest(q.device.type, q.dtype, q.shape[3], v.shape[3], options.returns_lse, options.scale)
    pick_kernel(options.kernel, request)
    texts = {"layout": options.layout, "key_layout": options.key_layout}
    for argument, text in texts.items():
        if text is None or "(" not in text:
            continue
        layout = resolve_layout(text, 0, ring.size, argument)
        if mask is not None:
            mask.require_cover(layout.end if argument == "layout" else 0, layout.end if argument == "key_layout" else 0)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast as SDPA does inside an autocast region: floating inputs other than fp64 take the region's dtype."""
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    cast = [x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v)]
    return cast[0], cast[1], cast[2]
