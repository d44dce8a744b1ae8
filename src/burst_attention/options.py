"""The options of a call as one frozen value with a text form that parses back.

The text crosses the operator boundary, is compared between ranks and keys the caches, so one spelling serves all.
"""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from burst_attention.layout import LAYOUT_NAMES, Layout
from burst_attention.mask import Mask, full, parse_mask
from burst_attention.schedule import split_heads

CHECKS = ("always", "first", "off")
TOPOLOGIES = ("auto", "flat", "double")
SIDES = ("auto", "kv", "query")
RESULTS = ("auto", "chain", "straight")
GPU_COALESCE = 2
"""Blocks computed as one on a GPU, where small tiles are slow and partials cost a pass over memory each."""
MOST_COALESCED = 8
MOST_SEARCHED = 64
"""Ranks among which one with another length is searched for."""
HOSTS_GROUPS = (4, 2)
"""Groups of heads between hosts, whose links are slow, as many as key heads allow: one computes while others' blocks
are under way. More would be messages too small for what each costs."""
WIRE_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}


@dataclass(frozen=True)
class Options:
    """Every option of `burst_attention`, as text and numbers. `needs` are the letters of "qkv" that want gradients."""

    mask: str
    layout: str
    key_layout: str | None
    scale: float
    direction: str
    forward_direction: str
    wire_dtype: str | None
    kernel: str
    check: str
    needs: str
    returns_lse: bool
    coalesce: int
    per_host: int
    """Ranks that share a host in a double ring; 1 is a flat ring."""
    head_groups: int
    """Groups of heads that take turns."""
    results: str
    """"chain", "straight" or, where the tile kernel decides (ops.py), "auto"."""
    head_degree: int
    """Neighbouring ranks that exchange heads for tokens; 1 is a ring of all ranks."""

    def __str__(self) -> str:
        return json.dumps(vars(self), sort_keys=True)

    def layouts(self, query_lengths: tuple[int, ...], key_lengths: tuple[int, ...]) -> tuple[Layout, Layout]:
        """The layouts of queries and keys for the lengths that the ranks hold; they must fit on every rank."""
        return _fitting_layouts(self.layout, self.key_layout, query_lengths, key_lengths)

    def lengths(self, ring_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens that every rank holds, when the layouts alone say it."""
        layout = resolve_layout(self.layout, 0, ring_size)
        key_layout = resolve_layout(self.key_layout, 0, ring_size) if self.key_layout else layout
        ranks = range(ring_size)
        return tuple(layout.local_tokens(r) for r in ranks), tuple(key_layout.local_tokens(r) for r in ranks)


@lru_cache(maxsize=256)
def parse_options(text: str) -> tuple[Options, Mask]:
    """Read options back from their text, with the mask parsed."""
    options = Options(**json.loads(text))
    return options, parse_mask(options.mask)


def make_options(
    *,
    mask: Mask | None,
    layout: Layout | str | None,
    key_layout: Layout | str | None,
    scale: float | None,
    head_dim: int,
    direction: str,
    forward_direction: str,
    wire_dtype: torch.dtype | None,
    kernel: str,
    check: str,
    needs: str,
    returns_lse: bool,
    coalesce: int | str,
    per_host: int,
    head_groups: int | str,
    results: str,
    one_host: bool,
    head_degree: int,
    heads: int,
    kv_heads: int,
    device_type: str,
) -> Options:
    """Check every option and write it as text; ValueError names the value, the rule and the remedy."""
    if mask is not None and not isinstance(mask, Mask):
        raise ValueError(f"mask must be a Mask such as causal() or None for full attention, got {type(mask).__name__}")
    for name, value in (("direction", direction), ("forward_direction", forward_direction)):
        if value not in SIDES:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, SIDES))}, got {value!r}")
    if not isinstance(returns_lse, bool):
        raise ValueError(f"return_lse must be True or False, got {returns_lse!r}")
    if results not in RESULTS:
        raise ValueError(f"results must be one of {', '.join(map(repr, RESULTS))}, got {results!r}")
    if results == "straight" and per_host > 1:
        raise ValueError(
            "results='straight' needs a flat ring, and this one has several hosts; "
            "use topology='flat' or results='chain'"
        )
    if check not in CHECKS:
        raise ValueError(f"check must be one of {', '.join(map(repr, CHECKS))}, got {check!r}")
    if check == "off" and (not isinstance(layout, Layout) or isinstance(key_layout, str)):
        raise ValueError(
            "check='off' needs Layout objects, e.g. layout=Layout.contiguous(tokens, ring_size): "
            "without a check no rank learns the whole length"
        )
    alike = one_host and device_type == "cuda" and per_host == head_degree == 1
    if results == "auto" and (check == "off" or not alike):
        # Without a check no rank learns whether the others' kernels choose as its own does.
        results = "chain"
    return Options(
        mask=str(mask or full()),
        layout=_layout_text(layout if layout is not None else "contiguous", "layout"),
        key_layout=None if key_layout is None else _layout_text(key_layout, "key_layout"),
        scale=_scale(scale, head_dim),
        direction=direction,
        forward_direction=forward_direction,
        wire_dtype=_wire_text(wire_dtype),
        kernel=kernel,
        check=check,
        needs=needs,
        returns_lse=returns_lse,
        coalesce=_coalesce(coalesce, device_type, per_host),
        per_host=per_host,
        head_groups=_head_groups(head_groups, _kv_heads_alike(heads, kv_heads, head_degree), per_host, device_type),
        results=results,
        head_degree=head_degree,
    )


@lru_cache(maxsize=256)
def _fitting_layouts(
    text: str, key_text: str | None, query_lengths: tuple[int, ...], key_lengths: tuple[int, ...]
) -> tuple[Layout, Layout]:
    layout = resolve_layout(text, sum(query_lengths), len(query_lengths))
    if key_text is not None:
        key_layout = resolve_layout(key_text, sum(key_lengths), len(key_lengths), "key_layout")
    elif text in LAYOUT_NAMES:
        key_layout = resolve_layout(text, sum(key_lengths), len(key_lengths))
    else:
        key_layout = layout
    _require_lengths(layout, query_lengths, "query", "layout")
    _require_lengths(key_layout, key_lengths, "key", "key_layout" if key_text else "layout")
    return layout, key_layout


@lru_cache(maxsize=256)
def resolve_layout(text: str, tokens: int, ring_size: int, argument: str = "layout") -> Layout:
    """A layout from its text, or from a bare name and the length."""
    layout = Layout(text, tokens, ring_size) if text in LAYOUT_NAMES else Layout.parse(text)
    if layout.ring_size != ring_size:
        raise ValueError(f"{argument} {layout} is for a ring of {layout.ring_size}, this ring has {ring_size} ranks")
    return layout


def _require_lengths(layout: Layout, lengths: tuple[int, ...], what: str, argument: str) -> None:
    """Every rank must hold what the layout gives it; all lengths are told, and the rank that stands out is named."""
    wrong = [rank for rank, length in enumerate(lengths) if layout.local_tokens(rank) != length]
    if not wrong:
        return
    held = textwrap.shorten(", ".join(map(str, lengths)), 100, placeholder=" ...")
    rank = wrong[0]
    if layout.tokens == sum(lengths) and (found := _odd_one_out(layout, lengths)):
        rank, layout = found
    raise ValueError(
        f"rank {rank} holds {lengths[rank]} {what} tokens, but {argument} {layout} gives it "
        f"{layout.local_tokens(rank)}; "
        f"shard with Layout.shard, or pass the {argument} that the data was sharded with (ranks hold {held})"
    )


def _odd_one_out(layout: Layout, lengths: tuple[int, ...]) -> tuple[int, Layout] | None:
    """The one rank without which all others hold their shards of such a layout, and that layout."""
    size, found = len(lengths), []
    for rank in range(size) if layout.name in LAYOUT_NAMES and 2 < size <= MOST_SEARCHED else ():
        others = [other for other in range(size) if other != rank]
        near = sum(lengths[other] for other in others) * size // (size - 1)
        for tokens in range(max(near - 2 * size, 0), near + 2 * size + 1):
            meant = replace(layout, tokens=tokens)
            if all(meant.local_tokens(other) == lengths[other] for other in others):
                found.append((rank, meant))
    # Lengths between two may fit as well; whose fault it is must be sure.
    return found[0] if len({rank for rank, _ in found}) == 1 else None


def _layout_text(layout: Layout | str, argument: str) -> str:
    if isinstance(layout, Layout):
        return str(layout)
    if layout == "balanced":
        raise ValueError(f"{argument} 'balanced' depends on the mask; pass Layout.balanced(tokens, ring_size, mask)")
    if layout not in LAYOUT_NAMES:
        raise ValueError(f"{argument} must be a Layout or one of {', '.join(map(repr, LAYOUT_NAMES))}, got {layout!r}")
    return layout


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number or None for 1/sqrt(head_dim), got {scale!r}")
    return float(scale)


def _coalesce(coalesce: int | str, device_type: str, per_host: int) -> int:
    if coalesce == "auto":
        return GPU_COALESCE if device_type == "cuda" and per_host == 1 else 1
    if isinstance(coalesce, bool) or not isinstance(coalesce, int) or not 1 <= coalesce <= MOST_COALESCED:
        raise ValueError(f"coalesce must be 'auto' or a whole number from 1 to {MOST_COALESCED}, got {coalesce!r}")
    if coalesce > 1 and per_host > 1:
        raise ValueError(f"coalesce={coalesce} needs topology='flat'; a double ring computes one block a round")
    return coalesce


def require_head_degree(degree: object, ring_size: int) -> None:
    """`heads=` of a call: how many neighbouring ranks exchange heads."""
    if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1 or ring_size % degree:
        raise ValueError(
            f"heads must say how many neighbouring ranks exchange heads, a divisor of the ring's {ring_size} ranks, "
            f"got {degree!r}"
        )


def _kv_heads_alike(heads: int, kv_heads: int, degree: int) -> int:
    """Key heads that every rank's number of them is a multiple of: groups of heads must divide all."""
    return math.gcd(*(len(keys) for keys in split_heads(heads, kv_heads, degree).keys))


def _head_groups(groups: int | str, kv_heads: int, per_host: int, device_type: str) -> int:
    if groups == "auto":
        between_hosts = per_host > 1 and device_type == "cpu"
        return next((count for count in HOSTS_GROUPS if between_hosts and kv_heads % count == 0), 1)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or kv_heads % groups:
        raise ValueError(f"head_groups must be 'auto' or a divisor of the {kv_heads} key heads, got {groups!r}")
    return groups


def _wire_text(wire_dtype: torch.dtype | None) -> str | None:
    if wire_dtype is None:
        return None
    for name, dtype in WIRE_DTYPES.items():
        if dtype == wire_dtype:
            return name
    raise ValueError(f"wire_dtype must be None or one of {', '.join(WIRE_DTYPES)}, got {wire_dtype!r}")
