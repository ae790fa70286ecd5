"""One forward pass as frozen arrays: the scheduler builds it, a tower runs it, nothing else is passed.

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
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Output:
    """logits f32 [O, V] of the wanted rows; hidden f32 [T, D] after the final norm, or None if it was not asked.

    seeded: by sequence, of how many of its first rows the draft head has the keys and values now; None: of none.
    """
    logits: np.ndarray
    hidden: np.ndarray | None = None
    seeded: np.ndarray | None = None


@dataclass(frozen=True)
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


def pack(rows: list[Rows], hidden: bool = False) -> Step:
    """Lay the sequences' rows side by side."""
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
    return bool(np.array_equal(parents, chain(len(parents))))


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
