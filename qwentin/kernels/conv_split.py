"""conv_split: from the fused projection of a gated DeltaNet to q, k, v, beta, g; keeps its window.

    mix        = projected's first C columns, rounded to the window's format
    y[t, c]    = silu( sum over j of weight[j, c] * tap_j ),  tap_3 = mix[t, c], tap_2 its parent's, and so on
    q, k, v    = y's heads of 128:  q <- unit(q) * 128^-0.5,  k <- unit(k),  unit(x) = x * rsqrt(sum(x^2) + 1e-6)
    beta       = sigmoid(b),  g = decay * softplus(a + dt_bias)
    past       = the last 3 rows of [past of the round before | its accepted rows], which are the taps before row -1

    projected  f32 or bf16 [T, >= C + 128 Nv + 2 Nv terms]    a row, as the fused product leaves it; z is not touched:

                   | q: Nk heads | k: Nk heads | v: Nv heads | z: Nv heads | b: Nv | a: Nv | b | a | ... | padding |
                   |<--------------- C = mix --------------->|               |<---- terms times ---->|

               b and a are sums of their terms: model/terms.py says why; 1 of weights that are not packed

    weight     f32 or bf16 [4, C]             taps, the current row's last
    decay      f32 [Nv]                       -exp(A_log)
    dt_bias    f32 [Nv]
    plan, parents                             plan.py
    window     bf16 or f32 [S, 3, C]          in place: a slot's past, oldest row first; read where there was no round
                                              before, written where there are no rows
    pending    as window [E, 3 + M, C]        in place: past, `mix` of the rows; entry `now` written, `before` read
    q          f32 [T, Nk, 128]
    k, v       f32 [E, M, Nk, 128], f32 [E, M, Nv, 128]    in place: entry `now` written
    beta, g    f32 [E, M, Nv]                 in place: entry `now` written
    rows       the most new rows of a sequence: 0 to M

One block takes two heads (256 channels) of a sequence: its warps share the rows, half a warp a head, an octet of channels
a lane. 27B: 40 blocks a sequence, of one warp for one row.
A decode row reads and writes 0.4 MB, 0.1 us of an H200's memory: launch and latency, not bandwidth, are its time.
"""
import functools

import numpy as np

from . import octet, plan as plans, ptx, reduce
from .activation import sigmoid, silu, softplus
from .build import device, kernel
from .octet import format_of
from .parity import Output, real
from .ptx import f32, u32, u64
from .unroll import static_range

HEAD = 128                                            # dk = dv
OCTETS = HEAD // 8                                    # lanes a head
TAPS = 4
NONE, HEADER, WINDOW = plans.NONE, plans.HEADER, plans.WINDOW
WARPS = 8                                             # a block, where a sequence has several rows
EPS = 1e-6                                            # the model's constant, added to the sum of squares
SCALE = HEAD ** -0.5
REGISTERS = 128                                       # four taps, four weights, three window rows: 88 floats
SASS = {"sm_90a": ("LDG.E.128", "STG.E.128", "MUFU.EX2", "MUFU.RSQ"),
        "sm_120a": ("LDG.E.128", "STG.E.128", "MUFU.EX2", "MUFU.RSQ")}
# u = 2^-24. Four products and three sums move y by at most 4 u sum |weight tap|, below 4 u * 8 in CASES (|weight| < 1,
# |tap| < 2); silu's slope is at most 1.1: atol 2^-18. With |y| < 8, e^-y errs 8 u by its rounded argument, 4 u by ex2,
# the reciprocal 4 u, the roundings 4 u: rtol 2^-19. A head's norm is above 4, its own error 8 u: unit vectors are four
# times nearer, q again 128^-0.5. Where all is small the error is small with it, and the norm's inverse below 1000.
V = Output(rtol=2.0 ** -19, atol=2.0 ** -18)
K, Q = (Output(rtol=2.0 ** -18, atol=a) for a in (2.0 ** -20, 2.0 ** -23))
# e^-|x| for x = b or a + dt_bias, |x| < 40: its argument is rounded to u |x| twice, so it errs 80 u of itself, and 80 u more
# by the sums of three terms; ex2, the reciprocal, the series behind softplus and the product with decay add less than 32 u.
GATE = Output(rtol=2.0 ** -16)
MOVED = Output(exact=True)
OUTPUTS = {"q": Q, "k": K, "v": V, "beta": GATE, "g": GATE, "window": MOVED, "pending": MOVED}


