"""What /slots tells of an engine: counts that add up, and not a word of anybody's prompt."""
import json

import numpy as np
import pytest

from qwentin.config import EngineConfig
from qwentin.engine import Engine
from qwentin.request import GenerateRequest
from test_engine import GREEDY, Reader


@pytest.fixture
def engine():
    """Not started: the test takes its thread's place and stops between two steps."""
    return Engine.load(EngineConfig(threads=1, max_seqs=2, prefill_chunk=16, max_model_len=512, kv_tokens=1024))


def submit(engine, name, text, **more):
    ids = engine.tokenizer.encode(text) if isinstance(text, str) else np.array(text, np.int32)
    reader = Reader()
    engine.thread.is_alive = lambda: True
    engine.submit(GenerateRequest(name, ids, GREEDY, **more), reader)
    for note in engine.inbox:
        note()
    engine.inbox.clear()
    return len(ids)


def step(engine, times=1):
    for _ in range(times):
        engine.run_step(engine.scheduler.pick())


def test_running_and_waiting_choices(engine):
    secret = "The password is swordfish, remember it well: " * 2
    long = submit(engine, "a", secret, max_tokens=7)
    submit(engine, "b", "Hi", max_tokens=9)
    submit(engine, "c", "Hello")
    step(engine)
    seen = engine.slots()
    a, b = seen["running"]
    assert (a["id"], a["state"], a["prompt_tokens"], a["computed_tokens"], a["max_tokens"]) == ("a", "prefill", long, 16, 7)
    assert b["id"] == "b" and b["state"] == "prefill" and a["age_s"] >= 0
    assert [(c["id"], c["state"], c["computed_tokens"]) for c in seen["waiting"]] == [("c", "waiting", 0)]
    step(engine, 6)
    running = {c["id"]: c for c in engine.slots()["running"]}
    assert running["b"]["state"] == "decode" and running["b"]["completion_tokens"] > 0
    assert "swordfish" not in json.dumps(engine.slots())
    status = engine.status()
    assert status["running"] == 2 and status["waiting"] == 1
    a, c = engine.scheduler.running[0], engine.scheduler.waiting[0]
    assert status["prefill_tokens_left"] == max(long - a.table.length, 0) + c.prompt_tokens


def test_warm_conversations(engine):
    """Two conversations over one system prompt are two ends of one tree; what they share is counted."""
    root = list(range(100, 132))
    for name, tail in (("a", [1, 2, 3]), ("b", [4, 5, 6, 7])):
        submit(engine, name, root + tail, max_tokens=2, stable=len(root))
        while engine.jobs:
            step(engine)
    warm = engine.slots()["warm"]
    assert len(warm) == 2 and [c["shared_tokens"] for c in warm] == [len(root)] * 2
    assert warm[0]["tokens"] > warm[1]["tokens"] > len(root) and all(c["states"] > 1 for c in warm)
    assert engine.slots()["running"] == [] and engine.slots()["asleep"] is False


def test_evictions_are_counted_over_schedulers(engine):
    submit(engine, "a", "Hello there", max_tokens=2)
    while engine.jobs:
        step(engine)
    while engine.scheduler.cache.evict():
        pass
    before = engine.status()["evictions"]
    engine.sleeper.doze()
    assert before == engine.status()["evictions"] > 0
