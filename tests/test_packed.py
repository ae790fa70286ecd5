"""The packed layout against its picture, read bit by bit; round trips; what the packer refuses."""
import numpy as np
import pytest

from qwentin import numerics
from qwentin.kernels import packed, spread
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


# the sums of spread.py's text, (word, how far left), for (row, s, pair) in order
SUMS = {4: [[(0, 0)], [(0, -3)], [(0, 4), (0, 7)], [(0, 4), (0, 9)],
            [(1, 0)], [(1, -3)], [(1, 4), (1, 7)], [(1, 4), (1, 9)]],
        6: [[(0, 0)], [(0, 2), (2, -3)], [(0, 7), (2, -3)], [(0, -4), (2, 0)],
            [(1, 0), (2, 7)], [(1, 2), (2, 5)], [(1, 7), (2, 7)], [(1, -4)]]}


def group(bits, tile, lane, b):
    """The words of b in a tile: one for each row, and of plane 2 if there is one."""
    places = [(b // 2, b % 2 * 2), (b // 2, b % 2 * 2 + 1), (2, b)]
    return [int(tile[512 * p + 16 * lane + 4 * w:][:4].view("<u4")[0]) for p, w in places[:bits // 2]]


def rotated(word, left):
    return (word << left % 32 | word >> -left % 32) & 0xFFFFFFFF


def register(bits, words, i):
    """The sum, before the mask."""
    total = 0
    for word, left in SUMS[bits][i]:
        total ^= rotated(words[word], left)
    return total


def literal_code(packing, array, row, column):
    """The code of one weight, fetched as the module's text says."""
    tile = array[row // 128, column // 128, row % 128 // 16]
    g, r, inside = row % 16 // 2, row % 2, column % 128
    b, t, s, j = inside // 32, inside // 8 % 4, inside // 4 % 2, inside % 4
    lane, bits = 4 * g + t, packing.codes.bits
    if bits == 8:
        return tile[512 * b + 16 * lane + 4 * (2 * s + r) + [0, 2, 1, 3].index(j)]
    half = register(bits, group(bits, tile, lane, b), 4 * r + 2 * s + j // 2) >> 16 * (j % 2) & 0xFFFF
    return (half & 0xFFF) >> 13 - bits | half >> 15 << bits - 1


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
        if packing.block == 16:                                          # [g][h][r][b]
            at = np.array([[h * 8 + row % 2 * 4 + b for h in range(2)] for b in range(4)]).ravel() + row % 16 // 2 * 16
            stored = tile[packing.code_bytes + at]
        else:
            stored = tile[packing.code_bytes + row % 16 * size:][:size].view(scales.dtype)
        np.testing.assert_array_equal(stored, scales[row].reshape(2, -1)[deep])


@pytest.mark.parametrize("packing, mask", [(FP6, 0x8F808F80), (FP4, 0x8E008E00)], ids=["fp6", "fp4"])
def test_registers_are_the_values_as_f16(packing, mask):
    """What the kernels cut out of words, against the codes."""
    codes, scales = matrix(packing, 16, 128)
    tile = packed.pack(packing, codes, scales)[0, 0, 0]
    for lane, b, i in np.ndindex(32, 4, 8):
        words = group(packing.codes.bits, tile, lane, b)
        cut = np.array([register(packing.codes.bits, words, i) & mask], np.uint32).view(np.float16)
        column = 32 * b + 8 * (lane % 4) + 2 * (i % 4)
        want = packing.codes.decode(codes[2 * (lane // 4) + i // 4, column:column + 2]) * np.float32(2.0 ** -14)
        np.testing.assert_array_equal(cut.astype(np.float32), want)


@pytest.mark.parametrize("bits", spread.RULES)
def test_words_follow_from_registers(bits):
    """Both ways, for random words and for random registers: a rule loses nothing."""
    rule, rng = spread.RULES[bits], np.random.default_rng(0)
    words = list(rng.integers(0, 1 << 32, (rule.words, 50_000), dtype=np.uint64).astype(np.uint32))
    np.testing.assert_array_equal(spread.words_of(rule, spread.registers_of(rule, words)), words)
    registers = rng.integers(0, 1 << 32, (8, 50_000), dtype=np.uint64).astype(np.uint32) & np.uint32(rule.mask)
    np.testing.assert_array_equal(spread.registers_of(rule, spread.words_of(rule, list(registers))), registers)


def test_a_rule_without_an_inverse_is_told():
    rule = spread.Rule(4, 2, spread.RULES[4].registers[:7] + (((1, 4), (1, 7)),))
    with pytest.raises(AssertionError, match="without an inverse"):
        spread.plan(rule)


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