def ref(projected, weight, decay, dt_bias, plan, parents, window, pending, k, v, beta, g, terms):
    """The formulas in float64, a sequence, a row and its ancestors at a time; only `mix` is rounded."""
    (_, C), Nv, Nk = weight.shape, len(decay), k.shape[2]
    mix = projected[:, :C]
    if window.dtype != mix.dtype:
        bits = mix.view(np.uint32).astype(np.uint64) if mix.dtype == np.float32 else mix.astype(np.uint32) << 16
        mix = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16) if window.dtype == np.uint16 \
            else bits.view(np.float32)
    gates = real(projected[:, C + Nv * HEAD:C + Nv * HEAD + 2 * Nv * terms])
    b, a = gates.reshape(-1, terms, 2, Nv).sum(1).transpose(1, 0, 2)
    q, k, v, beta, g = np.full((len(parents), Nk, HEAD), np.nan), real(k), real(v), real(beta), real(g)
    for slot, first, rows, before, now, accepted, _, _, *path in plan:
        past = window[slot] if before < 0 else np.concatenate(
            [pending[before, :3], pending[before, [3 + p for p in path[:accepted]]]])[-3:]
        if rows:
            pending[now, :3] = past
        elif before >= 0:
            window[slot] = past
        for i, t in enumerate(range(first, first + rows)):
            pending[now, 3 + i], line, j = mix[t], [], i
            while j >= 0:
                line, j = [mix[first + j], *line], parents[first + j]
            y = (real(weight) * real(np.array([*past, *line][-TAPS:]))).sum(0)
            y = (y / (1 + np.exp(-y))).reshape(-1, HEAD)
            unit = y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6)
            q[t], k[now, i], v[now, i] = unit[:Nk] / np.sqrt(HEAD), unit[Nk:2 * Nk], y[2 * Nk:]
            beta[now, i], g[now, i] = 1 / (1 + np.exp(-b[t])), decay * np.logaddexp(0, a[t] + real(dt_bias))
    return dict(q=q, k=k, v=v, beta=beta, g=g, window=window, pending=pending)


