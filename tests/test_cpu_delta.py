"""The delta rule: block form = step form = a float64 loop written from the formula; a tree = each of its paths run alone.

Tolerance: float32 sums of up to 128 products of unit vectors carry a relative error of about sqrt(128) * 6e-8 = 7e-7,
which a recurrence of T rows may add up T times in the worst case; 2e-5 of the largest value covers T = 200 and the solve.
"""
import numpy as np
import pytest

from qwentin.model.cpu_delta import (causal_conv, conv_taps, delta_chunked, delta_replay, delta_step, delta_tree,
                                     unit_lower_inverse)
from qwentin.step import ancestors, chain

H, DK, DV = 3, 32, 24
RTOL = 2e-5


def make(rng, T, similar=False):
    """Random rows; `similar` keys make the triangular system as badly conditioned as repeated tokens do."""
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    k = rng.standard_normal((T, H, DK))
    if similar:
        k = rng.standard_normal((1, H, DK)) + 0.01 * k
    q, v = rng.standard_normal((T, H, DK)), rng.standard_normal((T, H, DV))
    g, beta = -rng.exponential(0.05, (T, H)), rng.uniform(0.2, 1.0, (T, H))
    S = rng.standard_normal((H, DK, DV))
    return [x.astype(np.float32) for x in (unit(q), unit(k), v, g, beta, S)]


def loop(q, k, v, g, beta, S):
    """Token by token in float64, straight from the formula."""
    q, k, v, g, beta, S = (x.astype(np.float64) for x in (q, k, v, g, beta, S))
    out = []
    for t in range(len(q)):
        S = S * np.exp(g[t])[:, None, None]
        d = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", S, k[t]))
        S = S + np.einsum("hk,hv->hkv", k[t], d)
        out.append(np.einsum("hkv,hk->hv", S, q[t]))
    return np.array(out), S


def close(got, wanted):
    assert np.abs(got - wanted).max() <= RTOL * np.abs(wanted).max()


@pytest.mark.parametrize("similar", [False, True])
@pytest.mark.parametrize("T", [1, 2, 3, 31, 32, 33, 64, 65, 200])
def test_chunked_and_steps_equal_the_loop(T, similar):
    q, k, v, g, beta, S = make(np.random.default_rng(T), T, similar)
    out, end = loop(q, k, v, g, beta, S)
    chunked = S.copy()
    close(delta_chunked(q, k, v, g, beta, chunked), out)
    close(chunked, end)
    stepped = S.copy()
    close(np.array([delta_step(q[t], k[t], v[t], g[t], beta[t], stepped) for t in range(T)]), out)
    close(stepped, end)


@pytest.mark.parametrize("T", [1, 2, 5, 9, 16, 31, 32])
def test_a_path_is_replayed_into_all_layers_at_once(T):
    layers = [make(np.random.default_rng([T, n]), T, similar=n == 2) for n in range(4)]
    q, k, v, g, beta, S = (np.stack(parts) for parts in zip(*layers))
    ends = [loop(*layer)[1] for layer in layers]
    pool = np.zeros((4, 3, H, DK, DV), np.float32)
    pool[:, 1] = S
    delta_replay(k, v, g, beta, pool[:, 1])
    for n, end in enumerate(ends):
        close(pool[n, 1], end)
    assert not pool[:, [0, 2]].any()


@pytest.mark.parametrize("C", [1, 2, 7, 8, 12, 37, 64])
def test_unit_lower_inverse(C):
    """Repeated keys (every entry near 1) are the worst case. Tolerance: C products of entries below 1, 6e-8 each."""
    rng = np.random.default_rng(C)
    A = rng.uniform(0.5, 1.0, (3, 2, C, C)).astype(np.float32)
    wanted = np.linalg.inv(np.tril(A.astype(np.float64), -1) + np.eye(C))
    assert np.abs(unit_lower_inverse(A) - wanted).max() < C * 1e-7


def test_strong_decay_does_not_overflow():
    q, k, v, g, beta, S = make(np.random.default_rng(0), 64)
    g[:] = -50.0
    out, end = loop(q, k, v, g, beta, S)
    close(delta_chunked(q, k, v, g, beta, S), out)
    close(S, end)


TREE = np.array([-1, 0, 0, 1, 1, 2, -1, 6, 3], np.int32)


def path_to(i):
    path = []
    while i >= 0:
        path, i = [i] + path, TREE[i]
    return path


def test_tree_equals_its_paths():
    q, k, v, g, beta, S = make(np.random.default_rng(5), len(TREE))
    before = S.copy()
    out = delta_tree(q, k, v, g, beta, S, ancestors(TREE))
    assert np.array_equal(S, before), "a tree only reads the state"
    for i in range(len(TREE)):
        path = path_to(i)
        wanted, _ = loop(*(x[path] for x in (q, k, v, g, beta)), S)
        close(out[i], wanted[-1])


def test_convolution():
    rng = np.random.default_rng(6)
    window, mix, weight = (rng.standard_normal(s).astype(np.float32) for s in ((3, 5), (9, 5), (4, 5)))
    joined = np.concatenate([window, mix]).astype(np.float64)
    wanted = np.array([sum(joined[t + j] * weight[j] for j in range(4)) for t in range(9)])
    close(causal_conv(window, mix, weight), wanted)
    close(causal_conv(window, mix, weight, chain(9)), wanted)
    tree = causal_conv(window, mix, weight, TREE)
    for i in range(len(TREE)):
        rows = np.concatenate([window, mix[path_to(i)]])[-4:]
        close(tree[i], (rows * weight).sum(0))


def test_conv_taps_of_a_chain():
    assert conv_taps(chain(3), 4).tolist() == [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]
