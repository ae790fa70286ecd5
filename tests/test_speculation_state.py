"""Speculation, what it leaves behind: the state of plain decoding, whoever drafted; an engine that goes on after faults."""
import random
import threading

import numpy as np
import pytest

from qwentin import speculation as module
from qwentin.drafter import HeadDrafter, LookupDrafter
from qwentin.request import Done, Finish, GenerateRequest
from qwentin.treeplan import Fixed, Plan
from test_engine import Reader
from test_speculation import CODE, GREEDY, SUM, WINDOW, Scripted, chain, right, speculate, spoken
from test_speculation import ask, engine        # noqa: F401 -- fixtures


def wrong(draft, ahead):
    """A full tree of tokens that plain decoding does not give: 3, 4 or 5, whichever it is not."""
    chain(draft, [3 + (ahead[i] == 3 if i < len(ahead) else 0) for i in range(draft.depth)])
    draft.tree.add(0, 5 + (bool(ahead) and ahead[0] == 5), 0.2, ("test", 0.2))


def nothing(draft, ahead):
    """A plain step."""


def padding(draft, ahead):
    chain(draft, [4095 - i % 2 for i in range(draft.depth)])


class Noise:
    """Random trees, now and then with what comes next."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def __call__(self, draft, ahead):
        rng, tree = self.rng, draft.tree
        for _ in range(rng.randrange(draft.guesses + 1)):
            row = rng.randrange(len(tree))
            at = tree.depths[row]
            likely = at < len(ahead) and rng.random() < 0.6
            if tree.depths[row] < draft.depth:
                tree.add(row, int(ahead[at]) if likely else rng.randrange(4096), rng.random(), ("test", 0.5))


class Mix:
    """Another drafter in each round, sometimes none."""

    def __init__(self, seed, drafters):
        self.rng, self.drafters, self.used = random.Random(seed), drafters, []

    def extend(self, drafts):
        drafter = self.rng.choice(self.drafters)
        self.used.append(type(drafter).__name__)
        if drafter:
            drafter.extend(drafts)


def last_state(engine, ids):      # noqa: F811
    """What the prefix cache holds for all but the last of ids."""
    entry = engine.scheduler.cache.match(np.array(ids[:-1], np.int32))
    assert entry.length == len(ids) - 1
    state = engine.tower.export_state(entry.slot, entry.table.pages, entry.length)
    return {name: array.copy() for name, array in state.items()}


def decode(engine, ask, prompt, *drafters, plan=None):      # noqa: F811
    """(ids, state, counts) of `prompt` continued to the end of the context."""
    engine.scheduler.cache.clear()
    speculate(engine, plan or (Fixed(8, 15, 3) if drafters else None), *drafters)
    reader = ask(prompt, stop_ids=frozenset())
    ids = [*engine.tokenizer.encode(prompt).tolist(), *reader.ids()]
    assert len(ids) == WINDOW
    state = last_state(engine, ids)
    main = state["kv"][:, :-1]                      # the last layer is the draft head's
    return ids, {**state, "kv": main}, spoken(reader)


@pytest.fixture(scope="module")
def plain(engine):      # noqa: F811
    def ask(prompt, **fields):      # noqa: F811
        reader = Reader()
        engine.submit(GenerateRequest("plain", engine.tokenizer.encode(prompt), GREEDY, **fields), reader)
        return reader.wait()
    return decode(engine, ask, CODE)


@pytest.mark.parametrize("name", ["wrong", "right", "noise", "padding", "mix"])
def test_the_state_is_that_of_plain_decoding(engine, ask, plain, name):     # noqa: F811
    """To the last position of the context. Rows of a tree and single rows take float32 sums in another order, so states
    agree to rounding: 1e-3 of their largest number, where one wrong, missing or additional row moves them by a tenth."""
    ids, state, _ = plain
    head = HeadDrafter(engine, Fixed(8, 15, 3), engine.tokenizer.size)
    drafters = dict(wrong=Scripted(wrong, ids), right=Scripted(right, ids), noise=Scripted(Noise(1), ids),
                    padding=Scripted(padding, ids))
    drafter = drafters.get(name) or Mix(2, [*drafters.values(), head, LookupDrafter(Fixed(8, 15)), Scripted(nothing)])
    got, left, counts = decode(engine, ask, CODE, drafter)
    assert got == ids
    for part, want in state.items():
        assert np.abs(left[part] - want).max() < 1e-3 * np.abs(want).max(), part
    assert counts.accepted == {"wrong": 0, "padding": 0}.get(name, counts.accepted) and counts.rounds > 20
    if name == "mix":
        assert len(set(drafter.used)) == 3 and counts.plain > 5 and counts.accepted > 50


def test_the_state_does_not_know_what_was_rejected(engine, ask, plain):     # noqa: F811
    """Bit for bit: two drafters whose trees have the same shape and nothing right leave the same arrays."""
    ids = plain[0]
    others = lambda draft, ahead: (chain(draft, [7 + 9 * i for i in range(draft.depth)]), draft.tree.add(0, 4001, 0.2))
    one, two = (decode(engine, ask, CODE, Scripted(grow, ids)) for grow in (wrong, others))
    assert one[2].accepted == 0 and one[0] == two[0] == ids
    if two[2].accepted == 0:
        assert all(np.array_equal(one[1][part], two[1][part]) for part in one[1])


def test_pages_run_out(engine, ask):        # noqa: F811
    """Four choices that outgrow the cache together: the youngest are sent back, recomputed, and say the same."""
    prompts = [CODE, SUM, CODE + "    if lo < 0:\n", SUM + "696"]
    fields = dict(stop_ids=frozenset(), max_tokens=200)
    speculate(engine, None)
    want = [ask(p, **fields).ids() for p in prompts]
    speculate(engine, Fixed(6, 12, 3))
    engine.scheduler.cache.clear()
    readers = [ask(p, wait=False, **fields) for p in prompts]
    assert [r.wait().ids() for r in readers] == want


# ---------------------------------------------------------------------- faults
def test_a_drafter_that_fails_ends_drafting_for_its_request(engine, ask, monkeypatch):      # noqa: F811
    want = ask(SUM).ids()
    speculate(engine, Fixed(4, 4))
    monkeypatch.setattr(engine.tower, "forward_mtp", lambda step, hidden: 1 / 0)
    got = ask(SUM)
    assert got.ids() == want and got.of(Finish)[0].reason == "stop"
    assert spoken(got).rounds == 0 and "division by zero" in spoken(got).events[0]
    monkeypatch.undo()
    assert spoken(ask(SUM)).rounds > 2, "the next one drafts again"


def test_a_head_that_gives_no_numbers(engine, ask, monkeypatch):        # noqa: F811
    want, forward = ask(SUM).ids(), engine.tower.forward_mtp

    def poisoned(step, hidden):
        out = forward(step, hidden)
        out.logits[:] = np.nan
        return out
    speculate(engine, Fixed(4, 4))
    monkeypatch.setattr(engine.tower, "forward_mtp", poisoned)
    got = ask(SUM)
    assert got.ids() == want and "not finite" in spoken(got).events[0]


def test_a_round_that_fails_is_computed_again_plainly(engine, ask, monkeypatch):        # noqa: F811
    want, forward, failed = [ask(p).ids() for p in (SUM, CODE)], engine.tower.forward, []

    def broken(step):
        out = forward(step)
        if not step.commit.all() and len(step.accepted[0]) > 1 and not failed:      # its state has moved on already
            failed.append(step.sequences)
            raise MemoryError("planted")
        return out
    speculate(engine, Fixed(4, 4))
    monkeypatch.setattr(engine.tower, "forward", broken)
    readers = [ask(p, wait=False) for p in (SUM, CODE)]
    assert [r.wait().ids() for r in readers] == want and failed
    events = [e for r in readers for e in spoken(r).events]
    assert len(events) == failed[0] and all("a round failed: planted" in e for e in events)
    assert [r.of(Finish)[0].reason for r in readers] == ["stop", "length"]


def test_a_round_that_hangs_fails_its_request_alone(engine, ask, monkeypatch, caplog):      # noqa: F811
    want, forward, gate = ask(SUM).ids(), engine.tower.forward, threading.Event()

    def hanging(step):
        if not step.commit.all() and not gate.is_set():
            assert gate.wait(60)
        return forward(step)
    speculation = speculate(engine, Fixed(4, 4))
    speculation.hang_s = 1.0                        # drafting takes a hundredth of it
    monkeypatch.setattr(module, "HANG_STEPS", 0)
    monkeypatch.setattr(engine.tower, "forward", hanging)
    reader = ask(SUM)                               # answered while the engine thread still hangs
    finish, = reader.of(Finish)
    assert finish.reason == "error" and "a round took over" in finish.message and not gate.is_set()
    assert "in hanging" in caplog.text, "the log shows where the engine was"
    speculation.hang_s = 60.0
    gate.set()
    assert ask(SUM).ids() == want, "the server goes on"
    assert reader.events[-1] == reader.of(Done)[0], "nothing followed"
    assert engine.speculation.tally.rounds < 20, "what nobody waits for was not generated"


def test_a_collapse_steps_down_and_climbs_back(engine, ask, monkeypatch):       # noqa: F811
    """By a clock that gives each part of a round one second: a tree costs three times a plain step."""
    clock = iter(range(10**9))
    monkeypatch.setattr(engine.tower, "clock", lambda: float(next(clock)))
    plan = Plan(12, 12)
    monkeypatch.setattr(plan, "begin", lambda sequences: plan.costs.known)
    monkeypatch.setattr(plan, "pays", lambda *_: True)
    monkeypatch.setattr(plan, "least", lambda *_: 0.0)
    speculate(engine, None)
    script = [*engine.tokenizer.encode(CODE).tolist(), *ask(CODE, stop_ids=frozenset(), max_tokens=250).ids()]
    prompt = len(engine.tokenizer.encode(CODE))

    def turning(draft, ahead):
        (wrong if len(draft.sequence.ids) < prompt + 40 else right)(draft, ahead)
    speculate(engine, plan, Scripted(turning, script))
    got = ask(CODE, stop_ids=frozenset(), max_tokens=250)
    assert got.ids() == script[prompt:]
    words = [event.split(" after")[0] for event in spoken(got).events]
    assert words == ["down to 6 guesses", "down to 3 guesses", "down to 0 guesses",
                     "up to 3 guesses", "up to 6 guesses", "up to 12 guesses"]
