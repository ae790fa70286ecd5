"""gemm_sm90a: a matrix in e4m3 or f16 times many rows of the same on wgmma: the products of prefill on Hopper.

    e4m3:  sum[m, n] = x_scale[m] * sum over blocks b of 128 inputs:  w_scale[b, n] * sum over k in b of x[m, k] * w[n, k]
    f16:   sum[m, n] = w_scale[0, n] * sum over k of x[m, k] * w[n, k]
    out              = sum, or gated (packed.interleave: tiles of 16 rows of w take turns):  silu(sum of gate) * sum of up

             e4m3, no NaN                       f16
    x        u8 [M / 128, K / 128, 128, 128]    f16 [M / 128, K / 64, 128, 64]      as shared memory will hold it (below);
                                                                                    any finite rows beyond M
    x_scale  f32 [M rounded up to 128]          None                                of a row (quantise_rows.py says why)
    w        u8 [N / 128, K / 128, 128, 128]    f16 [N / 128, K / 64, 128, 64]      inputs in any order that x has too
    w_scale  f32 [K / 128, N rounded up to 128]    f32 [1, N rounded up to 128], or None for ones
    out      f32, f16 or bf16 (u16) [M, N]      N a multiple of 8; gated: f16 or bf16 [M, N / 2], N a multiple of 128

A tile is 128 rows by 128 bytes, 16 KiB in one piece, which a single bulk copy brings. In row r the 16-byte chunk c stands at
place c ^ (r % 8): the 128-byte swizzle that wgmma's descriptors name, so that neither it nor the copy meets a bank twice:

    row 0   0 1 2 3 4 5 6 7        row 1   1 0 3 2 5 4 7 6        row 2   2 3 0 1 6 7 4 5   ...   row 8   0 1 2 3 ...

A block owns 128 x 256 outputs at a time and walks over all that are its share (persistent; neighbours share tiles of w).
One warp fetches stages of a tile of x and two tiles of w, of e4m3 with their scales; two warpgroups take a tile of w each:

    fetching warp     wait for `empty`; the bulk copies, which report to `full`
    warpgroup, e4m3   wait for `full`; for 64 rows of x, then the other 64: four wgmma m64n128k32 into fresh sums; when they
                      are done total += sum * w_scale, in float32, while the other warpgroup's wgmma run
    warpgroup, f16    wait for `full`; four wgmma m64n128k16 into the totals of 64 rows of x, four into those of the others

So no sum of e4m3 products runs over more than 128 inputs in the tensor cores' own narrower accumulators (about 14 bits), and
scales cost one operation an output a block. A thread holds 128 totals, 64 fresh sums and the 32 scales of its columns for
both halves, which takes 240 registers: the fetching warpgroup gives its own away (setmaxnreg). Of f16 products the tensor
cores keep float32 and at least a bit more (OUTPUTS says what that costs), so they are left there to the end.

On an H200 in e4m3: 1,060 to 1,100 TFLOP/s at 4,096 rows, 1,270 without promotion; 900 with scales of x for 128 inputs, which
are a second operation for each output. A block reads 48 KB from L2 for 8.4 MFLOP, in f16 for 4.2; if it were 128 x 128, it
would read 64 for as much.
"""
import functools

import numpy as np
from numba import cuda
from numba.cuda import types

from .. import numerics
from . import ptx
from .activation import silu
from .build import kernel, lineless_device
from .octet import format_of
from .parity import Output
from .ptx import u32, u64
from .ptx_wgmma import registers_down, registers_up, wgmma, wgmma_commit, wgmma_fence, wgmma_result
from .ring import arrive, make_barriers, wait
from .strips import store_pair
from .unroll import static_range

