"""Every arithmetic instruction of the emulator against Python integers, float64, or numpy's own rounding."""
import math
import operator

import numpy as np
import pytest

from ptx_text import each, run
from qwentin.kernels.emulator import Unsupported

rng = np.random.default_rng(3)
WORDS = np.concatenate([np.array([0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFF, 0x10000], np.uint32),
                        rng.integers(0, 2 ** 32, 56, dtype=np.uint32)])
OTHER = np.roll(WORDS, 5)
LONGS = np.concatenate([np.array([0, 1, 2 ** 63 - 1, 2 ** 63, 2 ** 64 - 1, 2 ** 32], np.uint64),
                        rng.integers(0, 2 ** 64, 58, dtype=np.uint64)])
OTHER_LONGS = np.roll(LONGS, 7)
FLOATS = np.concatenate([np.array([0, -0.0, 1, -1, 1.5, 3e38, -3e38, 1e-40, np.inf, -np.inf, np.nan, 2.5, -2.5, 0.1],
                                  np.float32),
                         rng.standard_normal(50).astype(np.float32) * np.float32(10) ** rng.integers(-8, 8, 50)]
                        ).astype(np.float32)


def signed(x, bits):
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def integers(kind, a, b=None):
    """Python integers of words, as a PTX type sees them."""
    bits = int(kind[1:])
    fix = (lambda v: signed(int(v), bits)) if kind[0] == "s" else int
    return [fix(v) for v in a], ([fix(v) for v in b] if b is not None else None)


BINARY = {"add": operator.add, "sub": operator.sub, "mul.lo": operator.mul, "and": operator.and_, "or": operator.or_,
          "xor": operator.xor, "min": min, "max": max}


