"""Sleep, /slots and the other small routes over HTTP: scripted, and from a process that really shrinks."""
import json
from types import SimpleNamespace

from conftest import start_server
from fake_engine import FakeEngine, pieces, serving
from http_client import call
from qwentin.errors import Busy, WakeFailed


def test_sleep_and_wake_over_http():
    """Asleep is healthy: the next request is served. Busy is a 409, a wake that fails a 503 with the reason."""
    engine, status = FakeEngine(pieces("ok")), {"status": "ok", "freed": {}}
    engine.status = lambda: dict(status)

    def raising(error):
        def function():
            raise error
        return function
    with serving(engine) as server:
        engine.sleeper = SimpleNamespace(sleep=lambda: status.update(status="asleep", freed={"weights": 7}),
                                         wake_up=lambda: status.update(status="ok", freed={}))
        for path, word, freed in (("/sleep", "asleep", {"weights": 7}), ("/wake_up", "ok", {})):
            answer = call(server.url, path, method="POST")
            assert answer.status == 200 and (answer.json["status"], answer.json["freed"]) == (word, freed)
            assert call(server.url, "/health").status == 200 and call(server.url, "/health").json == answer.json
        engine.sleeper = SimpleNamespace(sleep=raising(Busy("2 requests run or wait.")),
                                         wake_up=raising(WakeFailed("The GPU is taken.")))
        busy, failed = call(server.url, "/sleep", {}), call(server.url, "/wake_up", {})
    assert busy.status == 409 and busy.error["code"] == "server_busy" and "2 requests" in busy.error["message"]
    assert failed.status == 503 and failed.error["code"] == "wake_failed" and "taken" in failed.error["message"]
    with serving(None) as server:
        for path in ("/sleep", "/wake_up"):
            assert call(server.url, path, {}).error["code"] == "model_loading"
        assert call(server.url, "/slots").status == 503


def test_a_process_that_sleeps_shrinks_and_wakes():
    """Resident memory falls by most of what the weights take; the next request is answered as before."""
    server = start_server("--kv-tokens", "32768")
    try:
        body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0}
        first = call(server.url, "/v1/completions", body).json["choices"][0]["text"]
        awake = server.resident()
        asleep = call(server.url, "/sleep", {})
        assert asleep.status == 200 and asleep.json["status"] == "asleep"
        health = call(server.url, "/health")
        assert health.status == 200 and health.json["freed"]["weights"] > 0
        assert awake - server.resident() > 0.8 * health.json["freed"]["weights"]
        assert call(server.url, "/v1/completions", body).json["choices"][0]["text"] == first
        assert call(server.url, "/health").json["status"] == "ok"
        assert call(server.url, "/wake_up", {}).json["status"] == "ok"
    finally:
        assert server.stop() == 0


def test_slots_of_a_real_server(server):
    """Counts of what was warm after a conversation, without its words."""
    body = {"messages": [{"role": "user", "content": "My secret word is swordfish."}], "temperature": 0, "max_tokens": 4}
    assert call(server.url, "/v1/chat/completions", body).status == 200
    seen = call(server.url, "/slots").json
    assert seen["running"] == [] and seen["warm"] and seen["max_seqs"] == 16
    assert set(seen["warm"][0]) == {"tokens", "shared_tokens", "states", "used"}
    assert "swordfish" not in json.dumps(seen)
