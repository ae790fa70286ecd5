"""gemm_sm90a: a matrix in e4m3 times many rows of e4m3 on wgmma: the products of prefill on Hopper.

    out[m, n] = sum over blocks b of 128 inputs:  x_scale[b, m] * w_scale[b, n] * sum over k in b of x[m, k] * w[n, k]

    x        u8 [M / 128, K / 128, 128, 128]    e4m3, no NaN, as shared memory will hold it (below); any finite rows beyond M
    x_scale  f32 [K / 128, M rounded up to 128]
    w        u8 [N / 128, K / 128, 128, 128]    the same for the matrix; inputs of a block in any order that x has too
    w_scale  f32 [K / 128, N rounded up to 128]
    out      f32, f16 or bf16 (u16) [M, N]      N even

A tile is 128 rows by 128 bytes, 16 KiB in one piece, which a single bulk copy brings. In row r the 16-byte chunk c stands at
place c ^ (r % 8): the 128-byte swizzle that wgmma's descriptors name, so that neither it nor the copy meets a bank twice:

    row 0   0 1 2 3 4 5 6 7        row 1   1 0 3 2 5 4 7 6        row 2   2 3 0 1 6 7 4 5   ...   row 8   0 1 2 3 ...

A block owns 128 x 128 outputs at a time and walks over all that are its share (persistent; neighbours share a tile of w).
One warp fetches stages of a tile of x, a tile of w and their scales; two warpgroups take 64 rows each:

    fetching warp     wait for `empty`; four bulk copies, which report to `full`
    warpgroup         wait for `full`; four wgmma m64n128k32 into fresh sums; when they are done arrive at `empty`, then
                      total += sum * x_scale * w_scale, in float32, while the other warpgroup's wgmma run

So no sum of products runs over more than 128 inputs in the tensor cores' own narrower accumulators (about 14 bits), and
scales cost two operations an output a block. At 4,096 rows, 27B: 221 TFLOP; an H200 does at most 1,979 TFLOP/s in e4m3.
"""
import functools

import numpy as np
from numba import cuda
from numba.cuda import types

from .. import numerics
from . import ptx
from .build import kernel, lineless_device
from .octet import format_of
from .parity import Output
from .ptx import u32, u64
from .ptx_wgmma import wgmma, wgmma_commit, wgmma_fence, wgmma_wait
from .strips import store_pair, wait
from .unroll import static_range

TILE = 128                    # rows of a tile, bytes of its rows, outputs of a block each way
TILE_BYTES = TILE * TILE
GROUPS = 2                    # warpgroups, 64 rows each
THREADS = 128 * GROUPS + 32
SCALES_AT = 2 * TILE_BYTES    # in a stage: tile of x, tile of w, 128 scales of x, 128 of w
STAGE = SCALES_AT + 2 * TILE * 4
STAGES = 6                    # 198 KiB: a whole block's shared memory
BARS_AT = STAGES * STAGE
SHARED = BARS_AT + 16 * STAGES + 1024        # the swizzle counts from 1024-byte boundaries
SUMS = 64                     # float32 of a thread: 64 x 128 outputs over 128 threads
DESCRIPTOR = 1 << 62 | 64 << 32 | 1 << 16    # 128-byte swizzle, groups of 8 rows 1024 bytes apart
REGISTERS = 224
SASS = {"sm_90a": ("QGMMA.64x128x32.F32.E4M3.E4M3", "UBLKCP", "SYNCS")}
# The reference multiplies the codes exactly. Hardware keeps about 14 bits of a k-step's largest product in its sums (the
# emulator sums exactly): 2^-13 of sum |x w| over 128 inputs, K / 128 times with random signs; in make's units that sum is
# about 128 * 0.6 a block, so 2^-13 * 77 * sqrt(K / 128) = 2^-4 at K = 5120, where sums are about 72. Scales add 3 * 2^-24.
OUTPUTS = {"out": Output(rtol=2.0 ** -20, atol=2.0 ** -4)}


