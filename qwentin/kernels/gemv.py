"""gemv: a packed weight matrix times 1 to 32 rows of activations, for decode and verify, on 16-bit matrix instructions.

    out[m, n] = sum over k of x[m, k] * w[n, k]        w[n, k] = code * scale (* alpha of the row's tile, nvfp4)

    w      u8 [N / 128, K / 128, 8, tile_bytes]       packed.py draws it; any codes with any block
    x      f16 or bf16 (u16) [M, K]                   M <= 32; bf16 below 2^31 in size
    alpha  f32 [N / 16]                               block 16 only: one factor for each 16 outputs
    out    f32, f16 or bf16 (u16) [M, W]              N a multiple of 16, W even; columns 0 .. N - 1 are written
    work   u32, of strips.workspace(M, blocks)        as every launch leaves it
    squares  f32, folded_norm.shape(groups, K)        or None: x is what gemv_residual left, and out[m] is multiplied by
                                                      2^6 rsqrt(sum of m's squares / K + eps)

The weights are nearly all the traffic, and each is read once; strips.py says by whom. What is left to do for a weight is
arithmetic: a mask and about one shift make a register of two f16 weights out of packed words (spread.py), each exactly the
weight times a power of two, and mma m16n8k16 multiplies 16 rows of weights with 8 rows of x, products exact, sums float32:

    block 128  the sum of 128 inputs is scaled and added     block 32  the same for 32 inputs
    block 16   the weights are multiplied by their scale first: exact, as 2 + 4 bits of mantissa fit in bf16's 8 (f16: sm_89)

In bf16 a code is its value times 2^-126. So that products stay in float32's range, x is multiplied by 2^96.
A row's result does not depend on how many rows go with it, as long as the blocks are as many.
"""
import functools
import math

import numpy as np

from .. import numerics
from . import folded_norm, packed, ptx, registers, strips
from .build import lineless_device
from .octet import format_of
from .packed import Packing
from .parity import Output
from .ptx import u32, u64
from .strips import TILES
from .unroll import static_range

X_BITS = 96                           # what bf16 activations are raised by
TWO_96, TWO_127, MINUS_ZERO = 0x6F806F80, 0x7F007F00, 0x80008000         # bf16, twice
SIGN = 0x80008000
SMALLEST = 0x00400000                                                    # bits of 2^-127
REGISTERS = 224
SASS = {"sm_90a": ("HMMA.16816.F32", "LDGSTS.E.BYPASS.LTC128B.128", "SYNCS"),
        "sm_120a": ("HMMA.16816.F32", "LDGSTS.E.BYPASS.LTC128B.128", "SYNCS")}


@lineless_device
def scaled(even, odd, c, acc):
    """acc + scale * c: the first two sums belong to a tile's even row 2g, the others to 2g + 1."""
    return (ptx.fma(even, c[0], acc[0]), ptx.fma(even, c[1], acc[1]), ptx.fma(odd, c[2], acc[2]),
            ptx.fma(odd, c[3], acc[3]))


@functools.cache
def fetch_x(row_groups):
    """strips.build's device function: rows of 128 16-bit inputs, zeros for those that are not there.

    A row is 16 pieces of 16 bytes. Piece c of row r lies at c ^ 4 (r % 2), so that the two rows that eight lanes read
    at once lie in different banks.
    """
    @lineless_device
    def fetch(to, x, x_scales, lane, rows, deep, k):
        row, piece = u32(lane >> 4), u32(lane & 15)
        source = x + (u64(row) * deep + k) * 256 + piece * 16
        to = u32(to + row * 256 + (piece ^ (row << 2)) * 16)
        for i in static_range(4 * row_groups):                   # two rows a turn
            there = row + 2 * i < rows
            ptx.copy_16_zfill(u32(to + i * 512), source if there else x, u32(16) if there else u32(0))
            source += u64(deep) * 512
    return fetch


