"""cvt in every form, and the format tables, against ml_dtypes and exact arithmetic."""
import ml_dtypes
import numpy as np
import pytest

from ptx_text import each
from qwentin.kernels.emulator import Unsupported, formats

rng = np.random.default_rng(5)
FLOATS = np.concatenate([np.float32([0, -0.0, 1, -1, 0.5, 1.5, 2.5, 3.5, -2.5, 448, 449, 464, 500, -1e9, 3e38, 6.0, 5.0,
                                     7.5, 7.25, 1e-8, 2.0 ** -9, 2.0 ** -10, 1.5 * 2.0 ** -10, 0.0625, 0.03125]),
                         (rng.standard_normal(175) * np.exp2(rng.integers(-14, 10, 175))).astype(np.float32)])
SMALL = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m3": ml_dtypes.float6_e2m3fn,
         "e3m2": ml_dtypes.float6_e3m2fn, "e2m1": ml_dtypes.float4_e2m1fn}
BITS = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}


@pytest.mark.parametrize("name", SMALL)
def test_tables(name):
    codes = np.arange(1 << BITS[name], dtype=np.uint8)
    want = codes.view(SMALL[name]).astype(np.float64)
    np.testing.assert_array_equal(formats.CODES[name], want)


def test_scale_tables():
    np.testing.assert_array_equal(formats.UE8M0[:255], np.exp2(np.arange(255) - 127.0))
    assert np.isnan(formats.UE8M0[255])
    want = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(formats.UE4M3, np.concatenate([want, want]))


def test_operand_bytes():
    """An mma reads fp6 from bits 0..5 of a byte and fp4 from bits 2..5, whatever stands in the others."""
    for byte in (0b00000000, 0b11000000, 0b01000011, 0b10101011):
        for code in range(64):
            assert formats.OPERAND_BYTE["e2m3"][byte & 0xC0 | code] == formats.E2M3[code]
        for code in range(16):
            assert formats.OPERAND_BYTE["e2m1"][byte & 0xC3 | code << 2] == formats.E2M1[code]


def rounded(x, name):
    """float32 -> code, to nearest even and clipped, by ml_dtypes."""
    limit = float(ml_dtypes.finfo(SMALL[name]).max)
    return np.clip(x, -limit, limit).astype(SMALL[name]).view(np.uint8)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m3", "e3m2"])
def test_pairs_of_bytes(name):
    low, high = FLOATS[:100], FLOATS[100:]
    got = each(f"cvt.rn.satfinite.{name}x2.f32 $d, $1, $0;", [low, high], np.uint16)
    want = rounded(low, name).astype(np.uint16) | rounded(high, name).astype(np.uint16) << 8
    np.testing.assert_array_equal(got, want)


def test_pairs_of_fp4_fill_one_byte():
    low, high = FLOATS[:100], FLOATS[100:]
    got = each("{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, $1, $0; cvt.u32.u8 $d, t; }", [low, high], np.uint32)
    np.testing.assert_array_equal(got, rounded(low, "e2m1").astype(np.uint32) | rounded(high, "e2m1") << 4)


def test_nan_becomes_nan_or_the_largest():
    nan, zero = np.float32([np.nan, -np.nan]), np.float32([0, 0])
    for name, code in (("e4m3", 0x7F), ("e5m2", 0x7F), ("e2m3", 0x1F), ("e3m2", 0x1F)):
        assert each(f"cvt.rn.satfinite.{name}x2.f32 $d, $1, $0;", [nan, zero], np.uint16).tolist() == [code, code]


def test_relu():
    x = np.float32([-3, 3])
    assert each("cvt.rn.satfinite.relu.e4m3x2.f32 $d, $0, $0;", [x], np.uint16).tolist() == \
        [0, int(rounded(x[1:], "e4m3")[0]) * 257]


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m3", "e3m2"])
def test_bytes_to_halves(name):
    codes = np.arange(1 << BITS[name], dtype=np.uint16)
    pairs = codes | codes[::-1] << 8
    got = each(f"cvt.rn.f16x2.{name}x2 $d, $0;", [pairs], np.uint32)
    half = formats.CODES[name].astype(np.float16)
    for part, want in ((got & 0xFFFF, half), (got >> 16, half[::-1])):
        np.testing.assert_array_equal(part.astype(np.uint16).view(np.float16), want)


def test_fp4_to_halves():
    byte = np.arange(256, dtype=np.uint32)
    got = each("{ .reg .b8 t; cvt.u8.u32 t, $0; cvt.rn.f16x2.e2m1x2 $d, t; }", [byte], np.uint32)
    half = formats.E2M1.astype(np.float16).view(np.uint16).astype(np.uint32)
    np.testing.assert_array_equal(got, half[byte & 15] | half[byte >> 4] << 16)


def test_halves_to_bytes():
    pairs = rng.standard_normal((64, 2)).astype(np.float16)
    got = each("cvt.rn.satfinite.e4m3x2.f16x2 $d, $0;", [pairs.view(np.uint32).ravel()], np.uint16)
    np.testing.assert_array_equal(got.view(np.uint8).reshape(-1, 2), rounded(pairs.astype(np.float32), "e4m3"))


