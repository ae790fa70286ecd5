"""gated_norm: normalise each head of the delta rule's output and gate it, ready for the matrix after it.

    out[t, n] = o[t, n] * rsqrt(mean(o[t, n]^2) + eps) * weight * silu(z[t, n]),  silu(x) = x / (1 + e^-x)

    o          f32 or f16 [T, Nv, 128]
    projected  f32, bf16 or f16 [T, W]     z stands in columns `column` .. column + 128 Nv - 1; a multiple of 8, as W is
    weight     f32 [128]              as it is, near 1: not the offset norm of rmsnorm
    out        bf16, f16 or f32 [T, Nv, 128]

Half a warp takes a head of one row, an octet a lane; a block 8 heads, so 27B's 48 are 6 blocks a row. A row moves 61 KB
with z in float32 and out in bf16: launch and latency are its time.
"""
import functools

import numpy as np

from . import octet, ptx, reduce
from .activation import silu
from .build import kernel
from .octet import format_of
from .parity import Output, real
from .ptx import f32, u32, u64
from .unroll import static_range

HEAD = 128
OCTETS = HEAD // 8                                    # lanes a head
HEADS = 8                                             # a block
REGISTERS = 64
SASS = {"sm_90a": ("LDG.E.128", "STG.E.128", "MUFU.EX2", "MUFU.RSQ"),
        "sm_120a": ("LDG.E.128", "STG.E.128", "MUFU.EX2", "MUFU.RSQ")}
# The norm errs below 2^-20 and the gate below 2^-17 of itself, as in rmsnorm and swiglu; there are two more products.
# Beyond z = -87 the gate's reciprocal is flushed: 87 * 2^-126 of less than 128 is lost.
OUTPUTS = {"out": Output(rtol=2.0 ** -17 + 2.0 ** -19, atol=1e-33)}


def ref(o, projected, column, weight, eps):
    """The formula in float64; nothing is rounded."""
    z = projected[:, column:column + o.shape[1] * HEAD].reshape(o.shape)
    z, o = real(z), real(o)
    return dict(out=o / np.sqrt((o * o).mean(-1, keepdims=True) + eps) * weight * (z / (1 + np.exp(-z))))


@functools.cache
def build(heads, columns, column, o_format, z_format, out_format):
    """The kernel for Nv heads, W = columns of projected, z from `column` on."""
    load, load_z, store = octet.load(o_format), octet.load(z_format), octet.store(out_format)

    @kernel(threads=HEADS * OCTETS)
    def gated_norm(o: u64, projected: u64, weight: u64, out: u64, eps: f32):
        lane, row = ptx.thread_x() % OCTETS, ptx.block_y()
        mine = u32(ptx.block_x() * HEADS + ptx.thread_x() // OCTETS)
        head = min(mine, heads - 1)                                     # a ragged block's rest repeats the last head
        at = (row * heads + head) * OCTETS + lane
        ptx.launch_dependents()
        w = ptx.load_f32x4(weight + lane * 32) + ptx.load_f32x4(weight + lane * 32 + 16)
        ptx.wait_dependencies()
        x, z = load(o, at), load_z(projected, row * (columns // 8) + column // 8 + head * OCTETS + lane)
        scale = ptx.rsqrt(reduce.half_warp_sum(octet.squares(x)) * (1.0 / HEAD) + eps)
        if mine < heads:
            store(out, at, tuple(x[j] * scale * w[j] * silu(z[j]) for j in static_range(8)))
    return gated_norm


def launch(stream, o, projected, column, weight, out, eps):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    rows, heads = o.shape[:2]
    full = (rows, heads, HEAD)
    for name, array, shape in (("o", o, full), ("weight", weight, (HEAD,)), ("out", out, full)):
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(array.shape)}")
    columns = projected.shape[1]
    if projected.shape[0] != rows or columns % 8 or column % 8 or not 0 <= column <= columns - heads * HEAD:
        raise ValueError(f"projected must be [{rows}, W] and hold {heads * HEAD} columns from `column` on, both "
                         f"W and column multiples of 8, got {tuple(projected.shape)} and column {column}")
    format_of("weight", weight, "f32")
    made = build(heads, columns, column, format_of("o", o, "f32", "f16"),
                 format_of("projected", projected, "f32", "bf16", "f16"), format_of("out", out, "bf16", "f16", "f32"))
    if rows:
        stream.launch(made, (-(-heads // HEADS), rows, 1), o, projected, weight, out, eps)


CASES = (
    dict(rows=2),                                                      # 27B
    dict(rows=3, heads=6, column=1280, padding=16, projected="bf16", out="f16"),      # nano; ragged: 6 heads of 8
    dict(rows=1, heads=9, column=0, scale=60.0, out="f32"),            # far into both tails of the gate
    dict(rows=1, heads=1, column=8, padding=0),
    dict(rows=2, heads=3, column=0, o="f16", projected="f16", out="f16"),       # behind delta_chunk
    dict(rows=0, heads=6, column=0),
)


def make(rng, rows=1, heads=48, column=10240, padding=96, projected="f32", out="bf16", scale=2.0, o="f32"):
    """Named random arguments; formats by name. `padding`: columns behind z; a head of o is tiny, so that eps counts."""
    x = (rng.standard_normal((rows, column + heads * HEAD + padding)) * scale).astype(np.float32)
    values = (rng.standard_normal((rows, heads, HEAD)) * 0.1).astype(np.float32)
    values[:, -1] *= 1e-2
    x = (x.view(np.uint32) >> 16).astype(np.uint16) if projected == "bf16" else \
        x.astype(np.float16) if projected == "f16" else x
    return dict(o=values.astype({"f16": np.float16, "f32": np.float32}[o]), projected=x, column=column,
                weight=rng.normal(0.9, 0.1, HEAD).astype(np.float32), eps=1e-6,
                out=np.empty((rows, heads, HEAD), {"bf16": np.uint16, "f16": np.float16, "f32": np.float32}[out]))


def cost(rows=1, heads=48, column=10240, padding=96, projected="f32", out="bf16", scale=2.0, o="f32"):
    """Bytes that must move, and float operations."""
    size = {"bf16": 2, "f16": 2, "f32": 4}
    return dict(bytes=rows * heads * HEAD * (size[o] + size[projected] + size[out]) + HEAD * 4,
                flops=rows * heads * HEAD * 9)
