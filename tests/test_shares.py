"""shares: every tile of every sequence is in exactly one share, pieces are told apart, shares are equally long."""
import numpy as np
import pytest

from qwentin.kernels import machines, ptx, shares
from qwentin.kernels.build import CHIPS, kernel
from qwentin.kernels.ptx import u32, u64

LANES = 32


@kernel(threads=LANES)
def dealt(starts: u64, lengths: u64, tiles: u64, ends: u64, begins: u64, holders: u64, owners: u64, sequences: u32,
          keys: u32, count: u32):
    """tiles, ends of each sequence; begin of each share (block); holder and sequence of tile number `block`."""
    block, lane = ptx.block_x(), ptx.lane()
    mine, end = shares.tiles_of(starts, lengths, sequences, keys)
    total = ptx.shuffle_idx(end, 31)
    owner = shares.sequence_of(block, end)
    if block == 0:
        ptx.store_u32(tiles + lane * 4, mine)
        ptx.store_u32(ends + lane * 4, end)
    if lane == 0:
        if block <= count:
            ptx.store_u32(begins + block * 4, shares.begin_of(block, total, count))
        if block < total:
            ptx.store_u32(holders + block * 4, shares.holder_of(block, total, count))
            ptx.store_u32(owners + block * 4, owner)


@pytest.mark.parametrize("rows, lengths, blocks", [
    ((1,), (0,), 7), ((1,), (4000,), 40), ((0, 3, 0, 8, 1, 0), (9, 61, 5, 0, 700, 3), 4), ((1, 1), (63, 64), 5),
    ((1,) * 32, tuple(range(0, 64 * 32, 64)), 33), ((5, 2), (59, 62), 1)])
@pytest.mark.parametrize("chip", CHIPS)
def test_tiles_are_dealt_out(rows, lengths, blocks, chip):
    want = np.array([-(-(n + t) // 64) if t else 0 for n, t in zip(lengths, rows)])
    total = int(want.sum())
    count, grid = min(total, blocks), max(total, blocks) + 1
    tiles, ends, begins, holders, owners = (np.full(max(grid, LANES), 77, np.uint32) for _ in range(5))
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    machines.EmulatorStream(chip).launch(dealt, grid, starts, np.array(lengths, np.int32), tiles, ends, begins, holders,
                                         owners, len(rows), 64, count)
    assert tiles[:len(rows)].tolist() == want.tolist() and not tiles[len(rows):LANES].any()
    assert ends[:LANES].tolist() == np.cumsum(tiles[:LANES]).tolist()
    assert owners[:total].tolist() == np.repeat(np.arange(len(rows)), want).tolist()
    begins = begins[:count + 1].astype(int)
    assert begins[0] == 0 and begins[-1] == total and set(np.diff(begins)) <= {total // count, -(-total // count)}
    assert holders[:total].tolist() == np.repeat(np.arange(count), np.diff(begins)).tolist()
    pieces = list(dict.fromkeys(zip(holders[:total].tolist(), owners[:total].tolist())))
    numbers = [s + r for s, r in pieces]
    assert len(set(numbers)) == len(pieces) and max(numbers) < count + len(rows)
