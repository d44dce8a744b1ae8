"""Two groups of warps that touch no shared memory: a control for what racecheck says of warp_specialize itself."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _write_half(out_ptr, PART: gl.constexpr):
    places = PART * 128 + gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out_ptr + places, gl.full([128], 1.0, gl.float32, gl.BlockedLayout([1], [32], [4], [0])))


@gluon.jit
def empty_groups_kernel(out_ptr):
    gl.warp_specialize(
        [(_write_half, (out_ptr, gl.constexpr(0))), (_write_half, (out_ptr, gl.constexpr(1)))],
        [4],
        [24],
    )
