"""A tree of up to `room` rows after one delta-rule state, none of them stored: the phases of delta_verify's wide shape.

    o_i = e^(y_i) S^T q_i + sum over j of B_ij d_j                 y_i: g summed over row i and its ancestors
    d_i = beta_i (v_i - e^(y_i) S^T k_i) - sum over j of A_ij d_j
    B_ij = e^(y_i - y_j) q_i . k_j  if j is i or an ancestor of i, else 0
    A_ij = beta_i e^(y_i - y_j) k_i . k_j  if j is an ancestor, else 0 (its diagonal is never used)

A block of two warps shares k, q, A and B; each has 16 columns of S (delta_state.py) and of everything with a d in it.

    byte 0                  k f32 [room, 128 + 4]
    room * STRIDE           q f32 [room, 128 + 4]
    2 * room * STRIDE       A f32 [room j, room i'], B alike       i' = i // 2 + i % 2 * room / 2: even rows, odd rows
    ... + 8 * room^2        S^T k_i and S^T q_i, f32 [WARPS, room i, 2, 16 columns]
"""
import functools

from . import ptx
from .activation import power
from .build import device
from .delta_state import HEAD, product, scattered, shared_vector
from .plan import NONE
from .ptx import u32
from .unroll import static_range

WARPS = 2
STRIDE = HEAD * 4 + 16    # bytes: rows r .. r + 7, read together, lie in different banks


def shared_bytes(room):
    """Shared memory of a block. 32 rows: 50,176 bytes, so that two blocks fit the 100 KiB of an sm_120 SM."""
    return 2 * room * STRIDE + 8 * room * room + WARPS * room * 128


@device
def quad(a, b, total):
    """total + a . b, four elements."""
    return ptx.fma(a[3], b[3], ptx.fma(a[2], b[2], ptx.fma(a[1], b[1], ptx.fma(a[0], b[0], total))))


