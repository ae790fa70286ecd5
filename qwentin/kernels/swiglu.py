"""swiglu: the gated product between the two matrices of an MLP.

    out[t, f] = silu(gate[t, f]) * up[t, f],  silu(x) = x / (1 + e^-x)

    gate_up  f32, f16 or bf16 [T, 2 F]    gate in columns 0..F-1, up in F..2F-1, as one matrix product leaves them
    out      bf16, f16 or f32 [T, F]

F is a multiple of 8. A thread takes 8 columns of one row; a block 128 threads of one row, so 27B's F = 17408 is 17 blocks.
"""
import functools

import numpy as np

from . import octet, ptx
from .activation import silu
from .build import kernel
from .octet import format_of
from .parity import Output, real
from .ptx import u64
from .unroll import static_range

THREADS = 128
REGISTERS = 40
SASS = {"sm_90a": ("LDG.E.128", "STG.E.128", "MUFU.EX2"), "sm_120a": ("LDG.E.128", "STG.E.128", "MUFU.EX2")}
# e^-x = 2^(-x log2 e): the argument, below 128 in size, is rounded to 2^-24 of itself and appears in the exponent, so the
# power is off by 128 ln 2 2^-24 < 2^-17.5 of itself; ex2 and rcp (2^-22 each) and four roundings stay under the rest.
# Beyond x = -87 the reciprocal falls below 2^-126 and is flushed: 87 * 2^-126 |up| is lost, |up| < 1000 in CASES.
OUTPUTS = {"out": Output(rtol=2.0 ** -17, atol=1e-33)}


def ref(gate_up):
    """The formula in float64; nothing is rounded."""
    gate, up = np.split(real(gate_up), 2, axis=-1)
    return dict(out=gate / (1 + np.exp(-gate)) * up)


@functools.cache
def build(f, in_format, out_format):
    """The kernel for F = f."""
    octets = f // octet.SIZE
    load, store = octet.load(in_format), octet.store(out_format)

    @kernel(threads=THREADS)
    def swiglu(gate_up: u64, out: u64):
        i = ptx.block_x() * THREADS + ptx.thread_x()
        row = ptx.block_y()
        ptx.launch_dependents()
        ptx.wait_dependencies()
        if i < octets:
            gate = load(gate_up, row * (2 * octets) + i)
            up = load(gate_up, row * (2 * octets) + octets + i)
            store(out, row * octets + i, tuple(silu(gate[j]) * up[j] for j in static_range(8)))
    return swiglu


def launch(stream, gate_up, out):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    rows, f = out.shape
    if not f or f % octet.SIZE:
        raise ValueError(f"out has {f} columns; swiglu wants a positive multiple of {octet.SIZE}")
    if tuple(gate_up.shape) != (rows, 2 * f):
        raise ValueError(f"gate_up must have shape {(rows, 2 * f)} for out {(rows, f)}, got {tuple(gate_up.shape)}")
    made = build(f, format_of("gate_up", gate_up, "f32", "f16", "bf16"), format_of("out", out, "bf16", "f16", "f32"))
    if rows:
        stream.launch(made, (-(-f // (octet.SIZE * THREADS)), rows, 1), gate_up, out)


CASES = (
    dict(rows=1, f=17408),                                             # 27B
    dict(rows=3, f=1000, gate_up="bf16", out="f16"),                   # ragged: 125 octets
    dict(rows=2, f=2048, scale=60.0, out="f32"),                       # far into both tails of the sigmoid
    dict(rows=2, f=208, gate_up="f16", out="f16"),
    dict(rows=1, f=8),
    dict(rows=0, f=64),
)


def make(rng, rows=1, f=17408, gate_up="f32", out="bf16", scale=2.0):
    """Named random arguments; formats by name."""
    x = (rng.standard_normal((rows, 2 * f)) * scale).astype(np.float16 if gate_up == "f16" else np.float32)
    return dict(gate_up=(x.view(np.uint32) >> 16).astype(np.uint16) if gate_up == "bf16" else x,
                out=np.empty((rows, f), {"bf16": np.uint16, "f16": np.float16, "f32": np.float32}[out]))


def cost(rows=1, f=17408, gate_up="f32", out="bf16", scale=2.0):
    """Bytes that must move, and float operations."""
    size = {"bf16": 2, "f16": 2, "f32": 4}
    return dict(bytes=rows * f * (2 * size[gate_up] + size[out]), flops=rows * f * 6)
