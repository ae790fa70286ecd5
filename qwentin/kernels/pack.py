"""pack: quantise a matrix and lay it out in tiles, the same bytes as on the CPU (quantise.py and packed.pack).

    tiles = packed.pack(packing, *quantise(packing, x, alpha))
    flag  = 1 if a value of x is NaN or infinite, else as it was

    x      bf16 u16 [N, K] or f32 [N, K]      K a multiple of 128
    tiles  u8 [ceil(N / 128), K / 128, 8, tile_bytes]      packing fp6, fp8 or nvfp4
    flag   u64 [1]
    alpha  tensor scale of nvfp4, 1 for the others

A warp makes a tile. Lane 4g + t holds what it will own in the matrix-vector kernels: rows 2g and 2g + 1, and of each
32 inputs the eight 8t .. 8t + 7. So a block of 128 inputs lies in four neighbouring lanes, one of 16 in two, and codes
become words without leaving their lane:

    lane          t = 0      t = 1      t = 2      t = 3
    inputs b      8          8          8          8            b = 0..3: 32 values of a row in each lane
    maximum and losses of a row: two exchanges between lanes (nvfp4: one)

The losses are sums of whole numbers below 2^24, so their order does not matter and the bytes equal the CPU's.
"""
import functools

import numpy as np

from . import octet, packed, ptx, quantise, registers
from .build import device, kernel
from .octet import format_of
from .packed import FP6, FP8, NVFP4, ORDER
from .parity import Output
from .ptx import f32, u32, u64
from .spread import RULES
from .unroll import static_range

WARPS = 4                                             # of a block, each with a tile of its own
REGISTERS = 128                                       # 32 values, the words of 64 codes
SASS = {"sm_90a": ("LDG.E.128", "STG.E.128"), "sm_120a": ("LDG.E.128", "STG.E.128")}
OUTPUTS = {"tiles": Output(exact=True), "flag": Output(exact=True)}
PACKINGS = {packing.name: packing for packing in (FP6, FP8, NVFP4)}


