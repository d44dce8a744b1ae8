"""FlashAttention-4's kernels compiled as tiles/flash4.py starts them, for a Hopper chip that is not here.

`python -m tests.unit.offline_flash4 FOLDER` leaves each kernel's machine code there and prints a line for each: its
name, and whether its blocks are numbered in one direction, as they are where the longest go first. A process of its
own, for the package asks its environment which chip it compiles for when it is imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CASES: dict[str, tuple[int, torch.dtype, bool, int, int]] = {
    "triangle": (128, torch.bfloat16, True, 4096, 1),
    "triangle of a group of heads": (128, torch.bfloat16, True, 4096, 2),
    "triangle in fp16": (128, torch.float16, True, 4096, 1),
    "triangle of narrow heads": (64, torch.bfloat16, True, 4096, 1),
    "triangle that is too large": (128, torch.bfloat16, True, 2**21, 1),
    "rectangle": (128, torch.bfloat16, False, 4096, 1),
}
"""Head dim, dtype, whether causal, rows, query heads per key head."""


def launched(dim: int, dtype: torch.dtype, causal: bool, rows: int, per_key: int) -> Any:
    """What `_launch` starts for a piece of 2 key heads."""
    from burst_attention.tiles import flash4

    q, dout = (torch.empty(per_key, rows, 2, dim, dtype=dtype, device="meta") for _ in range(2))
    k, v = (torch.empty(1, rows, 2, dim, dtype=dtype, device="meta").expand(per_key, -1, -1, -1) for _ in range(2))
    dk, dv = (torch.empty(per_key, rows, 2, dim, dtype=dtype, device="meta") for _ in range(2))
    lse, delta = (torch.empty(per_key, 2, rows, device="meta") for _ in range(2))
    sums = torch.empty(per_key, 2, rows * dim, device="meta")
    made = []
    compile_it = flash4._compile

    def compiled(*given: Any) -> Any:
        made.append(compile_it(*given))
        return lambda *arguments: None

    flash4._compile = compiled
    try:
        flash4._launch(flash4._config(dim, causal), causal, q, k, v, dout, lse, delta, sums, dk, dv, 0.1)
    finally:
        flash4._compile = compile_it
    return made[0]


def in_gpu_memory(x: Tensor, **_: Any) -> Any:
    """A tensor as the package describes it to its compiler: sizes and strides are known later, but for the last."""
    import cutlass
    from cutlass import cute

    types = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: cutlass.Float32}
    shape = tuple(cute.sym_int() for _ in x.shape)
    strides = [0 if stride == 0 else cute.sym_int64(divisibility=16 // x.element_size()) for stride in x.stride()[:-1]]
    return cute.runtime.make_fake_tensor(types[x.dtype], shape, (*strides, 1), assumed_align=16)


def main(folder: Path) -> None:
    os.environ |= {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP_PTX": "1", "CUTE_DSL_KEEP_CUBIN": "1"}
    os.environ["CUTE_DSL_DUMP_DIR"] = str(folder)
    from flash_attn.cute import cute_dsl_utils, interface

    cute_dsl_utils.to_cute_tensor = in_gpu_memory
    for name, case in CASES.items():
        report(name, launched(*case), folder)
    arguments: list[Any] = []
    interface._bwd_postprocess_convert.compile_cache = Kept(arguments)
    from burst_attention.tiles import flash4

    dq = torch.empty(1, 4096, 2, 128, dtype=torch.bfloat16, device="meta")
    flash4._cast(flash4._config(128, True), torch.empty(1, 2, 4096 * 128, device="meta"), dq, 0.1)
    report("sums cast", interface._compile_bwd_postprocess(*arguments[0]), folder)


class Kept(dict[Any, Any]):
    """The package's cache of what it compiled, which asks for nothing to be compiled and notes what was asked for."""

    def __init__(self, asked: list[Any]) -> None:
        self.asked = asked

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        self.asked.append(key)
        return lambda *arguments: None


def report(name: str, kernel: Any, folder: Path) -> None:
    (folder / f"{name}.cubin").write_bytes(kernel.__cubin__)
    print(json.dumps({"kernel": name, "in_one_direction": "%ctaid.y" not in kernel.__ptx__}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
