"""conv_wide, delta_prepare, delta_chunk and gated_norm together: a wide prefill equals the numpy tower's functions.

The kernels' PTX runs in the emulator on one key head and three value heads, workspaces full of NaN. What is multiplied is
f16: two correct runs differ by some 5e-4 (rel-L2), a tenth of what model_math.md, section 9, allows a mixer in bf16.
"""
import numpy as np
import pytest

from qwentin.kernels import conv_wide, delta_chunk, delta_chunk_sm90a, delta_prepare, gated_norm, lab, machines
from qwentin.model.cpu import l2_unit, rms_unit, sigmoid, silu, softplus
from qwentin.model.cpu_delta import causal_conv, delta_chunked

NK, NV, HEAD, CHUNK, EPS = 1, 3, 128, 64, 1e-6
C = (2 * NK + NV) * HEAD
COLUMNS = C + NV * HEAD + 2 * NV + 2                    # padded to a multiple of 8
NEAR = 1.5e-3                                           # rel-L2
EMULATOR = machines.Emulator()
both = pytest.mark.parametrize("chunk", [delta_chunk, delta_chunk_sm90a], ids=lab.name_of)


class Layer:
    """Random weights, and a slot's state before the first row."""

    def __init__(self, seed, decay=1.0):
        rng = np.random.default_rng(seed)
        normal = lambda *shape, scale=1.0: (rng.standard_normal(shape) * scale).astype(np.float32)
        self.conv, self.dt_bias, self.norm = normal(4, C, scale=0.5), normal(NV), 1 + normal(HEAD, scale=0.1)
        self.decay = -np.exp(normal(NV)) * np.float32(decay)
        self.S, self.window = normal(2, NV, HEAD, HEAD), normal(2, 3, C)
        self.rows = lambda count: normal(count, COLUMNS)


