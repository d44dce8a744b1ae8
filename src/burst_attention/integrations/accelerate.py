"""Accelerate's context parallelism, and with it the Hugging Face Trainer's, on a ring of ours.

    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=4, dp_shard_size=2), ...)
    patch_accelerator(accelerator)               # of a Trainer: patch_accelerator(trainer.accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.maybe_context_parallel(buffers=[...], buffer_seq_dims=[...]):
        ...

Accelerate knows one backend, torch's. Its `maybe_context_parallel` calls what `_prepare_cp` left in `_cp_context`, with
the three keywords of torch's context_parallel; this puts ours there. `_prepare_cp` and `_models` are private: they are
looked for, and a version without them is refused (1.15 has them).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from burst_attention.agreement import refuse
from burst_attention.integrations.torch_context import context_parallel
from burst_attention.layout import Layout
from burst_attention.mask import Mask
from burst_attention.ring import Ring

NEEDED = ("_prepare_cp", "maybe_context_parallel", "torch_device_mesh", "parallelism_config", "_models")


def patch_accelerator(
    accelerator: Any,
    *,
    parallelism_config: Any = None,
    layout: Layout | str = "zigzag",
    mask: Mask | None = None,
    **options: Any,
) -> Ring:
    """Run this Accelerator's context parallelism on a ring; call it before `prepare`. Collective over the cp axis.

    Models go on saying "sdpa" as their attention. Accelerate replaces the masks that their layers make by
    `is_causal=True`; so a padded batch is refused here, where Accelerate drops the padding's mask in silence, and so
    are a forward without the positions that a shard needs and one whose labels are not shifted beforehand.

    Args:
        accelerator: of a ParallelismConfig with `cp_size` over 1.
        parallelism_config: that config, where Accelerate refuses it in its constructor: on CPU.
        layout: who holds which tokens, a `Layout` or "contiguous", "zigzag", "striped".
        mask: which pairs exist, for all attention; with `is_causal=True` those of them that are causal. Say causal()
            for shards of a single token: transformers leaves `is_causal` out there.
        options: further options of `burst_attention`.

    Returns:
        The ring. Its rank and size, with the layout, say which tokens this process holds.
    """
    missing = [name for name in NEEDED if not hasattr(accelerator, name)]
    if missing:
        raise ValueError(
            f"this {type(accelerator).__name__} has no {', '.join(missing)}; patch_accelerator fits accelerate 1.15"
        )
    if accelerator._models:
        raise ValueError("the accelerator has prepared a model already; call patch_accelerator before prepare()")
    if parallelism_config is not None:
        _configure(accelerator, parallelism_config)
    config = accelerator.parallelism_config
    if config is None or not config.cp_enabled or config.cp_backend != "torch":
        raise ValueError(
            f"the accelerator has no context parallelism to run on a ring (parallelism_config {config!r}); give it "
            "ParallelismConfig(cp_size=...), or pass that here as parallelism_config"
        )
    ring = Ring.from_mesh(accelerator.torch_device_mesh["cp"])
    original = accelerator._prepare_cp
    require = functools.partial(_require_inputs, ring, options.get("check", "always"))

    def prepare_cp(*args: Any) -> Any:
        prepared = original(*args)
        accelerator._cp_context = functools.partial(context_parallel, ring, layout=layout, mask=mask, **options)
        for model in args:
            if isinstance(model, torch.nn.Module):
                model.register_forward_pre_hook(require, with_kwargs=True, prepend=True)
        return prepared

    accelerator._prepare_cp = prepare_cp
    return ring


def _configure(accelerator: Any, config: Any) -> None:
    """What Accelerate's constructor does with a config."""
    if config.total_size != accelerator.num_processes:
        raise ValueError(f"{config!r} is for {config.total_size} processes, there are {accelerator.num_processes}")
    accelerator.state.parallelism_config = config
    accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)


def _require_inputs(ring: Ring, check: str, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse, on every rank, a model's call that would be computed otherwise than it is written."""
    parameters = inspect.signature(model.forward).parameters
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    error = _wrong_input(given, "position_ids" in parameters)
    if error is not None:
        raise refuse(ring, ValueError(error), check)


def _wrong_input(given: dict[str, Any], has_positions: bool) -> str | None:
    mask = given.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or not bool(mask.all())):
        return (
            f"attention_mask of shape {tuple(mask.shape)} is not all ones, and layers get is_causal instead of it; "
            "pack sequences without padding, or say the pairs with patch_accelerator(mask=...)"
        )
    if has_positions and given.get("position_ids") is None:
        return "position_ids are missing: a model counts its own from 0 on every rank; shard them as a buffer"
    if given.get("labels") is not None and given.get("shift_labels") is None:
        return (
            "labels without shift_labels: a model shifts labels inside its shard, wrong at every edge; shift them "
            "before the context, shard them as a buffer and pass them as shift_labels"
        )
    return None
