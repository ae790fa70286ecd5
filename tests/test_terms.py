"""Weights as sums of packed terms: how near, against float64; their places; what is refused."""
import numpy as np
import pytest

from qwentin import nano, numerics
from qwentin.errors import CheckpointError
from qwentin.kernels import packed
from qwentin.kernels.packed import FP6, FP8, NVFP4
from qwentin.kernels.quantise import alpha_of
from qwentin.model import terms
from qwentin.model.backend import EmulatorBackend
from qwentin.model.convert import prepare
from qwentin.model.matrix import Source
from qwentin.model.weights import open_checkpoint

N, K = 24, 512
DRAWN = {"normal": lambda rng: rng.standard_normal((N, K)) * 0.02, "uniform": lambda rng: rng.uniform(-1, 1, (N, K)),
         "heavy tails": lambda rng: rng.standard_t(3, (N, K)) * 0.02,
         "rows of many sizes": lambda rng: rng.standard_normal((N, K)) * 2.0 ** -np.arange(N)[:, None] / 64}
TYPICAL = {FP6: 2.0 ** -15.5, FP8: 2.0 ** -15.5, NVFP4: 2.0 ** -17}       # root mean square of the error, of the weights'
PACKINGS = pytest.mark.parametrize("packing", [FP6, FP8, NVFP4], ids=lambda p: p.name)


def weights(kind):
    drawn = DRAWN[kind](np.random.default_rng(0)).astype(np.float32)
    return numerics.decode_bf16(numerics.encode_bf16(drawn))


@PACKINGS
@pytest.mark.parametrize("kind", DRAWN)
def test_the_sum_is_near(packing, kind):
    w = weights(kind)
    alpha = alpha_of(np.abs(w).max()) if packing == NVFP4 else np.float32(1)
    tiles = terms.pack(packing, w, alpha)
    assert tiles.shape == packing.shape(terms.rows(packing, N), K)
    error = np.abs(terms.unpack(packing, tiles, N, alpha) - w)
    largest = np.repeat(np.abs(w).reshape(N, -1, packing.block).max(-1), packing.block, axis=1)
    floor = 2.0 ** -18 * np.abs(w).max() if packing == NVFP4 else 0
    assert (error <= np.maximum(terms.BOUND[packing] * largest, floor)).all()
    assert np.sqrt((error ** 2).mean()) < TYPICAL[packing] * np.sqrt((w.astype(np.float64) ** 2).mean())


@PACKINGS
def test_terms_stand_one_behind_the_other(packing):
    """The first N rows are the matrix quantised as any other; rows up to a whole strip are zeros."""
    w = weights("normal")
    alpha = alpha_of(np.abs(w).max()) if packing == NVFP4 else np.float32(1)
    tiles = terms.pack(packing, w, alpha)
    whole = packed.decode(packing, tiles, len(tiles) * packed.STRIP) * alpha
    count = terms.TERMS[packing]
    assert np.abs(whole[:N] - w).max() < np.abs(w).max() / 3
    sizes = [np.abs(whole[i * N:(i + 1) * N]).max() for i in range(count)]
    assert all(b < 0.3 * a for a, b in zip(sizes, sizes[1:]))
    assert not whole[count * N:].any()


def test_zeros_stay_zeros():
    w = np.zeros((N, K), np.float32)
    w[0, 0] = 1
    found = terms.unpack(FP6, terms.pack(FP6, w), N)
    assert abs(found[0, 0] - 1) < 2.0 ** -13 and np.count_nonzero(found) == 1


def test_weights_that_are_no_numbers():
    w = weights("normal")
    w[3, 4] = np.inf
    with pytest.raises(CheckpointError, match="a NaN or an infinity"):
        terms.pack(FP6, w)


@pytest.mark.parametrize("weights_as, packing", [("fp6", FP6), ("fp8", FP8), ("fp4", NVFP4)])
def test_a_layer_of_a_packed_checkpoint(tmp_path, weights_as, packing):
    """The rows behind z are the layer's b and a; the others are the checkpoint's own tiles."""
    prepare(nano.DIRECTORY, tmp_path / "packed", weights=weights_as).run()
    checkpoint = open_checkpoint(tmp_path / "packed")
    names = [f"model.layers.0.linear_attn.in_proj_{n}.weight" for n in ("qkv", "z", "b", "a")]
    qkv, z, b, a = (checkpoint.tensors[name] for name in names)
    matrix = Source(checkpoint, EmulatorBackend()).with_terms(names[:2], names[2:])
    n, gates = qkv.shape[0] + z.shape[0], np.concatenate([b.f32(), a.f32()])
    assert matrix.plain is None and matrix.n == matrix.width == n + terms.rows(packing, len(gates))
    found = packed.decode(packing, matrix.tiles, matrix.n)
    if packing == NVFP4:
        found = found * np.repeat(matrix.alpha, packed.ROWS)[:, None]
    np.testing.assert_array_equal(found[:n], np.concatenate([qkv.f32(), z.f32()]))
    count = terms.TERMS[packing]
    sums = found[n:n + count * len(gates)].astype(np.float64).reshape(count, *gates.shape).sum(0)
    assert np.abs(sums - gates).max() < 2.0 ** -13 * np.abs(gates).max()
