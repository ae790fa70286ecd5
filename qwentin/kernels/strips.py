"""The walk over a packed matrix that gemv and gemv_sm120a share: who takes which pieces, how they arrive, how sums meet.

A matrix is a row of pieces in memory (packed.py): 128 outputs by 128 inputs, strip after strip. The blocks, one for each
multiprocessor, cut that row into equal spans, so every block streams one run of memory from front to back:

    strip 0                strip 1                strip 2
    |p p p p p p p p p p p|p p p p p p p p p p p p|p p p ...         p: 8 tiles of 16 rows, 12.5 KB of fp6
    |--- block 0 ---|--- block 1 ---|--- block 2 ---|

In a block one warp fetches and eight multiply. A stage of the ring in shared memory holds two pieces that follow each
other along K, and the activations of the same inputs; warps 0..3 take the first piece, 4..7 the second, two tiles each.
A stage may hold four: then a group of warps takes every other, and goes round its loop half as often.

    fetching warp      wait for `empty`, copy weights (one bulk copy) and x (cp.async), which report to `full`
    multiplying warp   wait for `full`, multiply, arrive at `empty`

A strip of a gated product (packed.interleave) holds 64 outputs: a warp's first tile is 16 rows of the gate, its second
the rows of the other matrix that go with them, and what it writes is silu(gate) * other.

A product may take a row's factor from the squares that the one before left, and leave such itself (folded_norm.py).

At the end of a strip the two groups of warps add their sums in shared memory. A strip that several blocks share belongs
to the first of them, which comes to it last: the others leave their float32 sums in `work`, and it adds them in order. So
nothing depends on who was faster, nor on how many rows go together. A sum is its own message: `work` is full of EMPTY
between launches, a NaN no sum has, and the owner polls until a word is something else, then puts EMPTY back. All blocks
must therefore be resident together: launch no more than the device holds.

The first weights are asked for before the wait for the previous kernel, so a launch that is `dependent` fills its ring
while its predecessor ends. Without bulk copies (before sm_90) the fetching warp copies weights by cp.async, and waits.
"""
import dataclasses
import functools

import numpy as np
from numba import cuda
from numba.cuda import types

from . import folded_norm, packed, ptx
from .activation import silu
from .build import kernel, lineless_device
from .ptx import f32, u32, u64
from .ring import poll, wait
from .unroll import static_range

TILES = 2                             # row tiles of a warp: a fragment of x is loaded once for both
PARTS = packed.TILES // TILES         # warps that share a piece
K_GROUPS = 2                          # groups of warps, each with every other piece of a stage
CONSUMERS = PARTS * K_GROUPS
THREADS = 32 * (CONSUMERS + 1)
# Stages, if they fit: at least three (75 KB of fp6 on their way keep an H200's memory busy), and so many that a block takes
# more than half of the shared memory. Then a launch that starts early finds no room beside its predecessor and puts one
# block on each multiprocessor; where two fit it puts two on some: 8.9 ms a step of fp6, not 6.5.
DEPTH = 3
MOST_STAGES = 8                       # what room for barriers is reckoned with
SHARED = 99 << 10                     # bytes a block may have on every device since sm_86; an H200 has 227 KB
EMPTY = 0xFFFFFFFF
WRITTEN, READ = 1, 2                  # named barriers around the sums in shared memory
MAX_ROWS = 32


def groups_of(rows):
    """Groups of 8 activation rows that the kernel is built for: 1, 2 or 4."""
    return 1 if rows <= 8 else 2 if rows <= 16 else 4


def workspace(rows, blocks):
    """The `work` array for a launch of so many blocks, as it must be before the first one."""
    return np.full(blocks * PARTS * TILES * groups_of(rows) * 128, EMPTY, np.uint32)


def queue(stream, made, w, x, x_scales, alpha, out, work, rows, n, k, blocks, dependent, squares=0, eps=0.0, weight=0,
          scaled=0):
    """Queue a kernel of `build` on a stream; no more blocks than there are pieces. Nothing for no rows."""
    if rows:
        pieces = w.shape[0] * w.shape[1]
        stream.launch(made, min(blocks, pieces), w, x, x_scales, alpha, out, work, rows, n, out.shape[1], k // packed.DEPTH,
                      pieces, squares, weight, scaled, eps, dependent=dependent)


