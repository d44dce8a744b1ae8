"""The Hugging Face Trainer on a ring of two processes. Needs transformers and accelerate."""

import os
import tempfile

import torch
from accelerate import ParallelismConfig
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, logging

from burst_attention.integrations.accelerate import patch_accelerator
from burst_attention.launch import run_processes

tokens, ranks = 501, 2
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (4, tokens))]


def train(ring):
    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=1,
            max_steps=3,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            log_level="error",
        )
        trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
        if ring.size > 1:
            # On GPUs the config goes into TrainingArguments; Accelerate refuses it on CPU.
            patch_accelerator(trainer.accelerator, parallelism_config=ParallelismConfig(cp_size=ring.size))
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_as_launched(ring):
    # What torchrun or `accelerate launch` would say.
    os.environ.update(RANK=str(ring.rank), LOCAL_RANK=str(ring.rank), WORLD_SIZE=str(ring.size))
    os.environ.update(LOCAL_WORLD_SIZE=str(ring.size), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    return train(ring)


if __name__ == "__main__":
    on_ring = run_processes(train_as_launched, ranks)[0]
    print("losses on one process:", run_processes(train, 1)[0])
    print("losses on the ring:   ", on_ring)