@functools.cache
def product(packing, row_groups, half):
    """strips.build's device functions: two tiles times the activations of 128 inputs. half: f16, else bf16."""
    bits, block, code_bytes, tile_bytes = packing.codes.bits, packing.block, packing.code_bytes, packing.tile_bytes
    sums, six, eight = TILES * row_groups, bits == 6, bits == 8
    mma = ptx.mma_f16 if half else ptx.mma_bf16
    low = (10 if half else 7) - packing.codes.mantissa           # where a code's lowest bit goes: exponents must meet
    magnitude = (1 << bits - 1) - 1 << low
    magnitude |= magnitude << 16

    def eights(s):
        """Device function: words (s, r) of e4m3 codes -> the mma's registers. A pair is bytes 0 and 2, or 1 and 3."""
        @lineless_device
        def made(words):
            return tuple(((u32(words[s * 2 + i % 2] << low) if i < 2 else words[s * 2 + i % 2] >> (8 - low)) & magnitude)
                         | (u32(words[s * 2 + i % 2] << (8 - i // 2 * 8)) & SIGN) for i in static_range(4))
        return made

    @lineless_device
    def bf16_of(a):
        """A narrow code's f16 register as bf16."""
        return (a & SIGN) | ((a >> 3) & magnitude)

    first, second = (eights(s) if eight else
                     registers.registers_of(bits, tuple(i % 2 * 4 + s * 2 + i // 2 for i in range(4))) for s in (0, 1))

    @lineless_device
    def raised(x):
        """Four words of bf16 activations times 2^96."""
        return tuple(ptx.fma_bf16x2(x[i], TWO_96, MINUS_ZERO) for i in static_range(4))

    @lineless_device
    def times(a, scale):
        """bf16 weights times a scale that both of a register's halves share (block 16)."""
        return ptx.fma_bf16x2(a, scale, MINUS_ZERO)

    @lineless_device
    def micro_pairs(words):
        """f16: the eight e4m3 codes of a lane."""
        return (ptx.f16x2_e4m3x2_low(words[0]), ptx.f16x2_e4m3x2_high(words[0]),
                ptx.f16x2_e4m3x2_low(words[1]), ptx.f16x2_e4m3x2_high(words[1]))

    @lineless_device
    def micro_scale(word, at):
        """The e4m3 code at bit `at` as two bf16 times 2^7."""
        code = (word >> at) & 0xFF
        return ptx.fma_bf16x2(((code * 0x00100010) & 0x07F007F0) | ((code * 0x01000100) & SIGN), TWO_127, MINUS_ZERO)

    @lineless_device
    def start(tile, x, lane):
        """Codes, scales, x of even b and of odd b: fetch_x's swizzle."""
        g, t, odd = u32(lane >> 2), u32(lane & 3), u32((lane >> 2) & 1)
        own = u32(g * 4) if block == 128 else u32(g * 8) if block == 32 else u32(g * 16 + (t >> 1) * 8)
        x_lane = u32(x + g * 256 + t * 16)
        return u32(tile + lane * 16), u32(tile + code_bytes + own), u32(x_lane + odd * 64), u32(x_lane + (1 - odd) * 64)

    @lineless_device
    def multiply(here, tile, x, acc):
        plane, scales, x_even, x_odd = u32(here[0] + tile), u32(here[1] + tile), u32(here[2] + x), u32(here[3] + x)
        c = acc if block == 16 else ((0.0, 0.0, 0.0, 0.0),) * sums
        if six:
            highs = tuple(ptx.shared_x4(u32(plane + (r * tile_bytes + 1024))) for r in static_range(TILES))
        if block == 128:
            pair = tuple(ptx.shared_u32(u32(scales + r * tile_bytes)) for r in static_range(TILES))
        elif block == 32:
            pairs = tuple(ptx.shared_x2(u32(scales + r * tile_bytes)) for r in static_range(TILES))
        else:
            micro = tuple(ptx.shared_x2(u32(scales + r * tile_bytes)) for r in static_range(TILES))
            if half:
                micro = tuple(micro_pairs(micro[r]) for r in static_range(TILES))
        for b in static_range(4):
            if eight:
                words = tuple(ptx.shared_x4(u32(plane + (r * tile_bytes + b * 512))) for r in static_range(TILES))
            elif b % 2 == 0:
                words = tuple(ptx.shared_x4(u32(plane + (r * tile_bytes + b * 256))) for r in static_range(TILES))
            xs = tuple(ptx.shared_x4(u32((x_odd if b % 2 else x_even) + (b // 2 * 128 + j * 2048)))
                       for j in static_range(row_groups))
            if not half:
                xs = tuple(raised(xs[j]) for j in static_range(row_groups))
            if eight:
                group = words
            elif six:
                group = tuple((words[e][b % 2 * 2], words[e][b % 2 * 2 + 1], highs[e][b]) for e in static_range(TILES))
            else:
                group = tuple((words[e][b % 2 * 2], words[e][b % 2 * 2 + 1]) for e in static_range(TILES))
            for s in static_range(2):
                for r in static_range(TILES):
                    a = first(group[r]) if s == 0 else second(group[r])
                    if not half and not eight:
                        a = tuple(bf16_of(a[i]) for i in static_range(4))
                    if block == 16 and half and b % 2:
                        a = tuple(ptx.mul_f16x2_high(a[i], micro[r][i % 2 * 2 + b // 2]) for i in static_range(4))
                    elif block == 16 and half:
                        a = tuple(ptx.mul_f16x2_low(a[i], micro[r][i % 2 * 2 + b // 2]) for i in static_range(4))
                    elif block == 16:
                        a = tuple(times(a[i], micro_scale(micro[r][i % 2], 8 * b)) for i in static_range(4))
                    c = tuple(mma(a, (xs[e % row_groups][2 * s], xs[e % row_groups][2 * s + 1]), c[e])
                              if e // row_groups == r else c[e] for e in static_range(sums))
            if block == 32:
                acc = tuple(scaled(ptx.f32_bits(max(u32((pairs[e // row_groups][0] >> (8 * b) & 0xFF) << 23), SMALLEST)),
                                   ptx.f32_bits(max(u32((pairs[e // row_groups][1] >> (8 * b) & 0xFF) << 23), SMALLEST)),
                                   c[e], acc[e]) for e in static_range(sums))
                c = ((0.0, 0.0, 0.0, 0.0),) * sums
        if block == 128:
            acc = tuple(scaled(ptx.f32_bits(u32(pair[e // row_groups] << 16)),
                               ptx.f32_bits(pair[e // row_groups] & 0xFFFF0000), c[e], acc[e])
                        for e in static_range(sums))
        return c if block == 16 else acc
    return start, multiply


@functools.cache
def build(packing, row_groups, x_format, out_format, bulk, depth, normed=0):
    """The kernel; row_groups: 1, 2 or 4 times 8 activation rows; depth: stages of the ring; normed: strips.build's."""
    half = x_format == "f16"
    return strips.build("gemv", packing, row_groups, row_groups * 2048, fetch_x(row_groups),
                        product(packing, row_groups, half), unit_of(packing, half), out_format, bulk, depth,
                        normed=normed)


def unit_of(packing, half):
    """The power of two between the sums of `product` and the numbers they stand for."""
    raised = 0 if half else X_BITS + (7 if packing.block == 16 else 0)
    return 2.0 ** ((15 if half else 127) - packing.codes.bias - raised)


def launch(stream, w, x, out, work, n, packing, blocks, alpha=None, bulk=True, dependent=None,
           shared=strips.SHARED, squares=None, eps=0.0):
    """Queue it on a stream.

    packing   a packed.Packing: what w holds
    blocks    how many share the work, all resident at once: the device's multiprocessors
    bulk      False for devices before sm_90
    dependent False: wait for the previous kernel before anything; else weights are fetched while it ends (sm_90 and up)
    shared    bytes of shared memory a block may have: the more stages fit
    """
    rows, k = checked("gemv", w, x, out, work, n, n, packing, blocks)
    check_alpha(alpha, n, packing)
    groups, normed = strips.groups_of(rows), 0 if squares is None else k // packed.DEPTH
    if normed:
        folded_norm.check("gemv", squares, groups, k)
    made = build(packing, groups, format_of("x", x, "f16", "bf16"), format_of("out", out, "f32", "f16", "bf16"), bulk,
                 strips.depth_for(packing, groups, 2048 * groups, shared), normed)
    strips.queue(stream, made, w, x, 0, 0 if alpha is None else alpha, out, work, rows, n, k, blocks, dependent,
                 squares if normed else 0, eps)


def check_alpha(alpha, n, packing):
    """ValueError unless it is what a packing with block 16 wants."""
    if packing.block == 16 and (alpha is None or alpha.shape != (n // 16,) or alpha.dtype != np.float32):
        raise ValueError(f"alpha must be f32 {(n // 16,)} for {packing.name}, got "
                         f"{None if alpha is None else (alpha.dtype, tuple(alpha.shape))}")


def checked(name, w, x, out, work, n, columns, packing, blocks):
    """(rows, k) of a launch that writes so many columns, or ValueError."""
    rows, k = x.shape
    if rows > strips.MAX_ROWS or n % 16 or n < 16:
        raise ValueError(f"{name} takes up to {strips.MAX_ROWS} rows and a positive multiple of 16 outputs, "
                         f"got {rows} and {n}")
    if len(out.shape) != 2 or out.shape[0] != rows or out.shape[1] < columns or out.shape[1] % 2:
        raise ValueError(f"out must have shape [{rows}, W] with W even and at least {columns}, got {tuple(out.shape)}")
    if tuple(w.shape) != packing.shape(n, k) or w.dtype != np.uint8:
        raise ValueError(f"w must be u8 {packing.shape(n, k)} for {n} x {k} {packing.name}, "
                         f"got {w.dtype} {tuple(w.shape)}")
    pieces = w.shape[0] * w.shape[1]
    if blocks < 1 or pieces * min(blocks, pieces) >= 1 << 32:
        raise ValueError(f"blocks must be positive and, times {pieces} pieces, below 2^32, got {blocks}")
    wanted = strips.workspace(rows, min(blocks, pieces)).size
    if work.dtype != np.uint32 or math.prod(work.shape) < wanted:
        raise ValueError(f"work must be u32 of at least {wanted} words, got {work.dtype} {tuple(work.shape)}")
    return rows, k


# Products are exact. Eight times in 128 inputs an mma truncates a float32 sum, by 2^-23 of it at most: together 2^-20 of
# it. Where such sums cancel, what is left is K / 128 of these errors with random signs: in make's units a sum of 128 inputs
# is about 14, so sqrt(136 * 8) * 14 * 2^-24 = 2^-15 at 27B's largest K, and 2^-12 is nine standard deviations. A row's
# factor, below one in make's units, errs by half of its squares' 14 roundings, 2^-22.9 of rsqrt and four roundings more:
# 2^-20.
OUTPUTS = {"out": Output(rtol=2.0 ** -19, atol=2.0 ** -12), "work": Output(exact=True)}
PACKINGS = {"fp6": packed.FP6, "fp4": packed.FP4, "fp8": packed.FP8, "nvfp4": packed.NVFP4,
            "fp6-32": Packing("fp6", numerics.E2M3, 32), "fp4-128": Packing("fp4", numerics.E2M1, 128)}


def ref(w, x, work, n, packing, alpha, squares=None, eps=0.0):
    """The sum in float64; work as it was."""
    weights = packed.decode(packing, w, n).astype(np.float64)
    if packing.block == 16:
        weights *= np.repeat(alpha, 16)[:, None]
    activations = numerics.decode_bf16(x) if x.dtype == np.uint16 else x
    out = activations.astype(np.float64) @ weights.T
    if squares is not None:
        out *= folded_norm.factors_ref(squares, strips.groups_of(len(x)), x.shape[1], eps)[:len(x), None]
    return dict(out=out, work=work)


CASES = (
    dict(n=256, k=5120, rows=1, blocks=3),                               # 27B's inputs; strips shared by blocks
    dict(n=272, k=640, rows=16, blocks=2),                               # ragged: a strip of one tile, 5 pieces a strip
    dict(n=128, k=384, rows=29, blocks=3, x="bf16", out="bf16"),         # a piece a block: two pass on their sums
    dict(n=144, k=384, rows=13, blocks=2, packing="fp4", out="f16", bulk=False),
    dict(n=128, k=256, rows=3, blocks=1, packing="fp8", x="bf16"),
    dict(n=256, k=256, rows=2, blocks=2, packing="nvfp4", normed=True),
    dict(n=16, k=128, rows=1, blocks=132),                               # one
    dict(n=128, k=128, rows=0, blocks=132),                              # empty
)


def make(rng, n=34816, k=5120, rows=1, packing="fp6", x="f16", out="f32", blocks=132, bulk=True, normed=False):
    """Every code equally likely, row scales that differ, about unit weights; x normal; by name of PACKINGS. normed: with
    squares of rows whose rms is 2^6 and a little more."""
    kind = PACKINGS[packing]
    w = rng.integers(0, 256, kind.shape(n, k), dtype=np.uint8)
    codes, scales = w[..., :kind.code_bytes], w[..., kind.code_bytes:]
    if kind.codes.bits == 8:
        codes[codes & 0x7F == 0x7F] = 0x30
    size = 1 / np.sqrt((kind.codes.values[np.isfinite(kind.codes.values)] ** 2).mean())
    shape = (*w.shape[:3], kind.scale_bytes // packed.SCALES[kind.block][0].itemsize)
    drawn = (size * rng.uniform(0.5, 2, shape)).astype(np.float32)
    encode = {128: numerics.encode_bf16, 32: numerics.encode_ue8m0, 16: numerics.E4M3.encode}[kind.block]
    scales[...] = encode(drawn).view(np.uint8).reshape(scales.shape)
    values = rng.standard_normal((rows, k)).astype(np.float32)
    pieces = w.shape[0] * w.shape[1]
    given = dict(w=w, x=values.astype(np.float16) if x == "f16" else numerics.encode_bf16(values),
                 out=np.empty((rows, n), {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[out]),
                 work=strips.workspace(rows, min(blocks, pieces)), n=n, packing=kind, blocks=blocks,
                 alpha=rng.uniform(0.5, 2, n // 16).astype(np.float32) if kind.block == 16 else None, bulk=bulk)
    if normed:
        each = rng.uniform(1, 1.5, folded_norm.shape(strips.groups_of(rows), k)) * packed.STRIP / folded_norm.SHARES
        given.update(squares=(each * 2.0 ** 12).astype(np.float32), eps=0.5)
    return given


def cost(n=34816, k=5120, rows=1, packing="fp6", x="f16", out="f32", blocks=132, bulk=True, normed=False):
    """Bytes that must move, and float operations."""
    weights = int(np.prod(PACKINGS[packing].shape(n, k)))
    return dict(bytes=weights + rows * (2 * k + n * (4 if out == "f32" else 2)), flops=2 * n * k * rows)
