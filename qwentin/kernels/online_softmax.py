"""The softmax between the two matrix products of attention, tile of keys by tile of keys, in float32.

A warp holds scores of m tiles of 16 (row, head) pairs against n tiles of 8 keys, as mma.sync gives them: m n fragments of
four, x[0], x[1] of pair g and keys 2t, 2t + 1, x[2], x[3] of pair g + 8 (g = lane / 4, t = lane % 4). Four warps share the
pairs, each with its own keys. What belongs to a pair is held by all four lanes t, in tuples of 2 m: of pairs g, g + 8, ...

    masked          scores of keys that a row may not see become -inf
    largest         over the tile's keys and those before; all warps agree, through shared memory
    store_weights   2^((score - largest) scale), rounded, through shared memory to the warps of the second product
    rescaled        what was summed before, brought to the new largest score

Each is a factory: numbers in, device function out. Who calls: attn_decode.py, whose tests prove it.
"""
import functools

from . import ptx
from .build import device
from .ptx import u32
from .unroll import static_range

WARPS = 4
LOWEST = -1e30                          # the largest score of a pair that saw no key yet: finite, so differences are numbers
MINUS_INFINITY = float("-inf")


@device
def if_seen(x, bits, key, length, own):
    """A score, or -inf if a row with this mask does not see the key."""
    i = u32(key - length)                                               # of the step's own rows, from `length` on
    may = ptx.select(i < own, u32(bits >> (i & 31)) & 1, u32(0))
    return ptx.select(ptx.select(key < length, u32(1), may) != 0, x, MINUS_INFINITY)


@device
def fragment_seen(x, low, high, key, length, own):
    return (if_seen(x[0], low, key, length, own), if_seen(x[1], low, u32(key + 1), length, own),
            if_seen(x[2], high, key, length, own), if_seen(x[3], high, u32(key + 1), length, own))


@functools.cache
def masked(m, n, per):
    """Device function (scores, first key, masks, row, pairs, length, own, lane) -> scores. Keys below `length` are seen by
    all, key length + i by rows with bit i of their mask, the `own` rows of the step apart none. Pair p is of row p / per."""
    @device
    def mask(s, key, ancestors, row, pairs, length, own, lane):
        bits = tuple(ptx.load_u32(ancestors + (row + min(u32(e * 8 + lane // 4), pairs - 1) // per) * 4)
                     for e in static_range(2 * m))
        first = u32(key + lane % 4 * 2)
        return tuple(fragment_seen(s[e], bits[e // n * 2], bits[e // n * 2 + 1], u32(first + e % n * 8), length, own)
                     for e in static_range(m * n))
    return mask


@device
def largest_of(x):
    """The largest of four."""
    return ptx.maximum(ptx.maximum(x[0], x[1]), ptx.maximum(x[2], x[3]))


@functools.cache
def largest(m, n):
    """Device function (scores, largest before, address of f32 [16 m, WARPS] in shared memory, warp, lane) -> largest. All
    warps meet at a barrier."""
    @device
    def find(s, peak, peaks, warp, lane):
        mine = peak
        for j in static_range(n):
            mine = tuple(ptx.maximum(mine[e], ptx.maximum(s[e // 2 * n + j][e % 2 * 2], s[e // 2 * n + j][e % 2 * 2 + 1]))
                         for e in static_range(2 * m))
        here = u32(peaks + lane // 4 * (WARPS * 4))
        for e in static_range(2 * m):
            quad = ptx.maximum(mine[e], ptx.shuffle_xor_f32(mine[e], 1))
            quad = ptx.maximum(quad, ptx.shuffle_xor_f32(quad, 2))
            if lane % 4 == 0:
                ptx.store_shared_f32(u32(here + e * (8 * WARPS * 4) + warp * 4), quad)
        ptx.barrier()
        return tuple(largest_of(ptx.shared_f32x4(u32(here + e * (8 * WARPS * 4)))) for e in static_range(2 * m))
    return find


@functools.cache
def store_weights(m, n, pack):
    """Device function (address, scores, largest, scale, warp, lane): stores [m, n WARPS / 2] A fragments of 512 bytes, two
    tiles of keys in each, as the second product reads them. pack: two float32 -> a word of its format."""
    STEPS = n * WARPS // 2

    @device
    def words(x, low, high, scale):
        a, b = -(low * scale), -(high * scale)
        return (pack(ptx.exp2(ptx.fma(x[0], scale, a)), ptx.exp2(ptx.fma(x[1], scale, a))),
                pack(ptx.exp2(ptx.fma(x[2], scale, b)), ptx.exp2(ptx.fma(x[3], scale, b))))

    @device
    def store(weights, s, peak, scale, warp, lane):
        for e in static_range(m * n):
            tile = u32(warp * n + e % n)
            ptx.store_shared_x2(u32(weights + ((e // n * STEPS + tile // 2) * 32 + lane) * 16 + tile % 2 * 8),
                                words(s[e], peak[e // n * 2], peak[e // n * 2 + 1], scale))
    return store


@device
def times(x, low, high):
    """A fragment, its upper row times low, its lower row times high."""
    return x[0] * low, x[1] * low, x[2] * high, x[3] * high


@functools.cache
def rescaled(m, width):
    """Device function (sums, largest before, largest, scale) -> sums: fragments [m, width]."""
    @device
    def rescale(o, before, peak, scale):
        f = tuple(ptx.exp2((before[e] - peak[e]) * scale) for e in static_range(2 * m))
        return tuple(times(o[e], f[e // width * 2], f[e // width * 2 + 1]) for e in static_range(width * m))
    return rescale
