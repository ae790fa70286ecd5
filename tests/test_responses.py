"""OpenAI's Responses: what reaches the template, the order and numbers of events, refusals (a scripted engine), and the
openai SDK against a real server. Calls of function tools are in test_tool_dialects.py."""
import json

import openai
import pytest

from fake_engine import FakeEngine, pieces, play, ragged, serving
from http_client import call, events, open_request, read_until
from qwentin import nano
from qwentin.chat_template import ChatTemplate
from qwentin.request import Finish
from qwentin.server.fields import read
from qwentin.server.responses import ResponsesBody, ResponsesReply
from qwentin.server.responses_input import conversation_of, read_tools

PATH = "/v1/responses"
BODY = {"input": "Hi"}
HI = {"role": "user", "content": "Hi"}
THOUGHT = "I greet 😀 back.\n</think>\n\nHello 👨‍👩‍👧 漢字!"
PLAIN = {"enable_thinking": False}


def reply_to(script, **body):
    return play(FakeEngine(script), ResponsesReply, {**BODY, **body})


def rendered(text, **more):
    """The prompt text of nano's own template."""
    body = read(ResponsesBody, {"input": text, **more})
    return "".join(conversation_of(body, read_tools(body.tools)).render(ChatTemplate(nano.DIRECTORY, {})))


# ---- the stream

def test_events_come_in_order_and_are_numbered():
    chunks, _, _ = reply_to(pieces(THOUGHT, 5))
    assert [c["sequence_number"] for c in chunks] == list(range(len(chunks)))
    kinds = [c["type"].removeprefix("response.") for c in chunks]
    shape = [kind for kind, before in zip(kinds, [None, *kinds]) if kind != before]
    part = lambda text: ["output_item.added", "content_part.added", f"{text}.delta", f"{text}.done", "content_part.done",
                         "output_item.done"]
    assert shape == ["created", "in_progress", *part("reasoning_text"), *part("output_text"), "completed"]
    assert {c["output_index"] for c in chunks[2:-1]} == {0, 1}


@pytest.mark.parametrize("seed", range(12))
def test_stream_adds_up_to_the_whole(seed):
    chunks, whole, _ = reply_to(ragged(THOUGHT, seed))
    join = lambda kind: "".join(c["delta"] for c in chunks if c["type"] == f"response.{kind}.delta")
    reasoning, message = whole["output"]
    assert [p["text"] for p in reasoning["content"]] == ["I greet 😀 back."] == [join("reasoning_text")]
    assert [p["text"] for p in message["content"]] == ["Hello 👨‍👩‍👧 漢字!"] == [join("output_text")]
    assert (reasoning["summary"], message["role"], message["status"]) == ([], "assistant", "completed")
    last = chunks[-1]["response"]
    for key in ("status", "usage", "error", "incomplete_details", "tools", "store"):
        assert last[key] == whole[key]
    assert [i["type"] for i in last["output"]] == ["reasoning", "message"] and whole["status"] == "completed"
    assert "�" not in json.dumps([chunks, whole], ensure_ascii=False)


def test_R1_cut_inside_the_thought():
    chunks, whole, _ = reply_to(pieces("a long thought that never ends"), max_output_tokens=20)
    assert [i["type"] for i in whole["output"]] == ["reasoning"] and whole["output"][0]["status"] == "incomplete"
    assert whole["output"][0]["content"][0]["text"] == "a long thought that"
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert chunks[-1]["type"] == "response.incomplete"
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 20}


