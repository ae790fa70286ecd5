"""Scheduler on a made-up tokenizer and no tower: order, budgets, preemption, forks; recounted after every step."""
import random

import numpy as np
import pytest

from qwentin import nano
from qwentin.kvpool import PAGE, KVPool
from qwentin.request import GenerateRequest
from qwentin.pace import Pace
from qwentin.scheduler import Scheduler
from qwentin.sequence import Sequence
from qwentin.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(nano.DIRECTORY)


def scheduler(pages=16, slots=4, chunk=64, kept=0):
    """Without a prefix cache unless `kept`: tests/test_prefix.py is about that."""
    return Scheduler(KVPool(pages), slots, kept, Pace(chunk))


@pytest.fixture
def sequence(tokenizer):
    def make(length, limit=50, index=0, **fields):
        request = GenerateRequest("r", np.arange(length, dtype=np.int32) + 300, **fields)
        return Sequence(request, index, tokenizer, frozenset({4085}), limit)
    return make


def step(s, sample=True):
    """Plan, pretend to run, give every sequence at its end token 400. Returns {sequence: rows}."""
    plan = s.plan()
    s.check()
    if plan is None:
        return {}
    s.chores.clear()
    s.commit(plan)
    for part in plan.parts:
        if not part.sequence.pending and sample:
            part.sequence.append(400, None, ())
    s.check()
    return {part.sequence: part.count for part in plan.parts}


def test_prefill_is_cut_and_rides_with_decode(sequence):
    s, long, short = scheduler(), sequence(150), sequence(10)
    s.add(short)
    s.add(long)
    assert step(s) == {short: 10, long: 54}, "the chunk of 64 is shared"
    assert step(s) == {short: 1, long: 64}, "a decode row does not count against it"
    assert step(s) == {short: 1, long: 32}
    assert step(s) == {short: 1, long: 1}


def test_no_more_than_the_slots(sequence):
    s = scheduler(slots=2)
    many = [sequence(5) for _ in range(4)]
    for each in many:
        s.add(each)
    assert set(step(s)) == set(many[:2])
    s.remove(many[0])
    assert set(step(s)) == {many[1], many[2]}
    s.remove(many[3])                                   # from the line
    s.remove(many[3])                                   # twice is harmless
    assert not s.waiting
    s.check()


def test_admission_waits_for_pages(sequence):
    s = scheduler(pages=4, chunk=1000)
    first, second = sequence(3 * PAGE), sequence(PAGE)
    s.add(first)
    s.add(second)
    assert set(step(s)) == {first}, "one page must stay free for the first to grow"
    s.remove(first)
    assert set(step(s)) == {second}


def test_the_youngest_goes_back_and_is_recomputed(sequence):
    s = scheduler(pages=5, chunk=1000)
    old, young = sequence(2 * PAGE - 1), sequence(PAGE)
    s.add(old)
    assert step(s) == {old: 2 * PAGE - 1}
    s.add(young)
    assert step(s) == {old: 1, young: PAGE}
    assert step(s) == {old: 1, young: 1}, "each took a page more: the pool is full"
    for _ in range(PAGE - 1):
        assert len(step(s)) == 2
    ids = list(young.ids)
    assert step(s) == {old: 1}
    assert s.waiting[0] is young and young.ids == ids and young.table is None
    s.remove(old)
    assert step(s) == {young: len(ids)}, "prompt and generated tokens are read again"
    assert young.ids[-1] == 400 and young.generated == len(ids) - PAGE + 1


def test_fork_shares_full_pages(sequence):
    s, parent, child = scheduler(), sequence(PAGE + 10), sequence(PAGE + 10, index=1)
    s.add(parent)
    for _ in range(3):
        step(s, sample=False)
    assert s.fork(parent, child)
    assert child.table.pages[0] == parent.table.pages[0] and child.pending == 0
    assert [(c.kind, c.source, c.target) for c in s.chores] == [
        ("copy_page", parent.table.pages[1], child.table.pages[1]), ("copy_slot", parent.slot, child.slot)]
    s.check()
    full = scheduler(slots=1)
    full.add(parent := sequence(5))
    step(full, sample=False)
    assert not full.fork(parent, sequence(5, index=1)) and not full.chores
    full.check()


def test_wanted_rows(sequence):
    plain, scored, silent = sequence(10), sequence(10, prompt_logprobs=0), sequence(10, limit=0, prompt_logprobs=0)
    assert plain.wanted_rows(0, 4).tolist() == [] and plain.wanted_rows(4, 6).tolist() == [5]
    assert scored.wanted_rows(0, 4).tolist() == [0, 1, 2, 3] and scored.wanted_rows(4, 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert silent.wanted_rows(4, 6).tolist() == [0, 1, 2, 3, 4], "nothing is sampled, so the last row says nothing"
    scored.scored = 9
    assert scored.wanted_rows(0, 10).tolist() == [9], "a sequence that was sent back is not scored again"


@pytest.mark.parametrize("kept", [0, 5])
def test_random_traffic_always_finishes(sequence, kept):
    """400 sequences of random lengths through a pool that is always too small, some cancelled on the way."""
    rng, s = random.Random(4), scheduler(pages=6, slots=3, chunk=100, kept=kept)
    left = [sequence(rng.randint(1, 3 * PAGE), limit=rng.randint(1, 2 * PAGE)) for _ in range(400)]
    done = preempted = steps = 0
    live = []
    while left or live:
        if left and len(live) < 8:
            live.append(left.pop())
            s.add(live[-1])
        before = set(map(id, s.running))
        step(s)
        preempted += any(id(w) in before for w in s.waiting)
        for each in list(live):
            if each.finished or rng.random() < 0.0005:
                done += bool(each.finished)
                s.remove(each)
                live.remove(each)
        s.check()
        steps += 1
        assert steps < 200_000
    assert done > 200 and preempted > 10
    s.cache.clear()
    s.check()
    assert len(s.pool.free) == 6 and len(s.slots.free) == 3 + kept
