"""Pack a matrix on the CPU: quantise and packed.pack in one compiled pass over its tiles, bit for bit the same.

    pack(packing, x, alpha)      x  u16 [N, K] bf16 bits, or f32 [N, K]  ->  u8 packing.shape(N, K)
    pack_rows(packing, x)        the same codes for a table read row by row  ->  u8 [N, K * bits / 8], scales u16 [N, K/128]

The compiled functions release the interpreter lock, so threads may share a matrix by rows. Not a device kernel: no PTX,
no entry in ALL; tests/test_pack_cpu.py holds it to quantise.quantise and packed.pack.
"""
import numpy as np
from numba import njit

from .. import numerics
from .packed import DEPTH, FP6, FP8, NVFP4, ROWS, TILES, Packing
from .quantise import FACTORS, SMALLEST, UNIT
from .spread import RULES, plan

INFINITE = np.uint32(0x7F800000)                        # float32 bits of a magnitude; a NaN's are larger
MAGNITUDE = np.uint32(0x7FFFFFFF)
E4M3 = numerics.E4M3.values
FOUR, SIX = (np.array(plan(RULES[bits]), np.int64) for bits in (4, 6))           # how codes become words
u32, i32, f32 = np.uint32, np.int32, np.float32
jit = njit(nogil=True, cache=True)


class NotFinite(ValueError):
    """The matrix holds a NaN or an infinity; the packed bytes are of no use."""


def pack(packing: Packing, x: np.ndarray, alpha=1.0, out: np.ndarray | None = None) -> np.ndarray:
    """The packed array of x, in `out` if given. Raises NotFinite; ValueError for a wrong dtype or shape."""
    if packing not in (FP6, FP8, NVFP4):
        raise ValueError(f"fp6, fp8 and nvfp4 can be packed, got {packing}")
    bits, shift = as_bits(x)
    shape = packing.shape(*x.shape)
    out = np.empty(shape, np.uint8) if out is None else out
    if out.shape != shape or out.dtype != np.uint8:
        raise ValueError(f"the packed array is u8 {shape}, got {out.dtype} {out.shape}")
    if packing == NVFP4:
        finite = tiles_16(bits, shift, f32(alpha), *grid(packing), out.view(np.uint32))
    else:
        finite = tiles_128(bits, shift, *grid(packing), out.view(np.uint32))
    if not finite:
        raise NotFinite("the matrix holds a NaN or an infinity")
    return out