TILE = 128                    # rows of a tile, bytes of its rows
TILE_BYTES = TILE * TILE
F16_WIDTH = TILE // 2         # inputs of a tile of f16; of e4m3 TILE
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
SASS = {"sm_90a": (("QGMMA.64x128x32.F32.E4M3.E4M3", "HGMMA.64x128x16.F32"), "UBLKCP", "SYNCS", "USETMAXREG")}
# The reference multiplies the codes exactly, and so does the emulator. Hardware cuts each of 33 addends (32 products and the
# sum so far) at 2^-13 of the largest: of 8, as sums of make's products are, by less than u = 2^-10, u / sqrt(3) in the root
# mean square, four times a block; times 1.75, the same mean of two scales, that is 0.0113 sqrt(K / 128). The largest of
# 65,536 outputs lies 4.7 deviations out: 0.12 < 2^-3 at CASES' K = 640 (measured: 0.06, of sums of about 44).
# Gated: K = 256, so a sum s errs by 0.075 g, and silu(gate) * up by 2.1 * 0.075 g * max |s|, where max |s| = 4.3 * 28 g.
# f16: a wgmma cuts each of 17 addends at 2^-25 of the largest and its sum at 2^-23 (arXiv 2511.10909, 2512.07004), so
# K / 16 of them err by less than 5.3 * 2^-23 K / 16 of the largest sum, 2^-10.5 of it at K = 17,408 if all err one way. At
# K = 256 that is 1e-5 of 138 f, 4.3 * 16 times a scale of 2 f; gated 0.4 f^2.
OUTPUTS = {"out": Output(rtol=2.0 ** -20, atol=2.0 ** -3)}
GATED = {"e4m3": 1 / 13, "f16": 1 / 2}  # g and f, factors for scales: 19 g^2 < 2^-3, 0.4 f^2 < 2^-3


