"""Drafters on nano: the head's cache holds what a fresh pass over the text would put there, its trees are those that a plain
evaluation of the head gives, and a chain of copies is found by lookup."""
from dataclasses import replace

import numpy as np
import pytest

from qwentin import nano
from qwentin.drafter import Draft, HeadDrafter, LookupDrafter, bucket
from qwentin.drafting import HeadRows, Tally
from qwentin.kvpool import KVPool
from qwentin.model.cpu import CpuTower
from qwentin.model.weights import open_checkpoint
from qwentin.request import GenerateRequest
from qwentin.sequence import Sequence
from qwentin.step import Row, Rows, chain, pack
from qwentin.tokenizer import Tokenizer
from qwentin.tree import DraftTree
from qwentin.treeplan import Fixed

TEXT = "def insort_right(a, x, lo=0, hi=None):\n    \"\"\"Insert item x in list a"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(nano.DIRECTORY)


class Model:
    """Stands in for an engine: a tower whose sequences are run by hand."""

    def __init__(self):
        self.tower, self.pool = CpuTower(open_checkpoint(nano.DIRECTORY), 12, 2), KVPool(12)

    def sequence(self, tokenizer, slot=0, read=None, ids=None):
        """One that has read all but the last of its ids, the head too, in pieces of `read`."""
        ids = tokenizer.encode(TEXT) if ids is None else ids
        sequence = Sequence(GenerateRequest("r", ids[:-1]), 0, tokenizer, frozenset({4085}), 50)
        sequence.ids.append(int(ids[-1]))
        sequence.table, sequence.slot = self.pool.open(), slot
        self.pool.reserve(sequence.table, len(ids) + 40)
        self.tower.clear_slot(slot)
        drafter, end = HeadDrafter(self, Fixed(8, 15, 3), tokenizer.size), len(ids) - 1
        for at in range(0, end, read or end):
            part = ids[at:min(at + (read or end), end)]
            rows = Rows(part, slot, np.array(sequence.table.pages, np.int32), at, np.zeros(0, np.int32))
            sequence.drafting.head.push(self.tower.forward(pack([rows], hidden=True)).hidden)
            self.pool.advance(sequence.table, len(part))
            if at + len(part) > 1:
                drafter.seed([(sequence, at + len(part) - 1)])
        return sequence, drafter

    def head_rows(self, sequence, count):
        kv = self.tower.kv[:, -1][:, sequence.table.pages]
        return kv.reshape(2, -1, *kv.shape[3:])[:, :count]


@pytest.fixture(scope="module")
def model():
    return Model()


def test_rows_that_the_head_lacks():
    head = HeadRows()
    head.push(np.arange(8, dtype=np.float32).reshape(4, 2))
    assert head.take(3)[:, 0].tolist() == [0, 2, 4] and head.seeded == 3 and head.last.tolist() == [[6, 7]]
    head.push(np.full((2, 2), 9, np.float32))
    assert head.take(6)[:, 0].tolist() == [6, 9, 9] and head.end == 6 and len(head.hidden) == 1
    warm = HeadRows(10, np.ones((1, 2), np.float32))
    assert warm.seeded == 9 and len(warm.take(10)) == 1
    cold = HeadRows(10)                                 # nobody kept the hidden: that row stays as it is
    cold.push(np.zeros((3, 2), np.float32))
    assert cold.seeded == 10 and len(cold.take(12)) == 2


def test_rows_that_the_tower_gives_the_head():
    head = HeadRows()
    head.push(np.zeros((3, 2), np.float32))
    assert head.lacks(3) and len(head.take(3)) == 3 and not head.lacks(3)
    head.feed(100, 100, np.full((1, 2), 7, np.float32))
    assert (head.end, head.seeded, head.last.tolist()) == (103, 103, [[7, 7]])
    head.feed(50, 49, np.full((1, 2), 8, np.float32))       # nobody knew the token behind the last
    assert head.seeded == 152 and head.take(153).tolist() == [[8, 8]]
    late = HeadRows(100)
    late.skip(10)
    late.feed(64, 64, np.zeros((1, 2), np.float32))
    assert (late.end, late.first, late.seeded) == (174, 128, 174)


