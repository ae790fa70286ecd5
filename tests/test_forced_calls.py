"""Calls that must come, strict tools, one call or several: the embedded model over HTTP in three dialects."""
import json

import jsonschema
import openai
import pytest

from http_client import call
from spoken import DIALECTS, ask, sdk

WEATHER = {"type": "object", "required": ["city"],
           "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}}
LOG = {"type": "object", "properties": {"level": {"enum": ["info", "error"]}, "code": {"type": ["integer", "null"]},
                                        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}},
       "required": ["level", "code", "tags"], "additionalProperties": False}
NOTHING = {"type": "object", "properties": {}}
TOOLS = {"get_weather": WEATHER, "get_time": NOTHING, "log_event": LOG}
HELLO = "Hello"         # no reason to call anything


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_required_makes_a_call_and_leaves_the_thought_free(server, dialect, stream):
    for thinking in (True, False):
        said = ask(server, dialect, stream, HELLO, tools=TOOLS, choice="required", thinking=thinking)
        assert said.finish == "calls" and said.text == "" and bool(said.thought) == thinking
        for name, arguments in said.added():
            jsonschema.validate(arguments, TOOLS[name])
    sensible = ask(server, dialect, stream, "What is the weather in Oslo?", tools=TOOLS, choice="required")
    assert sensible.added() == [("get_weather", {"city": "Oslo"})]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_named_tool_is_called_whatever_is_asked(server, dialect):
    for name in TOOLS:
        said = ask(server, dialect, name == "get_time", "What is the weather in Oslo?", tools=TOOLS, choice=name,
                   parallel=False)
        assert said.finish == "calls" and [called for called, _ in said.calls] == [name]
        jsonschema.validate(said.added()[0][1], TOOLS[name])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_T24_a_strict_tool_without_arguments(server, dialect, stream):
    """`{}` and a stop."""
    for schema in (NOTHING, {"type": "object", "properties": {}, "required": [], "additionalProperties": False}):
        said = ask(server, dialect, stream, HELLO, tools={"get_time": schema}, strict=True, choice="required",
                   parallel=False)
        assert (said.calls, said.finish, said.text) == ([("get_time", "{}")], "calls", "")
    several = ask(server, dialect, stream, HELLO, tools={"get_time": NOTHING}, strict=True, choice="required")
    assert several.finish == "calls" and set(several.calls) == {("get_time", "{}")}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_call_where_parallel_calls_are_off(server, dialect):
    for temperature in (0, 1.2):
        said = ask(server, dialect, True, HELLO, tools=TOOLS, choice="required", parallel=False, temperature=temperature,
                   more={"seed": 5})
        assert len(said.calls) == 1 and said.finish == "calls" and "dropped_calls" not in said.extras


@pytest.mark.parametrize("dialect", DIALECTS)
def test_strict_types_hold_for_a_model_out_of_its_mind(server, dialect):
    """At temperature 2, where the free model writes nonsense; choice left to the model, so some answers have no call."""
    called = 0
    for seed in range(3):
        said = ask(server, dialect, False, "Please log an event with the tool log_event.", tools={"log_event": LOG},
                   strict=True, temperature=2.0, limit=100, more={"seed": seed}, thinking=False)
        if said.finish == "calls":
            for name, arguments in said.added():
                jsonschema.validate(arguments, TOOLS[name])
                called += 1
    assert called


def test_auto_stays_free(server):
    said = ask(server, "chat", False, HELLO, tools=TOOLS, strict=True, thinking=False)
    assert said.finish == "stop" and said.text and not said.calls
    assert ask(server, "chat", False, HELLO, tools=TOOLS, choice="none").calls == []


def test_only_allowed_tools(server):
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in TOOLS.items()]
    allowed = [{"type": "function", "function": {"name": "get_time"}}]
    body = {"messages": [{"role": "user", "content": "What is the weather in Oslo?"}], "tools": tools, "temperature": 0,
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": allowed}}}
    message = call(server.url, "/v1/chat/completions", body).json["choices"][0]["message"]
    assert {c["function"]["name"] for c in message["tool_calls"]} == {"get_time"}


def test_a_schema_or_calls(server):
    """response_format beside tools: the answer is one or the other."""
    form = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    for prompt in (HELLO, "What is the weather in Oslo?"):
        said = ask(server, "chat", False, prompt, tools=TOOLS, schema=form)
        if said.calls:
            assert said.finish == "calls" and said.text == ""
        else:
            jsonschema.validate(json.loads(said.text), form)
    assert ask(server, "chat", False, "What is the weather in Oslo?", tools=TOOLS, schema=form).calls
    assert json.loads(ask(server, "chat", False, HELLO, tools=TOOLS, schema=form, choice="none").text)["ok"] in (True, False)


def test_a_custom_tool_of_responses(server):
    tools = [{"type": "custom", "name": "apply_patch", "description": "A patch"}]
    whole = sdk(server).responses.create(model="nano", input=HELLO, tools=tools, max_output_tokens=400, temperature=0,
                                         tool_choice={"type": "custom", "name": "apply_patch"})
    item = whole.output[-1]
    assert (item.type, item.name) == ("custom_tool_call", "apply_patch")


def test_a_strict_schema_that_cannot_be_kept_is_refused(server):
    bad = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 5, "maximum": 2}}, "required": ["x"]}
    with pytest.raises(openai.BadRequestError, match="tools cannot be used to constrain"):
        ask(server, "chat", False, HELLO, tools={"f": bad}, strict=True)
    said = ask(server, "chat", False, HELLO, tools={"f": bad}, choice="required", limit=100)     # not strict: any text
    assert [name for name, _ in said.calls][:1] == ["f"]


@pytest.mark.parametrize("extra", [{}, {"thinking_budget": 3}, {"enable_thinking": False}])
def test_P6_a_forced_call_sent_back_is_in_the_cache(server, extra):
    """What was forced is written as templates write it, a thought that was closed too."""
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in TOOLS.items()]
    body = {"tools": tools, "tool_choice": "required", "temperature": 0, "max_tokens": 200, **extra}
    asked = [{"role": "user", "content": f"Is it raining in Oslo? {sorted(extra)}"}]
    first = call(server.url, "/v1/chat/completions", {**body, "messages": asked}).json
    said = first["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in said["tool_calls"]]
    second = call(server.url, "/v1/chat/completions", {**body, "messages": [*asked, said, *results]}).json
    before = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= before - 1