def ref(x, flag, packing, alpha):
    """The law in numpy; a block with a value that is not finite becomes zeros under the scale 0."""
    values = (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x
    kind = PACKINGS[packing]
    fine = np.isfinite(values).reshape(len(x), -1, kind.block).all(-1)
    codes, scales = quantise.quantise(kind, np.where(np.isfinite(values), values, 0), np.float32(alpha))
    codes, scales = codes * np.repeat(fine, kind.block, axis=1), scales * fine
    return dict(tiles=packed.pack(kind, codes, scales), flag=flag if fine.all() else np.ones_like(flag))


# ---- grids, for magnitudes: the nearest value of the format, and its code
@device
def nearest_e2(t, steps, top):
    """e2m3 (8 steps from 0 to 1) or e2m1 (2): the step doubles at 2 and at 4."""
    up = ptx.select(t < 2.0, f32(steps), ptx.select(t < 4.0, f32(steps / 2), f32(steps / 4)))
    down = ptx.select(t < 2.0, f32(1 / steps), ptx.select(t < 4.0, f32(2 / steps), f32(4 / steps)))
    return ptx.minimum(ptx.round_to_integer(t * up) * down, f32(top))


@device
def code_e2(t, steps, top):
    """Steps from 0 to 2, then half as many a unit from 2 to 4, then a quarter."""
    q = nearest_e2(t, steps, top)
    return u32(f32(steps) * ptx.select(q < 2.0, q, ptx.select(q < 4.0, 1.0 + q * 0.5, 2.0 + q * 0.25)))


@device
def code_e4m3(t):
    """A float32 rounded to three bits of mantissa and rebiased, or below 2^-6 a multiple of 2^-9."""
    t = ptx.minimum(t, 448.0)
    bits = ptx.bits_f32(t)
    normal = u32(((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960)
    return ptx.select(t < 2.0 ** -6, u32(ptx.round_to_integer(t * 512.0)), normal)


@device
def value_e4m3(code):
    return ptx.select(code < 8, f32(code) * 2.0 ** -9, ptx.f32_bits(u32((code + 960) << 20)))


@device
def bf16_of(x):
    """A positive x rounded to bf16, as a float32."""
    bits = ptx.bits_f32(x)
    return ptx.f32_bits(u32(bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000)


# ---- words of a plane
@functools.cache
def group_of(bits):
    """Device function: four words of b, (s, r), of codes one a byte in byte order -> the words they are packed in."""
    magnitude, low, sign = ((1 << bits - 1) - 1) * 0x10001, RULES[bits].low, (1 << bits - 1) * 0x10001
    words_of = registers.words_of(bits)

    @device
    def f16_pair(word):
        """The codes in bytes 0 and 2 as two f16: sign at bit 15, magnitude from bit `low` of each half."""
        return u32((word & magnitude) << low) | u32((word & sign) << (16 - bits))

    @device
    def group(w):
        return words_of(tuple(f16_pair(w[i // 2 % 2 * 2 + i // 4] >> (i % 2 * 8)) for i in static_range(8)))
    return group


@functools.cache
def build(x_format, packing):
    """The kernel for a format of x and a packing."""
    load, codes, code_bytes, tile_bytes = octet.load(x_format), packing.codes, packing.code_bytes, packing.tile_bytes
    eight, narrow, micro = codes.bits == 8, codes.bits == 4, packing == NVFP4
    steps, top, unit, sign = (1 << codes.mantissa), codes.max, quantise.UNIT[codes.name], codes.sign
    factors = tuple(float(np.float32(f / codes.max)) for f in quantise.FACTORS[packing.block])
    group = None if eight else group_of(codes.bits)
    order = ORDER                                         # its own inverse: input j stands at byte ORDER[j]
    candidates, smallest, octets = len(factors), float(quantise.SMALLEST), 1 if micro else 4

    @device
    def value(t):
        return value_e4m3(code_e4m3(t)) if eight else nearest_e2(t, steps, top)

    @device
    def code(t):
        return code_e4m3(t) if eight else code_e2(t, steps, top)

    @device
    def scale_of(amax, factor, alpha):
        """(scale, what is stored, what candidates are weighed by)"""
        if micro:
            stored = max(code_e4m3(amax / alpha * factor), u32(1))
            return value_e4m3(stored) * alpha, stored, value_e4m3(stored)
        s = ptx.select(amax > 0.0, bf16_of(ptx.maximum(amax * factor, smallest)), f32(1))
        return s, ptx.bits_f32(s) >> 16, s

    @device
    def lost_octet(x, scale):
        total = 0.0
        for j in static_range(8):
            t = ptx.absolute(x[j]) / scale
            e = ptx.round_to_integer((t - value(t)) * unit)
            total += e * e
        return total

    @device
    def lost(x, scale):
        """The lane's share of a block's loss; x is a tuple of the block's octets here."""
        total = lost_octet(x[0], scale)
        for o in static_range(1, octets):
            total += lost_octet(x[o], scale)
        return total

    @device
    def together(total):
        """Summed over the lanes of a block."""
        total += ptx.shuffle_xor_f32(total, 1)
        return total if micro else total + ptx.shuffle_xor_f32(total, 2)

    @device
    def largest_octet(x):
        m = u32(0)
        for j in static_range(8):
            m = max(m, u32(ptx.bits_f32(x[j]) & 0x7FFFFFFF))
        return m

    @device
    def largest(x):
        """Bits of the block's largest magnitude."""
        m = largest_octet(x[0])
        for o in static_range(1, octets):
            m = max(m, largest_octet(x[o]))
        m = max(m, ptx.shuffle_xor(m, 1))
        return m if micro else max(m, ptx.shuffle_xor(m, 2))

    @device
    def factor(c):
        f = f32(factors[0])
        for i in static_range(1, candidates):
            f = ptx.select(c == i, f32(factors[i]), f)
        return f

    @device
    def choose(x, alpha):
        """(scale, stored, the block's largest magnitude as bits): the first candidate of least loss."""
        m = largest(x)
        scale, stored, base = scale_of(ptx.f32_bits(m), factor(u32(0)), alpha)
        least = f32(3e38)
        for c in range(candidates):                              # a loop: unrolled, this takes a minute to compile
            s, kept, w = scale_of(ptx.f32_bits(m), factor(u32(c)), alpha)
            r = w / base
            loss = together(lost(x, s)) * (r * r)
            better = loss < least
            least, scale = ptx.select(better, loss, least), ptx.select(better, s, scale)
            stored = ptx.select(better, kept, stored)
        return scale, stored, m

    @device
    def four(x0, x1, x2, x3, scale):
        """Four codes, one a byte, the middle two swapped (packed.ORDER)."""
        word, x = u32(0), (x0, x1, x2, x3)
        for j in static_range(4):
            c = code(ptx.absolute(x[j]) / scale) | ((ptx.bits_f32(x[j]) >> 31) * sign)
            word |= u32(c << (8 * order[j]))
        return word

    @device
    def store_codes(at, w):
        """Planes of a tile from words [b][s][r]."""
        if eight:
            for b in static_range(4):
                ptx.store_x4(at + b * 512, (w[4 * b], w[4 * b + 1], w[4 * b + 2], w[4 * b + 3]))
        else:
            groups = tuple(group((w[4 * b], w[4 * b + 1], w[4 * b + 2], w[4 * b + 3])) for b in static_range(4))
            for p in static_range(2):
                ptx.store_x4(at + p * 512, (groups[2 * p][0], groups[2 * p][1], groups[2 * p + 1][0], groups[2 * p + 1][1]))
            if not narrow:
                ptx.store_x4(at + 1024, (groups[0][2], groups[1][2], groups[2][2], groups[3][2]))

    @device
    def store_scales(at, g, t, kept):
        """bf16: a word for two rows. nvfp4: lanes t = 0 and 2 store what they and their neighbours chose, [h][r][b]."""
        if micro:
            if t % 2 == 0:
                ptx.store_x2(at + g * 16 + t * 4, tuple(
                    u32(kept[4 * r] | (kept[4 * r + 1] << 8) | (kept[4 * r + 2] << 16) | (kept[4 * r + 3] << 24))
                    for r in static_range(2)))
        elif t == 0:
            ptx.store_u32(at + g * 4, u32(kept[0] | (kept[4] << 16)))

    @kernel(threads=32 * WARPS)
    def pack(x: u64, tiles: u64, flag: u64, rows: u32, deep: u32, count: u32, alpha: f32):
        tile = ptx.block_x() * WARPS + ptx.thread_x() // 32
        if tile < count:
            lane = ptx.lane()
            g, t = lane >> 2, lane & 3
            at = tiles + u64(tile) * tile_bytes
            row_tile, d = tile // (deep * 8) * 8 + tile % 8, tile // 8 % deep
            low = (u32(0),) * 16                                 # words [b][s][r] of codes
            kept = (u32(0),) * 8                                 # stored scales: [r][b] of nvfp4, else [r] in the first two
            for r in range(2):
                row = u32(row_tile * 16 + g * 2 + r)
                there = row < rows
                place = (u64(min(row, u32(rows - 1))) * deep + d) * 16 + t
                values = tuple(load(x, place + 4 * b) for b in static_range(4))
                if micro:
                    chosen = tuple(choose((values[b],), alpha) for b in static_range(4))
                else:
                    chosen = (choose(values, alpha),) * 4
                fine = tuple(chosen[b][2] < 0x7F800000 for b in static_range(4))
                if not (fine[0] and fine[1] and fine[2] and fine[3]):
                    ptx.atomic_max_u64(flag, u64(1))
                words = tuple(ptx.select(there and fine[i // 2], four(
                    values[i // 2][i % 2 * 4], values[i // 2][i % 2 * 4 + 1], values[i // 2][i % 2 * 4 + 2],
                    values[i // 2][i % 2 * 4 + 3], chosen[i // 2][0]), u32(0)) for i in static_range(8))
                low = tuple(ptx.select(r == i % 2, words[i // 2], low[i]) for i in static_range(16))
                stored = tuple(ptx.select(there and fine[b], chosen[b][1], u32(0)) for b in static_range(4))
                kept = tuple(ptx.select(r == i // 4, stored[i % 4], kept[i]) for i in static_range(8))
            store_codes(at + lane * 16, low)
            store_scales(at + code_bytes, g, t, kept)
    return pack


def launch(stream, x, tiles, flag, packing, alpha):
    """Queue it on a stream; packing is "fp6", "fp8" or "nvfp4"."""
    if packing not in PACKINGS:
        raise ValueError(f"packing must be one of {', '.join(PACKINGS)}, got {packing!r}")
    rows, k = x.shape
    shape = PACKINGS[packing].shape(rows, k)
    if tuple(tiles.shape) != shape or tiles.dtype != np.uint8:
        raise ValueError(f"tiles must be u8 {shape}, got {tiles.dtype} {tuple(tiles.shape)}")
    if tuple(flag.shape) != (1,) or flag.dtype != np.uint64:
        raise ValueError(f"flag must be u64 (1,), got {flag.dtype} {tuple(flag.shape)}")
    made = build(format_of("x", x, "bf16", "f32"), PACKINGS[packing])
    count = shape[0] * shape[1] * shape[2]
    stream.launch(made, -(-count // WARPS), x, tiles, flag, rows, shape[1], count, alpha)


CASES = (
    dict(n=32, k=256, packing="fp6"),
    dict(n=17, k=384, packing="fp8"),                                  # ragged rows, a ragged last block of threads
    dict(n=1, k=128, packing="fp8", poisoned=True),                    # a NaN raises the flag
    dict(n=18, k=256, packing="nvfp4", x="f32"),                       # subnormals; full mantissas
)


def make(rng, n=17408, k=5120, packing="fp6", x="bf16", poisoned=False):
    """Weights of uneven rows; some zeros, tiny and huge values in float32."""
    w = (0.02 * rng.standard_normal((n, k)) * np.exp(rng.standard_normal((n, 1)))).astype(np.float32)
    w[0, :128] = 0
    if x == "f32":
        w[-1, :32] *= np.float32(2.0 ** -130)
    alpha = float(quantise.alpha_of(np.abs(w).max())) if packing == "nvfp4" else 1.0
    if poisoned:
        w[n // 2, 3] = np.nan
        w[n // 2] = np.where(np.arange(k) == 3, w[n // 2], 0)
    if x == "bf16":
        w = (w.view(np.uint32) >> 16).astype(np.uint16)
    return dict(x=w, tiles=np.empty(PACKINGS[packing].shape(n, k), np.uint8), flag=np.zeros(1, np.uint64),
                packing=packing, alpha=alpha)


def cost(n=17408, k=5120, packing="fp6", x="bf16", poisoned=False):
    """Bytes that must move, and float operations: ten a weight and candidate."""
    kind = PACKINGS[packing]
    tries = len(quantise.FACTORS[kind.block]) + 1
    return dict(bytes=n * k * (2 if x == "bf16" else 4) + int(np.prod(kind.shape(n, k))), flops=10 * n * k * tries)
