"""Chat Completions over a scripted engine: what reaches the template, what the engine is asked, what comes back, and that
streamed and whole answers are one and the same for any way the engine cuts its text."""
import json

import pytest

from fake_engine import FakeEngine, pieces, play, ragged
from http_client import fold
from qwentin import nano
from qwentin.chat_template import ChatTemplate
from qwentin.errors import EngineStopped, RequestError
from qwentin.request import Finish
from qwentin.server.chat import ChatBody, ChatReply
from qwentin.server.conversation import conversation
from qwentin.server.effort import template_variables
from qwentin.server.fields import parse_json, read, unknown
from qwentin.server.reply import Failed

HI = [{"role": "user", "content": "Hi"}]
THOUGHT = "I greet 😀 back.\n</think>\n\nHello 👨‍👩‍👧 漢字!"


def reply_to(script, **body):
    return play(FakeEngine(script), ChatReply, {"messages": HI, **body})


def refusal(**body):
    with pytest.raises(RequestError) as caught:
        play(FakeEngine([]), ChatReply, {"messages": HI, **body})
    return caught.value


def rendered(messages, **more):
    """The prompt text of nano's own template."""
    body = read(ChatBody, {"messages": messages, **more})
    return "".join(body.conversation().render(ChatTemplate(nano.DIRECTORY, {})))


# ---- both modes

@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("extra", [{}, {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}])
def test_stream_adds_up_to_the_whole(seed, extra):
    chunks, whole, _ = reply_to(ragged(THOUGHT, seed), **extra)
    choice = whole["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello 👨‍👩‍👧 漢字!", "reasoning_content": "I greet 😀 back."}
    streamed, = fold(chunks)
    assert streamed["message"] == choice["message"]
    assert streamed["finish_reason"] == choice["finish_reason"] == "stop"
    assert streamed["token_ids"] == choice.get("token_ids", [])
    if extra:
        assert streamed["logprobs"] == choice["logprobs"]
    assert not any("�" in json.dumps(c, ensure_ascii=False) for c in chunks)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 200])
def test_characters_cut_by_tokens(size):
    """Emoji, a family joined by zero-width joiners and Han characters, in the thought and in the answer."""
    text = "😀👨‍👩‍👧漢字 in thought</think>\n\n😀👨‍👩‍👧漢字 in answer"
    chunks, whole, _ = reply_to(pieces(text, size))
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("😀👨‍👩‍👧漢字 in thought", "😀👨‍👩‍👧漢字 in answer")
    assert fold(chunks)[0]["message"] == message


def test_first_text_is_reasoning_even_when_the_prompt_shows_tool_calls():
    tools = [{"type": "function", "function": {"name": "f", "description": "<tool_call> </think> <think>"}}]
    chunks, _, _ = reply_to(pieces(THOUGHT, 7), tools=tools)
    texts = [c["choices"][0]["delta"] for c in chunks]
    assert texts[0] == {"role": "assistant", "content": ""}
    assert set(texts[1]) == {"reasoning_content"}
    assert not any({"content", "reasoning_content"} <= set(delta) for delta in texts)


def test_cut_inside_the_thought():
    chunks, whole, _ = reply_to(pieces("a long thought that never ends", 1), max_tokens=20)
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] == "a long thought that"      # 20 tokens, the last is a blank
    assert fold(chunks)[0]["message"] == choice["message"]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 20}


def test_thinking_off_splits_nothing():
    _, whole, _ = reply_to(pieces("a </think> b"), enable_thinking=False)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "a </think> b"}
    assert "completion_tokens_details" not in whole["usage"]


def test_calls_are_text_where_no_tool_was_declared():
    call = "<tool_call>\n<function=f>\n<parameter=x>\n1 && <2>\n</parameter>\n</function>\n</tool_call>"
    for tools in (None, [{"type": "function", "function": {"name": "g"}}]):
        _, whole, _ = reply_to(pieces(f"I call.\n</think>\n\n{call} Done.", 3), tools=tools)
        assert whole["choices"][0]["message"]["content"] == f"{call} Done."
        assert whole["choices"][0]["finish_reason"] == "stop"


def test_choices_take_turns():
    chunks, whole, requests = play(FakeEngine(lambda request, i: pieces(f"t{i}</think>\n\nanswer {i}", 2)), ChatReply,
                                   {"messages": HI, "n": 3})
    assert [c["message"]["content"] for c in whole["choices"]] == ["answer 0", "answer 1", "answer 2"]
    assert [c["message"] for c in fold(chunks)] == [c["message"] for c in whole["choices"]]
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    assert len(requests) == 1 and requests[0].n == 3


# ---- tokens

