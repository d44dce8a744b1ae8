"""What we count on in torch's operators and registry: a torch that changes them fails here, not in a user's run.

Arguments are passed by place, so their order is the contract. The operators themselves run in tests/gpu.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn import attention

FORWARD = ["query", "key", "value"]
BACKWARD = ["grad_out", "query", "key", "value", "out", "logsumexp"]
OPERATORS = {
    "_scaled_dot_product_flash_attention": [*FORWARD, "dropout_p", "is_causal", "return_debug_mask", "scale"],
    "_scaled_dot_product_flash_attention_backward": [
        *BACKWARD, "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "philox_seed",
        "philox_offset", "scale",
    ],
    "_scaled_dot_product_cudnn_attention": [
        *FORWARD, "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask", "scale",
    ],
    "_scaled_dot_product_cudnn_attention_backward": [
        *BACKWARD, "philox_seed", "philox_offset", "attn_bias", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
        "dropout_p", "is_causal", "scale",
    ],
    "_scaled_dot_product_flash_attention_for_cpu": [*FORWARD, "dropout_p", "is_causal", "attn_mask", "scale"],
    "_scaled_dot_product_flash_attention_for_cpu_backward": [
        *BACKWARD, "dropout_p", "is_causal", "attn_mask", "scale",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_take_what_we_pass(name: str) -> None:
    schema = getattr(torch.ops.aten, name).default._schema
    assert [argument.name for argument in schema.arguments] == OPERATORS[name]
    if name.endswith("backward"):
        assert len(schema.returns) == 3
    else:
        assert [value.name for value in schema.returns[:2]] == ["output", "logsumexp"]


def test_the_registry_of_flash_implementations_has_its_public_road() -> None:
    """`burst bench gpu --flash FA4` activates one by name; the policy asks which serves."""
    assert list(inspect.signature(attention.activate_flash_attention_impl).parameters)[:1] == ["impl"]
    assert attention.current_flash_attention_impl() is None, "nothing is activated by importing us"
    assert "FA4" in attention.list_flash_attention_impls()
