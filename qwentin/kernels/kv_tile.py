"""A tile of the paged KV cache in shared memory: how it gets there and how the tensor cores read it.

    pages   bf16 (u16) or e4m3 (u8) [P, 128, G, 256]    a row of one group is 32 or 16 chunks of 16 bytes
    tile    some rows of one group of one page. In row r, chunk c stands at place c ^ (r % 8), so that the eight rows that
            ldmatrix reads at once lie in different banks:

              row 0   0 1 2 3 4 5 6 7 | 8 9 ...        row 1   1 0 3 2 5 4 7 6 | 9 8 ...        row 2   2 3 0 1 6 7 ...

Two readers give B fragments of m16n8k16 (ptx_matrix.py draws them). Which dims a fragment holds is the format's choice, as
long as whoever meets it makes the same one: a lane of quad place t takes, of each 16 dims d of a key,

              bf16   d = 2t, 2t+1 and 8 + 2t, 8 + 2t+1      the plain order
              e4m3   d = 4t, 4t+1 and 4t+2, 4t+3            the four bytes of one word, widened to f16

and an output column n of value dims is dim n of a chunk in bf16, dims 2n (first tile) and 2n + 1 (second) in e4m3.
A cache of another format is one more branch in each function, no change in the kernel that reads it.
"""
import functools

from . import ptx
from .build import device
from .ptx import u16, u32, u64
from .unroll import static_range

HEAD = 256                                    # dims of a row: every model of the family
PAGE = 128                                    # rows of a page
ELEMENTS = {"bf16": 8, "e4m3": 16}            # of a chunk
MATRIX = {"bf16": "bf16", "e4m3": "f16"}      # what the fragments hold: the queries and weights they meet must be alike


def row_bytes(format):
    """Bytes of one group's row."""
    return HEAD // ELEMENTS[format] * 16


def mma(format):
    """The matrix instruction for a format's fragments."""
    return {"bf16": ptx.mma_bf16, "f16": ptx.mma_f16}[MATRIX[format]]


def pack(format):
    """Device function: two float32 as one word of what the matrix instruction takes, the first in the low half."""
    return {"bf16": ptx.bf16x2, "f16": ptx.f16x2}[MATRIX[format]]


def dims_of(format):
    """(a, b): of each 16 dims, quad place t holds dims a t, a t + 1, and b further on two more."""
    return {"bf16": (2, 8), "e4m3": (4, 2)}[format]


@functools.cache
def copy(format, rows, threads):
    """Device function (tile, pages, first row, group, groups, rows that are there, thread) -> None: a thread's share of the
    copies is started; rows that are not there become zeros. A row is numbered page * 128 + row."""
    BYTES = row_bytes(format)
    CHUNKS = BYTES // 16
    STEP = threads // CHUNKS                  # rows that the threads take at once

    @device
    def copy_tile(tile, pages, first, group, groups, there, thread):
        chunk, row = u32(thread % CHUNKS), u32(thread // CHUNKS)
        source = pages + (u64(u32(first + row)) * groups + group) * BYTES + chunk * 16
        stride = u32(groups * (STEP * BYTES))
        for k in static_range(rows // STEP):
            r = u32(row + k * STEP)
            to = u32(tile + r * BYTES + (chunk ^ r & 7) * 16)
            ptx.copy_16_zfill(to, source, ptx.select(r < there, u32(16), u32(0)))
            source += stride
    return copy_tile


@functools.cache
def key_fragments(format):
    """Device function (tile, row, j, lane) -> fragments of keys row .. row + 7 over chunks 4j .. 4j + 3, one a k-step of 16
    dims: 2 in bf16, 4 in e4m3."""
    BYTES, PLAIN = row_bytes(format), format == "bf16"

    @device
    def fragments(tile, row, j, lane):
        w = ptx.ldmatrix_x4(u32(tile + (row + lane % 8) * BYTES + (j * 4 + lane // 8 ^ lane % 8) * 16))
        if PLAIN:
            return (w[0], w[1]), (w[2], w[3])
        return tuple(widened(w[k]) for k in static_range(4))
    return fragments


@functools.cache
def value_fragments(format):
    """Device function (tile, row, j, lane) -> fragments of keys row .. row + 15, one for each 8 dims of chunks 2j, 2j + 1:
    2 in bf16, 4 in e4m3 (even and odd dims of a chunk apart)."""
    BYTES, PLAIN = row_bytes(format), format == "bf16"

    @device
    def fragments(tile, row, j, lane):
        w = ptx.ldmatrix_x4_transposed(u32(tile + (row + lane % 16) * BYTES + (j * 2 + lane // 16 ^ lane % 8) * 16))
        if PLAIN:
            return (w[0], w[1]), (w[2], w[3])
        # a word holds two keys of dims 2n, 2n + 1: bring the bytes of a dim together
        x = tuple(widened(ptx.permute(w[k], 0, 0x3120)) for k in static_range(4))
        return (x[0][0], x[1][0]), (x[0][1], x[1][1]), (x[2][0], x[3][0]), (x[2][1], x[3][1])
    return fragments


@device
def widened(word):
    """Four e4m3 as two words of f16; exact."""
    return ptx.f16x2_e4m3x2(u16(word)), ptx.f16x2_e4m3x2(u16(word >> 16))


@functools.cache
def store_dims(format):
    """Device function (address of a row of f32 [256], j, t, x0, x1, y0, y1) -> None: stores dims 16j .. 16j + 15 of a row of
    output tiles x and y, of which a lane of quad place t holds columns 2t and 2t + 1. The tiles are those of chunks 2j and
    2j + 1 in bf16, of the even and odd dims of chunk j in e4m3."""
    PLAIN = format == "bf16"

    @device
    def store(row, j, t, x0, x1, y0, y1):
        if PLAIN:
            ptx.store_f32x2(row + (j * 16 + t * 2) * 4, (x0, x1))
            ptx.store_f32x2(row + (j * 16 + t * 2 + 8) * 4, (y0, y1))
        else:
            ptx.store_f32x4(row + (j * 16 + t * 4) * 4, (x0, y0, x1, y1))
    return store
