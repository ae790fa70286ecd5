"""gemv_sm120a: gemv on block-scaled 8-bit matrix instructions: activations in e4m3, scales applied by the instruction.

    out[m, n] = sum over k of x[m, k] * x_scale[m, k / 32] * w[n, k]            w[n, k] = code * scale

    w        u8 [N / 128, K / 128, 8, tile_bytes]     packed.py draws it; e2m3, e2m1 or e4m3, block 32 or 128
    x        u8 [M, K]                                e4m3 in byte order (packed.byte_order), no NaN; M <= 32
    x_scale  u8 [M, K / 32]                           ue8m0, no NaN
    out      f32, f16 or bf16 (u16) [M, W]            N a multiple of 16, W even; columns 0 .. N - 1 are written
    work     u32, of strips.workspace(M, blocks)      as every launch leaves it

The walk is that of gemv (strips.py). mma m16n8k32 takes codes one a byte, so 32 inputs of 16 rows are four registers of
bytes (registers.py): e2m3 as e4m3, the value times 2^-6; e2m1 as e5m2, the value times 2^-14. It multiplies each row's and
each column's 32 products by their two scales, powers of two, before it adds:

    block 32   the row's scale is the weights' own; sums run on from piece to piece
    block 128  the row's scale is 1; after four steps the sum of 128 inputs is multiplied by the bf16 scale and added

Which lane brings a scale (ptx_matrix.py): of row 2g + r lane 4g + r, of column g lane 4g; the byte is the step b.
"""
import functools

import numpy as np

from .. import numerics
from . import packed, ptx, registers, strips
from .build import lineless_device
from .gemv import checked, scaled
from .gemv import make as make_gemv
from .octet import format_of
from .packed import Packing
from .parity import Output
from .ptx import u32, u64
from .strips import TILES
from .unroll import static_range

ONES = 0x7F7F7F7F                     # four ue8m0 scales of 1
PLACED = {8: 1.0, 6: 2.0 ** -6, 4: 2.0 ** -14}       # what a code is multiplied by where it stands for an e4m3 or e5m2 byte
REGISTERS = 224
SASS = {"sm_120a": ("QMMA.SF.16832.F32", "LDGSTS", "SYNCS")}


@functools.cache
def fetch_x(row_groups):
    """strips.build's device function: rows of 128 e4m3 inputs, then a word of four scales for each row.

    A row is four chunks of 32 bytes; chunk b of row r lies at b ^ r % 4, so that the four rows that 16 lanes read at
    once lie in different banks. Rows that are not there are zeros under row 0's scales.
    """
    @lineless_device
    def fetch(to, x, x_scales, lane, rows, deep, k):
        row, piece = u32(lane >> 3), u32(lane & 7)
        source = x + (u64(row) * deep + k) * 128 + piece * 16
        place = u32(to + row * 128 + ((piece >> 1) ^ (row & 3)) * 32 + (piece & 1) * 16)
        for i in static_range(2 * row_groups):                   # four rows a turn
            there = row + 4 * i < rows
            ptx.copy_16_zfill(u32(place + i * 512), source if there else x, u32(16) if there else u32(0))
            source += u64(deep) * 512
        if lane < 8 * row_groups:
            ptx.copy_4(u32(to + (1024 * row_groups) + lane * 4),
                       x_scales + (u64(lane if lane < rows else u32(0)) * deep + k) * 4)
    return fetch


