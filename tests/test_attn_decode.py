"""attn_decode: it is the numpy tower's attention, it finds every key, its launch does not depend on what memory holds."""
import numpy as np
import pytest

from qwentin import numerics
from qwentin.kernels import attn_decode, lab, machines
from qwentin.kernels.kv_tile import HEAD, PAGE
from qwentin.model.cpu import attend, read_rows, sigmoid
from qwentin.step import Rows, ancestors, pack

GROUPS, PER = 1, 6
EMULATOR = machines.Emulator()
ENCODE = {"bf16": numerics.encode_bf16, "e4m3": numerics.E4M3.encode}
# numpy works in float32 and rounds nothing: what the kernel's own roundings cost, and the output's
ATOL = {"bf16": 2.0 ** -8, "e4m3": 2.0 ** -11}


def bits_of(parents):
    """u32 a row: the rows it sees."""
    return (ancestors(parents) << np.arange(len(parents), dtype=np.uint64)).sum(1).astype(np.uint32)


def random_tree(rng, n):
    return np.array([-1] + [rng.integers(-1, i) for i in range(1, n)], np.int32)


def random_step(rng, sequences, total_pages):
    """A Step of trees over shuffled pages: [(rows, length)] of each sequence."""
    free = list(rng.permutation(total_pages).astype(np.int32))
    rows = []
    for t, length in sequences:
        pages = np.array([free.pop() for _ in range(-(-(length + t) // PAGE))], np.int32)
        rows.append(Rows(np.zeros(t, np.int32), 0, pages, length, np.zeros(0, np.int32), random_tree(rng, t), False))
    return pack(rows)


def attended(step, q, qkv, kv, format, splits, most=8, k_scale=1.0, v_scale=1.0):
    """The kernel's output, float32 [T, H, 256], for a cache of codes kv [2, P, 128, G, 256]."""
    masks = np.concatenate([bits_of(step.parents[step.span(r)]) for r in range(step.sequences)])
    shape = GROUPS, splits + step.sequences, most * PER
    return lab.run(attn_decode, dict(
        q=numerics.encode_bf16(q) if format == "bf16" else q.astype(np.float16), qkv=qkv, k_pages=kv[0], v_pages=kv[1],
        pages=step.pages, starts=step.starts, lengths=step.lengths, ancestors=masks, k_scale=k_scale, v_scale=v_scale,
        out=np.empty(q.shape, np.float32), partial=np.empty((*shape, HEAD), np.float32),
        stats=np.empty((*shape, 2), np.float32)), EMULATOR)["out"]


@pytest.mark.parametrize("format, k_scale, v_scale", [("bf16", 1.0, 1.0), ("e4m3", 0.25, 0.125)])
@pytest.mark.parametrize("seed", range(2))
def test_it_is_the_numpy_towers_attention(format, k_scale, v_scale, seed):
    """Random trees on random pages, the same cache decoded for model/cpu.py."""
    rng, total_pages = np.random.default_rng(seed), 9
    step = random_step(rng, [(int(rng.integers(1, 9)), int(n)) for n in (*rng.integers(0, 260, 2), 125)], total_pages)
    decode = numerics.decode_bf16 if format == "bf16" else numerics.E4M3.decode
    scale = np.array([k_scale, v_scale], np.float32).reshape(2, 1, 1, 1, 1)
    values = rng.uniform(-1, 1, (2, total_pages, PAGE, GROUPS, HEAD)).astype(np.float32)
    values[0] *= 2
    codes = ENCODE[format](values / scale)
    q = rng.standard_normal((step.rows, PER * GROUPS, HEAD)).astype(np.float32) * 3
    q = numerics.decode_bf16(numerics.encode_bf16(q)) if format == "bf16" else q.astype(np.float16).astype(np.float32)
    qkv = rng.standard_normal((step.rows, (2 * PER + 2) * GROUPS * HEAD)).astype(np.float32)
    gate = qkv.reshape(step.rows, -1, HEAD)[:, 1:2 * PER * GROUPS:2]
    got = attended(step, q, qkv, codes, format, 4, k_scale=k_scale, v_scale=v_scale)
    cache = decode(codes) * scale
    for r in range(step.sequences):
        rows = step.span(r)
        keys, values = read_rows(cache, step.pages[r], int(step.lengths[r]) + rows.stop - rows.start)
        want = attend(q[rows] * np.float32(HEAD ** -0.5), keys, values, ancestors(step.parents[rows])) * sigmoid(gate[rows])
        assert np.abs(got[rows] - want).max() < ATOL[format]


def one_hot(step, wanted, format, splits):
    """Which key each (row, head) puts its weight on, -1 if on several. Keys are random signs, and a query is 16 times the
    key at place wanted[t, h] of its sequence: that one scores 256, others 0 +- 16. A value is its place in binary."""
    rng = np.random.default_rng(5)
    signs = rng.choice(np.float32([-1, 1]), (int(step.pages.max()) + 1, PAGE, GROUPS, HEAD))
    places, q = np.zeros_like(signs), np.zeros((step.rows, PER, HEAD), np.float32)
    for r in range(step.sequences):
        at = np.arange(step.lengths[r] + step.starts[r + 1] - step.starts[r])
        page, row = step.pages[r, at // PAGE], at % PAGE
        places[page, row, 0, :12] = at[:, None] >> np.arange(12) & 1
        rows = step.span(r)
        q[rows] = 16 * signs[page, row, 0][wanted[rows]]
    open_gate = np.full((step.rows, (2 * PER + 2) * HEAD), 60, np.float32)
    out = attended(step, q, open_gate, np.stack([ENCODE[format](x) for x in (signs, places)]), format, splits)
    digits = np.rint(out[..., :12])
    found = (digits.astype(int) << np.arange(12)).sum(-1)
    return np.where(np.abs(out[..., :12] - digits).max(-1) < 0.01, found, -1)


@pytest.mark.parametrize("format", ENCODE)
def test_every_key_is_found(format):
    """In each launch a row's first head looks for the row itself, the others for five keys of the past, until all were
    looked for: none is lost at the edges of pages, tiles, shares and sequences."""
    step = random_step(np.random.default_rng(2), [(8, 131), (8, 25), (7, 64), (8, 120)], 9)
    past = [iter(range(int(n))) for n in step.lengths]
    for _ in range(4):
        wanted = np.zeros((step.rows, PER), int)
        for r, length in enumerate(step.lengths):
            for i, row in enumerate(range(step.starts[r], step.starts[r + 1])):
                wanted[row] = [length + i, *(next(past[r], 0) for _ in range(PER - 1))]
        assert (one_hot(step, wanted, format, 4) == wanted).all()
    assert all(next(p, None) is None for p in past)


def test_a_row_sees_its_ancestors_and_no_other_row():
    """Every row looks for each of the eight rows in turn; where it may not see one, its weight is elsewhere."""
    step = random_step(np.random.default_rng(3), [(8, 62)], 2)
    sees = ancestors(step.parents)
    assert not sees.all(1).any() and (sees.sum(1) > 1).any()
    found = np.zeros((8, 8), bool)
    for first in (0, 2):
        wanted = np.broadcast_to(62 + first + np.arange(PER), (8, PER))
        found[:, first:first + PER] = one_hot(step, wanted, "bf16", 3) == wanted
    assert (found == sees).all()


def test_one_launch_serves_any_lengths_and_trees():
    """Kernels, grid and numbers are the same whatever lengths, pages, rows and masks hold: a graph can be replayed."""
    class Noting:
        def __init__(self):
            self.launches = []

        def launch(self, kernel, grid, *args, dependent=False):
            self.launches.append((kernel, grid, [a if np.isscalar(a) else (a.shape, a.dtype) for a in args]))

    base = attn_decode.make(np.random.default_rng(0), rows=(4, 2), lengths=(250, 100), heads=6, groups=1)
    other = attn_decode.make(np.random.default_rng(1), rows=(2, 4), lengths=(251, 3), heads=6, groups=1)
    noted = []
    for arguments in (base, {**base, **{k: other[k] for k in ("starts", "lengths", "ancestors", "pages")}}):
        noted.append(Noting())
        attn_decode.launch(noted[-1], **arguments)
    assert len(noted[0].launches) == 2 and noted[0].launches == noted[1].launches


def test_splits_fill_the_device():
    """H200: 132 multiprocessors of 227 KiB; RTX 5090: 170 of 99 KiB."""
    h200, rtx = (132, 227 << 10), (170, 99 << 10)
    assert attn_decode.splits_for(*h200, 4, 6, 1, "e4m3", "e4m3") == 132 * 3 // 4
    assert attn_decode.splits_for(*h200, 4, 6, 16, "e4m3", "e4m3") == 132 * 2 // 8
    assert attn_decode.splits_for(*rtx, 4, 6, 8, "bf16", "bf16") == 170 // 4
    assert attn_decode.splits_for(4, 99 << 10, 8, 6, 32, "e4m3", "e4m3") == 1


@pytest.mark.parametrize("change, words", [
    (dict(q=np.zeros((1, 6, 256), np.float16)), "q must be bf16, got dtype float16"),
    (dict(q=np.zeros((1, 6, 128), np.uint16)), "q must have shape (1, 6, 256), got (1, 6, 128)"),
    (dict(q=np.zeros((1, 7, 256), np.uint16), k_pages=np.zeros((3, 128, 2, 256), np.uint16)), "with H a multiple of G"),
    (dict(v_pages=np.zeros((2, 128, 1, 256), np.uint16)), "v_pages must have shape (3, 128, 1, 256), got (2, 128, 1, 256)"),
    (dict(k_pages=np.zeros((3, 64, 1, 256), np.uint16)), "k_pages must have shape (3, 128, 1, 256), got (3, 64, 1, 256)"),
    (dict(starts=np.zeros(4, np.int32)), "starts must have shape (2,), got (4,)"),
    (dict(ancestors=np.zeros(2, np.uint32)), "ancestors must have shape (1,), got (2,)"),
    (dict(partial=np.zeros((1, 9, 34 * 6, 256), np.float32)), "1 to 32 rows, got (1, 9, 204, 256)"),
    (dict(partial=np.zeros((1, 1, 6, 256), np.float32)), "partial must have shape [1, splits + 1, rows * 6, 256]"),
    (dict(stats=np.zeros((1, 9, 6, 1), np.float32)), "stats must have shape (1, 9, 6, 2), got (1, 9, 6, 1)"),
    (dict(qkv=np.zeros((1, 6 * 256), np.float32)), "qkv must have shape (1, 3584), got (1, 1536)"),
    (dict(lengths=np.zeros(40, np.int32), starts=np.zeros(41, np.int32), pages=np.zeros((40, 2), np.int32),
          partial=np.zeros((1, 48, 6, 256), np.float32)), "a step takes at most 32 sequences, got 40")],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_refusals(change, words):
    arguments = {**attn_decode.make(np.random.default_rng(0), rows=(1,), lengths=(200,), heads=6, groups=1), **change}
    recorder = machines.Recorder()
    with pytest.raises(ValueError) as caught:
        attn_decode.launch(recorder, **arguments)
    assert words in str(caught.value)
    assert not recorder.kernels, "nothing was launched"
