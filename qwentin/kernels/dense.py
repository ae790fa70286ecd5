"""dense: a matrix of 16-bit weights times 1 to 32 rows of activations; what is not packed, on tensor cores.

    out[m, column + n] = sum over k of x[m, k] * w[n, k]

    w    f16 or bf16 (u16) [N, K]       K a multiple of 128
    x    as w [M, K]                    M <= 32
    out  f32, f16 or bf16 (u16) [M, W]  columns column .. column + N - 1 are written

A block takes 16 outputs; its 16 warps share K, 128 inputs a turn, and add their sums up in shared memory, in order. A lane
loads 16 bytes of a weight row at a time, which are 8 neighbouring inputs where mma m16n8k16 wants two pairs a k-step: so
k-step s of 32 inputs takes inputs 4s .. 4s + 3 of each 8, and activations, loaded the same way, agree:

    lane 4g + t    rows g and g + 8, inputs 8t .. 8t + 7;     words 2s, 2s + 1 of its 16 bytes are k-step s

Who uses it: checkpoints that are not packed, and of packed ones the few small matrices that stay 16-bit. A row's result
does not depend on how many rows go with it.
"""
import functools

import numpy as np
from numba import cuda
from numba.cuda import types

from . import ptx
from .build import kernel
from .octet import format_of
from .parity import Output, real
from .ptx import u16, u32, u64
from .unroll import static_range

WARPS = 16                    # 27B: two or three turns each, whose loads are all under way at once
THREADS = 32 * WARPS
TURN = 128                    # inputs of a warp's turn: up to eight 16-byte loads of weights in flight
ROWS = 16                     # outputs of a block
MAX_ROWS = 32
REGISTERS = 128             # what 512 threads may have
SASS = {"sm_90a": ("HMMA.16816.F32", "LDG.E.128"), "sm_120a": ("HMMA.16816.F32", "LDG.E.128")}
# Products are exact; an mma truncates a sum by 2^-23 of it, K / 16 of them and 8 more. In make's units sums are about
# sqrt(K): 2^-23 sqrt(K / 16) sqrt(K) = 2^-14 at K = 17408, which 2^-11 is eight times.
OUTPUTS = {"out": Output(rtol=2.0 ** -20, atol=2.0 ** -11)}


def ref(w, x, column, out):
    """The sum in float64; other columns as they were."""
    want = real(out)
    want[:, column:column + len(w)] = real(x) @ real(w).T
    return dict(out=want)


