"""kv_tile: a tile is copied out of the right page, its absent rows are zero, and both readers give the elements they say."""
import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

from qwentin import numerics
from qwentin.kernels import kv_tile, machines, ptx
from qwentin.kernels.build import CHIPS, kernel
from qwentin.kernels.ptx import u32, u64
from qwentin.kernels.unroll import static_range

GROUPS, THREADS, ROWS = 3, 64, 32
FIRST, GROUP, THERE = 128 + 32, 1, 21        # rows 32 .. 63 of page 1, of which 21 are there
DTYPE = {"bf16": np.uint16, "e4m3": np.uint8}


def pages_of(format):
    """Two pages of random codes; the absent rows of the tile are NaN."""
    codes = np.random.default_rng(0).integers(0, 0x7E, (2, 128, GROUPS, 256)).astype(np.uint8)
    values = numerics.E4M3.decode(codes)
    pages = codes if format == "e4m3" else numerics.encode_bf16(values)
    pages[1, 32 + THERE:64] = 0x7F if format == "e4m3" else 0x7FFF
    want = values[1, 32:64, GROUP].copy()
    want[THERE:] = 0
    return pages, want


def halves(words, format):
    """Two numbers a word, as the matrix instruction takes them."""
    pairs = words[..., None].view(np.uint16)
    return numerics.decode_bf16(pairs) if kv_tile.MATRIX[format] == "bf16" else pairs.view(np.float16).astype(np.float32)


def fragments(format, reader, rows, pieces, chip):
    """The words [row block, piece j, lane, fragment, 2] that a reader gives over the whole tile."""
    copy, read, bytes_ = kv_tile.copy(format, ROWS, THREADS), reader(format), kv_tile.row_bytes(format)
    count = kv_tile.ELEMENTS[format] // 4

    @kernel(threads=THREADS, shared=ROWS * bytes_)
    def read_tile(pages: u64, out: u64):
        tile = ptx.shared_address(cuda.shared.array(0, types.uint8))
        copy(tile, pages, u32(FIRST), u32(GROUP), u32(GROUPS), u32(THERE), ptx.thread_x())
        ptx.copy_wait_all()
        ptx.barrier()
        if ptx.thread_x() < 32:
            lane = ptx.lane()
            for i in range(ROWS // rows):
                for j in range(pieces):
                    f = read(tile, u32(i * rows), j, lane)
                    for k in static_range(count):
                        ptx.store_x2(out + (((i * pieces + j) * 32 + lane) * count + k) * 8, f[k])
    out = np.zeros((ROWS // rows, pieces, 32, count, 2), np.uint32)
    pages, want = pages_of(format)
    machines.EmulatorStream(chip).launch(read_tile, 1, pages, out)
    return halves(out, format), want


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("format", DTYPE)
def test_key_fragments(format, chip):
    """Column g is key g of eight; each k-step takes 16 dims, in the order that `dims_of` says."""
    pieces = 256 // kv_tile.ELEMENTS[format] // 4
    got, want = fragments(format, kv_tile.key_fragments, 8, pieces, chip)
    near, far = kv_tile.dims_of(format)
    steps = got.shape[3]
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for j in range(pieces):
            for k in range(steps):
                first = (j * steps + k) * 16 + t * near
                for word in range(2):
                    dims = first + word * far + np.arange(2)
                    assert (got[:, j, lane, k, word] == want[g::8][:, dims]).all()


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("format", DTYPE)
def test_value_fragments(format, chip):
    """Column g is a dim, k runs over 16 keys; bf16 takes a chunk's 8 dims, e4m3 the even, then the odd of its 16."""
    pieces = 256 // kv_tile.ELEMENTS[format] // 2
    got, want = fragments(format, kv_tile.value_fragments, 16, pieces, chip)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for j in range(pieces):
            for tile in range(got.shape[3]):
                dim = (j * 2 + tile) * 8 + g if format == "bf16" else (j * 2 + tile // 2) * 16 + 2 * g + tile % 2
                for word in range(2):
                    keys = 2 * t + 8 * word + np.arange(2)
                    for block in range(ROWS // 16):
                        assert (got[block, j, lane, tile, word] == want[block * 16 + keys, dim]).all()
