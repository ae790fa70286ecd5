"""gemm_sm90a: a matrix in e4m3 times many rows of e4m3 on wgmma: the products of prefill on Hopper.

    sum[m, n] = x_scale[m] * sum over blocks b of 128 inputs:  w_scale[b, n] * sum over k in b of x[m, k] * w[n, k]
    out       = sum, or gated (packed.interleave: tiles of 16 rows of w take turns):  silu(sum of gate) * sum of up

    x        u8 [M / 128, K / 128, 128, 128]    e4m3, no NaN, as shared memory will hold it (below); any finite rows beyond M
    x_scale  f32 [M rounded up to 128]          one for all inputs of a row (quantise_rows.py says why)
    w        u8 [N / 128, K / 128, 128, 128]    the same for the matrix; inputs of a block in any order that x has too
    w_scale  f32 [K / 128, N rounded up to 128]
    out      f32, f16 or bf16 (u16) [M, N]      N a multiple of 8; gated: f16 or bf16 [M, N / 2], N a multiple of 128

A tile is 128 rows by 128 bytes, 16 KiB in one piece, which a single bulk copy brings. In row r the 16-byte chunk c stands at
place c ^ (r % 8): the 128-byte swizzle that wgmma's descriptors name, so that neither it nor the copy meets a bank twice:

    row 0   0 1 2 3 4 5 6 7        row 1   1 0 3 2 5 4 7 6        row 2   2 3 0 1 6 7 4 5   ...   row 8   0 1 2 3 ...

A block owns 128 x 256 outputs at a time and walks over all that are its share (persistent; neighbours share tiles of w).
One warp fetches stages of a tile of x, two tiles of w and their scales; two warpgroups take a tile of w each:

    fetching warp     wait for `empty`; five bulk copies, which report to `full`
    warpgroup         wait for `full`; for 64 rows of x, then the other 64: four wgmma m64n128k32 into fresh sums; when they
                      are done total += sum * w_scale, in float32, while the other warpgroup's wgmma run

So no sum of products runs over more than 128 inputs in the tensor cores' own narrower accumulators (about 14 bits), and
scales cost one operation an output a block. A thread holds 128 totals, 64 fresh sums and the 32 scales of its columns for
both halves, which takes 240 registers: the fetching warpgroup gives its own away (setmaxnreg).

On an H200: 1,060 to 1,100 TFLOP/s at 4,096 rows, 1,270 without promotion; 900 with scales of x for 128 inputs, which are a
second operation for each output. A block reads 48 KB from L2 for 8.4 MFLOP; if it were 128 x 128, it would read 64.
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
from .ptx_wgmma import registers_down, registers_up, wgmma, wgmma_commit, wgmma_fence, wgmma_result
from .strips import silu, store_pair, wait
from .unroll import static_range

TILE = 128                    # rows of a tile, bytes of its rows
TILE_BYTES = TILE * TILE
GROUPS = 2                    # warpgroups that multiply, a tile of w each
THREADS = 128 * (GROUPS + 1)
FETCHING = 4 * GROUPS         # the warp that fetches
FEW, MANY = 24, 240           # registers of a thread of the fetching and of a multiplying warpgroup: 504 of 512 for four
SCALES = TILE * 4             # bytes of a tile's scales
SCALES_AT = (1 + GROUPS) * TILE_BYTES        # in a stage: tile of x, tiles of w, 128 scales of each of these
STAGE = SCALES_AT + GROUPS * SCALES
STAGES = 4                    # 196 KiB
BARS_AT = STAGES * STAGE
SHARED = BARS_AT + 16 * STAGES + 1024        # the swizzle counts from 1024-byte boundaries
SUMS = 64                     # float32 of a thread: 64 x 128 outputs over 128 threads
DESCRIPTOR = 1 << 62 | 64 << 32 | 1 << 16    # 128-byte swizzle, groups of 8 rows 1024 bytes apart
REGISTERS = 168               # what a launch of 384 threads may ask for; setmaxnreg moves them
SASS = {"sm_90a": ("QGMMA.64x128x32.F32.E4M3.E4M3", "UBLKCP", "SYNCS", "USETMAXREG")}
# The reference multiplies the codes exactly, and so does the emulator. Hardware cuts each of 33 addends (32 products and the
# sum so far) at 2^-13 of the largest: of 8, as sums of make's products are, by less than u = 2^-10, u / sqrt(3) in the root
# mean square, four times a block; times 1.75, the same mean of two scales, that is 0.0113 sqrt(K / 128). The largest of
# 65,536 outputs lies 4.7 deviations out: 0.12 < 2^-3 at CASES' K = 640 (measured: 0.06, of sums of about 44).
# Gated: K = 256, so a sum s errs by 0.075 g, and silu(gate) * up by 2.1 * 0.075 g * max |s|, where max |s| = 4.3 * 28 g.
OUTPUTS = {"out": Output(rtol=2.0 ** -20, atol=2.0 ** -3)}
GATED = 1 / 13                # g, a factor for x_scale: 19 g^2 < 2^-3


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


def ref(x, x_scale, w, w_scale, out, gated=False):
    """The formulas in float64."""
    (m, width), k = out.shape, x.shape[1] * TILE

    assert k == w.shape[1] * TILE
    weights = numerics.E4M3.decode(restore(w)).astype(np.float64) * np.repeat(w_scale.T, TILE, 1)
    activations = numerics.E4M3.decode(restore(x)).astype(np.float64) * x_scale[:, None]
    sums = activations[:m] @ weights[:2 * width if gated else width].T
    if not gated:
        return dict(out=sums)
    gate, up = (sums.reshape(m, width // 16, 2, 16)[:, :, i].reshape(m, width) for i in range(2))
    return dict(out=gate / (1 + np.exp(-gate)) * up)


@functools.cache
def build(out_format, gated):
    """The kernel."""
    first_step, step, result = wgmma(TILE, "e4m3", "e4m3", fresh=True), wgmma(TILE, "e4m3", "e4m3"), wgmma_result(TILE)
    wide, store, pack = out_format == "f32", store_pair(out_format), ptx.f16x2 if out_format == "f16" else ptx.bf16x2

    @lineless_device
    def fetch(ring, bars, x, w, w_scale, m_tiles, n_tiles, deep, lane):
        """The fetching warp: all stages of all the block's tiles."""
        slot, parity, tile = u32(0), u32(1), ptx.block_x()
        while tile < m_tiles * ((n_tiles + 1) // 2):
            m, n = u32(tile % m_tiles), u32(tile // m_tiles * 2)
            for b in range(deep):
                full, to = u32(bars + slot * 8), u32(ring + slot * STAGE)
                wait(u32(full + STAGES * 8), parity)
                if lane == 0:
                    ptx.mbarrier_arrive_expect(full, u32(STAGE))
                    ptx.bulk_load(to, x + (u64(m) * deep + b) * TILE_BYTES, u32(TILE_BYTES), full)
                    scales = u32(to + SCALES_AT)
                    for i in static_range(GROUPS):
                        strip = min(u32(n + i), u32(n_tiles - 1))            # of an odd number the last comes twice
                        ptx.bulk_load(u32(to + (1 + i) * TILE_BYTES), w + (u64(strip) * deep + b) * TILE_BYTES,
                                      u32(TILE_BYTES), full)
                        ptx.bulk_load(u32(scales + i * SCALES), w_scale + (u64(b) * n_tiles + strip) * SCALES,
                                      u32(SCALES), full)
                slot = u32(slot + 1)
                if slot == STAGES:
                    slot, parity = u32(0), u32(parity ^ 1)
            tile = u32(tile + ptx.blocks_x())

    @lineless_device
    def issue(stage, group, half):
        """The product of a stage's 128 inputs, 64 rows of x and the warpgroup's tile of w, begun."""
        a = u64(DESCRIPTOR) | u64(u32(stage + half * (TILE_BYTES // 2)) >> 4)
        b = u64(DESCRIPTOR) | u64(u32(stage + TILE_BYTES + group * TILE_BYTES) >> 4)
        wgmma_fence()
        c = first_step(a, b)
        for k in static_range(3):
            c = step(c, a + u64(2 * k + 2), b + u64(2 * k + 2))
        wgmma_commit()
        return c

    @lineless_device
    def column_scales(stage, group, lane):
        at = u32(stage + SCALES_AT + group * SCALES + lane % 4 * 8)
        return tuple(ptx.shared_f32x2(u32(at + j * 32)) for j in static_range(SUMS // 4))

    @lineless_device
    def added(total, c, s):
        """total + c * column scale: c[4 j + 2 h + i] is in row h, column i of eight j."""
        return tuple(ptx.fma(c[i], s[i // 4][i % 2], total[i]) for i in static_range(SUMS))

    @lineless_device
    def scaled(total, x_scale, row, rows):
        """The sums of rows `row` and `row` + 8 times their scales."""
        r = (ptx.read_f32(x_scale + u64(min(row, u32(rows - 1))) * 4),
             ptx.read_f32(x_scale + u64(min(u32(row + 8), u32(rows - 1))) * 4))
        return tuple(total[i] * r[i // 2 % 2] for i in static_range(SUMS))

    @lineless_device
    def swapped(a, lane):
        """Four words of each of four lanes, transposed: word i of lane t becomes word t of lane i."""
        odd, high = (lane & 1) != 0, (lane & 2) != 0
        p, q = ptx.shuffle_xor(a[0] if odd else a[1], u32(1)), ptx.shuffle_xor(a[2] if odd else a[3], u32(1))
        b0, b1, b2, b3 = (p if odd else a[0]), (a[1] if odd else p), (q if odd else a[2]), (a[3] if odd else q)
        p, q = ptx.shuffle_xor(b0 if high else b2, u32(2)), ptx.shuffle_xor(b1 if high else b3, u32(2))
        return (p if high else b0), (q if high else b1), (b2 if high else p), (b3 if high else q)

    @lineless_device
    def write(out, total, row, column, rows, n, lane):
        """Rows `row` and `row` + 8, the warpgroup's 128 columns from `column` on: 16 bytes a store."""
        for h in static_range(2):
            for q in static_range(4):
                if wide:
                    for j in static_range(4):
                        at = u32(column + q * 32 + j * 8 + lane % 4 * 2)
                        if row + 8 * h < rows and at < n:
                            store(out, u64(row + 8 * h) * n + at, total[16 * q + 4 * j + 2 * h],
                                  total[16 * q + 4 * j + 2 * h + 1])
                else:
                    words = swapped(tuple(pack(total[16 * q + 4 * j + 2 * h], total[16 * q + 4 * j + 2 * h + 1])
                                          for j in static_range(4)), lane)
                    at = u32(column + q * 32 + lane % 4 * 8)
                    if row + 8 * h < rows and at < n:
                        ptx.store_x4(out + (u64(row + 8 * h) * n + at) * 2, words)

    @lineless_device
    def product(gate, up):
        return silu(gate) * up

    @lineless_device
    def write_gated(out, total, row, column, rows, width, lane):
        """The same: of each 32 columns a thread has four of gate, then the four of up that go with them."""
        for h in static_range(2):
            for q in static_range(2):
                words = swapped(tuple(pack(
                    product(total[32 * q + 16 * (j // 2) + 4 * (j % 2) + 2 * h],
                            total[32 * q + 16 * (j // 2) + 4 * (j % 2) + 2 * h + 8]),
                    product(total[32 * q + 16 * (j // 2) + 4 * (j % 2) + 2 * h + 1],
                            total[32 * q + 16 * (j // 2) + 4 * (j % 2) + 2 * h + 9])) for j in static_range(4)), lane)
                at = u32(column // 2 + q * 32 + lane % 4 * 8)
                if row + 8 * h < rows and at < width:
                    ptx.store_x4(out + (u64(row + 8 * h) * width + at) * 2, words)

    @lineless_device
    def multiply(ring, bars, x_scale, out, m_tiles, n_tiles, rows, width, deep, lane, warp):
        """A multiplying warp: all its block's tiles."""
        slot, parity, tile, group = u32(0), u32(0), ptx.block_x(), u32(warp // 4)
        row = u32(warp % 4 * 16 + lane // 4)
        # no range: one of unknown step divides in 64 bits, a call, and beside a call ptxas serialises all wgmma
        while tile < m_tiles * ((n_tiles + 1) // 2):
            low, high = (0.0,) * SUMS, (0.0,) * SUMS
            for b in range(deep):
                full, stage = u32(bars + slot * 8), u32(ring + slot * STAGE)
                wait(full, parity)
                c = issue(stage, group, 0)
                s = column_scales(stage, group, lane)
                c = result(c, 0)
                low = added(low, c, s)
                c = issue(stage, group, 1)
                c = result(c, 0)
                ptx.warp_barrier()
                if lane == 0:
                    ptx.mbarrier_arrive(u32(full + STAGES * 8))
                high = added(high, c, s)
                slot = u32(slot + 1)
                if slot == STAGES:
                    slot, parity = u32(0), u32(parity ^ 1)
            to, column = u32(tile % m_tiles * TILE + row), u32((tile // m_tiles * 2 + group) * TILE)
            low, high = scaled(low, x_scale, to, rows), scaled(high, x_scale, u32(to + 64), rows)
            if gated:
                write_gated(out, low, to, column, rows, width, lane)
                write_gated(out, high, u32(to + 64), column, rows, width, lane)
            else:
                write(out, low, to, column, rows, width, lane)
                write(out, high, u32(to + 64), column, rows, width, lane)
            tile = u32(tile + ptx.blocks_x())

    @kernel(threads=THREADS, shared=SHARED, whole=True)
    def gemm_sm90a(x: u64, x_scale: u64, w: u64, w_scale: u64, out: u64, rows: u32, n: u32, width: u32, deep: u32):
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
        ptx.wait_dependencies()
        if warp >= FETCHING:
            registers_down(FEW)
            if warp == FETCHING:
                fetch(ring, bars, x, w, w_scale, m_tiles, n_tiles, deep, lane)
        else:
            registers_up(MANY)
            multiply(ring, bars, x_scale, out, m_tiles, n_tiles, rows, width, deep, lane, warp)
    return gemm_sm90a


def launch(stream, x, x_scale, w, w_scale, out, blocks, gated=False):
    """Queue it on a stream; blocks: the device's multiprocessors."""
    (rows, width), deep = out.shape, x.shape[1] if len(x.shape) == 4 else 0
    n = 2 * width if gated else width
    m_tiles, n_tiles = -(-rows // TILE), -(-n // TILE)
    if n % (TILE if gated else 8) or not n or not deep or blocks < 1:
        raise ValueError(f"out must be [M, N] with N a multiple of 8, gated [M, N / 2] with N one of 128, x have inputs and "
                         f"blocks be positive, got {tuple(out.shape)}, gated={gated}, {tuple(x.shape)} and {blocks}")
    for name, array, dtype, shape in (("x", x, np.uint8, (m_tiles, deep, TILE, TILE)),
                                      ("w", w, np.uint8, (n_tiles, deep, TILE, TILE)),
                                      ("x_scale", x_scale, np.float32, (m_tiles * TILE,)),
                                      ("w_scale", w_scale, np.float32, (deep, n_tiles * TILE))):
        if tuple(array.shape) != shape or array.dtype != dtype:
            raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, got {array.dtype} {tuple(array.shape)}")
    out_format = format_of("out", out, *(("f16", "bf16") if gated else ("f32", "f16", "bf16")))
    if rows:
        stream.launch(build(out_format, bool(gated)), min(blocks, m_tiles * -(-n_tiles // GROUPS)), x, x_scale, w, w_scale,
                      out, rows, n, width, deep)


CASES = (
    dict(m=128, n=512, k=640, blocks=1),                               # a block of two tiles; more inputs than stages
    dict(m=200, n=136, k=256, blocks=3, out="bf16"),                   # ragged both ways, an odd number of strips
    dict(m=70, n=384, k=256, blocks=2, out="f16", gated=True),
    dict(m=1, n=8, k=128, out="bf16"),
    dict(m=0, n=128, k=128),
)


def make(rng, m=4096, n=5120, k=5120, out="f32", blocks=132, gated=False):
    """Normal values in e4m3, scales between 1/2 and 2; for a gated product smaller ones of x."""
    def tiles(rows):
        return arrange(numerics.E4M3.encode(rng.standard_normal((rows, k)).astype(np.float32)))

    def scales(*shape):
        return rng.uniform(0.5, 2, shape).astype(np.float32)
    x, w, x_scale = tiles(m), tiles(n), scales(-(-m // TILE) * TILE)
    w_scale = scales(k // TILE, -(-n // TILE) * TILE)
    return dict(x=x, x_scale=x_scale * np.float32(GATED if gated else 1), w=w, w_scale=w_scale, blocks=blocks, gated=gated,
                out=np.empty((m, n // 2 if gated else n), {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[out]))


def cost(m=4096, n=5120, k=5120, out="f32", blocks=132, gated=False):
    """Bytes that must move, and float operations."""
    moved = m * (k + 4) + n * (k + k // TILE * 4) + m * n // (2 if gated else 1) * (4 if out == "f32" else 2)
    return dict(bytes=moved if m else 0, flops=2 * m * n * k)
