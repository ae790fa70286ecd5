"""Anthropic's Messages: what reaches the template, the order of events, errors in its shape (a scripted engine), and the
anthropic SDK against a real server. Tool calls are in test_tool_dialects.py."""
import json

import anthropic
import pytest

from fake_engine import FakeEngine, pieces, play, ragged, serving, until
from http_client import call, events, open_request, parse_events, read_until
from qwentin import nano
from qwentin.chat_template import ChatTemplate
from qwentin.request import Finish
from qwentin.server.fields import read
from qwentin.server.messages import MessagesBody, MessagesReply, complete_pairs
from qwentin.server.messages_input import conversation_of

PATH = "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
BODY = {"messages": HI, "max_tokens": 500}
THINKING = {**BODY, "thinking": {"type": "adaptive"}}
GREEDY = {"extra_body": {"temperature": 0}}        # the SDK dropped the argument, the server keeps the field
SUM = {"messages": [{"role": "user", "content": "Please add 696 and 336."}], "max_tokens": 500, "model": "nano", **GREEDY}
THOUGHT = "I greet 😀 back.\n</think>\n\nHello 👨‍👩‍👧 漢字!"


def reply_to(script, **body):
    return play(FakeEngine(script), MessagesReply, {**BODY, **body})


def turns(*messages, **more):
    """The template's messages."""
    return conversation_of(read(MessagesBody, {"messages": list(messages), **more})).messages


def rendered(messages, **more):
    body = read(MessagesBody, {"messages": messages, **more})
    return "".join(conversation_of(body).render(ChatTemplate(nano.DIRECTORY, {})))


# ---- the stream

def test_events_come_in_order():
    chunks, _, _ = reply_to(pieces(THOUGHT, 5), thinking={"type": "enabled", "budget_tokens": 1024})
    kinds = [c["type"] + (":" + c["delta"]["type"] if "delta" in c and "type" in c["delta"] else "") for c in chunks]
    shape = [kind for kind, before in zip(kinds, [None, *kinds]) if kind != before]
    assert shape == ["message_start", "ping",
                     "content_block_start", "content_block_delta:thinking_delta", "content_block_delta:signature_delta",
                     "content_block_stop",
                     "content_block_start", "content_block_delta:text_delta", "content_block_stop",
                     "message_delta", "message_stop"]
    start = chunks[0]["message"]
    assert (start["content"], start["stop_reason"], start["role"], start["type"]) == ([], None, "assistant", "message")


@pytest.mark.parametrize("seed", range(12))
def test_stream_adds_up_to_the_whole(seed):
    chunks, whole, _ = reply_to(ragged(THOUGHT, seed), thinking={"type": "adaptive"})
    deltas = [c["delta"] for c in chunks if c["type"] == "content_block_delta"]
    join = lambda key: "".join(d.get(key, "") for d in deltas)
    thinking, text = whole["content"]
    assert thinking == {"type": "thinking", "thinking": "I greet 😀 back.", "signature": join("signature")}
    assert text == {"type": "text", "text": "Hello 👨‍👩‍👧 漢字!"}
    assert (join("thinking"), join("text")) == (thinking["thinking"], text["text"])
    assert whole["stop_reason"] == chunks[-2]["delta"]["stop_reason"] == "end_turn"
    assert whole["usage"] == chunks[-2]["usage"]
    assert "�" not in json.dumps([chunks, whole], ensure_ascii=False)


def test_R1_cut_inside_the_thought():
    chunks, whole, _ = reply_to(pieces("a long thought that never ends"), thinking={"type": "adaptive"}, max_tokens=20)
    assert [b["type"] for b in whole["content"]] == ["thinking"] and whole["stop_reason"] == "max_tokens"
    assert whole["content"][0]["thinking"] == "a long thought that"
    assert not any(c["type"] == "content_block_start" and c["content_block"]["type"] == "text" for c in chunks)


