"""gemv_glu: gemv of an MLP's first matrix with the gated product in its epilogue, so that no kernel stands between the two.

    out[m, f] = silu(gate) * up,  silu(x) = x / (1 + e^-x)
    gate      = sum over k of x[m, k] * w_gate[f, k],  up the same of w_up

    w      u8 [2 F / 128, K / 128, 8, tile_bytes]     packed.interleave of gate and up; F a multiple of 64
    x      f16 or bf16 (u16) [M, K]                   M <= 32; bf16 below 2^31 in size
    alpha  f32 [2 F / 16]                             block 16 only: one factor for each tile of w
    out    f16, bf16 or f32 [M, W]                    W even; columns 0 .. F - 1 are written
    work   u32, of strips.workspace(M, blocks)        as every launch leaves it
    squares  f32, folded_norm.shape(groups, K)        or None, as in gemv: gate and up are both multiplied by a row's factor

The walk and the products are gemv's (strips.py, gemv.py). Tiles of gate and up take turns, so a warp's two tiles are 16 rows
of one and the 16 of the other that go with them, and a lane holds both numbers of an output when its sums are whole.
"""
import functools

import numpy as np

from .. import numerics
from . import folded_norm, packed, strips
from .gemv import check_alpha, checked, fetch_x, product, unit_of
from .gemv import cost as gemv_cost
from .gemv import make as make_gemv
from .octet import format_of
from .parity import Output

REGISTERS = 224
SASS = {"sm_90a": ("HMMA.16816.F32", "LDGSTS.E.BYPASS.LTC128B.128", "SYNCS", "MUFU.EX2"),
        "sm_120a": ("HMMA.16816.F32", "LDGSTS.E.BYPASS.LTC128B.128", "SYNCS", "MUFU.EX2")}
# gate and up err by 2^-20 of themselves and, as in gemv but with x smaller by 2 sqrt(K), by 9 sqrt(K / 16) 14 2^-24 /
# 2 sqrt(K) < 2^-19.  silu's slope is below 1.1 and |slope * gate| below 2.2 |silu| + 0.6. With |gate|, |up| < 12 in CASES:
# rtol (2.2 + 1) 2^-20, atol 12 * 0.6 * 2^-20 + (1.1 + 1) 12 * 2^-19 < 2^-14. silu itself errs by 2^-17 (swiglu.py).
OUTPUTS = {"out": Output(rtol=2.0 ** -16, atol=2.0 ** -14), "work": Output(exact=True)}


@functools.cache
def build(packing, row_groups, x_format, out_format, bulk, depth, normed=0):
    """The kernel; the arguments are gemv.build's."""
    half = x_format == "f16"
    return strips.build("gemv_glu", packing, row_groups, row_groups * 2048, fetch_x(row_groups),
                        product(packing, row_groups, half), unit_of(packing, half), out_format, bulk, depth, gated=True,
                        normed=normed)


def launch(stream, w, x, out, work, n, packing, blocks, alpha=None, bulk=True, dependent=None, shared=strips.SHARED,
           squares=None, eps=0.0):
    """Queue it on a stream; n counts the rows of w, 2 F, the other arguments are gemv's."""
    if n % packed.STRIP:
        raise ValueError(f"gemv_glu takes strips of 64 rows of each matrix, n a multiple of {packed.STRIP}, got {n}")
    rows, k = checked("gemv_glu", w, x, out, work, n, n // 2, packing, blocks)
    check_alpha(alpha, n, packing)
    groups, normed = strips.groups_of(rows), 0 if squares is None else k // packed.DEPTH
    if normed:
        folded_norm.check("gemv_glu", squares, groups, k)
    made = build(packing, groups, format_of("x", x, "f16", "bf16"), format_of("out", out, "f32", "f16", "bf16"), bulk,
                 strips.depth_for(packing, groups, 2048 * groups, shared), normed)
    strips.queue(stream, made, w, x, 0, 0 if alpha is None else alpha, out, work, rows, n, k, blocks, dependent,
                 squares if normed else 0, eps)


def ref(w, x, work, n, packing, alpha, squares=None, eps=0.0):
    """The formulas in float64, tile by tile as w holds them; work as it was."""
    weights = packed.decode(packing, w, n).astype(np.float64)
    if packing.block == 16:
        weights *= np.repeat(alpha, 16)[:, None]
    activations = (numerics.decode_bf16(x) if x.dtype == np.uint16 else x).astype(np.float64)
    if squares is not None:
        activations *= folded_norm.factors_ref(squares, strips.groups_of(len(x)), x.shape[1], eps)[:len(x), None]
    gate, up = (activations @ weights.reshape(n // 32, 2, 16, -1)[:, i].reshape(n // 2, -1).T for i in range(2))
    return dict(out=gate / (1 + np.exp(-gate)) * up, work=work)


CASES = (
    dict(n=256, k=5120, rows=1, blocks=3, normed=True),                  # 27B's inputs; strips shared by blocks
    dict(n=384, k=640, rows=16, blocks=2, out="bf16"),                   # 5 pieces a strip
    dict(n=128, k=384, rows=29, blocks=3, x="bf16", out="f32"),          # a piece a block: two pass on their sums
    dict(n=128, k=384, rows=13, blocks=2, packing="fp8", bulk=False),
    dict(n=256, k=256, rows=2, blocks=2, packing="nvfp4"),
    dict(n=128, k=128, rows=1, blocks=132),                              # one
    dict(n=128, k=128, rows=0, blocks=132),                              # empty
)


def make(rng, n=34816, k=5120, rows=1, packing="fp6", x="f16", out="f16", blocks=132, bulk=True, normed=False):
    """As gemv makes them, but activations smaller by 2 sqrt(K): gate and up are about one."""
    given = make_gemv(rng, n, k, rows, packing, "f16", "f32", blocks, bulk, normed)
    small = given["x"].astype(np.float32) * np.float32(0.5 * k ** -0.5)
    return dict(given, x=small.astype(np.float16) if x == "f16" else numerics.encode_bf16(small),
                out=np.empty((rows, n // 2), {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[out]))


def cost(n=34816, k=5120, rows=1, packing="fp6", x="f16", out="f16", blocks=132, bulk=True, normed=False):
    """Bytes that must move, and float operations."""
    whole = gemv_cost(n, k, rows, packing, x, out, blocks, bulk)
    saved = rows * n // 2 * (4 if out == "f32" else 2)
    return dict(bytes=whole["bytes"] - saved, flops=whole["flops"] + rows * n * 3)