@pytest.mark.parametrize("name, half", [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_halves_and_float32(name, half):
    x = np.concatenate([FLOATS, np.float32([65504, 65519, 65520, 1e-7, 6e-8, 2e-8, np.inf])])
    with np.errstate(over="ignore"):
        want = x.astype(half).view(np.uint16)
    np.testing.assert_array_equal(each(f"cvt.rn.{name}.f32 $d, $0;", [x], np.uint16), want)
    pairs = each(f"cvt.rn.{name}x2.f32 $d, $1, $0;", [x, x[::-1]], np.uint32)
    np.testing.assert_array_equal(pairs, want.astype(np.uint32) | want[::-1].astype(np.uint32) << 16)
    back = each(f"cvt.f32.{name} $d, $0;", [want], np.float32)
    np.testing.assert_array_equal(back, want.view(half).astype(np.float32))


def test_double_to_bf16_rounds_once():
    """1 + 2^-8 + 2^-40: float32 would make it a tie, which goes down to even; the truth is above."""
    got = each("cvt.rn.bf16.f64 $d, $0;", [np.float64([1 + 2 ** -8 + 2 ** -40, 1 + 2 ** -8])], np.uint16)
    assert got.tolist() == [0x3F81, 0x3F80]


def test_scales():
    x = np.float32([1, 1.5, 2, 3, 0.75, 2.0 ** -127, 2.0 ** 127, 3e38, 0, np.inf, np.nan, 1e-45])
    down = each("cvt.rz.satfinite.ue8m0x2.f32 $d, $0, $0;", [x], np.uint16) & 255
    up = each("cvt.rp.satfinite.ue8m0x2.f32 $d, $0, $0;", [x], np.uint16) & 255
    assert down.tolist() == [127, 127, 128, 128, 126, 0, 254, 254, 0, 254, 255, 0]
    assert up.tolist() == [127, 128, 128, 129, 127, 0, 254, 254, 0, 254, 255, 0]
    codes = np.arange(0, 255, dtype=np.uint16)
    back = each("cvt.rn.bf16x2.ue8m0x2 $d, $0;", [codes], np.uint32)
    values = (back & 0xFFFF).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(values, np.exp2(codes - 127.0))


def test_float_to_integer():
    x = np.float32([0.5, 1.5, 2.5, -0.5, -1.5, 3e9, -3e9, np.nan, np.inf, 5e19, 127.6])
    as_signed = lambda v: v.view(np.int32).tolist()
    assert as_signed(each("cvt.rni.s32.f32 $d, $0;", [x], np.uint32)) == \
        [0, 2, 2, 0, -2, 2 ** 31 - 1, -2 ** 31, 0, 2 ** 31 - 1, 2 ** 31 - 1, 128]
    assert as_signed(each("cvt.rzi.s32.f32 $d, $0;", [x], np.uint32))[:5] == [0, 1, 2, 0, -1]
    assert as_signed(each("cvt.rmi.s32.f32 $d, $0;", [x], np.uint32))[:5] == [0, 1, 2, -1, -2]
    assert as_signed(each("cvt.rpi.s32.f32 $d, $0;", [x], np.uint32))[:5] == [1, 2, 3, 0, -1]
    assert each("cvt.rzi.u32.f32 $d, $0;", [x], np.uint32).tolist()[3:9] == [0, 0, 3000000000, 0, 0, 2 ** 32 - 1]
    assert each("cvt.rzi.u64.f32 $d, $0;", [x], np.uint64).tolist()[5:] == \
        [3000000000, 0, 0, 2 ** 64 - 1, 2 ** 64 - 1, 127]
    assert each("cvt.rzi.s64.f32 $d, $0;", [x], np.uint64).view(np.int64).tolist()[5:9] == \
        [3000000000, -3000000000, 0, 2 ** 63 - 1]


def test_integer_to_float_and_width_changes():
    words = np.uint32([0, 1, 2 ** 24 + 1, 0x80000000, 0xFFFFFFFF])
    assert each("cvt.rn.f32.u32 $d, $0;", [words], np.float32).tolist() == \
        [0, 1, 2 ** 24, 2 ** 31, 2 ** 32]
    assert each("cvt.rn.f32.s32 $d, $0;", [words], np.float32).tolist() == [0, 1, 2 ** 24, -2 ** 31, -1]
    assert each("cvt.s64.s32 $d, $0;", [words], np.uint64).view(np.int64).tolist() == \
        [0, 1, 2 ** 24 + 1, -2 ** 31, -1]
    assert each("cvt.u64.u32 $d, $0;", [words], np.uint64).tolist() == words.tolist()
    assert each("cvt.s32.s8 $d, $0;", [np.uint32([0x7F, 0x180, 0xFF])], np.uint32).view(np.int32).tolist() == \
        [127, -128, -1]
    assert each("cvt.sat.s8.s32 $d, $0;", [np.uint32([300, 0xFFFFFE00, 5])], np.uint16).view(np.int16).tolist() == \
        [127, -128, 5]
    assert each("cvt.u16.u32 $d, $0;", [np.uint32([0x12345])], np.uint16).tolist() == [0x2345]


def test_round_to_integral_and_saturate():
    x = np.float32([0.5, 1.5, -2.5, 0.3, 7.9, np.nan])
    assert each("cvt.rni.f32.f32 $d, $0;", [x], np.float32).tolist()[:5] == [0, 2, -2, 0, 8]
    assert each("cvt.sat.f32.f32 $d, $0;", [x], np.float32).tolist() == [0.5, 1, 0, np.float32(0.3), 1, 0]


@pytest.mark.parametrize("text", ["cvt.rz.f16.f32 $d, $0;", "cvt.rn.e4m3x2.f32 $d, $0, $0;", "cvt.s32.f32 $d, $0;",
                                  "cvt.rs.f16x2.f32 $d, $0, $0;"])
def test_forms_that_are_not_known(text):
    with pytest.raises(Unsupported):
        each(text, [FLOATS[:4]], np.uint16 if "16" in text or "x2" in text else np.uint32)
