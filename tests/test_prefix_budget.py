"""Which snapshots a long prompt leaves behind, and what several long dialogues find again when they do not all fit."""
import random

import numpy as np
import pytest

from qwentin.kvpool import Table
from qwentin.request import GenerateRequest
from qwentin.sequence import Sequence
from test_prefix import Cache

CHUNK = 512


class Vocabulary:
    size = 4096
    specials = frozenset()


def snapshots(length, stable=None, known=0):
    """Where the prefill of a prompt takes them, its first `known` tokens from the cache."""
    sequence = Sequence(GenerateRequest("s", np.zeros(length, np.int32), stable=stable), 0, Vocabulary(), frozenset(), 1)
    sequence.table, sequence.kept, taken = Table(length=known), known, []
    while sequence.table.length < length:
        sequence.table.length += min(CHUNK, sequence.until_cut())
        if sequence.worth_keeping(CHUNK):
            taken.append(sequence.table.length)
            sequence.kept = taken[-1]
    return taken


@pytest.mark.parametrize("length, most", [(100, 1), (512, 1), (5000, 10), (27_000, 32), (262_144, 60)])
def test_a_prompt_that_leaves_another_anywhere_loses_little(length, most):
    """P-3: an eighth of what is shared, or half of what is new, and a chunk; in tens of snapshots, not hundreds."""
    taken = snapshots(length)
    assert len(taken) <= most and taken[-1] == length
    for leaves in range(1, length, 7):
        before = max((at for at in taken if at <= leaves), default=0)
        assert leaves - before <= max(CHUNK, min(leaves // 8, (length - before) // 2)) + CHUNK


def test_the_stable_end_is_always_one():
    assert {26_990, 27_000} <= set(snapshots(27_000, 26_990))


@pytest.mark.parametrize("capacity, most", [(40, 2), (106, 0)])
def test_four_long_dialogues_stay_warm_in_a_small_cache(capacity, most):
    """In turns, a title beside every other answer: at most so many of 28 warm turns compute more than what is new and one
    chunk. Snapshots at every chunk, 142 of them, would not leave room for the ends of the dialogues."""
    c, rng = Cache(capacity, pages=capacity * 240), random.Random(2)
    some = lambda count: [rng.randrange(4000) for _ in range(count)]
    talks, before, over = [some(n) for n in (9400, 12_200, 26_900, 24_300)], {}, []

    def keep(ids):
        if not c.holds(np.array(ids, np.int32)):
            c.insert(np.array(ids, np.int32), *c.make_place(len(ids)))
    for turn in range(8):
        for i, ids in enumerate(talks):
            entry = c.match(np.array(ids[:-1], np.int32))
            known = entry.length if entry else 0
            if entry:
                c.use(entry)
            for at in snapshots(len(ids), known=known):
                keep(ids[:at])
            if turn:
                over.append(before[i] - known - CHUNK)
            before[i] = len(ids)
            talks[i] = ids + some(rng.randint(30, 400))
            if i % 2:
                keep(some(900))
    c.check()
    assert sum(excess > 0 for excess in over) <= most and len(over) == 28
