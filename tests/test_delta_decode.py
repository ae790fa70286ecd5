"""delta_decode against the three kernels it stands for, which tests/test_delta_kernels.py holds against the numpy tower.

Pools and states must be equal bit for bit, whichever kernel a round ran through: what a conversation's state is may not hang
on how its rows came in rounds. Outputs are equal nearly: the new row's products with S are summed in another order.
"""
import numpy as np
import pytest

from qwentin.kernels import conv_split, delta_decode, delta_verify, gated_norm, lab, machines, plan as plans

NK, NV, HEAD, M = 2, 6, 128, 16
C = (2 * NK + NV) * HEAD
POOLS = ("pending", "k", "v", "beta", "g")
STATE = ("S", "window")
EMULATOR = machines.Emulator()
F32 = np.float32


def in_one(x):
    """delta_decode's outputs."""
    return lab.run(delta_decode, x, EMULATOR)


def in_three(x, parents=None):
    """The same from conv_split, delta_verify and gated_norm."""
    plan, tokens = x["plan"], len(x["projected"])
    parents = np.full(tokens, -1, np.int32) if parents is None else parents
    step = dict(plan=plan, parents=parents, rows=int(plan[:, 2].max()))
    q = np.empty((tokens, NK, HEAD), F32)
    given = ("projected", "weight", "decay", "dt_bias", "window", "terms", *POOLS)
    split = lab.run(conv_split, dict({n: x[n] for n in given}, q=q, **step), EMULATOR)
    seen = lab.run(delta_verify, dict({n: split[n] for n in ("q", "k", "v", "beta", "g")}, S=x["S"],
                                      out=np.empty((tokens, NV, HEAD), F32), **step), EMULATOR)
    out = lab.run(gated_norm, dict(o=seen["out"], projected=x["projected"], column=C, weight=x["norm"], eps=x["eps"],
                                   out=x["out"]), EMULATOR)["out"]
    return dict({n: split[n] for n in ("window", *POOLS)}, S=seen["S"], out=out)


def same(got, want, names):
    for name in names:
        assert np.array_equal(got[name].view(np.uint32), want[name].view(np.uint32)), name


@pytest.mark.parametrize("accepted", [(1, 1, 0, None), (2, 4, 0, 3)], ids=["decode", "behind trees"])
def test_equals_the_three_kernels(accepted):
    """Steps, a start, a dropped tree, and with no new row a settle of each kind."""
    for new in ((1, 1, 1, 1), (1, 0, 0, 0)):
        x = delta_decode.make(np.random.default_rng(7), new, accepted, NK, NV, M, out="f32")
        got, want = in_one(x), in_three(x)
        same(got, want, STATE + POOLS)
        assert np.abs(got["out"] - want["out"]).max() < 1e-5 * np.abs(want["out"]).max()


def test_a_tree_then_single_rows():
    """A tree, its accepted path, two single rows and a settle: through delta_decode from the second round on or never."""
    rng, parents = np.random.default_rng(8), np.array([-1, 0, 0, 1, 2, 4], np.int32)
    x = delta_decode.make(rng, (1,), (1,), NK, NV, M, out="f32")
    x.update({name: np.full_like(x[name], np.nan) for name in POOLS})               # what no round wrote shows
    wide, rows = (rng.standard_normal((n, x["projected"].shape[1])).astype(F32) for n in (6, 2))
    rounds = [(wide, (0, 0, 6, -1, 0, ())), (rows[:1], (0, 0, 1, 0, 1, (0, 2, 4, 5))), (rows[1:], (0, 0, 1, 1, 0, (0,))),
              (rows[:0], (0, 0, 0, 0, -1, (0,)))]
    found = []
    for run in (in_one, in_three):
        state, outs = {name: x[name] for name in STATE + POOLS}, []
        for i, (projected, line) in enumerate(rounds):
            out = np.empty((len(projected), NV, HEAD), F32)
            step = {**x, **state, **dict(projected=projected, plan=plans.table([line], M), out=out)}
            made = run(step) if i else in_three(step, parents)
            state = {name: made[name] for name in state}
            outs.append(made["out"])
        found.append((state, np.concatenate(outs)))
    same(found[0][0], found[1][0], STATE)
    assert not np.isnan(found[0][0]["S"]).any() and not np.array_equal(found[0][0]["S"], x["S"])
    assert np.abs(found[0][1] - found[1][1]).max() < 1e-5 * np.abs(found[1][1]).max()


def test_what_is_not_in_the_plan_stays():
    """Padding touches nothing; a sequence's round touches its own slot and entries."""
    x = delta_decode.make(np.random.default_rng(9), (1, 0), (1, None), 1, 3, 4)
    got, line = in_one(x), x["plan"][0]
    slot, before, now = line[[0, 3, 4]]
    for name in STATE:
        others = np.delete(np.arange(2), slot)
        assert np.array_equal(got[name][others], x[name][others])
    assert np.array_equal(got["window"], x["window"]), "only a settle writes it"
    for name in POOLS:
        others = np.delete(np.arange(4), now)
        assert np.array_equal(got[name][others], x[name][others])
        assert not np.array_equal(got[name][now], x[name][now])


@pytest.mark.parametrize("change, words", [
    (dict(projected=np.zeros((1, 2056), F32)), "projected has 2056 columns; 2 key and 6 value heads with gates in 1 terms"),
    (dict(terms=3), "with gates in 3 terms want a multiple of 8 from 2084 on"),
    (dict(terms=0), "with gates in 0 terms"),
    (dict(pending=np.zeros((2, M, C), F32)), "pending must have shape (2, 19, ...), got (2, 16, 1280)"),
    (dict(window=np.zeros((1, 3, C), np.uint16)), "window must be f32, got dtype uint16"),
    (dict(k=np.zeros((2, M, 4, HEAD), F32)), "v has 6 heads, wanted a multiple of the 4 of k"),
    (dict(norm=np.zeros(64, F32)), "norm must have shape (128,), got (64,)"),
    (dict(out=np.zeros((1, NV, HEAD), np.uint16)), "out must be f16 or f32, got dtype uint16"),
    (dict(plan=np.zeros((1, 15), np.int32)), "plan must be int32 [R, 8 + M] with M 4, 8, ... 32"),
], ids=lambda c: next(iter(c)) if isinstance(c, dict) else "")
def test_launch_refuses_in_a_sentence(change, words):
    recorder, x = machines.Recorder(), delta_decode.make(np.random.default_rng(0), key_heads=NK, value_heads=NV)
    with pytest.raises(ValueError) as caught:
        delta_decode.launch(recorder, **{**x, **change})
    assert words in str(caught.value)
    assert not recorder.kernels, "nothing was launched"
