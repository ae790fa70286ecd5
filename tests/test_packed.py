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


def literal_code(packing, array, row, column):
    """The code of one weight, fetched bit by bit as the module's text says."""
    tile = array[row // 128, column // 128, row % 128 // 16]
    g, r, inside = row % 16 // 2, row % 2, column % 128
    b, t, s, j = inside // 32, inside // 8 % 4, inside // 4 % 2, inside % 4
    lane, n, w = 4 * g + t, s + 2 * (j // 2) + 4 * (j % 2), 2 * (b % 2) + r

    def bit(plane, word, at):
        return int(tile[512 * plane + 16 * lane + 4 * word:][:4].view("<u4")[0]) >> at % 32 & 1
    if packing.codes.bits == 8:
        return tile[512 * b + 16 * lane + 4 * (2 * s + r) + [0, 2, 1, 3].index(j)]
    if packing.codes.bits == 4:
        f = (0, 3, 8, 11)[n % 4] + 16 * (n // 4) + 2 * w
        sign = w if s == 0 else (w + 1) % 4
        return sum(bit(b // 2, w, f + m) << m for m in range(3)) | bit(b // 2, sign, f + 6) << 3
    f = 4 * n + w
    high = 2 * (b // 2) + s
    return sum(bit(b // 2, w, f + m) << m for m in range(4)) | bit(2, high, f + 4) << 4 | bit(2, high, f + 8) << 5


@PACKINGS
def test_the_picture(packing):
    codes, scales = matrix(packing, 160, 256)
    array = packed.pack(packing, codes, scales)
    rows = [0, 1, 15, 16, 37, 127, 128, 159]
    got = np.array([[literal_code(packing, array, row, column) for column in range(256)] for row in rows])
    np.testing.assert_array_equal(got, codes[rows])
    size = scales.dtype.itemsize * 128 // packing.block
    for row, deep in ((0, 0), (5, 1), (31, 1), (159, 0)):
        tile = array[row // 128, deep, row % 128 // 16]
        stored = tile[packing.code_bytes + row % 16 * size:][:size].view(scales.dtype)
        np.testing.assert_array_equal(stored, scales[row].reshape(2, -1)[deep])


def test_fp4_word_as_drawn():
    """Magnitudes 1 .. 7 and 0 in w = 0, signs 0 and 7 set: its low half is M3 = 6, M2 = 4, S7 elsewhere, S0, M1, M0."""
    codes = np.zeros((16, 128), np.uint8)
    codes[0, :8] = [9, 5, 3, 7, 2, 6, 4, 8]                          # (s, j) in order; n = 0 4 2 6, 1 5 3 7
    words = packed.pack(FP4, codes, np.zeros((16, 4), np.uint8))[0, 0, 0, :16].view("<u4")
    assert words[0] & 0xFFFF == 4 << 11 | 3 << 8 | 1 << 6 | 2 << 3 | 1
    assert words[1] == 1 << (11 + 16 + 6) % 32                       # the sign of n = 7


def rotated(word, right):
    return (word >> right % 32 | word << 32 - right % 32) & 0xFFFFFFFF


@pytest.mark.parametrize("packing, low, high, to", [(FP6, 0x000F000F, 0x01100110, 7), (FP4, 0x00070007, 0x00400040, 9)],
                         ids=["fp6", "fp4"])
def test_registers_are_the_values_as_f16(packing, low, high, to):
    """The formula of the docstring."""
    codes, scales = matrix(packing, 16, 128)
    tile = packed.pack(packing, codes, scales)[0, 0, 0]
    for lane, b, r, s, pair in np.ndindex(32, 4, 2, 2, 2):
        words = [tile[512 * p + 16 * lane:][:16].view("<u4") for p in (b // 2, 2)]
        w, n = 2 * (b % 2) + r, s + 2 * pair
        f = 4 * n + w if packing is FP6 else (0, 3, 8, 11)[n] + 2 * w
        other = words[1][2 * (b // 2) + s] if packing is FP6 else words[0][(w + s) % 4]
        both = int(words[0][w]) & rotated(low, -f) | int(other) & rotated(high, -f)
        register = np.array([rotated(both, f - to)], np.uint32).view(np.float16)
        column = 32 * b + 8 * (lane % 4) + 4 * s + 2 * pair
        want = packing.codes.decode(codes[2 * (lane // 4) + r, column:column + 2]) * np.float32(2.0 ** -14)
        np.testing.assert_array_equal(register.astype(np.float32), want)


@PACKINGS
@pytest.mark.parametrize("n, k", [(128, 128), (1, 128), (200, 384), (96, 5120)])
def test_round_trip(packing, n, k):
    codes, scales = matrix(packing, n, k, seed=n)
    array = packed.pack(packing, codes, scales)
    assert array.shape == packing.shape(n, k) == (-(-n // 128), k // 128, 8, packing.tile_bytes)
    back, scales_back = packed.unpack(packing, array, n)
    np.testing.assert_array_equal(back, codes)
    np.testing.assert_array_equal(scales_back, scales)
    value = packed.decode(packing, array, n)
    scale = packed.SCALES[packing.block][1](scales)
    for row, column in ((0, 0), (n - 1, k - 1), (n // 2, k // 2)):
        assert value[row, column] == packing.codes.values[codes[row, column]] * scale[row, column // packing.block]
    if n % 128:
        padding = packed.unpack(packing, array, array.shape[0] * 128)
        assert not padding[0][n:].any() and not padding[1][n:].any()


def test_strips_follow_each_other():
    codes, scales = matrix(FP6, 256, 256)
    whole, half = packed.pack(FP6, codes, scales), packed.pack(FP6, codes[:128], scales[:128])
    assert whole.tobytes().startswith(half.tobytes())


def test_sizes_of_the_27b():
    """Bytes a weight: codes, and one scale for its block."""
    for packing, bits in ((FP6, 6 + 16 / 128), (FP4, 4 + 8 / 32), (FP8, 8 + 16 / 128), (NVFP4, 4 + 8 / 16)):
        for n, k in ((34816, 5120), (16384, 5120), (248320, 5120), (5120, 17408), (5120, 6144), (1024, 5120)):
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
    with pytest.raises(ValueError, match="129 rows of fp6"):
        packed.unpack(FP6, packed.pack(FP6, codes, scales), 129)
    with pytest.raises(ValueError, match="128, 32 or 16 inputs, got 64"):
        Packing("fp6", numerics.E2M3, 64)


@pytest.mark.parametrize("n", [128, 192, 64])
def test_two_matrices_take_turns(n):
    """Tile 2j of the whole is the first's tile j, tile 2j + 1 the second's; a half strip leaves no padding."""
    matrices = [matrix(FP6, n, 256, seed) for seed in (1, 2)]
    first, second = (packed.pack(FP6, *m) for m in matrices)
    both = packed.interleave(first, second, n)
    assert both.shape == FP6.shape(2 * n, 256)
    codes, scales = packed.unpack(FP6, both, 2 * n)
    for i, (want, factors) in enumerate(matrices):
        np.testing.assert_array_equal(codes.reshape(-1, 2, 16, 256)[:, i].reshape(n, 256), want)
        np.testing.assert_array_equal(scales.reshape(-1, 2, 16, 2)[:, i].reshape(n, 2), factors)


def test_matrices_that_cannot_take_turns():
    first = packed.pack(FP6, *matrix(FP6, 96, 128))
    for second, n in ((first, 96), (packed.pack(FP6, *matrix(FP6, 256, 128)), 128), (first, 192)):
        with pytest.raises(ValueError, match="a multiple of 64, take turns"):
            packed.interleave(first, second, n)
