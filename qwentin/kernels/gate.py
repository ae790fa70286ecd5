"""The gate of attention: two neighbouring outputs times the sigmoid of their gates, stored as a pair.

Used by attn_prefill.py and attn_prefill_sm90a.py, where a lane of a matrix fragment holds pairs of columns;
their cases prove it.
"""
import functools

import numpy as np

from . import ptx
from .build import lineless_device
from .strips import store_pair

LOG2_E = float(np.log2(np.e))


@functools.cache
def load_pair(format):
    """Device function (array, element number) -> two neighbouring elements."""
    if format == "f32":
        @lineless_device
        def load(p, i):
            return ptx.read_f32x2(p + i * 4)
    elif format == "f16":
        @lineless_device
        def load(p, i):
            return ptx.f32x2_f16x2(ptx.read_u32(p + i * 2))
    else:
        @lineless_device
        def load(p, i):
            word = ptx.read_u32(p + i * 2)
            return ptx.f32_bits(word << 16), ptx.f32_bits(word & 0xFFFF0000)
    return load


@functools.cache
def store_gated(gate_format, out_format):
    """Device function (qkv, out, gate's element number, output's, a, b): two neighbours times the sigmoid of their gates."""
    load, store = load_pair(gate_format), store_pair(out_format)

    @lineless_device
    def sigmoid(x):
        return ptx.reciprocal(1.0 + ptx.exp2(x * -LOG2_E))

    @lineless_device
    def store_two(qkv, out, gate, i, a, b):
        g = load(qkv, gate)
        store(out, i, a * sigmoid(g[0]), b * sigmoid(g[1]))
    return store_two
