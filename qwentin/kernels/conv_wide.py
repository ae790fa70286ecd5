"""conv_wide: from the fused projection of one sequence's many rows to what the chunked delta rule takes; moves its window.

    mix        = projected's first C columns
    y[t, c]    = silu( sum over j of weight[j, c] * mix[t - 3 + j, c] ),  rows before the first: the window's
    q, k, v    = y's heads of 128:  q <- unit(q),  k <- unit(k),  unit(x) = x * rsqrt(sum(x^2) + 1e-6)
    beta       = sigmoid(b),  g = decay * softplus(a + dt_bias)
    window     = the last 3 rows of [window | mix]

    span       i32 [>= 2]                     device data: slot, rows; rows 0 to T
    projected  f32, bf16 or f16 [T, >= C + 128 Nv + 2 Nv terms]     a row, as the fused product leaves it; z is not touched:

                   | q: Nk heads | k: Nk heads | v: Nv heads | z: Nv heads | b: Nv | a: Nv | b | a | ... | padding |
                   |<--------------- C = mix --------------->|               |<---- terms times ---->|

    weight     f32 [4, C]                     taps, the current row's last
    decay      f32 [Nv]                       -exp(A_log)
    dt_bias    f32 [Nv]
    window     f32 [slots, 3, C]              in place, oldest row first
    q, k       f16 [T, Nk, 128]               units: q without its 128^-0.5, which would cost f16 three bits of exponent
    v          f16 [T, Nv, 128]
    beta, g    f32 [T, Nv]

Rows from `rows` on are left alone. A warp takes a head of a strip of rows, four channels a lane, with the three rows before
and the next four in registers; one more block of a strip takes the gates. Half precision, since what follows multiplies in
it: an eighth of bf16's error, and no value here comes near 65,504.

27B, 4096 rows in float32: 168 MB in, 84 MB out: 57 us of an H200's 4.4 TB/s; from 16 bits 38 us.
"""
import functools

import numpy as np

from . import octet, ptx, reduce
from .activation import sigmoid, silu, softplus
from .build import device, kernel
from .conv_split import EPS, GATE, HEAD, TAPS
from .octet import format_of
from .parity import Output, real
from .ptx import f32, u32, u64
from .unroll import static_range

WARPS = 4                                             # heads a block
STRIP = 32                                            # rows a block: the three before it are read again, 9 %, from L2
AHEAD = 4                                             # rows on their way while as many are worked on
WINDOW = TAPS - 1
BATCH = 4                                             # gates of a thread on their way at once
REGISTERS = 128                                       # 16 warps a multiprocessor: 32 KiB of float32 on their way
SASS = {chip: ("LDG.E", "STG.E.64", "MUFU.EX2", "MUFU.RSQ") for chip in ("sm_90a", "sm_120a")}
# As conv_split's V and K, before the one rounding to f16: y errs 2^-18 + 2^-19 |y|, a unit vector 2^-20 + 2^-18 of itself.
OUTPUTS = {"q": Output(rtol=2.0 ** -18, atol=2.0 ** -20), "k": Output(rtol=2.0 ** -18, atol=2.0 ** -20),
           "v": Output(rtol=2.0 ** -19, atol=2.0 ** -18), "beta": GATE, "g": GATE, "window": Output(exact=True)}


