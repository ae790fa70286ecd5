"""quantise_rows: activations as the e4m3 tiles and scales that gemm_sm90a reads.

    scale[b, m] = max |x[m, k]| over the 128 inputs k of block b, / 448;  1 where all are zero
    tiles       = x / scale, rounded to e4m3; each four inputs in packed.ORDER, as unpack_e4m3 leaves a matrix

    x      f32, f16 or bf16 (u16) [M, K]                 K a multiple of 128
    tiles  u8 [ceil(M / 128), K / 128, 128, 128]         gemm_sm90a.py draws them; rows beyond M become zeros
    scale  f32 [K / 128, M rounded up to 128]

A warp takes a row's 128 inputs, a lane four of them; a block eight rows. e4m3 keeps 3 bits of mantissa: of a number between
the block's largest and 2^-15 of it the error is at most 2^-4 of itself.
"""
import functools

import numpy as np

from .. import numerics
from . import gemm_sm90a, packed, ptx, reduce
from .build import kernel
from .octet import format_of
from .parity import Output
from .ptx import u32, u64
from .unroll import static_range

WARPS = 8
TILE = gemm_sm90a.TILE
LARGEST = 448.0
REGISTERS = 48
SASS = {"sm_90a": ("F2FP.SATFINITE.E4M3", "STG.E"), "sm_120a": ("F2FP.SATFINITE.E4M3", "STG.E")}
# A quotient is off by 2^-22 of itself (rcp.approx, two products), so it may round to the reference's neighbour: one
# step of e4m3, 2^-3 of the number, where the reference's own rounding is half a step.
OUTPUTS = {"tiles": Output(rtol=2.0 ** -3, atol=2.0 ** -9), "scale": Output(rtol=2.0 ** -23)}


def ref(x):
    """By numerics' codec, in float64 before."""
    m, k = x.shape
    values = (numerics.decode_bf16(x) if x.dtype == np.uint16 else x).astype(np.float64)
    blocks = np.zeros((-(-m // TILE) * TILE, k // TILE, TILE))
    blocks[:m] = values.reshape(m, k // TILE, TILE)
    top = np.abs(blocks).max(-1)
    factor = np.where(top > 0, top / LARGEST, 1.0)
    codes = numerics.E4M3.encode((blocks / factor[..., None]).astype(np.float32)).reshape(-1, k)
    arranged = gemm_sm90a.arrange(packed.byte_order(codes))
    return dict(tiles=numerics.E4M3.decode(arranged).astype(np.float64), scale=factor.T)


@functools.cache
def build(x_format):
    """The kernel."""
    wide = x_format == "f32"

    @kernel(threads=32 * WARPS)
    def quantise_rows(x: u64, tiles: u64, scale: u64, rows: u32, blocks: u32, padded: u32):
        lane, row, b = ptx.lane(), u32(ptx.block_x() * WARPS + ptx.thread_x() // 32), ptx.block_y()
        ptx.launch_dependents()
        ptx.wait_dependencies()
        at = (u64(min(row, u32(rows - 1))) * blocks + b) * 128 + lane * 4
        if wide:
            v = ptx.read_f32x4(x + at * 4)
        else:
            two = ptx.read_x2(x + at * 2)
            if x_format == "f16":
                v = ptx.f32x2_f16x2(two[0]) + ptx.f32x2_f16x2(two[1])
            else:
                v = (ptx.f32_bits(u32(two[0] << 16)), ptx.f32_bits(two[0] & 0xFFFF0000),
                     ptx.f32_bits(u32(two[1] << 16)), ptx.f32_bits(two[1] & 0xFFFF0000))
        v = tuple(ptx.select(row < rows, v[j], 0.0) for j in static_range(4))
        top = reduce.warp_max(ptx.maximum(ptx.maximum(ptx.absolute(v[0]), ptx.absolute(v[1])),
                                          ptx.maximum(ptx.absolute(v[2]), ptx.absolute(v[3]))))
        some = top > 0.0
        inverse = ptx.select(some, LARGEST * ptx.reciprocal(top), 0.0)
        low = u32(ptx.e4m3x2(v[0] * inverse, v[2] * inverse))           # packed.ORDER: 0, 2, 1, 3
        high = u32(ptx.e4m3x2(v[1] * inverse, v[3] * inverse))
        r = u32(row % 128)
        place = u32((lane // 4) ^ (r & 7))
        to = tiles + (u64(row // 128) * blocks + b) * gemm_sm90a.TILE_BYTES + r * 128 + place * 16 + lane % 4 * 4
        ptx.store_u32(to, u32(low | high << 16))
        if lane == 0:
            ptx.store_f32(scale + (u64(b) * padded + row) * 4, ptx.select(some, top * (1.0 / LARGEST), 1.0))
    return quantise_rows


def launch(stream, x, tiles, scale):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    (rows, k), m_tiles = x.shape, -(-x.shape[0] // TILE)
    if not k or k % TILE:
        raise ValueError(f"x must have a positive multiple of {TILE} columns, got {k}")
    for name, array, dtype, shape in (("tiles", tiles, np.uint8, (m_tiles, k // TILE, TILE, TILE)),
                                      ("scale", scale, np.float32, (k // TILE, m_tiles * TILE))):
        if tuple(array.shape) != shape or array.dtype != dtype:
            raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, got {array.dtype} {tuple(array.shape)}")
    if rows:
        stream.launch(build(format_of("x", x, "f32", "f16", "bf16")), (m_tiles * TILE // WARPS, k // TILE, 1), x, tiles,
                      scale, rows, k // TILE, m_tiles * TILE)


CASES = (
    dict(m=130, k=256),                                                # ragged: two rows of the second tile, the rest zeros
    dict(m=5, k=384, x="f16"),
    dict(m=1, k=128, x="bf16"),
    dict(m=0, k=128),
)


def make(rng, m=4096, k=5120, x="f32"):
    """Normal values of very different sizes; one block of all zeros."""
    values = rng.standard_normal((m, k)).astype(np.float32) * np.repeat(2.0 ** rng.integers(-6, 7, (m, k // 128)), 128, 1)
    values[:1, :128] = 0
    values = values.astype(np.float32)
    x = (values.view(np.uint32) >> 16).astype(np.uint16) if x == "bf16" else values.astype(
        np.float16 if x == "f16" else np.float32)
    m_tiles = -(-m // TILE)
    return dict(x=x, tiles=np.empty((m_tiles, k // TILE, TILE, TILE), np.uint8),
                scale=np.empty((k // TILE, m_tiles * TILE), np.float32))


def cost(m=4096, k=5120, x="f32"):
    """Bytes that must move, and float operations."""
    return dict(bytes=m * k * ((4 if x == "f32" else 2) + 1) + m * k // TILE * 4, flops=3 * m * k)
