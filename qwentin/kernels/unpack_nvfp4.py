"""unpack_nvfp4: a matrix in nvfp4 as the tiles that gemm_sm90a reads; unpack_e4m3.py's other half, and not exact.

    value   = code * scale of 16 inputs * factor of the row's 128, rounded to e4m3
    factor  = 2^5 / the power of two below the largest of the eight scales, so that what is largest is between 32 and 384
    scales  = alpha / factor

    packed  u8 [N / 128, K / 128, 8, 1152]             e2m1 codes, an e4m3 scale for 16 inputs (packed.py)
    alpha   f32 [N / 16]
    tiles   u8 [N / 128, K / 128, 128, 128]            e4m3; each four inputs in packed.ORDER
    scales  f32 [K / 128, N rounded up to 128]

A code is 1 or 1.5 times a power of two, a scale has 3 bits of mantissa: products with 1 are kept, of those with 1.5 (1.5, 3
and 6) the last bit is rounded away, at most 2^-4 of the weight, 1.3 % of all in the root mean square, beside the 8.4 % that
nvfp4 itself has cost. Scales 2^13 times smaller than the largest of their 128 lose digits too.

A block takes a piece of 128 x 128, a warp one of its tiles of 16 rows, a lane the codes that packed.py gives it.
"""
import functools

import numpy as np

from .. import numerics
from . import octet, packed, ptx, registers
from .build import device, kernel
from .packed import DEPTH, NVFP4, ROWS, STRIP, TILES
from .parity import Output
from .ptx import u32, u64
from .unroll import static_range

THREADS = 32 * TILES
LARGEST = 5                   # the power of two that the largest scale is brought to
REGISTERS = 112
SASS = {chip: ("LDG.E.128", "STG.E.64", "F2FP.SATFINITE.E4M3") for chip in ("sm_90a", "sm_120a")}
OUTPUTS = {"tiles": Output(exact=True), "scales": Output()}


