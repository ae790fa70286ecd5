"""One forward pass as arrays that nobody changes: the scheduler builds it, a tower runs it, nothing else is passed.

    sequence r owns rows starts[r] : starts[r+1] of the step and reads its own state slot and pages.

      tokens     5   9   2   |  7   |  3   3   8   1            three sequences in one step:
      parents   -1   0   1   | -1   | -1   0   0   2            a prefill chunk, a decode row, a draft tree
      starts     0             3      4               8
      commit     yes           yes    no

A row's parent is an earlier row of its own sequence, counted from that sequence's first row; -1 is the sequence's
committed state. Committed rows must form a chain: they extend the KV cache and the recurrent state for good. The rows of
an uncommitted tree leave the committed state as it is; their KV is written behind it and what is needed to replay them
is kept by the tower, so that the sequence's next step can name in `accepted` which of them (a path, root first) to
commit before it computes anything. Naming none drops the tree.
"""
import math
from dataclasses import dataclass

import numpy as np


@dataclass                      # not frozen=True, which would take 3 us of the host's 80 between two rounds; so with Rows
class Step:
    """Axes: T rows, R sequences, O wanted rows, B pages of the longest sequence.

    tokens     i32 [T]     token ids
    positions  i32 [T]     rope positions; a tree row's is its parent's + 1
    parents    i32 [T]     see above
    starts     i32 [R+1]   first row of each sequence, and T
    slots      i32 [R]     recurrent state slot
    pages      i32 [R, B]  page table, -1 beyond the sequence's own pages
    lengths    i32 [R]     committed KV rows before this step, accepted rows not counted
    commit     bool [R]
    accepted   one i32 array a sequence: row numbers of its previous, uncommitted step
    outputs    i32 [O]     rows of the step whose logits are wanted
    hidden     whether the final-normed hidden of every row is wanted too (the draft head reads it)
    follows    i32 [T] or None: with hidden, the token behind each row, -1 where it is not known. A tower may give pairs of
               (hidden, token) to the draft head itself, and return of such a sequence only its last row's hidden
    """
    tokens: np.ndarray
    positions: np.ndarray
    parents: np.ndarray
    starts: np.ndarray
    slots: np.ndarray
    pages: np.ndarray
    lengths: np.ndarray
    commit: np.ndarray
    accepted: tuple[np.ndarray, ...]
    outputs: np.ndarray
    hidden: bool = False
    follows: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def sequences(self) -> int:
        return len(self.slots)

    def span(self, r: int) -> slice:
        """Rows of sequence r."""
        return slice(int(self.starts[r]), int(self.starts[r + 1]))


