"""head_sample: choose the next token of every row from its best candidates, so that a step returns integers, not logits.

    weight[v] = exp((logits[t, v] - largest) / temperature)           over v < valid, allowed: as in topk.py
    kept      = the top_k best (0: all), of them the fewest whose weights reach top_p of the sum, of them those of at
                least min_p times the best; of equal logits the lower id is the better one: sampler.truncate
    token     = walking down the kept ones from the best, the first at which the sum of weights exceeds u times that of
                all kept, u = philox.uniform(counter, seed); at temperature 0 the best

    values, ids   f32, u32 [T, K]       the K best of each row, best first, as topk leaves them; -inf and NONE if fewer
    logits, allowed, valid              what topk chose from
    temperature, top_p, min_p   f32 [T]     top_p 1 and min_p 0 keep all
    top_k         u32 [T]
    seeds, counters   u32 [T, 2]        (low, high) and (position, choice): philox.py
    tokens        u32 [T]
    sums          f32 [T, ceil(V / 4096)]   workspace: weights of pieces of a row

The K candidates can tell whenever all kept tokens are among them: always for 1 <= top_k <= K, for top_p and min_p unless
the distribution is very flat; and if nothing restricts, whenever u falls on one of them. Else the token is NONE: the caller
has the row's logits and, by philox.uniforms, its u.

Blocks of 256 threads sum the weights of 4096 logits each, unless a row needs no sum (greedy, or top_k in reach): the total
is what top_p is a share of. Then a warp takes a row, a lane four candidates.
"""
import functools

import numpy as np

from . import philox, ptx, reduce, topk
from .build import device, kernel
from .parity import Output
from .ptx import u32, u64
from .topk import NONE
from .unroll import static_range

THREADS = 256
QUADS = 4
FIELD = THREADS * QUADS * 4                     # logits of a block
WARPS = 4                                       # rows of a block of the second kernel
MAX_K = 128                                     # candidates of a warp, four a lane
LOG2_E = float(np.log2(np.e))
REGISTERS = 64
SASS = {"sm_90a": ("MUFU.EX2", "LDG.E.128"), "sm_120a": ("MUFU.EX2", "LDG.E.128")}
OUTPUTS = {"tokens": Output(exact=True)}        # a u within 2^-20 of a boundary may fall on its other side: none in CASES
SCRATCH = ("sums",)


def ref(logits, allowed, valid, values, temperature, top_k, top_p, min_p, seeds, counters):
    """The definition over whole rows in float64, sorted; NONE where the docstring says so."""
    k, u = values.shape[1], philox.uniforms(counters, seeds)
    may = np.broadcast_to(np.arange(logits.shape[1]) < valid, logits.shape)
    if allowed is not None:
        may = may & (np.unpackbits(allowed.view(np.uint8), axis=1, bitorder="little")[:, :logits.shape[1]] == 1)
    tokens = np.full(len(logits), NONE, np.uint32)
    for t in range(len(logits)):
        ids = np.flatnonzero(may[t])
        ids = ids[np.argsort(-logits[t, ids].astype(np.float64), kind="stable")]
        if not temperature[t]:
            tokens[t] = ids[0]
            continue
        x = logits[t, ids].astype(np.float64) / temperature[t]
        weight = np.exp(x - x[0])[:top_k[t] or None]
        if top_p[t] < 1:
            total = np.cumsum(weight)
            weight = weight[:np.searchsorted(total, top_p[t] * total[-1]) + 1]
        nucleus = len(weight)
        weight = weight[weight >= min_p[t]]
        total = np.cumsum(weight)
        at = min(int(np.searchsorted(total, u[t] * total[-1], side="right")), len(weight) - 1)
        told = nucleus <= k or len(weight) < k
        if told or at < k and not top_k[t] and top_p[t] == 1 and not min_p[t]:
            tokens[t] = ids[at]
    return dict(tokens=tokens)


@device
def below(x):
    """The sum over the lanes below one's own."""
    lane = ptx.lane()
    for step in static_range(5):
        more = ptx.shuffle_up_f32(x, 1 << step)
        x += ptx.select(lane >= 1 << step, more, 0.0)
    return ptx.select(lane == 0, 0.0, ptx.shuffle_up_f32(x, 1))


