"""SequenceParallelMPU: what DeepSpeed asks, answered on four ranks; and ZeRO with it, where DeepSpeed is installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from burst_attention import Ring
from burst_attention.integrations.deepspeed import SequenceParallelMPU
from burst_attention.integrations.torch_context import context_parallel
from burst_attention.launch import run_processes
from tests.integrations.tiny_decoder import MICRO_BATCHES, REPLICAS, Decoder, alone, batch

RANKS = 2
WORLD = REPLICAS * RANKS


def mesh_of(*shape: int, names: tuple[str, ...] = ("dp", "cp")) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])


def test_groups_sizes_and_ranks() -> None:
    def body(ring: Ring) -> None:
        mpu = SequenceParallelMPU(mesh_of(REPLICAS, RANKS))
        replica, place = divmod(ring.rank, RANKS)
        everyone = list(range(WORLD))
        sequence = [replica * RANKS, replica * RANKS + 1]
        expected = {
            "sequence_parallel": (sequence, RANKS, place),
            "sequence_data_parallel": (everyone, WORLD, ring.rank),
            "data_parallel": (everyone, REPLICAS, replica),
            "model_parallel": ([ring.rank], 1, 0),
        }
        for axis, (ranks, size, rank) in expected.items():
            assert dist.get_process_group_ranks(getattr(mpu, f"get_{axis}_group")()) == ranks, axis
            assert getattr(mpu, f"get_{axis}_world_size")() == size, axis
            assert getattr(mpu, f"get_{axis}_rank")() == rank, axis
        assert mpu.get_data_parallel_group_ranks() == everyone
        assert (mpu.ring.rank, mpu.ring.size) == (place, RANKS)
        total = torch.tensor([float(ring.rank)])
        dist.all_reduce(total, group=mpu.get_sequence_parallel_group())
        assert total.item() == sum(sequence)
        line = SequenceParallelMPU(mesh_of(WORLD))
        assert (line.get_sequence_parallel_world_size(), line.get_data_parallel_world_size()) == (WORLD, 1)
        assert line.get_data_parallel_rank() == 0

    run_processes(body, WORLD)


def test_the_loss_is_scaled_where_deepspeed_averages_over_a_sequence() -> None:
    def body(ring: Ring) -> list[int]:
        mpu = SequenceParallelMPU(mesh_of(RANKS))
        return [
            mpu.loss_factor(
                SimpleNamespace(zero_optimization_stage=lambda s=stage: s, zero_reduce_scatter=lambda r=scatter: r)
            )
            for stage, scatter in ((0, True), (2, True), (3, False), (3, True))
        ]

    assert run_processes(body, RANKS) == [[1, 1, 1, RANKS]] * RANKS


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    def body(ring: Ring) -> None:
        with pytest.raises(ValueError, match=r"of two with 'cp' the second, .*; got 2 \(\('cp', 'dp'\)\)"):
            SequenceParallelMPU(mesh_of(1, RANKS, names=("cp", "dp")))
        whole = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("dp", "cp"))
        with pytest.raises(ValueError, match=r"runs on the whole world in order, and the mesh has ranks \[[01]\]"):
            SequenceParallelMPU(whole["cp"])

    run_processes(body, RANKS)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_trains_as_one_process(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    deepspeed = importlib.import_module("deepspeed")
    # Else the first rank compiles an operator for shared memory, for minutes.
    monkeypatch.setattr(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None)
    rate = 0.5
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": rate}}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip

    def body(ring: Ring) -> dict[str, Tensor]:
        logging.disable(logging.WARNING)
        os.environ.update(RANK=str(ring.rank), LOCAL_RANK=str(ring.rank), WORLD_SIZE=str(WORLD))
        deepspeed.init_distributed("gloo")
        mpu = SequenceParallelMPU(mesh_of(REPLICAS, RANKS))
        model = Decoder(recompute=False)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)
        assert engine.train_batch_size() == REPLICAS * MICRO_BATCHES
        for micro in range(MICRO_BATCHES):
            buffers = list(batch(micro, mpu.get_data_parallel_rank()))
            with context_parallel(mpu.ring, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
                engine.backward(engine(*buffers) * mpu.loss_factor(engine))
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    _, gradients = alone()
    start = dict(Decoder().named_parameters())
    for found in run_processes(body, WORLD):
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], start[name].detach() - rate * gradient, rtol=1e-5, atol=1e-6)