def test_logprobs_hold_the_answers_tokens_and_the_thoughts_apart():
    _, whole, _ = reply_to([[b"th", b"ink"], [b"ing", b"\n", b"</think>", b"\n\n", b"42"], [b"\xf0\x9f", b"\x98\x80"]],
                           logprobs=True, top_logprobs=1)
    parts = whole["choices"][0]["logprobs"]
    assert [e["token"] for e in parts["reasoning_content"]] == ["th", "ink", "ing", "\n", "</think>", "\n\n"]
    assert [e["token"] for e in parts["content"]] == ["42", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80"]
    assert bytes(b for e in parts["content"] for b in e["bytes"]).decode() == "42😀"
    assert parts["content"][0] == {"token": "42", "logprob": -0.5, "bytes": [52, 50], "top_logprobs": [
        {"token": "42", "logprob": -0.5, "bytes": [52, 50]}]}


def test_logprobs_without_alternatives():
    _, whole, requests = reply_to(pieces("a", 1), logprobs=True, enable_thinking=False)
    assert requests[0].logprobs == 0
    assert whole["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert reply_to(pieces("a", 1))[1]["choices"][0]["logprobs"] is None


def test_usage_and_ids():
    chunks, whole, requests = reply_to(pieces("ab</think>\n\ncd", 2), return_token_ids=True,
                                       stream_options={"include_usage": True})
    assert whole["usage"] == {
        "prompt_tokens": len(requests[0].prompt), "completion_tokens": 8, "total_tokens": len(requests[0].prompt) + 8,
        "prompt_tokens_details": {"cached_tokens": 2}, "completion_tokens_details": {"reasoning_tokens": 6}}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(c["usage"] is None for c in chunks[:-1])
    assert len(whole["choices"][0]["token_ids"]) == 8       # the stop id included
    assert whole["prompt_token_ids"] == requests[0].prompt.tolist() == chunks[0]["prompt_token_ids"]


def test_running_usage():
    chunks, _, _ = reply_to(pieces("abcd", 1), stream_options={"continuous_usage_stats": True}, enable_thinking=False)
    assert [c["usage"]["completion_tokens"] for c in chunks if c["choices"][0]["delta"].get("content")] == [1, 2, 3, 4]


# ---- how a choice ends

def test_engine_errors_are_errors():
    with pytest.raises(Failed, match="logits"):
        reply_to([[b"a"], Finish(0, "error", "the logits are not finite")])
    with pytest.raises(EngineStopped):
        reply_to([[b"a"], Finish(0, "cancel")])


# ---- what the engine is asked

def test_defaults_and_rules():
    _, _, (request,) = reply_to([], temperature=0, top_k=7, seed=5, stop=["x", "y"], logit_bias={"65": -100},
                                max_tokens=9, max_completion_tokens=3, presence_penalty=1)
    assert request.sampling.temperature == 0 and request.sampling.top_k == 7 and request.sampling.seed == 5
    assert request.sampling.logit_bias == ((65, -100.0),) and request.sampling.presence_penalty == 1
    assert request.max_tokens == 3 and request.stop == ("x", "y")
    _, _, (request,) = reply_to([])
    assert request.sampling.temperature == 0.7 and request.max_tokens is None and request.stop_ids == {256}


def test_stop_strings_wait_for_the_answer():
    assert reply_to([], stop="x")[2][0].stop_after == "</think>"
    assert reply_to([], stop="x", enable_thinking=False)[2][0].stop_after == ""


def test_stop_ids():
    assert reply_to([], stop_token_ids=[5])[2][0].stop_ids == {5, 256}
    assert reply_to([], ignore_eos=True)[2][0].stop_ids == frozenset()
    assert reply_to([], ignore_eos=True, stop_token_ids=[5])[2][0].stop_ids == {5}


@pytest.mark.parametrize("body, thinking", [
    ({}, True),
    ({"enable_thinking": False}, False),
    ({"reasoning_effort": "none"}, False),
    ({"reasoning_effort": "low"}, True),
    ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ({"reasoning_effort": "none", "enable_thinking": True}, True),
    ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, False),
])
def test_who_decides_about_thinking(body, thinking):
    assert rendered(HI, **body).endswith("<think>\n" if thinking else "</think>\n\n")


def test_effort_reaches_the_template_in_its_own_words():
    assert template_variables({}, None, "high") == {"enable_thinking": True, "reasoning_effort": "xhigh"}
    assert template_variables({}, None, "minimal") == {"enable_thinking": True, "reasoning_effort": "low"}
    assert template_variables({"reasoning_effort": "odd"}, None, "high")["reasoning_effort"] == "odd"


# ---- messages

@pytest.mark.parametrize("content, text", [
    ("Hi", "Hi"), (None, ""), ([], ""),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    ([{"type": "input_text", "text": "a"}, "b"], "ab"),
])
def test_content_forms(content, text):
    for role in ("system", "developer", "user", "assistant", "tool"):
        assert conversation([{"role": role, "content": content}])[0]["content"] == text
    assert conversation([{"role": "assistant"}])[0]["content"] == ""
    history = [*HI, {"role": "assistant", "content": content, "tool_calls": [CALL]},
               {"role": "tool", "content": content, "tool_call_id": "c"}]
    assert "None" not in rendered(history)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo", "n": 3}'}}


def test_history_with_calls_renders():
    text = rendered([*HI, {"role": "assistant", "content": None, "reasoning_content": "call f", "tool_calls": [CALL]},
                     {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "sunny"}]}])
    assert ("<think>\ncall f\n</think>\n\n<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</parameter>\n"
            "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call><|im_end|>") in text
    assert "<tool_response>\nsunny\n</tool_response>" in text


