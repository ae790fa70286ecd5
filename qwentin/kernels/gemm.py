"""gemm: a packed weight matrix times many rows of activations, for prefill, on 16-bit matrix instructions: on any chip.

    out[m, n] = sum over k of x[m, k] * w[n, k]        w[n, k] = code * scale (* alpha of the row's tile, nvfp4)
    gated (packed.interleave):  out[m, f] = silu(gate) * up,  the two sums of x with row f of either matrix

    w      u8 [N / 128, K / 128, 8, tile_bytes]       packed.py draws it; any codes with any block
    x      f16 or bf16 (u16) [M, K]                   any M; bf16 below 2^31 in size
    alpha  f32 [N / 16]                               block 16 only: one factor for each 16 outputs
    out    f32, f16 or bf16 (u16) [M, W]              N a multiple of 16, W even; columns 0 .. N - 1 are written
                                                      gated: N a multiple of 128, columns 0 .. N / 2 - 1

A block makes 128 x 64 outputs: a strip of w times 64 rows of x. A warp takes two tiles of w and 32 of the rows, with gemv's
product: so a weight is unpacked four times for 128 rows, each time in one and a half operations.

    warp     0     1     2     3     4     5     6     7
    tiles   0 1   2 3   4 5   6 7   0 1   2 3   4 5   6 7
    rows    0 .. 31                 32 .. 63

A stage is a piece of w (12.5 KB of fp6) and 128 inputs of 64 rows (16 KB): three of them fill what every chip gives a
block, so that the copies (cp.async) of two run while one is multiplied. Blocks that share a strip are neighbours.
"""
import functools

import numpy as np
from numba import cuda
from numba.cuda import types

from .. import numerics
from . import packed, ptx
from .activation import silu
from .build import kernel, lineless_device
from .gemv import check_alpha, product, unit_of
from .gemv import cost as gemv_cost
from .gemv import make as make_gemv
from .octet import format_of
from .parity import Output, real
from .ptx import f32, u32, u64
from .strips import TILES, store_pair
from .unroll import static_range

HALVES = 2                            # warps that share two tiles of w, each with its part of the rows
GROUPS = 4                            # of 8 rows, of a warp: with eight there are too few registers where sums are scaled
OF_WARP = 8 * GROUPS
ROWS = OF_WARP * HALVES               # of x in a block
X_BYTES = ROWS * 256                  # 128 inputs of the rows of x, 16 bits each
PARTS = packed.TILES // TILES
THREADS = 32 * PARTS * HALVES
STAGES = 3
REGISTERS = 255
SASS = {"sm_90a": ("HMMA.16816.F32", "LDGSTS.E.BYPASS.LTC128B.128"),
        "sm_120a": ("HMMA.16816.F32", "LDGSTS.E.BYPASS.LTC128B.128")}
# gemv's own derivations: plain 2^-20 and 2^-12; gated, whose sums are smaller, 2^-16 and 2^-14 (gemv_glu.py).
OUTPUTS = {"out": Output(rtol=2.0 ** -16, atol=2.0 ** -12)}


