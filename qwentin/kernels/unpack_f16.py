"""unpack_f16: a packed matrix as the f16 tiles that gemm_sm90a reads: unpack_e4m3.py where activations stay in 16 bits.

    packed   u8 [N / 128, K / 128, 8, tile_bytes]      fp6 or fp8 with block 128, or nvfp4 (packed.py)
    alpha    f32 [N / 16]                              nvfp4 only
    tiles    f16 [N / 128, K / 64, 128, 64]            a weight: tiles * scales, inputs in their order
    scales   f32 [1, N rounded up to 128]

                tiles                       scales
    nvfp4       code * scale * 2^-14        alpha * 2^14      exact: 2 and 4 bits of mantissa, the last worth 2^-24
    fp6, fp8    code * scale * 2^6          2^-6              rounded once: 4 and 8 bits are up to 12, f16 has 11

The twelfth bit is needed where codes and scales are odd and their product passes 2^11: of normal weights a twelfth lose
2^-12 to 2^-11 of themselves, 1.4e-4 of all in the root mean square, where rounding x to f16 costs 2.1e-4, fp6 itself 2.5e-2.
2^6 is for range: weights down to 2^-20 keep their bits, smaller ones lose 2^-31; from 1,023 on they would be infinite.

A block takes a piece of 128 x 128, a warp one of its tiles of 16 rows, a lane the codes that packed.py gives it: rows 2g
and 2g + 1, of each 32 inputs the 8 from 8t on, which are 16 bytes of a row of the output: four registers of spread.py.
27B: 20 GB of fp6 read and 54 GB written.
"""
import functools

import numpy as np

from .. import numerics
from . import packed, ptx, registers
from .build import kernel, lineless_device
from .gemm_sm90a import F16_WIDTH as WIDTH
from .gemm_sm90a import TILE_BYTES, arrange
from .gemv import PACKINGS
from .packed import DEPTH, ROWS, STRIP, TILES
from .parity import Output
from .ptx import u32, u64
from .unroll import static_range

THREADS = 32 * TILES
PLACED = {4: 14, 6: 14, 8: 8}           # bits of code: the power of two that its place in an f16 loses
RAISED = 6
MAGNITUDE, SIGN = 0x3F803F80, 0x80008000       # of two e4m3 codes in f16's places
REGISTERS = 80
SASS = {chip: ("LDG.E.128", "STG.E.128", "HMUL2") for chip in ("sm_90a", "sm_120a")}
OUTPUTS = {"tiles": Output(), "scales": Output()}


def takes(packing) -> bool:
    """Whether matrices in this packing can be unpacked."""
    return packing.block == 128 and packing.codes.bits in (6, 8) or packing == packed.NVFP4


def ref(packed_matrix, alpha, n, packing):
    """By packed.unpack and numerics' codecs; nothing is rounded."""
    rows = packed_matrix.shape[0] * STRIP
    codes, scales = packed.unpack(packing, packed_matrix, rows)
    micro = packing.block == 16
    scales = (numerics.E4M3.decode(scales) if micro else numerics.decode_bf16(scales)).astype(np.float64)
    values = packing.codes.decode(codes).astype(np.float64) * np.repeat(scales, packing.block, 1)
    factor = np.repeat(alpha, ROWS)[:n] * 2.0 ** 14 if micro else np.full(n, 2.0 ** -RAISED)
    tiles = arrange(values * 2.0 ** (-14 if micro else RAISED), WIDTH)
    return dict(tiles=tiles, scales=np.concatenate([factor, np.full(rows - n, factor[-1])])[None])