@functools.cache
def build(row_groups, format, out_format):
    """The kernel for up to 8 * row_groups rows."""
    mma = ptx.mma_f16 if format == "f16" else ptx.mma_bf16
    size = 128 * row_groups                                       # sums of a warp
    flight = 4 // row_groups                                      # k-steps whose weights are loaded at once

    @kernel(threads=THREADS, shared=WARPS * size * 4)
    def dense(w: u64, x: u64, out: u64, rows: u32, n: u32, k: u32, width: u32, column: u32):
        lane, warp, first = ptx.lane(), u32(ptx.thread_x() // 32), u32(ptx.block_x() * ROWS)
        g, t = u32(lane // 4), u32(lane % 4)
        # rows of weights and activations that are not there repeat the last one; nothing of theirs is stored
        low, high = min(u32(first + g), u32(n - 1)), min(u32(first + g + 8), u32(n - 1))
        w_low, w_high = w + (u64(low) * k + t * 8) * 2, w + (u64(high) * k + t * 8) * 2
        x_at = tuple(u32((min(u32(8 * j + g), u32(rows - 1)) * k + t * 8) * 2) for j in static_range(row_groups))
        # what the first turns read is asked for while the kernel before ends
        mine = w + u64(min(u32(first + lane // 2), u32(n - 1))) * k * 2 + lane % 2 * 128
        ptx.launch_dependents()
        for turn in range(warp, k // TURN, WARPS):
            ptx.prefetch_l2(mine + turn * (TURN * 2))
        ptx.wait_dependencies()
        acc = ((0.0, 0.0, 0.0, 0.0),) * row_groups
        for turn in range(warp, k // TURN, WARPS):
            at = turn * (TURN * 2)
            for b in static_range(4):
                if b % flight == 0:
                    lows = tuple(ptx.load_x4(w_low + (at + (b + f) * 64)) for f in static_range(flight))
                    highs = tuple(ptx.load_x4(w_high + (at + (b + f) * 64)) for f in static_range(flight))
                xs = tuple(ptx.read_x4(x + u32(x_at[j] + (at + b * 64))) for j in static_range(row_groups))
                for s in static_range(2):
                    a = (lows[b % flight][2 * s], highs[b % flight][2 * s], lows[b % flight][2 * s + 1],
                         highs[b % flight][2 * s + 1])
                    acc = tuple(mma(a, (xs[j][2 * s], xs[j][2 * s + 1]), acc[j]) for j in static_range(row_groups))
        sums = ptx.shared_address(cuda.shared.array(0, types.uint8))
        for j in static_range(row_groups):
            for i in static_range(4):
                ptx.store_shared_f32(u32(sums + (warp * size + (4 * j + i) * 32 + lane) * 4), acc[j][i])
        ptx.barrier()
        for e in range(ptx.thread_x(), size, THREADS):
            total = 0.0
            for other in static_range(WARPS):
                total += ptx.shared_f32(u32(sums + (other * size + e) * 4))
            i = u32(e // 32)                                      # sum i % 4 of row group i / 4
            output = u32(first + e % 32 // 4 + i % 4 // 2 * 8)
            row = u32(i // 4 * 8 + e % 4 * 2 + i % 2)
            if output < n and row < rows:
                place = u64(row) * width + column + output
                if out_format == "f32":
                    ptx.store_f32(out + place * 4, total)
                elif out_format == "f16":
                    ptx.store_u16(out + place * 2, u16(ptx.f16x2(total, 0.0)))
                else:
                    ptx.store_u16(out + place * 2, u16(ptx.bf16x2(total, 0.0)))
    return dense


def launch(stream, w, x, column, out):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    (n, k), rows = w.shape, x.shape[0]
    if rows > MAX_ROWS or not n or not k or k % TURN:
        raise ValueError(f"dense takes up to {MAX_ROWS} rows, outputs, and a positive multiple of {TURN} inputs, "
                         f"got {rows} rows and w {tuple(w.shape)}")
    if tuple(x.shape) != (rows, k) or x.dtype != w.dtype:
        raise ValueError(f"x must be {w.dtype} {(rows, k)} as w is, got {x.dtype} {tuple(x.shape)}")
    if len(out.shape) != 2 or out.shape[0] != rows or not 0 <= column <= out.shape[1] - n:
        raise ValueError(f"out must be [{rows}, W] with {n} columns from {column} on, got {tuple(out.shape)}")
    groups = 1 if rows <= 8 else 2 if rows <= 16 else 4
    made = build(groups, format_of("w", w, "f16", "bf16"), format_of("out", out, "f32", "f16", "bf16"))
    if rows:
        stream.launch(made, -(-n // ROWS), w, x, out, rows, n, k, out.shape[1], column)


CASES = (
    dict(n=96, k=5120, column=16384, width=16480),                     # 27B: b and a of a linear layer
    dict(n=2060, k=256, rows=9, format="bf16", width=2064),            # nano's whole projection; ragged: 12 of 16 outputs
    dict(n=40, k=384, rows=32, out="f16"),
    dict(n=17, k=128, rows=3, out="bf16", column=5, width=23),
    dict(n=1, k=128),
    dict(n=16, k=128, rows=0),
)


def make(rng, n=96, k=5120, rows=1, format="f16", out="f32", column=0, width=None):
    """Normal weights and activations; formats by name. `out` has values, of which those outside the columns stay."""
    def values(*shape, format=format):
        x = rng.standard_normal(shape).astype(np.float32)
        return (x.view(np.uint32) >> 16).astype(np.uint16) if format == "bf16" else x.astype(
            np.float16 if format == "f16" else np.float32)
    return dict(w=values(n, k), x=values(rows, k), column=column, out=values(rows, width or n, format=out))


def cost(n=96, k=5120, rows=1, format="f16", out="f32", column=0, width=None):
    """Bytes that must move, and float operations."""
    return dict(bytes=2 * k * (n + rows) + rows * n * (4 if out == "f32" else 2) if rows else 0, flops=2 * rows * n * k)
