"""embed: look rows of the embedding table up, whatever the table is stored in.

    out[t] = table[ids[t]] * scale[ids[t], column // group]             (no scale for bf16)

    ids    i32 or u32 [T]          below V
    table  bf16   u16 [V, D]       the bits
           e4m3   u8 [V, D]        codes
           e2m3   u8 [V, 3 D / 4]  six-bit codes, one little-endian bit string a row (numerics.pack_bits):

                      bit   0        8        16       24
                      code  000000 11|1111 2222|22 333333|...    code j is bits 6 j .. 6 j + 5

    scale  f32, or u8 with ue8m0 exponents, [V, D / group]; None for bf16
    out    bf16, f16 or f32 [T, D]

A thread takes 16 bytes of a row (8 bf16, 16 e4m3) or, of six-bit codes, 48 bytes = 64 codes, the fewest that 16-byte
loads hold whole; D is a multiple of that.
"""
import functools

import numpy as np

from . import octet, ptx
from .build import device, kernel
from .octet import format_of
from .parity import Output, real
from .ptx import u32, u64
from .unroll import static_range

THREADS = 128
UNIT = {"bf16": 8, "e4m3": 16, "e2m3": 64}            # columns a thread takes
BYTES = {"bf16": 16, "e4m3": 16, "e2m3": 48}          # of them
REGISTERS = 96                                        # 64 codes of a thread are in flight; occupancy is no concern here
SASS = {"sm_90a": ("LDG.E.128", "STG.E.128"), "sm_120a": ("LDG.E.128", "STG.E.128")}
OUTPUTS = {"out": Output(rtol=2.0 ** -24)}            # code times scale: one float32 product