@functools.cache
def build(packing):
    """The kernel of a packing."""
    bits, micro, tile_bytes, code_bytes = packing.codes.bits, packing.block == 16, packing.tile_bytes, packing.code_bytes
    eight, planes_count = bits == 8, bits // 2
    placed = int(np.float16(2.0 ** PLACED[bits]).view(np.uint16)) * 0x10001
    spread = None if eight else registers.registers_of(bits)

    @lineless_device
    def row_of(words):
        """Two words of e4m3 codes, eight inputs of a row -> four registers. A pair is bytes 0 and 2, or 1 and 3."""
        return tuple(((u32(words[i // 2] << 7) if i % 2 == 0 else words[i // 2] >> 1) & MAGNITUDE)
                     | (u32(words[i // 2] << (8 - i % 2 * 8)) & SIGN) for i in static_range(4))

    @lineless_device
    def codes_of(planes, b):
        """The eight registers of 32 inputs: row 2g, then row 2g + 1."""
        if eight:
            return row_of((planes[b][0], planes[b][2])) + row_of((planes[b][1], planes[b][3]))
        elif bits == 6:
            return spread((planes[b // 2][b % 2 * 2], planes[b // 2][b % 2 * 2 + 1], planes[2][b]))
        else:
            return spread((planes[b // 2][b % 2 * 2], planes[b // 2][b % 2 * 2 + 1]))

    @lineless_device
    def scales_of(here, g, t):
        """Of the lane's inputs: a register of two f16 for each row; nvfp4: two registers a row, of 64 inputs each."""
        if micro:
            own = tuple(ptx.load_u32(here + code_bytes + (g * 16 + t // 2 * 8 + r * 4)) for r in static_range(2))
            return tuple((ptx.f16x2_e4m3x2_low(own[r]), ptx.f16x2_e4m3x2_high(own[r])) for r in static_range(2))
        else:
            pair = ptx.load_u32(here + code_bytes + g * 4)
            low, high = ptx.f32_bits(u32(pair << 16)) * 2.0 ** RAISED, ptx.f32_bits(pair & 0xFFFF0000) * 2.0 ** RAISED
            return ptx.f16x2(low, low), ptx.f16x2(high, high)

    @lineless_device
    def times(a, scales, b):
        """A register of row's codes times their scale."""
        if micro and b % 2 == 0:
            return ptx.mul_f16x2_low(a, scales[b // 2])
        elif micro:
            return ptx.mul_f16x2_high(a, scales[b // 2])
        else:
            return ptx.mul_f16x2(ptx.mul_f16x2(a, placed), scales)

    @kernel(threads=THREADS)
    def unpack_f16(packed: u64, alpha: u64, tiles: u64, scales: u64, count: u32):
        lane, tile, piece = ptx.lane(), u32(ptx.thread_x() // 32), ptx.block_x()
        deep, pieces = ptx.block_y(), ptx.blocks_y()
        g, t = u32(lane // 4), u32(lane % 4)
        here = packed + (u64(piece) * pieces + deep) * (TILES * tile_bytes) + tile * tile_bytes
        to = tiles + (u64(piece) * pieces + deep) * (2 * TILE_BYTES)
        planes = tuple(ptx.load_x4(here + (p * 512 + lane * 16)) for p in static_range(planes_count))
        factors = scales_of(here, g, t)
        for b in static_range(4):
            a = codes_of(planes, b)
            for r in static_range(2):
                row = u32(tile * 16 + 2 * g + r)
                place = u32((b % 2 * 4 + t) ^ (row & 7))
                ptx.store_x4(to + (b // 2 * TILE_BYTES) + row * 128 + place * 16,
                             tuple(times(a[4 * r + i], factors[r], b) for i in static_range(4)))
        if deep == 0 and lane < 16:
            at = scales + (piece * STRIP + tile * 16 + lane) * 4
            if micro:
                ptx.store_f32(at, ptx.load_f32(alpha + min(u32(piece * TILES + tile), u32(count - 1)) * 4) * 2.0 ** 14)
            else:
                ptx.store_f32(at, 2.0 ** -RAISED)
    return unpack_f16


def launch(stream, packed_matrix, alpha, tiles, scales, n, packing):
    """Queue it on a stream; n: rows of the matrix."""
    strips, deep = packed_matrix.shape[:2]
    if not takes(packing):
        raise ValueError(f"fp6 and fp8 with a scale for 128 inputs and nvfp4 can be unpacked to f16, got {packing.name}")
    given = (("packed_matrix", packed_matrix, np.uint8, packing.shape(n, deep * DEPTH)),
             ("tiles", tiles, np.float16, (strips, 2 * deep, STRIP, WIDTH)),
             ("scales", scales, np.float32, (1, strips * STRIP)))
    if packing.block == 16:
        given += ("alpha", alpha, np.float32, (-(-n // ROWS),)),
    for name, array, dtype, shape in given:
        if array is None or tuple(array.shape) != shape or array.dtype != dtype:
            found = None if array is None else f"{array.dtype} {tuple(array.shape)}"
            raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, got {found}")
    stream.launch(build(packing), (strips, deep, 1), packed_matrix, 0 if alpha is None else alpha, tiles, scales,
                  -(-n // ROWS))


CASES = (
    dict(n=144, k=256),                                                # ragged: 16 rows of the second strip, the rest zeros
    dict(n=1, k=128, packing="fp8"),
    dict(n=144, k=128, packing="nvfp4"),
)


def make(rng, n=34816, k=5120, packing="fp6"):
    """A random packed matrix."""
    kind = PACKINGS[packing]
    codes = rng.integers(0, 1 << kind.codes.bits, (n, k)).astype(np.uint8)
    if kind.codes.bits == 8:
        codes[codes & 0x7F == 0x7F] = 0x30
    if kind.block == 16:
        scales = rng.integers(0, 0x7F, (n, k // 16)).astype(np.uint8)
    else:
        scales = (rng.uniform(0.01, 0.1, (n, k // 128)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    matrix = packed.pack(kind, codes, scales)
    strips, deep = matrix.shape[:2]
    alpha = rng.uniform(0.5, 2, -(-n // ROWS)).astype(np.float32) if kind.block == 16 else None
    return dict(packed_matrix=matrix, alpha=alpha,
                tiles=np.empty((strips, 2 * deep, STRIP, WIDTH), np.float16),
                scales=np.empty((1, strips * STRIP), np.float32), n=n, packing=kind)


def cost(n=34816, k=5120, packing="fp6"):
    """Bytes that must move, and operations."""
    strips, deep = -(-n // STRIP), k // DEPTH
    return dict(bytes=strips * (deep * (TILES * PACKINGS[packing].tile_bytes + 2 * STRIP * DEPTH) + 4 * STRIP),
                flops=2 * strips * deep * STRIP * DEPTH)
