"""Scheduler: who runs next. It owns the waiting line, the running sequences, both pools and the prefix cache; it builds the
next Step.

    every step:  one row of each sequence that decodes  +  up to pace.rows() of prompts, the oldest first

Admission takes a state slot and the pages of the whole prompt, and goes on from the longest known prefix. When pages are
short the cache gives up its cheapest entries; when that is not enough for a running sequence's next page, the youngest one
is sent back to the head of the line and will be recomputed: its ids are kept, its pages and slot are not. The KV cache
holds at least one whole context, so the oldest always gets through.

The scheduler only counts; what has to be cleared or copied in the tower is left in `chores`, in order, for the engine to do
before the next step. Proven by tests/test_scheduler.py and tests/test_prefix.py.
"""
from collections import deque
from dataclasses import dataclass

import numpy as np

from .drafting import HeadRows
from .kvpool import PAGE, KVPool, OutOfPages, Table, pages_for
from .pace import Pace
from .prefix import Entry, PrefixCache
from .sequence import Sequence
from .slots import StateSlots
from .step import Rows, Step, pack
from .tree import DraftTree


@dataclass
class Part:
    """A sequence's share of a step: rows [start, start+count) of its ids, or a draft tree behind its first `start` ids, root
    included; outputs index the step's logits."""
    sequence: Sequence
    start: int
    count: int
    outputs: slice
    tree: DraftTree | None = None

    @property
    def decodes(self) -> bool:
        """The row of a sampled token, alone or with guesses."""
        return self.start >= self.sequence.prompt_tokens and (self.count == 1 or self.tree is not None)

    @property
    def given(self) -> int:
        """Tokens that were chosen since, if it decodes."""
        return len(self.sequence.ids) - self.start - 1


@dataclass
class Plan:
    step: Step
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Chore:
    """Something the tower must do before the next step: "clear_slot" of target, "copy_slot" or "copy_page"."""
    kind: str
    source: int
    target: int


