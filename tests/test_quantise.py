"""Scales are the candidates of least loss, codes the codec's own rounding; the loss is exact whatever the order."""
import ml_dtypes
import numpy as np
import pytest

from qwentin import numerics
from qwentin.kernels import packed, quantise
from qwentin.kernels.packed import FP6, FP8, NVFP4

PACKINGS = pytest.mark.parametrize("packing", [FP6, FP8, NVFP4], ids=lambda p: p.name)
TYPES = {"e2m3": ml_dtypes.float6_e2m3fn, "e4m3": ml_dtypes.float8_e4m3fn, "e2m1": ml_dtypes.float4_e2m1fn}


def matrix(n=48, k=512, seed=0, spread=1.0):
    """bf16 values of the size of weights, rows and columns of different size, one outlier in each row."""
    rng = np.random.default_rng(seed)
    x = 0.02 * rng.standard_normal((n, k)) * np.exp(spread * rng.standard_normal((n, 1)) / 2)
    x[np.arange(n), rng.integers(0, k, n)] *= 12
    return numerics.decode_bf16(numerics.encode_bf16(x.astype(np.float32)))


def alpha_for(packing, x):
    return quantise.alpha_of(np.abs(x).max()) if packing == NVFP4 else np.float32(1)


def spread_scales(packing, scales, alpha):
    """The scale of every weight, f32, from ml_dtypes alone."""
    kind = ml_dtypes.float8_e4m3fn if packing == NVFP4 else ml_dtypes.bfloat16
    return np.repeat(scales.view(kind).astype(np.float32) * alpha, packing.block, axis=1)


@PACKINGS
def test_codes_are_the_codecs_rounding_of_x_over_scale(packing):
    x = matrix()
    alpha = alpha_for(packing, x)
    codes, scales = quantise.quantise(packing, x, alpha)
    ratio = np.clip(x / spread_scales(packing, scales, alpha), -packing.codes.max, packing.codes.max)
    np.testing.assert_array_equal(codes.view(TYPES[packing.codes.name]), ratio.astype(TYPES[packing.codes.name]))


@PACKINGS
def test_no_other_candidate_loses_less(packing):
    """Against squared errors in float64. Losses are rounded to whole UNITs, so a near tie may go either way: 1 % is
    allowed, and only in few blocks is anything lost."""
    x = matrix()
    alpha = alpha_for(packing, x)
    blocks = x.reshape(len(x), -1, packing.block).astype(np.float64)
    top = packing.codes.max
    amax = np.abs(blocks).max(-1).astype(np.float32)
    errors = []
    for factor in quantise.FACTORS[packing.block]:
        if packing == NVFP4:
            scale = np.maximum((amax / alpha * np.float32(factor / 6)).clip(0, 448).astype(ml_dtypes.float8_e4m3fn)
                               .astype(np.float32), 2.0 ** -9) * alpha
        else:
            scale = (amax * np.float32(factor / top)).astype(ml_dtypes.bfloat16).astype(np.float32)
        ratio = np.clip(blocks / scale[..., None], -top, top).astype(np.float32)
        value = ratio.astype(TYPES[packing.codes.name]).astype(np.float64) * scale[..., None]
        errors.append(((value - blocks) ** 2).sum(-1))
    least = np.min(errors, axis=0)
    codes, scales = quantise.quantise(packing, x, alpha)
    value = packing.codes.decode(codes) * spread_scales(packing, scales, alpha)
    got = ((value - x).astype(np.float64) ** 2).reshape(blocks.shape).sum(-1)
    assert (got <= least * 1.01).all()
    assert (got > least * (1 + 1e-6)).mean() < 0.05
    assert got.sum() < 0.97 * errors[0].sum(), "the search gains over the largest value's scale"


@PACKINGS
def test_losses_are_whole_numbers_below_two_to_the_24(packing):
    """The worst block: every value is as far from the grid as it can be, or clipped."""
    x = np.tile(np.concatenate([np.linspace(0, 1, 127), [1.0]]).astype(np.float32), (4, 1))
    x[1] = 1.0
    x[2] = np.random.default_rng(1).random(128)
    x[3] *= 2.0 ** -30
    amax = np.abs(x.reshape(4, -1, packing.block)).max(-1)
    for alpha in (np.float32(1), quantise.alpha_of(1.0), quantise.alpha_of(400.0)):
        for factor in quantise.FACTORS[packing.block]:
            _, scale, _ = quantise.candidate(packing, amax, factor, alpha)
            ratio = x.reshape(4, -1, packing.block) / scale[..., None]
            loss = quantise.losses(packing, ratio, packing.codes.encode(ratio))
            assert (loss == np.rint(loss)).all()
            if packing != NVFP4 or alpha != 1:          # with its own alpha, no block is clipped further
                assert loss.max() < 2 ** 24


@PACKINGS
def test_zeros_and_the_smallest_and_largest_values(packing):
    x = np.zeros((4, 256), np.float32)
    x[1, 128:] = 1e-38
    x[2, 3] = 3e38
    x[3] = -1e-45
    alpha = alpha_for(packing, x)
    codes, scales = quantise.quantise(packing, x, alpha)
    value = packed.decode(packing, packed.pack(packing, codes, scales), 4) * alpha
    assert np.isfinite(value).all() and not value[0].any()
    assert abs(value[2, 3] / 3e38 - 1) < 0.07


def test_alpha_of_a_matrix_of_zeros_is_one():
    assert quantise.alpha_of(0.0) == 1
    assert quantise.alpha_of(2688.0) == pytest.approx(1, rel=1e-6)


def test_a_gaussian_matrix_loses_what_the_table_says():
    """Relative root-mean-square error, the figures of bench/RESULTS.md: 2.5 % fp6, 2.4 % fp8, 8.4 % nvfp4."""
    x = (0.02 * np.random.default_rng(0).standard_normal((64, 2560))).astype(np.float32)
    for packing, wanted in ((FP6, 0.0250), (FP8, 0.0240), (NVFP4, 0.0842)):
        alpha = alpha_for(packing, x)
        codes, scales = quantise.quantise(packing, x, alpha)
        value = packed.decode(packing, packed.pack(packing, codes, scales), len(x)) * alpha
        assert np.sqrt(((value - x) ** 2).sum() / (x ** 2).sum()) == pytest.approx(wanted, rel=0.02)
