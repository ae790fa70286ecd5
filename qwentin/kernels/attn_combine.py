"""attn_combine: merge what the blocks of attn_decode found in their shares of the keys, and gate it.

    out[t, h] = sigmoid(gate[t, h]) v_scale  sum_s 2^(m_s - max m) o_s  /  sum_s 2^(m_s - max m) l_s

    partial  f32 [G, splits + R, M, 256]    o_s: sums of 2^(score - m_s) v over a share's keys. R sequences, M = rows H/G:
                                            piece s + r (shares.py) holds rows i of sequence r, at i H/G + h mod H/G
    stats    f32 [G, splits + R, M, 2]      (m_s, l_s): the largest score and the sum of weights; scores in powers of 2
    qkv      f32, bf16 or f16 [T, (2 H + 2 G) 256]   as in rope_append.py; head h's gate stands from column (2 h + 1) 256 on
    starts   i32 or u32 [R + 1]             row t belongs to the sequence r with starts[r] <= t < starts[r + 1]
    lengths  i32 or u32 [R]                 with starts, they say which shares hold a piece of which sequence
    out      bf16, f16 or f32 [T, H, 256]   rows from starts[R] on are left alone

One block takes one row of one head. Its eight warps take four pieces a turn each, a lane eight dims; a last warp adds up.
27B, 1 row, 128k tokens on 132 multiprocessors: 99 pieces of 24 heads are 2.4 MB, out of L2.
"""
import functools

import numpy as np
from numba import cuda
from numba.cuda import types

from .. import numerics
from . import octet, ptx, reduce, shares
from .activation import sigmoid
from .build import device, kernel
from .octet import format_of
from .parity import Output, real
from .ptx import f32, u32, u64
from .unroll import static_range

HEAD = 256
WARPS = 8
FLIGHT = 4                    # pieces a warp loads at once: a turn costs the latency of L2, not its bandwidth
REGISTERS = 96                # two blocks of 256 threads a multiprocessor and more
SASS = {"sm_90a": ("LDG.E.128", "MUFU.EX2"), "sm_120a": ("LDG.E.128", "MUFU.EX2")}
# Each weight is off by 2^-22 (exp2.approx) and the sums by (turns of 4 + 8 warps) 2^-24 of the sum of magnitudes, a
# convex combination of |o_s / l_s| < 8 in CASES; reciprocal and sigmoid add 2^-21 of the value.
OUTPUTS = {"out": Output(rtol=2.0 ** -20, atol=2.0 ** -17)}