@pytest.mark.parametrize("op, kind", [(o, k) for o in BINARY for k in ("u32", "s32", "u64", "s64")])
def test_binary_integer(op, kind):
    wide = kind.endswith("64")
    a, b = (LONGS, OTHER_LONGS) if wide else (WORDS, OTHER)
    x, y = integers(kind, a, b)
    name = f"{op}.b{kind[1:]}" if op in ("and", "or", "xor") else f"{op}.{kind}"
    got = each(f"{name} $d, $0, $1;", [a, b], a.dtype)
    assert got.tolist() == [BINARY[op](i, j) & (1 << int(kind[1:])) - 1 for i, j in zip(x, y)]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_mul_hi(kind):
    bits = int(kind[1:])
    a, b = (LONGS, OTHER_LONGS) if bits == 64 else (WORDS, OTHER)
    x, y = integers(kind, a, b)
    got = each(f"mul.hi.{kind} $d, $0, $1;", [a, b], a.dtype)
    assert got.tolist() == [(i * j >> bits) & (1 << bits) - 1 for i, j in zip(x, y)]


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_wide_and_mad(kind):
    x, y = integers(kind, WORDS, OTHER)
    assert each(f"mul.wide.{kind} $d, $0, $1;", [WORDS, OTHER], np.uint64).tolist() == \
        [i * j & 2 ** 64 - 1 for i, j in zip(x, y)]
    assert each(f"mad.wide.{kind} $d, $0, $1, $2;", [WORDS, OTHER, LONGS], np.uint64).tolist() == \
        [i * j + int(z) & 2 ** 64 - 1 for i, j, z in zip(x, y, LONGS)]
    assert each(f"mad.lo.{kind} $d, $0, $1, $2;", [WORDS, OTHER, WORDS], np.uint32).tolist() == \
        [i * j + int(z) & 2 ** 32 - 1 for i, j, z in zip(x, y, WORDS)]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_div_rem(kind):
    a, b = (LONGS, OTHER_LONGS) if kind.endswith("64") else (WORDS, OTHER)
    keep = b != 0
    a, b = a[keep], b[keep]
    x, y = integers(kind, a, b)
    quotient = [abs(i) // abs(j) * (1 if (i < 0) == (j < 0) else -1) for i, j in zip(x, y)]
    mask = (1 << int(kind[1:])) - 1
    assert each(f"div.{kind} $d, $0, $1;", [a, b], a.dtype).tolist() == [q & mask for q in quotient]
    assert each(f"rem.{kind} $d, $0, $1;", [a, b], a.dtype).tolist() == \
        [i - q * j & mask for i, j, q in zip(x, y, quotient)]


def test_shifts_by_the_width_or_more():
    by = np.resize(np.array([0, 1, 31, 32, 33, 64, 1000], np.uint32), 64)
    assert each("shl.b32 $d, $0, $1;", [WORDS, by], np.uint32).tolist() == \
        [int(a) << int(n) & 0xFFFFFFFF if n < 32 else 0 for a, n in zip(WORDS, by)]
    assert each("shr.u32 $d, $0, $1;", [WORDS, by], np.uint32).tolist() == \
        [int(a) >> int(n) if n < 32 else 0 for a, n in zip(WORDS, by)]
    assert each("shr.s32 $d, $0, $1;", [WORDS, by], np.uint32).tolist() == \
        [signed(int(a), 32) >> min(int(n), 31) & 0xFFFFFFFF for a, n in zip(WORDS, by)]


@pytest.mark.parametrize("text, value", [
    ("shf.l.wrap.b32", lambda lo, hi, n: ((hi << 32 | lo) << (n & 31) >> 32) & 0xFFFFFFFF),
    ("shf.r.wrap.b32", lambda lo, hi, n: ((hi << 32 | lo) >> (n & 31)) & 0xFFFFFFFF),
    ("shf.l.clamp.b32", lambda lo, hi, n: ((hi << 32 | lo) << min(n, 32) >> 32) & 0xFFFFFFFF),
    ("shf.r.clamp.b32", lambda lo, hi, n: ((hi << 32 | lo) >> min(n, 32)) & 0xFFFFFFFF)])
def test_funnel_shift(text, value):
    by = np.resize(np.arange(0, 40, 3, dtype=np.uint32), 64)
    assert each(f"{text} $d, $0, $1, $2;", [WORDS, OTHER, by], np.uint32).tolist() == \
        [value(int(a), int(b), int(n)) for a, b, n in zip(WORDS, OTHER, by)]


@pytest.mark.parametrize("table", [0xEA, 0x96, 0xE8, 0xF8, 0x1B, 0, 0xFF])
def test_lop3(table):
    c = np.roll(WORDS, 11)
    want = [sum((table >> ((x >> i & 1) * 4 + (y >> i & 1) * 2 + (z >> i & 1)) & 1) << i for i in range(32))
            for x, y, z in zip(WORDS.tolist(), OTHER.tolist(), c.tolist())]
    assert each(f"lop3.b32 $d, $0, $1, $2, {table};", [WORDS, OTHER, c], np.uint32).tolist() == want


def test_prmt():
    selector = np.concatenate([np.array([0x3210, 0x7654, 0x5410, 0x6240, 0xFEDC, 0x8888], np.uint32),
                               rng.integers(0, 2 ** 16, 58, dtype=np.uint32)])

    def permute(a, b, s):
        source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
        out = []
        for i in range(4):
            nibble = s >> 4 * i & 15
            byte = source[nibble & 7]
            out.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
        return int.from_bytes(bytes(out), "little")
    assert each("prmt.b32 $d, $0, $1, $2;", [WORDS, OTHER, selector], np.uint32).tolist() == \
        [permute(int(a), int(b), int(s)) for a, b, s in zip(WORDS, OTHER, selector)]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind):
    bits = int(kind[1:])
    a, b = (LONGS, OTHER_LONGS) if bits == 64 else (WORDS, OTHER)
    place = np.resize(np.array([0, 1, 5, 8, 16, 31, 40], np.uint32), 64)
    length = np.resize(np.array([0, 1, 3, 8, 32, 60], np.uint32), 64)

    def extract(x, pos, n):                                    # the ISA's bit-by-bit definition
        top = min(pos + n - 1, bits - 1)
        fill = 0 if kind[0] == "u" or n == 0 else x >> top & 1
        return sum(((x >> pos + i & 1) if i < n and pos + i < bits else fill) << i for i in range(bits))
    assert each(f"bfe.{kind} $d, $0, $1, $2;", [a, place, length], a.dtype).tolist() == \
        [extract(int(x), int(p), int(n)) for x, p, n in zip(a, place, length)]

    def insert(x, y, pos, n):
        for i in range(n):
            if pos + i < bits:
                y = y & ~(1 << pos + i) | (x >> i & 1) << pos + i
        return y
    if kind[0] == "u":
        assert each(f"bfi.b{bits} $d, $0, $1, $2, $3;", [a, b, place, length], a.dtype).tolist() == \
            [insert(int(x), int(y), int(p), int(n)) for x, y, p, n in zip(a, b, place, length)]


