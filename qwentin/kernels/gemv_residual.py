"""gemv_residual: gemv that adds to the residual stream, and leaves what the next norm needs (folded_norm.py).

    hidden[m, n] += sum over k of x[m, k] * w[n, k]
    scaled[m, n]  = hidden[m, n] * (1 + weight[n]) * 2^-6
    squares[strip, m / 8, warp, m % 8] = sum of hidden[m, n]^2 over the warp's 32 n of the strip

    w        u8 [N / 128, K / 128, 8, tile_bytes]     packed.py draws it; N a multiple of 128
    x        f16 [M, K]                               M <= 32
    alpha    f32 [N / 16]                             block 16 only: one factor for each 16 outputs
    hidden   f32 [M, N]                               in place
    weight   f32 [N]                                  of the norm that follows, as stored: near 0
    scaled   f16 [M, N]
    squares  f32, folded_norm.shape(groups, N)        groups of 8 rows: 1, 2 or 4; of rows that are not there 0
    work     u32, of strips.workspace(M, blocks)      as every launch leaves it

The walk and the products are gemv's (strips.py, gemv.py). The owner of a strip asks for the stream before it gathers what
other blocks summed, so that both are on their way together.
"""
import functools

import numpy as np

from . import folded_norm, packed, strips
from .gemv import check_alpha, checked, fetch_x, product, unit_of
from .gemv import cost as gemv_cost
from .gemv import make as make_gemv
from .gemv import ref as gemv_ref
from .octet import format_of
from .parity import Output

REGISTERS = 224
SASS = {"sm_90a": ("HMMA.16816.F32", "LDGSTS.E.BYPASS.LTC128B.128", "SYNCS", "SHFL.BFLY"),
        "sm_120a": ("HMMA.16816.F32", "LDGSTS.E.BYPASS.LTC128B.128", "SYNCS", "SHFL.BFLY")}
# hidden: gemv's tolerance for the product, and one rounding of the sum.  scaled: 2 * 2^-6 of that, as 1 + weight < 2, and
# two roundings more.  squares: if an h errs by d < 2^-12, 32 squares err by 2 d sqrt(32 S) < 2^-18 S + 32 d^2 2^18, and
# S by 2 * 2^-20 and eight roundings.
OUTPUTS = {"hidden": Output(rtol=2.0 ** -20, atol=2.0 ** -12), "scaled": Output(rtol=2.0 ** -19, atol=2.0 ** -17),
           "squares": Output(rtol=2.0 ** -17, atol=0.5), "work": Output(exact=True)}


@functools.cache
def build(packing, row_groups, bulk, depth):
    """The kernel; the arguments are gemv.build's."""
    return strips.build("gemv_residual", packing, row_groups, row_groups * 2048, fetch_x(row_groups),
                        product(packing, row_groups, True), unit_of(packing, True), "f32", bulk, depth, residual=True)


def launch(stream, w, x, hidden, weight, scaled, squares, work, n, packing, blocks, alpha=None, bulk=True, dependent=None,
           shared=strips.SHARED):
    """Queue it on a stream; shapes and dtypes as in the module's docstring, the other arguments are gemv's."""
    rows, k = checked("gemv_residual", w, x, hidden, work, n, n, packing, blocks)
    check_alpha(alpha, n, packing)
    format_of("x", x, "f16")
    for name, array, dtype, shape in (("hidden", hidden, np.float32, (rows, n)), ("weight", weight, np.float32, (n,)),
                                      ("scaled", scaled, np.float16, (rows, n))):
        if tuple(array.shape) != shape or array.dtype != dtype:
            raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, got {array.dtype} {tuple(array.shape)}")
    if n % packed.STRIP:
        raise ValueError(f"gemv_residual takes whole strips, n a multiple of {packed.STRIP}, got {n}")
    groups = strips.groups_of(rows)
    folded_norm.check("gemv_residual", squares, groups if rows else 0, n)
    made = build(packing, groups, bulk, strips.depth_for(packing, groups, 2048 * groups, shared))
    strips.queue(stream, made, w, x, 0, 0 if alpha is None else alpha, hidden, work, rows, n, k, blocks, dependent, squares,
                 weight=weight, scaled=scaled)


def ref(w, x, hidden, weight, work, n, packing, alpha):
    """The formulas in float64; work as it was."""
    h = hidden + gemv_ref(w, x, work, n, packing, alpha)["out"]
    rows, groups = len(x), strips.groups_of(len(x)) if len(x) else 0
    each = np.zeros((8 * groups, n // packed.STRIP, folded_norm.SHARES))
    each[:rows] = (h ** 2).reshape(rows, n // packed.STRIP, folded_norm.SHARES, 32).sum(-1)
    squares = each.reshape(groups, 8, *each.shape[1:]).transpose(2, 0, 3, 1)
    return dict(hidden=h, scaled=h * (1 + weight.astype(np.float64)) * 2.0 ** -6, squares=squares, work=work)


CASES = (
    dict(n=256, k=5120, rows=1, blocks=3, packing="nvfp4", bulk=False),  # strips shared by blocks
    dict(n=128, k=384, rows=29, blocks=3),                               # a piece a block: two pass on their sums
    dict(n=128, k=128, rows=0, blocks=132),                              # empty
)


def make(rng, n=5120, k=17408, rows=1, packing="fp6", blocks=132, bulk=True):
    """As gemv makes them; a stream of the products' size."""
    given = make_gemv(rng, n, k, rows, packing, "f16", "f32", blocks, bulk)
    del given["out"]
    shape = folded_norm.shape(strips.groups_of(rows) if rows else 0, n)
    return dict(given, hidden=(rng.standard_normal((rows, n)) * k ** 0.5).astype(np.float32),
                weight=rng.uniform(-0.9, 0.9, n).astype(np.float32), scaled=np.empty((rows, n), np.float16),
                squares=np.empty(shape, np.float32))


def cost(n=5120, k=17408, rows=1, packing="fp6", blocks=132, bulk=True):
    """Bytes that must move, and float operations."""
    whole = gemv_cost(n, k, rows, packing, blocks=blocks, bulk=bulk)
    return dict(bytes=whole["bytes"] + rows * n * 6 + n * 4, flops=whole["flops"] + rows * n * 5)