@functools.cache
def product(packing, row_groups):
    """strips.build's device functions: two tiles times the activations of 128 inputs."""
    bits, block, code_bytes, tile_bytes = packing.codes.bits, packing.block, packing.code_bytes, packing.tile_bytes
    sums, eight, six = TILES * row_groups, bits == 8, bits == 6
    mma = ptx.mma_e5m2_e4m3 if bits == 4 else ptx.mma_e4m3_e4m3
    fragment = None if eight else registers.fragment_of(bits)

    @lineless_device
    def start(tile, x, lane):
        """Codes, scales of rows, x and its scales."""
        g, t = u32(lane >> 2), u32(lane & 3)
        own = u32(g * 8 + (t & 1) * 4) if block == 32 else u32(g * 4)
        return (u32(tile + lane * 16), u32(tile + code_bytes + own), u32(x + g * 128 + t * 8),
                u32(x + 1024 * row_groups + g * 4))

    @lineless_device
    def multiply(here, tile, x, acc):
        plane, scales, x_lane, x_scale = u32(here[0] + tile), u32(here[1] + tile), u32(here[2] + x), u32(here[3] + x)
        g = u32(ptx.lane() >> 2)
        c = acc if block == 32 else ((0.0, 0.0, 0.0, 0.0),) * sums
        column = tuple(ptx.shared_u32(u32(x_scale + j * 32)) for j in static_range(row_groups))
        if block == 32:
            row = tuple(ptx.shared_u32(u32(scales + r * tile_bytes)) for r in static_range(TILES))
        else:
            row = (u32(ONES),) * TILES
        if six:
            highs = tuple(ptx.shared_x4(u32(plane + (r * tile_bytes + 1024))) for r in static_range(TILES))
        for b in static_range(4):
            if eight:
                words = tuple(ptx.shared_x4(u32(plane + (r * tile_bytes + b * 512))) for r in static_range(TILES))
            elif b % 2 == 0:
                words = tuple(ptx.shared_x4(u32(plane + (r * tile_bytes + b * 256))) for r in static_range(TILES))
            xs = tuple(ptx.shared_x2(u32(x_lane + ((b ^ (g & 3)) * 32) + j * 1024)) for j in static_range(row_groups))
            a = words
            if not eight:
                a = tuple(fragment((words[e][b % 2 * 2], words[e][b % 2 * 2 + 1], highs[e][b] if six else u32(0)))
                          for e in static_range(TILES))
            c = tuple(mma(a[e // row_groups], xs[e % row_groups], c[e], row[e // row_groups], b, 0,
                          column[e % row_groups], b, 0) for e in static_range(sums))
        if block == 32:
            return c
        pair = tuple(ptx.shared_u32(u32(scales + r * tile_bytes)) for r in static_range(TILES))
        return tuple(scaled(ptx.f32_bits(u32(pair[e // row_groups] << 16)),
                            ptx.f32_bits(pair[e // row_groups] & 0xFFFF0000), c[e], acc[e]) for e in static_range(sums))
    return start, multiply


@functools.cache
def build(packing, row_groups, out_format, bulk, depth):
    """The kernel; row_groups: 1, 2 or 4 times 8 activation rows; depth: stages of the ring."""
    return strips.build("gemv_sm120a", packing, row_groups, row_groups * 1056, fetch_x(row_groups),
                        product(packing, row_groups), 1 / PLACED[packing.codes.bits], out_format, bulk, depth)


def launch(stream, w, x, x_scale, out, work, n, packing, blocks, dependent=None, shared=strips.SHARED):
    """Queue it on a stream; the arguments are gemv's, with block 32 or 128."""
    rows, k = checked("gemv_sm120a", w, x, out, work, n, n, packing, blocks)
    if packing.block == 16:
        raise ValueError("gemv_sm120a takes scales for 32 or 128 inputs, got 16")
    if x.dtype != np.uint8:
        raise ValueError(f"x must be e4m3 codes in uint8, got {x.dtype}")
    if tuple(x_scale.shape) != (rows, k // 32) or x_scale.dtype != np.uint8:
        raise ValueError(f"x_scale must be u8 {(rows, k // 32)}, got {x_scale.dtype} {tuple(x_scale.shape)}")
    groups = strips.groups_of(rows)
    made = build(packing, groups, format_of("out", out, "f32", "f16", "bf16"), True,
                 strips.depth_for(packing, groups, 1056 * groups, shared))
    strips.queue(stream, made, w, x, x_scale, 0, out, work, rows, n, k, blocks, dependent)


# As in gemv; the instruction's own sums run over 32 inputs, and without a block's scale over all of a strip.
OUTPUTS = {"out": Output(rtol=2.0 ** -20, atol=2.0 ** -12), "work": Output(exact=True)}
PACKINGS = {"fp6": packed.FP6, "fp4": packed.FP4, "fp8": packed.FP8, "fp6-32": Packing("fp6", numerics.E2M3, 32)}


def ref(w, x, x_scale, work, n, packing):
    """The sum in float64; work as it was."""
    activations = numerics.E4M3.decode(packed.byte_order(x)).astype(np.float64)
    activations *= np.repeat(numerics.decode_ue8m0(x_scale), 32, axis=1)
    return dict(out=activations @ packed.decode(packing, w, n).astype(np.float64).T, work=work)


CASES = (
    dict(n=256, k=5120, rows=1, blocks=3),                               # 27B's inputs; strips shared by blocks
    dict(n=272, k=640, rows=16, blocks=2, packing="fp6-32"),             # ragged: a strip of one tile, 5 pieces a strip
    dict(n=144, k=384, rows=29, blocks=3, packing="fp4", out="bf16"),
    dict(n=128, k=256, rows=3, blocks=1, packing="fp8"),
    dict(n=16, k=128, rows=1, blocks=170),                               # one
    dict(n=128, k=128, rows=0, blocks=170),                              # empty
)


def make(rng, n=34816, k=5120, rows=1, packing="fp6", out="f32", blocks=170):
    """Weights as gemv makes them; activations normal, quantised in 32s by powers of two."""
    given = make_gemv(rng, n, k, rows, packing, "f16", out, blocks)
    x = given.pop("x").astype(np.float32).reshape(rows, k // 32, 32)
    scale = numerics.encode_ue8m0(np.abs(x).max(-1, initial=2.0 ** -100) / np.float32(256))
    codes = numerics.E4M3.encode(x / numerics.decode_ue8m0(scale)[..., None]).reshape(rows, k)
    for name in ("alpha", "bulk"):
        del given[name]
    return dict(given, x=packed.byte_order(codes), x_scale=scale)


def cost(n=34816, k=5120, rows=1, packing="fp6", out="f32", blocks=170):
    """Bytes that must move, and float operations."""
    weights = int(np.prod(PACKINGS[packing].shape(n, k)))
    return dict(bytes=weights + rows * (k + k // 32 + n * (4 if out == "f32" else 2)), flops=2 * n * k * rows)
