"""The NaN guard: a request whose logits are not finite ends with an error; nothing that it left behind reaches the next."""
import numpy as np
import pytest

from qwentin.config import EngineConfig
from qwentin.engine import Engine
from qwentin.request import Finish, GenerateRequest
from test_engine import GREEDY, QUESTION, Reader

POISON = 4000           # a token id that no text has


@pytest.fixture
def engine():
    engine = Engine.load(EngineConfig(threads=1, max_seqs=4, prefill_chunk=16, max_model_len=512, kv_tokens=1024))
    engine.start()
    yield engine
    engine.stop()


def ask(engine, name, ids, **more):
    reader = Reader()
    engine.submit(GenerateRequest(name, np.array(ids, np.int32), GREEDY, **more), reader)
    return reader.wait()


def plant(engine, monkeypatch, when):
    """While `when(step)`, a step leaves NaN in its slots' states and its last page, and in its logits if it has any."""
    forward, tower, planted = engine.tower.forward, engine.tower, []

    def spoiled(step):
        out = forward(step)
        if when(step):
            for slot in step.slots:
                tower.S[:, slot] = np.nan
            out.logits[:] = np.nan
            planted.append(len(step.tokens))
        return out
    monkeypatch.setattr(tower, "forward", spoiled)
    return planted


@pytest.mark.filterwarnings("ignore:invalid value")       # NaN on its way through a softplus
def test_state_and_snapshots_of_a_spoiled_request_are_discarded(engine, monkeypatch):
    """NaN from the first chunk on, which yields no logits but a snapshot: the same prompt afterwards is cold, and right."""
    ids = [*engine.tokenizer.encode(QUESTION * 3)]
    assert len(ids) > 40
    wanted = ask(engine, "before", ids[5:], max_tokens=8).ids()
    with monkeypatch.context() as patch:
        planted = plant(engine, patch, lambda step: True)
        spoiled = ask(engine, "spoiled", ids, max_tokens=8)
    assert len(planted) >= 3 and planted[0] == 16, "several chunks, the first of which took a snapshot"
    assert spoiled.of(Finish)[0].reason == "error" and "not finite" in spoiled.of(Finish)[0].message
    engine.scheduler.check()
    assert engine.scheduler.cache.match(np.array(ids, np.int32)) is None, "no snapshot of it is left"
    again = ask(engine, "again", ids, max_tokens=8)
    assert again.of(Finish)[0].reason == "length" and again.events[-1].usage.cached_tokens == 0
    assert ask(engine, "other", ids[5:], max_tokens=8).ids() == wanted
    assert ask(engine, "warm", ids, max_tokens=8).ids() == again.ids()
    assert engine.status()["nonfinite"] == 1


def test_neighbours_in_the_same_step_go_on(engine, monkeypatch):
    """Only the rows that are not finite end; the sequence beside them gives the ids that it gives alone."""
    ids = engine.tokenizer.encode(QUESTION)
    wanted = ask(engine, "alone", ids).ids()
    forward = engine.tower.forward

    def spoiled(step):
        out = forward(step)
        if POISON in step.tokens:               # the row that its ids end in
            out.logits[-1] = np.nan
        return out
    monkeypatch.setattr(engine.tower, "forward", spoiled)
    good, bad = Reader(), Reader()
    engine.submit(GenerateRequest("good", ids, GREEDY), good)
    engine.submit(GenerateRequest("bad", np.array([POISON], np.int32), GREEDY), bad)
    assert bad.wait().of(Finish)[0].reason == "error"
    assert good.wait().ids() == wanted
    engine.scheduler.check()
