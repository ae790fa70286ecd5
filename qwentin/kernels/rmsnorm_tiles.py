"""rmsnorm_tiles: rmsnorm whose results go to a product of e4m3: rounded on the way, never written in 16 bits.

    hidden[t] += delta[t]                                               (left out when delta is None)
    x[t]       = hidden[t] * rsqrt(mean(hidden[t]^2) + eps) * (1 + weight)
    tiles, scale = x in e4m3, a scale for each row                      tile_store.py

    hidden  f32 [T, D]            the residual stream, updated in place
    delta   f32 or bf16 [T, D]    or None
    weight  f32 [D]
    tiles   u8 [ceil(T / 128), D / 128, 128, 128], scale f32 [T rounded up to 128]: rows beyond T are left alone

D is a multiple of 128. A block takes a row, a thread an octet or more of it, as in rmsnorm.py.
27B, 4096 rows with delta in bf16: 231 MB, 52 us of an H200's 4.4 TB/s, where two kernels moved 338.
"""
import functools

from . import octet, ptx, reduce, rmsnorm, tile_store
from .build import kernel
from .octet import format_of
from .parity import Output
from .ptx import f32, u64
from .tile_store import LARGEST, TILE
from .unroll import static_range

REGISTERS = 64
SASS = {chip: ("LDG.E.128", "STG.E.64", "F2FP.SATFINITE.E4M3", "MUFU.RSQ") for chip in ("sm_90a", "sm_120a")}
OUTPUTS = {**tile_store.OUTPUTS, "hidden": Output(rtol=2.0 ** -24)}


def ref(hidden, delta, weight, eps):
    """rmsnorm's and quantise_rows' formulas; NaN where nothing is written."""
    made = rmsnorm.ref(hidden, delta, weight, eps)
    return dict(tile_store.ref(made["out"]), hidden=made["hidden"])


@functools.cache
def build(d, delta_format):
    """The kernel for rows of d elements; delta_format is None to add nothing."""
    threads, per_thread, inside, read = rmsnorm.rows(d, "f32", delta_format, "f32")
    octets, add, store = d // octet.SIZE, delta_format is not None, octet.store("f32")

    @kernel(threads=threads)
    def rmsnorm_tiles(hidden: u64, delta: u64, weight: u64, tiles: u64, scale: u64, eps: f32):
        token = ptx.block_x()
        first = token * octets
        mine, row, x = read(hidden, delta, weight, first, eps)
        top = 0.0
        for k in static_range(per_thread):
            top = ptx.maximum(top, tile_store.largest(x[k]))
        top = reduce.block_max(top, threads // 32)
        inverse = ptx.select(top > 0.0, LARGEST * ptx.reciprocal(top), 0.0)
        for k in static_range(per_thread):
            if inside(k):
                tile_store.put(tiles, token, mine[k], tile_store.coded(x[k], inverse), octets // tile_store.OCTETS)
                if add:
                    store(hidden, first + mine[k], row[k])
        if ptx.thread_x() == 0:
            ptx.store_f32(scale + token * 4, ptx.select(top > 0.0, top * (1.0 / LARGEST), 1.0))
    return rmsnorm_tiles


def launch(stream, hidden, delta, weight, tiles, scale, eps):
    """Queue it on a stream; shapes and dtypes as in the module's docstring."""
    rows, d = hidden.shape
    for name, array, shape in (("delta", delta, (rows, d)), ("weight", weight, (d,))):
        if array is not None and tuple(array.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(array.shape)}")
    format_of("hidden", hidden, "f32"), format_of("weight", weight, "f32")
    tile_store.check("hidden", rows, d, tiles, scale)
    made = build(d, None if delta is None else format_of("delta", delta, "f32", "bf16"))
    if rows:
        stream.launch(made, rows, hidden, hidden if delta is None else delta, weight, tiles, scale, eps)


CASES = (
    dict(rows=2, d=5120, delta="bf16"),                                # 27B
    dict(rows=130, d=128),
    dict(rows=2, d=640, delta=None),                                   # ragged: 80 octets for 96 threads
    dict(rows=1, d=9088),                                              # two octets a thread, ragged
    dict(rows=0, d=256),
)


def make(rng, rows=4096, d=5120, delta="f32"):
    """Named random arguments; the first 128 of the first row are nearly nothing, all of the last are."""
    made = rmsnorm.make(rng, rows, d, delta=delta)
    made["hidden"][:1, :TILE] = 1e-30
    if delta is not None:
        made["delta"][:1, :TILE] = 0
        made["delta"][1:][-1:] = 0
    made["hidden"][1:][-1:] = 0
    del made["out"]
    return dict(made, **tile_store.empty(rows, d))


def cost(rows=4096, d=5120, delta="f32"):
    """Bytes that must move, and float operations."""
    size = {"bf16": 2, "f32": 4, None: 0}
    moved = 4 * (1 if delta is None else 2) + size[delta] + 1
    return dict(bytes=rows * d * moved + rows * 4 + d * 4, flops=rows * d * 10)
