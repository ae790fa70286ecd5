"""attn_prefill_sm90a: attn_prefill on wgmma: the same arguments and the same result, for Hopper.

attn_prefill.py has the formula and the arrays. Here k_pages and v_pages have one format.

A block takes 128 lines (row, head) of a group and walks over tiles of 64 keys. One warpgroup fetches their keys and values
(kv_pieces.py has the layout; queries lie likewise, the four columns of a warpgroup's 64 lines together). Two multiply, 64
lines each; they soon fall out of step, and one has its softmax while the other multiplies:

    S = Q K^T       16 wgmma m64n64k16, both operands from shared memory
    softmax         in registers; the sums are rescaled when some line of the warp has a new largest score
    O += P V        4 wgmma m64n256k16, P from registers

Registers are given from the fetching warpgroup to the others: 128 sums, 32 scores and 16 words of P a thread.

A tile takes 2,048 cycles of the tensor cores (4,096 operations a cycle), and as many of shared memory at 128 bytes a cycle:
1,024 to read Q and K, 512 for V, 512 to write. On an H200 (2,048 rows after 30,720): 631 TFLOP/s in bf16, 521 in e4m3, 790
with nothing fetched, where torch's flash attention has 322 and attn_prefill 286. Giving turns by barriers (590) and the
scores of the next tile begun before O (579; 535 in e4m3) are no faster: what is written to shared memory sets the pace.
"""
import functools

from numba import cuda
from numba.cuda import types

from . import attn_prefill, kv_tile, ptx, shares
from .attn_prefill import (LINES, OUTPUTS, SCRATCH, UNIT, check, cost, ending, make, quad_max,              # noqa: F401
                           quad_sum, queue, ref, splits_for)
from .build import kernel, lineless_device
from .kv_pieces import COLUMN, DEPTH, KEYS, PIECE, fetch_bf16, fetch_e4m3, onward
from .kv_tile import HEAD
from .octet import format_of
from .online_softmax import LOWEST, MINUS_INFINITY
from .ptx import f32, u32, u64
from .ptx_wgmma import wgmma, wgmma_commit, wgmma_fence, wgmma_wait
from .ring import arrive, make_barriers, wait
from .unroll import static_range

GROUPS = 2                    # warpgroups that multiply
THREADS = 128 * (1 + GROUPS)
QUERIES = GROUPS * PIECE      # with the ring 224 KiB: a whole block's shared memory
BARS_AT = QUERIES + DEPTH * PIECE
SHARED = BARS_AT + 16 * DEPTH + 1024                     # the swizzle counts from 1024-byte boundaries
SCORES, SUMS = KEYS // 2, HEAD // 2                      # float32 of a thread
BY_ROW = 1 << 62 | 64 << 32 | 1 << 16                    # descriptors: 128-byte swizzle, groups of 8 rows 1024 bytes apart;
BY_KEY = 1 << 62 | 64 << 32 | COLUMN >> 4 << 16          # the same and columns apart, dims running fastest
DOWN = {"bf16": 40, "e4m3": 56}                          # registers of a fetching thread, and of a multiplying one: together
UP = {"bf16": 232, "e4m3": 224}                          # the 3 * 168 that the three warpgroups begin with
REGISTERS = 168
SASS = {"sm_90a": ("HGMMA.64x64x16.F32", "HGMMA.64x256x16.F32", "SYNCS", "USETMAXREG", "MUFU.EX2")}