def ref(partial, stats, qkv, starts, lengths, tile, v_scale, heads):
    """The formula in float64, shares dealt out one tile at a time."""
    groups, pieces, _, _ = partial.shape
    per, rows = heads // groups, np.diff(starts)
    tiles = [-(-(int(n) + int(t)) // tile) if t else 0 for n, t in zip(lengths, rows)]
    total = sum(tiles)
    count = min(total, pieces - len(rows))
    holder = [s for s in range(count) for _ in range(s * total // count, (s + 1) * total // count)]
    got = np.full((len(qkv), heads, HEAD), np.nan)
    for r, t in enumerate(rows):
        first = sum(tiles[:r])
        mine = sorted({s + r for s in holder[first:first + tiles[r]]})
        for i in range(t):
            for h in range(heads):
                m, l = stats[h // per, mine, i * per + h % per].astype(np.float64).T
                w = np.exp2(m - m.max())
                o = w @ partial[h // per, mine, i * per + h % per].astype(np.float64) / (w @ l)
                gate = real(qkv[starts[r] + i, (2 * h + 1) * HEAD:(2 * h + 2) * HEAD])
                got[starts[r] + i, h] = o * v_scale / (1 + np.exp(-gate))
    return dict(out=got)


@functools.cache
def build(gate_format, out_format):
    """The kernel for these formats, of any model."""
    load_piece, load_gate, store = octet.load("f32"), octet.load(gate_format), octet.store(out_format)

    @device
    def largest(stats, line, step, first, last):
        """The largest m of pieces first .. last."""
        best = ptx.read_f32(stats + u64(first * step + line) * 8)
        for s in range(first + ptx.lane(), last + 1, 32):
            best = ptx.maximum(best, ptx.read_f32(stats + u64(s * step + line) * 8))
        return reduce.warp_max(best)

    @device
    def summed(sums, weights, lane):
        """What the warps left in shared memory, added up: (eight dims of the lane, sum of weights)."""
        x, total = (0.0,) * 8, 0.0
        for w in static_range(WARPS):
            a = ptx.shared_f32x4(u32(sums + w * HEAD * 4 + lane * 32))
            b = ptx.shared_f32x4(u32(sums + w * HEAD * 4 + lane * 32 + 16))
            y = a + b
            x = tuple(x[j] + y[j] for j in static_range(8))
            total += ptx.shared_f32(u32(weights + w * 4))
        return x, total

    @kernel(threads=32 * WARPS)
    def attn_combine(partial: u64, stats: u64, qkv: u64, starts: u64, lengths: u64, out: u64, sequences: u32, splits: u32,
                     lines: u32, per: u32, groups: u32, tile: u32, v_scale: f32):
        sums = ptx.shared_address(cuda.shared.array(WARPS * HEAD, types.float32))
        weights = ptx.shared_address(cuda.shared.array(WARPS, types.float32))
        head, row, lane, heads = ptx.block_x(), ptx.block_y(), ptx.lane(), ptx.blocks_x()
        warp = u32(ptx.thread_x() // 32)
        end_row = u32(0xFFFFFFFF)
        if lane < sequences:
            end_row = ptx.load_u32(starts + lane * 4 + 4)
        r = shares.sequence_of(row, end_row)
        ptx.launch_dependents()
        ptx.wait_dependencies()
        if r < sequences:                                                   # the whole block agrees
            tiles, end = shares.tiles_of(starts, lengths, sequences, tile)
            total, stop = ptx.shuffle_idx(end, 31), ptx.shuffle_idx(end, r)
            count = min(total, splits)
            first = u32(r + shares.holder_of(u32(stop - ptx.shuffle_idx(tiles, r)), total, count))
            last = u32(r + shares.holder_of(u32(stop - 1), total, count))
            # line of this row and head in the first piece of its group; `lines` further on in the next
            line = u32(head // per * u32(splits + sequences) * lines
                       + (row - ptx.load_u32(starts + r * 4)) * per + head % per)
            best = largest(stats, line, lines, first, last)
            x, weight = (0.0,) * 8, 0.0
            for base in range(first + warp * FLIGHT, last + 1, WARPS * FLIGHT):
                piece = tuple(u64(min(u32(base + k), last) * lines + line) for k in static_range(FLIGHT))
                pair = tuple(ptx.read_f32x2(stats + piece[k] * 8) for k in static_range(FLIGHT))
                o = tuple(load_piece(partial, piece[k] * (HEAD // 8) + lane) for k in static_range(FLIGHT))
                for k in static_range(FLIGHT):
                    w = ptx.select(base + k <= last, ptx.exp2(pair[k][0] - best), 0.0)
                    weight = ptx.fma(w, pair[k][1], weight)
                    x = tuple(ptx.fma(w, o[k][j], x[j]) for j in static_range(8))
            ptx.store_shared_f32x4(u32(sums + (warp * HEAD + lane * 8) * 4), (x[0], x[1], x[2], x[3]))
            ptx.store_shared_f32x4(u32(sums + (warp * HEAD + lane * 8) * 4 + 16), (x[4], x[5], x[6], x[7]))
            if lane == 0:
                ptx.store_shared_f32(u32(weights + warp * 4), weight)
            ptx.barrier()
            if warp == 0:
                gate = load_gate(qkv, (u64(row) * (heads + groups) * 2 + head * 2 + 1) * (HEAD // 8) + lane)
                x, weight = summed(sums, weights, lane)
                factor = v_scale * ptx.reciprocal(weight)
                store(out, u64(row * heads + head) * (HEAD // 8) + lane,
                      tuple(x[j] * factor * sigmoid(gate[j]) for j in static_range(8)))
    return attn_combine


def launch(stream, partial, stats, qkv, starts, lengths, tile, v_scale, heads, out):
    """Queue it on a stream; shapes and dtypes as in the module's docstring. tile: keys of a tile (shares.py)."""
    check(partial, stats, qkv, starts, lengths, heads, out)
    (groups, pieces, lines, _), sequences, rows = partial.shape, len(lengths), out.shape[0]
    made = build(format_of("qkv", qkv, "f32", "bf16", "f16"), format_of("out", out, "bf16", "f16", "f32"))
    if rows and sequences:
        stream.launch(made, (heads, rows, 1), partial, stats, qkv, starts, lengths, out, sequences, pieces - sequences,
                      lines, heads // groups, groups, tile, v_scale)


def check(partial, stats, qkv, starts, lengths, heads, out):
    """ValueError if an argument is not as in the module's docstring."""
    groups, pieces, lines, head = partial.shape
    sequences, rows = len(lengths), out.shape[0]
    if head != HEAD:
        raise ValueError(f"partial must have shape [G, splits + R, M, {HEAD}], got {tuple(partial.shape)}")
    if sequences > shares.MAX_SEQUENCES:
        raise ValueError(f"a step takes at most {shares.MAX_SEQUENCES} sequences, got {sequences}")
    for name, array, shape in (("stats", stats, (groups, pieces, lines, 2)), ("starts", starts, (sequences + 1,)),
                               ("qkv", qkv, (rows, (2 * heads + 2 * groups) * HEAD)), ("out", out, (rows, heads, HEAD))):
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(array.shape)}")
    format_of("qkv", qkv, "f32", "bf16", "f16")
    format_of("out", out, "bf16", "f16", "f32")


CASES = (
    dict(rows=(1,), lengths=(3000,), splits=40),                            # 27B: more pieces than a turn of all warps
    dict(rows=(3, 0, 8), lengths=(130, 77, 0), splits=5, qkv="bf16", out="f16"),     # pieces of two sequences in a share
    dict(rows=(1,), lengths=(40,), heads=6, groups=1, splits=7, v_scale=0.02, padding=2),  # nano; shares without tiles
    dict(rows=(2, 1), lengths=(64, 63), heads=3, groups=3, splits=1, out="f32"),
    dict(rows=(), lengths=(), heads=6, groups=1),
)


def make(rng, rows=(1,), lengths=(1000,), heads=24, groups=4, tile=64, splits=8, qkv="f32", out="bf16", v_scale=1.0,
         padding=0):
    """Named random arguments: rows and lengths of each sequence, `padding` rows behind them."""
    total, per = sum(rows) + padding, heads // groups
    shape = (groups, splits + len(rows), max(rows, default=1) * per)
    gates = rng.standard_normal((total, (2 * heads + 2 * groups) * HEAD)).astype(np.float32)
    stats = np.stack([rng.uniform(-20, 20, shape), rng.uniform(1, 64, shape)], -1).astype(np.float32)
    return dict(partial=(rng.uniform(-4, 4, (*shape, HEAD)) * stats[..., 1:]).astype(np.float32), stats=stats,
                qkv=numerics.encode_bf16(gates) if qkv == "bf16" else gates,
                starts=np.concatenate([[0], np.cumsum(rows)]).astype(np.int32), lengths=np.array(lengths, np.int32),
                tile=tile, v_scale=v_scale, heads=heads,
                out=np.empty((total, heads, HEAD), {"bf16": np.uint16, "f16": np.float16, "f32": np.float32}[out]))


def cost(rows=(1,), lengths=(1000,), heads=24, groups=4, tile=64, splits=8, qkv="f32", out="bf16", **_):
    """Bytes that must move, and float operations; every share counted as holding a piece of one sequence."""
    size, pieces = {"bf16": 2, "f16": 2, "f32": 4}, splits + len(rows)
    moved = sum(rows) * heads * HEAD * (size[qkv] + size[out]) + max(rows, default=0) * heads * pieces * (HEAD + 2) * 4
    return dict(bytes=moved, flops=max(rows, default=0) * heads * pieces * HEAD * 2)
