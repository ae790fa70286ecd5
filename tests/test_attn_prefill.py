"""attn_prefill and its form for Hopper: the numpy tower's attention, every key found, a launch that any span may use."""
import numpy as np
import pytest

from qwentin import numerics
from qwentin.kernels import attn_prefill, attn_prefill_sm90a, lab, machines
from qwentin.kernels.kv_tile import HEAD, PAGE
from qwentin.model.cpu import attend, read_rows, sigmoid

GROUPS, PER = 1, 6
FORMS = [(attn_prefill, machines.Emulator()), (attn_prefill_sm90a, machines.Emulator("sm_90a"))]
ENCODE = {"bf16": numerics.encode_bf16, "e4m3": numerics.E4M3.encode}
DECODE = {"bf16": numerics.decode_bf16, "e4m3": numerics.E4M3.decode}
# numpy works in float32 and rounds nothing: a weight's rounding to bf16 or f16, the output's to f16, scores' and sums' rest
ATOL = {"bf16": 2.0 ** -9 + 2.0 ** -11, "e4m3": 2.0 ** -12 + 2.0 ** -11}
forms = pytest.mark.parametrize("module, machine", FORMS, ids=[lab.name_of(m) for m, _ in FORMS])


def attended(module, machine, pages, length, q, qkv, kv, format, splits=1, k_scale=1.0, v_scale=1.0):
    """The kernel's output, f16 [T, H, 256], for a cache of codes kv [2, P, 128, G, 256]."""
    shape = GROUPS, splits + 1, len(q) * PER
    split = dict(partial=np.empty((*shape, HEAD), np.float32), stats=np.empty((*shape, 2), np.float32))
    return lab.run(module, dict(
        q=numerics.encode_bf16(q) if format == "bf16" else q.astype(np.float16), qkv=qkv.astype(np.float16), k_pages=kv[0],
        v_pages=kv[1], pages=pages, span=np.array([0, len(q), length], np.int32), k_scale=k_scale, v_scale=v_scale,
        out=np.empty(q.shape, np.float16), **(split if splits > 1 else {})), machine)["out"].astype(np.float32)


@forms
@pytest.mark.parametrize("format, k_scale, v_scale, splits", [("bf16", 1.0, 1.0, 1), ("e4m3", 0.25, 0.125, 2)])
def test_it_is_the_numpy_towers_attention(module, machine, format, k_scale, v_scale, splits):
    """Shuffled pages, the same cache decoded for model/cpu.py."""
    rng, rows, length = np.random.default_rng(splits), 25, 510
    pages = rng.permutation(6)[:5].astype(np.int32)
    scale = np.array([k_scale, v_scale], np.float32).reshape(2, 1, 1, 1, 1)
    values = rng.uniform(-1, 1, (2, 6, PAGE, GROUPS, HEAD)).astype(np.float32)
    values[0] *= 2
    codes = ENCODE[format](values / scale)
    q = rng.standard_normal((rows, PER * GROUPS, HEAD)).astype(np.float32) * 3
    q = numerics.decode_bf16(numerics.encode_bf16(q)) if format == "bf16" else q.astype(np.float16).astype(np.float32)
    qkv = rng.standard_normal((rows, (2 * PER + 2) * GROUPS * HEAD)).astype(np.float16).astype(np.float32)
    gate = qkv.reshape(rows, -1, HEAD)[:, 1:2 * PER * GROUPS:2]
    got = attended(module, machine, pages, length, q, qkv, codes, format, splits, k_scale, v_scale)
    keys, values = read_rows(DECODE[format](codes) * scale, pages, length + rows)
    want = attend(q * np.float32(HEAD ** -0.5), keys, values, np.tril(np.ones((rows, rows), bool))) * sigmoid(gate)
    assert np.abs(got - want).max() < ATOL[format]


