"""Rows as the e4m3 tiles of wide products, written by the kernel that makes them: quantise_rows.py without the detour.

    tiles  u8 [ceil(M / 128), K / 128, 128, 128]        gemm_sm90a.py draws them; each four inputs in packed.ORDER
    scale  f32 [M rounded up to 128]                    max |x| of a row / 448;  1 where all are zero

A lane has an octet of a row: `coded` makes its bytes, `put` writes them. Rows beyond M stay as they were: a product reads
them, nobody its results.
"""
import numpy as np

from .. import numerics
from . import gemm_sm90a, packed, ptx
from .build import device
from .parity import Output
from .ptx import u32, u64
from .unroll import static_range

TILE = gemm_sm90a.TILE
OCTETS = TILE // 8                                    # of a block of 128 inputs
LARGEST = 448.0                                       # of e4m3
# A quotient is off by 2^-19 of itself or less, so it may round to the reference's neighbour: one step of e4m3, 2^-3 of the
# number or 2^-9 where codes are subnormal, where the reference's own rounding is half a step.
OUTPUTS = {"tiles": Output(rtol=2.0 ** -3, atol=2.0 ** -9), "scale": Output(rtol=2.0 ** -18)}


@device
def largest(x):
    """Of an octet, in size."""
    top = ptx.absolute(x[0])
    for j in static_range(7):
        top = ptx.maximum(top, ptx.absolute(x[j + 1]))
    return top


@device
def coded(x, inverse):
    """Two words: the octet times `inverse` in e4m3."""
    y = tuple(x[j] * inverse for j in static_range(8))
    return tuple(u32(u32(ptx.e4m3x2(y[4 * h], y[4 * h + 2])) | u32(ptx.e4m3x2(y[4 * h + 1], y[4 * h + 3])) << 16)
                 for h in static_range(2))


@device
def put(tiles, row, octet, words, blocks):
    """Octet `octet` of a row of so many blocks of 128 inputs."""
    r, b, o = u32(row % TILE), u32(octet // OCTETS), u32(octet % OCTETS)
    place = u32((o // 2) ^ (r & 7))
    ptx.store_x2(tiles + (u64(row // TILE) * blocks + b) * gemm_sm90a.TILE_BYTES + r * TILE + place * 16 + o % 2 * 8, words)


def ref(x):
    """dict(tiles, scale) of float64 [M, K]; NaN in rows beyond M."""
    rows, k = x.shape
    top = np.abs(x).max(-1, keepdims=True, initial=0)
    factor = np.where(top > 0, top / LARGEST, 1.0)
    codes = gemm_sm90a.arrange(packed.byte_order(numerics.E4M3.encode((x / factor).astype(np.float32))))
    written = gemm_sm90a.arrange(np.ones((rows, k), np.uint8))
    scale = np.full(-(-rows // TILE) * TILE, np.nan)
    scale[:rows] = factor[:, 0]
    return dict(tiles=np.where(written, numerics.E4M3.decode(codes).astype(np.float64), np.nan), scale=scale)


def check(name, rows, columns, tiles, scale):
    """ValueError unless they are the arrays for so many rows and columns."""
    count, padded = columns // TILE, -(-rows // TILE) * TILE
    if columns % TILE or tuple(tiles.shape) != (padded // TILE, count, TILE, TILE) or tiles.dtype != np.uint8:
        raise ValueError(f"tiles of {name} must be uint8 {(padded // TILE, count, TILE, TILE)}, its columns a multiple of "
                         f"{TILE}, got {tiles.dtype} {tuple(tiles.shape)} for {columns}")
    if tuple(scale.shape) != (padded,) or scale.dtype != np.float32:
        raise ValueError(f"scale must be float32 {(padded,)}, got {scale.dtype} {tuple(scale.shape)}")


def empty(rows, columns):
    """dict(tiles, scale) of numpy arrays to be written."""
    padded = -(-rows // TILE) * TILE
    return dict(tiles=np.empty((padded // TILE, columns // TILE, TILE, TILE), np.uint8), scale=np.empty(padded, np.float32))
