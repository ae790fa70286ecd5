"""Packed weight matrices: the one layout that packer, kernels and numpy agree on.

A matrix of N outputs (rows) by K inputs is cut into tiles of 16 rows by 128 inputs. A tile is one run of bytes, first
its codes, then its scales, and tiles follow each other along K, then down the rows:

    packed  u8 [N / 16, K / 128, tile_bytes]        so the first rows of a matrix are its first bytes

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
its 16 bytes a lane has four words. Below, `b` counts blocks of 32 inputs, `r` the row of the two, `s` the half of the
8 inputs, and a byte position i of a word stands for input ORDER[i] of the four: 0, 2, 1, 3. The swap puts inputs 0, 1
into halves of a word at the same bit, which is how an f16 register wants them.

    fp8   plane b = 0..3     words  (s0 r0) (s0 r1) (s1 r0) (s1 r1)      byte i = code of input ORDER[i]

    fp4   plane p = 0, 1     words  (b=2p r0) (b=2p r1) (b=2p+1 r0) (b=2p+1 r1)
          a word                  31..28  27..24  23..20  19..16  15..12  11..8   7..4    3..0
                                  s1 j3   s0 j3   s1 j1   s0 j1   s1 j2   s0 j2   s1 j0   s0 j0

    fp6   planes 0, 1        the low four bits of each code, as fp4
          plane 2            words  b = 0..3: the high two bits (sign S, top exponent bit E) of both rows
          byte i of a word        bit   7     6     5     4     3     2     1     0      of input ORDER[i]
                                        S     S     S     S     E     E     E     E
                                       s0r0  s0r1  s1r0  s1r1  s0r0  s0r1  s1r0  s1r1

So every f16 register of weights is (low << a & 0x07800780) | (high << b & 0x88008800): each code lands as sign,
exponent and mantissa of an f16 that is the value times 2^-14 exactly (e4m3: 2^-8). The same words masked by bytes give
the e2m3, e2m1 and e4m3 operands of 8-bit matrix instructions, whose activations must stand in byte order ORDER.
"""
from dataclasses import dataclass

import numpy as np

from .. import numerics
from ..numerics import Minifloat

