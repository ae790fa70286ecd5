"""delta_decode: a gated DeltaNet's plain decode in one launch: conv_split, delta_verify and gated_norm of one row.

    q, k, v, beta, g, past    of the new row, as conv_split has them; b and a are each the sum of `terms` columns
    S        <- the accepted rows of the round before replayed, as delta_verify does
    o        = S'^T q,  S' = the new row's step after S, never stored
    out      = o * rsqrt(mean(o^2) + eps) * norm * silu(z)

    S          f32 [slots, Nv, 128, 128]      in place; [dk, dv] a head
    projected  f32 [T, >= C + 128 Nv + 2 Nv terms], C = 128 (2 Nk + Nv)     a row, as the fused product leaves it:

                   | q: Nk heads | k: Nk heads | v: Nv heads | z: Nv heads | b: Nv | a: Nv | b: Nv | a: Nv | ... | padding |

    weight     f32 [4, C]                     taps, the current row's last
    decay      f32 [Nv]                       -exp(A_log)
    dt_bias    f32 [Nv]
    norm       f32 [128]                      as it is, near 1
    plan       plan.py                        of each sequence at most one new row; any number of accepted ones
    window     f32 [slots, 3, C]              in place
    pending    f32 [E, 3 + M, C]              in place; entry `now` written, `before` read
    k, v       f32 [E, M, Nk, 128], f32 [E, M, Nv, 128]     in place, alike
    beta, g    f32 [E, M, Nv]                 in place, alike
    out        f16 or f32 [T, Nv, 128]

One block takes a value head of a sequence:

    warps 0 .. 7     16 columns of S each, in registers (delta_state.py)
    warps 8, 9       half a warp each: q, k, v and z, an octet of channels a lane

Value heads that share a key head compute its q and k each for itself; the first of them stores k. All that does not hang
on this round's projection comes before the wait for it: S is read, the accepted rows replayed, S written, and of the
convolution the three older taps added up. So the kernel's own time, where its predecessor runs long enough to hide this
(27B: 65 MB of weights, 14 us), is a load from L2, the convolution, two products with S and two sums over the block.
Nobody else in a round may touch S, window or the entries; a round begins with a full wait for the one before.

A head's S is 64 KiB in and 64 KiB out, 27B's 48 heads 2 * 3 MiB a sequence: 1.4 us of an H200's 4.6 TB/s, spent while the
projection streams: a block fits beside one of gemv's on a multiprocessor.
"""
import functools

import numpy as np
from numba import cuda

from . import octet, plan as plans, ptx, reduce
from .activation import power, sigmoid, silu, softplus
from .build import device, kernel
from .conv_split import EPS, GATE, K, MOVED, OCTETS, SCALE, TAPS, V
from .delta_state import (COLUMNS, HEAD, load_state, offset, plus, product, scattered, stepped, store_state, summed,
                          vector)
from .octet import format_of
from .parity import Output
from .ptx import f32, u32, u64
from .unroll import static_range

NONE, HEADER, WINDOW = plans.NONE, plans.HEADER, plans.WINDOW
WARPS = HEAD // COLUMNS                               # that hold S; two more compute what meets it
STATE_THREADS, THREADS = 32 * WARPS, 32 * (WARPS + 2)
READY, SQUARES = 1, 2                                 # named barriers: the row is in shared memory; so are the sums of o^2
# bytes of shared memory: q, k, v and norm silu(z) of the row, 128 floats each; beta, e^g; eight sums of squares
VECTOR, BETA_AT, SUMS_AT, SHARED = HEAD * 4, 4 * HEAD * 4, 4 * HEAD * 4 + 16, 4 * HEAD * 4 + 48
Q, K_NEW, V_NEW, Z = range(4)                         # their order there, and that of the half warps that make them
REGISTERS = 120                                       # S alone is 64; 320 threads leave a gemv of 288 its 88 registers
SASS = {chip: ("LDG.E.128", "STG.E.128", "FFMA", "MUFU.EX2", "MUFU.RSQ") for chip in ("sm_90a", "sm_120a")}
# k, v and the gates as in conv_split; a sum of three terms below 16 errs 3 * 16 u more, u = 2^-24, which GATE has room for.
# S as in delta_verify, but |S| < 3 in CASES: a row costs 24 u, all of them 107 u. S^T q relative to its own root mean square
# errs as much as S to its, which is above 0.5: 214 u, times norm < 1.3 and silu(z) < 1.8; the root mean square itself, over
# 128 of those errors, 19 u of |out| < 10. 690 u in all. What conv_split's q and k err is less: they are units.
OUTPUTS = {"S": Output(atol=2.0 ** -17), "out": Output(atol=2.0 ** -14, rtol=2.0 ** -17), "k": K, "v": V, "beta": GATE,
           "g": GATE, "window": MOVED, "pending": MOVED}


