"""delta_chunk: the gated delta rule over many rows of one sequence, 64 at a time, on the tensor cores.

    delta = inverse (V - diag(e^y) K S)
    o     = 128^-0.5 ( diag(e^y) Q S + within delta )
    S     <- e^(y_63) S + (diag(e^(y_63 - y)) K)^T delta

chunk after chunk: the same as row by row, S <- e^g S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q (arXiv 2412.06464).

    span       i32 [>= 2]                     device data: slot, rows; rows 0 to T
    S          f32 [slots, Nv, 128, 128]      in place, the slot's; [dk, dv] a head
    q, k       f16 [T, Nk, 128]               conv_wide's units; value head n uses key head n // (Nv / Nk)
    v          f16 [T, Nv, 128]
    inverse    f16 [N, Nv, 12, 32, 8]         delta_prepare's, as fragments; N = T / 64, rounded up
    within     f16 [N, Nv, 12, 32, 8]
    decays     f32 [N, Nv, 2, 64]             e^y, e^(y_63 - y)
    o          f16 [T, Nv, 128]               rows from `rows` on are left alone

Columns of S do not know of each other, so a warp keeps 16 of them, in float32, for the whole sequence, and needs nobody:
what a product leaves in its registers, rounded to half precision, is what the next one takes from the left. In m16n8k16's
terms (ptx_matrix.py) rows are S's columns throughout; from the right come k, q and the two matrices, out of shared memory:

    S^T [16, 128] -- x K^T --> [16, 64]; v^T - e^y that -- x inverse^T --> delta^T [16, 64] -- x K --> [16, 128] + e^y S^T
         |---------- x Q^T --> [16, 64] e^y + delta^T x within^T --> o^T

A block is four warps, half a head. k, v and inverse of a chunk are copied while the chunk before is worked on, q and within
while the chunk's state is; 85 KB, so that one block fits an sm_120 multiprocessor, two an H200's.

Half precision for what is multiplied: units, v, the residual v - S^T k, delta, and S as it is multiplied, not as it is kept.
An element errs by 2^-12 at most where it counts: below 6e-5 f16 loses digits, but o that small is lost in the norm's 1e-6.

27B, 4096 rows: 232 products of a chunk and warp at 7 cycles are 0.9 us, so 60 us of an H200; with one warp a scheduler,
which waits for its operands, 235. delta_chunk_sm90a waits less.
"""
import functools

import numpy as np
from numba import cuda
from numba.cuda import types

from . import ptx
from .build import device, kernel
from .delta_prepare import CHUNK, PIECES, ROW, pieces
from .delta_state import HEAD
from .octet import format_of
from .parity import Output
from .ptx import u32, u64
from .unroll import static_range

COLUMNS = 16                                          # of S, a warp
WARPS = 4
PARTS = HEAD // (COLUMNS * WARPS)                     # blocks a head
THREADS = 32 * WARPS
SCALE = HEAD ** -0.5
V_ROW = COLUMNS * WARPS * 2                           # bytes of a row of v, the block's part
MATRIX = PIECES * 512                                 # bytes of inverse or within
# bytes of shared memory: twice k, v, inverse and the decays, then q and within
V_AT = CHUNK * ROW
INVERSE_AT = V_AT + CHUNK * V_ROW
DECAYS_AT = INVERSE_AT + MATRIX
STAGE = DECAYS_AT + 2 * CHUNK * 4
Q_AT = 2 * STAGE
WITHIN_AT = Q_AT + CHUNK * ROW
ALIGNED = 256                                         # a row's address turns into its chunks' by exclusive or
KEPT_AT = WITHIN_AT + MATRIX
SHARED = KEPT_AT + THREADS * 8 + ALIGNED - 128
# S alone is 64, as operands 32 more. Barriers of a warp stand between steps of the products below, or the assembler has more
# of them on its way than it has registers.
REGISTERS = 255
SASS = {chip: ("LDGSTS", "LDSM.16", "HMMA.16816") for chip in ("sm_90a", "sm_120a")}
# Rounding x to f16 errs 2^-12.3 |x| in the mean square. In CASES S and v are of size 1, |k| = |q| = 1, rows of inverse have
# a norm below 0.64, of within below 0.41. So K S errs 2^-12.3, the residual, of size 1.4, with its own rounding 2^-11.5,
# delta, of size 0.9, 2^-11.8 likewise; an element of S, to which 64 rows bring delta times 0.09 and e^(y_63 - y), of size
# 0.5, 2^-13 a chunk, of which 0.15 is left after the next; o, with its 128^-0.5, 2^-15.5. The largest of 800,000 is below
# six times that.
OUTPUTS = {"S": Output(atol=2.0 ** -10), "o": Output(atol=2.0 ** -13)}