def test_reasoning_is_accepted_under_both_names():
    turn = lambda key: [*HI, {"role": "assistant", "content": "x", key: "because"}]
    assert rendered(turn("reasoning")) == rendered(turn("reasoning_content"))
    assert "because" in rendered(turn("reasoning"))


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "not json", '{"a": 1}}'])
def test_arguments_that_are_no_object_become_text(arguments):
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    message, = conversation([{"role": "assistant", "content": "I call", "tool_calls": [call]}])
    assert message == {"role": "assistant",
                       "content": f"I call\n\n<tool_call>\n<function=f>\n{arguments}\n</function>\n</tool_call>"}
    assert arguments in rendered([*HI, {"role": "assistant", "tool_calls": [call, CALL]}])


@pytest.mark.parametrize("arguments", ["", None, "{}", "  ", {}])
def test_no_arguments(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    message, = conversation([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_half_a_character_inside_arguments():
    call = {"function": {"name": "f", "arguments": '{"a": "x\\ud83d"}'}}
    assert "x�\n</parameter>" in rendered([*HI, {"role": "assistant", "tool_calls": [call]}])


def test_the_older_way_to_call():
    first, second = conversation([{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
                                  {"role": "function", "name": "f", "content": "done"}])
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert second == {"role": "tool", "content": "done"}


SYSTEM = lambda text, role="system": {"role": role, "content": text}


def test_system_messages():
    assert conversation([SYSTEM("A"), SYSTEM("B", "developer"), *HI])[0] == {"role": "system", "content": "A\n\nB"}
    assert conversation([SYSTEM("A", "developer"), *HI])[0] == {"role": "system", "content": "A"}
    moved = conversation([SYSTEM("A"), *HI, SYSTEM("B"), {"role": "user", "content": "U"}])
    assert [(m["role"], m["content"]) for m in moved] == [
        ("system", "A"), ("user", "Hi"), ("user", "<system>\nB\n</system>"), ("user", "U")]
    after_tool = conversation([*HI, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "T"},
                               SYSTEM("B")])
    assert after_tool[-1] == {"role": "tool", "content": "T\n\n<system>\nB\n</system>"}


def test_a_later_system_message_leaves_the_prompts_beginning_alone():
    """C-1: what the first turn sent is still how the second turn begins."""
    first = [SYSTEM("Be brief."), {"role": "user", "content": "one"}]
    more = [*first, {"role": "assistant", "content": "1"}, SYSTEM("Now in French."), {"role": "user", "content": "two"}]
    begin = rendered(first, enable_thinking=False).removesuffix("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    text = rendered(more, enable_thinking=False)
    assert text.startswith(begin)
    assert text.index("one") < text.index("Now in French.") < text.index("two")


STRICT = """{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('System must be first.') }}{%- endif -%}
{%- if m.role not in ('system', 'user', 'assistant', 'tool') -%}{{ raise_exception('Unexpected role.') }}{%- endif -%}
[{{ m.role }}]{{ m.content }}
{%- for call in m.tool_calls or [] -%}{%- for k, v in call.function.arguments|items -%}({{ k }}={{ v }}){%- endfor -%}
{%- endfor -%}{%- endfor -%}"""


def test_a_strict_template_takes_what_clients_send(tmp_path):
    """C-1, C-2, C-4: templates of the family raise on a system message that is not first, on other roles, on arguments
    that are text."""
    (tmp_path / "chat_template.jinja").write_text(STRICT)
    template = ChatTemplate(tmp_path, {})
    render = lambda *messages: "".join(read(ChatBody, {"messages": list(messages)}).conversation().render(template))
    system, developer, user = SYSTEM("A"), SYSTEM("D", "developer"), HI[0]
    assert render(system, user, SYSTEM("B")) == "[system]A[user]Hi[user]<system>\nB\n</system>"
    assert render(system, SYSTEM("B"), user) == "[system]A\n\nB[user]Hi"
    assert render(developer, user) == "[system]D[user]Hi"
    assert render(developer, system, user) == "[system]D\n\nA[user]Hi"
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert render(user, called, {"role": "tool", "content": None}) == "[user]Hi[assistant](city=Oslo)(n=3)[tool]"


@pytest.mark.parametrize("message, param", [
    ({"role": "robot", "content": "x"}, "messages[1].role"),
    ({"content": "x"}, "messages[1].role"),
    ({"role": ["user"], "content": "x"}, "messages[1].role"),
    ("hello", "messages[1]"),
    ({"role": "user", "content": 5}, "messages[1].content"),
    ({"role": "user", "content": {"text": "x"}}, "messages[1].content"),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0].text"),
    ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]},
     "messages[1].content[1]"),
    ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0]"),
    ({"role": "user", "content": [7]}, "messages[1].content[0]"),
    ({"role": "assistant", "tool_calls": "f"}, "messages[1].tool_calls"),
    ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[1].tool_calls[0].function"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}, "messages[1].tool_calls[0].function.name"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]},
     "messages[1].tool_calls[0].function.arguments"),
    ({"role": "assistant", "reasoning_content": 3}, "messages[1].reasoning_content"),
])
def test_bad_messages_are_named(message, param):
    error = refusal(messages=[*HI, message])
    assert error.param == param and param in str(error)


