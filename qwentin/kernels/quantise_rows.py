"""quantise_rows: activations as the e4m3 tiles and scales that gemm_sm90a and gemm_sm120a read.

    scale[m] = max |x[m, k]| over all k / 448;  1 where all are zero
    tiles    = x / scale, rounded to e4m3; each four inputs in packed.ORDER, as unpack_e4m3 leaves a matrix

    x      f32, f16 or bf16 (u16) [M, K]                 K a multiple of 128
    tiles  u8 [ceil(M / 128), K / 128, 128, 128]         gemm_sm90a.py draws them; rows beyond M become zeros
    scale  f32 [M rounded up to 128]

One scale for a row, not one for 128 inputs: e4m3 is a floating format. From the row's largest number down to 2^-14.8 of it
an error is at most 2^-4 of the number itself, whatever the scale. Relative L2 errors of a product of 17,408 inputs, scales
for 128 and for a row: normal inputs 0.0256 and 0.0262; one input 1,000 times the others 0.0033 and 0.0034, the others by
themselves 0.0258 and 0.0265; 10,000 times 0.0003 both, and 0.0258 and 0.0278.

A warp takes a row, a lane eight neighbours at a time; twice, for the largest and for the codes.
"""
import functools

import numpy as np

from .. import numerics
from . import gemm_sm90a, octet, packed, ptx, reduce
from .build import kernel
from .parity import Output, real
from .ptx import f32, u32, u64
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
    padded = np.zeros((-(-m // TILE) * TILE, k))
    padded[:m] = real(x)
    top = np.abs(padded).max(-1)
    factor = np.where(top > 0, top / LARGEST, 1.0)
    arranged = gemm_sm90a.arrange(packed.byte_order(numerics.E4M3.encode((padded / factor[:, None]).astype(np.float32))))
    return dict(tiles=numerics.E4M3.decode(arranged).astype(np.float64), scale=factor)


@functools.cache
def build(x_format):
    """The kernel."""
    load = octet.load(x_format)

    @kernel(threads=32 * WARPS)
    def quantise_rows(x: u64, tiles: u64, scale: u64, rows: u32, blocks: u32):
        lane, row = ptx.lane(), u32(ptx.block_x() * WARPS + ptx.thread_x() // 32)
        ptx.launch_dependents()
        ptx.wait_dependencies()
        octets, top = u32(blocks * 16), f32(0.0)
        mine = u64(row) * octets
        if row < rows:
            for o in range(lane, octets, 32):
                v = load(x, mine + o)
                for j in static_range(8):
                    top = ptx.maximum(top, ptx.absolute(v[j]))
        top = reduce.warp_max(top)
        some = top > 0.0
        inverse = ptx.select(some, LARGEST * ptx.reciprocal(top), 0.0)
        r = u32(row % 128)
        to = tiles + u64(row // 128) * blocks * gemm_sm90a.TILE_BYTES + r * 128
        for o in range(lane, octets, 32):
            words = (u32(0), u32(0))
            if row < rows:
                v = load(x, mine + o)
                y = tuple(v[j] * inverse for j in static_range(8))
                words = tuple(u32(u32(ptx.e4m3x2(y[4 * h], y[4 * h + 2]))              # packed.ORDER: 0, 2, 1, 3
                                  | u32(ptx.e4m3x2(y[4 * h + 1], y[4 * h + 3])) << 16) for h in static_range(2))
            place = u32((o % 16 // 2) ^ (r & 7))
            ptx.store_x2(to + u64(o // 16) * gemm_sm90a.TILE_BYTES + place * 16 + o % 2 * 8, words)
        if lane == 0:
            ptx.store_f32(scale + u64(row) * 4, ptx.select(some, top * (1.0 / LARGEST), 1.0))
    return quantise_rows


def launch(stream, x, tiles, scale):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    (rows, k), m_tiles = x.shape, -(-x.shape[0] // TILE)
    if not k or k % TILE:
        raise ValueError(f"x must have a positive multiple of {TILE} columns, got {k}")
    for name, array, dtype, shape in (("tiles", tiles, np.uint8, (m_tiles, k // TILE, TILE, TILE)),
                                      ("scale", scale, np.float32, (m_tiles * TILE,))):
        if tuple(array.shape) != shape or array.dtype != dtype:
            raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, got {array.dtype} {tuple(array.shape)}")
    if rows:
        stream.launch(build(octet.format_of("x", x, "f32", "f16", "bf16")), m_tiles * TILE // WARPS, x, tiles, scale, rows,
                      k // TILE)


CASES = (
    dict(m=130, k=256),                                                # ragged: two rows of the second tile, the rest zeros
    dict(m=5, k=384, x="f16"),
    dict(m=1, k=128, x="bf16"),
    dict(m=0, k=128),
)


def make(rng, m=4096, k=5120, x="f32"):
    """Normal values, of very different sizes in different blocks; the last row is all zeros."""
    values = rng.standard_normal((m, k)).astype(np.float32) * np.repeat(2.0 ** rng.integers(-6, 7, (m, k // 128)), 128, 1)
    values[-1:] = 0 if m > 1 else values[-1:]
    values = values.astype(np.float32)
    x = (values.view(np.uint32) >> 16).astype(np.uint16) if x == "bf16" else values.astype(
        np.float16 if x == "f16" else np.float32)
    m_tiles = -(-m // TILE)
    return dict(x=x, tiles=np.empty((m_tiles, k // TILE, TILE, TILE), np.uint8),
                scale=np.empty(m_tiles * TILE, np.float32))


def cost(m=4096, k=5120, x="f32"):
    """Bytes that must move, and float operations."""
    return dict(bytes=m * k * ((4 if x == "f32" else 2) + 1) + m * 4, flops=3 * m * k)
