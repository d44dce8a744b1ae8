"""Tile kernels: attention over pieces, on one device."""

from burst_attention.tiles.accumulator import Accumulator
from burst_attention.tiles.pick import KERNEL_NAMES, TileRequest, has_triton, lacks_triton, pick_kernel
from burst_attention.tiles.protocol import GRADIENTS, BackwardInputs, Gradients, TileKernel

__all__ = [
    "GRADIENTS",
    "KERNEL_NAMES",
    "Accumulator",
    "BackwardInputs",
    "Gradients",
    "TileKernel",
    "TileRequest",
    "has_triton",
    "lacks_triton",
    "pick_kernel",
]
