"""Number formats in numpy: encode, decode, pack, unpack. The law that packers, kernels and tests are held to.

Values. A code is sign, exponent, mantissa from the top bit down. With bias b and m mantissa bits

    exponent field e = 0:  (-1)^s * mantissa * 2^(1 - b - m)             subnormals, and zero with both signs
    otherwise:             (-1)^s * (1 + mantissa / 2^m) * 2^(e - b)

    name   bits  sign exponent mantissa  bias  largest   smallest   NaN         a code in its byte
    e4m3     8     1      4       3        7     448       2^-9     0x7f, 0xff  seee emmm
    e2m3     6     1      2       3        1     7.5       0.125    none        00se emmm
    e3m2     6     1      3       2        3      28       0.0625   none        00se eemm
    e2m1     4     1      2       1        1       6       0.5      none        0000 seem
    ue8m0    8     0      8       0      127   2^127       2^-127   0xff        eeee eeee   a power of two: a scale
    bf16    16     1      8       7      127   3.4e38      9.2e-41  as float32  the upper half of a float32

Rounding. One rounding from float32, to the nearest value, ties to the even code; beyond the largest value, infinities
included, the result is the largest value (bf16 keeps infinities, as IEEE does). A NaN needs a format that has one.
Inputs are float32 or narrower: rounding float64 to float32 first would be a second rounding, so that is the caller's.

Bits. A row of codes narrower than a byte is one little-endian bit string: code j holds bits [j * bits, (j+1) * bits),
and bit i of the string is bit i % 8 of byte i // 8. So two e2m1 codes a byte, the even one in the low half (as NVFP4
checkpoints store them), and four 6-bit codes in three bytes:

    byte          0         1         2
    bit        76543210  76543210  76543210
    code       11000000  22221111  33333322

Sources: OCP 8-bit Floating Point Specification 1.0 (e4m3), OCP Microscaling Formats 1.0 (the others).
"""
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Minifloat:
    """A signed format of at most 8 bits. Codes are u8, one a byte, unused high bits zero."""
    name: str
    bits: int
    exponent: int
    mantissa: int
    bias: int
    nan: int | None = None                              # the positive NaN; it is the code above the largest value

    @property
    def sign(self) -> int:
        """The sign bit of a code."""
        return 1 << self.bits - 1

    @cached_property
    def values(self) -> np.ndarray:
        """f32 [2**bits], read-only: what each code means."""
        code = np.arange(self.sign)
        field, part = code >> self.mantissa, code & (1 << self.mantissa) - 1
        significand = np.where(field == 0, part, part + (1 << self.mantissa))
        value = np.ldexp(significand.astype(np.float32), np.maximum(field, 1) - self.bias - self.mantissa)
        if self.nan is not None:
            value[self.nan] = np.nan
        value = np.concatenate([value, -value])
        value.flags.writeable = False
        return value

    @property
    def max(self) -> float:
        """The largest finite value."""
        return float(np.nanmax(self.values))

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """u8 codes, any shape -> f32 values of that shape, exact."""
        codes = np.asarray(codes)
        if codes.dtype != np.uint8:
            raise ValueError(f"{self.name} codes are uint8, got {codes.dtype}")
        if self.bits < 8 and codes.size and codes.max() >> self.bits:
            raise ValueError(f"{self.name} codes are below {1 << self.bits}, got {codes.max()}")
        return self.values[codes]

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Floats of at most 32 bits, any shape -> u8 codes: nearest, ties to even, saturating.

        With E = max(exponent of x, that of the smallest normal) the grid around x has the step 2^(E - m); the
        multiple of it, q in [0, 2^(m+1)], is rounded by rint and q + ((E - smallest) << m) is the code: a q that
        rounded up to 2^(m+1) carries into the exponent field by itself.
        """
        x = _as_float32(x, self.name)
        nan = np.isnan(x)
        if self.nan is None and nan.any():
            raise ValueError(f"{self.name} has no NaN, and {int(nan.sum())} of {x.size} values are NaN")
        size = np.where(nan, np.float32(0), np.minimum(np.abs(x), np.float32(self.max)))
        smallest = 1 - self.bias
        power = np.maximum((size.view(np.int32) >> 23) - 127, smallest)
        step = ((127 + self.mantissa - power) << 23).view(np.float32)          # 2^(m - E), exact
        code = np.rint(size * step).astype(np.int32) + ((power - smallest) << self.mantissa)
        if self.nan is not None:
            code = np.where(nan, self.nan, code)
        return (code + np.where(np.signbit(x), self.sign, 0)).astype(np.uint8)


E4M3 = Minifloat("e4m3", 8, 4, 3, bias=7, nan=0x7F)
E2M3 = Minifloat("e2m3", 6, 2, 3, bias=1)
E3M2 = Minifloat("e3m2", 6, 3, 2, bias=3)
E2M1 = Minifloat("e2m1", 4, 2, 1, bias=1)


def _as_float32(x, name):
    """x as a float32 array, at least float16's kin; anything that would be rounded on the way is refused."""
    x = np.asarray(x)
    if x.dtype not in (np.float32, np.float16):
        raise ValueError(f"{name} is encoded from float32 or float16, got {x.dtype}")
    return x.astype(np.float32)