def test_counting_bits():
    words = WORDS.tolist()
    assert each("popc.b32 $d, $0;", [WORDS], np.uint32).tolist() == [x.bit_count() for x in words]
    assert each("clz.b32 $d, $0;", [WORDS], np.uint32).tolist() == [32 - x.bit_length() for x in words]
    assert each("clz.b64 $d, $0;", [LONGS], np.uint32).tolist() == [64 - x.bit_length() for x in LONGS.tolist()]
    assert each("brev.b32 $d, $0;", [WORDS], np.uint32).tolist() == [int(f"{x:032b}"[::-1], 2) for x in words]
    top = [x.bit_length() - 1 & 0xFFFFFFFF for x in words]
    assert each("bfind.u32 $d, $0;", [WORDS], np.uint32).tolist() == top
    signs = [(x if x < 2 ** 31 else ~x & 0xFFFFFFFF).bit_length() - 1 & 0xFFFFFFFF for x in words]
    assert each("bfind.s32 $d, $0;", [WORDS], np.uint32).tolist() == signs


def test_carry_chain():
    """128-bit addition and subtraction out of 32-bit pieces."""
    code = ("add.cc.u32 %r2, $0, $1; addc.u32 %r3, 0, 0; cvt.u64.u32 %rd2, %r3; shl.b64 %rd2, %rd2, 32; "
            "cvt.u64.u32 %rd3, %r2; or.b64 $d, %rd2, %rd3;")
    assert each(code, [WORDS, OTHER], np.uint64).tolist() == [a + b for a, b in zip(WORDS.tolist(), OTHER.tolist())]
    code = "sub.cc.u32 %r2, $0, $1; subc.u32 $d, 7, 0;"
    assert each(code, [WORDS, OTHER], np.uint32).tolist() == \
        [7 - (a < b) for a, b in zip(WORDS.tolist(), OTHER.tolist())]


def test_dp4a():
    def dot(a, b, c, kinds):
        x = np.frombuffer(a.to_bytes(4, "little"), kinds[0]).astype(int)
        y = np.frombuffer(b.to_bytes(4, "little"), kinds[1]).astype(int)
        return int((x * y).sum()) + c & 0xFFFFFFFF
    for text, kinds in (("u32.u32", (np.uint8, np.uint8)), ("s32.s32", (np.int8, np.int8)),
                        ("u32.s32", (np.uint8, np.int8))):
        got = each(f"dp4a.{text} $d, $0, $1, $2;", [WORDS, OTHER, WORDS], np.uint32)
        assert got.tolist() == [dot(int(a), int(b), int(a), kinds) for a, b in zip(WORDS, OTHER)]


# ---------------------------------------------------------------------------------------------------------- floats
def same(got, want):
    """Equal bit for bit, any NaN being as good as another."""
    assert got.dtype == want.dtype
    assert (np.isnan(got) == np.isnan(want)).all()
    number = ~np.isnan(want)
    assert (got[number].view(f"u{got.itemsize}") == want[number].view(f"u{got.itemsize}")).all()


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div.rn"])
def test_float_arithmetic(op):
    b = np.roll(FLOATS, 9)
    with np.errstate(all="ignore"):
        want = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div.rn": np.divide}[op](FLOATS, b)
    same(each(f"{op}.f32 $d, $0, $1;", [FLOATS, b], np.float32), want)


def test_min_max_of_nan():
    a, b = np.array([1, np.nan, np.nan, -0.5], np.float32), np.array([np.nan, 2, np.nan, 3], np.float32)
    same(each("min.f32 $d, $0, $1;", [a, b], np.float32), np.array([1, 2, np.nan, -0.5], np.float32))
    same(each("max.NaN.f32 $d, $0, $1;", [a, b], np.float32), np.array([np.nan, np.nan, np.nan, 3], np.float32))


def exact_fma(a, b, c):
    """a * b + c in rational arithmetic, rounded once to float32 (to nearest even)."""
    from fractions import Fraction
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        return np.float32(0)
    near = np.float32(float(exact))                            # may be one off, from rounding twice
    best = min((near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))),
               key=lambda v: (abs(Fraction(float(v)) - exact), int(np.float32(v).view(np.uint32)) & 1))
    return np.float32(best)


def test_fma_rounds_once():
    a, b, c = (rng.standard_normal(512).astype(np.float32) for _ in range(3))
    # 1 + 2^-23 times itself is 1 + 2^-22 + 2^-46; adding just under half an ulp makes a tie in float64 that is none
    a[:4], b[:4] = np.float32(1 + 2 ** -23), np.float32(1 + 2 ** -23)
    c[:4] = np.float32([2 ** -24, 2 ** -24 - 2 ** -48, -2 ** -24, 2 ** -80])
    a[4:8], b[4:8], c[4:8] = np.float32(1), np.float32(2 ** -24), np.float32([1, 1 + 2 ** -23, 1, 1])
    a[8], b[8], c[8] = np.float32(1 + 2 ** -12), np.float32(2 ** -24 + 2 ** -36), np.float32(1)
    a[9], b[9], c[9] = np.float32(-2 ** -60), np.float32(2 ** -60), np.float32(1 + 2 ** -23)
    a[10], b[10], c[10] = np.float32(2 ** -24 + 2 ** -47), np.float32(1), np.float32(1)
    same(each("fma.rn.f32 $d, $0, $1, $2;", [a, b, c], np.float32),
         np.array([exact_fma(*v) for v in zip(a, b, c)], np.float32))


