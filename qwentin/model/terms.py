"""A small 16-bit matrix as the sum of a few packed ones, so that one launch reads it with its packed neighbours.

    w = t_0 + t_1 + ... + error        t_0 = packed(w),  t_i = packed(w - t_0 - ... - t_(i-1)) of the same format

A linear layer's b and a are 96 rows of 27B that a checkpoint keeps in 16 bits. A launch of their own costs 3.9 us of an
H200; three strips more behind the 128 of qkv and z cost 0.3. Whoever reads the product adds up the terms (conv_split.py).

What is left of a block after a term. A term's largest step is half the distance of the format's two largest values, times
the scale; with the largest factor that quantise.py tries for it, in parts of the block's largest value:

    fp6      0.5 / 2 * 1.35 / 7.5  = 0.045     three terms: 2^-13.4       bf16's own last bit is worth 2^-9
    fp8      32 / 2 * 1.35 / 448   = 0.048     three terms: 2^-13.1
    nvfp4    2 / 2 * 1.5 / 6       = 0.25      five terms:  2^-9.4, the scale's own rounding (2^-4) included

Of each block the scale that loses least is taken, so what is really left is less: at most 2^-13.9 (fp6, fp8) and 2^-15.5
(nvfp4) of the block's largest among a million weights of four distributions, 2^-16.0 and 2^-17.8 in the root mean square.
An nvfp4 block whose values are all below 2^-15 of the matrix' largest keeps an error of 2^-18 of the latter.

Who calls: model/matrix.py, at load. Proven by tests/test_terms.py.
"""
import numpy as np

from ..errors import CheckpointError
from ..kernels import pack_cpu, packed
from ..kernels.packed import FP6, FP8, NVFP4, Packing

TERMS = {FP6: 3, FP8: 3, NVFP4: 5}
BOUND = {FP6: 2.0 ** -13.4, FP8: 2.0 ** -13.1, NVFP4: 2.0 ** -9.4}     # of the error, in parts of the block's largest
MOST = max(TERMS.values())


def rows(packing: Packing, n: int) -> int:
    """Of tiles that hold the terms of n rows: up to a whole tile."""
    return -(-TERMS[packing] * n // packed.ROWS) * packed.ROWS


def pack(packing: Packing, w: np.ndarray, alpha=np.float32(1)) -> np.ndarray:
    """f32 [n, K] -> packed array of rows(packing, n): all rows of the first term, then of the second, ...

    alpha: nvfp4's tensor scale, one for all terms. CheckpointError if a weight is not finite.
    """
    terms = [w]
    try:
        for _ in range(TERMS[packing] - 1):
            last = pack_cpu.pack(packing, terms[-1], alpha)
            terms.append(terms[-1] - packed.decode(packing, last, len(w)) * np.float32(alpha))
        return pack_cpu.pack(packing, np.concatenate(terms), alpha)
    except pack_cpu.NotFinite:
        raise CheckpointError("a matrix that goes with packed ones holds a NaN or an infinity.") from None


def unpack(packing: Packing, tiles: np.ndarray, n: int, alpha=np.float32(1)) -> np.ndarray:
    """The weights that the terms stand for: float64 [n, K]."""
    count = TERMS[packing]
    terms = packed.decode(packing, tiles, count * n).astype(np.float64) * alpha
    return terms.reshape(count, n, -1).sum(0)
