"""topk: the k largest logits of each row and their ids, largest first; k = 1 is argmax.

    values[t, i], ids[t, i] = the i-th largest of { (logits[t, v], v) : v < valid, v allowed }, of equals the lower id first

    logits     f32 [T, V]               finite or -inf; V a multiple of 4
    allowed    u32 [T, ceil(V / 32)]    bit v % 32 of word v / 32 set: v may be chosen; None allows all
    valid      ids from here on have no text and are never chosen
    values     f32 [T, k]               -inf where fewer than k ids may be chosen
    ids        u32 [T, k]               NONE there
    workspace  u32 [workspace_size(T, V, k)]

A tournament of warps. Each takes 1024 candidates, 32 neighbours a lane, and writes its k best; the winners play again until
one warp is left: V = 248320, k = 64 takes 243, then 16, then 1 warp. No block waits for another, and the result does not
depend on who runs first. A logit becomes a key, a u32 that sorts as the float does:

    key = bits ^ 0xffffffff if the sign is set else bits ^ 0x80000000        0 is no float's key: nobody

A warp finds the k-th largest key bit by bit, from the top: is the bit set, k keys are still as large? It stops as soon as
just k are. Then each lane knows how many winners stand before its own, and they are written in order of their place, hence
of their ids. Only the last warp sorts: a winner's rank is the number of those that are larger, or equal and before it. So
a round's work hardly depends on k.
"""
import functools

import numpy as np
from numba import cuda
from numba.cuda import types

from . import ptx
from .build import device, kernel
from .parity import Output
from .ptx import u32, u64
from .unroll import static_range

WARPS = 4                     # a block; a warp plays alone
PER_LANE = 32                 # candidates: eight 16-byte loads, one word of the mask
QUADS = PER_LANE // 4
FIELD = 32 * PER_LANE         # candidates of a warp
MAX_K = 128                   # a round must shrink the field: 1024 candidates to k
NONE = 0xFFFFFFFF
REGISTERS = 128
SASS = {"sm_90a": ("LDG.E.128", "REDUX"), "sm_120a": ("LDG.E.128", "REDUX")}
OUTPUTS = {"values": Output(), "ids": Output(exact=True)}
SCRATCH = ("workspace",)        # neither an input nor compared


def ref(logits, allowed, valid, k):
    """By a full stable sort."""
    rows, vocabulary = logits.shape
    may = np.arange(vocabulary) < valid
    if allowed is not None:
        may = may & (np.unpackbits(allowed.view(np.uint8), axis=1, bitorder="little")[:, :vocabulary] == 1)
    values, ids = np.full((rows, k), -np.inf), np.full((rows, k), NONE, np.uint32)
    for t in range(rows):
        chosen = np.flatnonzero(np.broadcast_to(may, logits.shape)[t])
        best = chosen[np.argsort(-logits[t, chosen].astype(np.float64), kind="stable")][:k]
        values[t, :len(best)], ids[t, :len(best)] = logits[t, best], best
    return dict(values=values, ids=ids)