def wide(layer, projected, S, window, room=0, chunk=delta_chunk):
    """A prefill of some rows in slot 1 by the four kernels: (gated, S, window). chunk: which form of the third."""
    rows = len(projected)
    T, N = max(rows, room), -(-max(rows, room) // CHUNK)
    full, single = (lambda *shape: np.empty(shape, np.float16)), (lambda *shape: np.empty(shape, np.float32))
    padded = np.concatenate([projected, np.full((T - rows, COLUMNS), np.nan, np.float32)])
    span = np.array([1, rows], np.int32)
    a = dict(span=span, q=full(T, NK, HEAD), k=full(T, NK, HEAD), v=full(T, NV, HEAD), beta=single(T, NV), g=single(T, NV))
    a.update(lab.run(conv_wide, dict(a, projected=padded, weight=layer.conv, decay=layer.decay, dt_bias=layer.dt_bias,
                                     window=window), EMULATOR))
    window = a.pop("window")
    b = dict(inverse=full(N, NV, 12, 32, 8), within=full(N, NV, 12, 32, 8), decays=single(N, NV, 2, CHUNK))
    v = a.pop("v")
    b = lab.run(delta_prepare, dict(a, **b), EMULATOR)
    made = lab.run(chunk, dict(span=span, S=S, q=a["q"], k=a["k"], v=v, **b, o=full(T, NV, HEAD)), EMULATOR)
    gated = lab.run(gated_norm, dict(o=made["o"], projected=padded, column=C, weight=layer.norm, out=full(T, NV, HEAD),
                                     eps=EPS), EMULATOR)["out"]
    return gated[:rows].astype(np.float32), made["S"], window


def tower(layer, projected):
    """The same as model/cpu.py does it, in slot 1."""
    mix, z, b, a = np.split(projected[:, :C + NV * HEAD + 2 * NV], [C, C + NV * HEAD, C + NV * HEAD + NV], axis=1)
    y = silu(causal_conv(layer.window[1], mix, layer.conv)).reshape(len(mix), -1, HEAD)
    qk = np.repeat(l2_unit(y[:, :2 * NK]), NV // NK, axis=1)
    S = layer.S[1].copy()
    o = delta_chunked(qk[:, :NV] * np.float32(HEAD ** -0.5), qk[:, NV:], y[:, 2 * NK:], layer.decay
                      * softplus(a + layer.dt_bias), sigmoid(b), S)
    return rms_unit(o, EPS) * layer.norm * silu(z.reshape(o.shape)), S


def near(got, wanted, allowed=NEAR):
    error = np.linalg.norm(got.astype(np.float64) - wanted) / np.linalg.norm(wanted)
    assert error <= allowed, error


@both
@pytest.mark.parametrize("rows, room, decay", [(1, 0, 1.0), (2, 3, 1.0), (63, 64, 1.0), (130, 130, 0.01), (130, 200, 300.0)])
def test_a_prefill_equals_the_numpy_tower(rows, room, decay, chunk):
    """decay 300: e^y underflows within a few rows and e^-y would overflow; 0.01: nothing is forgotten for 130 rows."""
    layer = Layer(rows, decay)
    projected = layer.rows(rows)
    gated, S, window = wide(layer, projected, layer.S, layer.window, room, chunk)
    wanted, S_wanted = tower(layer, projected)
    near(gated, wanted)
    near(S[1], S_wanted)
    assert np.array_equal(window[1], np.concatenate([layer.window[1], projected[:, :C]])[-3:])
    assert np.array_equal(S[0], layer.S[0]) and np.array_equal(window[0], layer.window[0]), "the other slot is left alone"


@both
@pytest.mark.parametrize("pieces", [(1, 2, 7, 64, 56), (65, 65)])
def test_pieces_equal_the_whole(pieces, chunk):
    layer = Layer(3)
    projected = layer.rows(130)
    wanted, S_wanted, window_wanted = wide(layer, projected, layer.S, layer.window, 0, chunk)
    S, window, made = layer.S, layer.window, []
    for piece in np.split(projected, np.cumsum(pieces)[:-1]):
        gated, S, window = wide(layer, piece, S, window, 0, chunk)
        made.append(gated)
    near(np.concatenate(made), wanted)
    near(S[1], S_wanted[1])
    assert np.array_equal(window, window_wanted)


def test_the_same_row_again_and_again():
    """A repeated token: every key of a chunk is the same, so that A is full and its powers would grow without bound."""
    layer = Layer(5, 0.01)
    projected = np.repeat(layer.rows(1), 130, 0)
    gated, S, _ = wide(layer, projected, layer.S, layer.window)
    wanted, S_wanted = tower(layer, projected)
    near(gated, wanted)
    near(S[1], S_wanted)


F16, F32 = np.float16, np.float32
REFUSALS = [
    (conv_wide, dict(projected=np.zeros((4, 1000), F32)), "has 1000 columns; 1 key and 3 value heads with 1 terms want"),
    (conv_wide, dict(span=np.zeros(2, np.int64)), "span must be int32 [slot, rows, ...], got int64 (2,)"),
    (conv_wide, dict(window=np.zeros((2, 4, C), F32)), f"window must have shape (2, 3, {C}), got (2, 4, {C})"),
    (conv_wide, dict(v=np.zeros((4, NV, HEAD), F32)), "v must be f16, got dtype float32"),
    (delta_prepare, dict(k=np.zeros((4, 2, HEAD), F16)), "k must have shape (4, 1, 128), got (4, 2, 128)"),
    (delta_prepare, dict(within=np.zeros((1, NV, 16, 32, 8), F16)), "within must have shape (1, 3, 12, 32, 8), got"),
    (delta_prepare, dict(beta=np.zeros((4, 5), F32)), "5 value heads, wanted 1 to 4 for each of 1 key heads"),
    (delta_chunk, dict(S=np.zeros((2, NV, HEAD, 64), F32)), "S must have shape (2, 3, 128, 128), got (2, 3, 128, 64)"),
    (delta_chunk, dict(o=np.zeros((4, NV, HEAD), F32)), "o must be f16, got dtype float32"),
]


@pytest.mark.parametrize("module, change, words", REFUSALS,
                         ids=[f"{lab.name_of(module)}-{list(change)[0]}" for module, change, _ in REFUSALS])
def test_launch_refuses_in_a_sentence(module, change, words):
    recorder = machines.Recorder()
    with pytest.raises(ValueError) as caught:
        module.launch(recorder, **{**module.make(np.random.default_rng(0), rows=4, key_heads=NK, value_heads=NV), **change})
    assert words in str(caught.value)
    assert not recorder.kernels, "nothing was launched"
