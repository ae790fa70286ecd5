"""Scheduler: who runs next. It owns the waiting line, the running sequences and both pools, and builds the next Step.

    every step:  one row of each sequence that decodes  +  up to `chunk` prompt rows of those that prefill, oldest first

Admission takes a state slot and the pages of the whole prompt. When a running sequence cannot get its next page, the
youngest one is sent back to the head of the line and will be recomputed: its ids are kept, its pages and slot are not.
The KV cache holds at least one whole context, so the oldest always gets through.
Proven by tests/test_scheduler.py.
"""
from collections import deque
from dataclasses import dataclass

import numpy as np

from .kvpool import KVPool, OutOfPages, pages_for
from .sequence import Sequence
from .slots import StateSlots
from .step import Rows, Step, pack


@dataclass(frozen=True)
class Part:
    """A sequence's share of a step: rows [start, start+count) of its ids; outputs index the step's logits."""
    sequence: Sequence
    start: int
    count: int
    outputs: slice


@dataclass(frozen=True)
class Plan:
    step: Step
    parts: tuple[Part, ...]


class Scheduler:
    def __init__(self, pool: KVPool, slots: StateSlots, chunk: int):
        self.pool, self.slots, self.chunk = pool, slots, chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []       # in order of admission, oldest first
        self.fresh: list[int] = []              # slots taken since the last plan: the tower must clear them

    # ------------------------------------------------------------------ in and out
    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or cancelled sequence, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.let_go(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> list[tuple[int, int]] | None:
        """Let a new `child` go on from where `parent` stands. Returns the page copies to make, or None, with nothing
        changed, when no slot or page is free: then the child has to wait in line."""
        slot = self.slots.acquire()
        if slot is None:
            return None
        try:
            table, copies = self.pool.fork(parent.table)
        except OutOfPages:
            self.slots.release(slot)
            return None
        child.table, child.slot = table, slot
        self.running.append(child)
        return copies

    def let_go(self, sequence: Sequence) -> None:
        self.pool.release(sequence.table)
        self.slots.release(sequence.slot)
        if sequence.slot in self.fresh:
            self.fresh.remove(sequence.slot)
        sequence.table = sequence.slot = None

    # ------------------------------------------------------------------ the next step
    def plan(self) -> Plan | None:
        """The next step, its pages reserved; None when there is nothing to do. `fresh` slots must be cleared first."""
        budget = self.chunk
        counts: dict[Sequence, int] = {}
        self.admit()
        for sequence in list(self.running):
            if sequence.table is None:          # was sent back to make room for an older one
                continue
            count = 1 if sequence.pending == 1 else min(sequence.pending, budget)
            if count and self.make_room(sequence, count):
                counts[sequence] = count
                budget -= count if sequence.pending > 1 else 0
        counts = {s: n for s, n in counts.items() if s.table is not None}
        return self.build(counts) if counts else None

    def admit(self) -> None:
        """Move waiting sequences to running while a slot and the pages of all their ids are free, one page for each
        running sequence left over: they will all want to grow."""
        while self.waiting:
            head = self.waiting[0]
            if pages_for(head.pending) + len(self.running) > len(self.pool.free):
                return
            slot = self.slots.acquire()
            if slot is None:
                return
            self.waiting.popleft()
            head.table, head.slot = self.pool.open(), slot
            self.pool.reserve(head.table, head.pending)
            self.fresh.append(slot)
            self.running.append(head)

    def make_room(self, sequence: Sequence, rows: int) -> bool:
        """Reserve `rows` rows, sending younger sequences back as needed; False if `sequence` itself had to go."""
        while True:
            try:
                self.pool.reserve(sequence.table, rows)
                return True
            except OutOfPages:
                victim = self.running.pop()
                self.let_go(victim)
                self.waiting.appendleft(victim)
                if victim is sequence:
                    return False

    def build(self, counts: dict[Sequence, int]) -> Plan:
        rows, parts, done = [], [], 0
        for sequence, count in counts.items():
            start = sequence.table.length
            outputs = sequence.wanted_rows(start, count)
            rows.append(Rows(np.array(sequence.ids[start:start + count], np.int32), sequence.slot,
                             np.array(sequence.table.pages, np.int32), start, outputs))
            parts.append(Part(sequence, start, count, slice(done, done + len(outputs))))
            done += len(outputs)
        return Plan(pack(rows), tuple(parts))

    def commit(self, plan: Plan) -> None:
        """The tower ran the plan: its rows are in the cache."""
        for part in plan.parts:
            self.pool.advance(part.sequence.table, part.count)

    def check(self) -> None:
        """Recount pools and queues; AssertionError names what does not add up."""
        self.pool.check()
        self.slots.check()
        assert {s.slot for s in self.running} == self.slots.used, "a slot is held by nobody, or by a waiting sequence"
        assert {id(s.table) for s in self.running} == {id(t) for t in self.pool.tables}, "a table is held by nobody"
        assert all(s.table is None and s.slot is None for s in self.waiting), "a waiting sequence holds memory"