@lineless_device
def seen(s, key, low, high):
    """Scores, -inf for keys beyond the last that their lines see; key: the first column of the thread."""
    for j in static_range(SCORES // 4):
        k = u32(key + j * 8)
        s = s[:4 * j] + (ptx.select(k <= low, s[4 * j], MINUS_INFINITY),
                         ptx.select(k + 1 <= low, s[4 * j + 1], MINUS_INFINITY),
                         ptx.select(k <= high, s[4 * j + 2], MINUS_INFINITY),
                         ptx.select(k + 1 <= high, s[4 * j + 3], MINUS_INFINITY)) + s[4 * j + 4:]
    return s


@lineless_device
def largest(s, low, high):
    """The largest scores of the thread's two lines, here and before."""
    for j in static_range(SCORES // 4):
        low = ptx.maximum(low, ptx.maximum(s[4 * j], s[4 * j + 1]))
        high = ptx.maximum(high, ptx.maximum(s[4 * j + 2], s[4 * j + 3]))
    return quad_max(low), quad_max(high)


@functools.cache
def build(per, format, gate_format, out_format, split):
    """The kernel for `per` query heads a key head. split: what a block finds goes to the workspace."""
    KIND, TAKES, GIVES = kv_tile.MATRIX[format], UP[format], DOWN[format]
    pack = kv_tile.pack(format)
    end = ending(per, "bf16", gate_format, out_format, split)               # widened values come in the plain order
    fetch, WIDENED = fetch_bf16 if format == "bf16" else fetch_e4m3, format == "e4m3"
    first_step, step, add = wgmma(KEYS, KIND, KIND, fresh=True), wgmma(KEYS, KIND, KIND), wgmma(
        HEAD, KIND, KIND, a_in_registers=True, b_by_k=True)

    @lineless_device
    def query_chunk(q, line, group, heads, c):
        return ptx.read_x4(q + (u64(line // per) * heads + (group * per + line % per)) * (HEAD * 2) + c * 16)

    @lineless_device
    def load_queries(queries, q, first, lines, group, heads, thread):
        """Lines first .. first + 63 of a warpgroup; the last line again beyond the last."""
        c = u32(thread % 32)
        for n in range(2):
            r = u32(n * 32 + thread // 32)
            x = tuple(query_chunk(q, min(u32(first + r + k * 4), u32(lines - 1)), group, heads, c) for k in static_range(8))
            for k in static_range(8):
                at = u32(r + k * 4)
                ptx.store_shared_x4(u32(queries + c // 8 * COLUMN + at * 128 + (c % 8 ^ at % 8) * 16), x[k])

    @lineless_device
    def scored(queries, keys):
        """Q K^T."""
        a, b = u64(BY_ROW) | u64(queries >> 4), u64(BY_ROW) | u64(keys >> 4)
        wgmma_fence()
        s = first_step(a, b)
        for k in static_range(1, 16):
            s = step(s, a + u64(k // 4 * (COLUMN // 16) + k % 4 * 2), b + u64(k // 4 * (COLUMN // 16) + k % 4 * 2))
        wgmma_commit()
        wgmma_wait(0)
        return s

    @lineless_device
    def summed(o, p, values):
        """O + P V; p: weights, which as pairs in 16 bits are A fragments."""
        a, b = tuple(pack(p[2 * j], p[2 * j + 1]) for j in static_range(SCORES // 2)), u64(BY_KEY) | u64(values >> 4)
        wgmma_fence()
        for k in static_range(KEYS // 16):
            o = add(o, (a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]), b + u64(k * (16 * 128 // 16)))
        wgmma_commit()
        wgmma_wait(0)
        return o

    @lineless_device
    def weighed(s, low, high, scale):
        """2^((score - largest) scale). low, high: -largest scale."""
        return tuple(ptx.exp2(ptx.fma(s[e], scale, high if e // 2 % 2 else low)) for e in static_range(SCORES))

    @lineless_device
    def added(p, low, high):
        """low, high + the weights of their lines."""
        for j in static_range(SCORES // 4):
            low, high = low + (p[4 * j] + p[4 * j + 1]), high + (p[4 * j + 2] + p[4 * j + 3])
        return low, high

    @lineless_device
    def attended(queries, ring, bars, tile, stop, whole, low_last, high_last, scale, lane):
        """A warpgroup's walk: (O, largest score and sum of weights of the thread's two lines)."""
        low, high, low_sum, high_sum = f32(LOWEST), f32(LOWEST), f32(0.0), f32(0.0)
        o, slot, parity = (0.0,) * SUMS, u32(0), u32(0)
        while tile < stop:
            wait(u32(bars + slot * 8), parity)
            s = scored(queries, u32(ring + slot * PIECE))
            arrive(u32(bars + (DEPTH + slot) * 8), lane)
            slot, parity = onward(slot, parity)
            if (tile + 1) * KEYS > whole:
                s = seen(s, u32(tile * KEYS + lane % 4 * 2), low_last, high_last)
            new_low, new_high = largest(s, low, high)
            if ptx.ballot(ptx.select(new_low > low, u32(1), ptx.select(new_high > high, u32(1), u32(0)))) != 0:
                low_factor, high_factor = ptx.exp2((low - new_low) * scale), ptx.exp2((high - new_high) * scale)
                low_sum, high_sum = low_sum * low_factor, high_sum * high_factor
                o = tuple(o[e] * (high_factor if e // 2 % 2 else low_factor) for e in static_range(SUMS))
                low, high = new_low, new_high
            p = weighed(s, -(low * scale), -(high * scale), scale)
            low_sum, high_sum = added(p, low_sum, high_sum)
            wait(u32(bars + slot * 8), parity)
            o = summed(o, p, u32(ring + slot * PIECE))
            arrive(u32(bars + (DEPTH + slot) * 8), lane)
            slot, parity = onward(slot, parity)
            tile = u32(tile + 1)
        return o, low, high, quad_sum(low_sum), quad_sum(high_sum)

    @kernel(threads=THREADS, shared=SHARED, whole=True)              # for setmaxnreg
    def attn_prefill_sm90a(q: u64, qkv: u64, k_pages: u64, v_pages: u64, pages: u64, span: u64, out: u64, partial: u64,
                           stats: u64, splits: u32, workspace_lines: u32, scale: f32, v_scale: f32):
        memory = u32(u32(ptx.shared_address(cuda.shared.array(0, types.uint8)) + 1023) & 0xFFFFFC00)
        ring, bars = u32(memory + QUERIES), u32(memory + BARS_AT)       # DEPTH of full, DEPTH of empty
        group, share, groups = ptx.block_x(), ptx.block_z(), ptx.blocks_x()
        first = u32((ptx.blocks_y() - 1 - ptx.block_y()) * LINES)
        thread, lane, warp = ptx.thread_x(), ptx.lane(), ptx.shuffle_idx(u32(ptx.thread_x() // 32), 0)
        rows, length = ptx.load_u32(span + 4), ptx.load_u32(span + 8)
        lines = u32(rows * per)
        there = u32(length + (min(u32(first + LINES), lines) - 1) // per + 1)           # keys that some line sees
        tile, stop = u32(0), u32((there + (KEYS - 1)) // KEYS)
        if split:
            units = u32((length + rows + (UNIT - 1)) // UNIT)
            count = min(units, splits)
            if share >= count:
                return
            tile = u32(shares.begin_of(share, units, count) * (UNIT // KEYS))
            stop = min(stop, u32(shares.begin_of(u32(share + 1), units, count) * (UNIT // KEYS)))
        if first >= lines:
            return
        make_barriers(bars, DEPTH, 4, 4 * GROUPS)
        ptx.launch_dependents()
        ptx.wait_dependencies()
        if warp < 4:
            ptx.registers_down(GIVES)
            fetch(ring, bars, k_pages, v_pages, pages, group, groups, tile, stop, there, thread)
        else:
            ptx.registers_up(TAKES)
            if WIDENED:                       # 32 addresses in plain registers, of which there are enough, else uniform ones
                mine = u32(memory + (thread // 128 - 1) * PIECE)
            else:
                mine = u32(memory + (warp // 4 - 1) * PIECE)
            begin = u32(first + (warp // 4 - 1) * 64)
            load_queries(mine, q, begin, lines, group, u32(groups * per), u32(thread % 128))
            ptx.fence_async()
            ptx.barrier_named(1, 128 * GROUPS)
            line, t = u32(begin + warp % 4 * 16 + lane // 4), u32(lane % 4)
            whole = u32(length + begin // per + 1)                      # keys that every line of the warpgroup sees
            low_last, high_last = u32(length + line // per), u32(length + (line + 8) // per)
            o, low, high, low_sum, high_sum = attended(mine, ring, bars, tile, stop, whole, low_last, high_last, scale,
                                                       lane)
            end(tuple((o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]) for j in static_range(SUMS // 4)), low, high,
                low_sum, high_sum, line, lines, t, group, groups, share, splits, workspace_lines, scale, v_scale, qkv, out,
                partial, stats)
    return attn_prefill_sm90a


def launch(stream, q, qkv, k_pages, v_pages, pages, span, k_scale, v_scale, out, partial=None, stats=None):
    """Queue it on a stream; shapes and dtypes as in attn_prefill's docstring."""
    check(q, qkv, k_pages, v_pages, pages, span, out, partial, stats)
    format = format_of("k_pages", k_pages, "bf16", "e4m3")
    format_of("v_pages", v_pages, format)
    format_of("q", q, kv_tile.MATRIX[format])
    made = build(q.shape[1] // k_pages.shape[2], format, format_of("qkv", qkv, "f32", "bf16", "f16"),
                 format_of("out", out, "bf16", "f16", "f32"), partial is not None)
    queue(stream, made, q, qkv, k_pages, v_pages, pages, span, k_scale, v_scale, out, partial, stats)


CASES = tuple(case for case in attn_prefill.CASES if "v" not in case)          # one format