def test_rows_that_the_head_does_without():
    head = HeadRows(100, np.ones((1, 2), np.float32))
    head.skip(100)
    assert (head.end, head.first, head.seeded, head.last) == (200, 256, 256, None)
    head.push(np.zeros((100, 2), np.float32))
    assert head.end == 300 and len(head.take(300)) == 44 and head.seeded == 300
    assert [head.window(most) for most in (0, 128, 1000)] == [256, 256, 256]
    later = HeadRows(1000, None, 256)
    assert [later.window(most) for most in (0, 128, 500, 1000)] == [256, 768, 384, 256]
    assert HeadRows(300, None, 384).seeded == 384, "nothing is drafted until the text gets there"


@pytest.mark.parametrize("read", [1, 5, 16])
def test_the_cache_does_not_depend_on_how_the_prompt_was_read(model, tokenizer, read):
    whole, _ = model.sequence(tokenizer)
    count = whole.table.length - 1
    want = model.head_rows(whole, count).copy()
    pieces, _ = model.sequence(tokenizer, read=read)
    assert np.abs(model.head_rows(pieces, count) - want).max() < 1e-4
    model.pool.release(whole.table)
    model.pool.release(pieces.table)


def follow(model, sequence, tokens):
    """Logits of the head behind `tokens` guesses, from one pass over everything: the plain way."""
    tower, ids = model.tower, sequence.ids
    pages, end = np.array([11], np.int32), len(ids) - 1
    tower.clear_slot(1)
    rows = Rows(np.array(ids[:-1], np.int32), 1, pages, 0, np.zeros(0, np.int32))
    hidden = tower.forward(pack([rows], hidden=True)).hidden
    out = tower.forward_mtp(pack([Rows(np.array(ids[1:], np.int32), 1, pages, 0, np.array([end - 1]))], hidden=True), hidden)
    h = out.hidden[-1:]
    for i, token in enumerate(tokens):
        rows = Rows(np.array([token], np.int32), 1, pages, end + i, np.array([0]))
        out = tower.forward_mtp(pack([rows], hidden=True), h)
        h = out.hidden
    return out.logits[0]


def test_a_tree_is_what_the_head_says_of_each_path(model, tokenizer):
    """Row by row: siblings do not see each other, though all of a level are run together."""
    sequence, drafter = model.sequence(tokenizer)
    draft = Draft(sequence, 4, 15)
    drafter.extend([draft])
    tree = draft.tree
    inner = [row for row in range(len(tree)) if tree.children[row]]
    assert max(tree.depths) == 4 and len({tree.depths[row] for row in inner}) == 4 and len(inner) > 5
    for row in inner:
        logits = follow(model, sequence, [tree.tokens[r] for r in tree.path(row)[1:]])[:tokenizer.size]
        assert set(tree.children[row]) == set(np.argsort(-logits)[:3].tolist())
        odds = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        for token, child in tree.children[row].items():
            assert tree.chances[child] == pytest.approx(min(0.995, odds[token]), abs=1e-3)
    model.pool.release(sequence.table)


def test_the_head_reads_no_further_than_its_window(model, tokenizer):
    """Behind 300 tokens, with a window of 128, the first page may as well hold anything; and its first guesses are those of
    a head that was only ever shown what comes after that page, with positions of its own. 1e-3 as above."""
    ids = np.random.default_rng(1).integers(0, 4000, 300).astype(np.int32)
    sequence, _ = model.sequence(tokenizer, ids=ids)
    tower, pages = model.tower, np.array([9, 10, 11], np.int32)
    tower.clear_slot(1)
    hidden = tower.forward(pack([Rows(ids[:-1], 1, pages, 0, np.zeros(0, np.int32))], hidden=True)).hidden
    alone = tower.forward_mtp(pack([Rows(ids[129:], 1, pages, 0, np.array([170]))]), hidden[128:]).logits[0]
    said = {}
    for window, dirty in ((0, False), (100, False), (128, True)):
        sequence.drafting.head = HeadRows(299, np.array(sequence.drafting.head.last))
        kept = tower.kv[:, -1].copy()
        if dirty:
            tower.kv[:, -1, sequence.table.pages[0]] = np.nan
        draft = Draft(sequence, 3, 15)
        HeadDrafter(model, Fixed(3, 15, 3), tokenizer.size, window).extend([draft])
        said[window] = draft.tree.tokens, np.array(draft.tree.chances)
        tower.kv[:, -1] = kept
    assert said[100][0] == said[128][0] and np.abs(said[100][1] - said[128][1]).max() < 1e-3
    odds = np.exp(alone - alone.max()) / np.exp(alone[:tokenizer.size] - alone.max()).sum()
    assert np.abs(odds[said[128][0][1:4]] - said[128][1][1:4]).max() < 1e-3
    assert np.abs(odds[said[0][0][1:4]] - said[0][1][1:4]).max() > 2e-3, "without a window it says something else"
    model.pool.release(sequence.table)