def test_usage():
    _, whole, (request,) = reply_to(pieces("ab</think>\n\ncd", 2))
    assert whole["usage"] == {
        "input_tokens": len(request.prompt), "input_tokens_details": {"cached_tokens": 2}, "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 6}, "total_tokens": len(request.prompt) + 8}
    assert whole["x_qwentin"]["cached_tokens"] == 2


def test_logprobs_of_the_answer():
    chunks, whole, (request,) = reply_to(pieces("t</think>\n\nab😀", 1), top_logprobs=1)
    part = whole["output"][1]["content"][0]
    assert request.logprobs == 1 and bytes(b for e in part["logprobs"] for b in e["bytes"]).decode() == "ab😀"
    streamed = [e for c in chunks if c["type"] == "response.output_text.delta" for e in c["logprobs"]]
    assert streamed == part["logprobs"] and len(streamed[0]["top_logprobs"]) == 1
    assert reply_to(pieces("a"), include=["message.output_text.logprobs"])[2][0].logprobs == 0
    assert reply_to(pieces("a"))[2][0].logprobs is None


def test_events_keep_codex_waiting():
    """Codex counts only events as life: created at once, in_progress through queue and prefill."""
    engine = FakeEngine(pieces("a"), prefill_steps=40, step_s=0.01)
    engine.gate.clear()
    with serving(engine, keepalive_s=0.05) as server:
        sock = open_request(server.url, PATH, {**BODY, "stream": True})
        head = read_until(sock, b"event: response.in_progress\n")
        assert head.startswith(b"HTTP/1.1 200") and b"event: response.created\n" in head
        read_until(sock, b"event: response.in_progress\n")
        engine.gate.set()
        rest = read_until(sock, b"event: response.completed\n")
        assert rest[:rest.index(b"output_item.added")].count(b"event: response.in_progress\n") >= 3
        sock.close()


def test_an_error_after_the_headers_is_a_failed_response():
    script = [*pieces("</think>\n\nHm"), Finish(0, "error", "The logits are not finite.")]
    with serving(FakeEngine(script)) as server:
        streamed = events(server.url, PATH, BODY)
        whole = call(server.url, PATH, BODY)
    last = streamed.frames[-1]
    assert not streamed.done and last["type"] == "response.failed"
    assert [e["sequence_number"] for e in streamed.frames] == list(range(len(streamed.frames)))
    assert last["response"]["error"] == {"code": "server_error", "message": "The logits are not finite."}
    assert last["response"]["output"][-1]["status"] == "incomplete" and last["response"]["status"] == "failed"
    assert whole.status == 500 and whole.error["code"] == "generation_failed"


# ---- thinking, and what is not stored

@pytest.mark.parametrize("body, on", [
    ({}, True), (PLAIN, False), ({"reasoning": {"effort": "none"}}, False), ({"reasoning": {"effort": None}}, True),
    ({"reasoning": {"effort": "low", "summary": "auto"}}, True),
    ({"reasoning": {"effort": "none"}, "enable_thinking": True}, True),
    ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, False)])
def test_C7_who_decides_about_thinking(body, on):
    assert rendered("Hi", **body).endswith("<think>\n" if on else "</think>\n\n")


def test_R10_the_effort_that_was_used_is_told_and_logged(caplog):
    caplog.set_level("INFO", "qwentin.server")
    with serving(FakeEngine(pieces("ok"))) as server:
        answer = call(server.url, PATH, {**BODY, "reasoning": {"effort": "xhigh"}}).json
    assert answer["x_qwentin"]["reasoning_effort"] == "xhigh" and answer["reasoning"] == {"effort": "xhigh"}
    line, = [r.getMessage() for r in caplog.records if answer["id"] in r.getMessage()]
    assert json.loads(line.partition(": ")[2]) == answer["x_qwentin"]


def test_nothing_is_stored_and_it_says_so(caplog):
    caplog.set_level("INFO", "qwentin.server")
    with serving(FakeEngine(pieces("ok"))) as server:
        stored, plain = (call(server.url, PATH, {**BODY, **more}).json for more in ({"store": True}, {"store": False}))
        missing = call(server.url, f"{PATH}/{stored['id']}")
    assert stored["store"] is False and plain["store"] is False
    assert any("not stored here" in r.getMessage() for r in caplog.records)
    assert missing.status == 404 and missing.error["code"] == "response_not_found"
    assert "not stored" in missing.error["message"]


# ---- refusals over HTTP

