"""The functions between matrices, by the units for 2^x and 1 / x, each 2^-22 off. Used by many; their cases prove them."""
from . import ptx
from .build import lineless_device
from .unroll import static_range

LOG2_E = 1.4426950408889634


@lineless_device
def power(x):
    """e^x."""
    return ptx.exp2(x * LOG2_E)


@lineless_device
def sigmoid(x):
    """1 / (1 + e^-x); e^-x may be infinite."""
    return ptx.reciprocal(1.0 + ptx.exp2(x * -LOG2_E))


@lineless_device
def silu(x):
    """x / (1 + e^-x)."""
    return x * sigmoid(x)


@lineless_device
def softplus(x):
    """max(x, 0) + log(1 + e), e = e^-|x|, with the logarithm as 2 atanh(s), s = e / (2 + e) <= 1/3: eight terms of its
    series leave 2^-26 of it, and small values keep all their digits, which a state that forgets slowly lives on."""
    e = ptx.exp2(ptx.absolute(x) * -LOG2_E)
    s = e * ptx.reciprocal(2.0 + e)
    square, series = s * s, 1 / 15
    for n in static_range(7):
        series = ptx.fma(series, square, 1 / (13 - 2 * n))
    return ptx.maximum(x, 0.0) + 2.0 * s * series
