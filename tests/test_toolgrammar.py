"""The grammar of calls: what babbles under it is read as exactly the calls it is, with arguments their schemas accept."""
import json

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from qwentin import nano
from qwentin.constraint import Grammars, json_schema
from qwentin.guide import Guide, Steering
from qwentin.request import SamplingParams
from qwentin.sampler import Sampler
from qwentin.server.toolcall import ToolCallParser
from qwentin.server.toolevents import ArgumentsDelta, CallEnd, CallStart, Text
from qwentin.server.toolgrammar import MOST_CALLS, calls_source, searched
from qwentin.server.toolschema import Toolbox
from qwentin.tokenizer import Tokenizer

TOKENIZER = Tokenizer(nano.DIRECTORY)
GRAMMARS = Grammars(TOKENIZER)
END = TOKENIZER.ids["<|im_end|>"]
LIKED = [i for i in range(TOKENIZER.size) if set(TOKENIZER.token_bytes(i)) & set(b'</>"}]\n')]


def tool(name, properties, required=(), **more):
    return {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": properties, "required": list(required), **more}}}


def babble(tools, number, most=250, **rules) -> tuple[str, bool]:
    """Text of a model that knows nothing but likes to close things, and whether it ended by itself."""
    rng = np.random.default_rng(number)
    grammar = GRAMMARS.compile(calls_source(list(Toolbox(tools).tools.values()), **rules), "tools")
    sampler = Sampler(SamplingParams(seed=number), np.zeros(1, np.int32), TOKENIZER.size, 0,
                      Steering(Guide(grammar=grammar), TOKENIZER, frozenset({END})))
    likes = np.zeros(TOKENIZER.size, np.float32)
    likes[LIKED] = 3
    likes[END] = 4
    ids = []
    while len(ids) < most:
        token = sampler.choose(likes + rng.normal(size=TOKENIZER.size).astype(np.float32))
        if token == END:
            return TOKENIZER.decode(ids), True
        ids.append(token)
    return TOKENIZER.decode(ids), False


def calls_of(text, tools):
    """[(name, arguments)] as the server reads them; everything of the text has to be part of a call."""
    parser = ToolCallParser(tools, lambda: "id")
    events = parser.push(text) + parser.finish()
    assert not [e for e in events if isinstance(e, Text) and e.text.strip()], text
    assert all(e.complete for e in events if isinstance(e, CallEnd))
    starts = [e for e in events if isinstance(e, CallStart)]
    return [(s.name, json.loads("".join(e.fragment for e in events if isinstance(e, ArgumentsDelta) and e.index == s.index)))
            for s in starts]


def judge(text, tools):
    found = calls_of(text, tools)
    assert len(found) == text.count("<tool_call>"), text
    for name, arguments in found:
        schema = next(t["function"]["parameters"] for t in tools if t["function"]["name"] == name)
        jsonschema.validate(arguments, schema)
    return found


def fits(tools, text, **rules):
    state = GRAMMARS.compile(calls_source(list(Toolbox(tools).tools.values()), **rules), "tools").begin()
    for token in TOKENIZER.encode(text):
        if not state.mask()[token]:
            return False
        state.advance(int(token))
    return state.complete


def written(name, *pairs):
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


WEATHER = tool("get_weather", {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 14},
                               "unit": {"enum": ["C", "F"]}}, ["city"])
NOTHING = tool("get_time", {})
TOOLS = [WEATHER, NOTHING]


@pytest.mark.parametrize("text", [
    written("get_weather", ("city", "Oslo")), written("get_weather", ("city", "a\n\n<b> </p>\n&& \"é\""), ("days", "3")),
    written("get_weather", ("city", ""), ("unit", "F")), written("get_time"),
    written("get_time") + "\n" + written("get_time"),
])
def test_what_templates_write_fits(text):
    assert fits(TOOLS, text)


@pytest.mark.parametrize("text", [
    "", "Sure!", written("get_weather"), written("nobody"), written("get_weather", ("city", "Oslo"), ("days", "three")),
    written("get_weather", ("city", "Oslo"), ("days", "15")), written("get_weather", ("city", "Oslo"), ("unit", "K")),
    written("get_weather", ("town", "Oslo")), written("get_time", ("zone", "x")), written("get_time") + "!",
    written("get_weather", ("city", "<tool_call>")), written("get_weather", ("city", "a</parameter>b")),
    written("get_weather", ("city", "<function=get_time>")), written("get_weather", ("city", "Oslo"), ("city", "Rome")),
])
def test_what_is_no_call_of_these_tools_does_not(text):
    assert not fits(TOOLS, text)


def test_one_call_only_where_one_is_wanted():
    two = written("get_time") + "\n" + written("get_time")
    assert fits(TOOLS, two, most=2) and not fits(TOOLS, two, most=1)
    assert not fits(TOOLS, "\n".join([written("get_time")] * (MOST_CALLS + 1)))
    assert fits(TOOLS, written("get_time").removeprefix("<tool_call>"), opened=True)