def pack_rows(packing: Packing, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """fp6 or fp8 codes, each row one little-endian bit string (numerics.pack_bits), and bf16 scales for 128 inputs."""
    if packing not in (FP6, FP8) or x.ndim != 2 or x.shape[1] % DEPTH:
        raise ValueError(f"rows of fp6 or fp8 are packed, of a multiple of {DEPTH} inputs; got {packing.name} {x.shape}")
    bits, shift = as_bits(x)
    rows = np.empty((len(x), x.shape[1] * packing.codes.bits // 8), np.uint8)
    scales = np.empty((len(x), x.shape[1] // DEPTH), np.uint16)
    if not rows_128(bits, shift, *grid(packing), rows, scales):
        raise NotFinite("the matrix holds a NaN or an infinity")
    return rows, scales


def amax(x: np.ndarray) -> float:
    """The largest magnitude of a bf16 or f32 matrix; NaN if it holds one."""
    return float(float_of(largest_of_all(*as_bits(x))))


def as_bits(x):
    """x as read-only unsigned integers (one type, one compilation), and how far to shift them up to be float32 bits."""
    if x.ndim != 2 or x.dtype not in (np.uint16, np.float32) or not x.flags.c_contiguous:
        raise ValueError(f"a matrix to pack is C-contiguous u16 (bf16) or f32 [N, K], got {x.dtype} {x.shape}")
    bits, shift = (x.view(), u32(16)) if x.dtype == np.uint16 else (x.view(np.uint32), u32(0))
    bits.flags.writeable = False
    return bits, shift


def grid(packing):
    """What the compiled functions know of a format: factors / its largest value, steps (see loss), that value, its sign
    bit, the unit of losses."""
    steps = {FP6: 8, FP8: 0, NVFP4: 2}[packing]
    factors = (np.array(FACTORS[packing.block]) / packing.codes.max).astype(np.float32)
    return factors, f32(steps), f32(packing.codes.max), i32(packing.codes.sign), f32(UNIT[packing.codes.name])


# ---- floats and their bits. numba widens integers to 64 bits at each operator: results are cast back.
@jit
def bits_of(x):
    return np.float32(x).view(np.uint32)


@jit
def float_of(bits):
    return np.uint32(bits).view(np.float32)


@jit
def widen(x, row, first, shift, bits):
    """bits = float32 bits of x[row, first : first + len(bits)]; x holds them, or their upper halves (shift 16)."""
    for i in range(len(bits)):
        bits[i] = u32(x[row, first + i]) << shift


@jit
def largest(bits):
    """Bits of the largest magnitude: without the sign, floats are ordered as their bits are."""
    top = u32(0)
    for i in range(len(bits)):
        top = max(top, u32(bits[i] & MAGNITUDE))
    return top


@jit
def largest_of_all(x, shift):
    top = u32(0)
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            top = max(top, u32((u32(x[row, i]) << shift) & MAGNITUDE))
    return top


# ---- grids: a magnitude t >= 0 on the values of a format, and the code of such a value
@jit
def on_e2(t, steps, top):
    """e2m3 (8 steps from 0 to 1) or e2m1 (2): the step doubles at 2 and at 4."""
    up = steps if t < f32(2) else steps * f32(0.5) if t < f32(4) else steps * f32(0.25)
    down = f32(1) / steps if t < f32(2) else f32(2) / steps if t < f32(4) else f32(4) / steps
    return min(np.rint(t * up) * down, top)


@jit
def code_e2(q, steps):
    """Steps from 0 to 2, then half as many a unit from 2 to 4, then a quarter."""
    return i32(steps * (q if q < f32(2) else f32(1) + q * f32(0.5) if q < f32(4) else f32(2) + q * f32(0.25)))


@jit
def code_e4m3(t):
    """A float32 rounded to three bits of mantissa and rebiased, or below 2^-6 a multiple of 2^-9."""
    t = min(t, f32(448))
    bits = bits_of(t)
    normal = i32(((bits + u32(0x7FFFF) + (bits >> u32(20) & u32(1))) >> u32(20)) - u32(120 << 3))
    return i32(normal if t >= f32(2.0 ** -6) else i32(np.rint(t * f32(512))))


@jit
def on_e4m3(t):
    code = code_e4m3(t)
    return float_of(u32(code + i32(120 << 3)) << u32(20)) if code >= 8 else f32(code) * f32(2.0 ** -9)


# ---- a block under a scale: its loss, a whole number below 2^24; its codes
@jit
def loss(x, scale, steps, top, unit):
    """`steps` 8 is e2m3, 2 is e2m1, 0 stands for e4m3."""
    total = i32(0)
    if steps:
        for i in range(len(x)):
            t = np.abs(x[i]) / scale
            e = i32(np.rint((t - on_e2(t, steps, top)) * unit))
            total = i32(total + e * e)
    else:
        for i in range(len(x)):
            t = np.abs(x[i]) / scale
            e = i32(np.rint((t - on_e4m3(t)) * unit))
            total = i32(total + e * e)
    return f32(total)


@jit
def encode(x, bits, scale, steps, top, sign, codes):
    if steps:
        for i in range(len(x)):
            code = code_e2(on_e2(np.abs(x[i]) / scale, steps, top), steps)
            codes[i] = np.uint8(code | i32(bits[i] >> u32(31)) * sign)
    else:
        for i in range(len(x)):
            codes[i] = np.uint8(code_e4m3(np.abs(x[i]) / scale) | i32(bits[i] >> u32(31)) * sign)


@jit
def bf16_scale(amax, factor):
    """amax * factor rounded to bf16, as a float32; 1 for a block of zeros."""
    bits = bits_of(max(amax * factor, SMALLEST))
    rounded = u32((bits + u32(0x7FFF) + (bits >> u32(16) & u32(1))) & u32(0xFFFF0000))
    return float_of(rounded) if amax > 0 else f32(1)


@jit
def block_128(bits, factors, steps, top, sign, unit, codes):
    """Choose the scale of 128 inputs and write their codes; returns the scale's bits."""
    values, amax = bits.view(np.float32), float_of(largest(bits))
    first = scale = bf16_scale(amax, factors[0])
    least = loss(values, first, steps, top, unit)
    for factor in factors[1:]:
        s = bf16_scale(amax, factor)
        r = s / first
        lost = loss(values, s, steps, top, unit) * (r * r)
        if lost < least:
            least, scale = lost, s
    encode(values, bits, scale, steps, top, sign, codes)
    return np.uint16(bits_of(scale) >> u32(16))


@jit
def block_16(bits, alpha, factors, steps, top, sign, unit, codes):
    """Choose the e4m3 scale of 16 inputs and write their codes; returns the scale's code."""
    values, amax = bits.view(np.float32), float_of(largest(bits))
    first, best, least = f32(0), i32(0), f32(0)
    for i in range(len(factors)):
        code = max(code_e4m3(amax / alpha * factors[i]), i32(1))
        first = E4M3[code] if i == 0 else first
        r = E4M3[code] / first
        lost = loss(values, E4M3[code] * alpha, steps, top, unit) * (r * r)
        if i == 0 or lost < least:
            least, best = lost, code
    encode(values, bits, E4M3[best] * alpha, steps, top, sign, codes)
    return np.uint8(best)


# ---- planes: codes u32 [16, 32], byte j of a word the code of input j of four -> words of a tile
@jit
def swapped(word):
    """Bytes in the order 0, 2, 1, 3."""
    return u32(word & u32(0xFF0000FF) | word >> u32(8) & u32(0xFF00) | (word & u32(0xFF00)) << u32(8))


@jit
def rotated(word, by):
    """word rotated left by 0 .. 31 bits."""
    return u32(u32(word) << u32(by) | u32(word) >> u32((32 - by) & 31))


@jit
def planes_spread(codes, rows, bits, out):
    """fp6 and fp4: for each b the words from which the kernels make eight registers (spread.py)."""
    registers, words = np.empty(8, np.uint32), np.empty(3, np.uint32)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for b in range(4):
            for i in range(8):
                registers[i] = f16_pair(codes[2 * g + i // 4, 8 * b + 2 * t + i // 2 % 2] >> u32(i % 2 * 16), bits)
            words[:] = 0
            for k in range(len(rows)):
                part = registers[rows[k, 1]]
                if rows[k, 2] >= 0:
                    part ^= rotated(words[rows[k, 2]], rows[k, 3] & 31)
                words[rows[k, 0]] |= rotated(part & u32(rows[k, 4]), -rows[k, 5] & 31)
            for r in range(2):
                out[(b // 2 * 32 + lane) * 4 + b % 2 * 2 + r] = words[r]
            if bits == 6:
                out[(64 + lane) * 4 + b] = words[2]


@jit
def f16_pair(codes, bits):
    """The codes in the low two bytes as two f16: the sign at bit 15 of a half, the magnitude below bit 12."""
    two, sign = u32(codes & u32(0xFF) | (codes & u32(0xFF00)) << u32(8)), u32(0x10001) << u32(bits - 1)
    return u32((two & u32(sign - u32(0x10001))) << u32(13 - bits) | (two & sign) << u32(16 - bits))


@jit
def planes_whole(codes, out):
    """Eight-bit codes."""
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for b in range(4):
            for place in range(4):
                out[(b * 32 + lane) * 4 + place] = swapped(codes[2 * g + place % 2, 8 * b + 2 * t + place // 2])


# ---- whole matrices, out u32 [strips, deep, 8, words] -> whether every value was finite
@jit
def tiles_128(x, shift, factors, steps, top, sign, unit, out):
    """fp6 and fp8."""
    codes, scales = np.zeros((ROWS, DEPTH), np.uint8), np.zeros(ROWS, np.uint16)
    bits, fine = np.empty(DEPTH, np.uint32), True
    for tile in range(out.shape[0] * TILES):
        rows = max(min(ROWS, x.shape[0] - tile * ROWS), 0)
        codes[rows:], scales[rows:] = 0, 0
        for deep in range(out.shape[1]):
            for row in range(rows):
                widen(x, tile * ROWS + row, deep * DEPTH, shift, bits)
                fine &= largest(bits) < INFINITE
                scales[row] = block_128(bits, factors, steps, top, sign, unit, codes[row])
            here = out[tile // TILES, deep, tile % TILES]
            if steps:
                planes_spread(codes.view(np.uint32), SIX, 6, here)
            else:
                planes_whole(codes.view(np.uint32), here)
            here[-ROWS // 2:] = scales.view(np.uint32)
    return fine


@jit
def tiles_16(x, shift, alpha, factors, steps, top, sign, unit, out):
    """nvfp4."""
    codes, scales = np.zeros((ROWS, DEPTH), np.uint8), np.zeros((ROWS, DEPTH // 16), np.uint8)
    placed = np.empty((ROWS // 2, 16), np.uint8)
    bits, fine = np.empty(16, np.uint32), True
    for tile in range(out.shape[0] * TILES):
        rows = max(min(ROWS, x.shape[0] - tile * ROWS), 0)
        codes[rows:], scales[rows:] = 0, 0
        for deep in range(out.shape[1]):
            for row in range(rows):
                for b in range(DEPTH // 16):
                    widen(x, tile * ROWS + row, deep * DEPTH + 16 * b, shift, bits)
                    fine &= largest(bits) < INFINITE
                    some = codes[row, 16 * b:16 * b + 16]
                    scales[row, b] = block_16(bits, alpha, factors, steps, top, sign, unit, some)
            here = out[tile // TILES, deep, tile % TILES]
            planes_spread(codes.view(np.uint32), FOUR, 4, here)
            for g in range(ROWS // 2):
                for i in range(16):                               # [h][r][b]
                    placed[g, i] = scales[2 * g + i // 4 % 2, i % 4 * 2 + i // 8]
            here[-2 * ROWS:] = placed.reshape(-1).view(np.uint32)
    return fine


@jit
def rows_128(x, shift, factors, steps, top, sign, unit, out, scales):
    """fp6 and fp8, row by row: out u8 [N, bytes], scales u16 [N, K / 128]."""
    codes, bits, fine = np.zeros(DEPTH, np.uint8), np.empty(DEPTH, np.uint32), True
    width = out.shape[1] // scales.shape[1]
    for row in range(out.shape[0]):
        for b in range(scales.shape[1]):
            widen(x, row, b * DEPTH, shift, bits)
            fine &= largest(bits) < INFINITE
            scales[row, b] = block_128(bits, factors, steps, top, sign, unit, codes)
            if steps:
                for i in range(DEPTH // 4):
                    word = u32(codes[4 * i] | codes[4 * i + 1] << 6 | codes[4 * i + 2] << 12 | codes[4 * i + 3] << 18)
                    for byte in range(3):
                        out[row, b * width + 3 * i + byte] = np.uint8(word >> u32(8 * byte) & u32(255))
            else:
                out[row, b * width:(b + 1) * width] = codes
    return fine