def ref(ids, table, scale, format):
    """The formula in float64."""
    rows = table[ids]
    if format == "bf16":
        return dict(out=real(rows))
    exponents, bias = {"e4m3": (4, 7), "e2m3": (2, 1)}[format]          # then three bits of mantissa
    codes = rows.astype(np.int64)
    if format == "e2m3":
        bits = np.unpackbits(rows, axis=1, bitorder="little")
        codes = bits.reshape(len(ids), bits.shape[1] // 6, 6) @ (1 << np.arange(6))
    e, m = codes >> 3 & (1 << exponents) - 1, codes & 7
    value = np.where(e == 0, m * 2.0 ** (-2 - bias), (m + 8) * 2.0 ** (e - 3.0 - bias))
    value = np.where(codes >> exponents + 3, -value, value)
    factor = 2.0 ** (scale[ids].astype(np.float64) - 127) if scale.dtype == np.uint8 else scale[ids].astype(np.float64)
    return dict(out=value * np.repeat(factor, value.shape[1] // scale.shape[1], axis=1))


@device
def exponent_only(code):
    """A ue8m0 scale as float32; 2^-127 is a subnormal one."""
    return ptx.f32_bits(0x00400000 if code == 0 else code << 23)


@device
def e2m3(code):
    """The value of the low six bits: sign and the other five placed in a float32 give it times 2^-126, exactly."""
    return ptx.f32_bits(((code & 0x20) << 26) | ((code & 0x1F) << 20)) * 2.0 ** 126


@functools.cache
def build(d, group, format, scale_format, out_format):
    """The kernel for D = d columns and scales for `group` of them (None without scales)."""
    unit, unit_bytes = UNIT[format], BYTES[format]
    scales = max(unit // group, 1) if group else 0                      # a thread needs
    store = octet.store(out_format)

    @device
    def scales_of(scale, first):
        if scale_format == "f32":
            return tuple(ptx.load_f32(scale + (first + s) * 4) for s in static_range(scales))
        return tuple(exponent_only(u32(ptx.load_u8(scale + first + s))) for s in static_range(scales))

    @kernel(threads=THREADS)
    def embed(ids: u64, table: u64, scale: u64, out: u64):
        i = ptx.block_x() * THREADS + ptx.thread_x()                    # unit within the row
        token = ptx.block_y()
        ptx.launch_dependents()
        if i < d // unit:
            row = ptx.load_u32(ids + token * 4)
            p = table + (row * (d // unit) + i) * unit_bytes
            w = ptx.load_x4(p)
            if format == "bf16":
                x = octet.widened(w[0]) + octet.widened(w[1]) + octet.widened(w[2]) + octet.widened(w[3])
            else:
                factor = scales_of(scale, row * (d // group) + i * unit // group)
            if format == "e4m3":
                x = tuple(octet.byte(w[j // 4], 8 * (j % 4)) * factor[j * scales // unit] for j in static_range(unit))
            if format == "e2m3":
                w = w + ptx.load_x4(p + 16) + ptx.load_x4(p + 32)
                x = tuple(e2m3(ptx.shift_right_pair(w[6 * j // 32], w[(6 * j + 5) // 32], 6 * j % 32))
                          * factor[j * scales // unit] for j in static_range(unit))
            for o in static_range(unit // 8):
                store(out, token * (d // 8) + i * (unit // 8) + o, tuple(x[8 * o + j] for j in static_range(8)))
    return embed


def launch(stream, ids, table, scale, out, format):
    """Queue it on a stream; format is the table's: "bf16", "e4m3" or "e2m3"."""
    if format not in UNIT:
        raise ValueError(f"format must be one of {', '.join(UNIT)}, got {format!r}")
    (rows, d), vocabulary = out.shape, table.shape[0]
    if not d or d % UNIT[format]:
        raise ValueError(f"out has {d} columns; a table in {format} wants a positive multiple of {UNIT[format]}")
    dtype = np.dtype(np.uint16 if format == "bf16" else np.uint8)
    wanted = (vocabulary, d // UNIT[format] * BYTES[format] // dtype.itemsize)
    if table.dtype != dtype or tuple(table.shape) != wanted:
        raise ValueError(f"a table in {format} for {d} columns must be {dtype} {wanted}, "
                         f"got {table.dtype} {tuple(table.shape)}")
    if tuple(ids.shape) != (rows,) or ids.dtype.itemsize != 4 or ids.dtype.kind not in "iu":
        raise ValueError(f"ids must be i32 or u32 {(rows,)}, got {ids.dtype} {tuple(ids.shape)}")
    group, scale_format = None, None
    if format != "bf16":
        group = group_of(scale, vocabulary, d, UNIT[format])
        scale_format = "f32" if scale.dtype == np.float32 else "ue8m0"
    made = build(d, group, format, scale_format, format_of("out", out, "bf16", "f16", "f32"))
    if rows:
        units = d // UNIT[format]
        stream.launch(made, (-(-units // THREADS), rows, 1), ids, table, table if scale is None else scale, out)


def group_of(scale, vocabulary, d, unit):
    """Columns that share a scale; ValueError unless they and a thread's unit fit each other."""
    if scale is None or scale.dtype not in (np.float32, np.uint8):
        raise ValueError(f"scale must be f32 or ue8m0 (u8), got {None if scale is None else scale.dtype}")
    groups = scale.shape[1] if len(scale.shape) == 2 else 0
    group = d // groups if groups and d % groups == 0 else 0
    if scale.shape[0] != vocabulary or not group or group % unit and unit % group:
        raise ValueError(f"scale must have shape ({vocabulary}, {d} / group) with a group that divides {unit} columns "
                         f"or is a multiple of them, got {tuple(scale.shape)}")
    return group


CASES = (
    dict(rows=3, d=5120, format="e2m3", group=128),                    # 27B; V does not matter and is small
    dict(rows=2, d=5120, format="bf16"),
    dict(rows=2, d=5120, format="e4m3", group=5120, scale="f32"),
    dict(rows=3, d=448, format="e2m3", group=32, out="f32"),           # ragged; two scales to a thread's 64 codes
    dict(rows=3, d=48, format="e4m3", group=16, out="f16"),
    dict(rows=1, d=8, format="bf16", out="f32"),
    dict(rows=0, d=64, format="bf16"),
)


def make(rng, rows=1, d=5120, format="e2m3", group=128, scale="ue8m0", out="bf16", vocabulary=50):
    """Named random arguments: any codes (NaN excepted), scales from 2^-20 to 2^3, the last row among the ids."""
    ids = rng.integers(0, vocabulary, rows).astype(np.int32)
    ids[:1] = vocabulary - 1
    out = np.empty((rows, d), {"bf16": np.uint16, "f16": np.float16, "f32": np.float32}[out])
    if format == "bf16":
        table = (rng.standard_normal((vocabulary, d)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return dict(ids=ids, table=table, scale=None, out=out, format=format)
    table = rng.integers(0, 256, (vocabulary, d * (8 if format == "e4m3" else 6) // 8)).astype(np.uint8)
    if format == "e4m3":
        table[(table & 0x7F) == 0x7F] = 0x7E
    exponents = rng.integers(107, 131, (vocabulary, d // group)).astype(np.uint8)
    scales = exponents if scale == "ue8m0" else (2.0 ** (exponents - 127.0) * 1.3).astype(np.float32)
    return dict(ids=ids, table=table, scale=scales, out=out, format=format)


def cost(rows=1, d=5120, format="e2m3", group=128, scale="ue8m0", out="bf16", vocabulary=50):
    """Bytes that must move, and float operations."""
    size = {"bf16": 2, "f16": 2, "f32": 4}
    scales = 0 if format == "bf16" else d // group * (1 if scale == "ue8m0" else 4)
    return dict(bytes=rows * (4 + d // UNIT[format] * BYTES[format] + scales + d * size[out]), flops=rows * d)
