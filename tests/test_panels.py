"""Products in panels are right and no row knows its company; attention knows no tree: to the last bit, where BLAS can."""
import numpy as np
import pytest

from qwentin.kvpool import PAGE
from qwentin.model.cpu_attention import attend, attend_few
from qwentin.model.cpu_delta import delta_step, delta_tree, replay_stepwise, tree_stepwise
from qwentin.model.panels import Panels, independent
from qwentin.step import ancestors, chain

ALONE = pytest.mark.skipif(not independent(), reason="this BLAS has no products in place (on x86: AVX-512)")
SHAPES = [(2060, 256), (256, 768), (256, 1536), (70, 40), (12, 64), (33, 4000)]


@pytest.mark.parametrize("N, K", SHAPES)
@pytest.mark.parametrize("T", [0, 1, 2, 16, 17, 33, 150])
def test_a_product_is_that_of_the_matrix(N, K, T):
    """Tolerance: K roundings of sums below the sum of magnitudes."""
    rng = np.random.default_rng(K + T)
    w, x = rng.standard_normal((N, K), np.float32), rng.standard_normal((T, K), np.float32)
    got, bound = Panels(w)(x), np.abs(x).astype(float) @ np.abs(w).T.astype(float)
    assert got.shape == (T, N) and got.dtype == np.float32
    assert (np.abs(got - x.astype(float) @ w.T.astype(float)) <= K * 2.0**-24 * bound).all()
    assert Panels(w).nbytes == w.nbytes


@ALONE
@pytest.mark.parametrize("N, K", SHAPES)
def test_a_row_does_not_know_its_company(N, K):
    rng = np.random.default_rng(1)
    panels, x = Panels(rng.standard_normal((N, K), np.float32)), rng.standard_normal((300, K), np.float32)
    whole = panels(x)
    for first, rows in [(0, 1), (7, 1), (3, 2), (4, 3), (5, 5), (6, 12), (0, 13), (1, 16), (9, 17), (2, 33), (40, 200)]:
        assert np.array_equal(panels(x[first:first + rows]), whole[first:first + rows]), (first, rows)


def test_the_first_outputs():
    rng = np.random.default_rng(3)
    panels, x = Panels(rng.standard_normal((300, 40), np.float32)), rng.standard_normal((5, 40), np.float32)
    part = panels.first(128)
    assert np.array_equal(part(x), panels(x)[:, :128]) and np.shares_memory(part.panels, panels.panels)
    with pytest.raises(AssertionError):
        panels.first(100)


@ALONE
def test_workers_share_a_product():
    from concurrent.futures import ThreadPoolExecutor
    rng = np.random.default_rng(2)
    panels, x = Panels(rng.standard_normal((1100, 96), np.float32)), rng.standard_normal((70, 96), np.float32)
    with ThreadPoolExecutor(3) as workers:
        assert np.array_equal(panels(x, workers), panels(x))


TREE = np.array([-1, 0, 0, 1, 1, 2, -1, 6, 3, 8, 8], np.int32)


def attention(past, G=2, H=6, hd=64):
    """Random keys of a past and a tree behind it, and its rows' queries."""
    rng, t = np.random.default_rng(past), len(TREE)
    q, k, v = (rng.standard_normal((n, heads, hd), np.float32) for n, heads in ((t, H), (past + t, G), (past + t, G)))
    return q, k, v


@pytest.mark.parametrize("past", [1, 100, 120, 127, 128, 300])
def test_few_queries_attend_as_many_do(past):
    """Tolerance 1e-5: scores reach 25, where a float32 is 2e-6 coarse, and a weight's relative error is its score's."""
    q, k, v = attention(past)
    which = np.array([0, 3, 10])
    assert np.abs(attend_few(q, k, v, TREE, np.arange(11)) - attend(q, k, v, ancestors(TREE))).max() < 1e-5
    assert np.abs(attend_few(q[which], k, v, TREE, which) - attend(q[which], k, v, ancestors(TREE)[which])).max() < 1e-5


@ALONE
@pytest.mark.parametrize("past", [2, 100, PAGE - 8, PAGE - 4, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 3])
def test_a_path_attends_as_the_text_does(past):
    """A tree across the end of a page, its rows in any order: each row of a path has the bits of a decode step."""
    q, k, v = attention(past)
    tree = attend_few(q, k, v, TREE, np.arange(11))
    for leaf in (5, 7, 9, 10):
        path = np.flatnonzero(ancestors(TREE)[leaf])
        for depth, row in enumerate(path):
            seen = np.concatenate([np.arange(past), past + path[:depth + 1]])
            assert np.array_equal(attend_few(q[row:row + 1], k[seen], v[seen], chain(1), np.array([0]))[0], tree[row])


def test_the_delta_rule_a_step_at_a_time():
    """tree_stepwise along a path is delta_step, bit for bit, and delta_tree to rounding; replay leaves the same state."""
    rng, t, H, dk, dv = np.random.default_rng(0), len(TREE), 3, 16, 24
    q, k, v = (rng.standard_normal((t, H, d), np.float32) / d ** 0.5 for d in (dk, dk, dv))
    g, beta = -rng.random((t, H), np.float32), rng.random((t, H), np.float32)
    S = rng.standard_normal((H, dk, dv), np.float32)
    tree = tree_stepwise(q, k, v, g, beta, S, TREE)
    assert np.abs(tree - delta_tree(q, k, v, g, beta, S, ancestors(TREE))).max() < 1e-5
    path, state = np.flatnonzero(ancestors(TREE)[9]), S.copy()
    for row in path:
        assert np.array_equal(delta_step(q[row], k[row], v[row], g[row], beta[row], state), tree[row])
    states = np.stack([S, S])
    replay_stepwise(*(np.stack([x[path]] * 2) for x in (k, v, g, beta)), states)
    assert np.array_equal(states[0], state) and np.array_equal(states[1], state)
