"""Packed weight matrices: the one layout that packer, kernels and numpy agree on.

A matrix of N outputs (rows) by K inputs is cut into strips of 128 rows, a strip into pieces of 128 inputs, and a piece
into 8 tiles of 16 rows. All of it is one run of bytes, so whoever takes a strip reads memory from front to back:

    packed  u8 [N / 128, K / 128, 8, tile_bytes]        rows are padded with zeros; 128 rows more are bytes more

    tile_bytes      codes   scales
    fp6 (e2m3)       1536   + 32      one scale for each row: bf16 [16]                       block 128
    fp4 (e2m1)       1024   + 64      one for 32 inputs of a row: ue8m0 [16][4]               block 32
    fp8 (e4m3)       2048   + 128     one for 16 inputs of a row: e4m3 [16][8] (NVFP4)        block 16
    any codes go with any block

    weight = code * scale.  A bf16 scale for 1x128 holds every coarser choice too (128x128, powers of two).

Who owns what. Lane 4g + t of a warp (g = 0..7, t = 0..3) owns the 64 codes of rows 2g, 2g+1 and, in each 32 inputs,
of inputs 8t .. 8t+7. With activations in their natural order it finds the matching ones in 16 consecutive bytes (f16,
bf16) or 8 (e4m3), and the fragments of mma m16n8k16 and m16n8k32 are then

    matrix row 2g + r            is the mma's row g + 8r
    input 32b + 8t + 4s + j      f16: k-step (b, s), register pair j / 2;   bytes: k-step b, register pair s, byte ORDER[j]

The codes of a tile are planes of 512 bytes, 16 consecutive bytes for each lane: a warp reads a plane in one go. Inside
its 16 bytes a lane has four words. `b` counts blocks of 32 inputs, `r` the row of the two, `s` the half of the 8 inputs.

    fp8   plane b = 0..3     words (s r) = 00 01 10 11       byte i is the code of input ORDER[i]

          ORDER is 0, 2, 1, 3: inputs 0 and 1 stand at the same bit of the two halves of a word, as in an f16 register.

    The narrower codes are spread so that one rotation brings all bits of two weights into place. The code of (s, j) has
    the number n = s + 2 (j / 2) + 4 (j % 2); it stands at bit f of word w = 2 (b % 2) + r of plane p = b / 2. Bits are
    counted modulo 32:

    fp4   planes p = 0, 1    f = (0, 3, 8, 11)[n % 4] + 16 (n / 4) + 2w
          magnitude at f .. f+2, sign at f + 6: of the same word if s = 0, of word (w + 1) % 4 if s = 1

          bit   15  14  13  12  11  10   9   8   7   6   5   4   3   2   1   0        M: magnitude, S: sign, of code n
          w = 0 S1' S2  M3  M3  M3  M2  M2  M2  S7' S0  M1  M1  M1  M0  M0  M0        ' of the word before (w = 3)

    fp6   planes p = 0, 1    f = 4n + w; the low four bits at f .. f+3
          plane 2            word 2 (b / 2) + s: the top exponent bit at f + 4, the sign at f + 8

So a register of two f16 weights is ((low & 0x000F000F << f) | (high & 0x01100110 << f)) rotated right by f - 7: sign,
exponent and mantissa of an f16 that is the value times 2^-14 exactly (fp4: 0x00070007, 0x00400040, f - 9; e4m3: the value
times 2^-8). The same words masked by bytes give the e2m3, e2m1 and e4m3 operands of 8-bit matrix instructions, whose
activations must stand in byte order ORDER.
"""
from dataclasses import dataclass

import numpy as np

from .. import numerics
from ..numerics import Minifloat

ROWS, DEPTH = 16, 128                # of a tile: an mma's rows; 128 inputs give every lane whole 16-byte pieces
TILES = 8                            # of a piece
STRIP = ROWS * TILES
ORDER = (0, 2, 1, 3)                 # byte i of a word holds input ORDER[i] of its four; its own inverse
FP4_BITS = (0, 3, 8, 11)
SCALES = {128: (np.dtype("<u2"), numerics.decode_bf16), 32: (np.dtype("u1"), numerics.decode_ue8m0),
          16: (np.dtype("u1"), numerics.E4M3.decode)}                   # block -> how its scales are stored and read


