"""What single instructions compute, on arrays: the functions that generated code calls.

Integer, logic and conversion results are exact. add, sub, mul, fma of f32, f16 and bf16 are rounded correctly (f32
subnormal results of an fma may round twice). The approximate instructions (ex2, rcp, sin, ...) give the correctly
rounded value, which hardware is within a few ulp of.
"""
import numpy as np

from .dtypes import f2, f4, f8, i1, i2, i4, i8, u1, u2, u4, u8  # noqa: F401  (generated code names them all)
from .formats import from_bf16, is_tie, odd_f4, to_bf16, to_f16

SMALLEST_NORMAL = f4(2.0 ** -126)


# ---------------------------------------------------------------------------------------------------------- floats
def flush(x):
    """.ftz: subnormals become zero, keeping their sign."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(f4(0), x), x)


def fma_f32(a, b, c):
    """a * b + c rounded once."""
    product = np.asarray(a).astype(f8) * b                               # exact: 24 + 24 bits
    total = product + c
    tie = is_tie(total)
    if np.any(tie):                                                      # rare: undo what the first rounding hid
        c = np.broadcast_to(np.asarray(c, f8), total.shape)
        virtual = total - product
        lost = (product - (total - virtual)) + (c - virtual)
        away = np.where(lost > 0, np.inf, -np.inf)
        total = np.where(tie & (lost != 0) & np.isfinite(lost), np.nextafter(total, away), total)
    return total.astype(f4)


def fma_f64(a, b, c):
    return (np.asarray(a).astype(np.longdouble) * b + c).astype(f8)


def directed(x, mode):
    """Round a float64 to float32 towards zero (rz), down (rm) or up (rp)."""
    r = x.astype(f4)
    over = (r > x) & ((x > 0) | (mode != "rz")) if mode != "rp" else np.zeros(r.shape, bool)
    under = (r < x) & ((x < 0) | (mode != "rz")) if mode != "rm" else np.zeros(r.shape, bool)
    return np.where(over, np.nextafter(r, f4(-np.inf)), np.where(under, np.nextafter(r, f4(np.inf)), r))


HALF_OPERATIONS = dict(
    add=lambda a, b: a + b, sub=lambda a, b: a - b, mul=lambda a, b: a * b, min=np.fmin, max=np.fmax,
    neg=lambda a: -a, abs=np.abs, fma=lambda a, b, c: a.astype(f8) * b + c,
    ex2=lambda a: np.exp2(a.astype(f8)), tanh=lambda a: np.tanh(a.astype(f8)))


def half(op, kind, *args):
    """An operation on f16 or bf16 words, or on packed pairs of them ("f16x2"), computed wide and rounded once."""
    if kind.endswith("x2"):
        low = half(op, kind[:-2], *[np.asarray(a).astype(u2) for a in args])
        high = half(op, kind[:-2], *[(np.asarray(a) >> u4(16)).astype(u2) for a in args])
        return low.astype(u4) | high.astype(u4) << u4(16)
    if op in ("neg", "abs"):
        return args[0] ^ u2(0x8000) if op == "neg" else args[0] & u2(0x7FFF)
    brain = kind.startswith("b")
    values = [from_bf16(np.asarray(a)) if brain else np.asarray(a).view(f2).astype(f4) for a in args]
    result = np.asarray(HALF_OPERATIONS[op](*values))
    if not brain:
        return to_f16(result)
    return to_bf16(odd_f4(result) if result.dtype == f8 else result)


def pair_f32(op, *args):
    """An operation on two float32 packed in a u64."""
    out = 0
    for shift in (u8(0), u8(32)):
        a = [np.asarray(np.asarray(x) >> shift).astype(u4).view(f4) for x in args]
        r = fma_f32(*a) if op == "fma" else HALF_OPERATIONS[op](*a)
        out = out | r.view(u4).astype(u8) << shift
    return out


def float_to_int(x, kind):
    """A rounded float -> integer: NaN gives 0, what is out of range the nearest bound."""
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    x = np.where(np.isnan(x), 0, x).astype(f8)
    if high <= 2 ** 53:
        return np.clip(x, low, high).astype(kind)
    safe = np.clip(x, float(low), float(np.nextafter(high + 1.0, 0)))
    return np.where(x >= high, kind(high), safe.astype(kind))


def unpack_half(word, high):
    """One f16 of a pair, as float32."""
    return (word >> u4(16) if high else word).astype(u2).view(f2).astype(f4)


# -------------------------------------------------------------------------------------------------------- integers
def carry(a, b, carry_in, subtract):
    """(a +- b +- carry_in, carry or borrow out)."""
    a, one = np.asarray(a), np.asarray(carry_in).astype(np.asarray(a).dtype)
    first = a - b if subtract else a + b
    wrapped = a < b if subtract else first < a
    second = first - one if subtract else first + one
    return second, wrapped | ((first < one) if subtract else (second < first))


def mul_hi(a, b):
    """The high half of a product."""
    a, b = np.asarray(a), np.asarray(b)
    bits = a.dtype.itemsize * 8
    if bits <= 32:
        wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
        return (a.astype(wide) * b.astype(wide) >> wide.type(bits)).astype(a.dtype)
    x, y, h, low = a.astype(u8), b.astype(u8), u8(32), u8(0xFFFFFFFF)
    middle = (x >> h) * (y & low) + ((x & low) * (y & low) >> h)
    middle2 = (x & low) * (y >> h) + (middle & low)
    r = (x >> h) * (y >> h) + (middle >> h) + (middle2 >> h)
    if a.dtype.kind == "i":
        r = r - np.where(a < 0, y, u8(0)) - np.where(b < 0, x, u8(0))
    return r.astype(a.dtype)


def truncated_div(a, b):
    """Integer division towards zero. Division by zero gives all ones, as hardware does."""
    a = np.asarray(a)
    q = np.floor_divide(a, b)
    if a.dtype.kind == "i":
        q = q + ((q * b != a) & ((a < 0) != (b < 0))).astype(a.dtype)
    return np.where(b == 0, ~a.dtype.type(0), q)


def multiply_wide(a, b, kind):
    return np.asarray(a).astype(kind) * np.asarray(b).astype(kind)


def byte_permute(a, b, selector):
    """prmt: each nibble of the selector picks one of eight bytes, or (bit 3) the sign of it."""
    both = np.asarray(a).astype(u8) | np.asarray(b).astype(u8) << u8(32)
    out = 0
    for i in range(4):
        s = np.asarray(selector).astype(u8) >> u8(4 * i)
        byte = both >> ((s & u8(7)) << u8(3)) & u8(255)
        byte = np.where(s & u8(8), np.where(byte & u8(128), u8(255), u8(0)), byte)
        out = out | byte << u8(8 * i)
    return np.asarray(out).astype(u4)


def bit_field(a, position, length):
    """bfe: extract a bit field; signed types extend its top bit (or the sign, past the end)."""
    a = np.asarray(a)
    width = a.dtype.itemsize * 8
    position, length = np.asarray(position).astype(i8) & 255, np.asarray(length).astype(i8) & 255
    if a.dtype.itemsize == 8:
        bits = a.view(u8) >> position.astype(u8)
    else:
        bits = (a.astype(i8) >> np.minimum(position, 63)).astype(u8)
    field = bits & np.where(length >= 64, ~u8(0), (u8(1) << length.astype(u8)) - u8(1))
    if a.dtype.kind == "i":
        top = np.minimum(position + length - 1, width - 1)
        negative = (a.astype(i8) >> top & 1).astype(bool) & (length > 0)
        live = np.clip(np.minimum(length, width - position), 0, 63).astype(u8)
        field = np.where(negative, field | ~((u8(1) << live) - u8(1)), field)
    return field.astype(a.dtype)


def bit_insert(a, b, position, length):
    """bfi: put the low bits of a into b."""
    b = np.asarray(b)
    position, length = (np.asarray(v).astype(u8) & u8(255) for v in (position, length))
    ones = np.where(length >= 64, ~u8(0), (u8(1) << length) - u8(1))
    keep = (ones << position) & u8((1 << b.dtype.itemsize * 8) - 1)
    return (b.astype(u8) & ~keep | np.asarray(a).astype(u8) << position & keep).astype(b.dtype)


def bit_reverse(a):
    a = np.ascontiguousarray(a)
    bits = np.unpackbits(a.view(u1).reshape(-1, a.dtype.itemsize), axis=1, bitorder="little")
    return np.packbits(bits, axis=1)[:, ::-1].copy().view(a.dtype).ravel()


def leading_zeros(a):
    a = np.asarray(a)
    width = a.dtype.itemsize * 8
    for shift in (1, 2, 4, 8, 16, 32)[:width.bit_length() - 1]:
        a = a | a >> a.dtype.type(shift)
    return (width - np.bitwise_count(a)).astype(u4)


def highest_bit(a, from_top):
    """bfind: the position of the highest set bit (of the highest that differs from the sign), or all ones."""
    a = np.asarray(a)
    if a.dtype.kind == "i":
        a = np.where(a < 0, ~a, a).view(f"u{a.dtype.itemsize}")
    zeros = leading_zeros(a)
    top = u4(a.dtype.itemsize * 8 - 1)
    return np.where(a == 0, u4(0xFFFFFFFF), zeros if from_top else top - zeros)


def funnel(low, high, amount, left, wrap):
    """shf: shift a 64-bit pair and keep one word of it."""
    amount = np.asarray(amount) & u4(31) if wrap else np.minimum(amount, u4(32))
    both = np.asarray(high).astype(u8) << u8(32) | low
    amount = np.asarray(amount).astype(u8)
    return (both << amount >> u8(32) if left else both >> amount).astype(u4)


def logic3(a, b, c, table):
    """lop3: any function of three bits, by its truth table."""
    out = None
    for i in range(8):
        if table >> i & 1:
            term = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            out = term if out is None else out | term
    return a & u4(0) if out is None else out


def byte_dot(a, b, c, kinds):
    """dp4a: c + the dot product of four bytes."""
    x, y = (np.ascontiguousarray(v).view(k).reshape(-1, 4).astype(i8) for v, k in ((a, kinds[0]), (b, kinds[1])))
    return ((x * y).sum(1) + np.asarray(c).astype(i8)).astype(u4)
