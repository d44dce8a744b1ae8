"""patch_accelerator: Accelerate and the Trainer train a tiny Llama on a ring as one process does."""

from __future__ import annotations

import inspect
import os
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from burst_attention import Layout, Ring
from burst_attention.integrations.accelerate import NEEDED, patch_accelerator
from burst_attention.launch import run_processes

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

RANKS, TOKENS, MICRO_BATCHES = 2, 37, 2
IDS = torch.randint(0, 64, (6, TOKENS), generator=torch.Generator().manual_seed(3))


def llama() -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def be_launched(ring: Ring) -> None:
    """What a launcher tells Accelerate; the group itself exists already."""
    rank, size = str(ring.rank), str(ring.size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", ACCELERATE_USE_CPU="true")


def patched(**options: Any) -> Any:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    patch_accelerator(accelerator, parallelism_config=accelerate.ParallelismConfig(cp_size=RANKS), **options)
    return accelerator


def shard_with_fsdp2(accelerator: Any) -> None:
    """Accelerate takes FSDP from its environment on GPUs alone."""
    utils = accelerate.utils
    accelerator.state.distributed_type = utils.DistributedType.FSDP
    accelerator.state.fsdp_plugin = utils.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )  # fmt: skip


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_llama_trains_as_on_one_process(wrap: str) -> None:
    def body(ring: Ring) -> tuple[list[float], list[Tensor]]:
        be_launched(ring)
        accelerator = patched()
        if wrap == "fsdp2":
            shard_with_fsdp2(accelerator)
        plain = llama()
        model, _ = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        assert wrap in {"ddp", "fsdp2"} and ("FSDP" in type(model).__name__) == (wrap == "fsdp2")
        losses = []
        for ids in IDS[:MICRO_BATCHES]:
            ids = ids[None].clone()
            labels, positions = ids.clone(), torch.arange(TOKENS)[None]
            shifted = functional.pad(ids[:, 1:], (0, 1), value=-100)
            buffers = [ids, positions, labels, shifted]
            sharded = accelerator.maybe_context_parallel(
                buffers=buffers, buffer_seq_dims=[1] * 4, no_restore_buffers=set(buffers)
            )
            with accelerator.accumulate(model), sharded:
                out = model(
                    input_ids=ids, position_ids=positions, labels=labels, shift_labels=shifted,
                    num_items_in_batch=TOKENS - 1,
                )  # fmt: skip
                # Both average over all ranks; over cp the gradients are to be summed.
                accelerator.backward(out.loss * RANKS)
                losses.append(out.loss.item())
        gradients = [p.grad for p in model.parameters()]
        return losses, [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]

    ranks = run_processes(body, RANKS)
    model = llama()
    for micro, ids in enumerate(IDS[:MICRO_BATCHES]):
        loss = model(input_ids=ids[None], labels=ids[None]).loss
        (loss / MICRO_BATCHES).backward()
        assert sum(losses[micro] for losses, _ in ranks) == pytest.approx(loss.item(), rel=1e-5)
    for _, gradients in ranks:
        for found, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-6)


def test_the_trainer_with_checkpointing_trains_as_on_one_process() -> None:
    def train(ring: Ring) -> tuple[list[float], list[Tensor]]:
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=2, learning_rate=0.1,
                optim="sgd", lr_scheduler_type="constant", use_cpu=True, report_to=[], save_strategy="no",
                logging_steps=1, disable_tqdm=True, gradient_checkpointing=ring.size > 1, max_grad_norm=0.0,
            )  # fmt: skip
            data = [{"input_ids": ids, "labels": ids} for ids in IDS]
            trainer = transformers.Trainer(llama(), arguments, train_dataset=data)
            if ring.size > 1:
                config = accelerate.ParallelismConfig(cp_size=ring.size)
                patch_accelerator(trainer.accelerator, parallelism_config=config)
            trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            return losses, [parameter.detach() for parameter in trainer.model.parameters()]

    def on_ring(ring: Ring) -> tuple[list[float], list[Tensor]]:
        be_launched(ring)
        return train(ring)

    losses, parameters = run_processes(train, 1)[0]
    for found_losses, found in run_processes(on_ring, RANKS):
        assert len(losses) == 2 and found_losses == pytest.approx(losses, rel=1e-5)
        for mine, expected in zip(found, parameters, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


WRONG_INPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "padding": ({"attention_mask": torch.ones(1, 19).tril(-1)[:, :]}, "is not all ones"),
    "positions": ({"position_ids": None}, "position_ids are missing"),
    "labels": ({"labels": IDS[:1, :19]}, "labels without shift_labels"),
}


def test_inputs_that_would_go_wrong_in_silence_are_refused() -> None:
    def body(ring: Ring) -> None:
        be_launched(ring)
        accelerator = patched(layout=Layout.contiguous(38, RANKS))
        model = accelerator.prepare(llama())
        good = {"input_ids": IDS[:1, :19], "position_ids": torch.arange(19)[None], "attention_mask": torch.ones(1, 19)}
        with accelerator.maybe_context_parallel(buffers=[], buffer_seq_dims=[]):
            model(**good)
            for wrong, message in WRONG_INPUTS.values():
                with pytest.raises(ValueError, match=message):
                    model(**(good | wrong))

    run_processes(body, RANKS)


def test_an_accelerator_that_does_not_fit_is_refused() -> None:
    def body(ring: Ring) -> None:
        be_launched(ring)
        accelerator = accelerate.Accelerator(cpu=True)
        with pytest.raises(ValueError, match="has no context parallelism to run on a ring"):
            patch_accelerator(accelerator)
        with pytest.raises(ValueError, match="is for 3 processes, there are 2"):
            patch_accelerator(accelerator, parallelism_config=accelerate.ParallelismConfig(cp_size=3))
        with pytest.raises(ValueError, match=r"has no _prepare_cp, .*; patch_accelerator fits accelerate 1.15"):
            patch_accelerator(object())
        accelerator.prepare(llama())
        with pytest.raises(ValueError, match=r"call patch_accelerator before prepare\(\)"):
            patch_accelerator(accelerator, parallelism_config=accelerate.ParallelismConfig(cp_size=2))

    run_processes(body, RANKS)


def test_accelerate_still_has_what_is_relied_on() -> None:
    """`prepare` calls `_prepare_cp`, and `maybe_context_parallel` what that left, by three keywords."""
    accelerator = accelerate.Accelerator
    assert all(name in dir(accelerator) or f"self.{name} = " in inspect.getsource(accelerator) for name in NEEDED)
    assert "self._prepare_cp(" in inspect.getsource(accelerator.prepare)
    entered: list[dict[str, Any]] = []

    class Stub:
        parallelism_config = accelerate.ParallelismConfig(cp_size=2)

        def _cp_context(self, **keywords: Any) -> Any:
            entered.append(keywords)
            return tempfile.TemporaryDirectory()

    with accelerator.maybe_context_parallel(Stub(), buffers=[IDS], buffer_seq_dims=[1]):
        pass
    assert entered == [{"buffers": [IDS], "buffer_seq_dims": [1], "no_restore_buffers": None}]
