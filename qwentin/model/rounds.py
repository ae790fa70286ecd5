"""From a Step of any size to rounds of at most 32 rows, and who still owes rows to its state between rounds.

    step      | prefill of 70 rows . . . . . . . . . . . . . . . | decode | tree of 8 |
    rounds    [ 32 ]  [ 32 ]  [ 6 + 1 + 8 ]                                    a sequence is in a round once, a tree whole

The recurrent state lags: rows of a round lie in an entry of the pools, and the slot's next round replays those that were
accepted before it adds its own; the convolution's window lies in the entry too (kernels/plan.py). Ledger remembers for each
slot which entry that is. A slot has a pair of entries, one to read and one to write; there are `pairs` of them, at least as
many as sequences run, and of the slots without an open tree the one that waits longest is settled to free one.

Who calls: model/cuda.py. Proven by tests/test_rounds.py.
"""
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ..step import Step, is_chain
from .buffers import ROWS


@dataclass(frozen=True)
class Span:
    """Rows first .. first + count - 1 of a step, which are rows done .. of its sequence r."""
    r: int
    first: int
    count: int
    done: int


ONE_ROW = ((Span(0, 0, 1, 0),),)


def split(step: Step, but: frozenset[int] = frozenset()) -> list[list[Span]]:
    """The rounds of a step, its rows in order, the sequences of `but` left out.

    Raises ValueError for a tree of more rows than a round has.
    """
    if step.rows == 1:
        return ONE_ROW
    rounds, room = [[]], ROWS
    for r in sorted(set(range(step.sequences)) - but):
        first, stop = int(step.starts[r]), int(step.starts[r + 1])
        done = 0
        whole = not step.commit[r] or not is_chain(step.parents[first:stop])
        if whole and stop - first > ROWS:
            raise ValueError(f"a draft tree has {stop - first} rows; at most {ROWS} can be verified at once")
        while first + done < stop:
            rest = stop - first - done
            if not room or (whole and rest > room) or (rounds[-1] and rounds[-1][-1].r == r):
                rounds.append([])
                room = ROWS
            count = min(rest, room)
            rounds[-1].append(Span(r, first + done, count, done))
            done, room = done + count, room - count
    return [spans for spans in rounds if spans]


@dataclass
class Debt:
    """Rows of a slot's last round: in `entry`, so many; all accepted if `committed`, else the next step says which."""
    pair: int
    entry: int
    rows: int
    committed: bool


class Ledger:
    """Which slots owe rows to their state. `settle(slot)` is called to have the device pay one slot's debt."""

    def __init__(self, pairs: int, settle):
        self.pairs, self.free = pairs, list(range(pairs - 1, -1, -1))
        self.debts: dict[int, Debt] = {}            # by slot, the one that waits longest first
        self.settle = settle

    def begin(self, slot: int, accepted: np.ndarray, company: Collection[int]) -> tuple[int, int, tuple[int, ...]]:
        """(entry to read or -1, entry to write, rows to replay) of a slot's next round; slots of `company` keep theirs."""
        debt = self.debts.pop(slot, None)
        if debt is None:
            assert not len(accepted), "accepted rows need an uncommitted step before"
            pair = self.pair(company)
            self.debts[slot] = Debt(pair, 2 * pair, 0, True)
            return -1, 2 * pair, ()
        assert not (debt.committed and len(accepted)), "committed rows are accepted already"
        path = tuple(range(debt.rows)) if debt.committed else tuple(int(row) for row in accepted)
        self.debts[slot] = Debt(debt.pair, debt.entry ^ 1, 0, True)
        return debt.entry, debt.entry ^ 1, path

    def take(self, slot: int) -> int:
        """The entry of a slot's open tree, whose accepted rows the caller replays now; the debt is forgotten."""
        debt = self.debts.pop(slot)
        assert not debt.committed, "accepted rows need an uncommitted step before"
        self.free.append(debt.pair)
        return debt.entry

    def pair(self, company):
        if not self.free:
            waiting = [slot for slot, debt in self.debts.items() if debt.committed and slot not in company]
            assert waiting, "as many pairs as sequences run: an open tree is never dropped to make room"
            self.settle(waiting[0])
        return self.free.pop()

    def end(self, slot: int, rows: int, committed: bool) -> None:
        """The round ran: so many rows of the slot lie in the entry that `begin` named."""
        self.debts[slot].rows, self.debts[slot].committed = rows, committed

    def close(self, slot: int) -> tuple[int, tuple[int, ...]] | None:
        """Forget a slot's debt and free its pair: (entry, rows to replay) if it has one; an undecided tree is dropped."""
        debt = self.debts.pop(slot, None)
        if debt is None:
            return None
        self.free.append(debt.pair)
        return debt.entry, tuple(range(debt.rows)) if debt.committed else ()
