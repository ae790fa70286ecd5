"""Who reads which keys: the tiles of all sequences of a step, dealt out evenly to shares.

    sequence          0                1      2                      3 (no rows in this step: no tiles)
    tiles     | . . . . . . . | . . | . . . . . . . . |
    share     |    0    |    1    |    2    |    3      |

A tile is `keys` rows of one page; a sequence with rows has ceil((length + rows) / keys) of them. With n tiles in all
there are `shares` = min(n, what the launch has blocks for), and share s has tiles [s n / shares, (s + 1) n / shares), at
least one. Lengths are device data; any lengths keep every share equally busy. What a share reads of one sequence is a piece.
Walking along, the next piece is in the next share or of the next sequence, or both, so pieces are told apart by s + r: fewer
than shares + sequences.

These functions are for a whole warp; lane r speaks for sequence r, so a step holds at most 32.
"""
from . import ptx
from .build import device
from .ptx import u32
from .unroll import static_range

MAX_SEQUENCES = 32


@device
def tiles_of(starts, lengths, sequences, keys):
    """(tiles of the lane's sequence, the end of them among all)."""
    lane, tiles = ptx.lane(), u32(0)
    if lane < sequences:
        rows = u32(ptx.load_u32(starts + lane * 4 + 4) - ptx.load_u32(starts + lane * 4))
        if rows > 0:
            tiles = u32((ptx.load_u32(lengths + lane * 4) + rows + keys - 1) // keys)
    end = tiles
    for step in static_range(5):
        below = ptx.shuffle_up(end, 1 << step)
        end = u32(end + ptx.select(lane >= 1 << step, below, u32(0)))
    return tiles, end


@device
def begin_of(share, tiles, shares):
    """The first tile of a share of `tiles` in all."""
    return u32(u32(share * tiles) // shares)


@device
def holder_of(tile, tiles, shares):
    """The share that holds a tile."""
    return u32(u32(u32(tile + 1) * shares - 1) // tiles)


@device
def sequence_of(place, end):
    """The sequence whose tiles (or rows) hold a place, every lane having said where its own end."""
    return ptx.count_ones(ptx.ballot(ptx.select(end <= place, u32(1), u32(0))))
