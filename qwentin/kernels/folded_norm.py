"""The norm between two products, done by them: what gemv_residual leaves, gemv and gemv_glu take. No kernel stands between.

    h[m]         = hidden[m] + product[m]                   gemv_residual: the stream, f32, in place
    scaled[m, d] = h[m, d] * (1 + weight[d]) * 2^-6         f16: what the next product multiplies, not yet over the row's rms
    squares      f32 [D / 128, groups, 4, 8]                sums of h^2 over 32 outputs: of a strip, 8 rows, a warp, a row
    next[m]      = (its sums of m) * 2^6 * rsqrt(sum of m's squares / D + eps)

In real numbers that is rmsnorm and the product of what it gives. A row's squares are added in one order, whoever made them
and however many rows go with it:

    a warp's lane      the strips i, i + 4, i + 8 .. of one row and one of the four shares, for i = 0 .. 3 side by side
    then               (0 + 1) + (2 + 3) of these sums, and of the four shares

The factors of a block's rows are made by its last group of warps, which has nothing to multiply yet while x is on its way,
and lie in shared memory behind the barriers; the warps that write meet that group before they do (strips.together).

f16 rounds `scaled` as it would the normed row, by 2^-12 of a number above 2^-14, else by 2^-25. With 2^-6 it holds
|h (1 + w)| up to 4e6, a hundred times what the massive channels of models without gated attention reach; and in a row of
rms r the 2^-25 are 2^-19 / r of it: nothing beside 2^-12 from r = 2^-5 on, half of what bf16 would cost at 2^-9.
"""
import functools

import numpy as np

from . import packed, ptx
from .build import lineless_device
from .ptx import f32, u32, u64
from .unroll import static_range

SHIFT = 6                             # how many bits `scaled` is lowered by
SHARES = 4                            # warps that share a strip: strips.PARTS
SHARED = 128                          # bytes of the factors of 32 rows


def shape(row_groups, d):
    """Of `squares`, for 8 row_groups rows of d."""
    return -(-d // packed.STRIP), row_groups, SHARES, 8


def check(name, squares, row_groups, d):
    """ValueError unless squares has room for these rows."""
    wanted = shape(row_groups, d)
    if squares.dtype != np.float32 or np.prod(squares.shape) < np.prod(wanted):
        raise ValueError(f"{name}: squares must be f32 of at least {wanted}, got {squares.dtype} {tuple(squares.shape)}")


def factors_ref(squares, row_groups, d, eps):
    """2^6 over each row's rms, in float64; rows that are not there count too."""
    each = squares.astype(np.float64).reshape(-1)[:np.prod(shape(row_groups, d))].reshape(shape(row_groups, d))
    return 2.0 ** SHIFT / np.sqrt(each.sum((0, 2)).reshape(-1) / d + eps)


@functools.cache
def factors(row_groups, strips):
    """Device function (to, squares, group, lane, eps): a warp makes the factors of rows 8 group, 8 group + 1, ..

    What it reads is under way all at once, at addresses that the compiler knows: hence a kernel for each number of strips.
    """
    inverse = 1.0 / (max(strips, 1) * packed.STRIP)

    @lineless_device
    def made(to, squares, group, lane, eps):
        at, sums = squares + u64(u32((group * (SHARES * 8) + lane) * 4)), (0.0, 0.0, 0.0, 0.0)
        given = tuple(ptx.read_f32(at + i * (row_groups * SHARES * 32)) for i in static_range(strips))
        for i in static_range(strips):
            sums = tuple(sums[s] + given[i] if s == i % 4 else sums[s] for s in static_range(4))
        total = (sums[0] + sums[1]) + (sums[2] + sums[3])
        total += ptx.shuffle_xor_f32(total, 8)
        total += ptx.shuffle_xor_f32(total, 16)
        if lane < 8:
            factor = ptx.rsqrt(total * f32(inverse) + eps) * f32(2.0 ** SHIFT)
            ptx.store_shared_f32(u32(to + (group * 8 + lane) * 4), factor)
    return made


@lineless_device
def pair(array, row, column, rows, width, wanted):
    """Two neighbours of a row, if they are there and wanted."""
    if wanted and row < rows:
        return ptx.read_f32x2(array + (u64(row) * width + column) * 4)
    return f32(0.0), f32(0.0)


@functools.cache
def stream(row_groups, tiles):
    """Device functions for two neighbouring outputs i of each of a lane's tiles and rows, in the order of strips.py: read,
    what they are added to and their weights, asked for early where `wanted`; write, the stream h there and what goes with
    it."""
    count = 2 * row_groups                                       # rows of a lane: 8 j + 2 t and the next

    @lineless_device
    def read(hidden, weight, tile, lane, rows, width, wanted):
        column, first = u32(tile * 16 + (lane >> 2) * 2), u32((lane & 3) * 2)
        old = tuple(pair(hidden, u32(first + (i % count // 2 * 8 + i % 2)), u32(column + i // count * 16), rows, width,
                         wanted) for i in static_range(tiles * count))
        return old, tuple(pair(weight, u32(0), u32(column + r * 16), u32(1), width, wanted) for r in static_range(tiles))

    @lineless_device
    def write(h, gain, hidden, scaled, squares, strip, part, tile, lane, rows, width):
        totals = (0.0,) * count
        for i in static_range(tiles * count):
            a, b = h[i]
            totals = tuple(ptx.fma(b, b, ptx.fma(a, a, totals[e])) if e == i % count else totals[e]
                           for e in static_range(count))
            row = u32((lane & 3) * 2 + (i % count // 2 * 8 + i % 2))
            if row < rows:
                at = u64(row) * width + (tile * 16 + (lane >> 2) * 2 + i // count * 16)
                low, high = gain[i // count]
                ptx.store_f32x2(hidden + at * 4, (a, b))
                ptx.store_u32(scaled + at * 2, ptx.f16x2(a * ((1.0 + low) * 2.0 ** -SHIFT),
                                                         b * ((1.0 + high) * 2.0 ** -SHIFT)))
        for step in static_range(3):                             # the eight lanes that have the same rows
            totals = tuple(totals[e] + ptx.shuffle_xor_f32(totals[e], 4 << step) for e in static_range(count))
        if lane < 4:
            for j in static_range(row_groups):
                ptx.store_f32x2(squares + u64(((strip * row_groups + j) * SHARES + part) * 32 + lane * 8),
                                (totals[2 * j], totals[2 * j + 1]))
    return read, write