def ref(span, projected, weight, decay, dt_bias, window, terms):
    """The formulas in float64."""
    (slot, rows), (T, _), C, Nv = span[:2], projected.shape, weight.shape[1], len(decay)
    Nk = (C // HEAD - Nv) // 2
    x = real(projected[:rows])
    line = np.concatenate([window[slot], x[:, :C]])
    y = sum(line[j:j + rows] * real(weight[j]) for j in range(TAPS))
    y = (y / (1 + np.exp(-y))).reshape(rows, C // HEAD, HEAD)
    unit = y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6)
    b, a = x[:, C + Nv * HEAD:C + Nv * HEAD + 2 * Nv * terms].reshape(rows, terms, 2, Nv).sum(1).transpose(1, 0, 2)
    window[slot] = line[rows:]
    made = dict(q=unit[:, :Nk], k=unit[:, Nk:2 * Nk], v=y[:, 2 * Nk:], beta=1 / (1 + np.exp(-b)),
                g=decay * np.logaddexp(0, a + real(dt_bias)))
    return dict(window=window, **{name: np.concatenate([m, np.full((T - rows, *m.shape[1:]), np.nan)])
                                  for name, m in made.items()})


@functools.cache
def loads(format):
    """(bytes of an element, quad, one): device functions (address, index) -> four float32; (address) -> one."""
    PLAIN, two = format == "f32", octet.TWO.get(format, octet.widened)

    @device
    def quad(p, i):
        if PLAIN:
            return ptx.load_f32x4(p + i * 16)
        w = ptx.load_x2(p + i * 8)
        return two(w[0]) + two(w[1])

    @device
    def one(p):
        return ptx.load_f32(p) if PLAIN else two(u32(ptx.load_u16(p)))[0]
    return 4 if PLAIN else 2, quad, one


@functools.cache
def build(key_heads, value_heads, columns, format, terms):
    """The kernel for Nk and Nv heads, `columns` of projected, b and a in so many terms."""
    heads = 2 * key_heads + value_heads
    SIZE, quad, one = loads(format)
    blocks, gates = -(-heads // WARPS), (heads + value_heads) * HEAD         # blocks of heads; column of b
    row_quads, quads, row_bytes = columns // 4, heads * (HEAD // 4), columns * SIZE

    @device
    def gate(row, column):
        """The sum of a gate's terms."""
        total = f32(0.0)
        for t in static_range(terms):
            total += one(row + (column + t * 2 * value_heads) * SIZE)
        return total

    @device
    def gates_of(projected, decay, dt_bias, beta, g, first, stop):
        """beta and g of a strip's rows, by a block."""
        end = u32(stop * value_heads)
        for start in range(first * value_heads + ptx.thread_x(), end, BATCH * 32 * WARPS):
            at = tuple(min(u32(start + i * 32 * WARPS), end - 1) for i in static_range(BATCH))
            n = tuple(u32(at[i] % value_heads) for i in static_range(BATCH))
            row = tuple(projected + u64(u32(at[i] // value_heads)) * row_bytes for i in static_range(BATCH))
            b = tuple(gate(row[i], gates + n[i]) for i in static_range(BATCH))
            a = tuple(gate(row[i], gates + value_heads + n[i]) for i in static_range(BATCH))
            for i in static_range(BATCH):
                if start + i * 32 * WARPS < end:
                    size = softplus(a[i] + ptx.load_f32(dt_bias + n[i] * 4))
                    ptx.store_f32(beta + at[i] * 4, sigmoid(b[i]))
                    ptx.store_f32(g + at[i] * 4, ptx.load_f32(decay + n[i] * 4) * size)

    @device
    def move(window, projected, slot, rows, column, old):
        """The window after the last row, by the one warp that reads what it was."""
        for j in static_range(WINDOW):
            row = u32(rows + j)                                             # of [window | mix]
            x = old[j]
            if rows > 0:
                x = quad(projected, u64(u32(max(row, WINDOW) - WINDOW)) * row_quads + column)
                for i in static_range(j + 1, WINDOW):
                    x = tuple(ptx.select(row == i, old[i][c], x[c]) for c in static_range(4))
            ptx.store_f32x4(window + (u64(u32(slot * WINDOW + j)) * quads + column) * 16, x)

    @device
    def finished(w, x, a, b, c, normed):
        """Four channels of a row: the convolution, silu and, of q and k, the unit."""
        y = tuple(ptx.fma(x[j], w[3][j], ptx.fma(a[j], w[2][j], ptx.fma(b[j], w[1][j], c[j] * w[0][j])))
                  for j in static_range(4))
        y = tuple(silu(y[j]) for j in static_range(4))
        factor = f32(1.0)
        if normed:
            total = ptx.fma(y[3], y[3], ptx.fma(y[2], y[2], ptx.fma(y[1], y[1], y[0] * y[0])))
            factor = ptx.rsqrt(reduce.warp_sum(total) + EPS)
        return ptx.f16x2(y[0] * factor, y[1] * factor), ptx.f16x2(y[2] * factor, y[3] * factor)

    @kernel(threads=32 * WARPS, min_blocks=4)
    def conv_wide(span: u64, projected: u64, weight: u64, decay: u64, dt_bias: u64, window: u64, q: u64, k: u64, v: u64,
                  beta: u64, g: u64):
        ptx.launch_dependents()
        ptx.wait_dependencies()
        slot, rows = ptx.read_u32(span), ptx.read_u32(span + 4)
        first = u32(ptx.block_y() * STRIP)
        stop = min(u32(first + STRIP), rows)
        if first >= rows:
            return
        if ptx.block_x() == blocks:
            gates_of(projected, decay, dt_bias, beta, g, first, stop)
            return
        head = u32(ptx.block_x() * WARPS + ptx.thread_x() // 32)
        if head >= heads:
            return
        column = u32(head * (HEAD // 4) + ptx.lane())
        w = tuple(ptx.load_f32x4(weight + (j * quads + column) * 16) for j in static_range(TAPS))
        start = u64(first) * row_quads + column
        ahead = tuple(quad(projected, start + u64(min(u32(j), u32(stop - first - 1))) * row_quads)
                      for j in static_range(AHEAD))
        c, b, a = ahead[0], ahead[0], ahead[0]
        if first == 0:
            old = tuple(ptx.read_f32x4(window + (u64(u32(slot * WINDOW + j)) * quads + column) * 16)
                        for j in static_range(WINDOW))
            move(window, projected, slot, rows, column, old)
            c, b, a = old[0], old[1], old[2]
        if first > 0:
            before = projected + (start - u64(3 * row_quads)) * (4 * SIZE)
            c, b, a = quad(before, 0), quad(before, row_quads), quad(before, 2 * row_quads)
        normed = head < 2 * key_heads
        to, stride = q + head * (HEAD * 2), u64(key_heads * HEAD * 2)
        if head >= key_heads:
            to = k + (head - key_heads) * (HEAD * 2)
        if head >= 2 * key_heads:
            to, stride = v + (head - 2 * key_heads) * (HEAD * 2), u64(value_heads * HEAD * 2)
        to += u64(first) * stride + ptx.lane() * 8
        for row in range(first, stop, AHEAD):
            x = ahead
            ahead = tuple(quad(projected, u64(min(u32(row + AHEAD + j), u32(stop - 1))) * row_quads + column)
                          for j in static_range(AHEAD))
            line = (c, b, a) + x
            made = tuple(finished(w, line[j + 3], line[j + 2], line[j + 1], line[j], normed) for j in static_range(AHEAD))
            c, b, a = line[AHEAD], line[AHEAD + 1], line[AHEAD + 2]
            for j in static_range(AHEAD):
                if row + j < stop:
                    ptx.store_x2(to, made[j])
                to += stride
    return conv_wide


def launch(stream, span, projected, weight, decay, dt_bias, window, q, k, v, beta, g, terms=1):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    (T, columns), Nk, Nv = projected.shape, q.shape[1], v.shape[1]
    C = (2 * Nk + Nv) * HEAD
    least = C + Nv * HEAD + 2 * Nv * terms
    if columns % 4 or columns < least or terms < 1:
        raise ValueError(f"projected has {columns} columns; {Nk} key and {Nv} value heads with {terms} terms want a "
                         f"multiple of 4 from {least} on")
    if span.dtype != np.int32 or len(span.shape) != 1 or span.shape[0] < 2:
        raise ValueError(f"span must be int32 [slot, rows, ...], got {span.dtype} {tuple(span.shape)}")
    for name, array, format, shape in (
            ("weight", weight, "f32", (TAPS, C)), ("decay", decay, "f32", (Nv,)), ("dt_bias", dt_bias, "f32", (Nv,)),
            ("window", window, "f32", (window.shape[0], WINDOW, C)), ("q", q, "f16", (T, Nk, HEAD)),
            ("k", k, "f16", (T, Nk, HEAD)), ("v", v, "f16", (T, Nv, HEAD)), ("beta", beta, "f32", (T, Nv)),
            ("g", g, "f32", (T, Nv))):
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(array.shape)}")
        format_of(name, array, format)
    made = build(Nk, Nv, columns, format_of("projected", projected, "f32", "bf16", "f16"), terms)
    if T:
        stream.launch(made, (-(-(2 * Nk + Nv) // WARPS) + 1, -(-T // STRIP), 1), span, projected, weight, decay, dt_bias,
                      window, q, k, v, beta, g)


CASES = (
    dict(rows=1, terms=3),                                             # 27B
    dict(rows=65, room=100, key_heads=2, value_heads=6),               # nano, a bucket larger than the rows; three strips
    dict(rows=34, key_heads=1, value_heads=3, projected="f16", padding=4),
    dict(rows=2, key_heads=1, value_heads=1, projected="bf16", scale=1e-4),           # where the 1e-6 counts
    dict(rows=0, room=1, key_heads=1, value_heads=1),
    dict(rows=0, key_heads=1, value_heads=1),
)


def make(rng, rows=1, room=0, key_heads=16, value_heads=48, projected="f32", padding=0, scale=1.0, terms=1):
    """Named random arguments: so many rows of T = max(rows, room); formats by name."""
    Nk, Nv, C, T = key_heads, value_heads, (2 * key_heads + value_heads) * HEAD, max(rows, room)
    normal = lambda *shape, scale=1.0: (rng.standard_normal(shape).clip(-2, 2) * scale).astype(np.float32)
    x = normal(T, -(-(C + Nv * (HEAD + 2 * terms)) // 8) * 8 + padding)
    x[:, :C] *= scale
    x[:, C + Nv * HEAD:] *= 16 / terms                                 # both tails of sigmoid and softplus
    x = x.astype(np.float16) if projected == "f16" else (x.view(np.uint32) >> 16).astype(np.uint16) \
        if projected == "bf16" else x
    half, single = (lambda *shape: np.empty(shape, np.float16)), (lambda *shape: np.empty(shape, np.float32))
    return dict(span=np.array([1, rows], np.int32), projected=x, weight=normal(TAPS, C, scale=0.5),
                decay=-np.exp(rng.uniform(-3, 3, Nv)).astype(np.float32), dt_bias=normal(Nv, scale=2.0),
                window=normal(2, WINDOW, C, scale=scale), q=half(T, Nk, HEAD), k=half(T, Nk, HEAD), v=half(T, Nv, HEAD),
                beta=single(T, Nv), g=single(T, Nv), terms=terms)


def cost(rows=1, room=0, key_heads=16, value_heads=48, projected="f32", padding=0, scale=1.0, terms=1):
    """Bytes that must move, and float operations."""
    C, size = (2 * key_heads + value_heads) * HEAD, 4 if projected == "f32" else 2
    gates = value_heads * (2 * terms * size + 8)
    return dict(bytes=rows * (C * (size + 2) + gates) + (24 + TAPS * 4) * C if rows else 0, flops=rows * C * 16)
