"""attn_decode: attention of the newest rows of every sequence over its paged keys and values, gated.

    score[t, h, j] = q[t, h] . k[j, h G/H] k_scale / 16                                    16 = sqrt(256)
    out[t, h]      = sigmoid(gate[t, h]) sum_j softmax_j(score) v[j, h G/H] v_scale

over the keys j that row t sees: the `lengths[r]` rows of its sequence r that were in the cache before this step, and those
of the step's own rows, appended behind them, that its mask names.

    q          bf16 or f16 [T, H, 256]           normed and rotated; bf16 if the keys are, f16 if they are e4m3
    qkv        f32 or bf16 [T, (2 H + 2 G) 256]  where the gates stand, as in rope_append.py
    k_pages, v_pages   bf16 or e4m3 [P, 128, G, 256]     times k_scale, v_scale; each in its own format
    pages      i32 or u32 [R, B]                 row j of sequence r is row j % 128 of page pages[r, j / 128]
    starts     i32 or u32 [R + 1]                sequence r owns rows starts[r] .. starts[r + 1] - 1: none, or up to M G/H
    lengths    i32 or u32 [R]
    ancestors  u32 [T]                           bit i set: the row sees row i of its own sequence's (itself included)
    out        bf16, f16 or f32 [T, H, 256]      rows from starts[R] on are left alone
    partial    f32 [G, splits + R, M, 256]       workspace. Up to `splits` blocks share the keys of a group; M / (H/G) rows
    stats      f32 [G, splits + R, M, 2]         of a sequence fit. attn_combine.py, launched behind, reads them

All but the shapes is device data: one captured launch serves any lengths, page tables and trees.

A block takes one group, a share of all keys (shares.py) and up to 48 G/H rows: 8 rows of 6 heads fill three tiles of 16
(row, head) pairs. Every key is read once for all of them. Four warps work on a tile of 64 keys (32 where a row has 512
bytes), which cp.async brought while they worked on the tile before:

    scores    a warp takes 16 (8) keys and all pairs: Q K^T; the largest score of a pair meets in shared memory
    weights   2^(score - largest) cross shared memory in the order that the next product wants
    sums      a warp takes 64 dims and all pairs: P V; a ninth tile of ones adds up the weights as they were rounded

To be read at 128k tokens, 27B: 2 * 4 * 256 * 131072 = 268 MB in e4m3, 58 us at an H200's 4.65 TB/s, 150 us at an RTX 5090's
1.79 (bf16: twice that). To be multiplied: 8.6 GFLOP for 1 or 2 rows, 26 for 8: 13 and 39 us at 660 TFLOP/s, 41 and 123 us at
210. So up to 8 rows should cost the reading alone; 16 rows are two blocks, the second reading L2.
"""
import functools

import numpy as np
from numba import cuda
from numba.cuda import types

from .. import numerics
from . import attn_combine, kv_tile, online_softmax, ptx, shares
from .activation import LOG2_E
from .build import device, kernel
from .kv_tile import HEAD, PAGE
from .octet import format_of
from .online_softmax import LOWEST, WARPS
from .parity import Output, real
from .ptx import f32, u32, u64
from .unroll import static_range

THREADS = 32 * WARPS
PAIRS = 48                    # (row, head) pairs a block takes: three tiles are 96 sums a lane
STAGES = 2                    # tiles in shared memory: 64 KiB, so three blocks fit an H200's multiprocessor, one a 5090's
MOST_ROWS = 32                # of a sequence: bits of a mask
RESERVED = 1024               # bytes of shared memory that the system takes beside a block's own
REGISTERS = 255               # 128 threads may have all
SASS = {"sm_90a": ("HMMA.16816", "LDGSTS", "LDSM.16", "MUFU.EX2"),
        "sm_120a": ("HMMA.16816", "LDGSTS", "LDSM.16", "MUFU.EX2")}
