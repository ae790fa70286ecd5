"""conv_split, delta_verify and gated_norm together: rounds of verify and accept equal the numpy tower's functions.

The kernels' PTX runs in the emulator on nano's heads. Pools start as NaN, so a row read that no round wrote shows.
Tolerance: as in test_cpu_delta.py, 2e-5 of the largest value: both sides are float32 and some ten rows deep.
"""
import numpy as np
import pytest

from qwentin import numerics
from qwentin.kernels import conv_split, delta_verify, gated_norm, lab, machines, plan as plans
from qwentin.model.cpu import l2_unit, rms_unit, sigmoid, silu, softplus
from qwentin.model.cpu_delta import causal_conv, delta_chunked, delta_tree
from qwentin.step import ancestors, chain

NK, NV, HEAD, M = 2, 6, 128, 16
C = (2 * NK + NV) * HEAD
COLUMNS = C + NV * HEAD + 2 * NV + 4                    # padded to a multiple of 8
EMULATOR = machines.Emulator()
NONE = np.zeros(0, np.int32)


class Weights:
    """Of one linear-attention layer."""

    def __init__(self, rng):
        normal = lambda *shape, scale: (rng.standard_normal(shape) * scale).astype(np.float32)
        self.conv, self.dt_bias = normal(4, C, scale=0.5), normal(NV, scale=1.0)
        self.decay = -np.exp(normal(NV, scale=1.0))
        self.norm = 1 + normal(HEAD, scale=0.1)


def projection(rng, rows):
    """Rows of the fused projection, rounded to bf16 so that neither the window nor the tower has to."""
    x = rng.standard_normal((rows, COLUMNS)).astype(np.float32)
    return numerics.decode_bf16(numerics.encode_bf16(x))


class Kernels:
    """The device's arrays for sequences in slots 1, 0, ... and the launches of a round."""

    def __init__(self, weights, sequences, rng):
        self.w, self.round, self.slots = weights, 0, np.arange(sequences)[::-1]
        nan = lambda *shape: np.full((2 * sequences, M, *shape), np.nan, np.float32)
        self.S = rng.standard_normal((sequences, NV, HEAD, HEAD)).astype(np.float32)
        self.window = numerics.encode_bf16(rng.standard_normal((sequences, 3, C)).astype(np.float32))
        self.pools = dict(k=nan(NK, HEAD), v=nan(NV, HEAD), beta=nan(NV), g=nan(NV))
        self.pending = np.full((2 * sequences, 3 + M, C), 0xFFFF, np.uint16)

    def run(self, projected, parents, accepted):
        """One round: rows of all sequences, parents and accepted rows one array a sequence -> out f32 [T, NV, 128]."""
        first, odd, start = np.cumsum([0] + [len(p) for p in parents]), self.round % 2, self.round == 0
        self.round += 1
        plan = plans.table([(self.slots[r], first[r], len(parents[r]), -1 if start else 2 * r + 1 - odd, 2 * r + odd,
                             accepted[r]) for r in range(len(parents))], M)
        step = dict(plan=plan, parents=np.concatenate(parents).astype(np.int32), rows=max(map(len, parents)))
        q = np.empty((len(projected), NK, HEAD), np.float32)
        made = lab.run(conv_split, dict(projected=projected, weight=self.w.conv, decay=self.w.decay, q=q,
                                        dt_bias=self.w.dt_bias, window=self.window, pending=self.pending,
                                        **self.pools, **step), EMULATOR)
        self.window, self.pending = made["window"], made["pending"]
        self.pools = {name: made[name] for name in self.pools}
        out = np.empty((len(projected), NV, HEAD), np.float32)
        made = lab.run(delta_verify, dict(S=self.S, q=made["q"], out=out, **self.pools, **step), EMULATOR)
        self.S = made["S"]
        return lab.run(gated_norm, dict(o=made["out"], projected=projected, column=C, weight=self.w.norm, eps=1e-6,
                                        out=out), EMULATOR)["out"]


