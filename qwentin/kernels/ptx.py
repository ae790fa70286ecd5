"""The index of PTX instructions: kernels write `ptx.load_x4(p)`; no PTX text stands anywhere else.

    ptx_factory   instruction(): text, operands, effect -> a function numba can compile; the operand types
    ptx_thread    indices, barriers, shuffles, votes, dependent launches
    ptx_memory    loads, stores, prefetch, atomics
    ptx_async     cp.async, mbarriers, bulk copies, proxy fences
    ptx_math      conversions, packed halves, permutes, approximate functions
    ptx_matrix    ldmatrix, stmatrix, mma.sync, block-scaled mma and FP6 ldmatrix (sm_120a)
    ptx_wgmma     wgmma (sm_90a)
"""
from .ptx_async import *                                                                             # noqa: F401,F403
from .ptx_factory import *                                                                           # noqa: F401,F403
from .ptx_math import *                                                                              # noqa: F401,F403
from .ptx_matrix import *                                                                            # noqa: F401,F403
from .ptx_memory import *                                                                            # noqa: F401,F403
from .ptx_thread import *                                                                            # noqa: F401,F403
from .ptx_wgmma import *                                                                             # noqa: F401,F403
