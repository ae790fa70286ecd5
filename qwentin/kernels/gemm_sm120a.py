"""gemm_sm120a: a packed weight matrix times many rows of e4m3 on block-scaled matrix instructions: prefill's products there.

    out[m, n] = x_scale[m] * sum over k of x[m, k] * w[n, k]            w[n, k] = code * scale
    gated (packed.interleave):  out[m, f] = silu(gate) * up,  the two sums of row m with row f of either matrix

    x        u8 [M / 128, K / 128, 128, 128]      e4m3 tiles as quantise_rows and rmsnorm_tiles leave them (gemm_sm90a.py
                                                  draws them); rows beyond M may hold anything
    x_scale  f32 [M rounded up to 128]            one for all inputs of a row
    w        u8 [N / 128, K / 128, 8, tile_bytes] packed.py draws it; e2m3, e2m1 or e4m3, block 32 or 128
    out      f32, f16 or bf16 (u16) [M, W]        N a multiple of 16, W even; columns 0 .. N - 1 are written
                                                  gated: N a multiple of 128, columns 0 .. N / 2 - 1

A block makes 128 x 128 outputs at a time, a tile of x and a strip of w, and walks over all that are its share (persistent;
neighbours share a strip). One warp fetches stages of 128 inputs, each two bulk copies, for a piece of w and a tile of x are
runs of memory: 28 KB of fp6, so three fit into 99 KB. Eight warps multiply, two tiles of w and 64 rows of x each:

    warp     0     1     2     3     4     5     6     7
    tiles   0 1   2 3   4 5   6 7   0 1   2 3   4 5   6 7
    rows    0 .. 63                 64 .. 127

A warp turns its codes into bytes (registers.py: e2m3 as e4m3, times 2^-6; e2m1 as e5m2, times 2^-14) and keeps those of all
128 inputs, 32 registers, while its rows pass by, eight at a time: four mma m16n8k32 into fresh sums, which are added to the
totals in float32, with block 128 times the bf16 scales of the weights. Scales for 32 inputs are the instruction's own.

mma's column g is row 2 (g % 4) + g / 4 of the eight: so the 16 lanes whose 8 bytes shared memory reads at once have rows of
one parity, whose swizzled chunks lie in different banks:

    lanes of g    0  1  2  3    4  5  6  7          rows 0, 2, 4, 6 have chunks 2 b, 2 b + 1 at places
    row           0  2  4  6    1  3  5  7          2 b ^ 0,  2 b ^ 2,  2 b ^ 4,  2 b ^ 6  and beside them

ldmatrix, whose sm_120a forms widen six bits to a byte, is not used: it wants a row's 16 codes in 12 neighbouring bytes and
deals them out by fours, where a lane of ours owns eight neighbours of two rows and finds them in words of its own.

No such chip has been at hand: layouts are proven by the emulator, code by the assembler.
"""
import functools

import numpy as np
from numba import cuda
from numba.cuda import types

from .. import numerics
from . import gemm_sm90a, packed, ptx, registers
from .activation import silu
from .build import kernel, lineless_device
from .gemv import make as make_gemv
from .gemv import scaled
from .gemv_sm120a import ONES, PLACED
from .octet import format_of
from .packed import Packing
from .ptx import f32, u32, u64
from .ptx_wgmma import registers_down, registers_up
from .ring import arrive, make_barriers, wait
from .strips import SHARED, TILES, added, store_pair
from .unroll import static_range

TILE, TILE_BYTES = gemm_sm90a.TILE, gemm_sm90a.TILE_BYTES
FEW, MANY = gemm_sm90a.FEW, gemm_sm90a.MANY          # registers of a thread that fetches and of one that multiplies
HALVES = 2                            # warps that share two tiles of w, each with its part of the rows
GROUPS = TILE // 8 // HALVES          # of 8 rows, of a warp
PARTS = packed.TILES // TILES
MULTIPLYING = PARTS * HALVES          # warps; the next one fetches, three more stand by: registers move by fours of warps
THREADS = 32 * (MULTIPLYING + 4)
REGISTERS = 168                       # what a launch of 384 threads may ask for; setmaxnreg moves them
SASS = {"sm_120a": ("QMMA.SF.16832.F32", "UBLKCP", "SYNCS", "USETMAXREG")}
# Products are exact. How this chip's tensor cores add is not known; as those of Hopper, the coarsest that are, they err by
# what gemm_sm90a.py derives for the same sums of 128 inputs of the same sizes, by fewer than its 640 inputs here.
OUTPUTS = {"out": gemm_sm90a.OUTPUTS["out"]}
PACKINGS = {"fp6": packed.FP6, "fp4": packed.FP4, "fp8": packed.FP8, "fp6-32": Packing("fp6", numerics.E2M3, 32)}


