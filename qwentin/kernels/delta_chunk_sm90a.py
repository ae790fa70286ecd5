"""delta_chunk_sm90a: delta_chunk on Hopper's wgmma, which takes k and q from shared memory itself.

The same formulas, arrays and rounding as delta_chunk, which says what they are; `launch` takes the same.

A block is one warpgroup: 64 columns of S, the rows of m64nNk16, so that its four warps read k and q once. S stays in the
accumulators of the third product:

    x     [64, 64]  = S^T K^T                     m64n64k16, S^T rounded to f16 in registers
    y     [64, 64]  = S^T Q^T                     behind it; runs while x becomes the residual
    delta [64, 64]  = (v^T - e^y x) inverse^T     mma.sync, of the triangle alone (delta_chunk.through)
    S^T   [64, 128] = e^y S^T + delta K           m64n128k16; runs while o is made of y and within, and stored

k and q lie as two halves of 64 columns, rows of 128 bytes, the 16-byte chunk c of row r at place c ^ r % 8: the 128-byte
swizzle. Read along rows it is K^T, read across them (MN-major) K. Copies of the chunk two ahead start while the first
products run.

27B, 4096 rows: 64 chunks of 768 cycles of the tensor cores on 96 multiprocessors, 28 us; an H200 takes 97 (delta_chunk
235), since each product waits for the one before and the next chunk for the last.
"""
import functools

from numba import cuda
from numba.cuda import types

from . import delta_chunk as portable, ptx
from .build import device, kernel
from .delta_chunk import (CHUNK, COLUMNS, HEAD, MATRIX, PARTS, ROW, THREADS, V_ROW, WARPS, copy_decays, copy_matrix,
                          copy_tile, decayed, left, residual, row_store, through)
from .ptx import u32, u64
from .ptx_wgmma import wgmma, wgmma_commit, wgmma_fence, wgmma_wait
from .unroll import static_range