@forms
@pytest.mark.parametrize("format", ENCODE)
@pytest.mark.parametrize("length, step, splits", [(0, 1, 1), (67, 1, 1), (500, 3, 2)])
def test_every_key_is_found_and_none_of_the_future(module, machine, format, length, step, splits):
    """Keys are random signs, and a query is 16 times the key it looks for: that one scores 256, others 0 +- 16. A value is
    its place in binary. Heads look for the row itself, the next row (in vain), and keys of the past, every `step`th."""
    rng, rows = np.random.default_rng(5), 44
    keys = length + rows + 1                                            # one more stands in the pages, which nobody may see
    pages = rng.permutation(-(-keys // PAGE) + 1)[:-1].astype(np.int32)
    signs = rng.choice(np.float32([-1, 1]), (len(pages) + 1, PAGE, GROUPS, HEAD))
    at, places = np.arange(keys), np.zeros_like(signs)
    places[pages[at // PAGE], at % PAGE, 0, :12] = at[:, None] >> np.arange(12) & 1
    kv = np.stack([ENCODE[format](x) for x in (signs, places)])
    open_gate = np.full((rows, (2 * PER + 2) * HEAD), 60, np.float32)
    past = iter(range(0, length, step))
    for _ in range(-(-length // (step * rows * (PER - 3))) or 1):
        wanted = np.array([[length + t, length + t + 1, length + t // 2, *(next(past, 0) for _ in range(PER - 3))]
                           for t in range(rows)])
        q = 16 * signs[pages[wanted // PAGE], wanted % PAGE, 0]
        out = attended(module, machine, pages, length, q, open_gate, kv, format, splits)[..., :12]
        digits = np.rint(out)
        found = np.where(np.abs(out - digits).max(-1) < 0.01, (digits.astype(int) << np.arange(12)).sum(-1), -1)
        assert (np.delete(found, 1, 1) == np.delete(wanted, 1, 1)).all()
        assert (found[:, 1] != wanted[:, 1]).all()
    assert next(past, None) is None


@pytest.mark.parametrize("kv", ENCODE)
def test_warps_of_hopper_in_any_order(kv):
    """One fetching and two multiplying warpgroups meet at mbarriers alone; more pieces than the ring has places."""
    case = dict(rows=21, length=300, heads=6, groups=1, kv=kv)
    checked = lab.check_case(attn_prefill_sm90a, case, machines.Emulator("sm_90a", 11))
    assert all(error.used <= 1 for error in checked.errors), checked


@pytest.mark.parametrize("module", [m for m, _ in FORMS], ids=lab.name_of)
def test_one_launch_serves_any_span(module):
    """Kernels, grid and numbers are the same whatever span and pages hold: a graph can be replayed."""
    class Noting:
        def __init__(self):
            self.launches = []

        def launch(self, kernel, grid, *args, dependent=False):
            self.launches.append((kernel, grid, [a if np.isscalar(a) else (a.shape, a.dtype) for a in args]))

    base = attn_prefill.make(np.random.default_rng(0), rows=20, length=700, heads=6, groups=1, splits=2)
    noted = []
    for span in ([0, 20, 700], [0, 3, 0]):
        noted.append(Noting())
        module.launch(noted[-1], **{**base, "span": np.array(span, np.int32), "pages": base["pages"][::-1].copy()})
    assert len(noted[0].launches) == 2 and noted[0].launches == noted[1].launches


def test_splits_fill_the_device():
    """H200: 132 multiprocessors. 2,048 rows are 384 blocks, three waves; 300 are 60, of which 13 in ten fit once more."""
    assert attn_prefill.splits_for(132, 2048, 6, 4) == 1
    assert attn_prefill.splits_for(132, 300, 6, 4) == 2
    assert attn_prefill.splits_for(132, 128, 6, 4) == 5
    assert attn_prefill.splits_for(132, 1, 6, 4) == 8


@pytest.mark.parametrize("change, words", [
    (dict(q=np.zeros((1, 6, 256), np.float16)), "q must be bf16, got dtype float16"),
    (dict(q=np.zeros((1, 7, 256), np.uint16), k_pages=np.zeros((3, 128, 2, 256), np.uint16)), "with H a multiple of G"),
    (dict(v_pages=np.zeros((2, 128, 1, 256), np.uint16)), "v_pages must have shape (3, 128, 1, 256), got (2, 128, 1, 256)"),
    (dict(pages=np.zeros((1, 3), np.int32)), "pages must have shape (3,), got (1, 3)"),
    (dict(span=np.zeros(2, np.int32)), "span must be i32 or u32 [3 or more], got int32 (2,)"),
    (dict(partial=np.zeros((1, 2, 6, 256), np.float32)), "partial and stats must both be None"),
    (dict(partial=np.zeros((1, 3, 5, 256), np.float32), stats=np.zeros((1, 3, 6, 2), np.float32)),
     "partial must have shape (1, 3, 6, 256)"),
    (dict(qkv=np.zeros((1, 6 * 256), np.float32)), "qkv must have shape (1, 3584), got (1, 1536)")],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_refusals(change, words):
    arguments = {**attn_prefill.make(np.random.default_rng(0), rows=1, length=200, heads=6, groups=1), **change}
    recorder = machines.Recorder()
    with pytest.raises(ValueError) as caught:
        attn_prefill.launch(recorder, **arguments)
    assert words in str(caught.value)
    assert not recorder.kernels, "nothing was launched"
