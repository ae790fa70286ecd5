"""Anthropic's messages, system and tools on their way to the template: each form that clients send."""
import pytest

from fake_engine import FakeEngine, pieces, play
from qwentin import nano
from qwentin.chat_template import ChatTemplate
from qwentin.errors import RequestError
from qwentin.server.conversation import conversation
from qwentin.server.fields import read
from qwentin.server.messages import MessagesBody, MessagesReply
from qwentin.server.messages_input import conversation_of

HI = [{"role": "user", "content": "Hi"}]
BODY = {"messages": HI, "max_tokens": 500}


def reply_to(script, **body):
    return play(FakeEngine(script), MessagesReply, {**BODY, **body})


def turns(*messages, **more):
    """The template's messages."""
    return conversation_of(read(MessagesBody, {"messages": list(messages), **more})).messages


def rendered(messages, **more):
    body = read(MessagesBody, {"messages": messages, **more})
    return "".join(conversation_of(body).render(ChatTemplate(nano.DIRECTORY, {})))


def test_system_forms():
    assert turns(*HI, system="S")[0] == {"role": "system", "content": "S"}
    assert turns(*HI, system=[{"type": "text", "text": "A", "cache_control": {}}, {"type": "text", "text": "B"}])[0] == {
        "role": "system", "content": "A\n\nB"}


def test_C1_system_inside_messages_keeps_its_place_and_the_beginning():
    first = [{"role": "user", "content": "one"}]
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    more = [*first, {"role": "assistant", "content": "1"}, system, {"role": "user", "content": "two"}]
    begin = rendered(first, system="S").split("<|im_start|>assistant")[0]
    assert rendered(more, system="S").startswith(begin)
    assert [m["role"] for m in turns(*more, system="S")] == ["system", "user", "assistant", "user", "user"]
    assert turns({"role": "system", "content": "A"}, {"role": "system", "content": "B"}, *HI)[0]["content"] == "A\n\nB"


def test_billing_lines_are_not_part_of_the_prompt():
    """Claude Code's first system block differs from request to request: behind it nothing would be found again."""
    line = "x-anthropic-billing-header: cc_version=2.1.197.{0}; cc_entrypoint=cli; cch={0};"
    blocks = lambda cch: [{"type": "text", "text": line.format(cch)}, {"type": "text", "text": "You are an agent."}]
    without = rendered(HI, system="You are an agent.")
    assert rendered(HI, system=blocks("0a1")) == rendered(HI, system=blocks("fff")) == without
    assert rendered(HI, system=line.format("5") + "\nYou are an agent.") == without
    kept = "Explain the x-anthropic-billing-header: line."
    assert kept in rendered(HI, system=kept) and line in rendered([{"role": "user", "content": line}])


TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"city": "Oslo", "n": 3}}
CALLED = [*HI, {"role": "assistant", "content": [
    {"type": "thinking", "thinking": "call f", "signature": "any"}, {"type": "text", "text": "Let me look.\n\n"}, TOOL_USE]}]
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]}


