"""Sleep on nano: memory goes and comes back, conversations stay warm over it, and whoever asks wakes the engine."""
import time

import numpy as np
import pytest

from qwentin.config import EngineConfig
from qwentin.engine import Engine
from qwentin.errors import Busy, ConfigError, WakeFailed
from qwentin.request import Finish, GenerateRequest
from test_engine import GREEDY, QUESTION, Reader

SMALL = dict(threads=1, max_seqs=2, prefill_chunk=16, max_model_len=512, kv_tokens=1024, cache_mib=32)


@pytest.fixture
def load():
    """Makes engines that are stopped when the test ends."""
    made = []

    def make(**options):
        made.append(Engine.load(EngineConfig(**{**SMALL, **options})))
        made[-1].start()
        return made[-1]
    yield make
    for engine in made:
        engine.stop()


def ask(engine, text=QUESTION, **more):
    reader = Reader()
    engine.submit(GenerateRequest(f"{time.monotonic_ns()}", engine.tokenizer.encode(text), GREEDY, **more), reader)
    return reader.wait()


def test_memory_is_freed_and_the_next_request_wakes_a_warm_engine(load):
    """P-12: what /health says was freed is what the parts took; the turn after is as warm and as right as without."""
    engine = load()
    cold = ask(engine)
    warm = ask(engine)
    before = engine.status()
    engine.sleeper.sleep()
    after = engine.status()
    assert after["status"] == "asleep" and after["freed"] == before["memory"] and sum(after["memory"].values()) == 0
    assert after["freed"]["weights"] > 50e6 and after["parked_prefixes"] == before["prefixes"] > 0 < after["parked_bytes"]
    assert engine.tower is None and after["prefixes"] == 0
    woken = ask(engine)
    status = engine.status()
    assert woken.ids() == warm.ids() == cold.ids()
    assert woken.events[-1].usage.cached_tokens == warm.events[-1].usage.cached_tokens > 0
    assert status["status"] == "ok" and status["memory"] == before["memory"] and status["freed"] == {}
    assert (status["sleeps"], status["parked_bytes"]) == (1, 0) and status["wake_seconds"] > 0
    engine.scheduler.check()


def test_sleep_twice_wake_twice(load):
    engine = load()
    engine.sleeper.sleep()
    engine.sleeper.sleep()
    assert engine.status()["sleeps"] == 1, "it slept already"
    for _ in range(2):
        engine.sleeper.wake_up()
        assert engine.status()["status"] == "ok"


def test_busy_engines_do_not_sleep(load):
    engine = load()
    reader = Reader()
    engine.submit(GenerateRequest("long", engine.tokenizer.encode(QUESTION), GREEDY, stop_ids=frozenset()), reader)
    with pytest.raises(Busy, match="1 requests"):
        engine.sleeper.sleep()
    engine.sleeper.call(engine.sleeper.doze)            # a request came between the question and the doing
    assert not engine.sleeper.asleep
    engine.cancel("long")
    reader.wait()
    engine.sleeper.sleep()
    assert engine.status()["status"] == "asleep"


def test_it_dozes_off_by_itself(load):
    engine = load(sleep_idle_s=0.05)
    wanted = ask(engine).ids()
    deadline = time.monotonic() + 60
    while not engine.status()["asleep"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ask(engine).ids() == wanted and engine.status()["sleeps"] >= 1


def test_parking_has_a_budget(load):
    engine = load(sleep_mib=3)
    ask(engine)
    kept = engine.status()["prefixes"]
    engine.sleeper.sleep()
    status = engine.status()
    assert 0 < status["parked_prefixes"] < kept and status["parked_bytes"] <= 3 * 2**20
    assert ask(engine).text().endswith("1032")
    engine.scheduler.check()


def test_a_cache_directory_takes_the_prefixes(load, tmp_path):
    engine = load(cache_dir=str(tmp_path))
    warm = [ask(engine) for _ in range(2)][1]
    engine.sleeper.sleep()
    assert engine.status()["parked_bytes"] == 0 and list(tmp_path.glob("*.safetensors"))
    woken = ask(engine)
    assert woken.ids() == warm.ids() and woken.events[-1].usage.cached_tokens == warm.events[-1].usage.cached_tokens > 0


def test_a_wake_that_fails_is_the_requests_error_and_the_next_tries_again(load, monkeypatch):
    engine = load()
    wanted = ask(engine).ids()
    engine.sleeper.sleep()

    def full(config, tokens):
        raise ConfigError("the GPU is taken by another program.")
    with monkeypatch.context() as patch:
        patch.setattr("qwentin.sleep.load_tower", full)
        failed = ask(engine, n=2)
        assert [f.reason for f in failed.of(Finish)] == ["error"] * 2
        assert "taken by another program" in failed.of(Finish)[0].message and engine.status()["status"] == "asleep"
        with pytest.raises(WakeFailed, match="taken"):
            engine.sleeper.wake_up()
    assert ask(engine).ids() == wanted


def test_parking_that_fails_loses_the_prefixes_alone(load, monkeypatch):
    engine = load()
    wanted = ask(engine).ids()
    monkeypatch.setattr(engine.tower, "export_state", lambda *a: 1 / 0)
    engine.sleeper.sleep()
    assert engine.status()["parked_prefixes"] == 0
    assert ask(engine).ids() == wanted and ask(engine).events[-1].usage.cached_tokens > 0


def test_stopping_asleep(load, tmp_path):
    engine = load(cache_dir=str(tmp_path))
    ask(engine)
    engine.sleeper.sleep()
    kept = sorted(tmp_path.iterdir())
    engine.stop()
    assert sorted(tmp_path.iterdir()) == kept
    assert np.isfinite(engine.status()["wake_seconds"])