@lineless_device
def added(a, b):
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


@lineless_device
def words_of(x):
    return ptx.bits_f32(x[0]), ptx.bits_f32(x[1]), ptx.bits_f32(x[2]), ptx.bits_f32(x[3])


@lineless_device
def floats_of(v):
    return ptx.f32_bits(v[0]), ptx.f32_bits(v[1]), ptx.f32_bits(v[2]), ptx.f32_bits(v[3])


@functools.cache
def gathering(sums):
    """Device function (acc, work, q, last, part, lane): acc and the sums that blocks q, q + K_GROUPS, ... `last` leave."""
    @lineless_device
    def read(at):
        return tuple(ptx.read_x4_relaxed(at + e * 512) for e in static_range(sums))

    @lineless_device
    def missing(given):
        """Whether one of the sums was not there yet."""
        found = False
        for e in static_range(sums):
            found = found | (given[e][0] == EMPTY) | (given[e][1] == EMPTY) | (given[e][2] == EMPTY) | (given[e][3] == EMPTY)
        return found

    @lineless_device
    def gathered(acc, work, q, last, part, lane):
        while q <= last:                                         # two at a time: both are under way at once
            two = q + K_GROUPS <= last
            one = work + (u64(q) * PARTS + part) * (sums * 512) + lane * 16
            other = one + ptx.select(two, u64(K_GROUPS * PARTS * sums * 512), u64(0))
            given, more = read(one), read(other)
            while missing(given) | missing(more):
                given, more = read(one), read(other)
            acc = tuple(added(acc[e], floats_of(given[e])) for e in static_range(sums))
            if two:
                acc = tuple(added(acc[e], floats_of(more[e])) for e in static_range(sums))
            for e in static_range(sums):
                ptx.store_x4_relaxed(one + e * 512, (u32(EMPTY), u32(EMPTY), u32(EMPTY), u32(EMPTY)))
                ptx.store_x4_relaxed(other + e * 512, (u32(EMPTY), u32(EMPTY), u32(EMPTY), u32(EMPTY)))
            q = u32(q + 2 * K_GROUPS)
        return acc
    return gathered


@lineless_device
def pieces_of_stage(at, k, end, deep, held):
    """How many pieces the stage that begins with piece `at`, number k of its strip, holds: `held` at most."""
    return min(min(u32(end - at), u32(deep - k)), u32(held))


def held_by(packing):
    """Pieces of a stage. Four-bit codes take longer to multiply than to arrive: every instruction of the loop counts."""
    return K_GROUPS * (2 if packing.codes.bits == 4 else 1)


