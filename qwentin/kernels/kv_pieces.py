"""Pieces: keys and values of a tile out of the pages into a ring in shared memory, as wgmma reads them.

A piece is the keys or the values of 64 rows of one group, [64, 256] in 16 bits: bf16 as it is, e4m3 widened to f16 (exact)
on the way, since wgmma wants 16-bit operands where the contraction does not run along memory, as for values. It is four
columns of 64 dims, each 64 rows of 128 bytes; in row r the 16-byte chunk c of a column stands at place c ^ (r % 8), the
128-byte swizzle of wgmma's descriptors:

    column 0 (dims 0-63)    row 0   0 1 2 3 4 5 6 7     row 1   1 0 3 2 5 4 7 6   ...   row 63      then column 1 ...

A warpgroup fetches: it waits for `empty` of the ring's next place, brings keys 0, values 0, keys 1, ... and arrives at
`full`. bf16: by cp.async, the arrival two pieces late, when they are there. e4m3: loaded a piece ahead into registers, then
widened and stored. Who calls: attn_prefill_sm90a.py, whose cases prove it.
"""
from . import kv_tile, ptx
from .build import lineless_device
from .kv_tile import HEAD, PAGE
from .ptx import u32, u64
from .ring import arrive, wait
from .unroll import static_range

KEYS = 64                     # of a tile
COLUMN = KEYS * 128           # bytes of 64 dims of a piece
PIECE = 4 * COLUMN
DEPTH = 5                     # pieces in the ring; behind it DEPTH barriers of `full`, DEPTH of `empty`
LATE = 2                      # pieces of cp.async on their way


@lineless_device
def onward(slot, parity):
    """The next place of the ring."""
    after = u32(slot + 1)
    return ptx.select(after == DEPTH, u32(0), after), ptx.select(after == DEPTH, parity ^ 1, parity)


@lineless_device
def row_of(pages, tile):
    """The first row of a tile, numbered page * 128 + row."""
    return u32(ptx.load_u32(pages + tile * KEYS // PAGE * 4) * PAGE + tile * KEYS % PAGE)


@lineless_device
def fetch_bf16(ring, bars, k_pages, v_pages, pages, group, groups, tile, stop, there, thread):
    """The fetching warpgroup's walk from `tile` to `stop`, perhaps none. A warp brings rows warp, warp + 4, ..., a lane
    the chunk of its number."""
    lane, warp = ptx.lane(), u32(thread // 32)
    slot, parity, done = u32(0), u32(1), u32(0)
    at = u32(lane // 8 * COLUMN + warp * 128)
    even, odd = u32(at + (lane % 8 ^ warp) * 16), u32(at + (lane % 8 ^ warp + 4) * 16)
    row = row_of(pages, min(tile, u32(stop - 1)))
    begun = u32(0)
    while tile < stop:
        source = (u64(u32(row + warp)) * groups + group) * (HEAD * 2) + lane * 16
        left = u32(there - tile * KEYS)
        tile = u32(tile + 1)
        row = row_of(pages, min(tile, u32(stop - 1)))
        for half in static_range(2):
            wait(u32(bars + (DEPTH + slot) * 8), parity)
            base, to = (v_pages if half else k_pages) + source, u32(ring + slot * PIECE)
            for k in static_range(KEYS // 4):
                ptx.copy_16_zfill(u32(to + (odd if k % 2 else even) + k * 512), base + u64(groups * (k * 4 * HEAD * 2)),
                                  ptx.select(warp + k * 4 < left, u32(16), u32(0)))
            ptx.copy_commit()
            slot, parity = onward(slot, parity)
            begun = u32(begun + 1)
            if begun > LATE:
                ptx.copy_wait(LATE)
                ptx.fence_async()
                arrive(u32(bars + done * 8), lane)
                done = ptx.select(done + 1 == DEPTH, u32(0), u32(done + 1))
    ptx.copy_wait(0)
    ptx.fence_async()
    for n in static_range(LATE):
        if begun > 0:
            arrive(u32(bars + done * 8), lane)
            done = ptx.select(done + 1 == DEPTH, u32(0), u32(done + 1))


@lineless_device
def store_widened(to, x, live):
    """16 e4m3 as two chunks of f16, at `to` and with bit 4 of the address turned; zeros if not live."""
    a, b = kv_tile.widened(ptx.select(live, x[0], u32(0))), kv_tile.widened(ptx.select(live, x[1], u32(0)))
    c, d = kv_tile.widened(ptx.select(live, x[2], u32(0))), kv_tile.widened(ptx.select(live, x[3], u32(0)))
    ptx.store_shared_x4(to, (a[0], a[1], b[0], b[1]))
    ptx.store_shared_x4(u32(to ^ 16), (c[0], c[1], d[0], d[1]))


@lineless_device
def turned(to, x, live, source):
    """Store what was loaded, load what comes at its place in the next piece."""
    store_widened(to, x, live)
    return ptx.read_x4(source)


@lineless_device
def fetch_e4m3(ring, bars, k_pages, v_pages, pages, group, groups, tile, stop, there, thread):
    """The fetching warpgroup's walk. Eight lanes of a store fill two rows' chunks of one parity each: all banks. A lane
    loads 16 dims of every eighth row."""
    lane = ptx.lane()
    slot, parity = u32(0), u32(1)
    r, chunk = u32(thread // 32 * 2 + lane // 4 % 2), u32(lane // 8 * 4 + lane % 4)         # of 8 rows; of a row's 16
    at = u32(lane // 8 * COLUMN + r * 128 + (lane % 4 * 2 ^ r) * 16)
    stride, offset = u64(groups * (8 * HEAD)), u32(group * HEAD + chunk * 16)
    source = u64(u32(row_of(pages, min(tile, u32(stop - 1))) + r)) * (groups * HEAD) + offset
    x = tuple(ptx.read_x4(k_pages + source + k * stride) for k in static_range(KEYS // 8))
    row = row_of(pages, min(u32(tile + 1), u32(stop - 1)))
    while tile < stop:
        left = u32(there - tile * KEYS)
        for half in static_range(2):
            wait(u32(bars + (DEPTH + slot) * 8), parity)
            x = tuple(turned(u32(ring + slot * PIECE + at + k * 1024), x[k], r + k * 8 < left,
                             (k_pages if half else v_pages) + source + k * stride) for k in static_range(KEYS // 8))
            ptx.fence_async()
            arrive(u32(bars + slot * 8), lane)
            slot, parity = onward(slot, parity)
            if half == 0:
                tile, source = u32(tile + 1), u64(u32(row + r)) * (groups * HEAD) + offset
                row = row_of(pages, min(u32(tile + 1), u32(stop - 1)))