def test_fma_does_not_round_twice():
    """(1 + e)(1 - e) = 1 - e^2; added to 2^24 + 2 it lies just under a tie, which float64 cannot tell from the tie."""
    e = np.float32(2 ** -23)
    a, b = np.float32([1 + e, -1 - e, 1]), np.float32([1 - e, 1 - e, 1])
    c = np.float32([2 ** 24 + 2, 2 ** 24 + 4, 2 ** 24 + 2])
    assert each("fma.rn.f32 $d, $0, $1, $2;", [a, b, c], np.float32).tolist() == [2 ** 24 + 2, 2 ** 24 + 4, 2 ** 24 + 4]


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_directed_rounding(mode):
    a, b = (rng.standard_normal(200).astype(np.float32) for _ in range(2))
    got = each(f"add.{mode}.f32 $d, $0, $1;", [a, b], np.float32).astype(np.float64)
    exact = a.astype(np.float64) + b
    toward = {"rz": np.abs(got) <= np.abs(exact), "rm": got <= exact, "rp": got >= exact}[mode]
    assert toward.all() and (np.abs(got - exact) < np.spacing(np.abs(exact).astype(np.float32))).all()
    assert (got != exact).any()


def test_flush_to_zero_and_saturate():
    a = np.array([1e-40, -1e-40, 0.5, 2, -3, np.nan], np.float32)
    one = np.ones(6, np.float32)
    same(each("mul.ftz.f32 $d, $0, $1;", [a, one], np.float32), np.array([0, -0.0, 0.5, 2, -3, np.nan], np.float32))
    same(each("mul.f32 $d, $0, $1;", [a, one], np.float32), a)
    same(each("add.sat.f32 $d, $0, $1;", [a, 0 * one], np.float32), np.array([1e-40, 0, 0.5, 1, 0, 0], np.float32))


@pytest.mark.parametrize("text, value", [
    ("ex2.approx.ftz.f32", lambda x: 2 ** x), ("lg2.approx.f32", math.log2), ("rcp.approx.ftz.f32", lambda x: 1 / x),
    ("rsqrt.approx.ftz.f32", lambda x: x ** -0.5), ("sqrt.rn.f32", math.sqrt), ("sin.approx.f32", math.sin),
    ("cos.approx.f32", math.cos), ("tanh.approx.f32", math.tanh)])
def test_functions_are_correctly_rounded(text, value):
    x = np.abs(rng.standard_normal(64).astype(np.float32)) + np.float32(0.01)
    same(each(f"{text} $d, $0;", [x], np.float32), np.array([value(float(v)) for v in x], np.float32))


@pytest.mark.parametrize("op", ["add", "mul", "fma", "max"])
@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_packed_halves(op, kind):
    import ml_dtypes
    half = np.float16 if kind == "f16x2" else ml_dtypes.bfloat16
    a, b, c = (rng.standard_normal(128).astype(np.float32).astype(half) for _ in range(3))
    wide = [v.astype(np.float64) for v in (a, b, c)]
    exact = {"add": wide[0] + wide[1], "mul": wide[0] * wide[1], "fma": wide[0] * wide[1] + wide[2],
             "max": np.maximum(wide[0], wide[1])}[op]           # exact in float64 for these magnitudes
    want = np.array([float(v) for v in exact]).astype(half)
    words = [v.view(np.uint32) for v in (a, b, c)][:3 if op == "fma" else 2]
    text = f"{op}{'.rn' if op in ('fma', 'mul') else ''}.{kind} $d, {', '.join(f'${i}' for i in range(len(words)))};"
    assert (each(text, words, np.uint32).view(half).view(np.uint16) == want.view(np.uint16)).all()


def test_packed_floats():
    a, b, c = (rng.standard_normal(64).astype(np.float32) for _ in range(3))
    words = [v.view(np.uint64) for v in (a, b, c)]
    got = each("fma.rn.f32x2 $d, $0, $1, $2;", words, np.uint64).view(np.float32)
    same(got, np.array([exact_fma(*v) for v in zip(a, b, c)], np.float32))


