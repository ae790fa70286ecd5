"""attn_prefill: causal attention of many new rows of one sequence over its paged keys and values, gated.

    score[t, h, j] = q[t, h] . k[j, h G/H] k_scale / 16                                    16 = sqrt(256)
    out[t, h]      = sigmoid(gate[t, h]) sum_j softmax_j(score) v[j, h G/H] v_scale        over the keys j <= length + t

    q          bf16 or f16 [T, H, 256]           normed and rotated; bf16 if the keys are, f16 if they are e4m3
    qkv        f32, bf16 or f16 [T, (2 H + 2 G) 256]     where the gates stand, as in rope_append.py
    k_pages, v_pages   bf16 or e4m3 [P, 128, G, 256]     times k_scale, v_scale; each in its own format. The new rows' own
                                                 keys and values are there
    pages      i32 or u32 [B]                    row j of the sequence is row j % 128 of page pages[j / 128]
    span       i32 or u32 [3 or more]            0, rows, length: rows <= T are new, `length` were there before
    out        bf16, f16 or f32 [T, H, 256]      rows from `rows` on are left alone
    partial    f32 [G, splits + 1, T H/G, 256]   workspace, with stats where keys are split; None where they are not
    stats      f32 [G, splits + 1, T H/G, 2]

Numbers of rows and keys are device data: one captured launch serves any span that fits.

A line is a (row, head) pair of one group, heads of a row together: line p is of row p / (H/G). A block takes 128 lines, 16 a
warp, so a key is read once for 21 rows of 6 heads; tiles of 16 KiB of keys and of values come by turns while the other is
multiplied:

    wait for keys i       begin values i       scores = Q K^T        in registers, 16 lines by a tile's keys
    wait for values i     begin keys i + 1     softmax, sums += P V  in registers, 16 lines by 256 dims

Blocks of the last rows, which see most, go first. Where the blocks are too few for the device (300 rows are 60), up to
`splits` of them share the keys in whole units of 512, and attn_combine.py puts together what they found.

27B: 4 * 24 * 256 = 24,576 float operations a row and key, 3.2 GFLOP a row at 128k keys; bytes do not matter.
"""
import functools

import numpy as np
from numba import cuda
from numba.cuda import types

from .. import numerics
from . import attn_combine, kv_tile, ptx, shares
from .activation import LOG2_E
from .build import kernel, lineless_device
from .gate import store_gated
from .kv_tile import HEAD, PAGE
from .octet import format_of
from .online_softmax import LOWEST, MINUS_INFINITY
from .parity import Output, real
from .ptx import f32, u32, u64
from .unroll import static_range

LINES, WARPS = 128, 8         # 16 lines a warp: 128 sums a lane
THREADS = 32 * WARPS
TILE_BYTES = 16384            # of keys, and of values: with the queries' 64 KiB all of an RTX 5090's shared memory
UNIT = 512                    # keys that are never split
REGISTERS = 255               # 256 threads may have all
SASS = {"sm_90a": ("HMMA.16816", "LDGSTS", "LDSM.16", "MUFU.EX2"),
        "sm_120a": ("HMMA.16816", "LDGSTS", "LDSM.16", "MUFU.EX2")}
# Weights are rounded to bf16 (2^-9) or f16, their sum is not: |error| <= 2^-9 mean |v| < 2^-9 for values in [-1, 1], as in
# CASES (v_scale included). A score is rounded 16 times to 2^-23 of sum |q k| / 16 < 32: 2^-14, the relative error of a
# weight and so twice of what is normalised. Gate and merging: attn_combine.
OUTPUTS = {"out": Output(rtol=2.0 ** -20, atol=2.0 ** -9 + 2.0 ** -12)}
SCRATCH = ("partial", "stats")


