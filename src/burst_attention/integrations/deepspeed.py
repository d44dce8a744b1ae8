"""What DeepSpeed asks an mpu: which ranks share a sequence, which share a batch, and over which ZeRO shards.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "cp"))
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=SequenceParallelMPU(mesh))

ZeRO shards over all ranks, dp and cp together. Each rank's loss is the sum over its own tokens divided by all tokens of
its sequences, times `mpu.loss_factor(engine)`; gradients are then summed over cp and averaged over dp.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from burst_attention.ring import Ring


class SequenceParallelMPU:
    """The axes of a DeviceMesh in the words of DeepSpeed's mpu; no tensor or pipeline parallelism beside them.

    Args:
        mesh: one dimension, all of it the sequence axis, or two: data-parallel ranks, then those of a sequence.
        sequence_axis: the name of the sequence axis, where a mesh of two dimensions has names.

    Collective over the world: groups are made.
    """

    def __init__(self, mesh: Any, sequence_axis: str = "cp") -> None:
        names = tuple(mesh.mesh_dim_names or ())
        if mesh.ndim not in (1, 2) or (mesh.ndim == 2 and names[1:] != (sequence_axis,)):
            raise ValueError(
                f"an mpu needs a mesh of one dimension, or of two with {sequence_axis!r} the second, so that ranks of "
                f"a sequence are neighbours; got {mesh.ndim} ({names})"
            )
        ranks = mesh.mesh.flatten().tolist()
        if ranks != list(range(dist.get_world_size())):
            raise ValueError(f"DeepSpeed runs on the whole world in order, and the mesh has ranks {ranks}")
        self.ring = Ring.from_mesh(mesh if mesh.ndim == 1 else mesh[sequence_axis])
        """The ring of this rank's sequence, for `burst_attention` and the other integrations."""
        self._alone: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._sequence = mesh.get_group(mesh.ndim - 1)
        self._data: Any = self._alone if mesh.ndim == 1 else mesh.get_group(0)
        self._all = dist.group.WORLD

    def get_sequence_parallel_group(self) -> Any:
        """Ranks that hold one sequence between them."""
        return self._sequence

    def get_sequence_parallel_world_size(self) -> int:
        """How many ranks hold one sequence."""
        return dist.get_world_size(self._sequence)

    def get_sequence_parallel_rank(self) -> int:
        """This rank among those of its sequence: its rank in the ring."""
        return dist.get_rank(self._sequence)

    def get_sequence_data_parallel_group(self) -> Any:
        """Ranks that ZeRO shards over and gradients are reduced over: all."""
        return self._all

    def get_sequence_data_parallel_world_size(self) -> int:
        """How many ranks ZeRO shards over."""
        return dist.get_world_size(self._all)

    def get_sequence_data_parallel_rank(self) -> int:
        """This rank among all."""
        return dist.get_rank(self._all)

    def get_data_parallel_group(self) -> Any:
        """All ranks again: ZeRO-3 partitions parameters over this group and optimizer states over the other.

        With the ranks of the dp axis alone, parameters would be cut otherwise than their gradients: wrong in silence.
        """
        return self._all

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their global ranks."""
        return dist.get_process_group_ranks(self._all)

    def get_data_parallel_world_size(self) -> int:
        """How many batches are read at a time, the size of the dp axis: what DeepSpeed counts its batch size by."""
        return dist.get_world_size(self._data)

    def get_data_parallel_rank(self) -> int:
        """Which of the batches this rank reads: the same on all ranks of a sequence."""
        return dist.get_rank(self._data)

    def get_model_parallel_group(self) -> Any:
        """This rank alone: no tensor is split over ranks."""
        return self._alone

    def get_model_parallel_world_size(self) -> int:
        """Always 1."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """Always 0."""
        return 0

    def loss_factor(self, engine: Any) -> int:
        """What a rank's loss is multiplied with, so that gradients add up over the ranks of a sequence.

        DeepSpeed (0.19.8) sums over the sequence axis by itself, but for ZeRO-3 with reduce_scatter, its default there,
        which averages over all ranks.
        """
        averages = engine.zero_optimization_stage() == 3 and engine.zero_reduce_scatter()
        return self.get_sequence_parallel_world_size() if averages else 1
