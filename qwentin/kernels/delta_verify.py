"""delta_verify: the gated delta rule of one round: the rows accepted last time, then the new rows, a chain or a tree.

    step(S; k, v, beta, g):  S <- e^g S;  d = beta (v - S^T k);  S <- S + k d^T              (arXiv 2412.06464, eq. 10)

    S        <- step(... step(S; row path[0] of entry `before`) ...; row path[accepted - 1])
    out[t]    = S_t^T q[t],  S_t = step(S_parent(t); row t - first of entry `now`),  S_-1 = S          never stored

    S        f32 [slots, Nv, 128, 128]        in place; [dk, dv] a head
    q        f32 [T, Nk, 128]                 scaled; value head n uses key head n // (Nv / Nk)
    k, v     f32 [E, M, Nk, 128], f32 [E, M, Nv, 128]
    beta, g  f32 [E, M, Nv]                   conv_split put the new rows there, where the next round finds them
    plan, parents                             plan.py
    out      f32 [T, Nv, 128]
    rows     the most new rows of a sequence: 0 to M; the plan has none with more

The columns of S do not know of each other, so a warp keeps 16 of them in registers (delta_state.py), reads them once,
replays, writes them once (not at all if nothing was accepted), and goes on with what it holds. Two shapes:

    one row      a head is 8 blocks of one warp; the new row follows the accepted ones (the tower runs delta_decode)
    several      a head is 4 blocks of two warps, which share the products of the rows in shared memory (delta_tree.py)

Float32 and fma throughout. Tensor cores would have to take S apart into three tf32 products, no faster than fma on an
RTX 5090 and little so on an H200. 27B: 2 * 3 MiB of S a sequence, 1.4 us at 4.6 TB/s, 3.5 us at 1.8; an accepted row
costs 3 fma an element of S, a new one 2, where 51 (H200) and 230 (RTX 5090) take as long as the memory.
"""
import functools

import numpy as np
from numba import cuda
from numba.cuda import types

from . import delta_tree, plan as plans, ptx
from .build import device, kernel
from .delta_state import COLUMNS, HEAD, load_state, offset, replayed, seen_by, store_state, vector
from .parity import Output
from .ptx import u32, u64
from .unroll import static_range

SHAPES = (1, 8, 16, 32)   # rows that a build has room for
NONE, HEADER = plans.NONE, plans.HEADER
REGISTERS = 255           # S alone is 64. A quarter of an SM holds two warps of 255; 8 warps keep 64 KiB in flight
SASS = {chip: ("LDG.E.128", "STG.E.128", "FFMA", "MUFU.EX2") for chip in ("sm_90a", "sm_120a")}
# u = 2^-24; in CASES |S| < 5, |v| < 5, |k| = 1, beta < 1. A row costs an element of S: 5 |S| u by e^g (ex2 errs 4 u,
# its argument 1), 2 |S| u by the two roundings of the update, and k d's error: partial sums of the product stay near 1,
# 19 roundings of independent signs add up to 8 u at 4.5 sigma, times |k_i| < 0.4. That is 40 u; a later row multiplies
# it by e^g, 0.77 on average, so all rows before cost 4.4 times as much: 176 u < 2^-16. An output sums 128 of those
# errors, of independent signs, with the weights of q, whose norm is 128^-0.5: an eighth suffices.
OUTPUTS = {"S": Output(atol=2.0 ** -16), "out": Output(atol=2.0 ** -19)}


