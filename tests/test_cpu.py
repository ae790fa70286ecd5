"""The numpy tower against vectors that transformers made in float32 from the same checkpoint (tests/data/golden.npz).

Tolerance 5e-4 on logits of magnitude about 20: the specification's bound for a float32 build (two correct float32
implementations of this model differ by up to 2e-4); an error in any formula moves logits by 0.5 and more.
"""
from pathlib import Path

import numpy as np
import pytest

from qwentin import nano
from qwentin.kvpool import KVPool
from qwentin.model.cpu import CpuTower
from qwentin.model.weights import open_checkpoint
from qwentin.step import Rows, pack

GOLDEN = np.load(Path(__file__).parent / "data" / "golden.npz")
ATOL = 5e-4
PAGES = 40


@pytest.fixture(scope="module")
def tower():
    return CpuTower(open_checkpoint(nano.DIRECTORY), PAGES, slots=4)


class Session:
    """One sequence on a tower, its page table shuffled so that pages are not neighbours."""

    def __init__(self, tower, slot=0, seed=0):
        self.tower, self.slot, self.pool = tower, slot, KVPool(PAGES)
        np.random.default_rng(seed).shuffle(self.pool.free)
        self.table = self.pool.open()
        tower.clear_slot(slot)

    def rows(self, tokens, **more):
        self.pool.reserve(self.table, len(tokens) + 32)
        more.setdefault("outputs", np.arange(len(tokens), dtype=np.int32))
        return Rows(np.asarray(tokens, np.int32), self.slot, np.array(self.table.pages, np.int32), self.table.length, **more)

    def run(self, tokens, **more):
        out = self.tower.forward(pack([self.rows(tokens, **more)], hidden=True))
        self.pool.advance(self.table, len(tokens) if more.get("commit", True) else 0)
        return out

    def state(self):
        return self.tower.S[:, self.slot].copy(), self.tower.window[:, self.slot].copy()


def cuts(name, n):
    """Where the prompt is cut: whole, at awkward places, token by token."""
    places = {"whole": [], "1": [1], "3": [3], "31": [31], "33": [33], "63": [63], "64": [64], "65": [65],
              "window": [1, 2, 4, 5, 6, 66, 67, 130], "tokens": range(1, n)}[name]
    edges = [0, *(p for p in places if p < n), n]
    return list(zip(edges[:-1], edges[1:]))


@pytest.mark.parametrize("prompt", range(5))
@pytest.mark.parametrize("name", ["whole", "1", "3", "31", "33", "63", "64", "65", "window", "tokens"])
def test_logits_equal_transformers(tower, prompt, name):
    ids = GOLDEN[f"ids{prompt}"]
    session = Session(tower, seed=prompt)
    outputs = [session.run(ids[a:b]) for a, b in cuts(name, len(ids))]
    logits, hidden = (np.concatenate([getattr(o, f) for o in outputs]) for f in ("logits", "hidden"))
    wanted = GOLDEN[f"logits{prompt}"]
    assert np.abs(logits[-len(wanted):] - wanted).max() < ATOL
    mtp = Session(tower, seed=prompt + 1)
    drafted = tower.forward_mtp(pack([mtp.rows(ids[1:])]), hidden[:-1])
    wanted = GOLDEN[f"mtp_logits{prompt}"]
    assert np.abs(drafted.logits[-len(wanted):] - wanted).max() < ATOL


@pytest.mark.parametrize("prompt", range(5))
def test_greedy_ids_equal_transformers(tower, prompt):
    session, wanted = Session(tower), GOLDEN[f"greedy{prompt}"]
    token, got = int(session.run(GOLDEN[f"ids{prompt}"]).logits[-1].argmax()), []
    for _ in wanted:
        got.append(token)
        token = int(session.run([token]).logits[-1].argmax())
    assert got == wanted.tolist()


@pytest.mark.parametrize("name", ["1", "3", "63", "64", "65", "window", "tokens"])
def test_final_state_from_a_non_zero_start(tower, name):
    """However the continuation is cut, S, the window and the KV rows end up the same.

    Tolerance: a state entry is a float32 sum over 280 tokens that may be taken in another order: 1e-4 of the largest."""
    first, rest = GOLDEN["ids3"][:20], GOLDEN["ids3"][20:]
    whole, parts = Session(tower, slot=0), Session(tower, slot=1)
    whole.run(first), parts.run(first)
    assert all(np.abs(x).max() > 0.1 for x in whole.state())
    whole.run(rest)
    for a, b in cuts(name, len(rest)):
        parts.run(rest[a:b])
    for x, y in zip(whole.state(), parts.state()):
        assert np.abs(x - y).max() < 1e-4 * np.abs(x).max()


def test_several_sequences_in_one_step(tower):
    """A prefill chunk, a decode row and another prefill side by side give what each gives alone.

    Tolerance as above: the shapes of the products differ, so sums may be taken in another order."""
    ids = GOLDEN["ids3"]
    alone = [Session(tower, slot=3).run(ids[:70]).logits[-1]]
    one = Session(tower, slot=3)
    one.run(ids[:9])
    alone += [one.run(ids[9:10]).logits[-1], Session(tower, slot=3).run(ids[100:133]).logits[-1]]
    a, b, c = Session(tower, slot=0), Session(tower, slot=1), Session(tower, slot=2)
    b.pool = c.pool = a.pool
    b.table, c.table = a.pool.open(), a.pool.open()
    b.run(ids[:9])
    last = lambda n: np.array([n - 1], np.int32)
    step = pack([a.rows(ids[:70], outputs=last(70)), b.rows(ids[9:10]), c.rows(ids[100:133], outputs=last(33))])
    for got, wanted in zip(tower.forward(step).logits, alone):
        assert np.abs(got - wanted).max() < ATOL