# ---- refusals

@pytest.mark.parametrize("body, param", [
    ({"messages": None}, "messages"), ({"messages": []}, "messages"), ({"messages": "Hi"}, "messages"),
    ({"temperature": "hot"}, "temperature"), ({"temperature": True}, "temperature"), ({"top_p": []}, "top_p"),
    ({"temperature": 10**400}, "temperature"), ({"top_k": 1.5}, "top_k"), ({"seed": "1"}, "seed"),
    ({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": True}, "n"), ({"n": "2"}, "n"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({"stop": ""}, "stop"), ({"stop": ["a", ""]}, "stop"), ({"stop": ["a"] * 17}, "stop"), ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"), ({"stop_token_ids": ["a"]}, "stop_token_ids"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": [1]}, "logit_bias"), ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5"), ({"logprobs": 3}, "logprobs"), ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"), ({"stream_options": True}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"), ({"enable_thinking": "no"}, "enable_thinking"),
    ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ({"tools": {}}, "tools"), ({"tools": [3]}, "tools[0]"), ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tool_choice": "always"}, "tool_choice"), ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format.json_schema.schema"),
    ({"guided_regex": "("}, "guided_regex"), ({"guided_choice": []}, "guided_choice"), ({"guided_json": "{"}, "guided_json"),
    ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"choice": [3]}}, "structured_outputs.choice[0]"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"thinking_token_budget": -1}, "thinking_token_budget"), ({"thinking_budget": "x"}, "thinking_budget"),
    ({"response_format": "json"}, "response_format"),
    ({"model": 5}, "model"), ({"ignore_eos": 1}, "ignore_eos"),
])
def test_bad_values_name_the_field(body, param):
    error = refusal(**body)
    assert error.param == param
    assert param.split("[")[0].split(".")[0] in str(error)
    assert str(error).endswith(".") and str(error).count("\n") == 0


def test_null_means_not_given():
    body = {f: None for f in ("temperature", "n", "stop", "tools", "stream", "max_tokens", "logit_bias", "tool_choice")}
    assert read(ChatBody, {"messages": HI, **body}) == read(ChatBody, {"messages": HI})


def test_whole_numbers_may_be_written_with_a_point():
    assert read(ChatBody, {"messages": HI, "max_tokens": 10.0}).max_tokens == 10


def test_unknown_fields_are_ignored_and_listed():
    body = {"messages": HI, "store": False, "output_config": {"effort": "high"}}
    assert unknown(ChatBody, body) == ["store", "output_config"]
    assert read(ChatBody, body) == read(ChatBody, {"messages": HI})


# ---- JSON

@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe", b'{"a": NaN}', b'{"a": -Infinity}',
                                 b'{"a": 1}}', b'{"a": ' + b"9" * 5000 + b"}"])
def test_bad_json(raw):
    with pytest.raises(RequestError) as caught:
        parse_json(raw)
    assert caught.value.code == "invalid_json"


def test_half_a_character_from_javascript():
    assert parse_json(b'{"a\\ud83d": ["x\\ud83d y", "\\ud83d\\ude00"]}') == {"a�": ["x� y", "😀"]}
    assert parse_json("\ufeff{}".encode()) == {}