@functools.cache
def product(packing):
    """Device functions: start(lane, group) -> where a lane reads; multiply(places, w, x, acc) -> acc + the products of two
    tiles at `w` and the rows of a tile at `x`: for each eight rows, for each tile, four sums."""
    bits, block, code_bytes, tile_bytes = packing.codes.bits, packing.block, packing.code_bytes, packing.tile_bytes
    eight, six = bits == 8, bits == 6
    mma = ptx.mma_e5m2_e4m3 if bits == 4 else ptx.mma_e4m3_e4m3
    fragment = None if eight else registers.fragment_of(bits)

    @lineless_device
    def start(lane, group):
        """In a tile of w: codes, scales; in a tile of x: inputs 32 b + 8 t .. of the lane's first row."""
        g, t = u32(lane >> 2), u32(lane & 3)
        row = u32((g & 3) * 2 + (g >> 2))
        mine = u32((group * GROUPS * 8 + row) * TILE + (t & 1) * 8)
        own = u32(g * 8 + (t & 1) * 4) if block == 32 else u32(g * 4)
        return (u32(lane * 16), u32(own + code_bytes), u32(mine + ((t >> 1) ^ row) * 16),
                u32(mine + ((2 + (t >> 1)) ^ row) * 16), u32(mine + ((4 + (t >> 1)) ^ row) * 16),
                u32(mine + ((6 + (t >> 1)) ^ row) * 16))

    @lineless_device
    def fragments(plane):
        """A tile's codes as bytes: four operands for each 32 inputs."""
        planes = tuple(ptx.shared_x4(u32(plane + p * 512)) for p in static_range(code_bytes // 512))
        if eight:
            return planes
        else:
            return tuple(fragment((planes[b // 2][b % 2 * 2], planes[b // 2][b % 2 * 2 + 1],
                                   planes[2][b] if six else u32(0))) for b in static_range(4))

    @lineless_device
    def sums(a, x, scales):
        """The products of one tile of w and eight rows of x, of 128 inputs."""
        c = (0.0, 0.0, 0.0, 0.0)
        for b in static_range(4):
            c = mma(a[b], x[b], c, scales, b, 0, u32(ONES), 0, 0)
        return c

    @lineless_device
    def eight_rows(a, scales, rows, j, acc):
        """acc + those of both tiles and the j-th eight rows."""
        x = tuple(ptx.shared_x2(u32(rows[b] + j * (8 * TILE))) for b in static_range(4))
        if block == 32:
            return tuple(added(sums(a[r], x, scales[r]), acc[r]) for r in static_range(TILES))
        else:
            return tuple(scaled(ptx.f32_bits(u32(scales[r] << 16)), ptx.f32_bits(scales[r] & 0xFFFF0000),
                                sums(a[r], x, u32(ONES)), acc[r]) for r in static_range(TILES))

    @lineless_device
    def multiply(places, w, x, acc):
        a = tuple(fragments(u32(w + places[0] + r * tile_bytes)) for r in static_range(TILES))
        scales = tuple(ptx.shared_u32(u32(w + places[1] + r * tile_bytes)) for r in static_range(TILES))
        rows = tuple(u32(x + places[2 + b]) for b in static_range(4))
        return tuple(eight_rows(a, scales, rows, j, acc[j]) for j in static_range(GROUPS))
    return start, multiply


@functools.cache
def build(packing, out_format, gated):
    """The kernel."""
    (start, multiply), store, unit = product(packing), store_pair(out_format), 1 / PLACED[packing.codes.bits]
    tile_bytes = packing.tile_bytes
    piece = packed.TILES * tile_bytes
    stage = piece + TILE_BYTES
    stages = (SHARED - 128) // stage
    bars_at = stages * stage

    @lineless_device
    def fetch(ring, bars, x, w, m_tiles, strips, deep, lane):
        """The fetching warp: all stages of all the block's outputs."""
        slot, parity, at = u32(0), u32(1), ptx.block_x()
        while at < m_tiles * strips:
            tile, strip = x + u64(at % m_tiles) * deep * TILE_BYTES, w + u64(at // m_tiles) * deep * piece
            for k in range(deep):
                full, to = u32(bars + slot * 8), u32(ring + slot * stage)
                wait(u32(full + stages * 8), parity)
                if lane == 0:
                    ptx.mbarrier_arrive_expect(full, u32(stage))
                    ptx.bulk_load(to, strip + u64(k) * piece, u32(piece), full)
                    ptx.bulk_load(u32(to + piece), tile + u64(k) * TILE_BYTES, u32(TILE_BYTES), full)
                slot = u32(slot + 1)
                if slot == stages:
                    slot, parity = u32(0), u32(parity ^ 1)
            at = u32(at + ptx.blocks_x())

    @lineless_device
    def row_of(lane, e):
        """The row of a warp's that sums e // 2, 2 * (e % 2) .. of a lane belong to: mma's column 2 t + e % 2."""
        return u32((lane & 1) * 4 + ((lane >> 1) & 1) + (e // 2 * 8 + e % 2 * 2))

    @lineless_device
    def write(acc, out, x_scale, tile, lane, first, rows, n, width):
        """Lane 4g + t has outputs 2g, 2g + 1 of each tile."""
        for e in static_range(2 * GROUPS):
            row = u32(first + row_of(lane, e))
            if row < rows:
                by = ptx.read_f32(x_scale + u64(row) * 4) * f32(unit)
                for r in static_range(TILES):
                    if (tile + r) * 16 < n:
                        four = acc[e // 2][r]
                        store(out, u64(row) * width + ((tile + r) * 16 + (lane >> 2) * 2), four[e % 2] * by,
                              four[e % 2 + 2] * by)

    @lineless_device
    def write_gated(acc, out, x_scale, tile, lane, first, rows, width):
        """The same of a gated product: the two tiles give 16 outputs."""
        for e in static_range(2 * GROUPS):
            row, (gate, up) = u32(first + row_of(lane, e)), acc[e // 2]
            if row < rows:
                by = ptx.read_f32(x_scale + u64(row) * 4) * f32(unit)
                store(out, u64(row) * width + (tile * 8 + (lane >> 2) * 2), silu(gate[e % 2] * by) * (up[e % 2] * by),
                      silu(gate[e % 2 + 2] * by) * (up[e % 2 + 2] * by))

    @lineless_device
    def walk(ring, bars, x_scale, out, m_tiles, strips, rows, n, width, deep, lane, warp):
        """A multiplying warp: its part of all the block's outputs."""
        slot, parity, at, part, group = u32(0), u32(0), ptx.block_x(), u32(warp % PARTS), u32(warp // PARTS)
        places = start(lane, group)
        while at < m_tiles * strips:
            acc = (((0.0, 0.0, 0.0, 0.0),) * TILES,) * GROUPS
            for _ in range(deep):
                full, here = u32(bars + slot * 8), u32(ring + slot * stage)
                wait(full, parity)
                acc = multiply(places, u32(here + part * (TILES * tile_bytes)), u32(here + piece), acc)
                arrive(u32(full + stages * 8), lane)
                slot = u32(slot + 1)
                if slot == stages:
                    slot, parity = u32(0), u32(parity ^ 1)
            first = u32(at % m_tiles * TILE + group * (GROUPS * 8))
            tile = u32(at // m_tiles * packed.TILES + part * TILES)
            if gated:
                write_gated(acc, out, x_scale, tile, lane, first, rows, width)
            else:
                write(acc, out, x_scale, tile, lane, first, rows, n, width)
            at = u32(at + ptx.blocks_x())

    @kernel(threads=THREADS, shared=bars_at + 16 * stages, whole=True)
    def gemm_sm120a(x: u64, x_scale: u64, w: u64, out: u64, rows: u32, n: u32, width: u32, deep: u32):
        lane, warp = ptx.lane(), u32(ptx.thread_x() // 32)
        ring = ptx.shared_address(cuda.shared.array(0, types.uint8))
        bars = u32(ring + bars_at)                                    # of full, then of empty
        m_tiles, strips = u32((rows + (TILE - 1)) // TILE), u32((n + (packed.STRIP - 1)) // packed.STRIP)
        make_barriers(bars, stages, 1, MULTIPLYING)
        ptx.wait_dependencies()
        if warp >= MULTIPLYING:
            registers_down(FEW)
            if warp == MULTIPLYING:
                fetch(ring, bars, x, w, m_tiles, strips, deep, lane)
        else:
            registers_up(MANY)
            walk(ring, bars, x_scale, out, m_tiles, strips, rows, n, width, deep, lane, warp)
    return gemm_sm120a


def launch(stream, x, x_scale, w, out, n, packing, blocks, gated=False):
    """Queue it on a stream; n: rows of w; blocks: the device's multiprocessors."""
    (rows, width), columns, deep = out.shape, n // 2 if gated else n, x.shape[1] if len(x.shape) == 4 else 0
    m_tiles = -(-rows // TILE)
    if n % (packed.STRIP if gated else packed.ROWS) or n < packed.ROWS or width < columns or width % 2 or blocks < 1:
        raise ValueError(f"out must be [M, W], W even and not below the outputs, n a positive multiple of {packed.ROWS}, of "
                         f"{packed.STRIP} if gated, blocks positive, got {tuple(out.shape)}, {n}, gated={gated}, {blocks}")
    if packing.block == 16:
        raise ValueError("gemm_sm120a takes scales for 32 or 128 inputs, got 16")
    for name, array, dtype, shape in (("x", x, np.uint8, (m_tiles, deep, TILE, TILE)),
                                      ("x_scale", x_scale, np.float32, (m_tiles * TILE,)),
                                      ("w", w, np.uint8, packing.shape(n, deep * TILE))):
        if tuple(array.shape) != shape or array.dtype != dtype:
            raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, got {array.dtype} {tuple(array.shape)}")
    made = build(packing, format_of("out", out, "f32", "f16", "bf16"), bool(gated))
    if rows:
        stream.launch(made, min(blocks, m_tiles * w.shape[0]), x, x_scale, w, out, rows, n, width, deep)


def ref(x, x_scale, w, out, n, packing, gated):
    """The formulas in float64."""
    rows = len(out)
    activations = numerics.E4M3.decode(packed.byte_order(gemm_sm90a.restore(x))).astype(np.float64) * x_scale[:, None]
    sums = activations[:rows] @ packed.decode(packing, w, n).astype(np.float64).T
    if not gated:
        return dict(out=sums)
    gate, up = (sums.reshape(rows, n // 32, 2, 16)[:, :, i].reshape(rows, n // 2) for i in range(2))
    return dict(out=gate / (1 + np.exp(-gate)) * up)


CASES = (
    dict(m=130, n=272, k=640, blocks=4),                               # ragged both ways; blocks of two tiles; five stages
    dict(m=70, n=128, k=256, packing="fp4", out="f16", blocks=2, gated=True),
    dict(m=1, n=16, k=128, packing="fp8", out="bf16"),                 # one
    dict(m=0, n=16, k=128, packing="fp8", out="bf16"),                 # empty
)


def make(rng, m=4096, n=5120, k=5120, packing="fp6", out="f16", blocks=170, gated=False):
    """Weights as gemv makes them, activations as gemm_sm90a does, smaller ones for a gated product."""
    given = make_gemv(rng, n, k, 1, packing, "f16", "f32")
    x = gemm_sm90a.make(rng, m, 8, k, gated=gated)
    return dict(x=x["x"], x_scale=x["x_scale"], w=given["w"], n=n, packing=given["packing"], blocks=blocks, gated=gated,
                out=np.empty((m, n // 2 if gated else n), {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[out]))


def cost(m=4096, n=5120, k=5120, packing="fp6", out="f16", blocks=170, gated=False):
    """Bytes that must move, and float operations."""
    written = m * n // (2 if gated else 1) * (4 if out == "f32" else 2)
    return dict(bytes=m * (k + 4) + int(np.prod(PACKINGS[packing].shape(n, k))) + written if m else 0, flops=2 * m * n * k)