def ref(packed_matrix, alpha, n):
    """By packed.unpack and numerics' codecs."""
    codes, scales = packed.unpack(NVFP4, packed_matrix, packed_matrix.shape[0] * STRIP)
    rows, k = codes.shape
    scale = numerics.E4M3.decode(scales).astype(np.float64).reshape(rows, k // DEPTH, 8)
    top = scale.max(-1, keepdims=True)
    factor = np.where(top > 0, 2.0 ** (LARGEST - np.floor(np.log2(np.where(top > 0, top, 1)))), 1)
    values = numerics.E2M1.decode(codes).astype(np.float64).reshape(rows, k // DEPTH, 8, 16) * (scale * factor)[..., None]
    made = packed.byte_order(numerics.E4M3.encode(values.astype(np.float32)).reshape(rows, k))
    chunks = made.reshape(-1, STRIP, k // DEPTH, DEPTH // 16, 16).transpose(0, 2, 1, 3, 4)
    tiles = np.empty_like(chunks)
    for row in range(STRIP):
        for chunk in range(DEPTH // 16):
            tiles[:, :, row, chunk ^ row % 8] = chunks[:, :, row, chunk]
    each = np.repeat(alpha, ROWS).astype(np.float64)
    each = np.concatenate([each, np.full(rows - len(each), alpha[-1])])
    return dict(tiles=tiles.reshape(-1, k // DEPTH, STRIP, DEPTH), scales=(each[:, None] / factor[..., 0]).T)


@functools.cache
def build():
    """The kernel."""
    tile_bytes, code_bytes = NVFP4.tile_bytes, NVFP4.code_bytes

    made = registers.registers_of(4)

    @device
    def largest(words):
        """The largest byte of two words of positive e4m3 codes."""
        top = u32(0)
        for j in static_range(8):
            top = max(top, u32(words[j // 4] >> (8 * (j % 4)) & 0x7F))
        return top

    @kernel(threads=THREADS)
    def unpack_nvfp4(packed: u64, alpha: u64, tiles: u64, scales: u64, strips: u32, count: u32):
        lane, tile, piece = ptx.lane(), u32(ptx.thread_x() // 32), ptx.block_x()
        deep, pieces = ptx.block_y(), ptx.blocks_y()
        g, t = u32(lane // 4), u32(lane % 4)
        here = packed + (u64(piece) * pieces + deep) * (TILES * tile_bytes) + tile * tile_bytes
        to = tiles + (u64(piece) * pieces + deep) * (STRIP * DEPTH)
        planes = tuple(ptx.load_x4(here + (p * 512 + lane * 16)) for p in static_range(2))
        for r in static_range(2):
            own = tuple(ptx.load_u32(here + code_bytes + (g * 16 + h * 8 + r * 4)) for h in static_range(2))
            top = largest(own)
            mine = ptx.select(t < 2, own[0], own[1])             # the lane's eight inputs 32 b + 8 t lie in one half of 32
            # e4m3's exponent is off by 7 and, of subnormal codes, hidden in the mantissa: the float32's says it
            power = u32(ptx.bits_f32(octet.byte(top, 0)) >> 23)
            factor = ptx.select(top > 0, ptx.f32_bits(u32(u32(254 + LARGEST) - power) << 23), 1.0)
            row = u32(tile * 16 + 2 * g + r)
            for b in static_range(4):
                scale = octet.byte(u32(mine >> (8 * b) & 0x7F), 0) * factor * 2.0 ** 14
                halves = made((planes[b // 2][b % 2 * 2], planes[b // 2][b % 2 * 2 + 1]))
                pairs = tuple(ptx.f32x2_f16x2(halves[4 * r + i]) for i in static_range(4))           # (s, pair)
                place = u32((2 * b + t // 2) ^ (row & 7))
                ptx.store_x2(to + row * DEPTH + place * 16 + t % 2 * 8, tuple(
                    u32(u32(ptx.e4m3x2(scale * pairs[2 * s][0], scale * pairs[2 * s + 1][0]))
                        | u32(ptx.e4m3x2(scale * pairs[2 * s][1], scale * pairs[2 * s + 1][1])) << 16)
                    for s in static_range(2)))
            if t == 0:
                a = ptx.load_f32(alpha + min(u32(piece * TILES + tile), u32(count - 1)) * 4)
                inverse = ptx.select(top > 0, ptx.f32_bits(u32(power - LARGEST) << 23), 1.0)
                ptx.store_f32(scales + (u64(deep) * strips * STRIP + piece * STRIP + row) * 4, a * inverse)
    return unpack_nvfp4


def launch(stream, packed_matrix, alpha, tiles, scales, n):
    """Queue it on a stream; n: rows of the matrix."""
    strips, deep = packed_matrix.shape[:2]
    for name, array, dtype, shape in (("packed_matrix", packed_matrix, np.uint8, NVFP4.shape(n, deep * DEPTH)),
                                      ("alpha", alpha, np.float32, (-(-n // ROWS),)),
                                      ("tiles", tiles, np.uint8, (strips, deep, STRIP, DEPTH)),
                                      ("scales", scales, np.float32, (deep, strips * STRIP))):
        if tuple(array.shape) != shape or array.dtype != dtype:
            raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, got {array.dtype} {tuple(array.shape)}")
    stream.launch(build(), (strips, deep, 1), packed_matrix, alpha, tiles, scales, strips, -(-n // ROWS))


CASES = (
    dict(n=256, k=256),
    dict(n=144, k=128),                                                # ragged: a tile of the second strip, the rest zeros
    dict(n=16, k=128, flat=True),                                      # no scale is more than 2^-9: subnormal codes
)


def make(rng, n=34816, k=5120, flat=False):
    """A random packed matrix; scales of a row's 128 inputs differ by up to 2^12, one row has none."""
    codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
    scales = np.full((n, k // 16), 1, np.uint8) if flat else rng.integers(1, 0x7F, (n, k // 16)).astype(np.uint8)
    scales[0] = 0
    matrix = packed.pack(NVFP4, codes, scales)
    strips, deep = matrix.shape[:2]
    return dict(packed_matrix=matrix, alpha=rng.uniform(0.5, 2, -(-n // ROWS)).astype(np.float32),
                tiles=np.empty((strips, deep, STRIP, DEPTH), np.uint8),
                scales=np.empty((deep, strips * STRIP), np.float32), n=n)


def cost(n=34816, k=5120, flat=False):
    """Bytes that must move, and operations."""
    pieces = -(-n // STRIP) * (k // DEPTH)
    return dict(bytes=pieces * (TILES * NVFP4.tile_bytes + STRIP * DEPTH + 4 * STRIP), flops=6 * pieces * STRIP * DEPTH)
