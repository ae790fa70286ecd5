"""The gate of attention: two neighbouring outputs times the sigmoid of their gates, stored as a pair.

Used by attn_prefill.py and attn_prefill_sm90a.py, where a lane of a matrix fragment holds pairs of columns;
their cases prove it.
"""
import functools

from . import octet, ptx
from .activation import sigmoid
from .build import lineless_device
from .strips import store_pair


@functools.cache
def load_pair(format):
    """Device function (array, element number) -> two neighbouring elements."""
    PLAIN, two = format == "f32", octet.TWO.get(format)

    @lineless_device
    def load(p, i):
        return ptx.read_f32x2(p + i * 4) if PLAIN else two(ptx.read_u32(p + i * 2))
    return load


@functools.cache
def store_gated(gate_format, out_format):
    """Device function (qkv, out, gate's element number, output's, a, b): two neighbours times the sigmoid of their gates."""
    load, store = load_pair(gate_format), store_pair(out_format)

    @lineless_device
    def store_two(qkv, out, gate, i, a, b):
        g = load(qkv, gate)
        store(out, i, a * sigmoid(g[0]), b * sigmoid(g[1]))
    return store_two