def ref(span, S, q, k, v, inverse, within, decays):
    """The formulas in float64, a head and a chunk at a time; nothing is rounded."""
    (slot, rows), Nk, Nv = span[:2], q.shape[1], v.shape[1]
    o, S, (i, j) = np.full(v.shape, np.nan), S.astype(np.float64), pieces()

    def whole(x):
        full = np.zeros((CHUNK, CHUNK))
        full[i, j] = x
        return full
    for n in range(Nv):
        for c in range(-(-rows // CHUNK)):
            at = slice(c * CHUNK, min(c * CHUNK + CHUNK, rows))
            count = at.stop - at.start
            Q, K, V = (x[at, m].astype(np.float64) for x, m in ((q, n * Nk // Nv), (k, n * Nk // Nv), (v, n)))
            X, P = (whole(x[c, n])[:count, :count] for x in (inverse, within))
            now, tail = decays[c, n, :, :count, None].astype(np.float64)
            delta = X @ (V - now * (K @ S[slot, n]))
            o[at, n] = (now * (Q @ S[slot, n]) + P @ delta) / np.sqrt(HEAD)
            S[slot, n] = decays[c, n, 0, -1] * S[slot, n] + (tail * K).T @ delta
    return dict(S=S, o=o)


@device
def left(x, y):
    """Two fragments of sums, 16 columns together, as an operand from the left."""
    return ptx.f16x2(x[0], x[1]), ptx.f16x2(x[2], x[3]), ptx.f16x2(y[0], y[1]), ptx.f16x2(y[2], y[3])


@functools.cache
def copy_vector(bytes):
    """Device function (to, source, thread): starts copying so many bytes, a multiple of 16."""
    @device
    def copy(to, source, thread):
        for n in static_range(-(-bytes // (THREADS * 16))):
            if (n + 1) * THREADS * 16 <= bytes or thread * 16 + n * THREADS * 16 < bytes:
                ptx.copy_16(u32(to + thread * 16 + n * (THREADS * 16)), source + thread * 16 + n * (THREADS * 16))
    return copy


copy_matrix, copy_decays = copy_vector(MATRIX), copy_vector(2 * CHUNK * 4)


@functools.cache
def copy_tile(row_bytes, stride):
    """Device function (to, source, there, thread): starts copying 64 rows of so many bytes, `stride` bytes apart; those that
    are not there become zeros. Chunk c of row r stands at place c ^ r % 8, so that ldmatrix meets different banks."""
    CHUNKS = row_bytes // 16
    STEP = THREADS // CHUNKS                          # rows at once: a multiple of 8

    @device
    def copy(to, source, there, thread):
        r, c = u32(thread // CHUNKS), u32(thread % CHUNKS)
        p, to = source + (u64(r) * stride + c * 16), u32(to + r * row_bytes + (c ^ r & 7) * 16)
        for n in static_range(CHUNK // STEP):
            ptx.copy_16_zfill(u32(to + n * STEP * row_bytes), p + n * STEP * stride,
                              ptx.select(r + n * STEP < there, u32(16), u32(0)))
    return copy


@device
def against(rows, state, lane):
    """state [16, 128] x rows^T: eight fragments [16, 64]; rows of k or q."""
    x = ((0.0, 0.0, 0.0, 0.0),) * 8
    at = u32(rows + lane % 8 * ROW + (lane // 8 ^ lane % 8) * 16)
    for s in static_range(4):
        ptx.warp_barrier()
        for half in static_range(2):
            b = tuple(ptx.ldmatrix_x4(u32((at ^ s * 64) + (half * 4 + n) * (8 * ROW))) for n in static_range(4))
            for h in static_range(2):
                x = tuple(ptx.mma_f16(state[2 * s + h], (b[n % 4][2 * h], b[n % 4][2 * h + 1]), x[n])
                          if n // 4 == half else x[n] for n in static_range(8))
    return x


@device
def through(matrix, a, x, lane):
    """x + a [16, 64] x matrix^T, eight fragments; of a matrix only what is on or below the diagonal."""
    b = tuple(ptx.shared_x4(u32(matrix + (p * 32 + lane) * 16)) for p in static_range(4))
    x = tuple(ptx.mma_f16(a[0], (b[n % 4][0], b[n % 4][1]), x[n]) if n < 4 else x[n] for n in static_range(8))
    x = tuple(ptx.mma_f16(a[1], (b[n % 4][2], b[n % 4][3]), x[n]) if 2 <= n and n < 4 else x[n] for n in static_range(8))
    for m in static_range(2):
        ptx.warp_barrier()
        b = tuple(ptx.shared_x4(u32(matrix + ((4 + n * 2 + m) * 32 + lane) * 16)) for n in static_range(4))
        x = tuple(ptx.mma_f16(a[2 * m], (b[n % 4][0], b[n % 4][1]), x[n]) if n >= 4 else x[n] for n in static_range(8))
        x = tuple(ptx.mma_f16(a[2 * m + 1], (b[n % 4][2], b[n % 4][3]), x[n]) if n >= 6 - 2 * (m == 0) else x[n]
                  for n in static_range(8))
    return x


@device
def residual(values, decays, x, warp, lane):
    """v^T - e^y x as operands from the left."""
    y = ()
    for m in static_range(4):
        w = ptx.ldmatrix_x4_transposed(u32(values + (m * 16 + lane % 16) * V_ROW
                                           + (warp * 2 + lane // 16 ^ lane % 8) * 16))
        for n in static_range(2):
            low, high = ptx.f32x2_f16x2(w[n]), ptx.f32x2_f16x2(w[n + 2])
            e = ptx.shared_f32x2(u32(decays + (m * 16 + n * 8 + lane % 4 * 2) * 4))
            z = x[2 * m + n]
            y = y + ((ptx.fma(-e[0], z[0], low[0]), ptx.fma(-e[1], z[1], low[1]),
                      ptx.fma(-e[0], z[2], high[0]), ptx.fma(-e[1], z[3], high[1])),)
    return tuple(left(y[2 * m], y[2 * m + 1]) for m in static_range(4))


@device
def decayed(x, decays, n, lane):
    """Fragment n, its columns times their rows' decays."""
    pair = ptx.shared_f32x2(u32(decays + (n * 8 + lane % 4 * 2) * 4))
    return x[0] * pair[0], x[1] * pair[1], x[2] * pair[0], x[3] * pair[1]


@device
def written(S, keys, a, decay, lane):
    """decay S + a [16, 64] x k [64, 128], sixteen fragments."""
    S = tuple((S[n][0] * decay, S[n][1] * decay, S[n][2] * decay, S[n][3] * decay) for n in static_range(16))
    at = u32(keys + lane % 16 * ROW + (lane // 16 ^ lane % 8) * 16)
    for m in static_range(4):
        ptx.warp_barrier()
        for h in static_range(2):
            b = tuple(ptx.ldmatrix_x4_transposed(u32((at ^ (h * 4 + n) * 32) + m * (16 * ROW))) for n in static_range(4))
            S = tuple(ptx.mma_f16(a[m], (b[n // 2 % 4][n % 2 * 2], b[n // 2 % 4][n % 2 * 2 + 1]), S[n])
                      if n // 8 == h else S[n] for n in static_range(16))
    return S


@device
def state_at(S, span, head, value_heads, strip, lane):
    """Where the lane's part of 16 columns lies."""
    return S + ((u64(ptx.read_u32(span)) * value_heads + head) * (HEAD * HEAD) + lane % 4 * (2 * HEAD) + strip * COLUMNS
                + lane // 4) * 4


@device
def load_state(p):
    """Sixteen fragments of S^T: lane 4 g + t holds rows 8 n + 2 t, + 1 of S in columns g and g + 8."""
    return tuple((ptx.read_f32(p + n * (32 * HEAD)), ptx.read_f32(p + n * (32 * HEAD) + HEAD * 4),
                  ptx.read_f32(p + n * (32 * HEAD) + 32), ptx.read_f32(p + n * (32 * HEAD) + HEAD * 4 + 32))
                 for n in static_range(16))


@device
def store_state(p, S):
    """Back to where it came from."""
    for n in static_range(16):
        for e in static_range(4):
            ptx.store_f32(p + n * (32 * HEAD) + e % 2 * (HEAD * 4) + e // 2 * 32, S[n][e])


@functools.cache
def row_store(stride):
    """Device function (to, x, there, lane): o^T, rows `stride` bytes apart. A lane holds two rows of a column; partners
    swap, so that each stores two columns of a row."""
    @device
    def store_rows(to, x, there, lane):
        odd = u32(lane // 4 % 2)
        row = u32(lane % 4 * 2 + odd)
        p, rest = to + (u64(row) * stride + lane // 8 * 4), u32(max(there, row) - row)
        for n in static_range(8):
            even_row, odd_row = ptx.f16x2(x[n][0] * SCALE, x[n][2] * SCALE), ptx.f16x2(x[n][1] * SCALE, x[n][3] * SCALE)
            mine = ptx.select(odd == 0, even_row, odd_row)
            other = ptx.shuffle_xor(ptx.select(odd == 0, odd_row, even_row), 4)
            low, high = ptx.select(odd == 0, mine, other), ptx.select(odd == 0, other, mine)
            if n * 8 < rest:
                ptx.store_u32(p + n * 8 * stride, ptx.permute(low, high, 0x5410))
                ptx.store_u32(p + n * 8 * stride + 16, ptx.permute(low, high, 0x7632))
    return store_rows


@functools.cache
def build(key_heads, value_heads):
    """The kernel for Nk and Nv heads: strides are numbers, so that copies need no registers for them."""
    KEY_STRIDE, STRIDE, share = key_heads * ROW, value_heads * ROW, value_heads // key_heads
    copy_keys, copy_values, store_rows = copy_tile(ROW, KEY_STRIDE), copy_tile(V_ROW, STRIDE), row_store(STRIDE)

    @kernel(threads=THREADS, shared=SHARED)
    def delta_chunk(span: u64, S: u64, q: u64, k: u64, v: u64, inverse: u64, within: u64, decays: u64, o: u64):
        ptx.launch_dependents()
        ptx.wait_dependencies()
        rows = ptx.read_u32(span + 4)
        if rows == 0:
            return
        memory = u32(u32(ptx.shared_address(cuda.shared.array(0, types.uint8)) + (ALIGNED - 1)) & 0xFFFFFF00)
        part, head, thread, lane = ptx.block_x(), ptx.block_y(), ptx.thread_x(), ptx.lane()
        warp = u32(thread // 32)
        k, q = k + head // share * ROW, q + head // share * ROW
        v, o = v + head * ROW + part * V_ROW, o + head * ROW + part * V_ROW + warp * (COLUMNS * 2)
        inverse, within, decays = inverse + head * MATRIX, within + head * MATRIX, decays + head * (2 * CHUNK * 4)
        here = state_at(S, span, head, value_heads, u32(part * WARPS + warp), lane)
        state = load_state(here)
        ptx.store_shared_x2(u32(memory + KEPT_AT + thread * 8), ptx.unpack_u64(here))       # no register holds it meanwhile
        chunks = u32((rows + (CHUNK - 1)) // CHUNK)
        copy_keys(memory, k, rows, thread)
        copy_values(u32(memory + V_AT), v, rows, thread)
        copy_matrix(u32(memory + INVERSE_AT), inverse, thread)
        copy_decays(u32(memory + DECAYS_AT), decays, thread)
        ptx.copy_commit()
        for i in range(chunks):
            keys, there = u32(memory + i % 2 * STAGE), u32(rows - i * CHUNK)
            next, first = u32(memory + (i + 1) % 2 * STAGE), u64(i) * CHUNK
            ptx.copy_wait_all()
            ptx.barrier()                                   # this chunk is there, and nobody is at the one before
            copy_keys(u32(memory + Q_AT), q + first * KEY_STRIDE, there, thread)
            copy_matrix(u32(memory + WITHIN_AT), within + u64(i) * value_heads * MATRIX, thread)
            ptx.copy_commit()
            if i + 1 < chunks:
                after, at = u64(first + CHUNK), u64(u32(i + 1)) * value_heads
                left_over = u32(there - CHUNK)
                copy_keys(next, k + after * KEY_STRIDE, left_over, thread)
                copy_values(u32(next + V_AT), v + after * STRIDE, left_over, thread)
                copy_matrix(u32(next + INVERSE_AT), inverse + at * MATRIX, thread)
                copy_decays(u32(next + DECAYS_AT), decays + at * (2 * CHUNK * 4), thread)
            ptx.copy_commit()
            before = tuple(left(state[2 * n], state[2 * n + 1]) for n in static_range(8))
            x = against(keys, before, lane)
            a = residual(u32(keys + V_AT), u32(keys + DECAYS_AT), x, warp, lane)
            delta = through(u32(keys + INVERSE_AT), a, ((0.0, 0.0, 0.0, 0.0),) * 8, lane)
            a = tuple(left(delta[2 * m], delta[2 * m + 1]) for m in static_range(4))
            delta = tuple(decayed(delta[n], u32(keys + (DECAYS_AT + CHUNK * 4)), n, lane) for n in static_range(8))
            state = written(state, keys, tuple(left(delta[2 * m], delta[2 * m + 1]) for m in static_range(4)),
                            ptx.shared_f32(u32(keys + (DECAYS_AT + CHUNK * 4 - 4))), lane)
            ptx.copy_wait(1)
            ptx.barrier()                                   # q and within are there
            x = against(u32(memory + Q_AT), before, lane)
            x = tuple(decayed(x[n], u32(keys + DECAYS_AT), n, lane) for n in static_range(8))
            x = through(u32(memory + WITHIN_AT), a, x, lane)
            store_rows(o + first * STRIDE, x, there, lane)
        store_state(ptx.pack_u64(ptx.shared_x2(u32(memory + KEPT_AT + thread * 8))), state)
    return delta_chunk


def check(span, S, q, k, v, inverse, within, decays, o):
    """ValueError unless shapes and dtypes are as in the module's docstring."""
    (T, Nk, _), Nv = q.shape, v.shape[1]
    N = -(-T // CHUNK)
    if Nv % Nk:
        raise ValueError(f"{Nv} value heads, wanted a multiple of the {Nk} key heads")
    if span.dtype != np.int32 or len(span.shape) != 1 or span.shape[0] < 2:
        raise ValueError(f"span must be int32 [slot, rows, ...], got {span.dtype} {tuple(span.shape)}")
    matrix = (N, Nv, PIECES, 32, 8)
    for name, array, format, shape in (
            ("S", S, "f32", (S.shape[0], Nv, HEAD, HEAD)), ("q", q, "f16", (T, Nk, HEAD)), ("k", k, "f16", (T, Nk, HEAD)),
            ("v", v, "f16", (T, Nv, HEAD)), ("inverse", inverse, "f16", matrix), ("within", within, "f16", matrix),
            ("decays", decays, "f32", (N, Nv, 2, CHUNK)), ("o", o, "f16", (T, Nv, HEAD))):
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(array.shape)}")
        format_of(name, array, format)


def launch(stream, span, S, q, k, v, inverse, within, decays, o):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    check(span, S, q, k, v, inverse, within, decays, o)
    if v.shape[0]:
        stream.launch(build(q.shape[1], v.shape[1]), (PARTS, v.shape[1], 1), span, S, q, k, v, inverse, within, decays, o)


CASES = (
    dict(rows=64),                                                     # 27B, one chunk
    dict(rows=130, room=200, key_heads=1, value_heads=3),              # a bucket larger than the rows, a short chunk
    dict(rows=65, key_heads=1, value_heads=3),
    dict(rows=1, key_heads=1, value_heads=3),
    dict(rows=0, room=1, key_heads=1, value_heads=3),
    dict(rows=0, key_heads=1, value_heads=3),
)


def make(rng, rows=64, room=0, key_heads=16, value_heads=48):
    """Named random arguments: so many rows of T = max(rows, room); matrices like delta_prepare's, of no real keys."""
    Nk, Nv, T = key_heads, value_heads, max(rows, room)
    N, (i, j) = -(-T // CHUNK), pieces()

    def unit():
        x = rng.standard_normal((T, Nk, HEAD))
        return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float16)

    def matrix(diagonal):
        x = np.where(i == j, diagonal, np.where(i > j, rng.normal(0, 0.05, (N, Nv, PIECES, 32, 8)), 0))
        return x.astype(np.float16)
    g = -rng.exponential(0.03, (N, Nv, CHUNK))
    g[-(-rows // CHUNK) - 1:, :, (rows - 1) % CHUNK + 1:] = 0               # rows that the last chunk lacks
    y = np.cumsum(g, -1)
    return dict(span=np.array([1, rows], np.int32), S=rng.standard_normal((2, Nv, HEAD, HEAD)).astype(np.float32), q=unit(),
                k=unit(), v=rng.standard_normal((T, Nv, HEAD)).astype(np.float16), inverse=matrix(0.5), within=matrix(0.1),
                decays=np.exp(np.stack([y, y[..., -1:] - y], 2)).astype(np.float32), o=np.empty((T, Nv, HEAD), np.float16))


def cost(rows=64, room=0, key_heads=16, value_heads=48):
    """Bytes that must move, and float operations: S in and out; q, k, v, the matrices and o."""
    chunks = -(-rows // CHUNK)
    if not rows:
        return dict(bytes=0, flops=0)
    return dict(bytes=value_heads * HEAD * HEAD * 8 + rows * HEAD * 4 * (key_heads + value_heads)
                + chunks * value_heads * (2 * MATRIX + 512),
                flops=chunks * value_heads * (6 * CHUNK * HEAD * HEAD + 2 * CHUNK * CHUNK * HEAD))
