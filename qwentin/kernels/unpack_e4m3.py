"""unpack_e4m3: a packed matrix as the tiles that gemm_sm90a reads: once for a chunk of prefill, whose rows pay for it.

    packed   u8 [N / 128, K / 128, 8, tile_bytes]      fp6 or fp8 with block 128 (packed.py)
    tiles    u8 [N / 128, K / 128, 128, 128]           e4m3; each four inputs in packed.ORDER
    scales   f32 [K / 128, N rounded up to 128]        times 2^6 for fp6: an e2m3 code in an e4m3's place is its value 2^-6

A block takes a piece of 128 x 128, a warp one of its tiles of 16 rows, a lane the codes that packed.py gives it: rows 2g
and 2g + 1, of each 32 inputs the 8 from 8t on, which are 8 bytes of a row of the output. Four codes of fp6 are made at once:

    low four bits of word w, rotated right by 4 s + w | top exponent bits and signs of their word, rotated by as much

so a weight costs two operations, and 27B 20 GB read and 27 GB written: 10 ms on an H200, beside 184 of products at 4,096.
"""
import functools

import numpy as np

from . import packed, ptx, registers
from .build import kernel
from .gemv import PACKINGS
from .packed import DEPTH, STRIP, TILES
from .parity import Output
from .ptx import u32, u64
from .unroll import static_range

THREADS = 32 * TILES
PLACED = {6: 6, 8: 0}         # bits of code: the power of two that its place in an e4m3 loses
REGISTERS = 80
SASS = {"sm_90a": ("LDG.E.128", "STG.E.64"), "sm_120a": ("LDG.E.128", "STG.E.64")}
OUTPUTS = {"tiles": Output(exact=True), "scales": Output()}


def ref(packed_matrix, n, packing):
    """By packed.unpack; codes placed in e4m3, rows in gemm_sm90a's tiles."""
    codes, scales = packed.unpack(packing, packed_matrix, packed_matrix.shape[0] * STRIP)
    if packing.codes.bits == 6:
        codes = codes & 0x1F | (codes & 0x20) << 2
    rows, k = codes.shape
    chunks = packed.byte_order(codes).reshape(-1, STRIP, k // DEPTH, DEPTH // 16, 16).transpose(0, 2, 1, 3, 4)
    tiles = np.empty_like(chunks)
    for row in range(STRIP):
        for chunk in range(DEPTH // 16):
            tiles[:, :, row, chunk ^ row % 8] = chunks[:, :, row, chunk]
    values = packed.SCALES[128][1](scales).astype(np.float64).T * 2.0 ** PLACED[packing.codes.bits]
    return dict(tiles=tiles.reshape(-1, k // DEPTH, STRIP, DEPTH), scales=values)


@functools.cache
def build(packing):
    """The kernel of a packing with scales for 128 inputs."""
    tile_bytes, code_bytes, six = packing.tile_bytes, packing.code_bytes, packing.codes.bits == 6
    factor = 2.0 ** PLACED[packing.codes.bits]

    made, joined = (registers.registers_of(6), registers.bytes_of(6)) if six else (None, None)

    @kernel(threads=THREADS)
    def unpack_e4m3(packed: u64, tiles: u64, scales: u64, strips: u32):
        lane, tile, piece = ptx.lane(), u32(ptx.thread_x() // 32), ptx.block_x()
        deep = ptx.block_y()
        pieces = ptx.blocks_y()
        g, t = u32(lane // 4), u32(lane % 4)
        here = packed + (u64(piece) * pieces + deep) * (TILES * tile_bytes) + tile * tile_bytes
        to = tiles + (u64(piece) * pieces + deep) * (STRIP * DEPTH)
        if six:
            planes = tuple(ptx.load_x4(here + (p * 512 + lane * 16)) for p in static_range(3))
        else:
            planes = tuple(ptx.load_x4(here + (p * 512 + lane * 16)) for p in static_range(4))
        for b in static_range(4):
            if six:
                w = made((planes[b // 2][b % 2 * 2], planes[b // 2][b % 2 * 2 + 1], planes[2][b]))
            for r in static_range(2):
                row = u32(tile * 16 + 2 * g + r)
                if six:
                    words = tuple(joined(w[4 * r + 2 * s], w[4 * r + 2 * s + 1]) for s in static_range(2))
                else:
                    words = (planes[b][r], planes[b][2 + r])
                place = u32((2 * b + t // 2) ^ (row & 7))
                ptx.store_x2(to + row * DEPTH + place * 16 + t % 2 * 8, (u32(words[0]), u32(words[1])))
        if lane < 16:
            scale = ptx.f32_bits(u32(u32(ptx.load_u16(here + code_bytes + lane * 2)) << 16))
            ptx.store_f32(scales + (u64(deep) * strips * STRIP + piece * STRIP + tile * 16 + lane) * 4, scale * factor)
    return unpack_e4m3


def launch(stream, packed_matrix, tiles, scales, n, packing):
    """Queue it on a stream; n: rows of the matrix."""
    strips, deep = packed_matrix.shape[:2]
    if packing.block != 128 or packing.codes.bits not in PLACED:
        raise ValueError(f"fp6 and fp8 with a scale for 128 inputs can be unpacked to e4m3, got {packing.name}")
    for name, array, dtype, shape in (("packed_matrix", packed_matrix, np.uint8, packing.shape(n, deep * DEPTH)),
                                      ("tiles", tiles, np.uint8, (strips, deep, STRIP, DEPTH)),
                                      ("scales", scales, np.float32, (deep, strips * STRIP))):
        if tuple(array.shape) != shape or array.dtype != dtype:
            raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, got {array.dtype} {tuple(array.shape)}")
    stream.launch(build(packing), (strips, deep, 1), packed_matrix, tiles, scales, strips)


CASES = (
    dict(n=256, k=384),
    dict(n=144, k=256, packing="fp8"),                                 # ragged: 16 rows of the second strip, the rest zeros
    dict(n=1, k=128),
)


def make(rng, n=34816, k=5120, packing="fp6"):
    """A random packed matrix."""
    kind = PACKINGS[packing]
    codes = rng.integers(0, 1 << kind.codes.bits, (n, k)).astype(np.uint8)
    if kind.codes.bits == 8:
        codes[codes & 0x7F == 0x7F] = 0x30
    scales = (rng.uniform(0.5, 2, (n, k // 128)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    matrix = packed.pack(kind, codes, scales)
    strips, deep = matrix.shape[:2]
    return dict(packed_matrix=matrix, tiles=np.empty((strips, deep, STRIP, DEPTH), np.uint8),
                scales=np.empty((deep, strips * STRIP), np.float32), n=n, packing=kind)


def cost(n=34816, k=5120, packing="fp6"):
    """Bytes that must move, and integer operations."""
    pieces = -(-n // STRIP) * (k // DEPTH)
    return dict(bytes=pieces * (TILES * PACKINGS[packing].tile_bytes + STRIP * DEPTH + 4 * STRIP),
                flops=2 * pieces * STRIP * DEPTH)