def arrange(rows, width=TILE):
    """[R, K] -> [R / 128, K / width, 128, width]: tiles, chunks where the docstring says, padded with zeros."""
    r, k = rows.shape
    padded = np.zeros((-(-r // TILE) * TILE, k), rows.dtype)
    padded[:r] = rows
    chunks = padded.reshape(-1, TILE, k // width, 8, width // 8).transpose(0, 2, 1, 3, 4)    # tile block row chunk element
    out, place = np.empty_like(chunks), np.arange(8)[None, :] ^ np.arange(TILE)[:, None] % 8
    out[:, :, np.arange(TILE)[:, None], place] = chunks
    return out.reshape(-1, k // width, TILE, width)


def restore(tiles):
    """The inverse of arrange: [R, K] with the padding."""
    blocks, _, width = tiles.shape[1:]
    chunks = tiles.reshape(-1, blocks, TILE, 8, width // 8)
    rows = chunks[:, :, np.arange(TILE)[:, None], np.arange(8)[None, :] ^ np.arange(TILE)[:, None] % 8]
    return rows.transpose(0, 2, 1, 3, 4).reshape(-1, blocks * width)


def ref(x, x_scale, w, w_scale, out, gated=False):
    """The formulas in float64."""
    m, width = out.shape
    weights, activations = restore(w), restore(x)
    if w.dtype == np.uint8:
        weights = numerics.E4M3.decode(weights)
        activations = numerics.E4M3.decode(activations).astype(np.float64) * x_scale[:, None]
    if w_scale is not None:
        weights = weights.astype(np.float64) * np.repeat(w_scale.T, weights.shape[1] // len(w_scale), 1)
    sums = activations[:m].astype(np.float64) @ weights[:2 * width if gated else width].T.astype(np.float64)
    if not gated:
        return dict(out=sums)
    gate, up = (sums.reshape(m, width // 16, 2, 16)[:, :, i].reshape(m, width) for i in range(2))
    return dict(out=gate / (1 + np.exp(-gate)) * up)


@functools.cache
def build(format, out_format, gated):
    """The kernel; format: of x and w."""
    first_step, step, result = wgmma(TILE, format, format, fresh=True), wgmma(TILE, format, format), wgmma_result(TILE)
    scaled_blocks = format == "e4m3"
    stage_bytes = STAGE if scaled_blocks else SCALES_AT
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
                    ptx.mbarrier_arrive_expect(full, u32(stage_bytes))
                    ptx.bulk_load(to, x + (u64(m) * deep + b) * TILE_BYTES, u32(TILE_BYTES), full)
                    scales = u32(to + SCALES_AT)
                    for i in static_range(GROUPS):
                        strip = min(u32(n + i), u32(n_tiles - 1))            # of an odd number the last comes twice
                        ptx.bulk_load(u32(to + (1 + i) * TILE_BYTES), w + (u64(strip) * deep + b) * TILE_BYTES,
                                      u32(TILE_BYTES), full)
                        if scaled_blocks:
                            ptx.bulk_load(u32(scales + i * SCALES), w_scale + (u64(b) * n_tiles + strip) * SCALES,
                                          u32(SCALES), full)
                slot = u32(slot + 1)
                if slot == STAGES:
                    slot, parity = u32(0), u32(parity ^ 1)
            tile = u32(tile + ptx.blocks_x())

    @lineless_device
    def issue(c, stage, group, half):
        """The product of a stage's inputs, 64 rows of x and the warpgroup's tile of w, begun: alone, or f16: added to c."""
        a = u64(DESCRIPTOR) | u64(u32(stage + half * (TILE_BYTES // 2)) >> 4)
        b = u64(DESCRIPTOR) | u64(u32(stage + TILE_BYTES + group * TILE_BYTES) >> 4)
        wgmma_fence()
        c = first_step(a, b) if scaled_blocks else step(c, a, b)
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
    def through(low, high, stage, empty, group, lane):
        """The totals of either 64 rows after a stage, which is given back."""
        if scaled_blocks:
            c = issue(low, stage, group, 0)
            s = column_scales(stage, group, lane)
            c = result(c, 0)
            low = added(low, c, s)
            c = issue(low, stage, group, 1)
            c = result(c, 0)
        else:
            low, high = issue(low, stage, group, 0), issue(high, stage, group, 1)
            low, high = result(low, 0), result(high, 0)
        arrive(empty, lane)
        if scaled_blocks:
            high = added(high, c, s)
        return low, high

    @lineless_device
    def factors(w_scale, column, lane):
        """f16: the scales of the lane's columns."""
        at = w_scale + (column + lane % 4 * 2) * 4
        return tuple(ptx.read_f32x2(at + j * 32) for j in static_range(SUMS // 4))

    @lineless_device
    def times(total, s):
        """Each column of the sums times its scale."""
        return tuple(total[i] * s[i // 4][i % 2] for i in static_range(SUMS))

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
    def multiply(ring, bars, x_scale, w_scale, out, m_tiles, n_tiles, rows, width, deep, lane, warp):
        """A multiplying warp: all its block's tiles."""
        slot, parity, tile, group = u32(0), u32(0), ptx.block_x(), u32(warp // 4)
        row = u32(warp % 4 * 16 + lane // 4)
        # no range: one of unknown step divides in 64 bits, a call, and beside a call ptxas serialises all wgmma
        while tile < m_tiles * ((n_tiles + 1) // 2):
            low, high = (0.0,) * SUMS, (0.0,) * SUMS
            to, column = u32(tile % m_tiles * TILE + row), u32((tile // m_tiles * 2 + group) * TILE)
            for b in range(deep):
                full, stage = u32(bars + slot * 8), u32(ring + slot * STAGE)
                wait(full, parity)
                low, high = through(low, high, stage, u32(full + STAGES * 8), group, lane)
                slot = u32(slot + 1)
                if slot == STAGES:
                    slot, parity = u32(0), u32(parity ^ 1)
            if scaled_blocks:
                low, high = scaled(low, x_scale, to, rows), scaled(high, x_scale, u32(to + 64), rows)
            elif w_scale != 0:
                s = factors(w_scale, min(column, u32((n_tiles - 1) * TILE)), lane)
                low, high = times(low, s), times(high, s)
            if gated:
                write_gated(out, low, to, column, rows, width, lane)
                write_gated(out, high, u32(to + 64), column, rows, width, lane)
            else:
                write(out, low, to, column, rows, width, lane)
                write(out, high, u32(to + 64), column, rows, width, lane)
            tile = u32(tile + ptx.blocks_x())

    @kernel(threads=THREADS, shared=SHARED, whole=True)
    def gemm_sm90a(x: u64, x_scale: u64, w: u64, w_scale: u64, out: u64, rows: u32, n: u32, width: u32, deep: u32):
        lane, warp = ptx.lane(), u32(ptx.thread_x() // 32)
        memory = ptx.shared_address(cuda.shared.array(0, types.uint8))
        ring = u32(u32(memory + 1023) & 0xFFFFFC00)
        bars = u32(ring + BARS_AT)                                    # STAGES of full, STAGES of empty
        m_tiles, n_tiles = u32((rows + (TILE - 1)) // TILE), u32((n + (TILE - 1)) // TILE)
        make_barriers(bars, STAGES, 1, 4 * GROUPS)
        ptx.wait_dependencies()
        if warp >= FETCHING:
            registers_down(FEW)
            if warp == FETCHING:
                fetch(ring, bars, x, w, w_scale, m_tiles, n_tiles, deep, lane)
        else:
            registers_up(MANY)
            multiply(ring, bars, x_scale, w_scale, out, m_tiles, n_tiles, rows, width, deep, lane, warp)
    return gemm_sm90a


def launch(stream, x, x_scale, w, w_scale, out, blocks, gated=False):
    """Queue it on a stream; blocks: the device's multiprocessors."""
    (rows, width), deep = out.shape, x.shape[1] if len(x.shape) == 4 else 0
    n = 2 * width if gated else width
    m_tiles, n_tiles = -(-rows // TILE), -(-n // TILE)
    if n % (TILE if gated else 8) or not n or not deep or blocks < 1:
        raise ValueError(f"out must be [M, N] with N a multiple of 8, gated [M, N / 2] with N one of 128, x have inputs and "
                         f"blocks be positive, got {tuple(out.shape)}, gated={gated}, {tuple(x.shape)} and {blocks}")
    format, row = format_of("x", x, "e4m3", "f16"), TILE // x.dtype.itemsize
    given = [("x", x, x.dtype, (m_tiles, deep, TILE, row)), ("w", w, x.dtype, (n_tiles, deep, TILE, row))]
    if format == "e4m3":
        given += [("x_scale", x_scale, np.float32, (m_tiles * TILE,)),
                  ("w_scale", w_scale, np.float32, (deep, n_tiles * TILE))]
    elif x_scale is not None:
        raise ValueError("x in f16 has no scale: x_scale must be None")
    elif w_scale is not None:
        given.append(("w_scale", w_scale, np.float32, (1, n_tiles * TILE)))
    for name, array, dtype, shape in given:
        if array is None or tuple(array.shape) != shape or array.dtype != dtype:
            found = None if array is None else f"{array.dtype} {tuple(array.shape)}"
            raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, got {found}")
    out_format = format_of("out", out, *(("f16", "bf16") if gated else ("f32", "f16", "bf16")))
    if rows:
        stream.launch(build(format, out_format, bool(gated)), min(blocks, m_tiles * -(-n_tiles // GROUPS)), x,
                      0 if x_scale is None else x_scale, w, 0 if w_scale is None else w_scale, out, rows, n, width, deep)


CASES = (
    dict(m=128, n=512, k=640, blocks=1),                               # a block of two tiles; more inputs than stages
    dict(m=200, n=136, k=256, blocks=3, out="bf16"),                   # ragged both ways, an odd number of strips
    dict(m=70, n=384, k=256, blocks=2, out="f16", gated=True),
    dict(m=1, n=8, k=128, out="bf16"),
    dict(m=0, n=128, k=128),
    dict(m=200, n=136, k=256, blocks=1, x="f16", scaled=False),        # ragged; tiles of one block follow each other
    dict(m=70, n=384, k=256, blocks=2, out="f16", gated=True, x="f16"),
)


def make(rng, m=4096, n=5120, k=5120, out="f32", blocks=132, gated=False, x="e4m3", scaled=True):
    """Normal values, scales between 1/2 and 2; for a gated product smaller ones. scaled: whether f16 has any."""
    narrow, row = x == "e4m3", TILE if x == "e4m3" else F16_WIDTH

    def tiles(rows):
        values = rng.standard_normal((rows, k)).astype(np.float32)
        return arrange(numerics.E4M3.encode(values) if narrow else values.astype(np.float16), row)

    def scales(*shape):
        return rng.uniform(0.5, 2, shape).astype(np.float32)
    x_tiles, w, by = tiles(m), tiles(n), np.float32(GATED[x] if gated else 1)
    x_scale = scales(-(-m // TILE) * TILE) * by if narrow else None
    w_scale = scales(k // TILE, -(-n // TILE) * TILE) if narrow else scales(1, -(-n // TILE) * TILE) * by if scaled else None
    return dict(x=x_tiles, x_scale=x_scale, w=w, w_scale=w_scale, blocks=blocks, gated=gated,
                out=np.empty((m, n // 2 if gated else n), {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[out]))


def cost(m=4096, n=5120, k=5120, out="f32", blocks=132, gated=False, x="e4m3", scaled=True):
    """Bytes that must move, and float operations."""
    moved = m * n // (2 if gated else 1) * (4 if out == "f32" else 2)
    moved += m * (k + 4) + n * (k + k // TILE * 4) if x == "e4m3" else 2 * (m + n) * k + 4 * n
    return dict(bytes=moved if m else 0, flops=2 * m * n * k)
