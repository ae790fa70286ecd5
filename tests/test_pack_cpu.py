"""The compiled packer gives the bytes of quantise.quantise and packed.pack, from bf16 and from float32."""
import numpy as np
import pytest
from test_quantise import PACKINGS, alpha_for, matrix

from qwentin import numerics
from qwentin.kernels import pack_cpu, packed, quantise
from qwentin.kernels.packed import FP4, FP6, FP8


def law(packing, x, alpha):
    return packed.pack(packing, *quantise.quantise(packing, x, alpha))


@PACKINGS
@pytest.mark.parametrize("n", [1, 15, 16, 48, 50])
def test_equals_the_law(packing, n):
    x = matrix(n, 256, seed=n)
    alpha = alpha_for(packing, x)
    want = law(packing, x, alpha)
    np.testing.assert_array_equal(pack_cpu.pack(packing, numerics.encode_bf16(x), alpha), want)
    np.testing.assert_array_equal(pack_cpu.pack(packing, x, alpha), want)


@PACKINGS
def test_equals_the_law_on_float32_of_every_size(packing):
    """Full float32 mantissas, exponents from the subnormals up, ties, zeros and signed zeros."""
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((64, 384)) * 2.0 ** rng.integers(-120, 100, (64, 1))).astype(np.float32)
    x[5] = rng.integers(-31, 32, 384) / np.float32(16)              # on and between the grid's points
    x[6] = -0.0
    x[7] *= np.float32(2.0 ** -140)
    x[8, :128] = 3e38
    alpha = alpha_for(packing, x)
    np.testing.assert_array_equal(pack_cpu.pack(packing, x, alpha), law(packing, x, alpha))


@pytest.mark.parametrize("packing", [FP6, FP8], ids=lambda p: p.name)
def test_rows_hold_the_same_codes(packing):
    x = matrix(9, 384)
    codes, scales = quantise.quantise(packing, x)
    rows, got = pack_cpu.pack_rows(packing, numerics.encode_bf16(x))
    np.testing.assert_array_equal(rows, numerics.pack_bits(codes, packing.codes.bits))
    np.testing.assert_array_equal(got, scales)


@PACKINGS
def test_threads_may_share_a_matrix_by_rows(packing):
    x = matrix(200, 256)
    alpha = alpha_for(packing, x)
    out = np.empty(packing.shape(*x.shape), np.uint8)
    for first in (0, 128):
        pack_cpu.pack(packing, x[first:first + 128], alpha, out[first // 128:first // 128 + 1])
    np.testing.assert_array_equal(out, law(packing, x, alpha))


@PACKINGS
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(packing, value):
    x = matrix(20, 256)
    x[17, 200] = value
    with pytest.raises(pack_cpu.NotFinite):
        pack_cpu.pack(packing, x, 0.1)
    with pytest.raises(pack_cpu.NotFinite):
        pack_cpu.pack(packing, numerics.encode_bf16(x), 0.1)


@pytest.mark.parametrize("call, sentence", [
    (lambda: pack_cpu.pack(FP4, np.zeros((16, 128), np.float32)), "fp6, fp8 and nvfp4 can be packed"),
    (lambda: pack_cpu.pack(FP6, np.zeros((16, 128))), "u16 .bf16. or f32 .* got float64"),
    (lambda: pack_cpu.pack(FP6, np.zeros((16, 256), np.float32)[:, ::2]), "C-contiguous"),
    (lambda: pack_cpu.pack(FP6, np.zeros((16, 100), np.float32)), "multiple of 128 inputs, got 16 x 100"),
    (lambda: pack_cpu.pack(FP6, np.zeros((16, 128), np.float32), out=np.zeros(3, np.uint8)), "packed array is u8"),
    (lambda: pack_cpu.pack_rows(FP6, np.zeros((16, 100), np.float32)), "multiple of 128 inputs"),
])
def test_wrong_arguments_are_named(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