class Row:
    """What a step says of one wanted row: its logits, or the best of them at hand and the rest on demand.

    ids i64 [K], values f32 [K]: the K largest logits of ids with text, best first, of equals the lower id first; None where
    the row itself is at hand. `fetch`, if given, brings `logits`, f32 [V], until the tower's next step.
    """

    def __init__(self, logits=None, ids=None, values=None, fetch=None):
        self.row, self.ids, self.values, self.fetch = logits, ids, values, fetch

    @property
    def logits(self) -> np.ndarray:
        if self.row is None:
            self.row = self.fetch()
        return self.row

    @property
    def finite(self) -> bool:
        """Whether the logits are numbers. The best one tells: NaN and infinity sort before any number, and an infinity that
        goes into the head comes out as one in half of the row."""
        return bool(np.isfinite(self.logits).all() if self.ids is None else math.isfinite(self.values[0]))

    def likely(self, count: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
        """The `count` most likely of the ids below `vocabulary`, best first, and their probabilities; those of candidates
        among themselves, which is a little high where the rest weighs something."""
        if self.ids is not None:
            weights = np.exp(self.values - self.values[0])
            return self.ids[:count], weights[:count] / weights.sum()
        scores = self.logits[:vocabulary]
        ids = np.argpartition(scores, -count)[-count:]
        ids = ids[np.argsort(-scores[ids], kind="stable")]
        return ids, np.exp(scores[ids] - scores[ids[0]]) / np.exp(scores - scores[ids[0]]).sum()


class Output:
    """What a step returns: the wanted rows, and hidden f32 [T, D] after the final norm or None if it was not asked.

    logits is f32 [O, V], or a function that fetches rows of it by slice; then `best` is (ids i64 [O, K], values f32 [O, K]).
    seeded: by sequence, of how many of its first rows the draft head has the keys and values now; None: of none.
    """

    def __init__(self, logits, hidden: np.ndarray | None = None, best=None, seeded: np.ndarray | None = None):
        self.source, self.hidden, self.best, self.seeded = logits, hidden, best, seeded

    @property
    def logits(self) -> np.ndarray:
        """All wanted rows, whole: f32 [O, V]."""
        return self.source if self.best is None else self.source(slice(0, len(self.best[0])))

    def rows(self, which: slice = slice(None)) -> list[Row]:
        """The wanted rows of a slice."""
        if self.best is None:
            return [Row(row) for row in self.source[which]]
        ids, values = self.best
        return [Row(None, ids[i], values[i], lambda i=i: self.source(slice(i, i + 1))[0])
                for i in range(*which.indices(len(ids)))]


@dataclass
class Rows:
    """One sequence's share of a step, before packing. parents None means a chain from the committed state."""
    tokens: np.ndarray              # i32 [t]
    slot: int
    pages: np.ndarray               # i32 [b]
    length: int                     # committed KV rows
    outputs: np.ndarray             # i32 [o], counted from this sequence's first row
    parents: np.ndarray | None = None
    commit: bool = True
    accepted: np.ndarray | None = None
    shift: int = 0                  # rope position of the first row in `pages`; the draft head may begin later than the text
    follows: np.ndarray | None = None   # i32 [t]; see Step


def pack_one(r: Rows, hidden: bool) -> Step:
    """The step of one sequence: what pack() gives, in a fraction of the time that a decode round would wait for it."""
    n, i32 = len(r.tokens), np.int32
    accepted = np.zeros(0, i32) if r.accepted is None else np.asarray(r.accepted, i32)
    first = r.shift + r.length + len(accepted)
    parents = chain(n) if r.parents is None else np.asarray(r.parents, i32)
    deep = np.arange(n, dtype=i32) if r.parents is None else depths(parents)
    return Step(np.asarray(r.tokens, i32), first + deep, parents, np.array([0, n], i32), np.array([r.slot], i32),
                np.asarray(r.pages, i32)[None], np.array([r.length], i32), np.array([r.commit], bool), (accepted,),
                np.asarray(r.outputs, i32), hidden, r.follows if hidden else None)


def pack(rows: list[Rows], hidden: bool = False) -> Step:
    """Lay the sequences' rows side by side."""
    if len(rows) == 1:
        return pack_one(rows[0], hidden)
    counts = [len(r.tokens) for r in rows]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    width = max(len(r.pages) for r in rows)
    pages = np.full((len(rows), width), -1, np.int32)
    for i, r in enumerate(rows):
        pages[i, :len(r.pages)] = r.pages
    parents = [chain(len(r.tokens)) if r.parents is None else np.asarray(r.parents, np.int32) for r in rows]
    none = np.zeros(0, np.int32)
    accepted = tuple(none if r.accepted is None else np.asarray(r.accepted, np.int32) for r in rows)
    first = [r.shift + r.length + len(a) for r, a in zip(rows, accepted)]   # position of a row whose parent is -1
    return Step(
        tokens=np.concatenate([r.tokens for r in rows]).astype(np.int32),
        positions=np.concatenate([f + depths(p) for f, p in zip(first, parents)]).astype(np.int32),
        parents=np.concatenate(parents), starts=starts,
        slots=np.array([r.slot for r in rows], np.int32), pages=pages,
        lengths=np.array([r.length for r in rows], np.int32),
        commit=np.array([r.commit for r in rows], bool), accepted=accepted,
        outputs=np.concatenate([r.outputs + s for r, s in zip(rows, starts)]).astype(np.int32), hidden=hidden,
        follows=np.concatenate([r.follows for r in rows]).astype(np.int32) if hidden and all(
            r.follows is not None for r in rows) else None)


def chain(n: int) -> np.ndarray:
    """Parents of n rows that follow one another: i32 [n] = -1, 0, ..., n-2."""
    return np.arange(-1, n - 1, dtype=np.int32)


def is_chain(parents: np.ndarray) -> bool:
    return bool((parents == chain(len(parents))).all())


def depths(parents: np.ndarray) -> np.ndarray:
    """Distance of each row from the committed state, less one: a row with parent -1 has depth 0."""
    if is_chain(parents):
        return np.arange(len(parents), dtype=np.int32)
    out = np.zeros(len(parents), np.int32)
    for i, p in enumerate(parents):
        assert p < i, "a parent comes before its children"
        out[i] = out[p] + 1 if p >= 0 else 0
    return out


def ancestors(parents: np.ndarray) -> np.ndarray:
    """bool [n, n]: row i reads row j, that is, j is i or an ancestor of i."""
    n = len(parents)
    if is_chain(parents):
        return np.tril(np.ones((n, n), bool))
    mask = np.eye(n, dtype=bool)
    for i, p in enumerate(parents):
        if p >= 0:
            mask[i] |= mask[p]
    return mask