def test_S5_overflow():
    """400 with counts; in a stream response.failed with the code, which is the only place where Codex looks for it."""
    frame = len(rendered("", **PLAIN).encode())
    with serving(FakeEngine(pieces("ok"), context=300)) as server:
        body = lambda length, limit: {**PLAIN, "input": "x" * (length - frame), "max_output_tokens": limit}
        assert call(server.url, PATH, body(299, 1)).status == 200
        for length, limit in ((300, None), (301, None), (299, 2)):
            answer = call(server.url, PATH, body(length, limit))
            assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
            assert answer.error["param"] == "input" and "300 tokens" in answer.error["message"]
            streamed = events(server.url, PATH, body(length, limit)).frames
            assert [e["type"] for e in streamed] == ["response.created", "response.in_progress", "response.failed"]
            assert streamed[-1]["response"]["error"] == {
                "code": "context_length_exceeded", "message": answer.error["message"]}


def test_what_codex_sends():
    text = lambda role, text: {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
    function = {"type": "function", "name": "js", "parameters": {"type": "object"}, "strict": False}
    tools = [{"type": "namespace", "name": "mcp__repl", "description": "D", "tools": [function]},
             {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
             {"type": "web_search", "external_web_access": False}]
    replayed = [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}],
                 "encrypted_content": None},
                {"type": "function_call", "call_id": "c", "name": "js", "namespace": "mcp__repl", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "2"}]
    body = {"model": "gpt-6", "instructions": "You are Codex.", "stream": True, "store": False, "tool_choice": "auto",
            "parallel_tool_calls": False, "reasoning": None, "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k", "client_metadata": {"x": "y"}, "tools": tools,
            "input": [text("developer", "D"), text("developer", "E"), text("user", "<environment_context>"),
                      text("user", "Hi"), *replayed]}
    with serving(FakeEngine(pieces("</think>\n\nok"))) as server:
        streamed = events(server.url, PATH, body)
    last = streamed.frames[-1]
    assert last["type"] == "response.completed" and last["response"]["output"][-1]["content"][0]["text"] == "ok"
    assert last["response"]["parallel_tool_calls"] is False and not streamed.done


# ---- the openai SDK and the embedded model

SUM = {"model": "nano", "input": "Please add 696 and 336.", "temperature": 0}


def test_thought_and_answer(client):
    whole = client.responses.create(**SUM)
    with client.responses.stream(**SUM) as stream:
        numbers = [event.sequence_number for event in stream]
        streamed = stream.get_final_response()
    assert whole.output_text == streamed.output_text == "696 + 336 = 1032" and numbers == list(range(len(numbers)))
    assert whole.output[0].content[0].text.startswith("696 + 336: 6+6+0=12")
    assert [i.type for i in streamed.output] == ["reasoning", "message"] and whole.status == "completed"
    assert whole.usage.total_tokens == streamed.usage.total_tokens


def test_a_limit_makes_it_incomplete(client):
    whole = client.responses.create(**SUM, max_output_tokens=20)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output_text == "" and whole.usage.output_tokens == 20
    last = list(client.responses.create(**SUM, max_output_tokens=20, stream=True))[-1]
    assert last.type == "response.incomplete" and last.response.output[0].content == whole.output[0].content


def test_a_tool_conversation_reuses_its_prefix(client):
    tool = {"type": "function", "name": "get_weather", "description": "Weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
    body = {"model": "nano", "temperature": 0, "tools": [tool], "max_output_tokens": 300}
    ask = [{"role": "user", "content": "What is the weather in Oslo?"}]
    first = client.responses.create(**body, input=ask)
    made = first.output[-1]
    assert made.type == "function_call" and json.loads(made.arguments) == {"city": "Oslo"}
    replay = [item.to_dict() for item in first.output]
    result = {"type": "function_call_output", "call_id": made.call_id, "output": '{"temperature": 3}'}
    second = client.responses.create(**body, input=[*ask, *replay, result])
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 2
    assert second.output_text and second.output[-1].type == "message"


def test_the_sdk_names_the_error(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="nano", input="word " * 9000)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "input"
    with pytest.raises(openai.BadRequestError, match="not stored"):
        client.responses.create(model="nano", input="Hi", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve("resp_1")
