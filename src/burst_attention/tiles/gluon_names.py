"""What Gluon calls the operations of the copy engine: its names change from one triton to the next.

tests/unit/test_offline_compile.py and test_offline_launches.py compile our kernels with the triton that is installed;
CONTRIBUTING.md says which have been tried.
"""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma


@builtin
def _async_add(descriptor: Any, coordinates: Any, source: Any, _semantic: Any = None) -> None:
    """As `tma.async_atomic_add`: in triton 3.6 and 3.7 Gluon has the operation, and no name for it."""
    places = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, places, source.handle)


def _first_of(*names: str) -> Any:
    return next((getattr(tma, name) for name in names if hasattr(tma, name)), None)


load_block = _first_of("async_load", "async_copy_global_to_shared")
"""(descriptor, coordinates, barrier, shared memory): to shared memory; the barrier counts the bytes."""
add_block = _first_of("async_atomic_add") or _async_add
"""(descriptor, coordinates, shared memory): added to memory, atomically."""
