"""Rows as the e4m3 tiles that gemm_sm90a reads, written by the kernel that makes them: quantise_rows.py without the detour.

    tiles  u8 [ceil(M / 128), K / 128, 128, 128]        gemm_sm90a.py draws them; each four inputs in packed.ORDER
    scale  f32 [K / 128, M rounded up to 128]           max |x| over a row's 128 inputs, / 448;  1 where all are zero

Half a warp holds 128 neighbouring inputs of a row, an octet a lane. `coded` is for whole warps, `put` for the lanes whose
octets exist. Rows beyond M are left as they were: a product reads them, nobody its results.
"""
import numpy as np

from . import gemm_sm90a, ptx, quantise_rows
from .build import device
from .parity import Output
from .ptx import u32, u64
from .quantise_rows import LARGEST
from .unroll import static_range

TILE = gemm_sm90a.TILE
OCTETS = TILE // 8                                    # of a block
OUTPUTS = {"tiles": quantise_rows.OUTPUTS["tiles"], "scale": Output(rtol=2.0 ** -16)}


@device
def coded(x):
    """(two words, the scale) of a lane's octet."""
    top = ptx.absolute(x[0])
    for j in static_range(7):
        top = ptx.maximum(top, ptx.absolute(x[j + 1]))
    for step in static_range(4):
        top = ptx.maximum(top, ptx.shuffle_xor_f32(top, OCTETS // 2 >> step))
    some = top > 0.0
    inverse = ptx.select(some, LARGEST * ptx.reciprocal(top), 0.0)
    y = tuple(x[j] * inverse for j in static_range(8))
    words = tuple(u32(u32(ptx.e4m3x2(y[4 * h], y[4 * h + 2])) | u32(ptx.e4m3x2(y[4 * h + 1], y[4 * h + 3])) << 16)
                  for h in static_range(2))
    return words, ptx.select(some, top * (1.0 / LARGEST), 1.0)


@device
def put(tiles, scale, row, octet, made, blocks, padded):
    """Octet `octet` of a row of so many blocks; padded: M rounded up to 128."""
    r, b, o = u32(row % TILE), u32(octet // OCTETS), u32(octet % OCTETS)
    place = u32((o // 2) ^ (r & 7))
    to = tiles + (u64(row // TILE) * blocks + b) * gemm_sm90a.TILE_BYTES + r * TILE + place * 16 + o % 2 * 8
    ptx.store_x2(to, made[0])
    if o == 0:
        ptx.store_f32(scale + (u64(b) * padded + row) * 4, made[1])


def ref(x):
    """dict(tiles, scale) of float64 [M, K], as quantise_rows has it; NaN in rows beyond M."""
    made, (rows, k) = quantise_rows.ref(x), x.shape
    written = gemm_sm90a.arrange(np.ones((rows, k), np.uint8))
    made["scale"][:, rows:] = np.nan
    return dict(made, tiles=np.where(written, made["tiles"], np.nan))


def check(name, rows, columns, tiles, scale):
    """(blocks, padded); ValueError unless they are the arrays for so many rows and columns."""
    count, padded = columns // TILE, -(-rows // TILE) * TILE
    if columns % TILE or tuple(tiles.shape) != (padded // TILE, count, TILE, TILE) or tiles.dtype != np.uint8:
        raise ValueError(f"tiles of {name} must be uint8 {(padded // TILE, count, TILE, TILE)}, its columns a multiple of "
                         f"{TILE}, got {tiles.dtype} {tuple(tiles.shape)} for {columns}")
    if tuple(scale.shape) != (count, padded) or scale.dtype != np.float32:
        raise ValueError(f"scale must be float32 {(count, padded)}, got {scale.dtype} {tuple(scale.shape)}")
    return count, padded


def empty(rows, columns):
    """dict(tiles, scale) of numpy arrays to be written."""
    padded = -(-rows // TILE) * TILE
    return dict(tiles=np.empty((padded // TILE, columns // TILE, TILE, TILE), np.uint8),
                scale=np.empty((columns // TILE, padded), np.float32))