def test_neg_abs_copysign_of_halves():
    words = np.array([0x7E008001, 0x3C00BC00], np.uint32)
    assert each("neg.f16x2 $d, $0;", [words], np.uint32).tolist() == [0xFE000001, 0xBC003C00]
    assert each("abs.f16x2 $d, $0;", [words], np.uint32).tolist() == [0x7E000001, 0x3C003C00]
    same(each("copysign.f32 $d, $0, $1;", [np.float32([-1, 1]), np.float32([2, -3])], np.float32),
         np.float32([-2, 3]))


# --------------------------------------------------------------------------------------------- compare and select
@pytest.mark.parametrize("op, want", [("lt", [1, 0, 0, 0]), ("le", [1, 1, 0, 0]), ("ne", [1, 0, 1, 0]),
                                      ("ltu", [1, 0, 0, 1]), ("neu", [1, 0, 1, 1]), ("nan", [0, 0, 0, 1]),
                                      ("num", [1, 1, 1, 0]), ("geu", [0, 1, 1, 1])])
def test_setp_floats(op, want):
    a, b = np.float32([1, 2, 3, np.nan]), np.float32([2, 2, 2, 2])
    got = each(f"setp.{op}.f32 %p1, $0, $1; selp.u32 $d, 1, 0, %p1;", [a, b], np.uint32)
    assert got.tolist() == want


def test_setp_halves():
    a, b = np.float16([1, 2, np.nan, -0.0]), np.float16([2, 2, 1, 0])
    got = each("setp.lt.f16 %p1, $0, $1; selp.u32 $d, 1, 0, %p1;", [a, b], np.uint32)
    assert got.tolist() == [1, 0, 0, 0]
    assert each("setp.neu.f16 %p1, $0, $1; selp.u32 $d, 1, 0, %p1;", [a, b], np.uint32).tolist() == [1, 0, 1, 0]


def test_setp_pair_and_combination():
    a = np.arange(8, dtype=np.uint32)
    code = ("setp.gt.u32 %p3, $0, 5; setp.lt.and.u32 %p1|%p2, $0, 7, %p3; selp.u32 %r2, 1, 0, %p1; "
            "selp.u32 %r3, 2, 0, %p2; add.u32 $d, %r2, %r3;")
    assert each(code, [a], np.uint32).tolist() == [0, 0, 0, 0, 0, 0, 1, 2]     # p = (a<7) & p3, q = !(a<7) & p3
    assert each("setp.lt.s32 %p1, $0, 0; selp.b32 $d, 5, 6, !%p1;".replace("!%p1", "%p1"),
                [np.array([1, 0xFFFFFFFF], np.uint32)], np.uint32).tolist() == [6, 5]


def test_predicated_move_keeps_the_old_value():
    a = np.arange(4, dtype=np.uint32)
    code = "mov.u32 $d, 9; setp.gt.u32 %p1, $0, 1; @%p1 mov.u32 $d, $0; @!%p1 add.u32 $d, $d, 1;"
    assert each(code, [a], np.uint32).tolist() == [10, 10, 2, 3]


def test_mov_packs_and_unpacks():
    a = WORDS[:8]
    assert each("mov.b64 $d, {$0, $1};", [a, a + np.uint32(1)], np.uint64).tolist() == \
        [int(x) | (int(x) + 1 & 0xFFFFFFFF) << 32 for x in a]
    assert each("mov.b32 {%rs1, %rs2}, $0; mov.b32 $d, {%rs2, %rs1};", [a], np.uint32).tolist() == \
        [(int(x) >> 16 | int(x) << 16) & 0xFFFFFFFF for x in a]
    assert each("mov.b64 {%r5, _}, $0; mov.u32 $d, %r5;", [LONGS[:4]], np.uint32).tolist() == \
        [int(x) & 0xFFFFFFFF for x in LONGS[:4]]


@pytest.mark.parametrize("text, message", [
    ("frobnicate.u32 %r1, %r2;", "unknown instruction"), ("add.sat.s32 %r1, %r2, %r3;", "saturation"),
    ("add.u32.wobble %r1, %r2, %r3;", "unknown modifier .wobble"), ("mul.ftz.f16x2 %r1, %r2, %r3;", "half types"),
    ("tcgen05.alloc.cta_group::1.sync.aligned.b32 [%r1], 32;", "unknown instruction")])
def test_unknown_is_an_error_that_names_the_instruction(text, message):
    with pytest.raises(Unsupported, match=message) as caught:
        run(text, np.zeros(1, np.uint32))
    assert text.rstrip(";") in str(caught.value)
