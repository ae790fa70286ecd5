"""Packed weight matrices: the one layout that packer, kernels and numpy agree on.

A matrix of N outputs (rows) by K inputs is cut into strips of 128 rows, a strip into pieces of 128 inputs, and a piece
into 8 tiles of 16 rows. All of it is one run of bytes, so whoever takes a strip reads memory from front to back:

    packed  u8 [N / 128, K / 128, 8, tile_bytes]        rows are padded with zeros; 128 rows more are bytes more

    tile_bytes      codes   scales
    fp6 (e2m3)       1536   + 32      one scale for each row: bf16 [16]                       block 128
    fp4 (e2m1)       1024   + 64      one for 32 inputs of a row: ue8m0 [16][4]               block 32
    fp8 (e4m3)       2048   + 128     one for 16 inputs of a row: e4m3 [8][2][2][4] (NVFP4)   block 16
    any codes go with any block

    e4m3 scales stand as the lanes below want them, eight bytes each: those of rows 2g and 2g + 1, of inputs 32 b + 16 h ..,
    at [g][h][r][b].

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

    The narrower codes are spread over words: for each b two of them, or three, make eight registers of two f16 (spread.py
    draws it), of r = 0 then 1 and of (s, j / 2) = 00 01 10 11; j % 2 is the half.

    fp4   planes p = 0, 1    words 2 (b % 2) + r of plane b / 2
    fp6   planes p = 0, 1    the same; the third is word b of plane 2

Such a register is the values times 2^-14, exactly; an e4m3 code as f16 is its value times 2^-8. The high bytes of registers
are the operands of 8-bit matrix instructions, e2m1 as e5m2, e2m3 as e4m3 after a shift; the activations stand
in byte order ORDER.
"""
import functools
from dataclasses import dataclass

import numpy as np

from .. import numerics
from ..numerics import Minifloat
from . import spread

ROWS, DEPTH = 16, 128                # of a tile: an mma's rows; 128 inputs give every lane whole 16-byte pieces
TILES = 8                            # of a piece
STRIP = ROWS * TILES
ORDER = (0, 2, 1, 3)                 # byte i of a word holds input ORDER[i] of its four; its own inverse
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
    if packing.block == 16:
        scales = scales.reshape(strips, deep, TILES, 8, 2, 4, 2).transpose(0, 1, 2, 3, 6, 4, 5)          # ... g h r b
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
    if packing.block == 16:
        scales = scales.reshape(strips, deep, TILES, 8, 2, 2, 4).transpose(0, 1, 2, 3, 5, 6, 4)          # ... g r b h
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


def spread_planes(bits, codes):
    wide, rule = codes.astype(np.uint32), spread.RULES[bits]
    magnitude = np.uint32((1 << bits - 1) - 1)
    halves = (wide & magnitude) << np.uint32(rule.low) | wide >> np.uint32(bits - 1) << np.uint32(15)
    pairs = halves[..., 0::2] | halves[..., 1::2] << np.uint32(16)                     # b g t s r pair
    words = spread.words_of(rule, [pairs[..., s, r, j] for r in (0, 1) for s in (0, 1) for j in (0, 1)])      # b g t
    planes = np.empty((*codes.shape[:-6], bits // 2, 8, 4, 4), np.uint32)              # plane g t word
    for r in (0, 1):
        planes[..., :2, :, :, r::2] = np.moveaxis(words[r].reshape(*codes.shape[:-6], 2, 2, 8, 4), -3, -1)
    if bits == 6:
        planes[..., 2, :, :, :] = np.moveaxis(words[2], -3, -1)
    return planes.view(np.uint8)


def spread_codes(bits, planes):
    words, rule, lead = planes.view(np.uint32), spread.RULES[bits], planes.shape[:-4]
    group = [np.moveaxis(words[..., :2, :, :, r::2], -1, -3).reshape(*lead, 4, 8, 4) for r in (0, 1)]       # b g t
    if bits == 6:
        group.append(np.moveaxis(words[..., 2, :, :, :], -1, -3))
    codes = np.empty((*lead, 4, 8, 4, 2, 2, 4), np.uint8)                              # b g t s r j
    for i, register in enumerate(spread.registers_of(rule, group)):
        for half in (0, 1):
            x = register >> np.uint32(16 * half)
            codes[..., i // 2 % 2, i // 4, i % 2 * 2 + half] = (x >> np.uint32(rule.low) & np.uint32((1 << bits - 1) - 1)
                                                                | (x >> np.uint32(15) & np.uint32(1)) << np.uint32(bits - 1))
    return codes


PLANES = {4: functools.partial(spread_planes, 4), 6: functools.partial(spread_planes, 6), 8: fp8_planes}
CODES = {4: functools.partial(spread_codes, 4), 6: functools.partial(spread_codes, 6), 8: fp8_codes}