def chained(tower, vocabulary):
    """draft_chain of a tower that has none, by steps of the head."""
    def draft_chain(step, hidden, depth):
        found, length = [], int(step.lengths[0]) + step.rows
        out = tower.forward_mtp(replace(step, hidden=True), hidden)
        for i in range(depth):
            logits = out.rows()[-1].logits[:vocabulary]
            ids = np.lexsort((np.arange(vocabulary), -logits))[:64]
            found.append(Row(None, ids, logits[ids]))
            rows = Rows(ids[:1].astype(np.int32), 0, step.pages[0], length + i, np.array([0]),
                        shift=int(step.positions[0] - step.lengths[0]))
            out = tower.forward_mtp(pack([rows], hidden=True), out.hidden[-1:])
        return found
    return draft_chain


def test_a_chain_is_the_best_path_and_what_stands_beside_it(model, tokenizer, monkeypatch):
    sequence, drafter = model.sequence(tokenizer)
    monkeypatch.setattr(model.tower, "longest_chain", 5)
    monkeypatch.setattr(model.tower, "draft_chain", chained(model.tower, tokenizer.size), raising=False)
    draft = Draft(sequence, 8, 15)
    drafter.extend([draft])
    tree, row = draft.tree, 0
    for depth in range(1, 6):
        logits = follow(model, sequence, [tree.tokens[r] for r in tree.path(row)[1:]])[:tokenizer.size]
        assert list(tree.children[row]) == np.argsort(-logits)[:3].tolist()
        row = tree.children[row][int(logits.argmax())]
    assert max(tree.depths) == 5 and len(tree) == 16 and not tree.children[row]
    model.pool.release(sequence.table)


def test_guessed_rows_stay_within_their_places(model, tokenizer, monkeypatch):
    sequence, drafter = model.sequence(tokenizer)
    most = []
    forward = model.tower.forward_mtp

    def watched(step, hidden):
        most.append(int(step.lengths[0]) + step.rows)
        return forward(step, hidden)
    monkeypatch.setattr(model.tower, "forward_mtp", watched)
    for guesses in (1, 2, 5, 9):
        drafter.extend([Draft(sequence, min(8, guesses), guesses)])
        sequence.drafting.head.seeded -= 1              # as if the round had kept the root alone
    assert max(most) <= sequence.table.length + 9
    model.pool.release(sequence.table)


def test_lookup_proposes_what_followed(tokenizer):
    ids = np.array([*range(100, 140), 7, *range(100, 120)], np.int32)
    sequence = Sequence(GenerateRequest("r", ids), 0, tokenizer, frozenset(), 50)
    draft = Draft(sequence, 6, 6)
    LookupDrafter(Fixed(6, 6)).extend([draft])
    assert draft.tree.tokens == [119, 120, 121, 122, 123, 124, 125] and draft.tree.parents == list(range(-1, 6))
    assert not draft.sure, "it takes practice to go without the head"
    plan = Fixed(6, 6)
    for _ in range(60):
        plan.acceptance.observe(bucket(20)[0], 0.9, True)
    LookupDrafter(plan).extend([draft])
    assert draft.sure


def test_tallies_add_up():
    tree = DraftTree(1)
    a = tree.add(0, 5, 0.9, (("lookup", 3), 0.3))
    tree.add(a, 6, 0.9)
    tree.add(0, 7, 0.1)
    one, two = Tally(), Tally()
    one.count(tree, [0, 1])
    two.count(tree, [0])
    two.events.append("x")
    one.add(two)
    found = one.frozen()
    assert (found.rounds, found.guesses, found.accepted, found.lookup, found.largest) == (2, 6, 1, 1, 3)
    assert found.offered == (2, 1) and found.taken == (1, 0) and found.events == ("x",) and one.happened == 1
    assert chain(3).tolist() == [-1, 0, 1]
