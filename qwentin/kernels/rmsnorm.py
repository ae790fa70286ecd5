"""rmsnorm: add to the residual stream and normalise it, in one pass.

    hidden[t] += delta[t]                                               (left out when delta is None)
    out[t]     = hidden[t] * rsqrt(mean(hidden[t]^2) + eps) * (1 + weight)          the "offset" norm: stored w is near 0

    hidden  f32 or bf16 [T, D]    the residual stream, updated in place
    delta   f32 or bf16 [T, D]    or None
    weight  f32 or bf16 [D]
    out     bf16, f16 or f32 [T, D]

The sum is normalised before it is rounded to hidden's format. bf16 is held as uint16 bits. D is a multiple of 8.

One block takes a row; its threads hold the whole row in registers, 8 elements (an octet) at a time, so that memory is
read once. 27B: 640 threads x 1 octet = 5120. Rows are independent; a step of one row is one block and costs its latency.
"""
import functools

import numpy as np

from . import octet, ptx, reduce
from .build import device, kernel
from .octet import format_of
from .parity import Output, real
from .ptx import f32, u64
from .unroll import static_range

MAX_THREADS = 1024        # a block's limit; wider rows give each thread more octets
REGISTERS = 64            # two octets a thread, three arrays: a block of 1024 threads can have no more
SASS = {"sm_90a": ("LDG.E.128", "STG.E.128", "MUFU.RSQ"), "sm_120a": ("LDG.E.128", "STG.E.128", "MUFU.RSQ")}
# All squares are positive, so the mean is off by at most (8 terms a thread + 10 halvings) 2^-24, its root by half of that;
# rsqrt.approx adds 2^-22.9, the three products 3 * 2^-24: together below 2^-20.
OUTPUTS = {"out": Output(rtol=2.0 ** -20), "hidden": Output(rtol=2.0 ** -24)}


def ref(hidden, delta, weight, eps):
    """The formula in float64; nothing is rounded."""
    h = real(hidden) if delta is None else real(hidden) + real(delta)
    return dict(hidden=h, out=h / np.sqrt((h * h).mean(-1, keepdims=True) + eps) * (1 + real(weight)))


def rows(d, hidden_format, delta_format, weight_format):
    """(threads of a block, octets of each, inside, read): how a block holds a row of d elements and normalises it."""
    octets = d // octet.SIZE
    per_thread = -(-octets // MAX_THREADS)
    warps = -(-octets // (32 * per_thread))
    threads = 32 * warps
    exact, add = octets == threads * per_thread, delta_format is not None
    load, load_weight, load_delta = (octet.load(f or "f32") for f in (hidden_format, weight_format, delta_format))

    @device
    def inside(k):
        """Whether a thread's k-th octet is the row's. Threads beyond a ragged row's end repeat its last octet, count it as
        zero and store nothing."""
        return exact or ptx.thread_x() + k * threads < octets

    @device
    def read(hidden, delta, weight, first, eps):
        """(places of a thread's octets in the row that begins at octet `first`; hidden + delta there; that, normalised)."""
        t = ptx.thread_x()
        mine = tuple(t + k * threads if exact else min(t + k * threads, octets - 1) for k in static_range(per_thread))
        ptx.launch_dependents()
        gain = tuple(load_weight(weight, mine[k]) for k in static_range(per_thread))     # now: not after the barrier
        ptx.wait_dependencies()
        row = tuple(load(hidden, first + mine[k]) for k in static_range(per_thread))
        if add:
            more = tuple(load_delta(delta, first + mine[k]) for k in static_range(per_thread))
            row = tuple(tuple(row[k][j] + more[k][j] for j in static_range(8)) for k in static_range(per_thread))
        total = 0.0
        for k in static_range(per_thread):
            total += octet.squares(row[k]) if inside(k) else 0.0
        scale = ptx.rsqrt(reduce.block_sum(total, warps) * (1.0 / d) + eps)
        return mine, row, tuple(tuple(row[k][j] * scale * (1.0 + gain[k][j]) for j in static_range(8))
                                for k in static_range(per_thread))
    return threads, per_thread, inside, read


@functools.cache
def build(d, hidden_format, delta_format, weight_format, out_format):
    """The kernel for rows of d elements; delta_format is None to add nothing."""
    threads, per_thread, inside, read = rows(d, hidden_format, delta_format, weight_format)
    octets, add = d // octet.SIZE, delta_format is not None
    store_hidden, store_out = octet.store(hidden_format), octet.store(out_format)

    @kernel(threads=threads)
    def rmsnorm(hidden: u64, delta: u64, weight: u64, out: u64, eps: f32):
        first = ptx.block_x() * octets                            # the row's first octet
        mine, row, normal = read(hidden, delta, weight, first, eps)
        for k in static_range(per_thread):
            if inside(k):
                store_out(out, first + mine[k], normal[k])
                if add:
                    store_hidden(hidden, first + mine[k], row[k])
    return rmsnorm


def launch(stream, hidden, delta, weight, out, eps):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    rows, d = hidden.shape
    if d % octet.SIZE or not d:
        raise ValueError(f"hidden has {d} columns; rmsnorm wants a positive multiple of {octet.SIZE}")
    for name, array, shape in (("delta", delta, (rows, d)), ("weight", weight, (d,)), ("out", out, (rows, d))):
        if array is not None and tuple(array.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(array.shape)}")
    made = build(d, format_of("hidden", hidden, "f32", "bf16"),
                 None if delta is None else format_of("delta", delta, "f32", "bf16"),
                 format_of("weight", weight, "f32", "bf16"), format_of("out", out, "bf16", "f16", "f32"))
    if rows:
        stream.launch(made, rows, hidden, hidden if delta is None else delta, weight, out, eps)


CASES = (
    dict(rows=2, d=5120),                                              # 27B
    dict(rows=1, d=5120, hidden="bf16", delta="bf16", out="f16"),
    dict(rows=3, d=1000, weight="bf16"),                               # ragged: 125 octets for 128 threads
    dict(rows=2, d=8968, out="f32"),                                   # two octets a thread, ragged
    dict(rows=1, d=8, delta=None),
    dict(rows=0, d=256),
)


def make(rng, rows=1, d=5120, hidden="f32", delta="f32", weight="f32", out="bf16"):
    """Named random arguments; formats by name, delta None to leave it out."""
    def values(shape, format, scale):
        x = (rng.standard_normal(shape) * scale).astype(np.float32)
        return (x.view(np.uint32) >> 16).astype(np.uint16) if format == "bf16" else x
    return dict(hidden=values((rows, d), hidden, 3.0),
                delta=None if delta is None else values((rows, d), delta, 1.0), weight=values(d, weight, 0.1),
                out=np.empty((rows, d), {"bf16": np.uint16, "f16": np.float16, "f32": np.float32}[out]), eps=1e-6)


def cost(rows=1, d=5120, hidden="f32", delta="f32", weight="f32", out="bf16"):
    """Bytes that must move, and float operations."""
    size = {"bf16": 2, "f16": 2, "f32": 4, None: 0}
    moved = size[hidden] * (1 if delta is None else 2) + size[delta] + size[out]
    return dict(bytes=rows * d * moved + d * size[weight], flops=rows * d * 6)
