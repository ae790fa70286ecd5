"""tile_rows: rows of f16 as the tiles that gemm_sm90a reads, activations and matrices of 16 bits alike; nothing is rounded.

    x      f16 [M, K]                              K a multiple of 64
    tiles  f16 [ceil(M / 128), K / 64, 128, 64]    gemm_sm90a.py draws them; rows beyond M become zeros

A block takes a tile, a thread four of its chunks of 16 bytes, 32 rows apart: eight threads read a line and write one.
27B, 4096 rows of 5120: 84 MB, 19 us of an H200's 4.4 TB/s.
"""
import functools

import numpy as np

from . import ptx
from .build import kernel
from .gemm_sm90a import F16_WIDTH as WIDTH
from .gemm_sm90a import TILE, TILE_BYTES, arrange
from .octet import format_of
from .parity import Output
from .ptx import u32, u64
from .unroll import static_range

THREADS = 256
ROWS = THREADS // 8           # of a block at a time
REGISTERS = 40
SASS = {chip: ("LDG.E.128", "STG.E.128") for chip in ("sm_90a", "sm_120a")}
OUTPUTS = {"tiles": Output(exact=True)}


def ref(x):
    """By gemm_sm90a's own arrangement."""
    return dict(tiles=arrange(x, WIDTH))


@functools.cache
def build():
    """The kernel."""
    @kernel(threads=THREADS)
    def tile_rows(x: u64, tiles: u64, rows: u32):
        thread, block, tile = ptx.thread_x(), ptx.block_x(), ptx.block_y()
        blocks = ptx.blocks_x()
        row, chunk = u32(thread // 8), u32(thread % 8)
        ptx.launch_dependents()
        ptx.wait_dependencies()
        source = x + (u64(tile * TILE + row) * blocks + block) * 128 + chunk * 16
        to = tiles + (u64(tile) * blocks + block) * TILE_BYTES + row * 128 + (chunk ^ (row & 7)) * 16
        for i in static_range(TILE // ROWS):
            words = (u32(0), u32(0), u32(0), u32(0))
            if tile * TILE + row + i * ROWS < rows:
                words = ptx.read_x4(source + u64(blocks) * (i * ROWS * 128))
            ptx.store_x4(to + i * ROWS * 128, words)
    return tile_rows


def launch(stream, x, tiles):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    (rows, k), shape = x.shape, (-(-x.shape[0] // TILE), x.shape[1] // WIDTH, TILE, WIDTH)
    format_of("x", x, "f16"), format_of("tiles", tiles, "f16")
    if not k or k % WIDTH or tuple(tiles.shape) != shape:
        raise ValueError(f"x must have a positive multiple of {WIDTH} columns, got {k}, and tiles the shape {shape}, got "
                         f"{tuple(tiles.shape)}")
    if rows:
        stream.launch(build(), (shape[1], shape[0], 1), x, tiles, rows)


CASES = (
    dict(m=130, k=192),                                                # ragged: two rows of the second tile, the rest zeros
    dict(m=1, k=64),
    dict(m=0, k=64),
)


def make(rng, m=4096, k=5120):
    """Normal values."""
    return dict(x=rng.standard_normal((m, k)).astype(np.float16),
                tiles=np.empty((-(-m // TILE), k // WIDTH, TILE, WIDTH), np.float16))


def cost(m=4096, k=5120):
    """Bytes that must move, and operations."""
    return dict(bytes=2 * k * (m + -(-m // TILE) * TILE), flops=0)
