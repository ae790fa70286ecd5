"""stream_read: read memory once, as fast as it goes. The ruler that bandwidth-bound kernels are measured with.

    out[b] = xor of all 32-bit words of part b of x

    x    u32 [words]    words a multiple of 4
    out  u32 [parts]    part b is words b * span .. (b + 1) * span - 1, span the same multiple of 4 for all but the last

A block reads its part from front to back, 256 threads x 4 loads of 16 bytes in flight; integers, so exact. The xor
keeps the loads from being dropped and proves that every byte was read.
"""
import functools

import numpy as np
from numba import cuda
from numba.cuda import types

from . import ptx
from .build import kernel
from .parity import Output
from .ptx import u32, u64
from .unroll import static_range

THREADS = 256
UNROLL = 4                            # 16-byte loads in flight a thread: 16 KiB a block and turn
OUTPUTS = {"out": Output(exact=True)}
REGISTERS = 32
SASS = {"sm_90a": ("LDG.E.NA.LTC128B.128", "SHFL"), "sm_120a": ("LDG.E.NA.LTC128B.128", "SHFL")}
CASES = (dict(words=1 << 18, parts=16), dict(words=40004, parts=7), dict(words=4, parts=1), dict(words=0, parts=3))


def ref(x, parts):
    """The xor of each part."""
    span = part_words(x.size, parts)
    pieces = [x[b * span:(b + 1) * span] for b in range(parts)]
    return dict(out=np.array([np.bitwise_xor.reduce(p, initial=0) for p in pieces], np.uint32))


def part_words(words, parts):
    """Words of all parts but the last ones: a multiple of 4."""
    return -(-words // (4 * parts)) * 4


@functools.cache
def build():
    """The kernel."""
    @kernel(threads=THREADS)
    def stream_read(x: u64, out: u64, words: u64, span: u64):
        thread, block = ptx.thread_x(), ptx.block_x()
        shared = ptx.shared_address(cuda.shared.array(8, types.uint32))
        first, last = min(block * span, words), min((block + u64(1)) * span, words)
        at = first + thread * 4
        total = u32(0)
        while at + 3072 < last:
            four = tuple(ptx.load_x4_stream(x + (at + i * 1024) * 4) for i in static_range(UNROLL))
            for i in static_range(UNROLL):
                total ^= four[i][0] ^ four[i][1] ^ four[i][2] ^ four[i][3]
            at += u64(4096)
        while at < last:
            one = ptx.load_x4_stream(x + at * 4)
            total ^= one[0] ^ one[1] ^ one[2] ^ one[3]
            at += u64(1024)
        for distance in static_range(5):
            total ^= ptx.shuffle_xor(total, 1 << distance)
        if thread % 32 == 0:
            ptx.store_shared_u32(u32(shared + thread // 8), total)
        ptx.barrier()
        if thread == 0:
            for w in static_range(1, 8):
                total ^= ptx.shared_u32(u32(shared + 4 * w))
            ptx.store_u32(out + block * 4, total)
    return stream_read


def launch(stream, x, out, parts):
    """Queue it. ValueError for words that are no multiple of 4 or parts that do not match out."""
    if x.ndim != 1 or x.size % 4 or x.dtype != np.uint32:
        raise ValueError(f"stream_read wants x uint32 [a multiple of 4], got {x.dtype} {x.shape}")
    if parts < 1 or out.shape != (parts,) or out.dtype != np.uint32:
        raise ValueError(f"stream_read into {parts} parts wants out uint32 [{parts}], got {out.dtype} {out.shape}")
    stream.launch(build(), parts, x, out, x.size, part_words(x.size, parts))


def make(rng, words, parts):
    """Random words."""
    return dict(x=rng.integers(0, 1 << 32, words, dtype=np.uint32), out=np.empty(parts, np.uint32), parts=parts)


def cost(words, parts):
    """Bytes read and written; no floating-point work."""
    return dict(bytes=4 * words + 4 * parts, flops=0)
