"""topk: the k largest logits of each row and their ids, largest first; k = 1 is argmax.

    values[t, i], ids[t, i] = the i-th largest of { (logits[t, v], v) : v < valid, v allowed }, of equals the lower id first

    logits     f32 [T, V]               finite or -inf; V a multiple of 4
    allowed    u32 [T, ceil(V / 32)]    bit v % 32 of word v / 32 set: v may be chosen; None allows all
    valid      ids from here on have no text and are never chosen
    values     f32 [T, k]               -inf where fewer than k ids may be chosen
    ids        u32 [T, k]               NONE there
    workspace  u32 [workspace_size(T, V, k)]

A tournament of warps. Each takes 512 candidates, 16 a lane, and writes its k best; the winners play again until one warp
is left: V = 248320, k = 20 takes 485, then 19, then 1 warp. No shared memory, no barrier, and the result does not depend
on who runs first. A logit becomes a key, a u32 that sorts as the float does:

    key = bits ^ 0xffffffff if the sign is set else bits ^ 0x80000000        0 is no float's key: nobody
"""
import functools

import numpy as np

from . import ptx
from .build import device, kernel
from .parity import Output
from .ptx import u32, u64
from .unroll import static_range

WARPS = 4                     # a block; a warp plays alone
PER_LANE = 16                 # candidates: four 16-byte loads
QUADS = PER_LANE // 4
FIELD = 32 * PER_LANE         # candidates of a warp
MAX_K = 128                   # a round must shrink the field: 512 candidates to k
NONE = 0xFFFFFFFF
REGISTERS = 80
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
    """Warps at work a row in each round: [485, 19, 1]."""
    warps = [-(-vocabulary // FIELD)]
    while warps[-1] > 1:
        warps.append(-(-padded(warps[-1] * k) // FIELD))
    return warps


def workspace_size(rows, vocabulary, k):
    """u32 words for the winners of all rounds but the last, keys and ids, each round's padded to 16 bytes."""
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


@functools.cache
def build(first, last, masked):
    """One round. The first reads logits and the mask, the others keys and ids; the last writes values."""

    @device
    def logits_at(logits, allowed, row, at, candidates, valid):
        """Keys and ids of the four logits from `at` on; those that are not to be chosen get no key."""
        x = ptx.read_f32x4(logits + (row * candidates + at) * 4)
        may = 0xF
        if masked:
            words = (candidates + 31) // 32
            may = u32(ptx.load_u32(allowed + (row * words + at // 32) * 4) >> (at % 32))
        ids = tuple(u32(at + j) for j in static_range(4))
        chosen = tuple(ptx.select(ids[j] < valid, may >> j & 1, 0) for j in static_range(4))
        return tuple(ptx.select(chosen[j] != 0, key_of(x[j]), u32(0)) for j in static_range(4)), ids

    @device
    def winners_at(keys, names, row, at, candidates):
        """Four winners of the round before."""
        offset = (row * candidates + at) * 4
        return ptx.read_x4(keys + offset), ptx.read_x4(names + offset)

    @kernel(threads=32 * WARPS)
    def topk(keys: u64, names: u64, out_keys: u64, out_names: u64, candidates: u32, stride: u32, k: u32, valid: u32):
        lane, row = ptx.lane(), ptx.block_y()
        warp = ptx.block_x() * WARPS + ptx.thread_x() // 32
        ptx.launch_dependents()
        ptx.wait_dependencies()
        if warp * FIELD < candidates:
            # quad i of a lane lies 128 candidates after its quad i - 1; beyond the end it repeats the last, without keys
            at = tuple(u32(warp * FIELD + 128 * i + lane * 4) for i in static_range(QUADS))
            inside = tuple(min(at[i], candidates - 4) for i in static_range(QUADS))
            if first:
                quad = tuple(logits_at(keys, names, row, inside[i], candidates, valid) for i in static_range(QUADS))
            else:
                quad = tuple(winners_at(keys, names, row, inside[i], candidates) for i in static_range(QUADS))
            live = tuple(at[i] < candidates for i in static_range(QUADS))
            key = tuple(ptx.select(live[i // 4], quad[i // 4][0][i % 4], u32(0)) for i in static_range(PER_LANE))
            name = tuple(quad[i // 4][1][i % 4] for i in static_range(PER_LANE))
            to = (row * stride + warp * k) * 4
            for r in range(k):
                best, best_name = u32(0), u32(NONE)
                for i in static_range(PER_LANE):                        # ids ascend with i: of equals the first stays
                    best_name = ptx.select(key[i] > best, name[i], best_name)
                    best = ptx.select(key[i] > best, key[i], best)
                top = ptx.reduce_max(best)
                winner = ptx.reduce_min(ptx.select(best == top, best_name, u32(NONE)))
                key = tuple(ptx.select(name[i] == winner, u32(0), key[i]) for i in static_range(PER_LANE))
                if lane == 0:
                    ptx.store_u32(out_names + to + r * 4, winner)
                    if last:
                        ptx.store_f32(out_keys + to + r * 4, logit_of(top))
                    else:
                        ptx.store_u32(out_keys + to + r * 4, top)
            end = (warp + 1) * k
            if not last and (warp + 1) * FIELD >= candidates and lane < stride - end:
                ptx.store_u32(out_keys + (row * stride + end + lane) * 4, 0)         # the row's padding to 16 bytes
                ptx.store_u32(out_names + (row * stride + end + lane) * 4, NONE)
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
    keys, names, candidates, used = logits, mask, vocabulary, 0
    for warps in rounds(vocabulary, k) if rows else ():
        first, last, stride = keys is logits, warps == 1, k if warps == 1 else padded(warps * k)
        half = rows * stride
        to = (values, ids) if last else (workspace[used:used + half], workspace[used + half:used + 2 * half])
        stream.launch(build(first, last, first and allowed is not None), (-(-warps // WARPS), rows, 1),
                      keys, names, *to, candidates, stride, k, valid)
        keys, names, candidates, used = *to, stride, used + 2 * half


CASES = (
    dict(rows=1, vocabulary=16384, k=20, valid=16000),                 # 27B has 248320: more warps, the same rounds
    dict(rows=2, vocabulary=4096, k=1),                                # argmax of nano
    dict(rows=2, vocabulary=1100, k=5, ties=True, masked=True),        # ragged; few distinct values; a grammar's mask
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
