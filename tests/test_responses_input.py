"""Items and tools of OpenAI's Responses on their way to the template; namespace and custom tools on their way back."""
import pytest

from fake_engine import FakeEngine, pieces, play, ragged, serving
from http_client import call
from qwentin import nano
from qwentin.chat_template import ChatTemplate
from qwentin.errors import RequestError
from qwentin.server.conversation import conversation
from qwentin.server.fields import read
from qwentin.server.responses import ResponsesBody, ResponsesReply
from qwentin.server.responses_input import conversation_of, read_tools
from tool_texts import call as written

PATH = "/v1/responses"
BODY = {"input": "Hi"}
HI = {"role": "user", "content": "Hi"}


def reply_to(script, **body):
    return play(FakeEngine(script), ResponsesReply, {**BODY, **body})


def asked(items, **more):
    """The conversation that a body becomes."""
    body = read(ResponsesBody, {"input": items, **more})
    return conversation_of(body, read_tools(body.tools))


def turns(*items, **more):
    return asked(list(items), **more).messages


def rendered(items, **more):
    return "".join(asked(items, **more).render(ChatTemplate(nano.DIRECTORY, {})))


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"city": "Oslo", "n": 3}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "call f"}],
             "encrypted_content": None}


def test_input_as_text_and_as_items():
    assert asked("Hi").messages == [HI] == turns(HI) == turns({"type": "message", **HI})
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert turns({"role": "user", "content": parts}) == [{"role": "user", "content": "ab"}]


def test_C2_instructions_and_developer_items():
    developer = lambda text: {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": text}]}
    two = {"role": "user", "content": "two"}
    found = turns(developer("D1"), developer("D2"), HI, developer("late"), two, instructions="I")
    assert [(m["role"], m["content"]) for m in found] == [
        ("system", "I\n\nD1\n\nD2"), ("user", "Hi"), ("user", "<system>\nlate\n</system>"), ("user", "two")]


def test_history_is_the_same_as_in_chat_completions():
    """What Codex sends back: reasoning with null encrypted_content, the message, the call, its output."""
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look.\n\n"}]}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo", "n": 3}'}}
    turn = {"role": "assistant", "content": "Let me look.\n\n", "reasoning_content": "call f", "tool_calls": [call]}
    chat = conversation([HI, turn, {"role": "tool", "tool_call_id": "c1", "content": "sunny"}])
    assert turns(HI, REASONING, said, CALL, OUTPUT) == chat


def test_turns_begin_with_their_thought():
    two = turns(HI, REASONING, CALL, OUTPUT, REASONING, {**CALL, "call_id": "c2"}, {**OUTPUT, "call_id": "c2"})
    assert [m["role"] for m in two] == ["user", "assistant", "tool", "assistant", "tool"]
    again = turns(HI, REASONING, CALL, REASONING, CALL)         # two turns whose outputs were lost
    assert [len(m.get("tool_calls", [])) for m in again] == [0, 1, 1]
    assert [len(m.get("tool_calls", [])) for m in turns(HI, REASONING, CALL, CALL)] == [0, 2]


def test_a_summary_stands_in_for_a_thought_that_was_not_kept():
    summary = [{"type": "summary_text", "text": "short"}]
    thought = lambda **item: turns(HI, {**REASONING, **item}, CALL)[1].get("reasoning_content")
    assert thought(summary=summary) == "call f"
    assert thought(summary=summary, content=None) == "short" == thought(summary=summary, content=[])
    assert thought(content=None) == ""


@pytest.mark.parametrize("output, text", [
    ("x", "x"), ({"content": "x", "success": False}, "x"), (None, ""),
    ([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:"}],
     "a[input_image: not shown, this model reads text only]")])
def test_outputs_of_every_form(output, text):
    assert turns(HI, CALL, {**OUTPUT, "output": output})[2] == {"role": "tool", "tool_call_id": "c1", "content": text}


def test_T1_arguments_that_are_no_json_do_not_end_the_session():
    """Codex stores what it got and sends it with every later request."""
    found = turns(HI, {**CALL, "arguments": '{"a": '}, OUTPUT)
    assert found[1] == {"role": "assistant", "content": '<tool_call>\n<function=f>\n{"a": \n</function>\n</tool_call>'}


def test_items_of_hosted_tools_are_noted():
    body = read(ResponsesBody, {"input": [HI, {"type": "web_search_call", "id": "ws", "status": "completed"}]})
    reply = ResponsesReply(body, FakeEngine([]), "m")
    assert reply.notes == ["ignoring input items of type 'web_search_call'"]


@pytest.mark.parametrize("item, param", [
    ("x", "input[1]"), ({"role": "robot", "content": "x"}, "input[1].role"), ({**CALL, "name": None}, "input[1].name"),
    ({**CALL, "arguments": {}}, "input[1].arguments"), ({**OUTPUT, "output": 5}, "input[1].output"),
    ({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}, "input[1].content[0]"),
    ({"type": "item_reference", "id": "x"}, "input[1]"), ({**REASONING, "content": "x"}, "input[1].content"),
    ({"type": "custom_tool_call", "name": "f"}, "input[1].input"),
])
def test_bad_items_are_named(item, param):
    with pytest.raises(RequestError) as caught:
        turns(HI, item)
    assert caught.value.param == param and "input[1]" in str(caught.value)


@pytest.mark.parametrize("body, param", [
    ({"input": None}, "input"), ({"input": []}, "input"), ({"input": 5}, "input"), ({"top_logprobs": 21}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"), ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}}, "text.format.schema"),
    ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice"),
    ({"tools": [5]}, "tools[0]"), ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
])
def test_bad_values_name_the_field(body, param):
    with pytest.raises(RequestError) as caught:
        reply_to([], **body)
    assert caught.value.param == param and param.split("[")[0] in str(caught.value)


# ---- tools of other kinds than function

SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}}
NAMESPACE = {"type": "namespace", "name": "mcp__repl", "description": "Tools in the mcp__repl namespace.", "tools": [
    {"type": "function", "name": "js", "description": "Run it", "parameters": SCHEMA, "strict": False}]}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch"}}
