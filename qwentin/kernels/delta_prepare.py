"""delta_prepare: of each chunk of 64 rows, what the gated delta rule needs before it knows the state.

    y_i        = g of the chunk's rows, summed up to row i
    A_ij       = beta_i e^(y_i - y_j) k_i . k_j  for j < i, else 0
    inverse    = (I + A)^-1 diag(beta)            so that  delta = inverse (V - diag(e^y) K S)
    within_ij  = e^(y_i - y_j) q_i . k_j  for j <= i, else 0
    decays     = e^(y_i), e^(y_63 - y_i)

    span       i32 [>= 2]                         device data: slot (not read here), rows; 0 to T
    q, k       f16 [T, Nk, 128]                   conv_wide's; value head n uses key head n // (Nv / Nk)
    beta, g    f32 [T, Nv]
    inverse    f16 [N, Nv, 12, 32, 8]             N = T / 64, rounded up. Chunks without rows are left alone; rows that a
    within     f16 [N, Nv, 12, 32, 8]             chunk lacks count as k = q = 0, beta = g = 0
    decays     f32 [N, Nv, 2, 64]

Both matrices lie as the tensor cores of delta_chunk take them from the right, 16 bytes a lane: fragments of m16n8k16
(ptx_matrix.py) for row i as the column and j as k. Piece p holds 8 rows and 32 columns; none lies above the diagonal:

    rows  0 .. 31: p = i / 8                     columns 0 .. 31
    rows 32 .. 63: p = 4 + (i / 8 - 4) * 2 + h   columns 32 h .. 32 h + 31

    lane 4 (i % 8) + t has columns 2t + 0, 1, 8, 9, 16, 17, 24, 25 of the piece's

A block takes a chunk and a key head, two warps each of its value heads. Products with half-precision k and q are summed in
float32; A and its inverse X are float32: 16 x 16 triangles by forward substitution, a column a lane, then the squares below
them, of 16 and of 32, as -X22 A21 X11 on the tensor cores, each operand the sum of two halves. Nothing is squared: with the
same key in every row A's powers grow to 10^18.

27B, 4096 rows: 34 MB in and 38 MB out, 16 us of an H200's memory; it takes 41, of instructions and what waits for what.
"""
import functools

import numpy as np
from numba import cuda
from numba.cuda import types

from . import ptx
from .activation import power
from .build import device, kernel
from .delta_state import HEAD
from .octet import format_of
from .parity import Output
from .ptx import f32, u32, u64
from .unroll import static_range

CHUNK = 64
PIECES = 12                                           # of 8 rows and 32 columns, on or below the diagonal
HALF = CHUNK // 2
ROW = HEAD * 2                                        # bytes of a row of k or q
PITCH = (CHUNK + 8) * 4                               # bytes of a row of A: a fragment's rows lie in different banks
TRIANGLE = CHUNK * PITCH
REGISTERS = 168                                       # six warps: two blocks a multiprocessor
SASS = {chip: ("LDGSTS", "LDSM.16", "HMMA.16816", "FFMA", "MUFU.EX2") for chip in ("sm_90a", "sm_120a")}
# u = 2^-24; in CASES |y| < 35, unequal keys have |k . k| < 0.45. Summing y takes six roundings of it, e^(y_i - y_j) two more
# of its argument and 4 u: 2^-15 of itself; a product with k errs less than 2^-21. So A errs below 2^-16, and its inverse X
# by X dA X: rows and columns of |X| add up to less than 2, as beta is below 1, with the same key in every row too: 2^-14.
OUTPUTS = {"inverse": Output(atol=2.0 ** -14), "within": Output(rtol=2.0 ** -15, atol=2.0 ** -21),
           "decays": Output(rtol=2.0 ** -15, atol=2.0 ** -126)}


