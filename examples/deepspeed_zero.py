"""ZeRO-3 over four processes, two sequences at a time on rings of two. Needs DeepSpeed, which compiles at first."""

import os

import deepspeed
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from burst_attention.integrations.deepspeed import SequenceParallelMPU
from burst_attention.integrations.torch_context import context_parallel
from burst_attention.launch import run_processes

tokens, replicas, ranks = 1000, 2, 2
torch.manual_seed(0)
sequences = torch.randn(replicas, 4, tokens, 64)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_allow_untested_optimizer": True,
}


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.query = torch.nn.Linear(64, 64)

    def forward(self, x):
        return scaled_dot_product_attention(self.query(x), x, x, is_causal=True).square().sum() / tokens


def train(ring):
    os.environ.update(RANK=str(ring.rank), LOCAL_RANK=str(ring.rank), WORLD_SIZE=str(ring.size))
    deepspeed.init_distributed("gloo")
    mpu = SequenceParallelMPU(init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp", "cp")))
    model = Attention()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)
    losses = []
    for _ in range(3):
        mine = sequences[mpu.get_data_parallel_rank()][None].clone()
        with context_parallel(mpu.ring, buffers=[mine], buffer_seq_dims=[2]):
            loss = engine(mine)
            engine.backward(loss * mpu.loss_factor(engine))
        engine.step()
        losses.append(loss.item())
    return losses


def train_alone():
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(sequences) / replicas
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


if __name__ == "__main__":
    found = run_processes(train, replicas * ranks)
    print("losses on one process:", list(train_alone()))
    print("losses on the rings:  ", [sum(step) / replicas for step in zip(*found, strict=True)])
