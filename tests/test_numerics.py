"""The codecs against ml_dtypes (an outside implementation) and against cases worked out by hand."""
import ml_dtypes
import numpy as np
import pytest

from qwentin import numerics
from qwentin.numerics import E2M1, E2M3, E3M2, E4M3

ORACLE = {"e4m3": ml_dtypes.float8_e4m3fn, "e2m3": ml_dtypes.float6_e2m3fn, "e3m2": ml_dtypes.float6_e3m2fn,
          "e2m1": ml_dtypes.float4_e2m1fn}
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E2M3, E3M2, E2M1], ids=lambda f: f.name)
INFINITY = np.float32(np.inf)


def oracle_encode(fmt, x):
    """ml_dtypes' codes; it turns what is too large for e4m3 into NaN, so clip first: saturation is tested by itself."""
    return np.clip(x, -fmt.max, fmt.max).astype(ORACLE[fmt.name]).view(np.uint8)


def random_floats(rng, n):
    """Every exponent of float32 and both signs, some in the formats' own range."""
    anywhere = rng.integers(0, 1 << 32, n // 2, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = (rng.standard_normal(n - n // 2) * 2.0 ** rng.integers(-14, 10, n - n // 2)).astype(np.float32)
    return np.concatenate([anywhere[~np.isnan(anywhere)], near])


@FORMATS
def test_every_code_has_its_value(fmt):
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    np.testing.assert_array_equal(fmt.decode(codes), codes.view(ORACLE[fmt.name]).astype(np.float32))
    assert fmt.max == float(ml_dtypes.finfo(ORACLE[fmt.name]).max)


@FORMATS
def test_every_value_has_its_code(fmt):
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    np.testing.assert_array_equal(fmt.encode(fmt.decode(codes)), codes)        # both zeros, subnormals, both NaN


@FORMATS
def test_midpoints_go_to_even_and_their_neighbours_do_not(fmt):
    codes = np.arange(fmt.sign - (fmt.nan is not None), dtype=np.uint8)
    values = fmt.values[codes]
    middle = (values[:-1] + values[1:]) / np.float32(2)
    even = codes[:-1] + (codes[:-1] & 1)
    for sign, bit in ((np.float32(1), 0), (np.float32(-1), fmt.sign)):
        np.testing.assert_array_equal(fmt.encode(sign * middle), even | bit)
        np.testing.assert_array_equal(fmt.encode(sign * np.nextafter(middle, np.float32(0))), codes[:-1] | bit)
        np.testing.assert_array_equal(fmt.encode(sign * np.nextafter(middle, INFINITY)), codes[1:] | bit)
        np.testing.assert_array_equal(fmt.encode(sign * middle), oracle_encode(fmt, sign * middle))


@FORMATS
def test_a_million_random_values(fmt):
    x = random_floats(np.random.default_rng(1), 1_000_000)
    np.testing.assert_array_equal(fmt.encode(x), oracle_encode(fmt, x))


@FORMATS
def test_saturates(fmt):
    last = fmt.sign - 1 - (fmt.nan is not None)
    beyond = np.array([fmt.max, np.nextafter(np.float32(fmt.max), INFINITY), fmt.max * 2, 3e38, np.inf], np.float32)
    assert set(fmt.encode(beyond)) == {last}
    assert set(fmt.encode(-beyond)) == {last | fmt.sign}


@FORMATS
def test_tiny_values_and_zeros_keep_their_sign(fmt):
    tiny = np.array([0, 1e-45, 1e-38, float(fmt.values[1]) / 2], np.float32)   # half the smallest code ties to zero
    assert set(fmt.encode(tiny)) == {0} and set(fmt.encode(-tiny)) == {fmt.sign}


def test_nan():
    assert list(E4M3.encode(np.array([np.nan, -np.nan], np.float32))) == [0x7F, 0xFF]
    for fmt in (E2M3, E3M2, E2M1):
        with pytest.raises(ValueError, match=f"{fmt.name} has no NaN, and 1 of 2"):
            fmt.encode(np.array([np.nan, 1], np.float32))


@FORMATS
def test_refuses_what_would_be_rounded_twice(fmt):
    with pytest.raises(ValueError, match="got float64"):
        fmt.encode(np.array([1.0]))
    with pytest.raises(ValueError, match="got int32"):
        fmt.decode(np.zeros(3, np.int32))
    if fmt.bits < 8:
        with pytest.raises(ValueError, match=f"below {1 << fmt.bits}, got 255"):
            fmt.decode(np.array([255], np.uint8))


def test_bf16_all_codes():
    codes = np.arange(1 << 16, dtype=np.uint16)
    value = numerics.decode_bf16(codes)
    np.testing.assert_array_equal(value.view(np.uint32), codes.astype(np.uint32) << 16)
    number = ~np.isnan(value)
    np.testing.assert_array_equal(numerics.encode_bf16(value[number]), codes[number])
    np.testing.assert_array_equal(numerics.encode_bf16(value[~number]), 0x7FC0 | codes[~number] & 0x8000)


def test_bf16_rounding():
    codes = np.arange(0x7F80, dtype=np.uint32)
    middle = (codes << np.uint32(16) | np.uint32(0x8000)).view(np.float32)     # the last one rounds to infinity
    special = np.array([np.inf, -np.inf, 0, -0.0, 1e-45], np.float32)
    for x in (middle, -middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, INFINITY), special,
              random_floats(np.random.default_rng(2), 1_000_000)):
        with np.errstate(over="ignore"):
            wanted = x.astype(ml_dtypes.bfloat16).view(np.uint16)
        np.testing.assert_array_equal(numerics.encode_bf16(x), wanted)
    with pytest.raises(ValueError, match="got float64"):
        numerics.encode_bf16(np.zeros(2))
    with pytest.raises(ValueError, match="uint16"):
        numerics.decode_bf16(np.zeros(2, np.int16))