def ref(S, projected, weight, decay, dt_bias, norm, plan, window, pending, k, v, beta, g, eps, terms):
    """Sequence by sequence in float64, all heads at once; only what the pools keep of the projection is as it was."""
    (_, C), Nk, Nv = weight.shape, k.shape[2], v.shape[2]
    z_at, gates = C, C + Nv * HEAD
    S, k, v, beta, g = (a.astype(np.float64) for a in (S, k, v, beta, g))
    out = np.full((len(projected), Nv, HEAD), np.nan)

    def step(S, entry, row):
        key = np.repeat(k[entry, row], Nv // Nk, 0)
        S = S * np.exp(g[entry, row])[:, None, None]
        d = beta[entry, row][:, None] * (v[entry, row] - np.einsum("hkv,hk->hv", S, key))
        return S + np.einsum("hk,hv->hkv", key, d)
    for slot, first, rows, before, now, accepted, _, _, *path in plan:
        past = window[slot] if before < 0 else np.concatenate(
            [pending[before, :3], pending[before, [3 + p for p in path[:accepted]]]])[-3:]
        for row in path[:accepted]:
            S[slot] = step(S[slot], before, row)
        if not rows:
            if before >= 0:
                window[slot] = past
            continue
        x = projected[first].astype(np.float64)
        pending[now, :3], pending[now, 3] = past, projected[first, :C]
        y = (weight * pending[now, :4].astype(np.float64)).sum(0)
        y = (y / (1 + np.exp(-y))).reshape(-1, HEAD)
        unit = y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6)
        b, a = x[gates:gates + 2 * Nv * terms].reshape(terms, 2, Nv).sum(0)
        k[now, 0], v[now, 0] = unit[Nk:2 * Nk], y[2 * Nk:]
        beta[now, 0], g[now, 0] = 1 / (1 + np.exp(-b)), decay * np.logaddexp(0, a + dt_bias)
        o = np.einsum("hkv,hk->hv", step(S[slot], now, 0), np.repeat(unit[:Nk], Nv // Nk, 0) / np.sqrt(HEAD))
        z = x[z_at:gates].reshape(Nv, HEAD)
        out[first] = o / np.sqrt((o * o).mean(-1, keepdims=True) + eps) * norm * (z / (1 + np.exp(-z)))
    return dict(S=S, out=out, k=k, v=v, beta=beta, g=g, window=window, pending=pending)


@functools.cache
def build(key_heads, value_heads, columns, m, terms, out_format):
    """The kernel for Nk and Nv heads, `columns` of projected, M = m rows an entry, b and a in so many terms."""
    width, share, mixed = HEADER + m, value_heads // key_heads, 2 * key_heads + value_heads       # mixed: heads of mix
    octets, row_octets, gates = mixed * OCTETS, columns // 8, (mixed + value_heads) * HEAD
    load, store = octet.load("f32"), octet.store("f32")

    @device
    def older(w, old):
        """What the three rows before add to the convolution; in conv_split's order, so that both give the same bits."""
        return tuple(ptx.fma(old[2][j], w[2][j], ptx.fma(old[1][j], w[1][j], old[0][j] * w[0][j])) for j in static_range(8))

    @device
    def convolve(shared, projected, weight, decay, dt_bias, norm, window, pending, k, v, beta, g, path, slot, first, rows,
                 before, now, accepted, n):
        """Half a warp makes one of the new row's q, k, v and z; `own`: those of them that the block keeps."""
        part, i = u32((ptx.thread_x() - STATE_THREADS) // OCTETS), u32(ptx.lane() % OCTETS)
        head = ptx.select(part < V_NEW, u32(part * key_heads + n // share), u32(2 * key_heads + n))
        own = u32(part == V_NEW) | u32(part < V_NEW) & u32(n % share == 0)
        column, beyond = u32(head * OCTETS + i), ptx.select(part == Z, u32(value_heads * OCTETS), u32(0))
        w = tuple(load(weight, j * octets + column) for j in static_range(TAPS))
        old = tuple(plans.past(load, window, pending, path, slot, before, u32(accepted + j), octets, column, m)
                    for j in static_range(WINDOW))
        gain, rate, bias = load(norm, i), ptx.load_f32(decay + n * 4), ptx.load_f32(dt_bias + n * 4)
        y, new = older(w, old), w[3]
        if own != 0:
            for j in static_range(WINDOW):
                if rows == 0:
                    store(window, (slot * WINDOW + j) * octets + column, old[j])
                else:
                    store(pending, (now * (WINDOW + m) + j) * octets + column, old[j])
        ptx.wait_dependencies()
        if rows > 0:
            x = load(projected, first * row_octets + column + beyond)
            b, a = 0.0, 0.0
            for t in static_range(terms):
                at = projected + (first * columns + gates + t * 2 * value_heads + n) * 4
                b += ptx.read_f32(at)
                a += ptx.read_f32(at + value_heads * 4)
            y = tuple(ptx.select(part == Z, x[j], ptx.fma(x[j], new[j], y[j])) for j in static_range(8))
            y = tuple(silu(y[j]) for j in static_range(8))
            unit = ptx.rsqrt(reduce.half_warp_sum(octet.squares(y)) + EPS)
            factor = ptx.select(part == Q, unit * SCALE, ptx.select(part == K_NEW, unit, f32(1.0)))
            y = tuple(y[j] * ptx.select(part == Z, gain[j], factor) for j in static_range(8))
            to = u32(shared + part * VECTOR + i * 32)
            ptx.store_shared_f32x4(to, (y[0], y[1], y[2], y[3]))
            ptx.store_shared_f32x4(u32(to + 16), (y[4], y[5], y[6], y[7]))
            fresh, gone = sigmoid(b), rate * softplus(a + bias)
            if part == Z and i == 0:
                ptx.store_shared_f32x2(u32(shared + BETA_AT), (fresh, power(gone)))
            ptx.arrive_named(READY, THREADS)                          # what nobody waits for comes after
            row = u32(now * m)
            if own != 0:
                store(pending, (now * (WINDOW + m) + WINDOW) * octets + column, x)
                if part == V_NEW:
                    store(v + (row * value_heads + n) * (HEAD * 4), i, y)
                if part == K_NEW:
                    store(k + (row * key_heads + n // share) * (HEAD * 4), i, y)
            if part == Z and i == 0:
                ptx.store_f32(beta + (row * value_heads + n) * 4, fresh)
                ptx.store_f32(g + (row * value_heads + n) * 4, gone)

    @device
    def caught_up(S, k, v, beta, g, path, before, accepted, n, warp):
        """The warp's columns of S, the accepted rows replayed; written back if there are any."""
        lane = ptx.lane()
        state = load_state(S)
        for j in range(accepted):
            row = u32(before * m + ptx.shuffle_idx(path, j))
            one = row * value_heads + n
            mine = ptx.read_f32x4(v + (one * HEAD + warp * COLUMNS + lane % 4 * 4) * 4)
            key = k + (row * key_heads + n // share) * (HEAD * 4)
            fresh, keep = ptx.read_f32(beta + one * 4), power(ptx.read_f32(g + one * 4))
            p = summed(product(state, vector(key)))
            d = tuple(fresh * (mine[c] - keep * p[c]) for c in static_range(4))
            ptx.warp_barrier()                                        # the assembler shall read it again, from L1, and
            again = vector(key)                                       # not keep it meanwhile: REGISTERS
            state = tuple(stepped(state[i], keep, again[i], d) for i in static_range(16))
        if accepted > 0:
            store_state(S, state)
        return state

    @device
    def seen(shared, state, out, first, n, warp, eps):
        """The new row's output in the warp's columns: o = e^g S^T q + (q . k) d, as all of the head's columns norm it."""
        lane = ptx.lane()
        ptx.barrier_named(READY, THREADS)
        same, p, r = 0.0, (0.0,) * 4, (0.0,) * 4
        at = u32(shared + lane // 4 * 16)
        for i in static_range(4):
            key = ptx.shared_f32x4(u32(at + (K_NEW * VECTOR + i * 128)))
            query = ptx.shared_f32x4(u32(at + (Q * VECTOR + i * 128)))
            for j in static_range(4):
                p, r = plus(key[j], state[4 * i + j], p), plus(query[j], state[4 * i + j], r)
                same = ptx.fma(query[j], key[j], same)
        for step in static_range(3):
            same += ptx.shuffle_xor_f32(same, 4 << step)
        # lane 4 down + over gets column 4 over + down % 4 of S^T k (down < 4) or of S^T q, and the other from its partner
        one = scattered(p + r)
        other = ptx.shuffle_xor_f32(one, 16)
        one, other = ptx.select(lane < 16, one, other), ptx.select(lane < 16, other, one)
        column = u32(warp * COLUMNS + lane % 4 * 4 + lane // 4 % 4)
        b, keep = ptx.shared_f32x2(u32(shared + BETA_AT))
        d = b * (ptx.shared_f32(u32(shared + V_NEW * VECTOR + column * 4)) - keep * one)
        o = ptx.fma(same, d, keep * other)
        total = o * o
        for step in static_range(4):
            total += ptx.shuffle_xor_f32(total, 8 >> step)
        if lane == 0:
            ptx.store_shared_f32(u32(shared + SUMS_AT + warp * 4), total)
        ptx.barrier_named(SQUARES, STATE_THREADS)
        s, t = ptx.shared_f32x4(u32(shared + SUMS_AT)), ptx.shared_f32x4(u32(shared + SUMS_AT + 16))
        total = ((s[0] + s[1]) + (s[2] + s[3])) + ((t[0] + t[1]) + (t[2] + t[3]))
        o = o * ptx.rsqrt(total * (1.0 / HEAD) + eps) * ptx.shared_f32(u32(shared + Z * VECTOR + column * 4))
        at = (first * value_heads + n) * HEAD + column
        if lane < 16:
            if out_format == "f16":
                ptx.store_u16(out + at * 2, ptx.f16(o))
            else:
                ptx.store_f32(out + at * 4, o)

    @kernel(threads=THREADS)
    def delta_decode(S: u64, projected: u64, weight: u64, decay: u64, dt_bias: u64, norm: u64, plan: u64, window: u64,
                     pending: u64, k: u64, v: u64, beta: u64, g: u64, out: u64, eps: f32):
        lane, warp, n, sequence = ptx.lane(), u32(ptx.thread_x() // 32), ptx.block_x(), ptx.block_y()
        shared = ptx.shared_address(cuda.shared.array(SHARED // 4, f32))
        slot, first, rows, before, now, accepted = plans.read(plan, sequence, width)
        path = plans.path(plan, sequence, width)
        ptx.launch_dependents()
        if rows == 0 and before == NONE:
            ptx.wait_dependencies()
        elif warp < WARPS:
            here = S + ((slot * value_heads + n) * (HEAD * HEAD) + warp * COLUMNS) * 4 + offset(lane)
            state = caught_up(here, k, v, beta, g, path, before, accepted, n, warp)
            ptx.wait_dependencies()
            if rows > 0:
                seen(shared, state, out, first, n, warp, eps)
        else:
            convolve(shared, projected, weight, decay, dt_bias, norm, window, pending, k, v, beta, g, path, slot, first,
                     rows, before, now, accepted, n)
    return delta_decode


def launch(stream, S, projected, weight, decay, dt_bias, norm, plan, window, pending, k, v, beta, g, out, eps, terms=1):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    m = plans.check(plan, None, 1, pending, k=k, v=v, beta=beta, g=g)
    (tokens, columns), entries, Nk, Nv = projected.shape, k.shape[0], k.shape[2], v.shape[2]
    if Nv % Nk:
        raise ValueError(f"v has {Nv} heads, wanted a multiple of the {Nk} of k")
    C = (2 * Nk + Nv) * HEAD
    least = C + Nv * HEAD + 2 * Nv * terms
    if terms < 1 or columns % 8 or columns < least:
        raise ValueError(f"projected has {columns} columns; {Nk} key and {Nv} value heads with gates in {terms} terms want "
                         f"a multiple of 8 from {least} on")
    for name, array, shape in (
            ("S", S, (S.shape[0], Nv, HEAD, HEAD)), ("weight", weight, (TAPS, C)), ("decay", decay, (Nv,)),
            ("dt_bias", dt_bias, (Nv,)), ("norm", norm, (HEAD,)), ("window", window, (S.shape[0], WINDOW, C)),
            ("pending", pending, (entries, WINDOW + m, C)), ("k", k, (entries, m, Nk, HEAD)),
            ("v", v, (entries, m, Nv, HEAD)), ("beta", beta, (entries, m, Nv)), ("g", g, (entries, m, Nv)),
            ("out", out, (tokens, Nv, HEAD))):
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(array.shape)}")
        if name != "out":
            format_of(name, array, "f32")
    format_of("projected", projected, "f32")
    made = build(Nk, Nv, columns, m, terms, format_of("out", out, "f16", "f32"))
    if plan.shape[0]:
        stream.launch(made, (Nv, plan.shape[0], 1), S, projected, weight, decay, dt_bias, norm, plan, window, pending, k, v,
                      beta, g, out, eps)


CASES = (
    dict(new=(1,), accepted=(1,)),                                     # 27B
    dict(new=(1, 0, 1, 1, 0, 0), accepted=(1, 2, None, 0, 0, None), key_heads=2, value_heads=6, out="f32"),
    # nano: a step, a settle, a start, a dropped tree, its settle, padding
    dict(new=(1, 1), accepted=(3, 12), key_heads=1, value_heads=3, terms=3, padding=8),     # behind trees
    dict(new=(1,), accepted=(32,), key_heads=1, value_heads=1, m=32, out="f32"),
    dict(new=(), accepted=(), key_heads=1, value_heads=1),
)


def make(rng, new=(1,), accepted=(1,), key_heads=16, value_heads=48, m=16, terms=1, padding=0, out="f16"):
    """Named random arguments: sequences of new[r] rows that accepted so many of their last (None: they had none)."""
    Nk, Nv, C, tokens, entries = key_heads, value_heads, (2 * key_heads + value_heads) * HEAD, sum(new), 2 * len(new)
    plan, _ = plans.random(rng, new, accepted, m)
    normal = lambda *shape, scale=1.0: (rng.standard_normal(shape).clip(-2, 2) * scale).astype(np.float32)
    key = rng.standard_normal((entries, m, Nk, HEAD))
    x = normal(tokens, -(-(C + Nv * (HEAD + 2 * terms)) // 8) * 8 + padding)
    x[:, C + Nv * HEAD:] *= 2
    return dict(S=normal(len(new), Nv, HEAD, HEAD), projected=x, weight=normal(TAPS, C, scale=0.5),
                decay=-np.exp(rng.uniform(-3, -1, Nv)).astype(np.float32), dt_bias=normal(Nv),
                norm=rng.normal(0.9, 0.1, HEAD).astype(np.float32), plan=plan, window=normal(len(new), WINDOW, C),
                pending=normal(entries, WINDOW + m, C), v=normal(entries, m, Nv, HEAD),
                k=(key / np.linalg.norm(key, axis=-1, keepdims=True)).astype(np.float32),
                beta=rng.uniform(0, 1, (entries, m, Nv)).astype(np.float32),
                g=-rng.exponential(0.3, (entries, m, Nv)).astype(np.float32),
                out=np.empty((tokens, Nv, HEAD), {"f16": np.float16, "f32": np.float32}[out]), eps=1e-6, terms=terms)


def cost(new=(1,), accepted=(1,), key_heads=16, value_heads=48, m=16, terms=1, padding=0, out="f16"):
    """Bytes that must move, and float operations: S in, and out if it changes; a row of projected in, the pools' out."""
    C, rows, taken = (2 * key_heads + value_heads) * HEAD, sum(new), sum(a or 0 for a in accepted)
    states = sum(2 if a else 1 if n else 0 for n, a in zip(new, accepted))
    vectors = rows * (8 * C + value_heads * HEAD) + rows * C + taken * C + (TAPS * C if rows else 0)
    elements = value_heads * HEAD * HEAD
    return dict(bytes=4 * (states * elements + vectors) + rows * value_heads * HEAD * {"f16": 2, "f32": 4}[out],
                flops=(4 * rows + 6 * taken) * elements + rows * C * 16)
