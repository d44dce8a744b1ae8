"""Tile kernels: attention over pieces, on one device."""

from burst_attention.tiles.pick import KERNEL_NAMES, TileRequest, pick_kernel
from burst_attention.tiles.protocol import BackwardInputs, Gradients, TileKernel

__all__ = ["KERNEL_NAMES", "BackwardInputs", "Gradients", "TileKernel", "TileRequest", "pick_kernel"]
