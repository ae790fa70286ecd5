"""Eight neighbouring elements of an array as a tuple of eight float32: the unit in which kernels here move rows.

    format   numpy dtype   one octet        load, store
    bf16     uint16        16 bytes         one 16-byte access; rounds to nearest even
    f16      float16       16 bytes         the same
    f32      float32       32 bytes         two 16-byte accesses
    e4m3     uint8          8 bytes         one 8-byte access; saturates at 448 (sm_89 and up); a NaN code reads as 480

`load(format)(p, i)` reads octet i of the array at p, `store(format)(p, i, x)` writes it.
"""
import functools

import numpy as np

from . import ptx
from .build import device, lineless_device
from .unroll import static_range

FORMATS = {np.dtype(np.uint16): "bf16", np.dtype(np.float16): "f16", np.dtype(np.float32): "f32",
           np.dtype(np.uint8): "e4m3"}
SIZE = 8


def format_of(name, array, *allowed):
    """The format an array is in, by its dtype; ValueError naming the argument if it is none of `allowed`."""
    found = FORMATS.get(np.dtype(array.dtype))
    if found not in allowed:
        raise ValueError(f"{name} must be {' or '.join(allowed)}, got dtype {array.dtype}")
    return found


@lineless_device
def widened(word):
    """The two bf16 of a word: a bf16 is the upper half of a float32."""
    return ptx.f32_bits(word << 16), ptx.f32_bits(word & 0xFFFF0000)


TWO = {"bf16": widened, "f16": ptx.f32x2_f16x2}          # device function: the two elements of a word


@functools.cache
def load(format):
    """Device function (address u64, octet number) -> eight float32."""
    two = TWO.get(format)
    if format == "f32":
        @device
        def load_octet(p, i):
            a = ptx.read_f32x4(p + i * 32)
            b = ptx.read_f32x4(p + i * 32 + 16)
            return a + b
    elif two:
        @device
        def load_octet(p, i):
            w = ptx.read_x4(p + i * 16)
            return two(w[0]) + two(w[1]) + two(w[2]) + two(w[3])
    else:
        @device
        def load_octet(p, i):
            w = ptx.read_x2(p + i * 8)
            return tuple(byte(w[j // 4], 8 * (j % 4)) for j in static_range(8))
    return load_octet


@device
def byte(word, shift):
    """The e4m3 at bit `shift`: its exponent and mantissa placed in a float32's give the value times 2^-120, exactly."""
    code = word >> shift
    return ptx.f32_bits(((code & 0x80) << 24) | ((code & 0x7F) << 20)) * 2.0 ** 120


@device
def squares(x):
    """The sum of an octet's squares."""
    total = 0.0
    for j in static_range(8):
        total = ptx.fma(x[j], x[j], total)
    return total


@functools.cache
def store(format):
    """Device function (address u64, octet number, eight float32) -> None; one rounding."""
    pack = {"bf16": ptx.bf16x2, "f16": ptx.f16x2}.get(format)
    if format == "f32":
        @device
        def store_octet(p, i, x):
            ptx.store_f32x4(p + i * 32, (x[0], x[1], x[2], x[3]))
            ptx.store_f32x4(p + i * 32 + 16, (x[4], x[5], x[6], x[7]))
    elif pack:
        @device
        def store_octet(p, i, x):
            ptx.store_x4(p + i * 16, tuple(pack(x[2 * j], x[2 * j + 1]) for j in static_range(4)))
    else:
        @device
        def store_octet(p, i, x):
            pairs = tuple(ptx.e4m3x2(x[2 * j], x[2 * j + 1]) for j in static_range(4))
            ptx.store_x2(p + i * 8, (pairs[0] | (pairs[1] << 16), pairs[2] | (pairs[3] << 16)))
    return store_octet
