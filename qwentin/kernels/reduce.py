"""Sums and maxima across a warp or a block, every thread getting the result. All 32 lanes, all warps, must take part."""
from numba import cuda

from . import ptx
from .build import device
from .ptx import f32
from .unroll import static_range


def reduction(combine):
    """(of a warp's 32 float32, of a block of up to 32 warps) by a device function for which 0 changes nothing."""
    @device
    def across_warp(x):
        """By halves: the order does not depend on the lane."""
        for step in static_range(5):
            x = combine(x, ptx.shuffle_xor_f32(x, 16 >> step))
        return x

    @device
    def across_block(x, warps):
        """Uses 128 bytes of shared memory; call it once in a kernel."""
        partial = cuda.shared.array(32, f32)
        lane = ptx.lane()
        x = across_warp(x)
        if lane == 0:
            partial[ptx.thread_x() // 32] = x
        ptx.barrier()
        # chosen without a branch: a compiler may copy what follows a branch into both of its ways, the shuffles too, and
        # then lanes of one warp wait at different ones (libnvvm 13.0 did, for sm_90)
        return across_warp(ptx.select(lane < warps, partial[min(lane, warps - 1)], f32(0.0)))
    return across_warp, across_block


@device
def add(x, y):
    """x + y."""
    return x + y


@device
def half_warp_sum(x):
    """Of the 16 lanes of a half, both halves at once."""
    for step in static_range(4):
        x += ptx.shuffle_xor_f32(x, 8 >> step)
    return x


warp_sum, block_sum = reduction(add)
warp_max, block_max = reduction(ptx.maximum)            # block_max: none below zero