def pieces():
    """(row, column) of each element of a piece, i32 [12, 32, 8] each."""
    p, lane, e = np.ogrid[:PIECES, :32, :8]
    tile, half = np.where(p < 4, p, 4 + (p - 4) // 2), np.where(p < 4, 0, (p - 4) % 2)
    return np.broadcast_arrays(tile * 8 + lane // 4, half * HALF + e // 2 * 8 + lane % 4 * 2 + e % 2)


def ref(span, q, k, beta, g):
    """Chunk by chunk in float64, the inverse by numpy's."""
    (_, rows), (T, Nk, _), Nv = span[:2], q.shape, beta.shape[1]
    N, (i, j) = -(-T // CHUNK), pieces()
    made = {name: np.full((N, Nv, *shape), np.nan) for name, shape in (
        ("inverse", i.shape), ("within", i.shape), ("decays", (2, CHUNK)))}
    for c in range(-(-rows // CHUNK)):
        cut = lambda x: np.concatenate([x[c * CHUNK:min(c * CHUNK + CHUNK, rows)].astype(np.float64),
                                        np.zeros((max(0, c * CHUNK + CHUNK - rows), *x.shape[1:]))])
        Q, K, B, y = cut(q), cut(k), cut(beta), np.cumsum(cut(g), 0)
        for n in range(Nv):
            kn, qn, lower = K[:, n * Nk // Nv], Q[:, n * Nk // Nv], np.tri(CHUNK, dtype=bool)
            D = np.exp(np.where(lower, y[:, None, n] - y[None, :, n], -np.inf))
            A = np.tril(B[:, None, n] * D * (kn @ kn.T), -1)
            made["inverse"][c, n] = (np.linalg.inv(np.eye(CHUNK) + A) * B[None, :, n])[i, j]
            made["within"][c, n] = (D * (qn @ kn.T))[i, j]
            made["decays"][c, n] = np.exp(y[:, n]), np.exp(y[-1, n] - y[:, n])
    return made


@functools.cache
def copy_rows(threads):
    """Device function (to, source, stride, there, thread): starts copying 64 rows of 256 bytes, `stride` bytes apart; those
    that are not there become zeros. Chunk c of row r stands at place c ^ r % 8, so that ldmatrix meets different banks."""
    STEP = threads // 16

    @device
    def copy(to, source, stride, there, thread):
        first, c = u32(thread // 16), u32(thread % 16)
        p = source + u64(first) * stride + c * 16
        for n in static_range(-(-CHUNK // STEP)):
            r = u32(first + n * STEP)
            if (n + 1) * STEP <= CHUNK or r < CHUNK:
                ptx.copy_16_zfill(u32(to + r * ROW + (c ^ r & 7) * 16), p, ptx.select(r < there, u32(16), u32(0)))
            p += stride * STEP
    return copy


@device
def split(x):
    """Two float32 as the sum of two pairs of halves: 22 bits."""
    high = ptx.f16x2(x[0], x[1])
    back = ptx.f32x2_f16x2(high)
    return high, ptx.f16x2(x[0] - back[0], x[1] - back[1])


@device
def left(x, y):
    """Two fragments of sums as an operand from the left, split."""
    a, b, c, d = split((x[0], x[1])), split((x[2], x[3])), split((y[0], y[1])), split((y[2], y[3]))
    return (a[0], b[0], c[0], d[0]), (a[1], b[1], c[1], d[1])


@device
def taken(X, s, lane):
    """Rows 16 s .. of 16 columns at X in shared memory, transposed, as an operand from the left, split."""
    p = u32(X + (s * 16 + lane % 4 * 2) * PITCH + lane // 4 * 4)
    x = tuple((ptx.shared_f32(u32(p + n % 2 * 32 + n // 2 * (8 * PITCH))),
               ptx.shared_f32(u32(p + PITCH + n % 2 * 32 + n // 2 * (8 * PITCH)))) for n in static_range(4))
    return left((x[0][0], x[0][1], x[1][0], x[1][1]), (x[2][0], x[2][1], x[3][0], x[3][1]))


@functools.cache
def build(share):
    """The kernel for so many value heads a key head."""
    THREADS = 64 * share
    copy = copy_rows(THREADS)
    Y_AT = 2 * CHUNK * ROW + share * TRIANGLE            # bytes of shared memory: k, q; A of each value head; y and beta
    SHARED = Y_AT + share * 2 * CHUNK * 4

    @device
    def weight(yi, yj, i, j):
        """e^(y_i - y_j) on and below the diagonal, else 0; not a product: beyond, it may be infinite."""
        return ptx.select(j <= i, power(yi - yj), f32(0.0))

    @device
    def weights(y, i, j):
        """Of a fragment: rows i and i + 8, columns j and j + 1."""
        low, high, right = ptx.shared_f32(u32(y + i * 4)), ptx.shared_f32(u32(y + i * 4 + 32)), \
            ptx.shared_f32x2(u32(y + j * 4))
        return (weight(low, right[0], i, j), weight(low, right[1], i, u32(j + 1)),
                weight(high, right[0], u32(i + 8), j), weight(high, right[1], u32(i + 8), u32(j + 1)))

    @device
    def products(shared, tile, half, lane):
        """Rows 16 tile .., columns 32 half ..: (K K^T, Q K^T), four fragments each."""
        kk, qk = ((0.0, 0.0, 0.0, 0.0),) * 4, ((0.0, 0.0, 0.0, 0.0),) * 4
        row, column = u32(shared + (tile * 16 + lane % 16) * ROW), u32(shared + (half * HALF + lane % 8) * ROW)
        for x in range(4):
            b = tuple(ptx.ldmatrix_x4(u32(column + n * (8 * ROW) + (x * 4 + lane // 8 ^ lane % 8) * 16))
                      for n in static_range(4))
            for h in static_range(2):
                at = u32(row + (x * 4 + h * 2 + lane // 16 ^ lane % 8) * 16)
                ka, qa = ptx.ldmatrix_x4(at), ptx.ldmatrix_x4(u32(at + CHUNK * ROW))
                kk = tuple(ptx.mma_f16(ka, (b[n][2 * h], b[n][2 * h + 1]), kk[n]) for n in static_range(4))
                qk = tuple(ptx.mma_f16(qa, (b[n][2 * h], b[n][2 * h + 1]), qk[n]) for n in static_range(4))
        return kk, qk

    @device
    def couple(shared, A, y, within, tile, half, lane):
        """A and `within` in those rows and columns. What stands on and above A's diagonal is never used; a lane's sums of
        the second product are its operands later."""
        kk, qk = products(shared, tile, half, lane)
        i, j = u32(tile * 16 + lane // 4), u32(half * HALF + lane % 4 * 2)
        low, high = ptx.shared_f32(u32(y + (CHUNK + i) * 4)), ptx.shared_f32(u32(y + (CHUNK + i) * 4 + 32))
        D = tuple(weights(y, i, u32(j + n * 8)) for n in static_range(4))
        for n in static_range(4):
            to = u32(A + i * PITCH + (j + n * 8) * 4)
            ptx.store_shared_f32x2(to, (low * D[n][0] * kk[n][0], low * D[n][1] * kk[n][1]))
            ptx.store_shared_f32x2(u32(to + 8 * PITCH), (high * D[n][2] * kk[n][2], high * D[n][3] * kk[n][3]))
        for e in static_range(2):
            piece = u32(tile * 2 + e)
            if tile >= 2:
                piece = u32((tile * 2 + e - 2) * 2 + half)
            ptx.store_x4(within + (piece * 32 + lane) * 16, tuple(ptx.f16x2(
                D[n][2 * e] * qk[n][2 * e], D[n][2 * e + 1] * qk[n][2 * e + 1]) for n in static_range(4)))

    @device
    def substitute(A, lane):
        """The 16 x 16 triangle at A becomes (I + A)^-1, and so does the next on the diagonal: a column a lane, four rows a
        turn."""
        A, column = u32(A + lane // 16 * (16 * (PITCH + 4))), u32(lane % 16)
        for i in static_range(0, 16, 4):
            here = u32(A + i * PITCH)
            x = tuple(ptx.select(column == i + r, f32(1.0), f32(0.0)) for r in static_range(4))
            for j in static_range(0, i, 4):
                above = tuple(ptx.shared_f32(u32(A + (j + c) * PITCH + column * 4)) for c in static_range(4))
                line = tuple(ptx.shared_f32x4(u32(here + r * PITCH + j * 4)) for r in static_range(4))
                for c in static_range(4):
                    x = tuple(ptx.fma(-line[r][c], above[c], x[r]) for r in static_range(4))
            line = tuple(ptx.shared_f32x4(u32(here + r * PITCH + i * 4)) for r in static_range(4))
            one = ptx.fma(-line[1][0], x[0], x[1])
            two = ptx.fma(-line[2][1], one, ptx.fma(-line[2][0], x[0], x[2]))
            three = ptx.fma(-line[3][2], two, ptx.fma(-line[3][1], one, ptx.fma(-line[3][0], x[0], x[3])))
            ptx.warp_barrier()
            x = x[0], one, two, three
            for r in static_range(4):
                ptx.store_shared_f32(u32(here + r * PITCH + column * 4), x[r])
            ptx.warp_barrier()

    def square(steps):
        @device
        def times(x, B, lane):
            """x times the transpose of the square at B; each operand is the sum of two halves, three products of four."""
            m = ((0.0, 0.0, 0.0, 0.0),) * (2 * steps)
            for s in static_range(steps):
                for n in static_range(2 * steps):
                    at = u32(B + (n * 8 + lane // 4) * PITCH + (s * 16 + lane % 4 * 2) * 4)
                    b, c = split(ptx.shared_f32x2(at)), split(ptx.shared_f32x2(u32(at + 32)))
                    m = tuple(ptx.mma_f16(x[s][1], (b[0], c[0]), m[i]) if i == n else m[i] for i in static_range(2 * steps))
                    m = tuple(ptx.mma_f16(x[s][0], (b[1], c[1]), m[i]) if i == n else m[i] for i in static_range(2 * steps))
                    m = tuple(ptx.mma_f16(x[s][0], (b[0], c[0]), m[i]) if i == n else m[i] for i in static_range(2 * steps))
            return m

        @device
        def below(X11, A21, X22, lane):
            """X22 A21 X11 of squares of 16 `steps` rows, transposed: the 16 columns at X11, fragments [2 steps]."""
            x = tuple(taken(X11, s, lane) for s in static_range(steps))
            m = times(x, A21, lane)
            x = tuple(left(m[2 * s], m[2 * s + 1]) for s in static_range(steps))
            return times(x, X22, lane)
        return below
    below_16, below_32 = square(1), square(2)

    def placed(tiles):
        @device
        def store(to, m, lane):
            """-m, transposed back."""
            p = u32(to + lane % 4 * (2 * PITCH) + lane // 4 * 4)
            for n in static_range(tiles):
                for e in static_range(4):
                    ptx.store_shared_f32(u32(p + (n * 8 + e % 2) * PITCH + e // 2 * 32), -m[n][e])
        return store
    store_below_16, store_below_32 = placed(2), placed(4)

    @device
    def invert(A, warp, lane):
        """A's inverse in its place, but the last square goes above the diagonal, where nothing else is."""
        own = u32(A + warp * (HALF * (PITCH + 4)))
        substitute(own, lane)
        m = below_16(own, u32(own + 16 * PITCH), u32(own + 16 * (PITCH + 4)), lane)
        ptx.warp_barrier()
        store_below_16(u32(own + 16 * PITCH), m, lane)
        ptx.barrier()
        m = below_32(u32(A + warp * 64), u32(A + HALF * PITCH), u32(A + HALF * (PITCH + 4)), lane)
        store_below_32(u32(A + HALF * 4 + warp * 64), m, lane)
        ptx.barrier()

    @device
    def store_inverse(inverse, A, beta, warp, lane):
        """Six pieces a warp."""
        for p in range(warp, PIECES, 2):
            tile, half = p, u32(0)
            if p >= 4:
                tile, half = u32(p // 2 + 2), u32(p % 2)
            i, j = u32(tile * 8 + lane // 4), u32(half * HALF + lane % 4 * 2)
            at = u32(A + i * PITCH + j * 4)
            if tile >= 4 and half == 0:
                at = u32(A + (i - HALF) * PITCH + (j + HALF) * 4)
            x = tuple(ptx.shared_f32x2(u32(at + n * 32)) for n in static_range(4))
            b = tuple(ptx.shared_f32x2(u32(beta + j * 4 + n * 32)) for n in static_range(4))
            ptx.store_x4(inverse + (p * 32 + lane) * 16,
                         tuple(ptx.f16x2(x[n][0] * b[n][0], x[n][1] * b[n][1]) for n in static_range(4)))

    @device
    def gates(y, beta, g, decays, first, there, head, value_heads, warp, lane):
        """y and beta of the chunk into shared memory, the decays to where they go; by the head's first warp."""
        if warp == 0:
            total = f32(0.0)
            sums = (0.0, 0.0)
            for h in static_range(2):
                i = u32(lane + h * 32)
                at, mine, fresh = u64(first + min(i, there - 1)) * value_heads + head, f32(0.0), f32(0.0)
                if i < there:
                    mine, fresh = ptx.read_f32(g + at * 4), ptx.read_f32(beta + at * 4)
                for step in static_range(5):
                    up = ptx.shuffle_up_f32(mine, 1 << step)
                    mine += ptx.select(lane >= 1 << step, up, f32(0.0))
                mine += total
                total = ptx.shuffle_idx_f32(mine, 31)
                sums = (sums[1], mine)
                ptx.store_shared_f32(u32(y + i * 4), mine)
                ptx.store_shared_f32(u32(y + (CHUNK + i) * 4), fresh)
            for h in static_range(2):
                ptx.store_f32(decays + (lane + h * 32) * 4, power(sums[h]))
                ptx.store_f32(decays + (CHUNK + lane + h * 32) * 4, power(total - sums[h]))

    @kernel(threads=THREADS, shared=SHARED, min_blocks=2)
    def delta_prepare(span: u64, q: u64, k: u64, beta: u64, g: u64, inverse: u64, within: u64, decays: u64):
        ptx.launch_dependents()
        ptx.wait_dependencies()
        rows, first, key = ptx.read_u32(span + 4), u32(ptx.block_y() * CHUNK), ptx.block_x()
        key_heads, value_heads = ptx.blocks_x(), u32(ptx.blocks_x() * share)
        if first >= rows:
            return
        shared = ptx.shared_address(cuda.shared.array(0, types.uint8))
        thread, lane, there = ptx.thread_x(), ptx.lane(), min(u32(rows - first), u32(CHUNK))
        pair, warp = u32(thread // 64), u32(thread // 32 % 2)
        head = u32(key * share + pair)
        from_row = (u64(first) * key_heads + key) * ROW
        copy(shared, k + from_row, u64(key_heads * ROW), there, thread)
        copy(u32(shared + CHUNK * ROW), q + from_row, u64(key_heads * ROW), there, thread)
        ptx.copy_commit()
        y, A = u32(shared + Y_AT + pair * (2 * CHUNK * 4)), u32(shared + 2 * CHUNK * ROW + pair * TRIANGLE)
        at = u64(ptx.block_y()) * value_heads + head
        inverse += at * (PIECES * 512)
        within += at * (PIECES * 512)
        gates(y, beta, g, decays + at * (2 * CHUNK * 4), first, there, head, value_heads, warp, lane)
        ptx.copy_wait_all()
        ptx.barrier()
        for job in range(3):                                            # six squares of 16 rows and 32 columns
            tile, half = u32(3 - warp), u32(job - 1)
            if job == 0:
                tile, half = warp, u32(0)
            couple(shared, A, y, within, tile, half, lane)
        ptx.barrier()
        invert(A, warp, lane)
        store_inverse(inverse, A, u32(y + CHUNK * 4), warp, lane)
    return delta_prepare


def launch(stream, span, q, k, beta, g, inverse, within, decays):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    (T, Nk, _), Nv = q.shape, beta.shape[1]
    N = -(-T // CHUNK)
    if Nv % Nk or not 1 <= Nv // Nk <= 4:
        raise ValueError(f"{Nv} value heads, wanted 1 to 4 for each of {Nk} key heads")
    if span.dtype != np.int32 or len(span.shape) != 1 or span.shape[0] < 2:
        raise ValueError(f"span must be int32 [slot, rows, ...], got {span.dtype} {tuple(span.shape)}")
    matrix = (N, Nv, PIECES, 32, 8)
    for name, array, format, shape in (
            ("q", q, "f16", (T, Nk, HEAD)), ("k", k, "f16", (T, Nk, HEAD)), ("beta", beta, "f32", (T, Nv)),
            ("g", g, "f32", (T, Nv)), ("inverse", inverse, "f16", matrix), ("within", within, "f16", matrix),
            ("decays", decays, "f32", (N, Nv, 2, CHUNK))):
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(array.shape)}")
        format_of(name, array, format)
    if N:
        stream.launch(build(Nv // Nk), (Nk, N, 1), span, q, k, beta, g, inverse, within, decays)


CASES = (
    dict(rows=64),                                                     # 27B, one chunk
    dict(rows=130, room=200, key_heads=2, value_heads=6),              # nano, a bucket larger than the rows, a short chunk
    dict(rows=63, key_heads=1, value_heads=1, repeated=True),          # the same key in every row
    dict(rows=1, key_heads=1, value_heads=1),
    dict(rows=0, room=1, key_heads=1, value_heads=1),
    dict(rows=0, key_heads=1, value_heads=1),
)


def make(rng, rows=64, room=0, key_heads=16, value_heads=48, repeated=False):
    """Named random arguments: so many rows of T = max(rows, room)."""
    T = max(rows, room)
    N, x = -(-T // CHUNK), rng.standard_normal((2, T, key_heads, HEAD))
    if repeated:
        x[1] = x[1, 0]
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float16)
    matrix = lambda: np.empty((N, value_heads, PIECES, 32, 8), np.float16)
    return dict(span=np.array([0, rows], np.int32), q=q, k=k, beta=rng.uniform(0, 1, (T, value_heads)).astype(np.float32),
                g=-rng.exponential(0.3, (T, value_heads)).astype(np.float32), inverse=matrix(), within=matrix(),
                decays=np.empty((N, value_heads, 2, CHUNK), np.float32))


def cost(rows=64, room=0, key_heads=16, value_heads=48, repeated=False):
    """Bytes that must move, and float operations."""
    chunks = -(-rows // CHUNK)
    return dict(bytes=rows * (4 * key_heads * HEAD + 8 * value_heads) + chunks * value_heads * (2 * PIECES * 512 + 512),
                flops=chunks * value_heads * (4 * CHUNK * CHUNK * HEAD + 2 * CHUNK ** 3 // 3))