@functools.cache
def build_sums(masked):
    """The kernel that sums the weights of 4096 logits of a row."""

    @device
    def quad_sum(logits, allowed, row, at, columns, valid, best, scale):
        """Weights of the four logits from `at` on."""
        x = ptx.load_f32x4(logits + (u64(row) * columns + at) * 4)
        may = 0xF
        if masked:
            may = u32(ptx.load_u32(allowed + (row * ((columns + 31) // 32) + at // 32) * 4) >> (at % 32))
        total = 0.0
        for j in static_range(4):
            live = ptx.select(at + j < valid, may >> j & 1, 0) != 0
            total += ptx.select(live, ptx.exp2((x[j] - best) * scale), 0.0)
        return total

    @kernel(threads=THREADS)
    def row_sums(logits: u64, allowed: u64, values: u64, temperature: u64, top_k: u64, sums: u64, columns: u32, valid: u32,
                 k: u32):
        block, row, t = ptx.block_x(), ptx.block_y(), ptx.load_f32(temperature + ptx.block_y() * 4)
        first = ptx.load_u32(top_k + row * 4)
        if t == 0.0 or (first > 0 and first <= k):                        # the whole block agrees
            if ptx.thread_x() == 0:
                ptx.store_f32(sums + (row * ptx.blocks_x() + block) * 4, 0.0)
            return
        best, scale, total = ptx.read_f32(values + row * k * 4), LOG2_E * ptx.reciprocal(t), 0.0
        for i in static_range(QUADS):
            at = u32(block * FIELD + i * (THREADS * 4) + ptx.thread_x() * 4)
            if at < columns:
                total += quad_sum(logits, allowed, row, at, columns, valid, best, scale)
        total = reduce.block_sum(total, THREADS // 32)
        if ptx.thread_x() == 0:
            ptx.store_f32(sums + (row * ptx.blocks_x() + block) * 4, total)
    return row_sums


@functools.cache
def build():
    """The kernel that chooses."""

    @device
    def row_total(sums, row, blocks):
        total = 0.0
        for i in range(ptx.lane(), blocks, 32):
            total += ptx.read_f32(sums + (row * blocks + i) * 4)
        return reduce.warp_sum(total)

    @device
    def element(x, place):
        """Candidate `place` of the warp."""
        i = place % 4
        low, high = ptx.select(i == 0, x[0], x[1]), ptx.select(i == 2, x[2], x[3])
        return ptx.shuffle_idx(ptx.select(i < 2, low, high), u32(place // 4))

    @device
    def count(flags):
        """How many of the warp's candidates are flagged."""
        return ptx.reduce_add(u32(flags[0] + flags[1] + flags[2] + flags[3]))

    @kernel(threads=32 * WARPS)
    def head_sample(values: u64, ids: u64, temperature: u64, top_k: u64, top_p: u64, min_p: u64, seeds: u64, counters: u64,
                    sums: u64, tokens: u64, rows: u32, k: u32, blocks: u32):
        lane, row = ptx.lane(), u32(ptx.block_x() * WARPS + ptx.thread_x() // 32)
        if row >= rows:
            return
        t, limit = ptx.load_f32(temperature + row * 4), ptx.load_u32(top_k + row * 4)
        share, least = ptx.load_f32(top_p + row * 4), ptx.load_f32(min_p + row * 4)
        place = tuple(u64(row * k + min(u32(lane * 4 + j), k - 1)) * 4 for j in static_range(4))
        value = tuple(ptx.read_f32(values + place[j]) for j in static_range(4))
        name = tuple(ptx.read_u32(ids + place[j]) for j in static_range(4))
        best = ptx.shuffle_idx_f32(value[0], 0)
        scale = LOG2_E * ptx.reciprocal(ptx.select(t == 0.0, 1.0, t))
        # ---- weights of what top_k leaves, and their sums from the best on
        reach = ptx.select(limit == 0, k, min(limit, k))
        live = tuple(ptx.select(lane * 4 + j < reach, ptx.select(name[j] == NONE, u32(0), u32(1)), u32(0))
                     for j in static_range(4))
        weight = tuple(ptx.select(live[j] != 0, ptx.exp2((value[j] - best) * scale), 0.0) for j in static_range(4))
        before = below(weight[0] + weight[1] + weight[2] + weight[3])
        end = (before + weight[0], before + weight[0] + weight[1], before + weight[0] + weight[1] + weight[2],
               before + weight[0] + weight[1] + weight[2] + weight[3])
        seen = ptx.shuffle_idx_f32(end[3], 31)
        whole = count(live) < k or (limit > 0 and limit <= k)           # the candidates are all there is
        total = seen if whole else row_total(sums, row, blocks)
        # ---- how many of them top_p and min_p keep; all that follow the first one not kept are not kept either
        start = (before, end[0], end[1], end[2])
        inside = tuple(ptx.select(share >= 1.0, live[j], ptx.select(start[j] < share * total, live[j], u32(0)))
                       for j in static_range(4))
        kept = tuple(ptx.select(weight[j] >= least, inside[j], u32(0)) for j in static_range(4))
        n = count(kept)
        told = whole or n < k or (share < 1.0 and seen >= share * total)
        free = limit == 0 and share >= 1.0 and least == 0.0
        mass = 0.0
        for j in static_range(4):
            mass += ptx.select(kept[j] != 0, weight[j], 0.0)
        mass = reduce.warp_sum(mass)
        # ---- walk down
        draw = ptx.load_x2(counters + row * 8)
        key = ptx.load_x2(seeds + row * 8)
        goal = philox.uniform(draw[0], draw[1], key[0], key[1]) * (mass if told else total)
        passed = count(tuple(ptx.select(end[j] <= goal, kept[j], u32(0)) for j in static_range(4)))
        at = ptx.select(t == 0.0, u32(0), min(passed, n - 1))
        token = element(name, at)
        if lane == 0:
            sure = t == 0.0 or told or (free and passed < k)
            ptx.store_u32(tokens + row * 4, ptx.select(sure, token, u32(NONE)))
    return head_sample


def launch(stream, logits, allowed, valid, values, ids, temperature, top_k, top_p, min_p, seeds, counters, tokens, sums):
    """Queue both kernels on a stream; shapes and dtypes as in the module's docstring."""
    rows, columns = logits.shape
    k, blocks = values.shape[-1], -(-columns // FIELD)
    if not 1 <= k <= MAX_K:
        raise ValueError(f"values must have 1 to {MAX_K} columns, got {k}")
    if columns % 4 or not columns:
        raise ValueError(f"logits has {columns} columns; head_sample wants a positive multiple of 4")
    for name, array, dtype, shape in (
            ("logits", logits, np.float32, (rows, columns)), ("values", values, np.float32, (rows, k)),
            ("ids", ids, np.uint32, (rows, k)), ("allowed", allowed, np.uint32, (rows, -(-columns // 32))),
            ("temperature", temperature, np.float32, (rows,)), ("top_p", top_p, np.float32, (rows,)),
            ("min_p", min_p, np.float32, (rows,)), ("top_k", top_k, np.uint32, (rows,)),
            ("seeds", seeds, np.uint32, (rows, 2)), ("counters", counters, np.uint32, (rows, 2)),
            ("tokens", tokens, np.uint32, (rows,)), ("sums", sums, np.float32, (rows, blocks))):
        if array is not None and (array.dtype != dtype or tuple(array.shape) != shape):
            raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, got {array.dtype} {tuple(array.shape)}")
    if rows:
        stream.launch(build_sums(allowed is not None), (blocks, rows, 1), logits, logits if allowed is None else allowed,
                      values, temperature, top_k, sums, columns, valid, k)
        stream.launch(build(), -(-rows // WARPS), values, ids, temperature, top_k, top_p, min_p, seeds, counters, sums,
                      tokens, rows, k, blocks)


CASES = (
    dict(rows=16, vocabulary=8192),                                    # 27B has 248320: more blocks, the same sums
    dict(rows=6, vocabulary=4096, k=128, flat=True, valid=4000),       # nano; many rows that the candidates cannot tell
    dict(rows=9, vocabulary=1100, k=20, masked=True),
    dict(rows=5, vocabulary=64, k=128),                                # fewer ids than candidates
    dict(rows=2, vocabulary=4, k=1),
    dict(rows=0, vocabulary=8, k=4),
)


def make(rng, rows=1, vocabulary=248320, k=64, valid=None, masked=False, flat=False):
    """Named random arguments: each row its own parameters, rows 0, 5, 10, ... greedy; flat: logits nearly equal."""
    chosen = topk.make(rng, rows, vocabulary, min(k, topk.MAX_K), valid, masked=masked)
    if flat:
        chosen["logits"] /= 8
    best = topk.ref(chosen["logits"], chosen["allowed"], chosen["valid"], k)
    given = {name: chosen[name] for name in ("logits", "allowed", "valid")}
    temperature = rng.uniform(0.3, 1.5, rows)
    temperature[::5] = 0
    return dict(given, values=best["values"].astype(np.float32), ids=best["ids"],
                temperature=temperature.astype(np.float32),
                top_k=rng.choice(np.array([0, 0, 3, k, 100 * k], np.uint32), rows),
                top_p=rng.choice(np.array([1, 1, 0.9, 0.5], np.float32), rows),
                min_p=rng.choice(np.array([0, 0, 0.1], np.float32), rows),
                seeds=rng.integers(0, 2 ** 32, (rows, 2), np.uint32),
                counters=rng.integers(0, 2 ** 18, (rows, 2), np.uint32), tokens=np.empty(rows, np.uint32),
                sums=np.empty((rows, -(-vocabulary // FIELD)), np.float32))


def cost(rows=1, vocabulary=248320, k=64, valid=None, masked=False, flat=False):
    """Bytes that must move if all rows need their sums, and float operations."""
    return dict(bytes=rows * (vocabulary * 4 + (vocabulary // 8 if masked else 0) + 8 * k), flops=rows * vocabulary * 3)