@functools.cache
def build(key_heads, value_heads, columns, m, several, in_format, weight_format, window_format, terms):
    """The kernel for Nk and Nv heads, `columns` of projected, M = m rows an entry, one row a sequence or several, and b and
    a in so many terms."""
    warps, heads, width = WARPS if several else 1, 2 * key_heads + value_heads, HEADER + m
    octets, row_octets = heads * OCTETS, columns // 8                 # of mix, of projected
    gates = (heads + value_heads) * HEAD                              # column of b
    load, load_weight = octet.load(in_format), octet.load(weight_format)
    load_kept, keep, store = octet.load(window_format), octet.store(window_format), octet.store("f32")
    rounds = in_format != window_format and window_format == "bf16"

    @device
    def mix_at(projected, row, column):
        """An octet of mix, as the window would give it back."""
        x = load(projected, row * row_octets + column)
        if rounds:
            words = tuple(ptx.bf16x2(x[2 * j], x[2 * j + 1]) for j in static_range(4))
            x = octet.widened(words[0]) + octet.widened(words[1]) + octet.widened(words[2]) + octet.widened(words[3])
        return x

    @device
    def gate(projected, at):
        """The sum of a gate's terms."""
        total = f32(0.0)
        for t in static_range(terms):
            place = at + t * 2 * value_heads
            if in_format == "f32":
                total += ptx.read_f32(projected + place * 4)
            else:
                total += ptx.f32_bits(u32(u32(ptx.read_u16(projected + place * 2)) << 16))
        return total

    @kernel(threads=32 * warps, min_blocks=2)
    def conv_split(projected: u64, weight: u64, decay: u64, dt_bias: u64, plan: u64, parents: u64, window: u64,
                   pending: u64, q: u64, k: u64, v: u64, beta: u64, g: u64):
        lane, warp, sequence = ptx.lane(), u32(ptx.thread_x() // 32), ptx.block_y()
        slot, first, rows, before, now, accepted = plans.read(plan, sequence, width)
        path = plans.path(plan, sequence, width)
        mine = u32(2 * ptx.block_x() + lane // OCTETS)
        live = mine < heads                                           # a last odd head is repeated, not stored
        head = min(mine, heads - 1)
        column = u32(head * OCTETS + lane % OCTETS)
        ptx.launch_dependents()
        w = tuple(load_weight(weight, j * octets + column) for j in static_range(TAPS))
        ptx.wait_dependencies()
        if rows > 0 or before != NONE:
            old = tuple(plans.past(load_kept, window, pending, path, slot, before, u32(accepted + j), octets, column, m)
                        for j in static_range(WINDOW))
            if warp == 0 and live:
                for j in static_range(WINDOW):
                    if rows == 0:
                        keep(window, (slot * WINDOW + j) * octets + column, old[j])
                    else:
                        keep(pending, (now * (WINDOW + m) + j) * octets + column, old[j])
            parent = u32(NONE)
            if several and lane < rows:
                parent = ptx.read_u32(parents + (first + lane) * 4)
            for i in range(warp, rows, warps):
                one = ptx.shuffle_idx(parent, i)                      # the row's parent, its parent, and so on
                two = ptx.select(one == NONE, u32(NONE), ptx.shuffle_idx(parent, min(one, 31)))
                three = ptx.select(two == NONE, u32(NONE), ptx.shuffle_idx(parent, min(two, 31)))
                x = mix_at(projected, first + i, column)
                a, b, c = old[2], old[1], old[0]                      # one, two, three steps back
                if several and one != NONE:
                    a, b, c = mix_at(projected, first + one, column), old[2], old[1]
                if several and two != NONE:
                    b, c = mix_at(projected, first + two, column), old[2]
                if several and three != NONE:
                    c = mix_at(projected, first + three, column)
                y = tuple(ptx.fma(x[j], w[3][j], ptx.fma(a[j], w[2][j], ptx.fma(b[j], w[1][j], c[j] * w[0][j])))
                          for j in static_range(8))
                y = tuple(silu(y[j]) for j in static_range(8))
                unit = ptx.rsqrt(reduce.half_warp_sum(octet.squares(y)) + EPS)
                to, factor = q + ((first + i) * key_heads + head) * (HEAD * 4), unit * SCALE
                row = u32(now * m + i)
                if head >= key_heads:
                    to, factor = k + (row * key_heads + head - key_heads) * (HEAD * 4), unit
                if head >= 2 * key_heads:
                    to, factor = v + (row * value_heads + head - 2 * key_heads) * (HEAD * 4), 1.0
                if live:
                    keep(pending, (row + (now + 1) * WINDOW) * octets + column, x)
                    store(to, lane % OCTETS, tuple(y[j] * factor for j in static_range(8)))
                    if head >= 2 * key_heads and lane % OCTETS == 0:
                        n = u32(head - 2 * key_heads)
                        at = (first + i) * columns + gates + n
                        size = softplus(gate(projected, at + value_heads) + ptx.load_f32(dt_bias + n * 4))
                        ptx.store_f32(beta + (row * value_heads + n) * 4, sigmoid(gate(projected, at)))
                        ptx.store_f32(g + (row * value_heads + n) * 4, ptx.load_f32(decay + n * 4) * size)
    return conv_split


def launch(stream, projected, weight, decay, dt_bias, plan, parents, window, pending, q, k, v, beta, g, rows, terms=1):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    m = plans.check(plan, parents, rows, pending, k=k, v=v, beta=beta, g=g)
    (tokens, columns), entries, Nk, Nv = projected.shape, pending.shape[0], k.shape[2], v.shape[2]
    C = (2 * Nk + Nv) * HEAD
    least = C + Nv * HEAD + 2 * Nv * terms
    if columns % 8 or columns < least or terms < 1:
        raise ValueError(f"projected has {columns} columns; {Nk} key and {Nv} value heads with {terms} terms want a "
                         f"multiple of 8 from {least} on")
    for name, array, shape in (
            ("weight", weight, (TAPS, C)), ("decay", decay, (Nv,)), ("dt_bias", dt_bias, (Nv,)),
            ("parents", parents, (tokens,)), ("window", window, (window.shape[0], WINDOW, C)), ("q", q, (tokens, Nk, HEAD)),
            ("pending", pending, (entries, WINDOW + m, C)), ("k", k, (entries, m, Nk, HEAD)),
            ("v", v, (entries, m, Nv, HEAD)), ("beta", beta, (entries, m, Nv)), ("g", g, (entries, m, Nv))):
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(array.shape)}")
        if name not in ("weight", "parents", "window", "pending"):
            format_of(name, array, "f32")
    kept = format_of("window", window, "bf16", "f32")
    made = build(Nk, Nv, columns, m, rows > 1, format_of("projected", projected, "f32", "bf16"),
                 format_of("weight", weight, "f32", "bf16"), format_of("pending", pending, kept), terms)
    if plan.shape[0]:
        stream.launch(made, (-(-(2 * Nk + Nv) // 2), plan.shape[0], 1), projected, weight, decay, dt_bias, plan,
                      parents, window, pending, q, k, v, beta, g)


CASES = (
    dict(new=(1,), accepted=(1,), terms=3),                            # 27B, plain decode
    dict(new=(4, 1, 0, 0, 12), accepted=(2, 0, 3, None, None), key_heads=2, value_heads=6),     # nano: trees, settle, pad
    dict(new=(1, 1), accepted=(5, 1), key_heads=2, value_heads=6, projected="bf16", weight="bf16", padding=32),
    dict(new=(32,), accepted=(9,), key_heads=1, value_heads=3, m=32, window="f32"),       # ragged: five heads in pairs
    dict(new=(2,), accepted=(3,), key_heads=1, value_heads=1, scale=1e-4),                # where the 1e-6 counts
    dict(new=(0, 0), accepted=(1, 0), key_heads=1, value_heads=1),
    dict(new=(), accepted=(), key_heads=1, value_heads=1),
)


def make(rng, new=(1,), accepted=(1,), key_heads=16, value_heads=48, m=16, projected="f32", weight="f32", window="bf16",
         padding=0, scale=1.0, terms=1):
    """Named random arguments: sequences of new[r] rows that accepted so many of their last (None: they had none);
    formats by name."""
    def values(shape, format, scale):
        x = (rng.standard_normal(shape).clip(-2, 2) * scale).astype(np.float32)
        return (x.view(np.uint32) >> 16).astype(np.uint16) if format == "bf16" else x
    Nk, Nv, C, rows, entries = key_heads, value_heads, (2 * key_heads + value_heads) * HEAD, sum(new), 2 * len(new)
    plan, parents = plans.random(rng, new, accepted, m)
    x = rng.standard_normal((rows, -(-(C + Nv * (HEAD + 2 * terms)) // 8) * 8 + padding)).clip(-2, 2)
    x[:, :C] *= scale
    x[:, C + Nv * HEAD:] *= 16 / terms                                 # b and a: both tails of sigmoid and softplus
    x = x.astype(np.float32)
    return dict(projected=(x.view(np.uint32) >> 16).astype(np.uint16) if projected == "bf16" else x,
                weight=values((TAPS, C), weight, 0.5), decay=-np.exp(rng.uniform(-3, 3, Nv)).astype(np.float32),
                dt_bias=values(Nv, "f32", 2.0), plan=plan, parents=parents, q=np.empty((rows, Nk, HEAD), np.float32),
                window=values((len(new), WINDOW, C), window, scale), pending=values((entries, WINDOW + m, C), window, scale),
                k=values((entries, m, Nk, HEAD), "f32", 1.0), v=values((entries, m, Nv, HEAD), "f32", 1.0),
                beta=values((entries, m, Nv), "f32", 1.0), g=values((entries, m, Nv), "f32", 1.0),
                rows=max(new, default=0), terms=terms)


def cost(new=(1,), accepted=(1,), key_heads=16, value_heads=48, m=16, projected="f32", weight="f32", window="bf16",
         padding=0, scale=1.0, terms=1):
    """Bytes that must move, and float operations: rows in, q, k, v and pending out, windows in and out."""
    size, C, rows = {"bf16": 2, "f32": 4}, (2 * key_heads + value_heads) * HEAD, sum(new)
    moved = sum(2 * WINDOW * C * size[window] for n, a in zip(new, accepted) if n or a is not None)
    taps = TAPS * C * size[weight] if new else 0
    return dict(bytes=moved + taps + rows * C * (size[projected] + size[window] + 4), flops=rows * C * 16)
