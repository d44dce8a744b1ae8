"""Groups of warps without any data of their own in shared memory: controls for what racecheck says of warp_specialize.

The groups of one kernel do not meet; those of the other meet at two barriers, and at nothing else.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


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


@gluon.jit
def _wait_and_write(barriers, out_ptr, PART: gl.constexpr):
    mbarrier.wait(barriers.index(PART), 0)
    _write_half(out_ptr, PART)


@gluon.jit
def _arrive(barriers):
    mbarrier.arrive(barriers.index(0), count=1)
    mbarrier.arrive(barriers.index(1), count=1)


@gluon.jit
def meeting_groups_kernel(out_ptr):
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(2):
        mbarrier.init(barriers.index(index), count=1)
    gl.warp_specialize(
        [
            (_wait_and_write, (barriers, out_ptr, gl.constexpr(0))),
            (_wait_and_write, (barriers, out_ptr, gl.constexpr(1))),
            (_arrive, (barriers,)),
        ],
        [4, 1],
        [240, 24],
    )
