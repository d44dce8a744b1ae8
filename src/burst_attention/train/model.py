"""The model that is trained: any causal language model of transformers, with its head and loss in chunks.

Shapes: B batch, S tokens of this rank, C hidden features, V vocabulary.
"""

from __future__ import annotations

import difflib
import json
import textwrap
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from burst_attention.integrations.checkpointing import keep_attention
from burst_attention.integrations.transformers import enable
from burst_attention.loss import linear_cross_entropy
from burst_attention.mask import Mask, causal, window
from burst_attention.ring import Ring
from burst_attention.train.config import LIST, TrainConfig

NAME_LENGTH, REASON_LENGTH = 40, 100
"""Characters of what others wrote in a line for the user."""
SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""The default: somewhat more than 10 million parameters with a vocabulary of bytes; wide and with few heads, so that
attention at 8192 tokens costs less than the weights, and a laptop is done in minutes."""


def require_transformers() -> None:
    """Import what models are made with."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ValueError(
            "burst train needs transformers; install it with: pip install 'burst-attention[train]'"
        ) from None


def families() -> list[str]:
    """The families of causal language models in transformers; what one of them does may still be refused."""
    require_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def make_model(config: TrainConfig, vocab_size: int) -> Any:
    """A model from a family's config, or with the weights of a folder or a hub id; weights in fp32, never unpickled."""
    settings = _model_settings(config.model_config)
    folder = Path(config.model)
    torch.manual_seed(config.seed)
    if "/" not in config.model and (not _exists(folder) or _is_only_named_so(folder)):
        return _from_family(config, settings, vocab_size)
    if settings:
        raise ValueError(f"--model-config changes a config, and {config.model} brings its own; leave one of them out")
    if _exists(folder) and not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no config.json, so it is no model's folder")
    model = _with_weights(config.model)
    if model.config.vocab_size < vocab_size:
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens, the model {config.model} only {model.config.vocab_size}: give the "
            "model's own tokenizer with --tokenizer"
        )
    return model


def _is_only_named_so(folder: Path) -> bool:
    """Whether a folder that is no model's bears the name of a family, as one that holds a user's notes on it may."""
    return not (folder / "config.json").exists() and folder.name in families()


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for any file
        return False


def _with_weights(source: str) -> Any:
    """A model of a folder or a hub id; one that lacks a weight is refused: transformers would make a random one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        turn_dropout_off(config)
        model, found = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=torch.float32, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True,
        )  # fmt: skip
    except Exception as error:
        # A damaged file, weights of another shape, an id that is none: each library says it in its own way.
        raise ValueError(f"cannot load the model {_named(source)}: {_reason(error)}") from None
    wrong = sorted({*found["missing_keys"], *(str(key) for key, *_ in found["mismatched_keys"])})
    if wrong:
        raise ValueError(f"the model {source} lacks {len(wrong)} of its weights, {wrong[0]} among them")
    return model


def turn_dropout_off(config: Any) -> None:
    """With dropout no loss would be the unsharded run's: ranks cannot draw the masks that one device draws."""
    found = _dropouts(config.to_dict())
    for name in found:
        setattr(config, name, 0.0)
    if found and not (dist.is_initialized() and dist.get_rank()):
        warnings.warn(f"dropout is off: the model's {', '.join(found)} taken as 0", stacklevel=2)


def _dropouts(settings: dict[str, Any]) -> list[str]:
    """The settings that leave something out by chance."""
    numbers = {name: value for name, value in settings.items() if type(value) in (int, float)}
    return sorted(name for name, value in numbers.items() if "drop" in name and value > 0)


def _named(text: str) -> str:
    """A name that a user gave, short enough for a line."""
    return text if len(text) <= NAME_LENGTH else text[:NAME_LENGTH] + "..."


def _reason(error: Exception) -> str:
    return textwrap.shorten(str(error), REASON_LENGTH, placeholder=" ...") or type(error).__name__


def _from_family(config: TrainConfig, settings: dict[str, Any], vocab_size: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    _require_family(config.model)
    if asked := _dropouts(settings):
        raise ValueError(f"--model-config: {asked[0]} must be 0, for ranks cannot draw the masks of one device")
    given = {**SMALL, "max_position_embeddings": max(config.tokens, 2048), "attention_dropout": 0.0, **settings}
    given = {"vocab_size": vocab_size, "tie_word_embeddings": False, **given}
    if given["vocab_size"] < vocab_size:
        raise ValueError(f"the tokenizer has {vocab_size} tokens, --model-config only {given['vocab_size']}")
    try:
        known, made = AutoConfig.for_model(config.model), AutoConfig.for_model(config.model, **given)
        turn_dropout_off(made)
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    except Exception as error:
        # What is wrong with a config each family says in its own way, some at length.
        raise ValueError(
            f"cannot make a causal language model of the family {config.model}: {_reason(error)}"
        ) from None
    for name in settings:
        if not hasattr(known, name) and name not in SMALL:
            near = difflib.get_close_matches(name, dir(known), 1)
            hint = f"; is {near[0]!r} meant?" if near else ""
            raise ValueError(f"--model-config: the family {config.model} has no setting {name!r}{hint}")
    return model


def _require_family(name: str) -> None:
    from transformers import CONFIG_MAPPING

    known = families()
    if name in known:
        return
    near = difflib.get_close_matches(name, known, 2)
    hint = f"; near it: {', '.join(near)}" if near else ""
    shown = repr(_named(name))
    fault = f"there is no model {shown}: neither a folder nor a family that transformers knows"
    if name in CONFIG_MAPPING:
        fault = f"the family {shown} has no causal language model in transformers"
    raise ValueError(f"{fault}{hint}; --model {LIST} prints all families")


def _model_settings(text: str) -> dict[str, Any]:
    if not text:
        return {}
    path = Path(text)
    try:
        source = path.read_text() if not text.lstrip().startswith("{") and _exists(path) else text
        found = json.loads(source)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"--model-config is neither a JSON object nor a file with one: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--model-config must be a JSON object, got {type(found).__name__}")
    return found


