"""The packed layout against its picture, read bit by bit; round trips; what the packer refuses."""
import numpy as np
import pytest

from qwentin import numerics
from qwentin.kernels import packed
from qwentin.kernels.packed import FP4, FP6, FP8, NVFP4, Packing

PACKINGS = pytest.mark.parametrize("packing", [FP6, FP4, FP8, NVFP4, Packing("fp6", numerics.E2M3, 32),
                                               Packing("fp8", numerics.E4M3, 32)], ids=lambda p: f"{p.name}-{p.block}")


def matrix(packing, n, k, seed=0):
    """Random codes (no NaN) and finite scales."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << packing.codes.bits, (n, k)).astype(np.uint8)
    if packing.codes.nan is not None:
        codes[codes & 0x7F == packing.codes.nan] = 0
    shape, dtype = packing.scales(n, k)
    return codes, rng.integers(1, 126, shape).astype(dtype)


def bit(packed_bytes, at):
    return packed_bytes[at // 8] >> at % 8 & 1


def literal_code(packing, array, row, column):
    """The code of one weight, fetched bit by bit as the module's picture says."""
    tile = array[row // 16, column // 128]
    g, r, inside = row % 16 // 2, row % 2, column % 128
    b, t, s, j = inside // 32, inside // 8 % 4, inside // 4 % 2, inside % 4
    lane, i = 4 * g + t, [0, 2, 1, 3].index(j)

    def word(plane, number):
        return tile[512 * plane + 16 * lane + 4 * number:][:4]
    if packing.codes.bits == 8:
        return word(b, 2 * s + r)[i]
    low = word(b // 2, 2 * (b % 2) + r)
    code = sum(int(bit(low, 8 * i + 4 * s + m)) << m for m in range(4))
    if packing.codes.bits == 4:
        return code
    high = word(2, b)
    return code | int(bit(high, 8 * i + 7 - 2 * s - r)) << 5 | int(bit(high, 8 * i + 3 - 2 * s - r)) << 4


@PACKINGS
def test_the_picture(packing):
    codes, scales = matrix(packing, 32, 256)
    array = packed.pack(packing, codes, scales)
    got = np.array([[literal_code(packing, array, row, column) for column in range(256)] for row in range(32)])
    np.testing.assert_array_equal(got, codes)
    size = scales.dtype.itemsize * 128 // packing.block
    for row, deep in ((0, 0), (5, 1), (31, 1)):
        stored = array[row // 16, deep, packing.code_bytes + row % 16 * size:][:size].view(scales.dtype)
        np.testing.assert_array_equal(stored, scales[row].reshape(2, -1)[deep])


def test_fp4_word_as_drawn():
    codes = np.zeros((16, 128), np.uint8)
    codes[0, :8] = np.arange(1, 9)                                   # s0: j = 0..3 are 1..4; s1: 5..8
    array = packed.pack(FP4, codes, np.zeros((16, 4), np.uint8))
    assert array[0, 0, :4].view("<u4")[0] == 0x84_62_73_51           # s1 j3, s0 j3, s1 j1, s0 j1, s1 j2, s0 j2, ...


def f16_registers(word_low, word_high, s, pair, r):
    """The formula of the docstring: an fp6 weight register for the f16 mma."""
    low_shift, place = 7 - 8 * pair - 4 * s, 2 * s + r
    low = word_low << low_shift if low_shift > 0 else word_low >> -low_shift
    return (low & 0x07800780 | word_high << (place + (0 if pair else 8)) & 0x88008800) & 0xFFFFFFFF


def test_fp6_registers_are_the_values_as_f16():
    codes, scales = matrix(FP6, 16, 128)
    array = packed.pack(FP6, codes, scales)[0, 0]
    for lane, b, r, s, pair in np.ndindex(32, 4, 2, 2, 2):
        low = int(array[512 * (b // 2) + 16 * lane + 4 * (2 * (b % 2) + r):][:4].view("<u4")[0])
        high = int(array[1024 + 16 * lane + 4 * b:][:4].view("<u4")[0])
        register = np.array([f16_registers(low, high, s, pair, r)], np.uint32).view(np.float16)
        column = 32 * b + 8 * (lane % 4) + 4 * s + 2 * pair
        want = numerics.E2M3.decode(codes[2 * (lane // 4) + r, column:column + 2]) * np.float32(2.0 ** -14)
        np.testing.assert_array_equal(register.astype(np.float32), want)


@PACKINGS
@pytest.mark.parametrize("n, k", [(16, 128), (1, 128), (50, 384), (96, 5120)])
def test_round_trip(packing, n, k):
    codes, scales = matrix(packing, n, k, seed=n)
    array = packed.pack(packing, codes, scales)
    assert array.shape == packing.shape(n, k) == (-(-n // 16), k // 128, packing.tile_bytes)
    back, scales_back = packed.unpack(packing, array, n)
    np.testing.assert_array_equal(back, codes)
    np.testing.assert_array_equal(scales_back, scales)
    value = packed.decode(packing, array, n)
    scale = packed.SCALES[packing.block][1](scales)
    for row, column in ((0, 0), (n - 1, k - 1), (n // 2, k // 2)):
        assert value[row, column] == packing.codes.values[codes[row, column]] * scale[row, column // packing.block]
    if n % 16:
        padding = packed.unpack(packing, array, array.shape[0] * 16)
        assert not padding[0][n:].any() and not padding[1][n:].any()


def test_a_row_prefix_is_a_byte_prefix():
    codes, scales = matrix(FP6, 64, 256)
    whole, half = packed.pack(FP6, codes, scales), packed.pack(FP6, codes[:32], scales[:32])
    assert whole.tobytes().startswith(half.tobytes())


def test_sizes_of_the_27b():
    """Bytes a weight: codes, and one scale for its block."""
    for packing, bits in ((FP6, 6 + 16 / 128), (FP4, 4 + 8 / 32), (FP8, 8 + 16 / 128), (NVFP4, 4 + 8 / 16)):
        for n, k in ((34816, 5120), (16384, 5120), (248320, 5120), (5120, 17408), (5120, 6144), (96, 5120)):
            assert np.prod(packing.shape(n, k), dtype=np.int64) == n * k * bits / 8
        assert packing.tile_bytes % 32 == 0                          # tiles start on a memory sector


def test_byte_order():
    x = np.arange(16, dtype=np.uint8).reshape(2, 8)
    np.testing.assert_array_equal(packed.byte_order(x)[0], [0, 2, 1, 3, 4, 6, 5, 7])
    np.testing.assert_array_equal(packed.byte_order(packed.byte_order(x)), x)


def test_refuses():
    codes, scales = matrix(FP6, 16, 256)
    with pytest.raises(ValueError, match="multiple of 128 inputs, got 16 x 200"):
        packed.pack(FP6, codes[:, :200], scales)
    with pytest.raises(ValueError, match="below 64, got uint8 up to 127"):
        packed.pack(FP6, codes | 64, scales)
    with pytest.raises(ValueError, match="want scales"):
        packed.pack(FP6, codes, scales.astype(np.uint8))
    with pytest.raises(ValueError, match="hold a NaN"):
        packed.pack(FP8, np.full((16, 128), 0xFF, np.uint8), np.zeros((16, 1), np.uint16))
    with pytest.raises(ValueError, match="17 rows of fp6"):
        packed.unpack(FP6, packed.pack(FP6, codes, scales), 17)
    with pytest.raises(ValueError, match="128, 32 or 16 inputs, got 64"):
        Packing("fp6", numerics.E2M3, 64)