def test_usage_counts_what_was_computed_and_what_was_cached():
    chunks, whole, (request,) = reply_to(pieces(THOUGHT, 7), thinking={"type": "adaptive"})
    usage = whole["usage"]
    assert usage["cache_read_input_tokens"] == 2 and usage["input_tokens"] == len(request.prompt) - 2
    assert usage["output_tokens"] == len(pieces(THOUGHT, 7)) + 1
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]
    assert chunks[0]["message"]["usage"]["input_tokens"] == len(request.prompt)
    assert whole["x_qwentin"]["cached_tokens"] == 2 == chunks[-2]["x_qwentin"]["cached_tokens"]


@pytest.mark.parametrize("ending, limit, reason, stop", [
    ([], 500, "end_turn", None), ([Finish(0, "stop", stop="END")], 500, "stop_sequence", "END"),
    ([Finish(0, "length")], 500, "max_tokens", None), ([Finish(0, "length")], None, "model_context_window_exceeded", None)])
def test_stop_reasons(ending, limit, reason, stop):
    chunks, whole, (request,) = reply_to([[b"a"], *ending], stop_sequences=["END"], max_tokens=limit)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)
    assert chunks[-2]["delta"] == {"stop_reason": reason, "stop_sequence": stop}
    assert request.stop == ("END",) and request.max_tokens == limit


def test_the_reply_names_the_model_as_the_request_did():
    """Claude Code drops the thoughts of a reply that names another model from what it sends back."""
    chunks, whole, _ = reply_to(pieces("a"), model="claude-opus-5")
    assert whole["model"] == chunks[0]["message"]["model"] == "claude-opus-5"
    assert reply_to(pieces("a"))[1]["model"] == "fake"


def test_an_empty_answer_is_an_empty_list():
    assert reply_to([])[1]["content"] == []


def test_S4_pings_through_a_long_wait():
    """Claude Code takes comments for silence: events must come, in the queue and in prefill."""
    engine = FakeEngine(pieces("a"), prefill_steps=40, step_s=0.01)
    engine.gate.clear()
    with serving(engine, keepalive_s=0.05) as server:
        sock = open_request(server.url, PATH, {**BODY, "stream": True})
        head = read_until(sock, b"event: ping\n")
        assert head.startswith(b"HTTP/1.1 200") and head.count(b"event: message_start\n") == 1
        read_until(sock, b"event: ping\n")                  # still in the queue
        engine.gate.set()
        rest = read_until(sock, b'{"type":"message_stop"}\n\n')
        assert rest[:rest.index(b"content_block_start")].count(b'event: ping\ndata: {"type":"ping"}\n\n') >= 3
        sock.close()


def test_an_error_after_the_headers_is_an_error_event():
    with serving(FakeEngine([[b"a"], Finish(0, "error", "The logits are not finite.")])) as server:
        streamed = events(server.url, PATH, BODY)
        whole = call(server.url, PATH, BODY)
    assert not streamed.done and streamed.frames[-1] == whole.json
    assert whole.status == 500 and whole.json == {
        "type": "error", "error": {"type": "api_error", "message": "The logits are not finite."}}


# ---- arguments of a call that was cut off

@pytest.mark.parametrize("text, pairs", [
    ("{", {}), ("", {}), ('{"a": "x', {}), ('{"a": "x"', {}), ('{"a": "x", ', {"a": "x"}), ('{"a": 12', {}),
    ('{"a": 12, "b"', {"a": 12}), ('{"a" : 1 , "b":true}', {"a": 1, "b": True}),
    ('{"a": [1, {"b": 2}], "c": {"d": ', {"a": [1, {"b": 2}]})])
def test_pairs_that_are_whole(text, pairs):
    assert complete_pairs(text) == pairs


# ---- routes

@pytest.fixture(scope="module")
def plain_server():
    with serving(FakeEngine(pieces("ok"), context=300)) as found:
        yield found