def rounds(vocabulary, k):
    """Warps at work a row in each round: [243, 16, 1]."""
    warps = [-(-vocabulary // FIELD)]
    while warps[-1] > 1:
        warps.append(-(-padded(warps[-1] * k) // FIELD))
    return warps


def workspace_size(rows, vocabulary, k):
    """u32 words for the winners of all rounds but the last, pairs of key and id, each row's padded to 32 bytes."""
    return sum(2 * rows * padded(warps * k) for warps in rounds(vocabulary, k)[:-1])


def padded(n):
    """The next multiple of four: rows of winners start at 16-byte boundaries."""
    return -(-n // 4) * 4


@device
def key_of(logit):
    """The key of a float32; adding zero makes -0.0 the equal of 0.0."""
    bits = ptx.bits_f32(logit + 0.0)
    return u32(bits ^ ptx.select(bits >> 31 != 0, u32(0xFFFFFFFF), u32(0x80000000)))


@device
def logit_of(key):
    """The float32 of a key; nobody's is -inf."""
    bits = u32(key ^ ptx.select(key >> 31 != 0, u32(0x80000000), u32(0xFFFFFFFF)))
    return ptx.f32_bits(ptx.select(key == 0, u32(0xFF800000), bits))


@device
def kth_largest(key, k):
    """The largest number that k of a warp's keys reach, or one that just k of them do.

    It is no larger than the largest key and, up to k = 64, no smaller than the smallest of the lanes' second largest: so
    where logits are of one kind, sign and exponent need no search.
    """
    most, second = u32(0), u32(0)
    for i in static_range(PER_LANE):
        second, most = max(second, min(most, key[i])), max(most, key[i])
    largest, least = ptx.reduce_max(most), ptx.reduce_min(second)
    open_bits = u32(largest ^ ptx.select(k <= 64, least, u32(0)))
    for step in static_range(5):
        open_bits = u32(open_bits | open_bits >> (1 << step))
    threshold, bit, count = u32(largest & ~open_bits), u32(open_bits ^ (open_bits >> 1)), u32(FIELD)
    while bit != 0 and count != k:
        candidate, mine = u32(threshold | bit), u32(0)
        for i in static_range(PER_LANE):
            mine = u32(mine + ptx.select(key[i] >= candidate, u32(1), u32(0)))
        reached = ptx.reduce_add(mine)
        if reached >= k:
            threshold, count = candidate, reached
        bit = u32(bit >> 1)
    return threshold


@device
def before(count, lane):
    """(sum of the counts of lower lanes, of all)"""
    total = count
    for step in static_range(5):
        lower = ptx.shuffle_up(total, 1 << step)
        total = u32(total + ptx.select(lane >= 1 << step, lower, u32(0)))
    return u32(total - count), ptx.shuffle_idx(total, 31)


@functools.cache
def build(first, last, masked):
    """One round. The first reads logits and the mask, the others keys and ids; the last sorts and writes values."""

    @device
    def logits_at(logits, allowed, row, at, candidates, valid):
        """Keys and ids of the 32 logits from `at` on; those that are not to be chosen get no key."""
        base, limit = logits + u64(row) * candidates * 4, min(valid, candidates)
        quads = tuple(ptx.read_f32x4(base + u64(min(u32(at + 4 * i), u32(candidates - 4))) * 4) for i in static_range(QUADS))
        may = u32(0xFFFFFFFF)
        if masked:
            words = (candidates + 31) // 32
            may = ptx.load_u32(allowed + (row * words + min(at // 32, words - 1)) * 4)
        ids = tuple(u32(at + i) for i in static_range(PER_LANE))
        live = tuple(ptx.select(ids[i] < limit, may >> i & 1, 0) for i in static_range(PER_LANE))
        return tuple(ptx.select(live[i] != 0, key_of(quads[i // 4][i % 4]), u32(0)) for i in static_range(PER_LANE)), ids

    @device
    def winners_at(pairs, row, at, candidates):
        """Keys and ids of 32 winners of the round before; beyond the end nobody."""
        base = pairs + u64(row) * candidates * 8
        pair = tuple(ptx.read_x4(base + u64(min(u32(at + 2 * i), u32(candidates - 2))) * 8) for i in static_range(2 * QUADS))
        return (tuple(ptx.select(at + i < candidates, pair[i // 2][i % 2 * 2], u32(0)) for i in static_range(PER_LANE)),
                tuple(pair[i // 2][i % 2 * 2 + 1] for i in static_range(PER_LANE)))

    @device
    def keep(pairs, place, key, name):
        """Write a winner where the next round, or the last one's sorting, finds it."""
        pair = key, ptx.select(key == 0, u32(NONE), name)
        if last:
            ptx.store_shared_x2(u32(pairs + place * 8), pair)
        else:
            ptx.store_x2(pairs + place * 8, pair)

    @device
    def sort(values, ids, shared, lane, k):
        """The last warp's k winners, in order of their ids, to their ranks."""
        ptx.warp_barrier()
        place = tuple(u32(lane + 32 * e) for e in static_range(MAX_K // 32))
        mine = tuple(ptx.shared_x2(u32(shared + min(place[e], u32(k - 1)) * 8)) for e in static_range(MAX_K // 32))
        rank = (u32(0),) * (MAX_K // 32)
        for j in range(k):
            other = ptx.shared_u32(u32(shared + j * 8))
            least = tuple(u32(mine[e][0] + ptx.select(place[e] > j, u32(0), u32(1))) for e in static_range(MAX_K // 32))
            rank = tuple(u32(rank[e] + ptx.select(other >= least[e], u32(1), u32(0))) for e in static_range(MAX_K // 32))
        for e in static_range(MAX_K // 32):
            if place[e] < k:
                ptx.store_f32(values + rank[e] * 4, logit_of(mine[e][0]))
                ptx.store_u32(ids + rank[e] * 4, mine[e][1])

    @kernel(threads=32 * WARPS, shared=MAX_K * 8 if last else 0)
    def topk(source: u64, allowed: u64, out: u64, ids: u64, candidates: u32, stride: u32, k: u32, valid: u32):
        lane, row = ptx.lane(), ptx.block_y()
        warp = ptx.block_x() * WARPS + ptx.thread_x() // 32
        ptx.launch_dependents()
        ptx.wait_dependencies()
        if warp * FIELD < candidates:
            at = u32(warp * FIELD + lane * PER_LANE)
            if first:
                key, name = logits_at(source, allowed, row, at, candidates, valid)
            else:
                key, name = winners_at(source, row, at, candidates)
            threshold = kth_largest(key, k)
            counts = u32(0)                                             # the larger, and 65536 times the equal
            for i in static_range(PER_LANE):
                counts = u32(counts + ptx.select(key[i] > threshold, u32(1), u32(0))
                             + ptx.select(key[i] == threshold, u32(1 << 16), u32(0)))
            lower, total = before(counts, lane)
            wanted = u32(k - (total & 0xFFFF))                          # of the equal, the first so many
            equal = u32(lower >> 16)
            place = u32((lower & 0xFFFF) + min(equal, wanted))
            if last:
                pairs = ptx.shared_address(cuda.shared.array(0, types.uint8))
            else:
                pairs = out + u64(row * stride + warp * k) * 8
            for i in static_range(PER_LANE):
                taken = u32(ptx.select(key[i] > threshold, u32(1), u32(0))
                            | ptx.select(key[i] == threshold, ptx.select(equal < wanted, u32(1), u32(0)), u32(0)))
                if taken != 0:
                    keep(pairs, place, key[i], name[i])
                place = u32(place + taken)
                equal = u32(equal + ptx.select(key[i] == threshold, u32(1), u32(0)))
            if last:
                sort(out + u64(row) * k * 4, ids + u64(row) * k * 4, pairs, lane, k)
            elif (warp + 1) * FIELD >= candidates and lane < stride - (warp + 1) * k:
                keep(pairs, u32(k + lane), u32(0), u32(NONE))                        # the row's padding to 32 bytes
    return topk


def launch(stream, logits, allowed, valid, values, ids, workspace, k):
    """Queue all rounds on a stream; shapes and dtypes as in the module's docstring."""
    rows, vocabulary = logits.shape
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k must be 1 to {MAX_K}, got {k}")
    if vocabulary % 4 or not vocabulary:
        raise ValueError(f"logits has {vocabulary} columns; topk wants a positive multiple of 4")
    mask = logits if allowed is None else allowed
    for name, array, dtype, shape in (
            ("logits", logits, np.float32, (rows, vocabulary)), ("values", values, np.float32, (rows, k)),
            ("ids", ids, np.uint32, (rows, k)), ("allowed", allowed, np.uint32, (rows, -(-vocabulary // 32))),
            ("workspace", workspace, np.uint32, (workspace_size(rows, vocabulary, k),))):
        if array is not None and (array.dtype != dtype or tuple(array.shape) != shape):
            raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, got {array.dtype} {tuple(array.shape)}")
    source, candidates, used = logits, vocabulary, 0
    for warps in rounds(vocabulary, k) if rows else ():
        first, last, stride = source is logits, warps == 1, k if warps == 1 else padded(warps * k)
        to = values if last else workspace[used:used + 2 * rows * stride]
        stream.launch(build(first, last, first and allowed is not None), (-(-warps // WARPS), rows, 1),
                      source, mask, to, ids, candidates, stride, k, valid)
        source, candidates, used = to, stride, used + 2 * rows * stride


CASES = (
    dict(rows=1, vocabulary=16384, k=20, valid=16000),                 # 27B has 248320: more warps, the same rounds
    dict(rows=2, vocabulary=4096, k=1),                                # argmax of nano
    dict(rows=2, vocabulary=1100, k=5, ties=True, masked=True),        # ragged; few distinct values; a grammar's mask
    dict(rows=1, vocabulary=4100, k=64, ties=True),                    # equals at every threshold, in two rounds
    dict(rows=1, vocabulary=2048, k=128, valid=100),                   # fewer ids than k
    dict(rows=1, vocabulary=4, k=1),
    dict(rows=0, vocabulary=8, k=1),
)


def make(rng, rows=1, vocabulary=248320, k=20, valid=None, ties=False, masked=False):
    """Named random arguments; ties: small integers as logits, so that equal ones abound."""
    logits = (rng.integers(-3, 4, (rows, vocabulary)) if ties else rng.standard_normal((rows, vocabulary)) * 4)
    return dict(logits=logits.astype(np.float32), valid=vocabulary if valid is None else valid,
                allowed=rng.integers(0, 2 ** 32, (rows, -(-vocabulary // 32)), np.uint32) if masked else None,
                values=np.empty((rows, k), np.float32), ids=np.empty((rows, k), np.uint32),
                workspace=np.empty(workspace_size(rows, vocabulary, k), np.uint32), k=k)


def cost(rows=1, vocabulary=248320, k=20, valid=None, ties=False, masked=False):
    """Bytes that must move, and operations (comparisons of the first round)."""
    return dict(bytes=rows * (vocabulary * 4 + (vocabulary // 8 if masked else 0) + 8 * k), flops=rows * vocabulary * k)