class Tower:
    """The same for one sequence, as model/cpu.py does it."""

    def __init__(self, weights, S, window):
        self.w, self.S, self.window, self.rows = weights, S.copy(), numerics.decode_bf16(window), None

    def accept(self, accepted):
        if len(accepted):
            mix, k, v, g, beta = (x[accepted] for x in self.rows)
            self.window = np.concatenate([self.window, mix])[-3:]
            delta_chunked(k, k, v, g, beta, self.S)

    def run(self, projected, parents, accepted):
        self.accept(accepted)
        mix, z, b, a = np.split(projected[:, :C + NV * HEAD + 2 * NV], [C, C + NV * HEAD, C + NV * HEAD + NV], axis=1)
        y = silu(causal_conv(self.window, mix, self.w.conv, parents)).reshape(len(mix), -1, HEAD)
        qk, v = np.repeat(l2_unit(y[:, :2 * NK]), NV // NK, axis=1), y[:, 2 * NK:]
        q, k = qk[:, :NV] * np.float32(HEAD ** -0.5), qk[:, NV:]
        self.rows = mix, k, v, self.w.decay * softplus(a + self.w.dt_bias), sigmoid(b)
        o = delta_tree(q, k, v, *self.rows[3:], self.S, ancestors(parents))
        return rms_unit(o, 1e-6) * self.w.norm * silu(z.reshape(o.shape))


def random_tree(rng, n):
    return np.array([rng.integers(max(-1, i - 3), i) for i in range(n)], np.int32)


def random_path(rng, parents):
    """From a root to some node, or nothing."""
    i, path = rng.integers(-1, len(parents)), []
    while i >= 0:
        path, i = [i] + path, parents[i]
    return np.array(path, np.int32)


def close(got, wanted):
    assert np.abs(got - wanted).max() <= 2e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("sizes", [[(5, 8), (7, 1), (2, 6), (8, 3)], [(1, 1), (1, 1), (1, 1)]], ids=["trees", "decode"])
def test_rounds_equal_the_numpy_tower(sizes):
    rng = np.random.default_rng(len(sizes))
    weights = Weights(rng)
    kernels = Kernels(weights, 2, rng)
    towers = [Tower(weights, kernels.S[slot], kernels.window[slot]) for slot in kernels.slots]
    accepted, taken = [NONE, NONE], 0
    for counts in sizes:
        parents = [random_tree(rng, n) for n in counts]
        projected = [projection(rng, n) for n in counts]
        got = np.split(kernels.run(np.concatenate(projected), parents, accepted), [counts[0]])
        for r, tower in enumerate(towers):
            close(got[r], tower.run(projected[r], parents[r], accepted[r]))
        accepted = [random_path(rng, p) for p in parents]
        taken += sum(map(len, accepted))
    assert taken > 2, "the test accepts something"
    kernels.run(np.empty((0, COLUMNS), np.float32), [NONE, NONE], accepted)             # a flush: no new rows
    for slot, tower, last in zip(kernels.slots, towers, accepted):
        tower.accept(last)
        close(kernels.S[slot], tower.S)
        assert np.array_equal(numerics.decode_bf16(kernels.window[slot]), tower.window)


def test_the_state_does_not_depend_on_the_cut_into_rounds():
    """Four rows one by one, and as a chain verified at once: S and window are equal bit for bit, outputs nearly."""
    rng = np.random.default_rng(3)
    weights, projected = Weights(rng), projection(rng, 4)
    one, whole = (Kernels(weights, 1, np.random.default_rng(4)) for _ in range(2))
    outputs = [one.run(projected[i:i + 1], [chain(1)], [np.zeros(min(i, 1), int)]) for i in range(4)]
    close(whole.run(projected, [chain(4)], [NONE]), np.concatenate(outputs))
    one.run(projected[:0], [NONE], [np.array([0])])
    whole.run(projected[:0], [NONE], [np.arange(4)])
    assert np.array_equal(one.S, whole.S) and np.array_equal(one.window, whole.window)


def test_a_dropped_tree_leaves_no_trace():
    """Nothing accepted: S and window keep their bits, and the next round is as if the tree had never been."""
    rng = np.random.default_rng(5)
    weights, projected = Weights(rng), projection(rng, 3)
    kernels, fresh = (Kernels(weights, 1, np.random.default_rng(6)) for _ in range(2))
    kernels.run(projection(rng, 5), [random_tree(rng, 5)], [NONE])
    assert np.array_equal(kernels.S, fresh.S) and np.array_equal(kernels.window, fresh.window)
    assert np.array_equal(kernels.run(projected, [chain(3)], [NONE]), fresh.run(projected, [chain(3)], [NONE]))


F32, U16, I32 = np.float32, np.uint16, np.int32
REFUSALS = [
    (conv_split, dict(projected=np.zeros((1, 2060), F32)), "has 2060 columns; 2 key and 6 value heads with 1 terms want"),
    (conv_split, dict(window=np.zeros((1, 4, C), U16)), f"window must have shape (1, 3, {C}), got (1, 4, {C})"),
    (conv_split, dict(pending=np.zeros((2, 3 + M, C), F32)), "pending must be bf16, got dtype float32"),
    (conv_split, dict(pending=np.zeros((2, M, C), U16)), "pending must have shape (2, 19, ...), got (2, 16, 1280)"),
    (conv_split, dict(rows=17), "rows must be 0 to 16, the rows of an entry, got 17"),
    (conv_split, dict(plan=np.zeros((1, 15), I32)), "plan must be int32 [R, 8 + M] with M 4, 8, ... 32"),
    (delta_verify, dict(k=np.zeros((2, 8, NK, HEAD), F32)), "k must have shape (2, 16, ...), got (2, 8, 2, 128)"),
    (delta_verify, dict(k=np.zeros((2, M, 4, HEAD), F32)), "v has 6 heads, wanted a multiple of the 4 of k"),
    (delta_verify, dict(S=np.zeros((1, NV, HEAD, 64), F32)), "S must be float32 (1, 6, 128, 128), got float32 (1, 6, "),
    (delta_verify, dict(parents=np.zeros(1, np.int64)), "parents must be int32 [T], got int64 (1,)"),
    (gated_norm, dict(column=4), "W and column multiples of 8, got (1, 2064) and column 4"),
    (gated_norm, dict(weight=np.zeros(64, F32)), "weight must have shape (128,), got (64,)"),
]


@pytest.mark.parametrize("module, change, words", REFUSALS,
                         ids=[f"{lab.name_of(module)}-{list(change)[0]}" for module, change, _ in REFUSALS])
def test_launch_refuses_in_a_sentence(module, change, words):
    case = dict(heads=NV, column=C, padding=16) if module is gated_norm else dict(key_heads=NK, value_heads=NV)
    recorder = machines.Recorder()
    with pytest.raises(ValueError) as caught:
        module.launch(recorder, **{**module.make(np.random.default_rng(0), **case), **change})
    assert words in str(caught.value)
    assert not recorder.kernels, "nothing was launched"


def test_a_plan_row_is_read_back():
    assert plans.table([(3, 5, 2, 1, 0, [4, 6]), plans.PAD], 4).tolist() == [
        [3, 5, 2, 1, 0, 2, -1, -1, 4, 6, -1, -1], [-1, 0, 0, -1, -1, 0, -1, -1, -1, -1, -1, -1]]