class Scheduler:
    """Runs at most `most` sequences; the cache keeps at most `kept` prefixes. `slots` holds most + kept."""

    def __init__(self, pool: KVPool, most: int, kept: int, pace: Pace):
        self.pool, self.slots = pool, StateSlots(most + kept)
        self.cache = PrefixCache(pool, self.slots, kept)
        self.most, self.pace = most, pace
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []       # in order of admission, oldest first
        self.chores: list[Chore] = []

    # ------------------------------------------------------------------ in and out
    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or cancelled sequence, wherever it is. What it computed is worth keeping unless it failed: then
        the snapshots on its way are let go too."""
        if sequence in self.running:
            self.running.remove(sequence)
            if sequence.finished == "error":
                self.cache.forget(np.array(sequence.ids, np.int32))
            if sequence.table.length and sequence.finished != "error" and self.cache.capacity:
                while len(self.cache.entries) >= self.cache.capacity:
                    self.cache.evict()
                assert not sequence.drafting.accepted, "accepted rows are committed before a state is kept"
                self.pool.trim(sequence.table)
                head = sequence.drafting.head
                self.cache.insert(sequence.known(), sequence.table, sequence.slot, head.last, head.first)
                sequence.table = sequence.slot = None
            else:
                self.let_go(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Let a new `child` go on from where `parent` stands. False, with nothing changed, when too many run or no page is
        free: then the child has to wait in line."""
        table = self.fork_table(parent) if len(self.running) < self.most else None
        if table is None:
            return False
        child.table, child.slot = table, self.slots.acquire()
        child.drafting.head = HeadRows(table.length, parent.drafting.head.last, parent.drafting.head.first)
        self.chores.append(Chore("copy_slot", parent.slot, child.slot))
        self.running.append(child)
        return True

    def fork_table(self, holder: Sequence | Entry) -> Table | None:
        """A second table over the holder's rows; None when there is no page for its part used last one."""
        try:
            table, copies = self.pool.fork(holder.table)
        except OutOfPages:
            return None
        self.chores += [Chore("copy_page", source, target) for source, target in copies]
        return table

    def let_go(self, sequence: Sequence) -> None:
        self.pool.release(sequence.table)
        self.slots.release(sequence.slot)
        sequence.table = sequence.slot = None
        sequence.drafting.forget()

    def send_back(self, sequences: list[Sequence]) -> None:
        """Compute these again from their first id, those that still run; their place in line is the first."""
        for sequence in reversed([s for s in sequences if s in self.running]):
            self.running.remove(sequence)
            self.let_go(sequence)
            self.waiting.appendleft(sequence)

    # ------------------------------------------------------------------ the next step
    def plan(self) -> Plan | None:
        """The next step without draft trees; None when there is nothing to do. The chores come first."""
        picked = self.pick()
        return self.build(picked) if picked else None

    def pick(self) -> dict[Sequence, int]:
        """Who has rows in the next step and how many, their pages reserved."""
        counts: dict[Sequence, int] = {}
        self.admit()
        budget = self.pace.rows(any(s.pending == 1 for s in self.running))
        for sequence in list(self.running):
            if sequence.table is None:          # was sent back to make room for an older one
                continue
            count = 1 if sequence.pending == 1 else min(sequence.until_cut(), budget)
            if count and self.make_room(sequence, count):
                counts[sequence] = count
                budget -= count if sequence.pending > 1 else 0
        return {s: n for s, n in counts.items() if s.table is not None}

    def admit(self) -> None:
        """Move waiting sequences to running while they may run and the pages of all their ids are free, one page for each
        running sequence left over: they will all want to grow."""
        while self.waiting and len(self.running) < self.most:
            head = self.waiting[0]
            entry = self.cache.match(head.reusable())
            if not self.free_pages(head, entry):
                entry = None
                if not self.free_pages(head, None):
                    return
            self.waiting.popleft()
            head.slot = self.slots.acquire()
            head.table = self.fork_table(entry) if entry else self.pool.open()
            if entry:
                self.cache.use(entry)
                self.chores.append(Chore("copy_slot", entry.slot, head.slot))
            else:
                self.chores.append(Chore("clear_slot", -1, head.slot))
            head.kept = head.table.length
            shared = self.cache.shared(head.reusable())
            head.branch = shared if shared - head.kept >= PAGE else 0       # less is read again sooner than it is copied
            head.drafting.head = HeadRows(head.kept, entry.hidden if entry and head.kept % PAGE else None,
                                          entry.first if entry else 0)
            if not head.generated:
                head.cached = head.kept
            self.pool.reserve(head.table, head.pending)
            self.running.append(head)

    def free_pages(self, head: Sequence, entry: Entry | None) -> bool:
        """Evict entries, not `entry`, until all ids of `head` fit behind it."""
        shared = entry.length // PAGE if entry else 0
        while pages_for(len(head.ids)) - shared + len(self.running) > len(self.pool.free):
            if not self.cache.evict(entry):
                return False
        return True

    def make_room(self, sequence: Sequence, rows: int) -> bool:
        """Reserve `rows` rows, emptying the cache and sending younger sequences back as needed; False if `sequence` itself
        had to go."""
        while True:
            try:
                self.pool.reserve(sequence.table, rows)
                return True
            except OutOfPages:
                if self.cache.evict():
                    continue
                victim = self.running.pop()
                self.let_go(victim)
                self.waiting.appendleft(victim)
                if victim is sequence:
                    return False

    def make_space(self, sequence: Sequence, rows: int) -> int:
        """Reserve up to `rows` rows for guesses, from free pages or those of one kept prefix; how many there are."""
        if self.pool.room(sequence.table) < rows:
            self.cache.evict()
        rows = min(rows, self.pool.room(sequence.table))
        self.pool.reserve(sequence.table, rows)
        return rows

    def build(self, counts: dict[Sequence, int], trees: dict[Sequence, DraftTree] | None = None,
              hidden: bool = False) -> Plan:
        """The step of these rows. trees: instead of the one row of such a sequence; hidden: the step returns hiddens."""
        rows, parts, done = [], [], 0
        for sequence, count in counts.items():
            start, tree = sequence.table.length, trees.get(sequence) if trees else None
            accepted = np.array(sequence.drafting.accepted, np.int32)
            place = dict(slot=sequence.slot, pages=np.array(sequence.table.pages, np.int32),
                         length=start - len(accepted), accepted=accepted)
            if tree:
                count, (tokens, parents) = len(tree), tree.arrays()
                rows.append(Rows(tokens, outputs=np.arange(count, dtype=np.int32), parents=parents, commit=False,
                                 follows=np.full(count, -1, np.int32), **place))
            else:
                tokens = np.array(sequence.ids[start:start + count], np.int32)
                follows = np.array([*sequence.ids[start + 1:start + count + 1], -1][:count], np.int32) if hidden else None
                rows.append(Rows(tokens, outputs=sequence.wanted_rows(start, count), follows=follows, **place))
            wanted = len(rows[-1].outputs)
            parts.append(Part(sequence, start, count, slice(done, done + wanted), tree))
            done += wanted
        return Plan(pack(rows, hidden), tuple(parts))

    def commit(self, plan: Plan) -> None:
        """The tower ran the plan: its rows are in the cache, a tree's when the text runs through them. Snapshots are taken
        where a later request may go on from."""
        for part in plan.parts:
            part.sequence.drafting.accepted = []
            if part.tree:
                continue
            self.pool.advance(part.sequence.table, part.count)
            if part.sequence.worth_keeping(self.pace.most):
                self.snapshot(part.sequence)

    def keep_row(self, sequence: Sequence, row: int) -> None:
        """The text runs through this row of the tree that was verified last."""
        self.pool.advance(sequence.table, 1)
        sequence.drafting.accepted.append(row)

    def snapshot(self, sequence: Sequence) -> None:
        """Keep a copy of the sequence's state as it stands, if a slot and a page can be had."""
        ids = sequence.known()
        sequence.kept = len(ids)
        if self.cache.holds(ids) or not self.cache.capacity:
            return
        slot = self.cache.take_slot()
        if slot is None:
            return
        table = self.fork_table(sequence)
        if table is None:
            self.slots.release(slot)
            return
        self.chores.append(Chore("copy_slot", sequence.slot, slot))
        self.cache.insert(ids, table, slot, sequence.drafting.head.last, sequence.drafting.head.first)

    def check(self) -> None:
        """Recount pools, cache and queues; AssertionError names what does not add up."""
        self.pool.check()
        self.slots.check()
        self.cache.check()
        holders = [*self.running, *self.cache.entries]
        assert len({h.slot for h in holders}) == len(holders), "a slot is held twice"
        assert {h.slot for h in holders} == self.slots.used, "a slot is held by nobody, or by a waiting sequence"
        assert {id(h.table) for h in holders} == {id(t) for t in self.pool.tables}, "a table is held by nobody"
        assert all(s.table is None and s.slot is None for s in self.waiting), "a waiting sequence holds memory"
        assert len(self.running) <= self.most, "too many sequences run"