SEARCH = {"type": "web_search", "external_web_access": False}


def test_how_tools_are_printed():
    tools = read_tools([NAMESPACE, PATCH, SEARCH, {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}])
    js, patch, f = [tool["function"] for tool in tools.printed]
    assert js == {"name": "mcp__repl__js", "description": "Run it", "parameters": SCHEMA}
    assert patch["name"] == "apply_patch" and "start: begin_patch" in patch["description"]
    assert patch["parameters"]["required"] == ["input"]
    assert f == {"name": "f", "parameters": SCHEMA}
    assert tools.notes == ["ignoring tools of type 'web_search', which this server does not run"]
    assert all(tool["type"] == "function" for tool in tools.printed)


def test_web_search_is_ignored_with_a_line_in_the_log(caplog):
    """Codex lists it on every turn; nothing is ever fetched for it."""
    caplog.set_level("INFO", "qwentin.server")
    with serving(FakeEngine(pieces("ok"))) as server:
        for _ in range(2):
            assert call(server.url, PATH, {**BODY, "tools": [SEARCH]}).status == 200
    lines = [r.getMessage() for r in caplog.records if "web_search" in r.getMessage()]
    assert lines == ["ignoring tools of type 'web_search', which this server does not run (logged once)"]


def test_a_call_into_a_namespace_is_reported_in_two_parts():
    chunks, whole, _ = reply_to(ragged("</think>\n\n" + written("mcp__repl__js", code="1+1"), 1), tools=[NAMESPACE])
    item = whole["output"][-1]
    assert (item["type"], item["namespace"], item["name"], item["arguments"]) == (
        "function_call", "mcp__repl", "js", '{"code": "1+1"}')
    added = [c["item"] for c in chunks if c["type"] == "response.output_item.added"][-1]
    assert (added["namespace"], added["name"]) == ("mcp__repl", "js")
    back = {key: item[key] for key in ("type", "namespace", "name", "arguments", "call_id")}
    assert turns(HI, back)[1]["tool_calls"][0]["function"]["name"] == "mcp__repl__js"


DIFF = '*** Begin Patch\n*** Update File: a.py\n@@\n-print("<b>")\n+print("&& ok")\n*** End Patch'


@pytest.mark.parametrize("seed", range(6))
def test_T23_a_custom_tool_is_called_with_its_raw_input(seed):
    """Codex refuses a function_call for apply_patch."""
    text = "I patch.\n</think>\n\n" + written("apply_patch", input=DIFF)
    chunks, whole, _ = reply_to(ragged(text, seed), tools=[PATCH])
    item = whole["output"][-1]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", DIFF) and item["call_id"]
    assert "arguments" not in item and whole["status"] == "completed"
    deltas = [c for c in chunks if c["type"] == "response.custom_tool_call_input.delta"]
    done, = [c for c in chunks if c["type"] == "response.custom_tool_call_input.done"]
    assert "".join(c["delta"] for c in deltas) == DIFF == done["input"] and len(deltas) > 3
    back = {key: item[key] for key in ("type", "name", "input", "call_id")}
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done!"}
    history = rendered([HI, REASONING, back, output], tools=[PATCH])
    assert text.partition("\n\n")[2] in history and "<tool_response>\nDone!\n</tool_response>" in history


def test_a_custom_tools_input_that_was_cut_off_is_incomplete():
    text = "</think>\n\n" + written("apply_patch", input="if (x) { y }")
    chunks, whole, _ = reply_to(pieces(text), tools=[PATCH], max_output_tokens=text.index("}") + 1)
    assert (whole["output"][-1]["input"], whole["output"][-1]["status"]) == ("if (x) { y }", "incomplete")
    assert whole["status"] == "incomplete" and chunks[-1]["type"] == "response.incomplete"