def depth_for(packing, row_groups, x_tile, shared):
    """Stages of the ring, of a block that may have so many bytes of shared memory."""
    stage = held_by(packing) * (packed.TILES * packing.tile_bytes + x_tile)
    rest = (K_GROUPS - 1) * PARTS * TILES * row_groups * 512 + 16 * MOST_STAGES + folded_norm.SHARED
    if stage + rest > shared:
        raise ValueError(f"a stage of {packing.name} takes {stage + rest} bytes of shared memory, there are {shared}")
    return min((shared - rest) // stage, max(DEPTH, -(-(shared // 2 - rest) // stage)))


@functools.cache
def store_pair(out_format):
    """Device function (out, element number, a, b): two neighbouring outputs."""
    if out_format == "f32":
        @lineless_device
        def store(out, i, a, b):
            ptx.store_f32x2(out + i * 4, (a, b))
    elif out_format == "f16":
        @lineless_device
        def store(out, i, a, b):
            ptx.store_u32(out + i * 2, ptx.f16x2(a, b))
    else:
        @lineless_device
        def store(out, i, a, b):
            ptx.store_u32(out + i * 2, ptx.bf16x2(a, b))
    return store


@functools.cache
def build(name, packing, row_groups, x_tile, fetch_x, product, unit, out_format, bulk, depth, gated=False,
          normed=0, residual=False):
    """The kernel.

    x_tile   bytes of the activations of 128 inputs in a stage
    fetch_x  device function (to, x, x_scales, lane, rows, deep, k): a warp copies those of inputs 128 k .. into `to`
    product  device functions. start(tile, x, lane) -> four addresses from which a lane reads, two of the tile and two of x;
             multiply(addresses, tile, x, sums), tile and x further from there -> sums + the products of two tiles;
             TILES * row_groups sums of 4
    unit     a power of two that the sums are multiplied by in the end
    bulk     bulk copies and dependent launches (sm_90 and up)
    depth    stages of the ring
    gated    write silu(first tile) * second tile of each warp, half as many outputs as rows
    normed   strips of the rows whose `squares` make a factor for each row's sums; 0: no factor
    residual add to `out`, f32, and write `scaled` and `squares`; whole strips
    """
    tile_bytes, sums = packing.tile_bytes, TILES * row_groups
    piece_bytes, held, (start, product) = packed.TILES * tile_bytes, held_by(packing), product
    x_at = held * piece_bytes
    stage = x_at + held * x_tile
    round_again = (1 << 32) - (depth - 1) * stage                # from the last stage to the first
    sums_at = depth * stage
    bars_at = sums_at + (K_GROUPS - 1) * PARTS * sums * 512
    arrivals = 33 if bulk else 32     # of a full stage: every lane's cp.async, and the bulk copy's announcement
    factors_at = bars_at + 16 * depth
    store, micro = store_pair(out_format), packing.block == 16
    row_factors, (read_stream, write_stream) = folded_norm.factors(row_groups, normed), folded_norm.stream(row_groups, TILES)
    wait_for, gathered = wait if bulk else poll, gathering(sums)

    @lineless_device
    def fetch_weights(to, source, pieces, bar, lane):
        if bulk:
            if lane == 0:
                ptx.mbarrier_arrive_expect(bar, u32(pieces * piece_bytes))
                ptx.bulk_load(to, source, u32(pieces * piece_bytes), bar)
        else:
            for i in range(lane, u32(pieces * (piece_bytes // 16)), 32):
                ptx.copy_16(u32(to + i * 16), source + u64(i) * 16)

    @lineless_device
    def fetch(ring, bars, w, x, x_scales, lane, rows, deep, begin, end):
        """The fetching warp."""
        at, k = begin, u32(begin % deep)
        early = begin                                            # the first piece that was not fetched early
        if bulk:
            early_k = k
            for s in static_range(depth):
                if early < end:
                    pieces = pieces_of_stage(early, early_k, end, deep, held)
                    fetch_weights(u32(ring + s * stage), w + u64(early) * piece_bytes, pieces, u32(bars + s * 8), lane)
                    early, early_k = u32(early + pieces), u32(early_k + pieces)
                    early_k = u32(0) if early_k == deep else early_k
            ptx.launch_dependents()
            ptx.wait_dependencies()
        slot, parity = u32(0), u32(1)
        while at < end:
            pieces, full, to = pieces_of_stage(at, k, end, deep, held), u32(bars + slot * 8), u32(ring + slot * stage)
            wait_for(u32(full + depth * 8), parity)
            if at >= early:
                fetch_weights(to, w + u64(at) * piece_bytes, pieces, full, lane)
            for i in static_range(held):
                if i < pieces:
                    fetch_x(u32(to + (x_at + i * x_tile)), x, x_scales, lane, rows, deep, u32(k + i))
            ptx.copy_arrive(full)
            at, k = u32(at + pieces), u32(k + pieces)
            k = u32(0) if k == deep else k
            slot = u32(slot + 1)
            if slot == depth:
                slot, parity = u32(0), u32(parity ^ 1)
        ptx.copy_wait_all()

    @lineless_device
    def together(acc, area, part, group, lane, first, last):
        """Group 0: the sums of all groups. `first`, `last`: whether this is the block's first or last strip."""
        mine = u32(area + part * (sums * 512) + lane * 16)
        if group > 0:
            if not first:
                ptx.barrier_named(READ, 32 * CONSUMERS)
            for e in static_range(sums):
                ptx.store_shared_f32x4(u32(mine + (group - 1) * (PARTS * sums * 512) + e * 512), acc[e])
            ptx.arrive_named(WRITTEN, 32 * CONSUMERS)
        else:
            ptx.barrier_named(WRITTEN, 32 * CONSUMERS)
            for g in static_range(K_GROUPS - 1):
                acc = tuple(added(acc[e], ptx.shared_f32x4(u32(mine + (g * PARTS * sums * 512 + e * 512))))
                            for e in static_range(sums))
            if not last:
                ptx.arrive_named(READ, 32 * CONSUMERS)
        return acc

    @lineless_device
    def row_factor(factors, row):
        return ptx.shared_f32(u32(factors + row * 4)) if normed > 0 else f32(1.0)

    @lineless_device
    def write(acc, factors, out, alpha, tile, lane, rows, n, width):
        """Two tiles of outputs; lane 4g + t has rows 2g, 2g + 1 of a tile and activation rows 8j + 2t, 8j + 2t + 1."""
        for r in static_range(TILES):
            if (tile + r) * 16 < n:
                factor = f32(unit)
                if micro:
                    factor = factor * ptx.load_f32(alpha + u64(tile + r) * 4)
                for e in static_range(2 * row_groups):
                    row, four = u32((lane & 3) * 2 + (e // 2 * 8 + e % 2)), acc[r * row_groups + e // 2]
                    if row < rows:
                        whole = factor * row_factor(factors, row)
                        store(out, u64(row) * width + ((tile + r) * 16 + (lane >> 2) * 2),
                              four[e % 2] * whole, four[e % 2 + 2] * whole)

    @lineless_device
    def write_gated(acc, factors, out, alpha, tile, lane, rows, n, width):
        """The same of a gated product: the two tiles give 16 outputs."""
        if tile * 16 < n:
            gate_unit, other_unit = f32(unit), f32(unit)
            if micro:
                gate_unit = gate_unit * ptx.load_f32(alpha + u64(tile) * 4)
                other_unit = other_unit * ptx.load_f32(alpha + u64(tile + 1) * 4)
            for e in static_range(2 * row_groups):
                row, gates, others = u32((lane & 3) * 2 + (e // 2 * 8 + e % 2)), acc[e // 2], acc[row_groups + e // 2]
                if row < rows:
                    gate_whole, other_whole = gate_unit * row_factor(factors, row), other_unit * row_factor(factors, row)
                    store(out, u64(row) * width + (tile * 8 + (lane >> 2) * 2),
                          silu(gates[e % 2] * gate_whole) * (others[e % 2] * other_whole),
                          silu(gates[e % 2 + 2] * gate_whole) * (others[e % 2 + 2] * other_whole))

    @lineless_device
    def added_to(old, acc, alpha, tile):
        """The stream and a warp's sums, in the order of folded_norm.stream."""
        factors = tuple(unit * ptx.load_f32(alpha + u64(tile + r) * 4) if micro else f32(unit) for r in static_range(TILES))
        return tuple((old[i][0] + acc[i // 2][i % 2] * factors[i // (2 * row_groups)],
                      old[i][1] + acc[i // 2][i % 2 + 2] * factors[i // (2 * row_groups)]) for i in static_range(2 * sums))

    @lineless_device
    def finish(acc, area, factors, alpha, out, work, lane, group, part, rows, n, width, deep, pieces, begin,
               end, strip, squares, weight, scaled):
        """The block's part of a strip is summed up: pass it on, or add the others' and write."""
        block, blocks, start = ptx.block_x(), ptx.blocks_x(), u32(strip * deep)
        owner, last_strip = begin <= start, end <= start + deep
        tile = u32(strip * packed.TILES + part * TILES)
        if residual:
            old, gain = read_stream(out, weight, tile, lane, rows, width, owner and group == 0)
        if owner and end < start + deep:
            last = u32(u32(u32((start + deep) * blocks) - 1) // pieces)
            acc = gathered(acc, work, u32(block + 1 + group), last, part, lane)
        acc = together(acc, area, part, group, lane, strip == begin // deep, last_strip)
        if group == 0:
            if owner:
                if gated:
                    write_gated(acc, factors, out, alpha, tile, lane, rows, n, width)
                elif residual:
                    write_stream(added_to(old, acc, alpha, tile), gain, out, scaled, squares, strip, part, tile, lane, rows,
                                 width)
                else:
                    write(acc, factors, out, alpha, tile, lane, rows, n, width)
            else:
                mine = work + (u64(block) * PARTS + part) * (sums * 512) + lane * 16
                for e in static_range(sums):
                    ptx.store_x4_relaxed(mine + e * 512, words_of(acc[e]))

    @lineless_device
    def multiply(ring, bars, alpha, out, work, lane, warp, rows, n, width, deep, pieces, begin, end, squares, weight,
                 scaled, eps):
        """A multiplying warp."""
        group, part, factors = u32(warp // PARTS), u32(warp % PARTS), u32(ring + factors_at)
        if bulk and (normed > 0 or residual):
            ptx.wait_dependencies()
        if normed > 0:
            if group == K_GROUPS - 1 and part < row_groups:
                row_factors(factors, squares, part, lane, eps)
        here = start(u32(ring + (group * packed.TILES + part * TILES) * tile_bytes), u32(ring + x_at + group * x_tile), lane)
        at, strip, bar, parity = begin, u32(begin // deep), bars, u32(0)
        k = u32(begin - strip * deep)
        while at < end:
            left = min(u32(end - at), u32(deep - k))             # pieces of this strip
            at, k, acc = u32(at + left), u32(0), ((0.0, 0.0, 0.0, 0.0),) * sums
            while left != 0:
                wait_for(bar, parity)
                for i in static_range(held // K_GROUPS):
                    if group + i * K_GROUPS < left:
                        acc = product(here, u32(i * K_GROUPS * piece_bytes), u32(i * K_GROUPS * x_tile), acc)
                ptx.warp_barrier()
                if lane == 0:
                    ptx.mbarrier_arrive(u32(bar + depth * 8))
                last = bar == u32(bars + (depth - 1) * 8)
                step = ptx.select(last, u32(round_again), u32(stage))        # added up: the compiler would make it anew
                here = (u32(here[0] + step), u32(here[1] + step), u32(here[2] + step), u32(here[3] + step))
                bar, parity = ptx.select(last, bars, u32(bar + 8)), u32(parity ^ u32(last))
                left = u32(left - min(left, u32(held)))
            finish(acc, u32(ring + sums_at), factors, alpha, out, work, lane, group, part, rows, n, width, deep, pieces,
                   begin, end, strip, squares, weight, scaled)
            strip = u32(strip + 1)

    @kernel(threads=THREADS, shared=factors_at + folded_norm.SHARED)
    def walk(w: u64, x: u64, x_scales: u64, alpha: u64, out: u64, work: u64, rows: u32, n: u32, width: u32,
             deep: u32, pieces: u32, squares: u64, weight: u64, scaled: u64, eps: f32):
        lane, warp, block, blocks = ptx.lane(), u32(ptx.thread_x() // 32), ptx.block_x(), ptx.blocks_x()
        ring = ptx.shared_address(cuda.shared.array(0, types.uint8))
        bars = u32(ring + bars_at)                               # depth of full, depth of empty
        begin = u32(u32(block * pieces) // blocks)
        end = u32(u32(u32(block + 1) * pieces) // blocks)
        if ptx.thread_x() == 0:
            for s in static_range(depth):
                ptx.mbarrier_init(u32(bars + s * 8), arrivals)
                ptx.mbarrier_init(u32(bars + (depth + s) * 8), CONSUMERS)
            ptx.fence_block()
        ptx.barrier()
        if warp == CONSUMERS:
            fetch(ring, bars, w, x, x_scales, lane, rows, deep, begin, end)
        else:
            multiply(ring, bars, alpha, out, work, lane, warp, rows, n, width, deep, pieces, begin, end, squares, weight,
                     scaled, eps)
    return dataclasses.replace(walk, name=name)
