"""The server's wire behaviour with a scripted engine behind it: frames, comments, refusals, clients that leave, shutdown."""
import json

import pytest

from fake_engine import FakeEngine, pieces, serving, until
from http_client import call, events, fold, open_request, parse_events, read_until, slow_response
from qwentin.request import Finish
from qwentin.server import app

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
PLAIN = {**HI, "enable_thinking": False}
ENDLESS = [[b"x"]] * 10**6


def test_frames():
    with serving(FakeEngine(pieces("I think.\n</think>\n\nHello 😀", 3))) as server:
        streamed = events(server.url, CHAT, {**HI, "stream_options": {"include_usage": True}})
        whole = call(server.url, CHAT, HI)
    assert streamed.done and streamed.comments[0] == "accepted"
    assert {f["object"] for f in streamed.frames} == {"chat.completion.chunk"}
    assert len({f["id"] for f in streamed.frames}) == 1
    assert fold(streamed.frames)[0]["message"] == whole.json["choices"][0]["message"]
    assert streamed.frames[-1]["usage"] == whole.json["usage"]


def test_headers_at_once_and_comments_through_a_long_prefill():
    """S-3: the client hears from us before the first token, then at least every keepalive_s."""
    engine = FakeEngine(pieces("a"), prefill_steps=40, step_s=0.01)
    engine.gate.clear()
    with serving(engine, keepalive_s=0.05) as server:
        sock = open_request(server.url, CHAT, {**PLAIN, "stream": True})
        head = read_until(sock, b": accepted\n\n")
        assert head.startswith(b"HTTP/1.1 200")
        read_until(sock, b": waiting\n\n")              # still in the queue
        engine.gate.set()
        body = read_until(sock, b"[DONE]")
        assert body.count(b": prefill ") >= 3 and b"/40\n\n" in body
        sock.close()


def test_an_error_after_the_headers_is_a_frame():
    script = [[b"a"], Finish(0, "error", "The model produced numbers that are not finite.")]
    with serving(FakeEngine(script)) as server:
        streamed = events(server.url, CHAT, PLAIN)
        whole = call(server.url, CHAT, PLAIN)
    assert streamed.done and streamed.frames[-1]["error"]["code"] == "generation_failed"
    assert whole.status == 500 and whole.error == streamed.frames[-1]["error"]
    assert "not finite" in whole.error["message"]


def test_a_bug_in_a_handler_is_a_500_without_details(monkeypatch):
    monkeypatch.setattr(app.ChatReply, "whole", lambda self: 1 / 0)
    with serving(FakeEngine([])) as server:
        answer = call(server.url, CHAT, HI)
        assert answer.status == 500 and answer.error["code"] == "internal_error"
        assert "division" not in answer.error["message"]
        assert call(server.url, "/health").status == 200


# ---- clients that leave

@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
def test_a_client_that_leaves_is_cancelled(where, stream):
    """S-2: in the queue, in prefill and in decode, streaming or not; the next request is served."""
    engine = FakeEngine(lambda request, i: pieces("fine") if b"next" in bytes(request.prompt.tolist()) else ENDLESS,
                        prefill_steps=10**6 if where == "prefill" else 0, step_s=0.001)
    if where == "queue":
        engine.gate.clear()
    with serving(engine) as server:
        sock = open_request(server.url, CHAT, {**PLAIN, "stream": stream})
        assert until(lambda: engine.jobs)
        if where == "decode":
            assert until(lambda: engine.jobs[0].generated > 3)
        sock.close()
        assert until(lambda: engine.did("cancel")), "the request outlived its client"
        assert until(lambda: not engine.jobs)
        engine.gate.set()
        engine.prefill_steps = 0
        follow = {**PLAIN, "messages": [{"role": "user", "content": "next"}]}
        assert call(server.url, CHAT, follow).json["choices"][0]["message"]["content"] == "fine"


def test_a_client_that_reads_slowly_gets_everything():
    """The engine is done long before the client reads; the text that waits is neither lost nor reordered."""
    text = "".join(f"{i:07d} " for i in range(40000))
    engine = FakeEngine(pieces(text, 64))
    with serving(engine) as server:
        with slow_response(server.url, TEXT, {"prompt": "a", "stream": True}) as response:
            assert until(lambda: engine.did("submit") and not engine.jobs), "the engine waits for a slow reader"
            streamed = parse_events(response.read())
    assert streamed.done and "".join(f["choices"][0]["text"] for f in streamed.frames) == text


# ---- refusals

@pytest.fixture(scope="module")
def plain_server():
    with serving(FakeEngine(pieces("ok"), context=300)) as server:
        yield server


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize"])
@pytest.mark.parametrize("raw, code", [(b"{", "invalid_json"), (b"[]", "invalid_json"), (b"", "invalid_json"),
                                       (b"[" * 100000, "invalid_json"), (b"\xff", "invalid_json"),
                                       (b"{}", "missing_required_parameter")])
def test_bodies_that_are_no_request(plain_server, path, raw, code):
    answer = call(plain_server.url, path, raw)
    assert answer.status == 400 and answer.error["code"] == code
    assert set(answer.error) == {"message", "type", "param", "code"}


def test_deeply_nested_bodies(plain_server):
    tool = b'{"messages": [{"role": "user", "content": "\\ud800"}], "tools": [{"function": {"name": "f", "x": %s}}]}'
    answer = call(plain_server.url, CHAT, tool % (b"[" * 900 + b"]" * 900))
    assert answer.status == 400 and answer.error["code"] == "invalid_json"