def test_what_claude_code_sends_first_and_beside(plain_server):
    assert call(plain_server.url, "/", method="HEAD").status == 200
    body = {"model": "claude-opus-5", **THINKING, "context_management": {"edits": []}, "metadata": {"user_id": "u"},
            "output_config": {"effort": "high", "later": 1}, "service_tier": "auto", "betas": ["x"], "max_tokens": 100}
    headers = {"anthropic-version": "2026-10-21", "anthropic-beta": "a,b"}
    answer = call(plain_server.url, PATH + "?beta=true", body, headers=headers)
    assert answer.status == 200 and answer.json["type"] == "message" and answer.json["id"].startswith("msg_")


def test_C6_unknown_fields_are_logged_once(plain_server, caplog):
    caplog.set_level("INFO", "qwentin.server")
    for _ in range(2):
        assert call(plain_server.url, PATH, {**BODY, "max_tokens": 1, "later": {"deep": 1}}).status == 200
    lines = [r.getMessage() for r in caplog.records if "'later'" in r.getMessage()]
    assert lines == ["ignoring the unknown field 'later' (logged once)"]


def test_count_tokens(plain_server):
    body = {"messages": HI, "system": "S", "tools": [{"name": "f", "input_schema": {}}], "model": "any"}
    counted = call(plain_server.url, PATH + "/count_tokens?beta=true", body)
    assert counted.status == 200 and set(counted.json) == {"input_tokens"}
    assert counted.json["input_tokens"] == len(rendered(HI, system="S", tools=body["tools"]).encode())
    refused = call(plain_server.url, PATH + "/count_tokens", {"messages": []})
    assert refused.status == 400 and refused.json["type"] == "error"


@pytest.mark.parametrize("stream", [True, False])
def test_S5_overflow_in_the_words_that_agents_look_for(plain_server, stream):
    """The prompt alone, and the prompt with its limit; a stream is refused before its headers."""
    frame = len(rendered([{"role": "user", "content": ""}]).encode())
    send = lambda length, limit: call(plain_server.url, PATH, {
        "messages": [{"role": "user", "content": "x" * (length - frame)}], "max_tokens": limit, "stream": stream})
    assert send(299, 1).status == 200
    for length in (300, 301):
        answer = send(length, 1)
        assert answer.status == 400 and answer.json == {"type": "error", "error": {
            "type": "invalid_request_error", "message": f"prompt is too long: {length} tokens > 299 maximum"}}
    answer = send(299, 2)
    assert answer.status == 400 and answer.json["error"]["message"] == (
        "input length and `max_tokens` exceed context limit: 299 + 2 > 300, "
        "decrease input length or `max_tokens` and try again")


@pytest.mark.parametrize("raw, status, kind", [(b"{", 400, "invalid_request_error"), (b"{}", 400, "invalid_request_error"),
                                               (b"[" * 100000, 400, "invalid_request_error")])
def test_refusals_have_the_dialects_shape(plain_server, raw, status, kind):
    answer = call(plain_server.url, PATH, raw)
    assert answer.status == status and answer.json["type"] == "error" and answer.json["error"]["type"] == kind
    assert call(plain_server.url, PATH, method="GET").json["error"]["type"] == "invalid_request_error"
    assert call(plain_server.url, PATH + "/batches", {}).json["error"]["type"] == "not_found_error"


def test_the_key_in_either_header():
    with serving(FakeEngine(pieces("ok")), api_key="s3cret") as server:
        for headers in ({"x-api-key": "s3cret"}, {"Authorization": "Bearer s3cret"},
                        {"x-api-key": "wrong", "Authorization": "Bearer s3cret"}):
            assert call(server.url, PATH, BODY, headers=headers).status == 200
        for headers in ({}, {"x-api-key": ""}, {"x-api-key": "wrong"}, {"x-api-key": "Bearer s3cret"}):
            answer = call(server.url, PATH, BODY, headers=headers)
            assert answer.status == 401 and answer.json["error"]["type"] == "authentication_error"
            assert call(server.url, PATH + "/count_tokens", BODY, headers=headers).status == 401