TREE = np.array([-1, 0, 0, 1, 1, 2, -1, 6, 3], np.int32)
PATH = [0, 1, 3, 8]


def test_tree_rows_equal_their_paths_and_leave_the_state_alone(tower):
    ids = GOLDEN["ids3"]
    tree = Session(tower, slot=0)
    tree.run(ids[:40])
    before = tree.state()
    logits = tree.run(ids[40:49], parents=TREE, commit=False).logits
    assert all(np.array_equal(x, y) for x, y in zip(before, tree.state()))
    path = Session(tower, slot=1, seed=1)
    path.run(ids[:40])
    wanted = path.run(ids[40:49][PATH]).logits
    assert np.abs(logits[PATH] - wanted).max() < ATOL
    assert np.abs(logits[[2, 4, 5]] - wanted[1]).max() > 1, "siblings see other pasts"


@pytest.mark.parametrize("accepted", [[], [0], [0, 1, 3, 8], [6, 7]])
def test_accepting_a_path_equals_having_decoded_it(tower, accepted):
    """The step after a tree commits the accepted path first: logits, S, window and KV as if there had been no tree."""
    ids = GOLDEN["ids3"]
    tree = Session(tower, slot=0)
    tree.run(ids[:126])                     # the tree's rows cross a page boundary
    tree.run(ids[200:209], parents=TREE, commit=False)
    got = tree.run(ids[50:53], accepted=np.array(accepted, np.int32)).logits
    plain = Session(tower, slot=1, seed=3)
    plain.run(ids[:126])
    for i in accepted:
        plain.run(ids[200 + i:201 + i])
    wanted = plain.run(ids[50:53]).logits
    assert np.abs(got - wanted).max() < ATOL
    for x, y in zip(tree.state(), plain.state()):
        assert np.abs(x - y).max() < 1e-4 * np.abs(y).max()


def test_copied_slot_and_page_continue_alike(tower):
    ids = GOLDEN["ids1"]
    parent = Session(tower, slot=0)
    parent.run(ids[:30])
    child = Session(tower, slot=1)
    child.pool = parent.pool
    child.table, copies = parent.pool.fork(parent.table)
    tower.copy_slot(0, 1)
    for source, target in copies:
        tower.copy_page(source, target)
    wanted = parent.run(ids[30:]).logits
    assert np.array_equal(child.run(ids[30:]).logits, wanted)


def test_l2_unit_keeps_its_epsilon():
    """Invisible end to end, so tested alone: a near-zero vector is scaled by 1/sqrt(1e-6), not to length one."""
    from qwentin.model.cpu import l2_unit
    x = np.full((1, 4), 1e-4, np.float32)
    assert np.allclose(l2_unit(x), 1e-4 / np.sqrt(4e-8 + 1e-6), rtol=1e-6)


def test_attention_in_blocks(monkeypatch, tower):
    """Scores are held in blocks of bounded size; any size gives the same.

    Tolerance 1e-5: scores reach 25, where a float32 is 2e-6 coarse, and a weight's relative error is its score's."""
    import qwentin.model.cpu_attention as cpu
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((9, 6, 32), (50, 2, 32), (50, 2, 32)))
    mask = np.tril(np.ones((9, 9), bool))
    whole = cpu.attend(q, k, v, mask)
    monkeypatch.setattr(cpu, "QUERIES", 2)
    assert np.abs(cpu.attend(q, k, v, mask) - whole).max() < 1e-5
    for i in range(9):          # against the definition, float64, one head at a time
        for h in range(6):
            s = k[:42 + i, h // 3].astype(np.float64) @ q[i, h]
            p = np.exp(s - s.max())
            assert np.allclose(whole[i, h], (p / p.sum()) @ v[:42 + i, h // 3], atol=1e-5)


def test_hiddens_before_the_last_norm(tower):
    """Normed, they are the hiddens: 1e-4 where those reach 10. The head norms what it gets, and nano's norm weights are all
    about 1.7: so it says nearly the same of both, but not the same."""
    raw = CpuTower(open_checkpoint(nano.DIRECTORY), PAGES, 1, raw_hidden=True)
    ids, found = GOLDEN["ids3"][:40], []
    for each in (tower, raw):
        session = Session(each)
        hidden = session.run(ids).hidden
        drafted = each.forward_mtp(pack([Session(each).rows(ids[1:])], hidden=True), hidden[:-1])
        found.append((hidden, drafted.logits, drafted.hidden))
    (normed, logits, last), (before, other, last_before) = found
    unit = lambda x: x / np.sqrt((x ** 2).mean(-1, keepdims=True) + 1e-6)
    assert np.abs(normed - unit(before) * tower.norm).max() < 1e-4
    assert np.abs(last - unit(last_before) * tower.mtp.norm).max() < 0.3 < np.abs(last - last_before).max()
    assert 1e-3 < np.abs(logits - other).max() < 3