def test_the_content_type_does_not_matter(plain_server):
    answer = call(plain_server.url, CHAT, json.dumps({**PLAIN, "max_tokens": 1}).encode(),
                  headers={"Content-Type": "text/plain"})
    assert answer.status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_context_overflow_has_counts(plain_server, stream):
    """S-5: the prompt alone, and the prompt with its limit; a stream is refused before its headers."""
    prompt = {"prompt": "x" * 299, "stream": stream}
    assert call(plain_server.url, TEXT, {**prompt, "max_tokens": 1}).status == 200
    for body in ({**prompt, "max_tokens": 2}, {**prompt, "prompt": "x" * 300}):
        answer = call(plain_server.url, TEXT, body)
        assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
        assert answer.error["param"] == "prompt" and "300 tokens" in answer.error["message"]
    answer = call(plain_server.url, CHAT, {"messages": [{"role": "user", "content": "x" * 300}], "stream": stream})
    assert answer.error["param"] == "messages" and answer.error["type"] == "invalid_request_error"


def test_a_full_queue():
    engine = FakeEngine(pieces("ok"), max_seqs=1, max_queue=1)
    engine.gate.clear()
    with serving(engine) as server:
        socks = [open_request(server.url, CHAT, HI) for _ in range(2)]
        assert until(lambda: len(engine.jobs) == 2)
        answer = call(server.url, CHAT, HI)
        assert answer.status == 503 and answer.error["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        engine.gate.set()
        for sock in socks:
            assert read_until(sock, b"\r\n").startswith(b"HTTP/1.1 200")
            sock.close()


def test_while_loading():
    with serving(None) as server:
        health = call(server.url, "/health")
        assert health.status == 503 and health.json["status"] == "loading"
        for path, body in ((CHAT, HI), (TEXT, {"prompt": "a"}), ("/v1/models", None), ("/tokenizer_info", None)):
            answer = call(server.url, path, body)
            assert answer.status == 503 and answer.error["code"] == "model_loading" and "retry-after" in answer.headers


def test_the_key_guards_every_route_but_health():
    with serving(FakeEngine(pieces("ok")), api_key="s3cret-ключ") as server:
        bearer = {"Authorization": "Bearer s3cret-ключ".encode()}
        routes = [(CHAT, HI), (TEXT, {"prompt": "a"}), ("/v1/models", None), ("/slots", None),
                  ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]}), ("/tokenizer_info", None)]
        for path, body in routes:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}, {"Authorization": ""},
                            {"Authorization": b"Basic s3cret-\xff"}):
                answer = call(server.url, path, body, headers=headers)
                assert answer.status == 401 and answer.error["code"] == "invalid_api_key", (path, headers)
                assert answer.headers["www-authenticate"] == "Bearer"
            assert call(server.url, path, body, headers=bearer).status == 200, path
        assert call(server.url, "/no/such/route").status == 401
        assert call(server.url, "/health").status == 200


# ---- small routes

def test_models(plain_server):
    listed = call(plain_server.url, "/v1/models").json
    entry, = listed["data"]
    assert listed["object"] == "list" and entry["object"] == "model" and entry["max_model_len"] == 300
    assert call(plain_server.url, f"/v1/models/{entry['id']}").json == entry
    answer = call(plain_server.url, "/v1/models/some/other")
    assert answer.status == 404 and answer.error["code"] == "model_not_found"


def test_routes_that_are_not(plain_server):
    answer = call(plain_server.url, "/v1/embeddings", {})
    assert answer.status == 404 and answer.error["type"] == "invalid_request_error"
    answer = call(plain_server.url, CHAT, method="GET")
    assert answer.status == 405 and answer.headers["allow"] == "POST" and answer.error["code"] == "method_not_allowed"


def test_the_root_answers_and_nothing_is_shared_across_origins(plain_server):
    assert call(plain_server.url, "/", method="HEAD").status == 200
    answer = call(plain_server.url, "/")
    assert answer.status == 200 and not any(name.startswith("access-control") for name in answer.headers)


def test_unknown_fields_are_logged_once(plain_server, caplog):
    caplog.set_level("INFO", "qwentin.server")
    body = {**PLAIN, "max_tokens": 1, "frobnicate": 1, "thinking": {"type": "x"}}
    for _ in range(3):
        assert call(plain_server.url, CHAT, body).status == 200
    lines = [r.getMessage() for r in caplog.records if "unknown field" in r.getMessage()]
    assert sorted(lines) == ["ignoring the unknown field 'frobnicate' (logged once)",
                             "ignoring the unknown field 'thinking' (logged once)"]


def test_while_shutting_down(plain_server):
    with serving(FakeEngine(pieces("ok"))) as server:
        server.service.stopping = True
        answer = call(server.url, CHAT, HI)
        assert answer.status == 503 and answer.error["code"] == "server_stopping"
        health = call(server.url, "/health")
        assert health.status == 503 and health.json["status"] == "stopping"


def test_streams_end_cleanly_when_the_engine_stops():
    engine = FakeEngine(ENDLESS, step_s=0.001)
    with serving(engine) as server:
        sock = open_request(server.url, TEXT, {"prompt": "a", "stream": True})
        waiting = open_request(server.url, TEXT, {"prompt": "a"})
        assert until(lambda: len(engine.jobs) == 2)
        engine.stop(0.02)
        raw = read_until(sock, b"0\r\n\r\n")
        assert b"server_stopping" in raw and raw.rstrip().endswith(b"0") and b"[DONE]" in raw
        assert read_until(waiting, b"\r\n").startswith(b"HTTP/1.1 503")
        sock.close(), waiting.close()
