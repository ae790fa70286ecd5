"""Sums and maxima across a warp or a block, every thread getting the result. All 32 lanes, all warps, must take part."""
from numba import cuda

from . import ptx
from .build import device
from .ptx import f32
from .unroll import static_range


@device
def warp_sum(x):
    """The sum of a warp's 32 float32, by halves: the order does not depend on the lane."""
    for step in static_range(5):
        x += ptx.shuffle_xor_f32(x, 16 >> step)
    return x


@device
def block_sum(x, warps):
    """The sum over a block of up to 32 warps. Uses 128 bytes of shared memory; call it once in a kernel."""
    partial = cuda.shared.array(32, f32)
    lane = ptx.lane()
    x = warp_sum(x)
    if lane == 0:
        partial[ptx.thread_x() // 32] = x
    ptx.barrier()
    # chosen without a branch: a compiler may copy what follows a branch into both of its ways, the shuffles too, and then
    # lanes of one warp wait at different ones (libnvvm 13.0 did, for sm_90)
    return warp_sum(ptx.select(lane < warps, partial[min(lane, warps - 1)], f32(0.0)))


@device
def warp_max(x):
    """The largest of a warp's 32 float32."""
    for step in static_range(5):
        x = ptx.maximum(x, ptx.shuffle_xor_f32(x, 16 >> step))
    return x


@device
def block_max(x, warps):
    """The largest over a block of up to 32 warps, none below zero. Uses 128 bytes of shared memory; call it once."""
    partial = cuda.shared.array(32, f32)
    lane = ptx.lane()
    x = warp_max(x)
    if lane == 0:
        partial[ptx.thread_x() // 32] = x
    ptx.barrier()
    return warp_max(ptx.select(lane < warps, partial[min(lane, warps - 1)], f32(0.0)))
