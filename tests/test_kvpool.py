"""KVPool and StateSlots: a random run of every operation, recounted after each; the promises of fork() and reserve()."""
import random

import pytest

from qwentin.kvpool import PAGE, KVPool, OutOfPages, pages_for
from qwentin.slots import StateSlots


def test_random_run_recounts():
    rng, pool, tables = random.Random(1), KVPool(40), []
    refused = 0
    for _ in range(3000):
        action = rng.choice(["open", "grow", "grow", "fork", "release"])
        if action == "open":
            tables.append(pool.open())
        elif tables:
            table = rng.choice(tables)
            before = (list(table.pages), table.length, sorted(pool.free))
            try:
                if action == "grow":
                    rows = rng.randint(1, 300)
                    pool.reserve(table, rows)
                    pool.advance(table, rows)
                elif action == "fork":
                    child, copies = pool.fork(table)
                    tables.append(child)
                    assert child.length == table.length
                    assert [s for s, _ in copies] == (
                        [table.pages[table.length // PAGE]] if table.length % PAGE else [])
                else:
                    pool.release(table)
                    tables.remove(table)
            except OutOfPages:
                refused += 1
                assert before == (list(table.pages), table.length, sorted(pool.free)), "a refusal changes nothing"
        pool.check()
    assert refused > 50, "the run never filled the pool"
    for table in tables:
        pool.release(table)
    pool.check()
    assert sorted(pool.free) == list(range(40))


def test_fork_never_shares_the_page_being_written():
    pool = KVPool(8)
    parent = pool.open()
    pool.reserve(parent, 200)
    pool.advance(parent, 200)
    child, copies = pool.fork(parent)
    assert child.pages[0] == parent.pages[0] and child.pages[1] != parent.pages[1]
    assert copies == [(parent.pages[1], child.pages[1])]
    pool.release(parent)
    pool.check()
    assert child.length == 200 and pool.references[child.pages[0]] == 1


def test_fork_at_a_page_boundary_copies_nothing():
    pool = KVPool(1)
    parent = pool.open()
    pool.reserve(parent, PAGE)
    pool.advance(parent, PAGE)
    child, copies = pool.fork(parent)
    assert copies == [] and child.pages == parent.pages
    with pytest.raises(OutOfPages):
        pool.reserve(child, 1)
    pool.check()


def test_check_sees_a_planted_fault():
    pool = KVPool(4)
    table = pool.open()
    pool.reserve(table, 1)
    pool.references[table.pages[0]] += 1
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check()
    pool.references[table.pages[0]] -= 1
    pool.free.pop()
    with pytest.raises(AssertionError, match="free list"):
        pool.check()


def test_pages_for():
    assert [pages_for(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, 1, 1, 2]


def test_slots():
    slots = StateSlots(2)
    a, b = slots.acquire(), slots.acquire()
    assert {a, b} == {0, 1} and slots.acquire() is None
    slots.release(a)
    slots.check()
    assert slots.acquire() == a
    slots.free.append(a)
    with pytest.raises(AssertionError):
        slots.check()