def ref(q, qkv, k_pages, v_pages, pages, span, k_scale, v_scale):
    """Row after row, head after head, in float64; rows that are not new are NaN."""
    (_, heads, head), (rows, length) = q.shape, (int(x) for x in span[1:3])
    per, out, at = heads // k_pages.shape[2], np.full(q.shape, np.nan), np.arange(length + rows)
    place = pages[at // PAGE], at % PAGE
    keys, values = real(k_pages[place]) * k_scale, real(v_pages[place]) * v_scale               # [keys, G, 256]
    for t in range(rows):
        seen, queries, gates = slice(length + t + 1), real(q[t]), real(qkv[t])
        for h in range(heads):
            score = keys[seen, h // per] @ queries[h] / np.sqrt(head)
            weight = np.exp(score - score.max())
            gate = gates[(2 * h + 1) * head:(2 * h + 2) * head]
            out[t, h] = weight @ values[seen, h // per] / weight.sum() / (1 + np.exp(-gate))
    return dict(out=out)


def tile_keys(k_format, v_format):
    """Keys of a tile."""
    return TILE_BYTES // max(kv_tile.row_bytes(k_format), kv_tile.row_bytes(v_format))


@lineless_device
def quad_max(x):
    x = ptx.maximum(x, ptx.shuffle_xor_f32(x, 1))
    return ptx.maximum(x, ptx.shuffle_xor_f32(x, 2))


@lineless_device
def quad_sum(x):
    x = x + ptx.shuffle_xor_f32(x, 1)
    return x + ptx.shuffle_xor_f32(x, 2)


def ending(per, v_format, gate_format, out_format, split):
    """Device function: what a lane found for lines `line` and line + 8, to `out`, divided and gated, or to the workspace for
    attn_combine. o: fragments [32] of 8 dims, placed as those of values are."""
    NEAR, FAR = kv_tile.dims_of(v_format)
    store, store_dims, PLAIN = store_gated(gate_format, out_format), kv_tile.store_dims(v_format), v_format == "bf16"

    @lineless_device
    def write(out, qkv, x, y, e, f, gate, to):
        """16 dims of output tiles x and y, times f."""
        a, b, c, d = x[e * 2] * f, x[e * 2 + 1] * f, y[e * 2] * f, y[e * 2 + 1] * f
        store(qkv, out, gate, to, a, b if PLAIN else c)
        store(qkv, out, gate + FAR, to + FAR, c if PLAIN else b, d)

    @lineless_device
    def end(o, low, high, low_sum, high_sum, line, lines, t, group, groups, share, splits, workspace_lines, scale, v_scale,
            qkv, out, partial, stats):
        heads, first = u32(groups * per), u32(u32(group * (splits + 1) + share) * workspace_lines)
        for e in static_range(2):
            p, total = u32(line + e * 8), high_sum if e else low_sum
            if p < lines:
                if split:
                    to = u64(u32(first + p))
                    for i in static_range(16):
                        x, y = o[2 * i], o[2 * i + 1]
                        store_dims(partial + to * (HEAD * 4), i, t, x[e * 2], x[e * 2 + 1], y[e * 2], y[e * 2 + 1])
                    if t == 0:
                        ptx.store_f32x2(stats + to * 8, ((high if e else low) * scale, total))
                else:
                    row, head, f = u32(p // per), u32(group * per + p % per), v_scale * ptx.reciprocal(total)
                    to = (u64(row) * heads + head) * HEAD + t * NEAR
                    gate = (u64(row) * (heads + groups) * 2 + head * 2 + 1) * HEAD + t * NEAR
                    for i in static_range(16):
                        write(out, qkv, o[2 * i], o[2 * i + 1], e, f, gate + i * 16, to + i * 16)
    return end


@functools.cache
def build(per, k_format, v_format, gate_format, out_format, split):
    """The kernel for `per` query heads a key head. split: what a block finds goes to the workspace."""
    KEYS = tile_keys(k_format, v_format)
    N = KEYS // 8                                         # tiles of keys of the scores
    KEYS_AT = LINES * HEAD * 2                            # where things stand in shared memory
    VALUES_AT = KEYS_AT + KEYS * kv_tile.row_bytes(k_format)
    SHARED = VALUES_AT + KEYS * kv_tile.row_bytes(v_format)
    K_STEPS = kv_tile.ELEMENTS[k_format] // 4             # k-steps in four chunks of a key
    V_TILES = kv_tile.ELEMENTS[v_format] // 4             # tiles of 8 dims in two chunks of a value
    PLAIN_KEYS = k_format == "bf16"
    copy_keys, copy_values = kv_tile.copy(k_format, KEYS, THREADS), kv_tile.copy(v_format, KEYS, THREADS)
    key_fragments, value_fragments = kv_tile.key_fragments(k_format), kv_tile.value_fragments(v_format)
    mma_k, mma_v, pack = kv_tile.mma(k_format), kv_tile.mma(v_format), kv_tile.pack(v_format)
    end = ending(per, v_format, gate_format, out_format, split)

    @lineless_device
    def load_queries(queries, q, first, lines, group, heads, thread):
        """Lines first .. into shared memory, chunks as kv_tile.py places them, dims of each 16 in the order that a key's
        fragments have; the last line again beyond the last."""
        for n in range(LINES // 16):
            r, c = u32(n * 16 + thread // 16), u32(thread % 16 * 2)
            line = min(u32(first + r), u32(lines - 1))
            source = q + (u64(line // per) * heads + (group * per + line % per)) * (HEAD * 2) + c * 16
            a, b = ptx.read_x4(source), ptx.read_x4(source + 16)
            at = u32(queries + r * (HEAD * 2))
            if PLAIN_KEYS:
                ptx.store_shared_x4(u32(at + (c ^ r & 7) * 16), a)
                ptx.store_shared_x4(u32(at + (c + 1 ^ r & 7) * 16), b)
            else:
                ptx.store_shared_x4(u32(at + (c ^ r & 7) * 16), (a[0], a[2], b[0], b[2]))
                ptx.store_shared_x4(u32(at + (c + 1 ^ r & 7) * 16), (a[1], a[3], b[1], b[3]))

    @lineless_device
    def scored(mine, tile, lane):
        """Q K^T of the warp's lines: fragments [N]."""
        s = ((0.0, 0.0, 0.0, 0.0),) * N
        for j in range(16 // K_STEPS):
            a = tuple(ptx.ldmatrix_x4(u32(mine + ((j * K_STEPS + k) * 2 + lane // 16 ^ lane % 8) * 16))
                      for k in static_range(K_STEPS))
            b = tuple(key_fragments(tile, u32(n * 8), j, lane) for n in static_range(N))
            for k in static_range(K_STEPS):
                s = tuple(mma_k(a[k], b[n][k], s[n]) for n in static_range(N))
        return s

    @lineless_device
    def seen(x, key, low, high):
        """A fragment of scores, -inf for keys beyond the last that its rows see."""
        return (ptx.select(key <= low, x[0], MINUS_INFINITY), ptx.select(key + 1 <= low, x[1], MINUS_INFINITY),
                ptx.select(key <= high, x[2], MINUS_INFINITY), ptx.select(key + 1 <= high, x[3], MINUS_INFINITY))

    @lineless_device
    def largest(s, low, high):
        """The largest scores of the lane's two lines, here and before."""
        for n in static_range(N):
            low = ptx.maximum(low, ptx.maximum(s[n][0], s[n][1]))
            high = ptx.maximum(high, ptx.maximum(s[n][2], s[n][3]))
        return quad_max(low), quad_max(high)

    @lineless_device
    def weighed(x, low, high, scale):
        """2^((score - largest) scale); low, high: -largest scale."""
        return (ptx.exp2(ptx.fma(x[0], scale, low)), ptx.exp2(ptx.fma(x[1], scale, low)),
                ptx.exp2(ptx.fma(x[2], scale, high)), ptx.exp2(ptx.fma(x[3], scale, high)))

    @lineless_device
    def times(x, low, high):
        return x[0] * low, x[1] * low, x[2] * high, x[3] * high

    @lineless_device
    def summed(o, p, tile, lane):
        """o + P V: fragments [32] of 8 dims."""
        for k in static_range(KEYS // 16):
            a = (pack(p[2 * k][0], p[2 * k][1]), pack(p[2 * k][2], p[2 * k][3]),
                 pack(p[2 * k + 1][0], p[2 * k + 1][1]), pack(p[2 * k + 1][2], p[2 * k + 1][3]))
            v = tuple(value_fragments(tile, u32(k * 16), u32(j), lane) for j in static_range(32 // V_TILES))
            o = tuple(mma_v(a, v[e // V_TILES][e % V_TILES], o[e]) for e in static_range(32))
        return o

    @kernel(threads=THREADS, shared=SHARED)
    def attn_prefill(q: u64, qkv: u64, k_pages: u64, v_pages: u64, pages: u64, span: u64, out: u64, partial: u64,
                     stats: u64, splits: u32, workspace_lines: u32, scale: f32, v_scale: f32):
        memory = ptx.shared_address(cuda.shared.array(0, types.uint8))
        keys, values = u32(memory + KEYS_AT), u32(memory + VALUES_AT)
        group, share, groups = ptx.block_x(), ptx.block_z(), ptx.blocks_x()
        first = u32((ptx.blocks_y() - 1 - ptx.block_y()) * LINES)
        thread, lane, warp = ptx.thread_x(), ptx.lane(), u32(ptx.thread_x() // 32)
        rows, length = ptx.load_u32(span + 4), ptx.load_u32(span + 8)
        lines = u32(rows * per)
        there = u32(length + (min(u32(first + LINES), lines) - 1) // per + 1)           # keys that some line sees
        i, stop = u32(0), u32((there + (KEYS - 1)) // KEYS)
        if split:
            units = u32((length + rows + (UNIT - 1)) // UNIT)
            count = min(units, splits)
            if share >= count:
                return
            i = u32(shares.begin_of(share, units, count) * (UNIT // KEYS))
            stop = min(stop, u32(shares.begin_of(u32(share + 1), units, count) * (UNIT // KEYS)))
        ptx.launch_dependents()
        ptx.wait_dependencies()
        if first >= lines:
            return
        load_queries(memory, q, first, lines, group, u32(groups * per), thread)
        mine, line, t = u32(memory + (warp * 16 + lane % 16) * (HEAD * 2)), u32(first + warp * 16 + lane // 4), u32(lane % 4)
        whole = u32(length + first // per + 1)                          # keys that every line sees
        low_last, high_last = u32(length + line // per), u32(length + (line + 8) // per)
        low, high, low_sum, high_sum = f32(LOWEST), f32(LOWEST), f32(0.0), f32(0.0)
        o = ((0.0, 0.0, 0.0, 0.0),) * 32
        row = u32(0)
        if i < stop:
            row = u32(ptx.load_u32(pages + i * KEYS // PAGE * 4) * PAGE + i * KEYS % PAGE)
            copy_keys(keys, k_pages, row, group, groups, u32(there - i * KEYS), thread)
        ptx.copy_commit()
        while i < stop:
            ptx.copy_wait(0)
            ptx.barrier()                                               # keys i are there, and nobody reads values i - 1
            copy_values(values, v_pages, row, group, groups, u32(there - i * KEYS), thread)
            ptx.copy_commit()
            after = min(u32(i + 1), u32(stop - 1))
            row = u32(ptx.load_u32(pages + after * KEYS // PAGE * 4) * PAGE + after * KEYS % PAGE)
            s = scored(mine, keys, lane)
            ptx.copy_wait(0)
            ptx.barrier()                                               # values i are there, and nobody reads keys i
            if i + 1 < stop:
                copy_keys(keys, k_pages, row, group, groups, u32(there - after * KEYS), thread)
            ptx.copy_commit()
            if (i + 1) * KEYS > whole:
                s = tuple(seen(s[n], u32(i * KEYS + n * 8 + t * 2), low_last, high_last) for n in static_range(N))
            new_low, new_high = largest(s, low, high)
            if ptx.ballot(ptx.select(new_low > low, u32(1), ptx.select(new_high > high, u32(1), u32(0)))) != 0:
                low_factor, high_factor = ptx.exp2((low - new_low) * scale), ptx.exp2((high - new_high) * scale)
                low_sum, high_sum = low_sum * low_factor, high_sum * high_factor
                o = tuple(times(o[e], low_factor, high_factor) for e in static_range(32))
                low, high = new_low, new_high
            low_offset, high_offset = -(low * scale), -(high * scale)
            p = tuple(weighed(s[n], low_offset, high_offset, scale) for n in static_range(N))
            for n in static_range(N):
                low_sum, high_sum = low_sum + (p[n][0] + p[n][1]), high_sum + (p[n][2] + p[n][3])
            o = summed(o, p, values, lane)
            i = u32(i + 1)
        end(o, low, high, quad_sum(low_sum), quad_sum(high_sum), line, lines, t, group, groups, share, splits,
            workspace_lines, scale, v_scale, qkv, out, partial, stats)
    return attn_prefill


def launch(stream, q, qkv, k_pages, v_pages, pages, span, k_scale, v_scale, out, partial=None, stats=None):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    check(q, qkv, k_pages, v_pages, pages, span, out, partial, stats)
    k_format, v_format = format_of("k_pages", k_pages, "bf16", "e4m3"), format_of("v_pages", v_pages, "bf16", "e4m3")
    format_of("q", q, kv_tile.MATRIX[k_format])
    made = build(q.shape[1] // k_pages.shape[2], k_format, v_format, format_of("qkv", qkv, "f32", "bf16", "f16"),
                 format_of("out", out, "bf16", "f16", "f32"), partial is not None)
    queue(stream, made, q, qkv, k_pages, v_pages, pages, span, k_scale, v_scale, out, partial, stats)


def queue(stream, made, q, qkv, k_pages, v_pages, pages, span, k_scale, v_scale, out, partial, stats):
    """Queue a form of the kernel and what merges its splits: the end of every form's launch."""
    (total, heads, _), groups, split = q.shape, k_pages.shape[2], partial is not None
    pairs, splits = total * heads // groups, partial.shape[1] - 1 if split else 1
    if total:
        stream.launch(made, (groups, -(-pairs // LINES), splits), q, qkv, k_pages, v_pages, pages, span, out,
                      partial if split else out, stats if split else out, splits, pairs,
                      k_scale * LOG2_E / HEAD ** 0.5, v_scale)
        if split:
            attn_combine.launch(stream, partial, stats, qkv, span[:2], span[2:3], UNIT, v_scale, heads, out)


def splits_for(multiprocessors, rows, per, groups, most=8):
    """The fewest splits with which a device whose multiprocessors take a block at a time idles for less than a tenth, or
    those with which it idles least."""
    blocks = -(-rows * per // LINES) * groups
    busy = {s: blocks * s / (-(-blocks * s // multiprocessors) * multiprocessors) for s in range(1, most + 1)}
    return next((s for s in busy if busy[s] > 0.9), max(busy, key=busy.get))


def check(q, qkv, k_pages, v_pages, pages, span, out, partial, stats):
    """ValueError if an argument is not as in the module's docstring."""
    if len(q.shape) != 3 or len(k_pages.shape) != 4 or q.shape[1] % k_pages.shape[2]:
        raise ValueError("q and k_pages must have shapes [T, H, 256] and [P, 128, G, 256] with H a multiple of G, "
                         f"got {tuple(q.shape)} and {tuple(k_pages.shape)}")
    (total, heads, _), groups = q.shape, k_pages.shape[2]
    if len(span.shape) != 1 or span.shape[0] < 3 or np.dtype(span.dtype).itemsize != 4:
        raise ValueError(f"span must be i32 or u32 [3 or more], got {span.dtype} {tuple(span.shape)}")
    if (partial is None) != (stats is None) or partial is not None and (len(partial.shape) != 4 or partial.shape[1] < 2):
        raise ValueError("partial and stats must both be None, or have shapes [G, splits + 1, T H/G, 256] and [..., 2]")
    wanted = [("q", q, (total, heads, HEAD)), ("k_pages", k_pages, (k_pages.shape[0], PAGE, groups, HEAD)),
              ("v_pages", v_pages, tuple(k_pages.shape)), ("pages", pages, (pages.shape[-1],)),
              ("qkv", qkv, (total, (2 * heads + 2 * groups) * HEAD)), ("out", out, (total, heads, HEAD))]
    if partial is not None:
        shape = groups, partial.shape[1], total * heads // groups
        wanted += [("partial", partial, (*shape, HEAD)), ("stats", stats, (*shape, 2))]
    for name, array, shape in wanted:
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(array.shape)}")


CASES = (
    dict(rows=17, length=100),                                                             # 27B; the last block is ragged
    dict(rows=30, length=140, heads=6, groups=1, kv="e4m3", k_scale=0.5, v_scale=0.02),    # nano
    dict(rows=130, length=0, heads=2, groups=1, kv="e4m3", qkv="bf16", out="f32"),         # a prompt over two pages
    dict(rows=9, length=600, heads=6, groups=1, kv="e4m3", splits=3, padding=3),           # more splits than units of keys
    dict(rows=1, length=0, heads=3, groups=1, kv="bf16", v="e4m3"),                        # sees itself alone; two formats
    dict(rows=0, length=5, heads=6, groups=1, padding=2),
)


def make(rng, rows=2048, length=0, heads=24, groups=4, kv="bf16", v=None, k_scale=1.0, v_scale=1.0, qkv="f16", out="f16",
         splits=1, padding=0):
    """Named random arguments, `padding` rows behind the new ones. Pages are dealt out at random; what no row of the sequence
    fills is NaN. The softmax is sharp: a few keys count."""
    total, per, v = rows + padding, heads // groups, v or kv
    used = -(-(length + rows) // PAGE)
    deal, pages = rng.permutation(used + 1).astype(np.int32), np.full(used + 2, -1, np.int32)
    pages[:used] = deal[:used]
    k_pages, v_pages = (np.full((used + 1, PAGE, groups, HEAD), *{"bf16": (0x7FFF, np.uint16), "e4m3": (0x7F, np.uint8)}[f])
                        for f in (kv, v))
    encode = {"bf16": numerics.encode_bf16, "e4m3": numerics.E4M3.encode}
    at = np.arange(length + rows)
    place, shape = (pages[at // PAGE], at % PAGE), (length + rows, groups, HEAD)
    k_pages[place] = encode[kv](rng.standard_normal(shape).astype(np.float32) / np.float32(k_scale))
    v_pages[place] = encode[v](rng.uniform(-1, 1, shape).astype(np.float32) / np.float32(v_scale))
    queries, gates = (rng.standard_normal(shape).astype(np.float32) * scale for shape, scale in
                      (((total, heads, HEAD), 3), ((total, (2 * heads + 2 * groups) * HEAD), 1)))
    workspace = groups, splits + 1, total * per
    split = dict(partial=np.empty((*workspace, HEAD), np.float32), stats=np.empty((*workspace, 2), np.float32))
    return dict(q=numerics.encode_bf16(queries) if kv == "bf16" else queries.astype(np.float16),
                qkv={"f32": np.asarray, "bf16": numerics.encode_bf16, "f16": np.float16}[qkv](gates),
                k_pages=k_pages, v_pages=v_pages, pages=pages, span=np.array([0, rows, length], np.int32),
                k_scale=k_scale, v_scale=v_scale,
                out=np.empty((total, heads, HEAD), {"bf16": np.uint16, "f16": np.float16, "f32": np.float32}[out]),
                **(split if splits > 1 else {}))


def cost(rows=2048, length=0, heads=24, groups=4, kv="bf16", v=None, qkv="f16", out="f16", **_):
    """Bytes that must move (the workspace not counted), and float operations."""
    size = {"bf16": 2, "f16": 2, "f32": 4, "e4m3": 1}
    return dict(bytes=(length + rows) * groups * HEAD * (size[kv] + size[v or kv])
                + rows * heads * HEAD * (2 + size[qkv] + size[out]),
                flops=(rows * length + rows * (rows + 1) // 2) * heads * HEAD * 4)