def mask_of(config: TrainConfig) -> Mask:
    """The mask of every layer; documents come with each batch."""
    return causal() & window(config.window) if "window" in config.mask else causal()


class TrainedModel(nn.Module):
    """A transformers model on a ring, from tokens to the loss, so that logits exist for a chunk of tokens at a time."""

    def __init__(self, model: Any, ring: Ring, config: TrainConfig) -> None:
        super().__init__()
        if model.get_output_embeddings() is None:
            raise ValueError(f"{type(model).__name__} has no output embeddings, so it is no language model")
        require_known_logits(model)
        keep = config.keep_last if config.checkpointing == "selective" else 1.0
        enable(model, ring=ring, layout=config.layout, mask=mask_of(config), keep_last=keep, heads=config.heads)
        model.config.use_cache = False
        model.train()
        self.model = model
        if config.mlp_chunks > 1:
            chunk_mlps(model, config.mlp_chunks)
        if config.checkpointing != "none":
            recompute_layers(model, but_attention=config.checkpointing == "selective")

    @property
    def layers(self) -> nn.ModuleList:
        found = getattr(self.model.get_decoder(), "layers", None)
        if not isinstance(found, nn.ModuleList):
            raise ValueError(f"{type(self.model).__name__} does not keep its layers in a list that can be sharded")
        return found

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """The loss of this rank's tokens, over the number of all ranks' labels: ranks' losses sum to the mean."""
        names = ("input_ids", "position_ids", "layout", "documents")
        hidden = self.model.get_decoder()(**{name: batch[name] for name in names}, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        return linear_cross_entropy(
            scaled(hidden, self.model.config),
            head.weight,
            batch["shift_labels"],
            bias=head.bias,
            softcap=getattr(self.model.config, "final_logit_softcapping", None),
            reduction="sum",
            num_items=batch["num_items_in_batch"],
        )


def scaled(hidden: Tensor, config: Any) -> Tensor:
    """Hidden features whose logits are the model's: some families multiply their logits (Cohere), some divide them."""
    factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return hidden if factor == 1.0 else hidden * factor


@torch.no_grad()
def require_known_logits(model: Any) -> None:
    """Refuse a model that does more to its logits than is known here: its loss would be another, in silence.

    Asked of the model itself, by two tokens, before it is sharded.
    """
    model.eval()
    ids = torch.zeros((1, 2), dtype=torch.int64, device=model.get_output_embeddings().weight.device)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot compute two tokens with this config: {_reason(error)}"
        ) from None
    found = model.get_output_embeddings()(scaled(hidden, model.config))
    cap = getattr(model.config, "final_logit_softcapping", None)
    found = found if cap is None else cap * torch.tanh(found / cap)
    # Wide enough for bf16, far below any factor or cap that a family would have.
    if not torch.allclose(found, logits, rtol=1e-2, atol=1e-2 * float(logits.abs().max())):
        raise ValueError(
            f"{type(model).__name__} changes its logits in a way that is not known here; it cannot be trained"
        )


def recompute_layers(model: Any, but_attention: bool) -> None:
    """Recompute every layer in backward; with `but_attention`, all of it but our operator, whose results are kept."""
    options: dict[str, Any] = {"use_reentrant": False}
    if but_attention:
        options["context_fn"] = keep_attention()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def chunk_mlps(model: Any, chunks: int) -> None:
    """Compute every layer's MLP for some tokens at a time and recompute it in backward.

    Its wide features never exist whole. The module stays as it is, and so do its weights' names.
    """
    for layer in model.get_decoder().layers:
        mlp = getattr(layer, "mlp", None)
        if not isinstance(mlp, nn.Module):
            raise ValueError(f"{type(layer).__name__} has no mlp to chunk; leave --mlp-chunks at 1")
        mlp.forward = partial(_in_chunks, mlp.forward, chunks)


def _in_chunks(forward: Callable[[Tensor], Tensor], chunks: int, hidden: Tensor) -> Tensor:
    return torch.cat([checkpoint(forward, part, use_reentrant=False) for part in hidden.chunk(chunks, dim=1)], dim=1)