def test_a_full_queue_and_a_loading_server_are_overloaded():
    engine = FakeEngine(pieces("ok"), max_seqs=1, max_queue=0)
    engine.gate.clear()
    with serving(engine) as server:
        sock = open_request(server.url, PATH, BODY)
        assert until(lambda: engine.jobs)
        answer = call(server.url, PATH, BODY)
        assert answer.status == 503 and "retry-after" in answer.headers
        assert answer.json["error"]["type"] == "overloaded_error"
        engine.gate.set()
        sock.close()
    with serving(None) as server:
        assert call(server.url, PATH, BODY).json["error"]["type"] == "overloaded_error"


# ---- the anthropic SDK and the embedded model

@pytest.fixture(scope="module")
def sdk(server):
    return anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=120.0)


def test_thought_and_answer(sdk):
    whole = sdk.messages.create(**SUM, thinking={"type": "adaptive"})
    with sdk.messages.stream(**SUM, thinking={"type": "adaptive"}) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [b.type for b in whole.content] == ["thinking", "text"]
    assert whole.content[1].text == "696 + 336 = 1032" and whole.content[0].thinking.startswith("696 + 336: 6+6+0=12")
    assert [b.to_dict() for b in streamed.content] == [b.to_dict() for b in whole.content]
    assert streamed.stop_reason == whole.stop_reason == "end_turn"
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert sdk.messages.create(**SUM).content[0].type == "text"            # thinking is asked for, in this dialect


def test_a_tool_conversation_reuses_its_prefix(sdk):
    """R-4: with the thought sent back and without it, the next turn goes on from what both share, not from zero."""
    tool = {"name": "get_weather", "description": "Weather", "input_schema": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
    body = {"model": "nano", "max_tokens": 300, "tools": [tool], "thinking": {"type": "adaptive"}, **GREEDY}
    ask = [{"role": "user", "content": "What is the weather in Oslo?"}]
    first = sdk.messages.create(**body, messages=ask)
    use = next(block for block in first.content if block.type == "tool_use")
    assert use.name == "get_weather" and use.input == {"city": "Oslo"} and first.stop_reason == "tool_use"
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": '{"temperature": 3}'}]}
    total = first.usage.input_tokens + first.usage.cache_read_input_tokens
    for kept in (first.content, [b for b in first.content if b.type != "thinking"]):
        second = sdk.messages.create(**body, messages=[*ask, {"role": "assistant", "content": kept}, result])
        assert second.usage.cache_read_input_tokens >= total - 10 and second.content[-1].type == "text"
    counted = sdk.messages.count_tokens(model="nano", messages=ask, tools=[tool], thinking={"type": "adaptive"})
    assert counted.input_tokens == total


def test_stop_sequences(sdk):
    found = sdk.messages.create(**SUM, stop_sequences=["= 10", "never"], thinking={"type": "adaptive"})
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "= 10")
    assert found.content[-1].text == "696 + 336 "


def test_the_sdk_names_the_error(sdk):
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: .* tokens > 8191 maximum"):
        sdk.messages.create(model="m", max_tokens=10, messages=[{"role": "user", "content": "word " * 9000}])
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        sdk.messages.create(**{**SUM, "extra_body": {"temperature": 9}})
    assert [entry.id for entry in sdk.models.list()] == ["qwentin-nano"]


def test_names_of_frames_are_their_types():
    with serving(FakeEngine(pieces("ok"))) as server:
        raw = call(server.url, PATH, {**BODY, "stream": True}).raw
    assert raw.count(b"event: ") == raw.count(b"data: ") == len(parse_events(raw).frames) and b"[DONE]" not in raw