def encode_bf16(x: np.ndarray) -> np.ndarray:
    """f32 (or f16), any shape -> u16: nearest, ties to even. Infinities stay, NaN becomes the quiet NaN of its sign."""
    x = _as_float32(x, "bf16")
    bits = x.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))
    quiet = bits & np.uint32(0x80000000) | np.uint32(0x7FC00000)
    return (np.where(np.isnan(x), quiet, rounded) >> np.uint32(16)).astype(np.uint16)


def decode_bf16(codes: np.ndarray) -> np.ndarray:
    """u16, any shape -> f32 of that shape, exact."""
    codes = np.asarray(codes)
    if codes.dtype != np.uint16:
        raise ValueError(f"bf16 codes are uint16, got {codes.dtype}")
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


def encode_ue8m0(x: np.ndarray) -> np.ndarray:
    """f32 (or f16) -> u8 exponents: the nearest power of two, saturating at 2^-127 and 2^127.

    A tie, 1.5 times a power of two, goes up: every power of two has the odd significand 1, so none is the even one.
    What is no positive number (zero, negative, NaN) becomes NaN, 0xff.
    """
    x = _as_float32(x, "ue8m0")
    fraction, power = np.frexp(np.where(x > 0, np.minimum(x, np.float32(2.0 ** 127)), np.float32(1)))
    code = np.clip(power - 1 + (fraction >= 0.75) + 127, 0, 254)
    return np.where(x > 0, code, 255).astype(np.uint8)


def decode_ue8m0(codes: np.ndarray) -> np.ndarray:
    """u8, any shape -> f32 powers of two of that shape, exact (2^-127 is a float32 subnormal)."""
    codes = np.asarray(codes)
    if codes.dtype != np.uint8:
        raise ValueError(f"ue8m0 codes are uint8, got {codes.dtype}")
    value = np.ldexp(np.float32(1), np.minimum(codes, 254).astype(np.int32) - 127)
    return np.where(codes == 255, np.float32(np.nan), value)