ROWS, DEPTH = 16, 128                # of a tile: an mma's rows; 128 inputs give every lane whole 16-byte pieces
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

    def shape(self, n: int, k: int) -> tuple[int, int, int]:
        """Of the packed array of an N x K matrix."""
        if n < 1 or k < DEPTH or k % DEPTH:
            raise ValueError(f"a packed matrix has at least one row and a multiple of {DEPTH} inputs, got {n} x {k}")
        return -(-n // ROWS), k // DEPTH, self.tile_bytes

    def scales(self, n: int, k: int) -> tuple[tuple[int, int], np.dtype]:
        """Shape and dtype of the scales that belong to an N x K matrix of codes."""
        return (n, k // self.block), SCALES[self.block][0]


FP6, FP4, FP8 = Packing("fp6", numerics.E2M3), Packing("fp4", numerics.E2M1, 32), Packing("fp8", numerics.E4M3)
NVFP4 = Packing("nvfp4", numerics.E2M1, 16)


def pack(packing: Packing, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """codes u8 [N, K], scales [N, K / block] (u16 for block 128, else u8) -> u8 packing.shape(N, K).

    Rows up to a multiple of 16 are filled with zeros. e4m3 codes may not be NaN: the f16 placing would make it 480.
    """
    n, k = codes.shape
    tiles, deep, size = packing.shape(n, k)
    if codes.dtype != np.uint8 or codes.max() >> packing.codes.bits:
        raise ValueError(f"{packing.name} codes are uint8 below {1 << packing.codes.bits}, "
                         f"got {codes.dtype} up to {codes.max()}")
    if (scales.shape, scales.dtype) != packing.scales(n, k):
        raise ValueError(f"{packing.name} codes {codes.shape} want scales {packing.scales(n, k)}, "
                         f"got {(scales.shape, scales.dtype)}")
    if packing.codes.nan is not None and (codes & packing.codes.sign - 1 == packing.codes.nan).any():
        raise ValueError(f"{packing.name} codes hold a NaN")
    rows = ((0, tiles * ROWS - n), (0, 0))
    codes = np.pad(codes, rows).reshape(tiles, 8, 2, deep, 4, 4, 2, 4)[..., list(ORDER)]      # tile g r deep b t s i
    codes = codes.transpose(0, 3, 4, 1, 5, 6, 2, 7)                                          # tile deep b g t s r i
    scales = np.pad(scales, rows).reshape(tiles, ROWS, deep, -1).swapaxes(1, 2)
    out = np.empty((tiles, deep, size), np.uint8)
    out[..., :packing.code_bytes] = PLANES[packing.codes.bits](codes).reshape(tiles, deep, -1)
    out[..., packing.code_bytes:] = np.ascontiguousarray(scales).view(np.uint8).reshape(tiles, deep, -1)
    return out


def unpack(packing: Packing, packed: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of pack: codes u8 [N, K] and scales [N, K / block] of the first n rows."""
    tiles, deep, size = packed.shape
    if packed.dtype != np.uint8 or size != packing.tile_bytes or not 0 < n <= tiles * ROWS:
        raise ValueError(f"{n} rows of {packing.name} are uint8 [at least {-(-n // ROWS)}, K / {DEPTH}, "
                         f"{packing.tile_bytes}], got {packed.dtype} {packed.shape}")
    codes = CODES[packing.codes.bits](packed[..., :packing.code_bytes].reshape(tiles, deep, -1, 8, 4, 16))
    codes = codes.transpose(0, 3, 6, 1, 2, 4, 5, 7)[..., list(ORDER)].reshape(tiles * ROWS, -1)
    scales = np.ascontiguousarray(packed[..., packing.code_bytes:]).view(SCALES[packing.block][0])
    return codes[:n], scales.reshape(tiles, deep, ROWS, -1).swapaxes(1, 2).reshape(tiles * ROWS, -1)[:n]


def decode(packing: Packing, packed: np.ndarray, n: int) -> np.ndarray:
    """The weights of the first n rows: f32 [n, K], each code * scale."""
    codes, scales = unpack(packing, packed, n)
    return packing.codes.decode(codes) * np.repeat(SCALES[packing.block][1](scales), packing.block, axis=1)


def byte_order(codes: np.ndarray) -> np.ndarray:
    """u8 [..., K], K a multiple of 4: each four inputs in the order 8-bit matrix instructions want them."""
    return codes.reshape(*codes.shape[:-1], codes.shape[-1] // 4, 4)[..., list(ORDER)].reshape(codes.shape)


# ---- planes of one code width. Codes have axes [tile, deep, b, g, t, s, r, i], planes [tile, deep, plane, g, t, byte].
def fp4_planes(codes):
    """The fp4 planes of codes below 16."""
    pairs = codes[..., 0, :, :] | codes[..., 1, :, :] << 4                   # tile deep b g t r i: s is in the byte
    tile, deep, _, g, t, r, i = pairs.shape
    return pairs.reshape(tile, deep, 2, 2, g, t, r, i).transpose(0, 1, 2, 4, 5, 3, 6, 7).reshape(tile, deep, 2, g, t, 16)


def fp4_codes(planes):
    tile, deep, _, g, t, _ = planes.shape
    pairs = planes.reshape(tile, deep, 2, g, t, 2, 2, 4).transpose(0, 1, 2, 5, 3, 4, 6, 7)
    pairs = pairs.reshape(tile, deep, 4, g, t, 2, 4)
    return np.stack([pairs & 15, pairs >> 4], axis=5)


def fp6_planes(codes):
    """The fp6 planes: the low four bits as fp4, then the high two."""
    place = np.arange(4, dtype=np.uint8).reshape(2, 2, 1)                       # 2s + r
    high = (codes >> 5) << (7 - place) | (codes >> 4 & 1) << (3 - place)
    high = np.bitwise_or.reduce(high, axis=(5, 6))                              # tile deep b g t i
    tile, deep, _, g, t, _ = high.shape
    high = high.transpose(0, 1, 3, 4, 2, 5).reshape(tile, deep, 1, g, t, 16)
    return np.concatenate([fp4_planes(codes & 15), high], axis=2)


def fp6_codes(planes):
    tile, deep, _, g, t, _ = planes.shape
    high = planes[:, :, 2].reshape(tile, deep, g, t, 4, 4).transpose(0, 1, 4, 2, 3, 5)[:, :, :, :, :, None, None]
    place = np.arange(4, dtype=np.uint8).reshape(2, 2, 1)
    return fp4_codes(planes[:, :, :2]) | (high >> (7 - place) & 1) << 5 | (high >> (3 - place) & 1) << 4


def fp8_planes(codes):
    """The fp8 planes."""
    tile, deep, b, g, t = codes.shape[:5]
    return codes.reshape(tile, deep, b, g, t, 16)


def fp8_codes(planes):
    return planes.reshape(*planes.shape[:5], 2, 2, 4)


PLANES = {4: fp4_planes, 6: fp6_planes, 8: fp8_planes}
CODES = {4: fp4_codes, 6: fp6_codes, 8: fp8_codes}