def test_history_is_the_same_as_in_chat_completions():
    call = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo", "n": 3}'}}
    said = {"role": "assistant", "content": "Let me look.\n\n", "reasoning_content": "call f", "tool_calls": [call]}
    chat = conversation([*HI, said, {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"}])
    assert turns(*CALLED, {"role": "user", "content": [RESULT]}) == chat


def test_what_stands_beside_a_tool_result():
    reminder = {"type": "text", "text": "<system-reminder>\nUse the tools.\n</system-reminder>\n"}
    after = turns(*CALLED, {"role": "user", "content": [RESULT, reminder]})[2:]
    assert [(m["role"], m["content"]) for m in after] == [("tool", "sunny\n\n" + reminder["text"])]
    said = turns(*CALLED, {"role": "user", "content": [RESULT, {"type": "text", "text": "Stop."}]})[2:]
    assert [(m["role"], m["content"]) for m in said] == [("tool", "sunny"), ("user", "Stop.")]


@pytest.mark.parametrize("content, text", [
    ("x", "x"), (None, ""), ([], ""),
    ([{"type": "text", "text": "a"}, {"type": "image", "source": {}}],
     "a\n\n[image: not shown, this model reads text only]")])
def test_tool_results_of_every_form(content, text):
    result = {**RESULT, "content": content, "is_error": True}
    assert turns(*CALLED, {"role": "user", "content": [result]})[2]["content"] == text


def test_blocks_of_other_servers_are_left_out():
    found = turns(*HI, {"role": "assistant", "content": [
        {"type": "redacted_thinking", "data": "x"}, {"type": "server_tool_use", "id": "s", "name": "w", "input": {}},
        {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, *HI)
    assert found[1] == {"role": "assistant", "content": "ab"}


def test_text_documents_are_read():
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    assert turns({"role": "user", "content": [document, {"type": "text", "text": "What?"}]})[0]["content"] == "D\n\nWhat?"


def test_tools_are_printed_as_in_chat_completions_and_hosted_ones_noted():
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    tools = [{"name": "f", "description": "F", "input_schema": schema, "cache_control": {"type": "ephemeral"}},
             {"type": "web_search_20250305", "name": "web_search"}]
    body = read(MessagesBody, {"messages": HI, "tools": tools})
    assert conversation_of(body).tools == [
        {"type": "function", "function": {"name": "f", "description": "F", "parameters": schema}}]
    reply = MessagesReply(body, FakeEngine([]), "m")
    assert reply.notes == ["ignoring tools of type 'web_search_20250305', which this server does not run"]


@pytest.mark.parametrize("message, param", [
    ({"role": "robot", "content": "x"}, "messages[1].role"), ("x", "messages[1]"),
    ({"role": "user", "content": 5}, "messages[1].content"),
    ({"role": "user", "content": [{"type": "image", "source": {}}]}, "messages[1].content[0]"),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0].text"),
    ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
    ({"role": "assistant", "content": [{"type": "tool_use", "name": 5}]}, "messages[1].content[0].name"),
    ({"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": "x"}]}, "messages[1].content[0].input"),
    ({"role": "assistant", "content": [{"type": "thinking"}]}, "messages[1].content[0].thinking"),
    ({"role": "assistant", "content": "The answer is ("}, "messages"),
])
def test_bad_messages_are_named(message, param):
    with pytest.raises(RequestError) as caught:
        turns(*HI, message)
    assert caught.value.param == param and str(caught.value).startswith(param.split(".")[0][:8])


@pytest.mark.parametrize("body, param", [
    ({"messages": []}, "messages"), ({"messages": None}, "messages"), ({"max_tokens": 0}, "max_tokens"),
    ({"system": 5}, "system"), ({"system": [{"text": 5}]}, "system[0].text"), ({"stop_sequences": [""]}, "stop_sequences"),
    ({"thinking": {"type": "often"}}, "thinking.type"), ({"thinking": "on"}, "thinking"), ({"tools": [{}]}, "tools[0].name"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_format": {"type": "json_schema", "schema": {"type": "strin"}}}, "output_format.schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"), ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"tool_choice": {"disable_parallel_tool_use": "no"}}, "tool_choice.disable_parallel_tool_use"),
])
def test_bad_values_name_the_field(body, param):
    with pytest.raises(RequestError) as caught:
        reply_to([], **body)
    assert caught.value.param == param and param.split("[")[0] in str(caught.value)


# ---- thinking and effort

@pytest.mark.parametrize("body, on", [
    ({}, False), ({"thinking": {"type": "disabled"}}, False), ({"output_config": {"effort": "high"}}, False),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, True), ({"thinking": {"type": "adaptive"}}, True),
    ({"enable_thinking": True}, True), ({"thinking": {"type": "adaptive"}, "enable_thinking": False}, False),
    ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, False),
])
def test_C7_who_decides_about_thinking(body, on):
    assert rendered(HI, **body).endswith("<think>\n" if on else "</think>\n\n")


def test_R10_the_effort_that_was_used_is_told():
    whole = reply_to(pieces("x"), thinking={"type": "adaptive"}, output_config={"effort": "max"})[1]
    assert whole["x_qwentin"]["thinking"] is True and whole["x_qwentin"]["reasoning_effort"] == "xhigh"
    whole = reply_to(pieces("x"), output_config={"effort": "max"})[1]
    assert whole["x_qwentin"]["thinking"] is False and whole["x_qwentin"]["reasoning_effort"] is None


def test_the_budget_goes_to_the_engine():
    body = read(MessagesBody, {**BODY, "thinking": {"type": "enabled", "budget_tokens": 2000}})
    assert MessagesReply(body, FakeEngine([]), "m").turn.request.guide.budget == 2000