def pack_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    """u8 codes [..., K] below 2**bits -> u8 [..., K * bits / 8], each row one little-endian bit string.

    bits is 4, 6 or 8; a row must fill whole bytes: K even for 4 bits, a multiple of 4 for 6.
    """
    codes, group = np.asarray(codes), _codes_per_group(bits)
    if codes.dtype != np.uint8 or codes.shape[-1] % group:
        raise ValueError(f"{bits}-bit packing wants uint8 codes in rows of a multiple of {group}, "
                         f"got {codes.dtype} {codes.shape}")
    if codes.size and int(codes.max()) >> bits:
        raise ValueError(f"{bits}-bit codes are below {1 << bits}, got {codes.max()}")
    word = codes.reshape(*codes.shape[:-1], codes.shape[-1] // group, group).astype(np.uint32)
    word = np.bitwise_or.reduce(word << np.arange(0, bits * group, bits, dtype=np.uint32), axis=-1)
    out = [word >> np.uint32(8 * i) & np.uint32(255) for i in range(bits * group // 8)]
    return np.stack(out, axis=-1).astype(np.uint8).reshape(*codes.shape[:-1], codes.shape[-1] * bits // 8)


def unpack_bits(packed: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of pack_bits: u8 [..., B] -> u8 codes [..., B * 8 / bits]."""
    packed, group = np.asarray(packed), _codes_per_group(bits)
    size = bits * group // 8
    if packed.dtype != np.uint8 or packed.shape[-1] % size:
        raise ValueError(f"{bits}-bit codes come as uint8 rows of a multiple of {size} bytes, "
                         f"got {packed.dtype} {packed.shape}")
    byte = packed.reshape(*packed.shape[:-1], packed.shape[-1] // size, size).astype(np.uint32)
    word = np.bitwise_or.reduce(byte << np.arange(0, 8 * size, 8, dtype=np.uint32), axis=-1)
    out = [word >> np.uint32(bits * i) & np.uint32((1 << bits) - 1) for i in range(group)]
    return np.stack(out, axis=-1).astype(np.uint8).reshape(*packed.shape[:-1], packed.shape[-1] * 8 // bits)


def _codes_per_group(bits):
    """The fewest codes of this width that fill whole bytes."""
    if bits not in (4, 6, 8):
        raise ValueError(f"codes of 4, 6 or 8 bits can be packed, got {bits}")
    return {4: 2, 6: 4, 8: 1}[bits]


def decode_nvfp4(packed: np.ndarray, scale: np.ndarray, global_scale: float, convention: str) -> np.ndarray:
    """An NVFP4 matrix as f32 [N, K]: e2m1 codes, one e4m3 scale for 16 inputs, one f32 for the tensor.

    packed        u8 [N, K/2]   two codes a byte, even input in the low half
    scale         u8 [N, K/16]  e4m3 codes
    global_scale  positive      "compressed-tensors" (weight_global_scale): w = code * scale / global_scale
                                "modelopt" (weight_scale_2):                w = code * scale * global_scale

    The product of code and block scale is exact, so each value is rounded once.
    """
    if packed.ndim != 2 or scale.shape != (packed.shape[0], packed.shape[1] // 8) or packed.shape[1] % 8:
        raise ValueError(f"NVFP4 codes [N, K/2] want scales [N, K/16], got {packed.shape} and {scale.shape}")
    factor = np.float32(global_scale)
    if not (np.isfinite(factor) and factor > 0):
        raise ValueError(f"an NVFP4 tensor scale is a positive number, got {global_scale}")
    value = E2M1.decode(unpack_bits(packed, 4)) * np.repeat(E4M3.decode(scale), 16, axis=1)
    if convention == "compressed-tensors":
        return value / factor
    if convention == "modelopt":
        return value * factor
    raise ValueError(f"NVFP4 conventions are 'compressed-tensors' and 'modelopt', got {convention!r}")


def decode_fp8_blocks(codes: np.ndarray, scale_inv: np.ndarray, block: tuple[int, int] = (128, 128)) -> np.ndarray:
    """A block-scaled e4m3 matrix as f32 [N, K]: w = code * scale_inv of its block, one rounding.

    codes      u8 [N, K]
    scale_inv  f32 [ceil(N / block[0]), ceil(K / block[1])]  multiplied, in spite of its name; edge blocks may be short
    """
    rows, cols = block
    wanted = tuple(-(-n // b) for n, b in zip(codes.shape, block))
    if codes.ndim != 2 or scale_inv.shape != wanted or scale_inv.dtype != np.float32:
        raise ValueError(f"e4m3 codes {codes.shape} in blocks of {rows}x{cols} want float32 scales {wanted}, "
                         f"got {scale_inv.dtype} {scale_inv.shape}")
    spread = np.repeat(np.repeat(scale_inv, rows, axis=0), cols, axis=1)
    return E4M3.decode(codes) * spread[:codes.shape[0], :codes.shape[1]]