@dataclass(frozen=True)
class Packing:
    """How a matrix is packed: the code format and how many inputs of a row share a scale."""
    name: str
    codes: Minifloat
    block: int = 128                 # 128: bf16 scales, 32: ue8m0, 16: e4m3

    def __post_init__(self):
        if self.block not in SCALES:
            raise ValueError(f"a scale is shared by 128, 32 or 16 inputs, got {self.block}")

    @property
    def planes(self) -> int:
        """512-byte planes of codes in a tile."""
        return self.codes.bits // 2

    @property
    def code_bytes(self) -> int:
        return 512 * self.planes

    @property
    def scale_bytes(self) -> int:
        return ROWS * DEPTH // self.block * SCALES[self.block][0].itemsize

    @property
    def tile_bytes(self) -> int:
        return self.code_bytes + self.scale_bytes

    def shape(self, n: int, k: int) -> tuple[int, int, int, int]:
        """Of the packed array of an N x K matrix."""
        if n < 1 or k < DEPTH or k % DEPTH:
            raise ValueError(f"a packed matrix has at least one row and a multiple of {DEPTH} inputs, got {n} x {k}")
        return -(-n // STRIP), k // DEPTH, TILES, self.tile_bytes

    def scales(self, n: int, k: int) -> tuple[tuple[int, int], np.dtype]:
        """Shape and dtype of the scales that belong to an N x K matrix of codes."""
        return (n, k // self.block), SCALES[self.block][0]


FP6, FP4, FP8 = Packing("fp6", numerics.E2M3), Packing("fp4", numerics.E2M1, 32), Packing("fp8", numerics.E4M3)
NVFP4 = Packing("nvfp4", numerics.E2M1, 16)


def pack(packing: Packing, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """codes u8 [N, K], scales [N, K / block] (u16 for block 128, else u8) -> u8 packing.shape(N, K).

    Rows up to a multiple of 128 are filled with zeros. e4m3 codes may not be NaN: the f16 placing would make it 480.
    """
    n, k = codes.shape
    strips, deep = packing.shape(n, k)[:2]
    if codes.dtype != np.uint8 or codes.max() >> packing.codes.bits:
        raise ValueError(f"{packing.name} codes are uint8 below {1 << packing.codes.bits}, "
                         f"got {codes.dtype} up to {codes.max()}")
    if (scales.shape, scales.dtype) != packing.scales(n, k):
        raise ValueError(f"{packing.name} codes {codes.shape} want scales {packing.scales(n, k)}, "
                         f"got {(scales.shape, scales.dtype)}")
    if packing.codes.nan is not None and (codes & packing.codes.sign - 1 == packing.codes.nan).any():
        raise ValueError(f"{packing.name} codes hold a NaN")
    rows = ((0, strips * STRIP - n), (0, 0))
    codes = np.pad(codes, rows).reshape(strips, TILES, 8, 2, deep, 4, 4, 2, 4)   # strip tile g r deep b t s j
    codes = codes.transpose(0, 4, 1, 5, 2, 6, 7, 3, 8)                           # strip deep tile b g t s r j
    scales = np.pad(scales, rows).reshape(strips, TILES, ROWS, deep, -1).transpose(0, 3, 1, 2, 4)
    out = np.empty((strips, deep, TILES, packing.tile_bytes), np.uint8)
    out[..., :packing.code_bytes] = PLANES[packing.codes.bits](codes).reshape(strips, deep, TILES, -1)
    out[..., packing.code_bytes:] = np.ascontiguousarray(scales).view(np.uint8).reshape(strips, deep, TILES, -1)
    return out


def unpack(packing: Packing, packed: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of pack: codes u8 [N, K] and scales [N, K / block] of the first n rows."""
    if packed.dtype != np.uint8 or packed.ndim != 4 or packed.shape[2:] != (TILES, packing.tile_bytes) \
            or not 0 < n <= packed.shape[0] * STRIP:
        raise ValueError(f"{n} rows of {packing.name} are uint8 [at least {-(-n // STRIP)}, K / {DEPTH}, {TILES}, "
                         f"{packing.tile_bytes}], got {packed.dtype} {packed.shape}")
    strips, deep = packed.shape[:2]
    planes = np.ascontiguousarray(packed[..., :packing.code_bytes]).reshape(strips, deep, TILES, -1, 8, 4, 16)
    codes = CODES[packing.codes.bits](planes).transpose(0, 2, 4, 7, 1, 3, 5, 6, 8).reshape(strips * STRIP, -1)
    scales = np.ascontiguousarray(packed[..., packing.code_bytes:]).view(SCALES[packing.block][0])
    scales = scales.reshape(strips, deep, TILES, ROWS, -1).transpose(0, 2, 3, 1, 4).reshape(strips * STRIP, -1)
    return codes[:n], scales[:n]


def decode(packing: Packing, packed: np.ndarray, n: int) -> np.ndarray:
    """The weights of the first n rows: f32 [n, K], each code * scale."""
    codes, scales = unpack(packing, packed, n)
    return packing.codes.decode(codes) * np.repeat(SCALES[packing.block][1](scales), packing.block, axis=1)


def interleave(first: np.ndarray, second: np.ndarray, n: int) -> np.ndarray:
    """Two packed matrices of n rows each, a multiple of 64, as one of 2 n whose tiles take turns:

        first   | 0 1 2 3 4 5 6 7 | 8 9 ...          second  | a b c d e f g h | i j ...        tiles of 16 rows, strips
        both    | 0 a 1 b 2 c 3 d | 4 e 5 f 6 g 7 h | 8 i ...

    A gated product wants it so (strips.py): two neighbouring tiles hold the rows that are multiplied with each other.
    """
    strips, deep, _, size = first.shape
    if first.shape != second.shape or first.dtype != second.dtype or n < 1 or n % (STRIP // 2) or -(-n // STRIP) != strips:
        raise ValueError(f"tiles of two packed matrices of n rows, a multiple of {STRIP // 2}, take turns; "
                         f"got {first.shape} and {second.shape} for n = {n}")
    out = np.empty((strips, 2, deep, TILES // 2, 2, size), first.dtype)
    for i, matrix in enumerate((first, second)):
        out[..., i, :] = matrix.reshape(strips, deep, 2, TILES // 2, size).swapaxes(1, 2)
    return out.reshape(2 * strips, deep, TILES, size)[:n // (STRIP // 2)]


def byte_order(codes: np.ndarray) -> np.ndarray:
    """u8 [..., K], K a multiple of 4: each four inputs in the order 8-bit matrix instructions want them."""
    return codes.reshape(*codes.shape[:-1], codes.shape[-1] // 4, 4)[..., list(ORDER)].reshape(codes.shape)


# ---- planes of one code width. Codes have axes [..., b, g, t, s, r, j], planes [..., plane, g, t, byte of the lane's 16].
def fp8_planes(codes):
    return codes[..., list(ORDER)]


def fp8_codes(planes):
    return planes.reshape(*planes.shape[:-1], 2, 2, 4)[..., list(ORDER)]


def fields(codes):
    """(b, s, r, n, a view of the codes there) for all 64 places of a lane."""
    for b, s, r, j in np.ndindex(4, 2, 2, 4):
        yield b, s, r, s + 2 * (j // 2) + 4 * (j % 2), codes[..., b, :, :, s, r, j]


def put(words, plane, word, at, bits):
    """Set bits (u8 0 or more) at bit `at`, modulo 32, of a word of planes u32 [..., plane, g, t, word]."""
    wide = bits.astype(np.uint64) << np.uint64(at % 32)
    words[..., plane, :, :, word] |= (wide | wide >> np.uint64(32)).astype(np.uint32)


def get(words, plane, word, at, mask):
    """The bits under `mask` that stand at bit `at`, modulo 32."""
    word = words[..., plane, :, :, word].astype(np.uint64)
    return ((word | word << np.uint64(32)) >> np.uint64(at % 32) & np.uint64(mask)).astype(np.uint8)


def fp4_place(b, s, r, n):
    """(plane, word of the magnitude, word of the sign, bit f)"""
    w = 2 * (b % 2) + r
    return b // 2, w, (w + s) % 4, FP4_BITS[n % 4] + 16 * (n // 4) + 2 * w


def fp4_planes(codes):
    words = np.zeros((*codes.shape[:-6], 2, 8, 4, 4), np.uint32)
    for b, s, r, n, code in fields(codes):
        plane, low, high, f = fp4_place(b, s, r, n)
        put(words, plane, low, f, code & 7)
        put(words, plane, high, f + 6, code >> 3)
    return words.view(np.uint8)


def fp4_codes(planes):
    words, codes = planes.view(np.uint32), np.empty((*planes.shape[:-4], 4, 8, 4, 2, 2, 4), np.uint8)
    for b, s, r, n, code in fields(codes):
        plane, low, high, f = fp4_place(b, s, r, n)
        code[...] = get(words, plane, low, f, 7) | get(words, plane, high, f + 6, 1) << 3
    return codes


def fp6_planes(codes):
    words = np.zeros((*codes.shape[:-6], 3, 8, 4, 4), np.uint32)
    for b, s, r, n, code in fields(codes):
        w, high = 2 * (b % 2) + r, 2 * (b // 2) + s
        put(words, b // 2, w, 4 * n + w, code & 15)
        put(words, 2, high, 4 * n + w + 4, code >> 4 & 1)
        put(words, 2, high, 4 * n + w + 8, code >> 5)
    return words.view(np.uint8)


def fp6_codes(planes):
    words, codes = planes.view(np.uint32), np.empty((*planes.shape[:-4], 4, 8, 4, 2, 2, 4), np.uint8)
    for b, s, r, n, code in fields(codes):
        w, high = 2 * (b % 2) + r, 2 * (b // 2) + s
        top = get(words, 2, high, 4 * n + w + 4, 1) | get(words, 2, high, 4 * n + w + 8, 1) << 1
        code[...] = get(words, b // 2, w, 4 * n + w, 15) | top << 4
    return codes


PLANES = {4: fp4_planes, 6: fp6_planes, 8: fp8_planes}
CODES = {4: fp4_codes, 6: fp6_codes, 8: fp8_codes}
