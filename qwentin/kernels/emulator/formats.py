"""Number formats of the tensor instructions: tables of every code's value, and rounding into them.

The tables stand apart from qwentin.numerics on purpose: what checks a kernel shares nothing with what feeds it.
"""
import numpy as np

from .dtypes import f2, f4, f8, u1, u2, u4, u8


def minifloat(exponent_bits, mantissa_bits, bias, nan=()):
    """The float64 value of every code of a sign, exponent, mantissa format without infinities."""
    code = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    e, m = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
    subnormal = m * 2.0 ** (1 - bias - mantissa_bits)
    normal = (1 + m / (1 << mantissa_bits)) * 2.0 ** (e - float(bias))
    value = np.where(e == 0, subnormal, normal)
    value = np.where(code >> (exponent_bits + mantissa_bits) & 1, -value, value)
    value[list(nan)] = np.nan
    return value


E4M3 = minifloat(4, 3, 7, nan=(0x7F, 0xFF))
E5M2 = (np.arange(256).astype(u2) << u2(8)).view(f2).astype(f8)          # the high byte of an f16
E2M3, E3M2, E2M1 = minifloat(2, 3, 1), minifloat(3, 2, 3), minifloat(2, 1, 1)
UE8M0 = np.append(2.0 ** (np.arange(255) - 127.0), np.nan)
UE4M3 = np.tile(E4M3[:128], 2)                                           # the top bit is ignored
CODES = dict(e4m3=E4M3, e5m2=E5M2, e2m3=E2M3, e3m2=E3M2, e2m1=E2M1)

# The value of a byte of an 8-bit mma operand: fp6 sits in bits 0..5, fp4 in bits 2..5, whatever the others hold.
OPERAND_BYTE = dict(e4m3=E4M3, e5m2=E5M2, e2m3=np.tile(E2M3, 4), e3m2=np.tile(E3M2, 4),
                    e2m1=np.repeat(np.tile(E2M1, 4), 4))
SCALE_BYTE = dict(ue8m0=UE8M0, ue4m3=UE4M3)


def from_bf16(bits):
    """bf16 bits (u16) -> float32."""
    return (bits.astype(u4) << u4(16)).view(f4)


def to_bf16(x):
    """float32 -> bf16 bits, to nearest even; NaN becomes 0x7FFF."""
    bits = np.asarray(x, f4).view(u4)
    rounded = (bits + u4(0x7FFF) + (bits >> u4(16) & u4(1))) >> u4(16)
    return np.where(np.isnan(x), u4(0x7FFF), rounded).astype(u2)


def to_f16(x):
    """float32 or float64 -> f16 bits, to nearest even; NaN becomes 0x7FFF."""
    x = np.asarray(x)
    return np.where(np.isnan(x), u2(0x7FFF), x.astype(f2).view(u2))


def odd_f4(x):
    """float64 -> float32, rounded to odd: a second rounding to a shorter format is then correct."""
    near = x.astype(f4)
    with np.errstate(invalid="ignore"):
        beyond = np.abs(near.astype(f8)) > np.abs(x)
    down = np.where(beyond, np.nextafter(near, f4(0)), near)             # truncated
    inexact = (down.astype(f8) != x) & np.isfinite(x)
    return np.where(inexact, (down.view(u4) | u4(1)), down.view(u4)).view(f4)


def to_minifloat(x, table):
    """float32 -> code of the nearest value, ties to even, clipped to the largest; NaN -> the code 0111..1."""
    half = len(table) // 2
    grid = table[:half][np.isfinite(table[:half])]                       # positive codes are in increasing order
    magnitude = np.minimum(np.abs(x.astype(f8)), grid[-1])
    above = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    to_low, to_high = magnitude - grid[above - 1], grid[above] - magnitude
    code = np.where((to_high < to_low) | ((to_high == to_low) & (above % 2 == 0)), above, above - 1)
    return np.where(np.isnan(x), half - 1, code | np.where(np.signbit(x), half, 0)).astype(u1)


def to_ue8m0(x, up):
    """float32 -> ue8m0, towards zero or up, clipped to 2^-127 .. 2^127; NaN -> 255. The sign is dropped."""
    magnitude = np.abs(x.astype(f8))
    exponent = np.frexp(np.where(magnitude > 0, magnitude, 2.0 ** -127))[1] - 1
    exponent += up & (magnitude > np.exp2(exponent.astype(f8)))
    code = np.clip(np.where(np.isinf(x), 127, exponent) + 127, 0, 254)
    return np.where(np.isnan(x), 255, code).astype(u1)


def decode(words, kind):
    """float64 values of an mma operand held as 32-bit words: [..., n] u32 -> [..., n * elements a word]."""
    words = np.ascontiguousarray(words)
    if kind == "packed e2m1":
        raw = words.view(u1)
        return E2M1[np.stack([raw & 15, raw >> 4], -1).reshape(raw.shape[:-1] + (-1,))]
    if kind in OPERAND_BYTE:
        return OPERAND_BYTE[kind][words.view(u1)]
    if kind == "tf32":
        return (words & u4(0xFFFFE000)).view(f4).astype(f8)
    half = words.view(u2)
    return (half.view(f2) if kind == "f16" else from_bf16(half)).astype(f8)


def is_tie(x):
    """Where a float64 lies exactly between two float32: rounding it again would forget what was lost before."""
    return (x.view(u8) & u8(0x1FFFFFFF)) == u8(0x10000000)
