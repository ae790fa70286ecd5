"""Drafters: who proposes the next tokens. Each adds guesses to the draft trees of some sequences.

    LookupDrafter    what followed the same words before (lookup.py): a chain from the root, costs nothing
    HeadDrafter      the checkpoint's draft head (MTP): a level of the tree at a time for all sequences together; for one
                     alone, on a tower that can, a chain in one go

The head's cache has one row for each position p, made from the main model's hidden of p and token p + 1, in the same pages
as the main model's keys. Rows for guesses are made from the head's own hiddens; they stand behind the true ones and are
written over when the text has moved on:

    rows    0 ........ seeded | hidden, not yet run | guesses of this round
                              '-- true_rows() runs these with true hiddens, the last one's logits are the first guess

A guess is (token, how likely, kind); its kind is how Acceptance remembers it. A drafter that is wrong costs time, never a
token (tree.py). Who calls: speculation.py. Proven by tests/test_drafter.py and tests/test_speculation.py.
"""
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .kvpool import PAGE
from .sequence import Sequence
from .step import Row, Rows, pack
from .tree import DraftTree
from .treeplan import Plan, clock_of

BEAM = 4            # rows of a level that are followed
KNOWN = ((3, 0.3), (4, 0.45), (6, 0.6), (10, 0.75), (16, 0.9), (32, 0.95))     # ids that agree, first odds of what followed
SURE = 0.85         # odds at which a long match goes without the head
SURE_LENGTH = 16


@dataclass(eq=False)
class Draft:
    """One sequence's tree of this round; depth and guesses are the most it may have."""
    sequence: Sequence
    depth: int
    guesses: int
    tree: DraftTree = field(init=False)
    sure: bool = False              # the tree is as good as it gets

    def __post_init__(self):
        self.tree = DraftTree(self.sequence.ids[-1])


class Drafter(Protocol):
    """Anything that proposes; block drafters will be another kind."""

    def extend(self, drafts: list[Draft]) -> None:
        """Add guesses to the trees."""


class LookupDrafter:
    """Proposes what followed the longest earlier match."""

    def __init__(self, plan: Plan):
        self.plan = plan

    def extend(self, drafts: list[Draft]) -> None:
        for draft in drafts:
            ids = draft.sequence.ids
            length, start = draft.sequence.drafting.lookup.match(ids)
            if length:
                self.chain(draft, length, ids[start:start + min(draft.depth, draft.guesses)])

    def chain(self, draft, length, tokens):
        row = 0
        for i, token in enumerate(tokens):
            kind, odds = bucket(length + i)
            row = draft.tree.add(row, token, self.plan.acceptance.chance(kind, odds), (kind, odds))
        draft.sure = length >= SURE_LENGTH and self.plan.acceptance.rate(bucket(length)[0], 0.0) > SURE


def bucket(length: int):
    """(kind, first odds) of a guess behind so many ids that agree."""
    least, odds = next(pair for pair in reversed(KNOWN) if length >= pair[0])
    return ("lookup", least), odds


