"""The barriers of a ring of places in shared memory, between threads that fill them in turn and threads that read them.

    bars   `depth` barriers of full places, then `depth` of empty ones, 8 bytes each

Who reads waits for a place's full in phase 0, 1, 0, ...; who fills for its empty in phase 1, 0, 1, ...: the first is over
before anything happens. Used by the kernels that have such rings; their cases prove it.
"""
from . import ptx
from .build import lineless_device
from .ptx import u32


@lineless_device
def make_barriers(bars, depth, filling, reading):
    """By the whole block. filling, reading: arrivals after which a place is full, and empty."""
    if ptx.thread_x() == 0:
        for s in range(depth):
            ptx.mbarrier_init(u32(bars + s * 8), u32(filling))
            ptx.mbarrier_init(u32(bars + (depth + s) * 8), u32(reading))
        ptx.fence_block()
    ptx.barrier()


@lineless_device
def arrive(bar, lane):
    """A warp has done its part of a place."""
    ptx.warp_barrier()
    if lane == 0:
        ptx.mbarrier_arrive(bar)


@lineless_device
def wait(bar, parity):
    """Until the phase of an mbarrier is over."""
    while ptx.mbarrier_try(bar, parity) == 0:
        pass


@lineless_device
def poll(bar, parity):
    """The same before sm_90."""
    while ptx.mbarrier_test(bar, parity) == 0:
        pass