def ref(S, q, k, v, beta, g, plan, parents):
    """Row by row in float64, every row of a tree with a state of its own."""
    heads = S.shape[1]
    q, k = (np.repeat(x, heads // x.shape[-2], -2).astype(np.float64) for x in (q, k))
    S, out = S.astype(np.float64), np.full((len(q), heads, HEAD), np.nan)

    def step(S, entry, row):
        S = S * np.exp(g[entry, row].astype(np.float64))[:, None, None]
        d = beta[entry, row][:, None] * (v[entry, row] - np.einsum("hkv,hk->hv", S, k[entry, row]))
        return S + np.einsum("hk,hv->hkv", k[entry, row], d)
    for slot, first, rows, before, now, accepted, _, _, *path in plan:
        for row in path[:accepted]:
            S[slot] = step(S[slot], before, row)
        states = {-1: S[slot]}
        for i in range(rows):
            states[i] = step(states[parents[first + i]], now, i)
            out[first + i] = np.einsum("hkv,hk->hv", states[i], q[first + i])
    return dict(S=S, out=out)


@functools.cache
def build(key_heads, value_heads, m, room):
    """The kernel for Nk and Nv heads, M = m rows an entry, up to `room` new rows a sequence."""
    warps, width, share = 1 if room == 1 else delta_tree.WARPS, HEADER + m, value_heads // key_heads
    blocks, half = HEAD // (COLUMNS * warps), room // 2                 # blocks a head
    stage, ancestry, couple, project, solve = delta_tree.phases(max(room, 8))

    @device
    def row_of(k, v, beta, g, row, head, column):
        """(k, v, beta, g) of a row of the pools, the lane's share."""
        one = row * value_heads + head
        return (vector(k + (row * key_heads + head // share) * (HEAD * 4)),
                ptx.read_f32x4(v + (one * HEAD + column + ptx.lane() % 4 * 4) * 4),
                ptx.read_f32(beta + one * 4), ptx.read_f32(g + one * 4))

    @device
    def nth(path, j, before, accepted, last):
        """Which row of the pools comes j-th: the accepted ones, then `last`."""
        return ptx.select(j < accepted, u32(before * m + ptx.shuffle_idx(path, j % 32)), last)

    @kernel(threads=32 * warps, shared=0 if room == 1 else delta_tree.shared_bytes(room))
    def delta_verify(S: u64, q: u64, k: u64, v: u64, beta: u64, g: u64, plan: u64, parents: u64, out: u64):
        lane, warp, sequence = ptx.lane(), u32(ptx.thread_x() // 32), ptx.block_y()
        head, column = u32(ptx.block_x() // blocks), u32((ptx.block_x() % blocks * warps + warp) * COLUMNS)
        slot, first, rows, before, now, accepted = plans.read(plan, sequence, width)
        path, zero = plans.path(plan, sequence, width), u32(now * m)    # zero: row 0 of entry `now` in the pools
        ptx.launch_dependents()
        if rows + accepted == 0:
            ptx.wait_dependencies()
        if rows + accepted > 0:
            here = S + ((slot * value_heads + head) * (HEAD * HEAD) + column) * 4 + offset(lane)
            state = load_state(here)                    # nothing before in this round writes it
            ptx.wait_dependencies()
            k_new = k + (zero * key_heads + head // share) * (HEAD * 4)
            q_new = q + (first * key_heads + head // share) * (HEAD * 4)
            query = (0.0,) * 16
            if room == 1 and rows > 0:
                query = vector(q_new)
            if room > 1:
                shared = ptx.shared_address(cuda.shared.array(0, types.uint8))
                if rows > 0:
                    stage(shared, k_new, q_new, key_heads * (HEAD * 4), rows)
            # The accepted rows, then the first new one (if there is none, the last of them once more): two rows are on
            # their way while one is used.
            last = ptx.select(rows > 0, zero, u32(before * m + ptx.shuffle_idx(path, u32(accepted - 1) % 32)))
            old = row_of(k, v, beta, g, nth(path, 0, before, accepted, last), head, column)
            ahead = row_of(k, v, beta, g, nth(path, 1, before, accepted, last), head, column)
            for j in range(accepted):
                state = replayed(state, old[0], old[1], old[2], old[3])
                old = ahead
                ahead = row_of(k, v, beta, g, nth(path, u32(j + 2), before, accepted, last), head, column)
            if accepted > 0:
                store_state(here, state)
            to = out + ((first * value_heads + head) * HEAD + column) * 4
            if room == 1 and rows > 0:
                o = seen_by(state, query, old[0], old[1], old[2], old[3])
                if lane < 4:
                    ptx.store_f32x4(to + lane * 16, o)
            if room > 1 and rows > 0:
                parent, b, y = u32(NONE), 0.0, 0.0                      # of row `lane`
                if lane < rows:
                    one = ((zero + lane) * value_heads + head) * 4
                    parent = ptx.read_u32(parents + (first + lane) * 4)
                    b, y = ptx.read_f32(beta + one), ptx.read_f32(g + one)
                mask, y = ancestry(parent, y)
                v_new = v + ((zero * value_heads + head) * HEAD + column + lane % 16) * 4
                values = tuple(ptx.read_f32(v_new + min(u32(2 * i + lane // 16), rows - 1) * (value_heads * HEAD * 4))
                               for i in static_range(half))
                ptx.copy_wait_all()
                ptx.barrier()
                couple(shared, mask, y, b)
                ptx.barrier()
                project(shared, state, warp, rows)
                x = solve(shared, warp, rows, y, b, values)
                for i in static_range(half):
                    row = u32(2 * i + lane // 16)
                    if row < rows:
                        ptx.store_f32(to + row * (value_heads * HEAD * 4) + lane % 16 * 4, x[i // 4][1][i % 4])
    return delta_verify


def launch(stream, S, q, k, v, beta, g, plan, parents, out, rows):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    m = plans.check(plan, parents, rows, k=k, v=v, beta=beta, g=g)
    tokens, entries, Nk, Nv = parents.shape[0], k.shape[0], k.shape[2], v.shape[2]
    if Nv % Nk:
        raise ValueError(f"v has {Nv} heads, wanted a multiple of the {Nk} of k")
    for name, array, shape in (
            ("S", S, (S.shape[0], Nv, HEAD, HEAD)), ("q", q, (tokens, Nk, HEAD)), ("k", k, (entries, m, Nk, HEAD)),
            ("v", v, (entries, m, Nv, HEAD)), ("beta", beta, (entries, m, Nv)), ("g", g, (entries, m, Nv)),
            ("out", out, (tokens, Nv, HEAD))):
        if array.dtype != np.float32 or tuple(array.shape) != shape:
            raise ValueError(f"{name} must be float32 {shape}, got {array.dtype} {tuple(array.shape)}")
    room = next(shape for shape in SHAPES if shape >= rows)
    if plan.shape[0]:
        blocks = HEAD // (COLUMNS * (1 if room == 1 else delta_tree.WARPS))
        stream.launch(build(Nk, Nv, m, room), (Nv * blocks, plan.shape[0], 1), S, q, k, v, beta, g, plan, parents, out)


CASES = (
    dict(new=(1,), accepted=(1,)),                                     # 27B, plain decode
    dict(new=(1, 0, 1, 1), accepted=(3, 2, 0, 1), key_heads=2, value_heads=6),        # nano: replays, a flush, a start
    dict(new=(6, 8, 0, 0), accepted=(2, 0, 0, 4), key_heads=2, value_heads=6),        # trees, padding, a flush
    dict(new=(7,), accepted=(3,), key_heads=2, value_heads=6, decay=60.0),            # e^g underflows, e^-g overflows
    dict(new=(11, 16), accepted=(5, 0), key_heads=2, value_heads=6),
    dict(new=(32, 17), accepted=(9, 32), key_heads=2, value_heads=6, m=32),
    dict(new=(0,), accepted=(0,), key_heads=2, value_heads=6),
    dict(new=(), accepted=(), key_heads=2, value_heads=6),
)


def make(rng, new=(1,), accepted=(1,), key_heads=16, value_heads=48, m=16, decay=0.3):
    """Named random arguments: sequences of new[r] rows that accepted so many of their last; -g averages `decay`."""
    entries, rows = 2 * len(new), sum(new)
    plan, parents = plans.random(rng, new, accepted, m)

    def unit(*shape):
        x = rng.standard_normal((*shape, HEAD))
        return x / np.linalg.norm(x, axis=-1, keepdims=True)
    values = dict(S=rng.standard_normal((len(new), value_heads, HEAD, HEAD)), q=unit(rows, key_heads) * HEAD ** -0.5,
                  k=unit(entries, m, key_heads), v=rng.standard_normal((entries, m, value_heads, HEAD)),
                  beta=rng.uniform(0, 1, (entries, m, value_heads)),
                  g=-rng.exponential(decay, (entries, m, value_heads)))
    return dict({name: x.astype(np.float32) for name, x in values.items()}, plan=plan, parents=parents,
                out=np.empty((rows, value_heads, HEAD), np.float32), rows=max(new, default=0))


def cost(new=(1,), accepted=(1,), key_heads=16, value_heads=48, m=16, decay=0.3):
    """Bytes that must move, and float operations: S in, and out if it changes; a row's q, k, v in, its output out."""
    states = sum(2 if a else 1 if n else 0 for n, a in zip(new, accepted))
    vectors = sum(new) * (2 * key_heads + 2 * value_heads) + sum(accepted) * (key_heads + value_heads)
    element = 4 * sum(new) + 6 * sum(accepted)
    return dict(bytes=4 * HEAD * (states * value_heads * HEAD + vectors), flops=element * value_heads * HEAD * HEAD)