def test_ue8m0():
    codes = np.arange(256, dtype=np.uint8)
    value = numerics.decode_ue8m0(codes)
    np.testing.assert_array_equal(value, codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    np.testing.assert_array_equal(numerics.encode_ue8m0(value), codes)
    middle = value[:254] * np.float32(1.5)
    np.testing.assert_array_equal(numerics.encode_ue8m0(middle), codes[1:255])
    np.testing.assert_array_equal(numerics.encode_ue8m0(np.nextafter(middle, np.float32(0))), codes[:254])
    x = np.abs(random_floats(np.random.default_rng(3), 1_000_000))
    x = x[(x >= 2.0 ** -126) & (x <= 2.0 ** 127)]      # below, ml_dtypes rounds 1.05 * 2^-127 up: not the nearest
    np.testing.assert_array_equal(numerics.encode_ue8m0(x), x.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8))
    edge = np.array([np.inf, 3e38, 1e-45, 0, -1, np.nan], np.float32)
    assert list(numerics.encode_ue8m0(edge)) == [254, 254, 0, 255, 255, 255]


def test_bit_strings_by_hand():
    assert list(numerics.pack_bits(np.array([0x1, 0xF, 0x7, 0x8], np.uint8), 4)) == [0xF1, 0x87]
    four = np.array([0b000001, 0b100010, 0b111100, 0b101010], np.uint8)
    #                byte 0: code1[1:0] code0       byte 1: code2[3:0] code1[5:2]   byte 2: code3 code2[5:4]
    assert list(numerics.pack_bits(four, 6)) == [0b10_000001, 0b1100_1000, 0b101010_11]


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_bit_strings(bits):
    codes = np.random.default_rng(4).integers(0, 1 << bits, (3, 5, 64)).astype(np.uint8)
    packed = numerics.pack_bits(codes, bits)
    assert packed.shape == (3, 5, 8 * bits)
    np.testing.assert_array_equal(numerics.unpack_bits(packed, bits), codes)
    string = np.unpackbits(packed[1, 2], bitorder="little").reshape(64, bits)          # the law, read literally
    np.testing.assert_array_equal(string @ (1 << np.arange(bits)), codes[1, 2])
    assert numerics.pack_bits(codes[:, :0], bits).shape == (3, 0, 8 * bits)


def test_bit_strings_refuse():
    with pytest.raises(ValueError, match="multiple of 4"):
        numerics.pack_bits(np.zeros((2, 6), np.uint8), 6)
    with pytest.raises(ValueError, match="multiple of 3"):
        numerics.unpack_bits(np.zeros((2, 4), np.uint8), 6)
    with pytest.raises(ValueError, match="below 16, got 16"):
        numerics.pack_bits(np.array([16, 0], np.uint8), 4)
    with pytest.raises(ValueError, match="got 5"):
        numerics.pack_bits(np.zeros(8, np.uint8), 5)


def nvfp4_case():
    """One row of 32: codes 0..15 twice, block scales 1.5 (0x3c) and 448 (0x7e)."""
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)[None]
    magnitude = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    row = np.array(magnitude + [-m for m in magnitude], np.float32)
    unscaled = np.concatenate([row * 1.5, row * 448])[None]
    return numerics.pack_bits(codes, 4), np.array([[0x3C, 0x7E]], np.uint8), unscaled


def test_nvfp4_both_conventions_by_hand():
    packed, scale, unscaled = nvfp4_case()
    assert packed[0, 0] == 0x10 and packed[0, 7] == 0xFE                       # even input in the low half
    divided = numerics.decode_nvfp4(packed, scale, 256.0, "compressed-tensors")
    np.testing.assert_array_equal(divided, unscaled / 256)
    assert divided[0, 7] == 6 * 1.5 / 256 and divided[0, 31] == -6 * 448 / 256
    multiplied = numerics.decode_nvfp4(packed, scale, 1 / 256, "modelopt")
    np.testing.assert_array_equal(multiplied, divided)                         # a power of two: the same both ways
    third = numerics.decode_nvfp4(packed, scale, 3.0, "compressed-tensors")
    assert third[0, 1] == np.float32(0.75) / np.float32(3) and third.dtype == np.float32


def test_nvfp4_refuses():
    packed, scale, _ = nvfp4_case()
    with pytest.raises(ValueError, match=r"\(1, 16\) and \(1, 1\)"):
        numerics.decode_nvfp4(packed, scale[:, :1], 1.0, "modelopt")
    with pytest.raises(ValueError, match="positive number, got 0"):
        numerics.decode_nvfp4(packed, scale, 0, "modelopt")
    with pytest.raises(ValueError, match="got 'nvidia'"):
        numerics.decode_nvfp4(packed, scale, 1.0, "nvidia")


def test_fp8_blocks_by_hand():
    codes = np.full((130, 257), 0x38, np.uint8)                                # 1.0
    codes[129, 256] = 0xFE                                                     # -448
    scale = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    value = numerics.decode_fp8_blocks(codes, scale)
    assert (value[:128, :128] == 1).all() and (value[:128, 128:256] == 2).all() and (value[:128, 256] == 3).all()
    assert (value[128:, :128] == 4).all() and value[128, 256] == 6 and value[129, 256] == -448 * 6
    with pytest.raises(ValueError, match=r"want float32 scales \(2, 3\), got float32 \(1, 3\)"):
        numerics.decode_fp8_blocks(codes, scale[:1])