HALF = CHUNK * 128                                    # bytes of 64 columns of k or q
# bytes of a stage: k, q, v, inverse, within, decays; the swizzle counts from 1024-byte boundaries
Q_AT = 2 * HALF
V_AT = Q_AT + 2 * HALF
INVERSE_AT = V_AT + CHUNK * V_ROW
WITHIN_AT = INVERSE_AT + MATRIX
DECAYS_AT = WITHIN_AT + MATRIX
STAGE = -(-(DECAYS_AT + 2 * CHUNK * 4) // 1024) * 1024
STAGES = 3                                            # 2: 158 us, 4: 97
SHARED = STAGES * STAGE + 1024
ALONG = 1 << 62 | 64 << 32 | 1 << 16                  # descriptors: 128-byte swizzle, 8 rows 1024 bytes apart; rows along k,
ACROSS = 1 << 62 | 64 << 32 | HALF // 16 << 16        # or across it, the second 64 columns a half further
REGISTERS = 255
SASS = {"sm_90a": ("LDGSTS", "HGMMA.64x64x16.F32", "HGMMA.64x128x16.F32", "HMMA.16816")}
OUTPUTS = portable.OUTPUTS
ref, make, cost = portable.ref, portable.make, portable.cost


@functools.cache
def copy_halves(stride):
    """Device function (to, source, there, thread): starts copying 64 rows of 256 bytes, `stride` bytes apart, as two halves;
    those that are not there become zeros."""
    STEP = THREADS // 16

    @device
    def copy(to, source, there, thread):
        r, c = u32(thread // 16), u32(thread % 16)
        p, to = source + (u64(r) * stride + c * 16), u32(to + c // 8 * HALF + r * 128 + (c % 8 ^ r & 7) * 16)
        for n in static_range(CHUNK // STEP):
            ptx.copy_16_zfill(u32(to + n * STEP * 128), p + n * STEP * stride,
                              ptx.select(r + n * STEP < there, u32(16), u32(0)))
    return copy


@device
def fragment(x, n):
    """The n-th eight columns of a product's sums."""
    return x[4 * n], x[4 * n + 1], x[4 * n + 2], x[4 * n + 3]


first_along, next_along = (wgmma(CHUNK, "f16", "f16", a_in_registers=True, fresh=fresh) for fresh in (True, False))
across = wgmma(HEAD, "f16", "f16", a_in_registers=True, b_by_k=True)


@device
def against(rows, state):
    """state [64, 128] x rows^T: 32 sums, on their way."""
    b = u64(ALONG) | u64(rows >> 4)
    x = first_along(state[0], b)
    for s in static_range(1, 8):
        x = next_along(x, state[s], b + u64(s // 4 * (HALF // 16) + s % 4 * 2))
    wgmma_commit()
    return x


@functools.cache
def build(key_heads, value_heads):
    """The kernel for Nk and Nv heads."""
    KEY_STRIDE, STRIDE, share = key_heads * ROW, value_heads * ROW, value_heads // key_heads
    copy_keys, copy_values, store_rows = copy_halves(KEY_STRIDE), copy_tile(V_ROW, STRIDE), row_store(STRIDE)

    @device
    def fetch(stage, q, k, v, inverse, within, decays, chunk, rows, thread):
        """Start copying a chunk, if there is one."""
        first, at = u64(chunk) * CHUNK, u64(chunk) * value_heads
        if chunk * CHUNK < rows:
            there = u32(rows - chunk * CHUNK)
            copy_keys(stage, k + first * KEY_STRIDE, there, thread)
            copy_keys(u32(stage + Q_AT), q + first * KEY_STRIDE, there, thread)
            copy_values(u32(stage + V_AT), v + first * STRIDE, there, thread)
            copy_matrix(u32(stage + INVERSE_AT), inverse + at * MATRIX, thread)
            copy_matrix(u32(stage + WITHIN_AT), within + at * MATRIX, thread)
            copy_decays(u32(stage + DECAYS_AT), decays + at * (2 * CHUNK * 4), thread)
        ptx.copy_commit()

    @kernel(threads=THREADS, shared=SHARED)
    def delta_chunk_sm90a(span: u64, S: u64, q: u64, k: u64, v: u64, inverse: u64, within: u64, decays: u64, o: u64):
        ptx.launch_dependents()
        ptx.wait_dependencies()
        rows = ptx.read_u32(span + 4)
        if rows == 0:
            return
        memory = u32(u32(ptx.shared_address(cuda.shared.array(0, types.uint8)) + 1023) & 0xFFFFFC00)
        part, head, thread, lane = ptx.block_x(), ptx.block_y(), ptx.thread_x(), ptx.lane()
        warp = u32(thread // 32)
        k, q = k + head // share * ROW, q + head // share * ROW
        v, o = v + head * ROW + part * V_ROW, o + head * ROW + part * V_ROW + warp * (COLUMNS * 2)
        inverse, within, decays = inverse + head * MATRIX, within + head * MATRIX, decays + head * (2 * CHUNK * 4)
        for s in static_range(STAGES - 1):
            fetch(u32(memory + s * STAGE), q, k, v, inverse, within, decays, u32(s), rows, thread)
        here = portable.state_at(S, span, head, value_heads, u32(part * WARPS + warp), lane)
        loaded, state = portable.load_state(here), ()
        for n in static_range(16):
            state = state + loaded[n]
        chunks, slot = u32((rows + (CHUNK - 1)) // CHUNK), u32(0)
        for i in range(chunks):
            stage, last = u32(memory + slot * STAGE), u32(ptx.select(slot == 0, u32(STAGES), slot) - 1)
            ptx.copy_wait(STAGES - 2)
            ptx.fence_async()
            ptx.barrier()                                   # this chunk is there, and nobody is at the one before
            before = tuple(left(fragment(state, 2 * n), fragment(state, 2 * n + 1)) for n in static_range(8))
            wgmma_fence()
            x = against(stage, before)
            y = against(u32(stage + Q_AT), before)
            fetch(u32(memory + last * STAGE), q, k, v, inverse, within, decays, u32(i + (STAGES - 1)), rows, thread)
            wgmma_wait(1)
            x = tuple(fragment(x, n) for n in static_range(8))
            a = residual(u32(stage + V_AT), u32(stage + DECAYS_AT), x, warp, lane)
            delta = through(u32(stage + INVERSE_AT), a, ((0.0, 0.0, 0.0, 0.0),) * 8, lane)
            a = tuple(left(delta[2 * m], delta[2 * m + 1]) for m in static_range(4))
            delta = tuple(decayed(delta[n], u32(stage + (DECAYS_AT + CHUNK * 4)), n, lane) for n in static_range(8))
            d = tuple(left(delta[2 * m], delta[2 * m + 1]) for m in static_range(4))
            decay = ptx.shared_f32(u32(stage + (DECAYS_AT + CHUNK * 4 - 4)))
            state = tuple(state[n] * decay for n in static_range(64))
            wgmma_wait(0)
            wgmma_fence()
            b = u64(ACROSS) | u64(stage >> 4)
            for m in static_range(4):
                state = across(state, d[m], b + u64(m * (16 * 128 // 16)))
            wgmma_commit()
            z = tuple(decayed(fragment(y, n), u32(stage + DECAYS_AT), n, lane) for n in static_range(8))
            z = through(u32(stage + WITHIN_AT), a, z, lane)
            store_rows(o + u64(i) * (CHUNK * STRIDE), z, u32(rows - i * CHUNK), lane)
            wgmma_wait(0)
            slot = ptx.select(slot == STAGES - 1, u32(0), u32(slot + 1))
        portable.store_state(here, tuple(fragment(state, n) for n in static_range(16)))
    return delta_chunk_sm90a


def launch(stream, span, S, q, k, v, inverse, within, decays, o):
    """Queue it on a stream; shapes and dtypes as in delta_chunk's docstring."""
    portable.check(span, S, q, k, v, inverse, within, decays, o)
    if v.shape[0]:
        stream.launch(build(q.shape[1], v.shape[1]), (PARTS, v.shape[1], 1), span, S, q, k, v, inverse, within, decays, o)


CASES = portable.CASES