@functools.cache
def phases(room):
    """(stage, ancestry, couple, project, solve), as they are called, for up to `room` rows, a multiple of 8."""
    groups, half, doublings = room // 8, room // 2, room.bit_length() - 1
    q_at, a_at, b_after, p_at = room * STRIDE, 2 * room * STRIDE, 4 * room * room, 2 * room * STRIDE + 8 * room * room

    @device
    def stage(shared, k, q, stride, rows):
        """Start copying k and q of the rows, `stride` bytes apart; rows that are not there are zero."""
        lane = ptx.lane()
        for row in range(ptx.thread_x() // 32, room, WARPS):
            source, size = min(row, rows - 1) * stride + lane * 16, ptx.select(row < rows, u32(16), u32(0))
            to = u32(shared + row * STRIDE + lane * 16)
            ptx.copy_16_zfill(to, k + source, size)
            ptx.copy_16_zfill(u32(to + q_at), q + source, size)
        ptx.copy_commit()

    @device
    def ancestry(parent, g):
        """Of row `lane`: a bit for itself and each ancestor, and y. Every turn doubles how far a row looks back."""
        mask, y, up = u32(1 << ptx.lane()), g, parent
        for _ in static_range(doublings):
            at = min(up, 31)
            older, longer, further = ptx.shuffle_idx(mask, at), ptx.shuffle_idx_f32(y, at), ptx.shuffle_idx(up, at)
            mask = ptx.select(up == NONE, mask, u32(mask | older))
            y, up = ptx.select(up == NONE, y, y + longer), ptx.select(up == NONE, up, further)
        return mask, y

    @device
    def couple(shared, mask, y, beta):
        """A and B. A thread takes rows i = down + 8 r and j = across + 8 c, in the 8 x 8 squares with c <= r."""
        down, across = ptx.thread_x() % 8, ptx.thread_x() // 8
        kk, qk = (0.0,) * (groups * groups), (0.0,) * (groups * groups)
        for x in range(0, HEAD * 4, 16):
            ki = tuple(ptx.shared_f32x4(u32(shared + (down + 8 * r) * STRIDE + x)) for r in static_range(groups))
            qi = tuple(ptx.shared_f32x4(u32(shared + q_at + (down + 8 * r) * STRIDE + x)) for r in static_range(groups))
            kj = tuple(ptx.shared_f32x4(u32(shared + (across + 8 * c) * STRIDE + x)) for c in static_range(groups))
            kk = tuple(quad(ki[n // groups], kj[n % groups], kk[n]) if n % groups <= n // groups else kk[n]
                       for n in static_range(groups * groups))
            qk = tuple(quad(qi[n // groups], kj[n % groups], qk[n]) if n % groups <= n // groups else qk[n]
                       for n in static_range(groups * groups))
        for r in static_range(groups):
            i = u32(down + 8 * r)
            line, yi, bi = ptx.shuffle_idx(mask, i), ptx.shuffle_idx_f32(y, i), ptx.shuffle_idx_f32(beta, i)
            for c in static_range(r + 1):
                j = u32(across + 8 * c)
                weight = power(yi - ptx.shuffle_idx_f32(y, j))
                weight = ptx.select((line >> j & 1) != 0, weight, 0.0)          # not a product: it may be infinite
                to = u32(shared + a_at + (j * room + i // 2 + i % 2 * half) * 4)
                ptx.store_shared_f32(to, bi * weight * kk[r * groups + c])
                ptx.store_shared_f32(u32(to + b_after), weight * qk[r * groups + c])

    @device
    def project(shared, S, warp, rows):
        """S^T k and S^T q of all rows in the warp's columns."""
        lane = ptx.lane()
        to = u32(shared + p_at + warp * (room * 128) + lane // 16 * 64 + lane % 4 * 16 + lane // 4 % 4 * 4)
        for i in range(rows):
            row = u32(shared + i * STRIDE)
            both = product(S, shared_vector(row)) + product(S, shared_vector(u32(row + q_at)))
            ptx.store_shared_f32(u32(to + i * 128), scattered(both))
        ptx.warp_barrier()

    @device
    def begun(p, i, y, beta, v):
        """(d, o) of row i as far as S alone gives them; p: its S^T k, 64 bytes before its S^T q."""
        decay = power(ptx.shuffle_idx_f32(y, i))
        d = ptx.shuffle_idx_f32(beta, i) * (v - decay * ptx.shared_f32(p))
        return d, decay * ptx.shared_f32(u32(p + 64))

    @device
    def told(p, dj, d, o):
        """(d, o) of four rows once they know of row j; its A for them is at p, its B behind."""
        A, B = ptx.shared_f32x4(p), ptx.shared_f32x4(u32(p + b_after))
        return (tuple(ptx.fma(A[n], -dj, d[n]) for n in static_range(4)),
                tuple(ptx.fma(B[n], dj, o[n]) for n in static_range(4)))

    @device
    def solve(shared, warp, rows, y, beta, v):
        """x[r][1][n] = o of row 8 r + 2 n + lane / 16 in column lane % 16; v: those rows', in that order.

        Row after row: its d is complete when its turn comes, and all rows behind it get their share of it at once.
        """
        column, odd = ptx.lane() % 16, ptx.lane() // 16
        p = u32(shared + p_at + warp * (room * 128) + column * 4)
        x = tuple(begun(u32(p + min(u32(2 * i + odd), rows - 1) * 128), u32(2 * i + odd), y, beta, v[i])
                  for i in static_range(half))
        x = tuple(tuple(tuple(x[4 * r + n][e] for n in static_range(4)) for e in static_range(2))
                  for r in static_range(groups))
        p = u32(shared + a_at + odd * (half * 4))
        for c in static_range(groups):
            if 8 * c < rows:
                for j in static_range(8):
                    dj = ptx.shuffle_idx_f32(x[c][0][j // 2], u32(column + j % 2 * 16))
                    to = u32(p + (8 * c + j) * room * 4)
                    x = tuple(told(u32(to + 16 * r), dj, x[r][0], x[r][1]) if r >= c else x[r]
                              for r in static_range(groups))
        return x
    return stage, ancestry, couple, project, solve
