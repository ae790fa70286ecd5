"""The request log: a line for every generation however it ends, in counts, with not a word of a prompt or an answer."""
import json
from dataclasses import replace

import pytest

from fake_engine import FakeEngine, pieces, serving, until
from http_client import call, events, open_request, read_until
from qwentin.config import EngineConfig
from qwentin.errors import ConfigError
from qwentin.request import Finish
from qwentin.server.metrics import Record
from qwentin.server.requestlog import RequestLog

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "swordfish"}], "reasoning_effort": "xhigh"}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_for_each_generation(tmp_path):
    path = tmp_path / "requests.jsonl"
    with serving(FakeEngine(pieces("trout\n</think>\n\nperch"), context=400), request_log=str(path)) as server:
        call(server.url, CHAT, ASK)
        events(server.url, "/v1/messages", {"messages": ASK["messages"], "max_tokens": 5})
        call(server.url, CHAT, {"messages": "swordfish"})
        call(server.url, "/v1/responses", {"input": "swordfish" * 100})
        call(server.url, "/tokenize", {"prompt": "swordfish"})
    whole, stream, bad, long = lines(path)
    assert (whole["route"], whole["status"], whole["error"], whole["stream"]) == (CHAT, 200, None, False)
    assert whole["id"].startswith("chatcmpl-") and whole["choices"] == 1 and whole["client"] == "127.0.0.1"
    assert whole["prompt_tokens"] > whole["completion_tokens"] > 0 and whole["seconds"] >= 0
    assert {"cached_tokens", "queue_s", "prefill_s", "decode_s"} <= set(whole)
    assert whole["thinking"] is True and whole["reasoning_effort"] == "xhigh", "R-10: what effort was honoured"
    assert (stream["route"], stream["stream"], stream["completion_tokens"]) == ("/v1/messages", True, 5)
    assert (bad["status"], bad["error"], "id" in bad) == (400, "invalid_type", False)
    assert (long["status"], long["error"]) == (400, "context_length_exceeded")
    assert not any(word in path.read_text() for word in ("swordfish", "trout", "perch"))


def test_failures_and_clients_that_leave(tmp_path):
    path = tmp_path / "requests.jsonl"
    endless = [[b"x"]] * 10**6
    engine = FakeEngine(lambda request, i: [Finish(0, "error", "broken")] if request.max_tokens else endless, step_s=0.001)
    with serving(engine, request_log=str(path)) as server:
        assert call(server.url, CHAT, {**ASK, "max_tokens": 3}).status == 500
        sock = open_request(server.url, CHAT, {**ASK, "stream": True})
        read_until(sock, b'"reasoning_content":"x"')
        sock.close()
        assert until(lambda: len(lines(path)) == 2)
    assert [(line["status"], line["error"]) for line in lines(path)] == [(500, "generation_failed"), (499, None)]


def test_off_by_default_and_appending(tmp_path):
    path = tmp_path / "requests.jsonl"
    for _ in range(2):
        with serving(FakeEngine(pieces("ok")), request_log=str(path)) as server:
            call(server.url, CHAT, ASK)
    with serving(FakeEngine(pieces("ok"))) as server:
        call(server.url, CHAT, ASK)
        assert server.service.request_log is None
    assert len(lines(path)) == 2


def test_what_cannot_be_written(tmp_path, caplog):
    with pytest.raises(ConfigError, match="--request-log"):
        RequestLog(str(tmp_path / "no" / "such" / "place"))
    log = RequestLog(str(tmp_path / "log"))
    log.file.close()
    for _ in range(3):
        log.write(Record("/x"), None)
    assert [r.getMessage()[:30] for r in caplog.records] == ["the request log cannot be writ"]
    assert replace(EngineConfig(), request_log="x").request_log == "x"
