"""gather: rows of a float32 array, rounded to what the next matrix takes, or as they are.

    out[i] = source[rows[i]]

    source  f32 [T, D]        D a multiple of 8
    rows    i32 or u32 [O]    below T
    out     f16, bf16 or f32 [O, D]

A thread takes eight columns. A prefill of many rows wants the logits of few: those alone go on to the head.
"""
import functools

import numpy as np

from . import octet, ptx
from .build import kernel
from .octet import format_of
from .parity import Output
from .ptx import u64

THREADS = 128
REGISTERS = 32
SASS = {"sm_90a": ("LDG.E.128", "STG.E.128"), "sm_120a": ("LDG.E.128", "STG.E.128")}
OUTPUTS = {"out": Output()}                           # one rounding


def ref(source, rows):
    return dict(out=source[rows].astype(np.float64))


@functools.cache
def build(d, out_format):
    """The kernel for D = d columns."""
    load, store, octets = octet.load("f32"), octet.store(out_format), d // octet.SIZE

    @kernel(threads=THREADS)
    def gather(source: u64, rows: u64, out: u64):
        i, to = ptx.block_x() * THREADS + ptx.thread_x(), ptx.block_y()
        ptx.launch_dependents()
        ptx.wait_dependencies()
        if i < octets:
            row = ptx.load_u32(rows + to * 4)
            store(out, to * octets + i, load(source, u64(row) * octets + i))
    return gather


def launch(stream, source, rows, out):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    count, d = out.shape
    if d % octet.SIZE or not d or source.shape[1] != d or tuple(rows.shape) != (count,):
        raise ValueError(f"source [T, D], rows [O] and out [O, D] with D a multiple of {octet.SIZE} were wanted, "
                         f"got {tuple(source.shape)}, {tuple(rows.shape)} and {tuple(out.shape)}")
    format_of("source", source, "f32")
    if count:
        stream.launch(build(d, format_of("out", out, "f16", "bf16", "f32")), (-(-d // (octet.SIZE * THREADS)), count, 1),
                      source, rows, out)


CASES = (
    dict(rows=32, d=5120, outputs=1),                                  # 27B
    dict(rows=3, d=1000, outputs=5, out="bf16"),                       # ragged; a row twice
    dict(rows=2, d=8, outputs=1, out="f32"),
    dict(rows=1, d=8, outputs=0),
)


def make(rng, rows=32, d=5120, outputs=1, out="f16"):
    """Named random arguments."""
    return dict(source=rng.standard_normal((rows, d)).astype(np.float32), rows=rng.integers(0, rows, outputs, np.int32),
                out=np.empty((outputs, d), {"f16": np.float16, "bf16": np.uint16, "f32": np.float32}[out]))


def cost(rows=32, d=5120, outputs=1, out="f16"):
    """Bytes that must move; nothing is computed."""
    return dict(bytes=outputs * (4 + d * (8 if out == "f32" else 6)), flops=0)