def test_a_strict_tool_does_not_bind_the_others():
    """Behind a <tool_call> that the model wrote by itself."""
    strict = {**WEATHER, "strict": True}
    tools = [strict, tool("log", {"text": {"type": "integer"}}, ["text"])]
    for text in (written("get_weather", ("city", "Oslo")), written("log", ("more", "x"), ("text", "<b></parameter>")),
                 "<tool_call>\n<function=log>\n</function></tool_call>"):
        assert fits(tools, text.removeprefix("<tool_call>"), opened=True)
    for text in (written("get_weather", ("town", "Oslo")), written("nobody"), written("get_weather")):
        assert not fits(tools, text.removeprefix("<tool_call>"), opened=True)
    assert not fits(tools, written("log", ("text", "x")))       # a call that must come is typed


def test_an_answer_beside_calls():
    form = json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert fits(TOOLS, '{"a": 3}', answer=form) and fits(TOOLS, written("get_time"), answer=form)
    assert not fits(TOOLS, '{"b": 3}', answer=form)


def test_T24_a_tool_without_properties():
    """`{}` and a stop, whatever the model would rather say."""
    for declared in (NOTHING, {"type": "function", "function": {"name": "get_time"}},
                     tool("get_time", {}, additionalProperties=False)):
        text, ended = babble([declared], 1, most=40)
        assert ended and set(map(str, calls_of(text, [declared]))) == {"('get_time', {})"}


@pytest.mark.parametrize("schema, good, bad", [
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^[a-z]+\\d$"}, ["abc1"], ["1", "abc", "Abc1"]),
    ({"type": "string", "pattern": "b+"}, ["abc", "b"], ["ac"]),
    ({"type": ["integer", "null"]}, ["3", "null"], ["x", "3.5"]),
    ({"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/list"}]}, ["true", "[1, 2]", "[]"], ['["a"]', "yes"]),
    ({"$ref": "#/$defs/list"}, ["[1]"], ["1"]),
    ({"enum": ["a b", 3, None]}, ["a b", "3", "null"], ["b", "4"]),
    ({"type": "array", "items": {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]}},
     ['[{"k": "v<w>"}]', '[\n  {"k": ""}]'], ["[{}]"]),
    ({"type": ["string", "integer"]}, ["3", "three"], []), ({}, ["3", "{"], []), ({"type": "strnig"}, ["x"], []),
])
def test_values_by_schema(schema, good, bad):
    tools = [tool("f", {"v": schema}, ["v"], **{"$defs": {"list": {"type": "array", "items": {"type": "integer"}}}})]
    assert [v for v in good if not fits(tools, written("f", ("v", v)))] == []
    assert [v for v in bad if fits(tools, written("f", ("v", v)))] == []


@pytest.mark.parametrize("pattern, whole", [
    ("^a$", "(a)"), ("a", "(?s:.*)(a)(?s:.*)"), ("^a", "(a)(?s:.*)"), ("^a|b$", None), ("a|b", "(?s:.*)(a|b)(?s:.*)"),
    ("(^a)", None), ("[^a]$", "(?s:.*)([^a])"), ("a\\$", None),
])
def test_patterns_are_searched_for(pattern, whole):
    assert searched(pattern) == whole


def test_tools_that_take_any_arguments():
    free = [tool("f", {}, additionalProperties=True)]
    assert fits(free, written("f", ("a", "x"), ("b_1", "y"))) and fits(free, written("f"))
    assert fits([tool("f", {"a": {"type": "integer"}}, ["a"])], written("f", ("a", "many")), loose=True)


KEYS = st.sampled_from(["path", "a", "x y", "naïve", "days"])
VALUES = st.sampled_from([
    {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, {},
    {"type": "string", "maxLength": 5}, {"type": "string", "pattern": "^[ab]*$"}, {"enum": ["x", "two words", 1]},
    {"type": ["string", "null"]}, {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3}, {"$ref": "#/$defs/point"},
    {"type": "object", "properties": {"k": {"enum": ["<", "</parameter>", "\n"]}}, "required": ["k"],
     "additionalProperties": False}])
POINT = {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
                   "additionalProperties": False}}
ARGUMENTS = st.builds(lambda properties, optional: (properties, [k for k in properties if k not in optional]),
                      st.dictionaries(KEYS, VALUES, max_size=4), st.sets(KEYS, max_size=2))


@seed(2)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ARGUMENTS, min_size=1, max_size=3), st.integers(0, 2**32))
def test_babble_is_calls_that_validate(declared, number):
    tools = [tool(f"tool_{i}", properties, required, **{"$defs": POINT})
             for i, (properties, required) in enumerate(declared)]
    text, ended = babble(tools, number)
    if ended:
        assert judge(text, tools)


def test_babble_ends():
    """The test above would be empty if nothing ended."""
    assert sum(babble(TOOLS, i)[1] for i in range(20)) >= 10
