"""Random numbers by counter: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

The number of a (seed, counter) is a function of the two alone: no state to keep, to copy for a fork or to rewind when
drafted tokens are rejected; host and device draw the same.

    key      u32 x 2    a 64-bit seed, low word first
    counter  u32 x 4    here: position, choice, 0, 0
"""
import numpy as np

from .build import device
from .ptx import f32, u32, u64
from .unroll import static_range

ROUNDS = 10
M0, M1 = 0xD2511F53, 0xCD9E8D57             # multipliers of the rounds
W0, W1 = 0x9E3779B9, 0xBB67AE85             # what is added to the key: golden ratio, sqrt(3) - 1


@device
def philox(a, b, c, d, key0, key1):
    """Four random u32 of counter (a, b, c, d) and key."""
    for i in static_range(ROUNDS):
        p, q = u64(a) * M0, u64(c) * M1
        a, b, c, d = (u32(u32(q >> 32) ^ b ^ u32(key0 + u32(i * W0 % 2 ** 32))), u32(q),
                      u32(u32(p >> 32) ^ d ^ u32(key1 + u32(i * W1 % 2 ** 32))), u32(p))
    return a, b, c, d


@device
def uniform(position, choice, key0, key1):
    """A float32 of [0, 1), a multiple of 2^-24."""
    return f32(u32(philox(position, choice, u32(0), u32(0), key0, key1)[0] >> 8)) * 2.0 ** -24


def random_words(counter, key):
    """philox for numpy: u32 [..., 4] and [..., 2] -> u32 [..., 4]."""
    a, b, c, d = np.moveaxis(np.asarray(counter, np.uint64), -1, 0)
    key0, key1 = np.moveaxis(np.asarray(key, np.uint64), -1, 0)
    low, shift = np.uint64(2 ** 32 - 1), np.uint64(32)
    for i in range(ROUNDS):
        p, q = a * np.uint64(M0), c * np.uint64(M1)
        a, b = q >> shift ^ b ^ (key0 + np.uint64(i * W0) & low), q & low
        c, d = p >> shift ^ d ^ (key1 + np.uint64(i * W1) & low), p & low
    return np.stack([a, b, c, d], -1).astype(np.uint32)


def uniforms(counters, seeds):
    """uniform for numpy: u32 [T, 2] (position, choice) and [T, 2] -> float32 [T]."""
    words = random_words(np.pad(counters, ((0, 0), (0, 2))), seeds)
    return (words[:, 0] >> 8).astype(np.float32) * np.float32(2.0 ** -24)
