"""philox: the published known answers, on the device and in numpy; uniforms of both are equal."""
import numpy as np
import pytest

from qwentin.kernels import machines, philox, ptx
from qwentin.kernels.build import CHIPS, kernel
from qwentin.kernels.ptx import u64

# Random123's kat_vectors for philox4x32-10: counter, key, result
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
     [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1])]


@kernel(threads=32)
def words_of(counters: u64, keys: u64, out: u64):
    i = ptx.thread_x()
    c, k = ptx.load_x4(counters + i * 16), ptx.load_x2(keys + i * 8)
    ptx.store_x4(out + i * 16, philox.philox(c[0], c[1], c[2], c[3], k[0], k[1]))


@kernel(threads=32)
def uniforms_of(counters: u64, keys: u64, out: u64):
    i = ptx.thread_x()
    c, k = ptx.load_x2(counters + i * 8), ptx.load_x2(keys + i * 8)
    ptx.store_f32(out + i * 4, philox.uniform(c[0], c[1], k[0], k[1]))


@pytest.mark.parametrize("chip", CHIPS)
def test_known_answers(chip):
    counters, keys, out = np.zeros((32, 4), np.uint32), np.zeros((32, 2), np.uint32), np.zeros((32, 4), np.uint32)
    for i, (counter, key, _) in enumerate(KNOWN):
        counters[i], keys[i] = counter, key
    machines.EmulatorStream(chip).launch(words_of, 1, counters, keys, out)
    assert out[:3].tolist() == [answer for *_, answer in KNOWN]
    assert (philox.random_words(counters, keys) == out).all()


@pytest.mark.parametrize("chip", CHIPS)
def test_uniforms(chip):
    rng = np.random.default_rng(0)
    counters, keys = (rng.integers(0, 2 ** 32, (32, 2), np.uint32) for _ in range(2))
    out = np.zeros(32, np.float32)
    machines.EmulatorStream(chip).launch(uniforms_of, 1, counters, keys, out)
    assert (out == philox.uniforms(counters, keys)).all()
    positions = np.stack([np.arange(4096), np.zeros(4096)], 1).astype(np.uint32)
    many = philox.uniforms(positions, np.full((4096, 2), 7, np.uint32))
    assert 0 <= many.min() and many.max() < 1
    assert np.bincount((many * 16).astype(int), minlength=16).std() < 25      # 256 each; 15.5 is one standard deviation
