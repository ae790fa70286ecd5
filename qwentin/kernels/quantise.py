"""Choose scales and codes for a weight matrix: the law that the CPU and GPU packers reproduce bit for bit.

A block is 128 inputs of a row (16 for NVFP4). Its scale s is the one of a few candidates that loses least:

    fp6, fp8    s = bf16(amax * f / max)                          f = 1, 1.07, 1.14, 1.21, 1.35
    nvfp4       s = alpha * c,  c = e4m3(amax * f / (6 alpha))    f = 1, 0.9, 0.8, 1.5;  alpha = amax(matrix) / 2688
    code        = encode(x / s)                                   one float32 division, one rounding
    loss        = r(s)^2 * sum over the block of rint(UNIT * (x / s - value of code))^2      r(s) = s / (s of f = 1)

Factors above 1 move the block's values against the grid and win often; clipping (factors below 1) pays only in the
coarse grid of e2m1. Five factors take two thirds of what sixteen would gain (bench/formats.py).

The losses are sums of whole numbers below 2^24, exact in float32 in any order: numpy, a compiled loop and a GPU agree.
Of equal losses the first candidate wins. A block of zeros gets the scale 1 (nvfp4: c = 1/512, its smallest).
"""
import numpy as np

from .. import numerics
from .packed import NVFP4, Packing

FACTORS = {128: (1.0, 1.07, 1.14, 1.21, 1.35), 16: (1.0, 0.9, 0.8, 1.5)}
UNIT = {"e2m3": 1024.0, "e4m3": 16.0, "e2m1": 128.0}    # keeps every sum below 2^24
SMALLEST = np.float32(2.0 ** -126)                      # the smallest normal bf16: no scale is below it
ALPHA_OF_AMAX = np.float32(1 / (numerics.E4M3.max * numerics.E2M1.max))


def alpha_of(amax: float) -> np.float32:
    """The tensor scale of an NVFP4 matrix whose largest magnitude is amax; 1 for a matrix of zeros."""
    return max(np.float32(amax) * ALPHA_OF_AMAX, SMALLEST) if amax else np.float32(1)


def quantise(packing: Packing, x: np.ndarray, alpha=np.float32(1)) -> tuple[np.ndarray, np.ndarray]:
    """f32 x [N, K], finite -> codes u8 [N, K] and scales as packed.pack wants them.

    `alpha` is the tensor scale of NVFP4 (alpha_of), which packed.decode does not know of; 1 for the others.
    """
    blocks = x.reshape(len(x), -1, packing.block)
    amax = np.abs(blocks).max(axis=-1)
    best = None
    for factor in FACTORS[packing.block]:
        stored, scale, weight = candidate(packing, amax, factor, alpha)
        ratio = blocks / scale[..., None]
        codes = packing.codes.encode(ratio)
        loss = losses(packing, ratio, codes) * relative(weight, best)
        if best is None:
            best = dict(stored=stored, codes=codes, loss=loss, weight=weight)
            continue
        better = loss < best["loss"]
        best["loss"] = np.where(better, loss, best["loss"])
        best["stored"] = np.where(better, stored, best["stored"])
        best["codes"] = np.where(better[..., None], codes, best["codes"])
    return best["codes"].reshape(x.shape), best["stored"]


def candidate(packing: Packing, amax: np.ndarray, factor: float, alpha):
    """(scale as stored, scale as divided by, what the losses of different factors compare by), each [N, K / block]."""
    if packing == NVFP4:
        wanted = amax / np.float32(alpha) * np.float32(factor / numerics.E2M1.max)
        stored = np.maximum(numerics.E4M3.encode(wanted), 1)
        value = numerics.E4M3.decode(stored)
        return stored, value * np.float32(alpha), value
    scale = np.where(amax > 0, np.maximum(amax * np.float32(factor / packing.codes.max), SMALLEST), np.float32(1))
    stored = numerics.encode_bf16(scale)
    scale = numerics.decode_bf16(stored)
    return stored, scale, scale


def losses(packing: Packing, ratio: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The sums of whole numbers, f32 [N, K / block]."""
    error = np.rint((ratio - packing.codes.decode(codes)) * np.float32(UNIT[packing.codes.name]))
    return np.einsum("nbk,nbk->nb", error, error)


def relative(weight: np.ndarray, first: dict | None) -> np.ndarray:
    """(s / s of the first factor)^2, in float32."""
    r = weight / (first["weight"] if first else weight)
    return r * r
