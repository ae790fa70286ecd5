"""One warp's share of a delta-rule state, 16 of the 128 columns of S f32 [128, 128], in registers; what is done to it.

    lane = 4 down + over holds S[4 down + 32 i + j, 4 over .. 4 over + 3] for i, j = 0..3, as element [4 i + j][column]:

               over  0    1    2    3
      rows 0..3      0    1    2    3       + 32, + 64, + 96
      rows 4..7      4    5    6    7       a row of a share is 64 bytes, a lane's part of it one 16-byte access
        ...
      rows 28..31   28   29   30   31

A product S^T x takes 16 fma down each column of a lane, then three shuffles down the lanes. Columns never meet, so a
warp needs nobody. Used by delta_verify; all 32 lanes must take part.
"""
from . import ptx
from .activation import power
from .build import device
from .ptx import u32
from .unroll import static_range

HEAD = 128                # dk = dv
COLUMNS = 16


@device
def offset(lane):
    """Where a lane's first element lies in a state, from the share's first column, in bytes."""
    return lane // 4 * (4 * HEAD * 4) + lane % 4 * 16


@device
def load_state(p):
    """The share; p is where the lane's first element lies."""
    return tuple(ptx.read_f32x4(p + (n // 4 * 32 + n % 4) * (HEAD * 4)) for n in static_range(16))


@device
def store_state(p, S):
    """Back to where it came from."""
    for n in static_range(16):
        ptx.store_f32x4(p + (n // 4 * 32 + n % 4) * (HEAD * 4), S[n])


@device
def vector(p):
    """Of a vector of 128 at p, the lane's 16 elements: those of its rows of S."""
    p += ptx.lane() // 4 * 16
    return ptx.read_f32x4(p) + ptx.read_f32x4(p + 128) + ptx.read_f32x4(p + 256) + ptx.read_f32x4(p + 384)


@device
def shared_vector(p):
    """The same from shared memory."""
    p = u32(p + ptx.lane() // 4 * 16)
    return (ptx.shared_f32x4(p) + ptx.shared_f32x4(u32(p + 128)) + ptx.shared_f32x4(u32(p + 256))
            + ptx.shared_f32x4(u32(p + 384)))


@device
def plus(x, row, total):
    """total + x row, four columns."""
    return tuple(ptx.fma(row[c], x, total[c]) for c in static_range(4))


@device
def product(S, x):
    """The lane's part of S^T x: four columns."""
    total = (0.0,) * 4
    for n in static_range(16):
        total = plus(x[n], S[n], total)
    return total


@device
def summed(x):
    """Four numbers added up over the eight lanes down; all of them get the sums."""
    for step in static_range(3):
        x = tuple(x[c] + ptx.shuffle_xor_f32(x[c], 4 << step) for c in static_range(4))
    return x


@device
def kept(x, y, bit):
    """x or y, whichever the lane keeps when pairs `bit` apart split their work, with the partner's part of it added."""
    upper = ptx.lane() & bit
    return ptx.select(upper != 0, y, x) + ptx.shuffle_xor_f32(ptx.select(upper != 0, x, y), bit)


@device
def scattered(x):
    """Eight numbers added up over the eight lanes down; lane `down` gets the sum of its number: 7 shuffles, not 24."""
    x = tuple(kept(x[c], x[c + 4], 16) for c in static_range(4))
    x = tuple(kept(x[c], x[c + 2], 8) for c in static_range(2))
    return kept(x[0], x[1], 4)


@device
def stepped(row, decay, k, d):
    """decay row + k d, four columns."""
    return tuple(ptx.fma(k, d[c], decay * row[c]) for c in static_range(4))


@device
def replayed(S, k, v, beta, g):
    """The state after one row: S <- e^g S, d = beta (v - S^T k), S <- S + k d^T. k: 16 elements, v: four columns."""
    decay, p = power(g), summed(product(S, k))
    d = tuple(beta * (v[c] - decay * p[c]) for c in static_range(4))
    return tuple(stepped(S[n], decay, k[n], d) for n in static_range(16))


@device
def seen_by(S, q, k, v, beta, g):
    """Four columns of the output of one row, whose own state nobody needs: o = e^g S^T q + (q . k) d."""
    decay, p, r = power(g), summed(product(S, k)), summed(product(S, q))
    same = 0.0
    for n in static_range(16):
        same = ptx.fma(q[n], k[n], same)
    for step in static_range(3):
        same += ptx.shuffle_xor_f32(same, 4 << step)
    return tuple(ptx.fma(same, beta * (v[c] - decay * p[c]), decay * r[c]) for c in static_range(4))