def arrange(rows):
    """u8 [R, K] -> u8 [R / 128, K / 128, 128, 128]: tiles, chunks where the docstring says, padded with zeros."""
    r, k = rows.shape
    padded = np.zeros((-(-r // TILE) * TILE, k), np.uint8)
    padded[:r] = rows
    chunks = padded.reshape(-1, TILE, k // TILE, TILE // 16, 16).transpose(0, 2, 1, 3, 4)    # tile block row chunk byte
    out, place = np.empty_like(chunks), np.arange(8)[None, :] ^ np.arange(TILE)[:, None] % 8
    out[:, :, np.arange(TILE)[:, None], place] = chunks
    return out.reshape(-1, k // TILE, TILE, TILE)


def restore(tiles):
    """The inverse of arrange: u8 [R, K] with the padding."""
    chunks = tiles.reshape(*tiles.shape[:3], TILE // 16, 16)
    rows = chunks[:, :, np.arange(TILE)[:, None], np.arange(8)[None, :] ^ np.arange(TILE)[:, None] % 8]
    return rows.transpose(0, 2, 1, 3, 4).reshape(-1, tiles.shape[1] * TILE)


def ref(x, x_scale, w, w_scale, out):
    """The formula in float64."""
    (m, n), k = out.shape, x.shape[1] * TILE

    def real(tiles, scale, rows):
        return numerics.E4M3.decode(restore(tiles)[:rows]).astype(np.float64) * np.repeat(scale[:, :rows].T, TILE, 1)
    assert k == w.shape[1] * TILE
    return dict(out=real(x, x_scale, m) @ real(w, w_scale, n).T)


@functools.cache
def build(out_format):
    """The kernel."""
    first_step, step, store = wgmma(TILE, "e4m3", "e4m3", fresh=True), wgmma(TILE, "e4m3", "e4m3"), store_pair(out_format)

    @lineless_device
    def fetch(ring, bars, x, x_scale, w, w_scale, m_tiles, n_tiles, deep, lane):
        """The fetching warp: all stages of all the block's tiles."""
        slot, parity = u32(0), u32(1)
        tile = ptx.block_x()
        while tile < m_tiles * n_tiles:
            m, n = u32(tile % m_tiles), u32(tile // m_tiles)
            for b in range(deep):
                full, to = u32(bars + slot * 8), u32(ring + slot * STAGE)
                wait(u32(full + STAGES * 8), parity)
                if lane == 0:
                    ptx.mbarrier_arrive_expect(full, u32(STAGE))
                    ptx.bulk_load(to, x + (u64(m) * deep + b) * TILE_BYTES, u32(TILE_BYTES), full)
                    ptx.bulk_load(u32(to + TILE_BYTES), w + (u64(n) * deep + b) * TILE_BYTES, u32(TILE_BYTES), full)
                    ptx.bulk_load(u32(to + SCALES_AT), x_scale + (u64(b) * m_tiles + m) * (TILE * 4), u32(TILE * 4), full)
                    ptx.bulk_load(u32(to + SCALES_AT + TILE * 4), w_scale + (u64(b) * n_tiles + n) * (TILE * 4),
                                  u32(TILE * 4), full)
                slot = u32(slot + 1)
                if slot == STAGES:
                    slot, parity = u32(0), u32(parity ^ 1)
            tile = u32(tile + ptx.blocks_x())

    @lineless_device
    def product(stage, group):
        """The sums over a stage's 128 inputs of the warpgroup's 64 rows."""
        a = u64(DESCRIPTOR) | u64(u32(stage + group * (TILE_BYTES // GROUPS)) >> 4)
        b = u64(DESCRIPTOR) | u64(u32(stage + TILE_BYTES) >> 4)
        wgmma_fence()
        c = first_step(a, b)
        for k in static_range(3):
            c = step(c, a + u64(2 * k + 2), b + u64(2 * k + 2))
        wgmma_commit()
        wgmma_wait(0)
        return c

    @lineless_device
    def added(total, c, low, high, scales):
        """total + c * row scale * column scale. low, high: of the thread's rows; scales: where its first column's stands."""
        for j in static_range(SUMS // 4):
            s = ptx.shared_f32x2(u32(scales + j * 32))
            total = total[:4 * j] + (
                ptx.fma(c[4 * j] * low, s[0], total[4 * j]), ptx.fma(c[4 * j + 1] * low, s[1], total[4 * j + 1]),
                ptx.fma(c[4 * j + 2] * high, s[0], total[4 * j + 2]),
                ptx.fma(c[4 * j + 3] * high, s[1], total[4 * j + 3])) + total[4 * j + 4:]
        return total

    @lineless_device
    def write(out, total, row, column, rows, n):
        """The thread's two rows, two columns of each eight."""
        for j in static_range(SUMS // 4):
            if column + j * 8 < n:
                if row < rows:
                    store(out, u64(row) * n + (column + j * 8), total[4 * j], total[4 * j + 1])
                if row + 8 < rows:
                    store(out, u64(row + 8) * n + (column + j * 8), total[4 * j + 2], total[4 * j + 3])

    @kernel(threads=THREADS, shared=SHARED)
    def gemm_sm90a(x: u64, x_scale: u64, w: u64, w_scale: u64, out: u64, rows: u32, n: u32, deep: u32):
        lane, warp, thread = ptx.lane(), u32(ptx.thread_x() // 32), ptx.thread_x()
        memory = ptx.shared_address(cuda.shared.array(0, types.uint8))
        ring = u32(u32(memory + 1023) & 0xFFFFFC00)
        bars = u32(ring + BARS_AT)                                    # STAGES of full, STAGES of empty
        m_tiles, n_tiles = u32((rows + (TILE - 1)) // TILE), u32((n + (TILE - 1)) // TILE)
        if thread == 0:
            for s in static_range(STAGES):
                ptx.mbarrier_init(u32(bars + s * 8), u32(1))
                ptx.mbarrier_init(u32(bars + (STAGES + s) * 8), u32(4 * GROUPS))
            ptx.fence_block()
        ptx.barrier()
        if warp == 4 * GROUPS:
            ptx.wait_dependencies()
            fetch(ring, bars, x, x_scale, w, w_scale, m_tiles, n_tiles, deep, lane)
        else:
            group, slot, parity = u32(warp // 4), u32(0), u32(0)
            row = u32(group * 64 + warp % 4 * 16 + lane // 4)
            tile = ptx.block_x()
            # no range: one of unknown step divides in 64 bits, a call, and beside a call ptxas serialises all wgmma
            while tile < m_tiles * n_tiles:
                total = (0.0,) * SUMS
                for b in range(deep):
                    full, stage = u32(bars + slot * 8), u32(ring + slot * STAGE)
                    wait(full, parity)
                    low, high = ptx.shared_f32(u32(stage + SCALES_AT + row * 4)), ptx.shared_f32(
                        u32(stage + SCALES_AT + row * 4 + 32))
                    c = product(stage, group)
                    total = added(total, c, low, high, u32(stage + SCALES_AT + TILE * 4 + lane % 4 * 8))
                    ptx.warp_barrier()
                    if lane == 0:
                        ptx.mbarrier_arrive(u32(full + STAGES * 8))
                    slot = u32(slot + 1)
                    if slot == STAGES:
                        slot, parity = u32(0), u32(parity ^ 1)
                write(out, total, u32(tile % m_tiles * TILE + row), u32(tile // m_tiles * TILE + lane % 4 * 2), rows, n)
                tile = u32(tile + ptx.blocks_x())
    return gemm_sm90a


def launch(stream, x, x_scale, w, w_scale, out, blocks):
    """Queue it on a stream; blocks: the device's multiprocessors."""
    (rows, n), deep = out.shape, x.shape[1] if len(x.shape) == 4 else 0
    m_tiles, n_tiles = -(-rows // TILE), -(-n // TILE)
    if n % 2 or not n or not deep or blocks < 1:
        raise ValueError(f"out must be [M, N] with N even, x have inputs and blocks be positive, got {tuple(out.shape)}, "
                         f"{tuple(x.shape)} and {blocks}")
    for name, array, dtype, shape in (("x", x, np.uint8, (m_tiles, deep, TILE, TILE)),
                                      ("w", w, np.uint8, (n_tiles, deep, TILE, TILE)),
                                      ("x_scale", x_scale, np.float32, (deep, m_tiles * TILE)),
                                      ("w_scale", w_scale, np.float32, (deep, n_tiles * TILE))):
        if tuple(array.shape) != shape or array.dtype != dtype:
            raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, got {array.dtype} {tuple(array.shape)}")
    if rows:
        stream.launch(build(format_of("out", out, "f32", "f16", "bf16")), min(blocks, m_tiles * n_tiles), x, x_scale, w,
                      w_scale, out, rows, n, deep)


CASES = (
    dict(m=128, n=256, k=1024, blocks=1),                              # a block of two tiles; more inputs than stages
    dict(m=200, n=136, k=256, blocks=3, out="bf16"),                   # ragged both ways
    dict(m=1, n=2, k=128, out="f16"),
    dict(m=0, n=128, k=128),
)


def make(rng, m=4096, n=5120, k=5120, out="f32", blocks=132):
    """Normal values in e4m3, scales between 1/2 and 2."""
    def tiles(rows):
        codes = numerics.E4M3.encode(rng.standard_normal((rows, k)).astype(np.float32))
        return arrange(codes), rng.uniform(0.5, 2, (k // TILE, -(-rows // TILE) * TILE)).astype(np.float32)
    (x, x_scale), (w, w_scale) = tiles(m), tiles(n)
    return dict(x=x, x_scale=x_scale, w=w, w_scale=w_scale, blocks=blocks,
                out=np.empty((m, n), {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[out]))


def cost(m=4096, n=5120, k=5120, out="f32", blocks=132):
    """Bytes that must move, and float operations."""
    moved = (m + n) * (k + k // TILE * 4) + m * n * (4 if out == "f32" else 2)
    return dict(bytes=moved if m else 0, flops=2 * m * n * k)
