"""kv_move: close the gaps that an accepted path leaves among a draft tree's keys and values, in every layer at once.

    for i < count, in order:  cache[p, to[i]] <- cache[p, from[i]]      for all planes p

    cache   bf16 (u16) or e4m3 (u8) [planes, P, 128, G, hd]     of all layers; a row is whole 16-byte chunks
    moves   i32 [1 + 2 M]       count, then pairs (from, to): places, page * 128 + row

A path's rows stand in ascending places and go to lower ones: its j-th moves from `length + path[j]` to `length + j`, and
path[j] >= j. So a move overwrites no row that a later one reads, if each thread makes its 16 bytes' moves in order.
"""
import functools

import numpy as np

from . import ptx
from .build import kernel
from .parity import Output
from .ptx import u32, u64

PAGE = 128
THREADS = 128
REGISTERS = 40
SASS = {"sm_90a": ("LDG.E.128", "STG.E.128"), "sm_120a": ("LDG.E.128", "STG.E.128")}
OUTPUTS = {"cache": Output(exact=True)}


def ref(cache, moves):
    """Move by move."""
    out = cache.copy()
    rows = out.reshape(out.shape[0], out.shape[1] * PAGE, *out.shape[3:])
    for source, target in moves[1:1 + 2 * moves[0]].reshape(-1, 2):
        rows[:, target] = rows[:, source]
    return dict(cache=out)


@functools.cache
def build(chunks):
    """The kernel for rows of so many 16-byte chunks."""

    @kernel(threads=THREADS)
    def kv_move(cache: u64, moves: u64, rows: u32):
        chunk, plane = ptx.block_x() * THREADS + ptx.thread_x(), ptx.block_y()
        if chunk < chunks:
            base = cache + (u64(plane) * rows * chunks + chunk) * 16
            for i in range(ptx.load_u32(moves)):
                source, target = ptx.load_u32(moves + i * 8 + 4), ptx.load_u32(moves + i * 8 + 8)
                ptx.store_x4(base + u64(target) * (chunks * 16), ptx.read_x4(base + u64(source) * (chunks * 16)))
    return kv_move


def launch(stream, cache, moves):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    if len(cache.shape) != 5 or cache.shape[2] != PAGE:
        raise ValueError(f"cache must have shape [planes, P, {PAGE}, G, hd], got {tuple(cache.shape)}")
    planes, pages, _, groups, hd = cache.shape
    row = groups * hd * cache.dtype.itemsize
    if row % 16:
        raise ValueError(f"a row of cache has {row} bytes; a multiple of 16 was wanted")
    if len(moves.shape) != 1 or moves.shape[0] % 2 != 1 or moves.dtype != np.int32:
        raise ValueError(f"moves must be int32 [1 + 2 M], got {moves.dtype} {tuple(moves.shape)}")
    if planes and pages:
        stream.launch(build(row // 16), (-(-row // 16 // THREADS), planes, 1), cache, moves, pages * PAGE)


CASES = (
    dict(planes=4, path=(0, 2, 5, 6, 11)),                             # 27B's row; the first stays where it is
    dict(planes=2, path=(3,), groups=1, hd=256, format="bf16", first=126),              # nano, across a page
    dict(planes=1, path=(), groups=1, hd=16),
)


def make(rng, planes=4, path=(1, 2), groups=4, hd=256, format="e4m3", first=40, pages=3):
    """A cache of random codes, and the moves of a path behind row `first`; pages are in place."""
    dtype = np.uint8 if format == "e4m3" else np.uint16
    moves = np.zeros(1 + 2 * 32, np.int32)
    pairs = [(first + source, first + target) for target, source in enumerate(path)]
    moves[0], moves[1:1 + 2 * len(pairs)] = len(pairs), np.ravel(pairs)
    return dict(cache=rng.integers(0, 127, (planes, pages, PAGE, groups, hd)).astype(dtype), moves=moves)


def cost(planes=4, path=(1, 2), groups=4, hd=256, format="e4m3", first=40, pages=3):
    """Bytes that must move; nothing is computed."""
    return dict(bytes=planes * len(path) * 2 * groups * hd * (1 if format == "e4m3" else 2), flops=0)
