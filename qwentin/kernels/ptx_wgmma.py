"""Warpgroup matrix instructions of sm_90a: 128 threads, B (and A) read from shared memory through descriptors.

One m64nNk32 step of e4m3, or m64nNk16 of 16-bit types, adds to N/2 float32 accumulators a thread. The accumulators go
in and come out as one tuple whose registers stay where they are. Order of a step:

    wgmma_fence()  ->  wgmma...(acc, ...) several times  ->  wgmma_commit()  ->  acc = wgmma_result(n)(acc, pending)

The last is wgmma_wait with the accumulators as operands: without them nothing says that who reads acc must come later.
"""
import functools

from .ptx_factory import MEMORY, ORDERED, f32, instruction, imm, tuple_of, u32x4, u64

wgmma_fence = instruction("wgmma.fence.sync.aligned;", effect=MEMORY)
wgmma_commit = instruction("wgmma.commit_group.sync.aligned;", effect=MEMORY)
wgmma_wait = instruction("wgmma.wait_group.sync.aligned <pending>;", inputs=dict(pending=imm), effect=MEMORY)
# Registers of each thread of a warpgroup from here on, a multiple of 8: some give back what others then take. What a kernel
# starts with is bounded by its threads: 168 for three warpgroups, which may become 40, 232 and 232.
registers_down = instruction("setmaxnreg.dec.sync.aligned.u32 <registers>;", inputs=dict(registers=imm), effect=MEMORY)
registers_up = instruction("setmaxnreg.inc.sync.aligned.u32 <registers>;", inputs=dict(registers=imm), effect=MEMORY)
K_OF = {"e4m3": 32, "e5m2": 32, "f16": 16, "bf16": 16}        # inputs along k in 32 bytes


@functools.cache
def wgmma_result(n):
    """wgmma_wait for the sums of an m64 x n product: (acc, pending) -> acc; all but the newest `pending` groups are done."""
    acc = tuple_of(f32, n // 2)
    return instruction("wgmma.wait_group.sync.aligned <pending>;", dict(d=acc), dict(acc=acc, pending=imm), effect=MEMORY,
                       tied="acc")


@functools.cache
def wgmma(n, a_type, b_type, a_in_registers=False, fresh=False, b_by_k=False):
    """The m64 x n step: `wgmma(256, "e4m3", "e4m3")` is a function (acc, a, b) -> acc for kernels; fresh: (a, b) -> acc, the
    product alone.

    n: 8..256 in steps of 8. acc: n/2 float32. a: u64 descriptor, or four u32 registers (rows of the warp's 16 as in
    mma.sync's A fragment). b: u64 descriptor. 16-bit operands are K-major, as 8-bit ones always are; b_by_k: B is not, its
    n elements of one k lie together (MN-major).
    """
    if n not in range(8, 257, 8):
        raise ValueError(f"wgmma takes n = 8..256 in steps of 8, got {n}")
    sixteen = K_OF[a_type] == 16
    if b_by_k and not sixteen:
        raise ValueError(f"only 16-bit operands may be MN-major, got {b_type}")
    transposed = "" if not sixteen else f", {int(b_by_k)}" if a_in_registers else f", 0, {int(b_by_k)}"
    acc = tuple_of(f32, n // 2)
    return instruction(
        f"wgmma.mma_async.sync.aligned.m64n{n}k{K_OF[a_type]}.f32.{a_type}.{b_type} "
        f"<d>, <a>, <b>, {0 if fresh else 1}, 1, 1{transposed};",
        dict(d=acc), dict(**({} if fresh else dict(acc=acc)), a=u32x4 if a_in_registers else u64, b=u64), effect=ORDERED,
        tied=None if fresh else "acc")