@functools.cache
def build(packing, x_format, out_format, gated):
    """The kernel."""
    half, store, micro = x_format == "f16", store_pair(out_format), packing.block == 16
    start, multiply = product(packing, GROUPS, half)
    unit, tile_bytes = unit_of(packing, half), packing.tile_bytes
    piece = packed.TILES * tile_bytes
    stage = piece + X_BYTES
    whole, rest = piece // 16 // THREADS, piece // 16 % THREADS

    @lineless_device
    def fetch(to, w, x, first, rows, deep, k, thread):
        """Piece k of w and inputs 128 k .. of the rows, where gemv.fetch_x says; zeros for rows that are not there."""
        if k < deep:
            source = w + u64(k) * piece
            for i in static_range(whole):
                ptx.copy_16(u32(to + (i * THREADS + thread) * 16), source + (i * THREADS + thread) * 16)
            if thread < rest:
                ptx.copy_16(u32(to + (whole * THREADS + thread) * 16), source + (whole * THREADS + thread) * 16)
            row, part = u32(thread // 16), u32(thread % 16)
            place = u32(to + piece + row * 256 + (part ^ ((row & 1) << 2)) * 16)
            source = x + (u64(first + row) * deep + k) * 256 + part * 16
            for i in static_range(ROWS // (THREADS // 16)):
                there = first + row + i * (THREADS // 16) < rows
                ptx.copy_16_zfill(u32(place + i * (THREADS * 16)), source if there else x, u32(16) if there else u32(0))
                source += u64(deep) * (256 * (THREADS // 16))
        ptx.copy_commit()

    @lineless_device
    def factor(alpha, tile):
        if micro:
            return f32(unit) * ptx.load_f32(alpha + u64(tile) * 4)
        else:
            return f32(unit)

    @lineless_device
    def write(acc, out, alpha, tile, lane, first, rows, n, width):
        """Lane 4g + t has outputs 2g, 2g + 1 of each tile and rows first + 8j + 2t, first + 8j + 2t + 1."""
        for r in static_range(TILES):
            if (tile + r) * 16 < n:
                by = factor(alpha, u32(tile + r))
                for e in static_range(2 * GROUPS):
                    row, four = u32(first + (lane & 3) * 2 + (e // 2 * 8 + e % 2)), acc[r * GROUPS + e // 2]
                    if row < rows:
                        store(out, u64(row) * width + ((tile + r) * 16 + (lane >> 2) * 2), four[e % 2] * by,
                              four[e % 2 + 2] * by)

    @lineless_device
    def write_gated(acc, out, alpha, tile, lane, first, rows, width):
        """The same of a gated product: the two tiles give 16 outputs."""
        gate_by, up_by = factor(alpha, tile), factor(alpha, u32(tile + 1))
        for e in static_range(2 * GROUPS):
            row, gate, up = u32(first + (lane & 3) * 2 + (e // 2 * 8 + e % 2)), acc[e // 2], acc[GROUPS + e // 2]
            if row < rows:
                store(out, u64(row) * width + (tile * 8 + (lane >> 2) * 2),
                      silu(gate[e % 2] * gate_by) * (up[e % 2] * up_by),
                      silu(gate[e % 2 + 2] * gate_by) * (up[e % 2 + 2] * up_by))

    @kernel(threads=THREADS, shared=STAGES * stage)
    def gemm(w: u64, x: u64, alpha: u64, out: u64, rows: u32, n: u32, width: u32, deep: u32):
        lane, warp, thread = ptx.lane(), u32(ptx.thread_x() // 32), ptx.thread_x()
        ring = ptx.shared_address(cuda.shared.array(0, types.uint8))
        first, strip, part, group = u32(ptx.block_x() * ROWS), ptx.block_y(), u32(warp % PARTS), u32(warp // PARTS)
        mine = w + u64(strip) * deep * piece
        acc, slot = ((0.0, 0.0, 0.0, 0.0),) * (TILES * GROUPS), u32(0)
        places = start(u32(ring + part * (TILES * tile_bytes)), u32(ring + piece + group * (OF_WARP * 256)), lane)
        for k in static_range(STAGES - 1):
            fetch(u32(ring + k * stage), mine, x, first, rows, deep, u32(k), thread)
        for k in range(deep):
            ptx.copy_wait(STAGES - 2)
            ptx.barrier()                                            # this stage is there, and all have left the one before
            before = u32(STAGES - 1) if slot == 0 else u32(slot - 1)
            fetch(u32(ring + before * stage), mine, x, first, rows, deep, u32(k + (STAGES - 1)), thread)
            here = u32(slot * stage)
            acc = multiply(places, here, here, acc)
            slot = u32(0) if slot == STAGES - 1 else u32(slot + 1)
        first, tile = u32(first + group * OF_WARP), u32(strip * packed.TILES + part * TILES)
        if gated:
            write_gated(acc, out, alpha, tile, lane, first, rows, width)
        else:
            write(acc, out, alpha, tile, lane, first, rows, n, width)
    return gemm


def launch(stream, w, x, out, n, packing, alpha=None, gated=False):
    """Queue it on a stream; n: rows of w."""
    rows, k = x.shape
    columns = n // 2 if gated else n
    if n % (packed.STRIP if gated else 16) or n < 16:
        raise ValueError(f"gemm takes a positive multiple of 16 outputs, of {packed.STRIP} if gated, got {n}")
    if len(out.shape) != 2 or out.shape[0] != rows or out.shape[1] < columns or out.shape[1] % 2:
        raise ValueError(f"out must have shape [{rows}, W] with W even and at least {columns}, got {tuple(out.shape)}")
    if tuple(w.shape) != packing.shape(n, k) or w.dtype != np.uint8:
        raise ValueError(f"w must be u8 {packing.shape(n, k)} for {n} x {k} {packing.name}, "
                         f"got {w.dtype} {tuple(w.shape)}")
    check_alpha(alpha, n, packing)
    made = build(packing, format_of("x", x, "f16", "bf16"), format_of("out", out, "f32", "f16", "bf16"), bool(gated))
    if rows:
        stream.launch(made, (-(-rows // ROWS), w.shape[0], 1), w, x, 0 if alpha is None else alpha, out, rows, n,
                      out.shape[1], k // packed.DEPTH)


def ref(w, x, n, packing, alpha, gated):
    """The formulas in float64."""
    weights = packed.decode(packing, w, n).astype(np.float64)
    if packing.block == 16:
        weights *= np.repeat(alpha, 16)[:, None]
    sums = real(x) @ weights.T
    if not gated:
        return dict(out=sums)
    gate, up = (sums.reshape(len(x), n // 32, 2, 16)[:, :, i].reshape(len(x), n // 2) for i in range(2))
    return dict(out=gate / (1 + np.exp(-gate)) * up)


CASES = (
    dict(n=144, k=640, rows=70, x="bf16", out="bf16"),                   # ragged both ways; more pieces than stages
    dict(n=128, k=256, rows=33, packing="nvfp4", gated=True),
    dict(n=16, k=128, rows=1, x="bf16", out="bf16"),                     # one
    dict(n=128, k=128, rows=0, x="bf16", out="bf16"),                    # empty
)


def make(rng, n=34816, k=5120, rows=4096, packing="fp6", x="f16", out="f16", gated=False):
    """As gemv makes them; gated: activations smaller by 2 sqrt(K), so that gate and up are about one."""
    given = make_gemv(rng, n, k, rows, packing, "f16", "f32")
    values = given["x"].astype(np.float32) * np.float32(0.5 * k ** -0.5 if gated else 1)
    return dict({name: given[name] for name in ("w", "n", "packing", "alpha")}, gated=gated,
                x=values.astype(np.float16) if x == "f16" else numerics.encode_bf16(values),
                out=np.empty((rows, n // 2 if gated else n), {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[out]))


def cost(n=34816, k=5120, rows=4096, packing="fp6", x="f16", out="f16", gated=False):
    """Bytes that must move, and float operations."""
    whole = gemv_cost(n, k, rows, packing, x, out)
    return dict(bytes=whole["bytes"] - (rows * n // 2 * (4 if out == "f32" else 2) if gated else 0), flops=whole["flops"])
