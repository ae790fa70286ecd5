"""Steps cut into rounds, and the ledger of rows that states lag behind by."""
import numpy as np
import pytest

from qwentin.model.buffers import Bucket
from qwentin.model.rounds import Ledger, split
from qwentin.step import Rows, pack


def rows(count, parents=None, commit=True, slot=0):
    return Rows(np.zeros(count, np.int32), slot, np.array([0]), 0, np.array([], np.int32), parents, commit)


def spans(step):
    return [[(s.r, s.first, s.count, s.done) for s in part] for part in split(step)]


def test_a_prefill_is_cut_and_others_ride_along():
    tree = np.array([-1, 0, 0, 1, 1, 2, 3, 3], np.int32)
    assert spans(pack([rows(70), rows(1, slot=1), rows(8, tree, False, 2)])) == [
        [(0, 0, 32, 0)], [(0, 32, 32, 32)], [(0, 64, 6, 64), (1, 70, 1, 0), (2, 71, 8, 0)]]


def test_a_tree_is_never_cut():
    tree = np.full(20, -1, np.int32)
    assert spans(pack([rows(20), rows(20, tree, False, 1)])) == [[(0, 0, 20, 0)], [(1, 20, 20, 0)]]
    with pytest.raises(ValueError, match="a draft tree has 33 rows; at most 32 can be verified at once"):
        split(pack([rows(33, np.full(33, -1, np.int32), False)]))


def test_every_row_is_in_one_round():
    rng = np.random.default_rng(0)
    for _ in range(50):
        counts = rng.integers(1, 60, rng.integers(1, 8))
        parts = split(pack([rows(int(n), slot=i) for i, n in enumerate(counts)]))
        seen = [row for part in parts for s in part for row in range(s.first, s.first + s.count)]
        assert seen == list(range(counts.sum()))
        assert all(sum(s.count for s in part) <= 32 and len({s.r for s in part}) == len(part) for part in parts)


def test_the_ledger_alternates_entries_and_replays_what_was_accepted():
    ledger = Ledger(1, None)
    assert ledger.begin(5, (), {5}) == (-1, 0, ())
    ledger.end(5, 3, True)
    assert ledger.begin(5, (), {5}) == (0, 1, (0, 1, 2))
    ledger.end(5, 8, False)
    assert ledger.begin(5, np.array([0, 4]), {5}) == (1, 0, (0, 4))
    ledger.end(5, 8, False)
    assert ledger.begin(5, (), {5}) == (0, 1, ())                      # nothing was accepted: the window is there still
    ledger.end(5, 2, True)
    assert ledger.close(5) == (1, (0, 1)) and ledger.close(5) is None and ledger.free == [0]


def test_the_slot_that_waits_longest_makes_room():
    settled = []
    ledger = Ledger(2, lambda slot: settled.append((slot, ledger.close(slot))))
    for slot in (0, 1, 0, 2):
        ledger.begin(slot, (), {slot, 3})
        ledger.end(slot, 1, True)
    assert settled == [(1, (2, (0,)))]
    ledger.begin(4, (), {0, 4})
    assert [slot for slot, _ in settled] == [1, 2]


def test_an_open_tree_is_not_dropped_to_make_room():
    settled = []
    ledger = Ledger(2, lambda slot: settled.append((slot, ledger.close(slot))))
    for slot, committed in ((0, False), (1, True)):
        ledger.begin(slot, (), {slot})
        ledger.end(slot, 3, committed)
    ledger.begin(2, (), {2})
    assert settled == [(1, (2, (0, 1, 2)))] and 0 in ledger.debts


def test_an_undecided_tree_is_dropped():
    ledger = Ledger(1, None)
    ledger.begin(0, (), {0})
    ledger.end(0, 6, False)
    assert ledger.close(0) == (0, ()) and ledger.free == [0]           # the window in its entry is owed


def test_every_bucket_is_known_beforehand():
    """Of any round of up to 32 rows; alone, as one sequence may run, fewer."""
    found = {Bucket.of(rows, sequences, deep, outputs) for rows in range(1, 33) for sequences in range(1, rows + 1)
             for deep in range(-(-rows // sequences), rows - sequences + 2) for outputs in range(rows + 1)}
    assert found == set(Bucket.every(2)) and len(found) == 41
    assert {b for b in found if b.sequences == 1} == set(Bucket.every(1))