def head_rows(sequence: Sequence, tokens, start: int, first: int, outputs, parents=None) -> Rows:
    """Rows of the head from position `first` on, which reads the cache from `start` on, a page's beginning."""
    return Rows(np.array(tokens, np.int32), sequence.slot, np.array(sequence.table.pages[start // PAGE:], np.int32),
                first - start, np.array(outputs, np.int32), parents, shift=start)


def true_rows(sequence: Sequence, until: int, wanted: bool, window: int = 0) -> tuple[Rows, np.ndarray]:
    """The head's rows of the positions it lacks up to `until`, and their hiddens; logits of the last if `wanted`."""
    head = sequence.drafting.head
    start, hidden = head.window(window), head.take(until)
    first = until - len(hidden)
    return head_rows(sequence, sequence.ids[first + 1:until + 1], min(start, first // PAGE * PAGE), first,
                     [len(hidden) - 1] if wanted else []), hidden


def numbers(rows: list[Row]) -> list[Row]:
    """What the head said. Raises ArithmeticError if it is none."""
    if not all(row.finite for row in rows):
        raise ArithmeticError("the draft head produced logits that are not finite")
    return rows


def add_likely(tree: DraftTree, row: int, says: Row, depth: int, plan: Plan, vocabulary: int) -> int:
    """Add the tokens at `depth` that the head thinks likely below a row; the row of the likeliest."""
    ids, odds = says.likely(plan.width, vocabulary)
    children = []
    for rank, (token, p) in enumerate(zip(ids.tolist(), odds.tolist())):
        kind = ("head", min(depth, 8), rank)
        children.append(tree.add(row, token, plan.acceptance.chance(kind, p), (kind, p)))
    return children[0]


class HeadDrafter:
    """Grows trees with the draft head of `engine`'s tower."""

    def __init__(self, engine, plan: Plan, vocabulary: int, window: int = 0):
        """window: tokens before the end that the head reads; 0: all."""
        self.engine, self.plan, self.vocabulary, self.window = engine, plan, vocabulary, -(-window // PAGE) * PAGE

    def extend(self, drafts: list[Draft]) -> None:
        drafts = [d for d in drafts if not d.sure and d.sequence.drafting.head.seeded < d.sequence.table.length]
        if not drafts:
            return
        longest = self.engine.tower.longest_chain
        if len(drafts) == 1 and longest:
            return self.extend_chain(drafts[0], min(drafts[0].depth, longest))
        fronts = [Front(d, d.sequence.table.length, d.sequence.drafting.head.window(self.window)) for d in drafts]
        rows, hidden = self.run([true_rows(d.sequence, d.sequence.table.length, True, self.window) for d in drafts])
        for depth in range(1, max(d.depth for d in drafts) + 1):
            at = 0
            for front in fronts:
                n = len(front.rows)
                front.grow(rows[at:at + n], hidden[at:at + n], depth, self.plan, self.vocabulary)
                at += n
            fronts = [f for f in fronts if f.follow(depth + 1, self.plan, len(drafts))]
            if not fronts:
                return
            rows, hidden = self.run([f.guessed_rows() for f in fronts])

    def extend_chain(self, draft: Draft, depth: int) -> None:
        """Where an exchange with the tower for each level would cost more than it brings: one chain of the head's best
        guesses, as long as should pay, and what else it thought likely beside each."""
        rows, hidden = true_rows(draft.sequence, draft.sequence.table.length, True, self.window)
        depth, begun = self.plan.chain(depth), clock_of(self.engine.tower)()
        said = numbers(self.engine.tower.draft_chain(pack([rows]), hidden, depth))
        self.plan.costs.draft.add(1, (clock_of(self.engine.tower)() - begun) / depth)
        row = 0
        for depth, says in enumerate(said, 1):
            row = add_likely(draft.tree, row, says, depth, self.plan, self.vocabulary)
            if draft.tree.tokens[row] in draft.sequence.stop_ids:
                return

    def run(self, parts: list[tuple[Rows, np.ndarray]]) -> tuple[list[Row], np.ndarray]:
        """One step of the head: what it says of the wanted rows, and its own hiddens there."""
        begun = clock_of(self.engine.tower)()
        step = pack([rows for rows, _ in parts], hidden=True)
        output = self.engine.tower.forward_mtp(step, np.concatenate([hidden for _, hidden in parts]))
        self.plan.costs.draft.add(step.rows, clock_of(self.engine.tower)() - begun)
        return numbers(output.rows()), output.hidden[step.outputs]

    def seed(self, sequences: list[tuple[Sequence, int]]) -> None:
        """Write the rows that the head lacks of each sequence up to a position; nothing is drafted."""
        if sequences:
            parts = [true_rows(sequence, until, False, self.window) for sequence, until in sequences]
            self.engine.tower.forward_mtp(pack([rows for rows, _ in parts]), np.concatenate([h for _, h in parts]))


class Front:
    """The rows of one tree whose children are asked next."""

    def __init__(self, draft: Draft, base: int, start: int = 0):
        """The guesses stand from position `base` on; the head reads from `start` on."""
        self.draft, self.tree, self.base, self.start = draft, draft.tree, base, start
        self.rows = [0]
        self.hidden: dict[int, np.ndarray] = {}     # tree row: the head's hidden there
        self.written: list[int] = []                # tree rows in the head's cache from `base` on

    def grow(self, said: list[Row], hidden: np.ndarray, depth: int, plan: Plan, vocabulary: int) -> None:
        """Add the best children of each row."""
        for row, says, h in zip(self.rows, said, hidden):
            self.hidden[row] = h
            add_likely(self.tree, row, says, depth, plan, vocabulary)

    def follow(self, depth: int, plan: Plan, sequences: int) -> bool:
        """Choose the rows whose children, at `depth`, are asked next; False if that does not pay."""
        if depth > self.draft.depth:
            return False
        children = [child for row in self.rows for child in self.tree.children[row].values()]
        children = [row for row in children if self.tree.tokens[row] not in self.draft.sequence.stop_ids]
        children.sort(key=lambda row: -self.tree.reach[row])
        least = plan.follows(depth, sequences)
        self.rows = sorted(self.fitting(row for row in children[:BEAM] if self.tree.reach[row] >= least))
        return bool(self.rows) and plan.deepen(sum(self.tree.reach[r] for r in self.rows), depth, len(self.rows), sequences)

    def fitting(self, rows: Iterable[int]) -> list[int]:
        """The first of these rows whose paths are no more rows than a tree may have guesses: so many places are reserved."""
        found, used = [], set()
        for row in rows:
            more = used.union(self.tree.path(row)[1:])
            if len(more) > self.draft.guesses:
                break
            found, used = [*found, row], more
        return found

    def guessed_rows(self) -> tuple[Rows, np.ndarray]:
        """The head's rows for the paths to self.rows, less those at their common beginning that are in the cache already."""
        paths = [self.tree.path(row)[1:] for row in self.rows]
        kept = 0
        while kept < len(paths[0]) - 1 and kept < len(self.written) and all(p[kept] == self.written[kept] for p in paths):
            kept += 1
        new = sorted({row for path in paths for row in path[kept:]})
        place = {row: i for i, row in enumerate(new)}
        self.written = self.written[:kept] + new
        rows = head_rows(self.draft.sequence, [self.tree.tokens[r] for r in new], self.start, self.base + kept,
                         [place[r] for r in self.rows],
                         np.array([place.get(self.tree.parents[r], -1) for r in new], np.int32))
        return rows, np.stack([self.hidden[self.tree.parents[r]] for r in new])