# Weights are rounded to bf16 (2^-9) or f16 and normalised as rounded: |error| <= 2 * 2^-9 * mean |v - out|, and that mean is
# below 1 for values in [-1, 1], as in CASES (v_scale included). A score is rounded 16 times to 2^-23 of sum |q k| / 16 < 32:
# 2^-14, which is the relative error of a weight, so 2 * 2^-14 more. Gate and merging: attn_combine.
OUTPUTS = {"out": Output(rtol=2.0 ** -20, atol=2.0 ** -8 + 2.0 ** -13)}
SCRATCH = ("partial", "stats")


def ref(q, qkv, k_pages, v_pages, pages, starts, lengths, ancestors, k_scale, v_scale):
    """One row after another, in float64; rows of no sequence are NaN."""
    rows, heads, head = q.shape
    per, out = heads // k_pages.shape[2], np.full(q.shape, np.nan)
    for r, length in enumerate(lengths):
        start, stop = int(starts[r]), int(starts[r + 1])
        if start == stop:
            continue
        at = np.arange(length + stop - start)
        place = pages[r, at // PAGE], at % PAGE
        keys, values = real(k_pages[place]) * k_scale, real(v_pages[place]) * v_scale           # [keys, G, 256]
        for t in range(start, stop):
            own = int(ancestors[t]) >> np.arange(stop - start) & 1
            seen = np.concatenate([np.ones(length, bool), own == 1])
            for h in range(heads):
                score = keys[seen, h // per] @ real(q[t, h]) / np.sqrt(head)
                weight = np.exp(score - score.max())
                gate = real(qkv[t, (2 * h + 1) * head:(2 * h + 2) * head])
                out[t, h] = weight @ values[seen, h // per] / weight.sum() / (1 + np.exp(-gate))
    return dict(out=out)


def tile_keys(k_format, v_format):
    """Keys of a tile: 32 KiB of K and V together, or less."""
    return 64 if kv_tile.row_bytes(k_format) + kv_tile.row_bytes(v_format) <= 512 else 32


@functools.cache
def build(per, rows, k_format, v_format):
    """The kernel for `per` query heads a key head and `rows` rows of a sequence a block."""
    M = -(-rows * per // 16)                              # tiles of pairs
    KEYS = tile_keys(k_format, v_format)
    N, STEPS = KEYS // WARPS // 8, KEYS // 16             # tiles of keys that a warp scores; k-steps of the second product
    K_BYTES, V_BYTES = KEYS * kv_tile.row_bytes(k_format), KEYS * kv_tile.row_bytes(v_format)
    STAGE = K_BYTES + V_BYTES
    QUERIES = STAGES * STAGE                              # where things stand in shared memory
    WEIGHTS = QUERIES + M * 16 * HEAD * 2
    PEAKS = WEIGHTS + M * 16 * KEYS * 2
    K_STEPS = kv_tile.ELEMENTS[k_format] // 4             # k-steps in four chunks of a key
    V_TILES = kv_tile.ELEMENTS[v_format] // 4             # tiles of 8 dims in two chunks of a value
    ONES = {"bf16": 0x3F803F80, "f16": 0x3C003C00}[kv_tile.MATRIX[v_format]]
    NEAR, FAR = kv_tile.dims_of(k_format)
    copy_keys, copy_values = kv_tile.copy(k_format, KEYS, THREADS), kv_tile.copy(v_format, KEYS, THREADS)
    key_fragments, value_fragments = kv_tile.key_fragments(k_format), kv_tile.value_fragments(v_format)
    mma_k, mma_v, store_dims = kv_tile.mma(k_format), kv_tile.mma(v_format), kv_tile.store_dims(v_format)
    masked, largest = online_softmax.masked(M, N, per), online_softmax.largest(M, N)
    store_weights, rescaled = online_softmax.store_weights(M, N, kv_tile.pack(v_format)), online_softmax.rescaled(M, 9)

    @device
    def begin_copy(tile, k_pages, v_pages, table, i, there, group, groups, thread):
        """Start bringing tile i of a sequence that has `there` rows."""
        page = ptx.load_u32(table + i * KEYS // PAGE * 4)
        first, left = u32(page * PAGE + i * KEYS % PAGE), u32(there - i * KEYS)
        copy_keys(tile, k_pages, first, group, groups, left, thread)
        copy_values(u32(tile + K_BYTES), v_pages, first, group, groups, left, thread)

    @device
    def query_words(q, row, first_head, heads, pair, pairs, dim):
        """A lane's two words of a pair's query; zero beyond the last pair."""
        live = ptx.select(pair < pairs, pair, u32(0))
        at = q + ((u64(row + live // per) * heads + first_head + live % per) * HEAD + dim) * 2
        near, far = ptx.read_u32(at), ptx.read_u32(at + FAR * 2)
        return ptx.select(pair < pairs, near, u32(0)), ptx.select(pair < pairs, far, u32(0))

    @device
    def load_queries(queries, q, row, first_head, heads, pairs, warp, lane):
        """A fragments of all pairs from step row `row` on into shared memory: 512 bytes each, [M, 16 k-steps]."""
        for n in range(4 * M):
            k, pair = u32(n % 4 * 4 + warp), u32(n // 4 * 16 + lane // 4)
            dim = u32(k * 16 + lane % 4 * NEAR)
            low = query_words(q, row, first_head, heads, pair, pairs, dim)
            high = query_words(q, row, first_head, heads, u32(pair + 8), pairs, dim)
            ptx.store_shared_x4(u32(queries + ((n // 4 * 16 + k) * 32 + lane) * 16), (low[0], high[0], low[1], high[1]))

    @device
    def scored(queries, tile, warp, lane):
        """Q K^T of the warp's keys: fragments [M, N]."""
        s = ((0.0, 0.0, 0.0, 0.0),) * (M * N)
        for j in range(16 // K_STEPS):
            b = tuple(key_fragments(tile, u32((warp * N + n) * 8), j, lane) for n in static_range(N))
            for k in static_range(K_STEPS):
                a = tuple(ptx.shared_x4(u32(queries + ((m * 16 + j * K_STEPS + k) * 32 + lane) * 16))
                          for m in static_range(M))
                s = tuple(mma_k(a[e // N], b[e % N][k], s[e]) for e in static_range(M * N))
        return s

    @device
    def summed(o, weights, tile, warp, lane):
        """o + P V over the warp's 64 dims: fragments [M, 9], the ninth of ones."""
        for k in range(STEPS):
            p = tuple(ptx.shared_x4(u32(weights + ((m * STEPS + k) * 32 + lane) * 16)) for m in static_range(M))
            v = tuple(value_fragments(tile, u32(k * 16), u32(warp * (8 // V_TILES) + j), lane)
                      for j in static_range(8 // V_TILES))
            b = tuple(v[e // V_TILES][e % V_TILES] for e in static_range(8)) + ((ONES, ONES),)
            o = tuple(mma_v(p[e // 9], b[e % 9], o[e]) for e in static_range(9 * M))
        return o

    @device
    def store_piece(partial, stats, line, pairs, o, peak, scale, warp, lane):
        """What this block found in its share of a sequence's keys, for attn_combine."""
        t = lane % 4
        for e in static_range(2 * M):
            pair = u32(e * 8 + lane // 4)
            if pair < pairs:
                to = partial + u64(u32(line + pair)) * (HEAD * 4)
                for i in static_range(4):
                    x, y = o[e // 2 * 9 + i * 2], o[e // 2 * 9 + i * 2 + 1]
                    store_dims(to, u32(warp * 4 + i), t, x[e % 2 * 2], x[e % 2 * 2 + 1], y[e % 2 * 2], y[e % 2 * 2 + 1])
                if warp == 0 and t == 0:
                    ptx.store_f32x2(stats + u64(u32(line + pair)) * 8, (peak[e] * scale, o[e // 2 * 9 + 8][e % 2 * 2]))

    @kernel(threads=THREADS, shared=PEAKS + M * 16 * WARPS * 4, min_blocks=3 if M == 1 else 2)
    def attn_decode(q: u64, k_pages: u64, v_pages: u64, pages: u64, starts: u64, lengths: u64, ancestors: u64, partial: u64,
                    stats: u64, sequences: u32, width: u32, lines: u32, scale: f32):
        memory = ptx.shared_address(cuda.shared.array(0, types.uint8))
        queries, weights, peaks = u32(memory + QUERIES), u32(memory + WEIGHTS), u32(memory + PEAKS)
        group, share, groups, splits = ptx.block_x(), ptx.block_y(), ptx.blocks_x(), ptx.blocks_y()
        thread, lane, warp = ptx.thread_x(), ptx.lane(), u32(ptx.thread_x() // 32)
        skip = u32(ptx.block_z() * rows)                                # rows of a sequence that other blocks take
        tiles, end = shares.tiles_of(starts, lengths, sequences, KEYS)
        total = ptx.shuffle_idx(end, 31)
        count = min(total, splits)
        ptx.launch_dependents()
        ptx.wait_dependencies()
        if share >= count:
            return
        at, stop = shares.begin_of(share, total, count), shares.begin_of(u32(share + 1), total, count)
        while at < stop:                                                # one piece after another
            r = shares.sequence_of(at, end)
            stop_r, tiles_r = ptx.shuffle_idx(end, r), ptx.shuffle_idx(tiles, r)
            first, until = u32(at + tiles_r - stop_r), u32(min(stop, stop_r) + tiles_r - stop_r)
            at = u32(at + until - first)
            length, row = ptx.load_u32(lengths + r * 4), ptx.load_u32(starts + r * 4)
            own = u32(ptx.load_u32(starts + r * 4 + 4) - row)
            if skip < own:
                row, pairs = u32(row + skip), u32(min(u32(own - skip), rows) * per)
                table, there = pages + r * width * 4, u32(length + own)
                ptx.barrier()                                           # the piece before is done with its memory
                load_queries(queries, q, row, u32(group * per), u32(groups * per), pairs, warp, lane)
                for n in static_range(STAGES - 1):
                    if first + n < until:
                        begin_copy(u32(memory + n * STAGE), k_pages, v_pages, table, u32(first + n), there, group, groups,
                                   thread)
                    ptx.copy_commit()
                peak, o = (LOWEST,) * (2 * M), ((0.0, 0.0, 0.0, 0.0),) * (9 * M)
                slot = u32(0)
                for i in range(first, until):
                    tile, free = u32(memory + slot * STAGE), u32((slot + (STAGES - 1)) % STAGES)
                    ptx.copy_wait(STAGES - 2)
                    ptx.barrier()                                       # tile i is there, and nobody reads tile i - 1
                    if i + (STAGES - 1) < until:
                        begin_copy(u32(memory + free * STAGE), k_pages, v_pages, table, u32(i + (STAGES - 1)), there,
                                   group, groups, thread)
                    ptx.copy_commit()
                    s = scored(queries, tile, warp, lane)
                    if (i + 1) * KEYS > length:
                        s = masked(s, u32(i * KEYS + warp * (N * 8)), ancestors, row, pairs, length, own, lane)
                    new = largest(s, peak, peaks, warp, lane)
                    store_weights(weights, s, new, scale, warp, lane)
                    o = rescaled(o, peak, new, scale)
                    ptx.barrier()
                    peak = new
                    o = summed(o, weights, u32(tile + K_BYTES), warp, lane)
                    slot = u32((slot + 1) % STAGES)
                line = u32((group * (splits + sequences) + share + r) * lines + skip * per)
                store_piece(partial, stats, line, pairs, o, peak, scale, warp, lane)
    return attn_decode


def launch(stream, q, qkv, k_pages, v_pages, pages, starts, lengths, ancestors, k_scale, v_scale, out, partial, stats):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    check(q, k_pages, v_pages, pages, starts, lengths, ancestors, partial)
    (total, heads, _), groups, sequences = q.shape, k_pages.shape[2], len(lengths)
    attn_combine.check(partial, stats, qkv, starts, lengths, heads, out)
    k_format, v_format = format_of("k_pages", k_pages, "bf16", "e4m3"), format_of("v_pages", v_pages, "bf16", "e4m3")
    format_of("q", q, kv_tile.MATRIX[k_format])
    per, splits, lines = heads // groups, partial.shape[1] - sequences, partial.shape[2]
    rows = min(lines // per, PAIRS // per)
    if total and sequences:
        stream.launch(build(per, rows, k_format, v_format), (groups, splits, -(-lines // per // rows)),
                      q, k_pages, v_pages, pages, starts, lengths, ancestors, partial, stats, sequences, pages.shape[1],
                      lines, k_scale * LOG2_E / HEAD ** 0.5)
        attn_combine.launch(stream, partial, stats, qkv, starts, lengths, tile_keys(k_format, v_format), v_scale, heads, out)


def splits_for(multiprocessors, shared_per_block, groups, per, rows, k_format, v_format):
    """Splits that give every multiprocessor as many blocks as fit: with fewer it idles, with more some wait for their turn.
    `rows`: of a sequence, at most."""
    at_once = min(rows, PAIRS // per)
    taken = build(per, at_once, k_format, v_format).shared + RESERVED
    fit = max((shared_per_block + RESERVED) // taken, 1)
    return max(multiprocessors * fit // (groups * -(-rows // at_once)), 1)


def check(q, k_pages, v_pages, pages, starts, lengths, ancestors, partial):
    """ValueError if an argument is not as in the module's docstring; attn_combine.check looks at the others."""
    if len(q.shape) != 3 or len(k_pages.shape) != 4 or q.shape[1] % k_pages.shape[2]:
        raise ValueError("q and k_pages must have shapes [T, H, 256] and [P, 128, G, 256] with H a multiple of G, "
                         f"got {tuple(q.shape)} and {tuple(k_pages.shape)}")
    (total, heads, _), groups, sequences = q.shape, k_pages.shape[2], len(lengths)
    for name, array, shape in (("q", q, (total, heads, HEAD)), ("k_pages", k_pages, (k_pages.shape[0], PAGE, groups, HEAD)),
                               ("v_pages", v_pages, tuple(k_pages.shape)), ("pages", pages, (sequences, pages.shape[-1])),
                               ("starts", starts, (sequences + 1,)), ("ancestors", ancestors, (total,))):
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(array.shape)}")
    per = heads // groups
    if per > PAIRS:
        raise ValueError(f"at most {PAIRS} query heads may share a key head, got {per}")
    if partial.shape[0] != groups or partial.shape[1] <= sequences or partial.shape[2] % per \
            or not per <= partial.shape[2] <= MOST_ROWS * per:
        raise ValueError(f"partial must have shape [{groups}, splits + {sequences}, rows * {per}, {HEAD}] with 1 split or "
                         f"more and 1 to {MOST_ROWS} rows, got {tuple(partial.shape)}")


CASES = (
    dict(rows=(1,), lengths=(300,), splits=3),                                                       # 27B, three pages
    dict(rows=(8,), lengths=(200,), kv="e4m3", k_scale=0.5, v_scale=0.02, out="f16", splits=2),      # 27B, a tree
    dict(rows=(3, 0, 2), lengths=(126, 5, 64), heads=6, groups=1, splits=4, qkv="bf16", padding=1),  # nano
    dict(rows=(16,), lengths=(120,), heads=6, groups=1, kv="e4m3", splits=2),                        # two blocks of rows
    dict(rows=(32, 1), lengths=(0, 127), heads=3, groups=1, kv="e4m3", splits=9, out="f32"),         # ragged; a prompt
    dict(rows=(2,), lengths=(60,), heads=2, groups=1, kv="bf16", v="e4m3"),                          # two formats
    dict(rows=(1,), lengths=(0,)),                                                                   # sees itself alone
    dict(rows=(), lengths=(), heads=6, groups=1),
)


def make(rng, rows=(1,), lengths=(1000,), heads=24, groups=4, kv="bf16", v=None, k_scale=1.0, v_scale=1.0, qkv="f32",
         out="bf16", splits=8, padding=0):
    """Named random arguments: rows and lengths of each sequence, random trees, `padding` rows behind them. Pages are dealt
    out at random; what no row of a sequence fills is NaN. The softmax is sharp: a few keys count."""
    total, per, v = sum(rows) + padding, heads // groups, v or kv
    width = max((-(-(n + t) // PAGE) for n, t in zip(lengths, rows)), default=1)
    deal, taken = rng.permutation(len(rows) * width + 1).astype(np.int32), 0
    pages = np.full((len(rows), width), -1, np.int32)
    k_pages, v_pages = (np.full((len(deal), PAGE, groups, HEAD), *{"bf16": (0x7FFF, np.uint16), "e4m3": (0x7F, np.uint8)}[f])
                        for f in (kv, v))
    encode = {"bf16": numerics.encode_bf16, "e4m3": numerics.E4M3.encode}
    ancestors = rng.integers(0, 2 ** 32, total, np.uint32)                # of padding rows: anything
    for r, (t, n) in enumerate(zip(rows, lengths)):
        used = -(-(n + t) // PAGE)
        pages[r, :used], taken = deal[taken:taken + used], taken + used
        at = np.arange(n + t)
        place, shape = (pages[r, at // PAGE], at % PAGE), (n + t, groups, HEAD)
        k_pages[place] = encode[kv](rng.standard_normal(shape).astype(np.float32) / np.float32(k_scale))
        v_pages[place] = encode[v](rng.uniform(-1, 1, shape).astype(np.float32) / np.float32(v_scale))
        for i in range(t):
            start, parent = sum(rows[:r]), int(rng.integers(-1, i)) if i else -1
            ancestors[start + i] = 1 << i | (int(ancestors[start + parent]) if parent >= 0 else 0)
    queries, gates = (rng.standard_normal(shape).astype(np.float32) * scale for shape, scale in
                      (((total, heads, HEAD), 3), ((total, (2 * heads + 2 * groups) * HEAD), 1)))
    shape = groups, splits + len(rows), max((*rows, 1)) * per
    return dict(q=numerics.encode_bf16(queries) if kv == "bf16" else queries.astype(np.float16),
                qkv=numerics.encode_bf16(gates) if qkv == "bf16" else gates, k_pages=k_pages, v_pages=v_pages, pages=pages,
                starts=np.concatenate([[0], np.cumsum(rows)]).astype(np.int32), lengths=np.array(lengths, np.int32),
                ancestors=ancestors, k_scale=k_scale, v_scale=v_scale,
                out=np.empty((total, heads, HEAD), {"bf16": np.uint16, "f16": np.float16, "f32": np.float32}[out]),
                partial=np.empty((*shape, HEAD), np.float32), stats=np.empty((*shape, 2), np.float32))


def cost(rows=(1,), lengths=(1000,), heads=24, groups=4, kv="bf16", v=None, qkv="f32", out="bf16", **_):
    """Bytes that must move (the workspace, which stays in L2, not counted), and float operations."""
    size = {"bf16": 2, "f16": 2, "f32": 4, "e4m3": 1}
    keys = sum(n + t for n, t in zip(lengths, rows) if t)
    return dict(bytes=keys * groups * HEAD * (size[kv] + size[v or kv])
                + sum(rows) * heads * HEAD * (2 + size[qkv] + size[out]),
                flops=sum((n + t) * t for n, t in zip(lengths, rows)) * heads * HEAD * 4)
