"""Tool calls in every way that a text can arrive: one named test for each public bug report, then the rules one by one.

Each text goes through `parsed`: all 2-chunk splits, character by character, random 1-4-token chunks, and whole; the
events must be the same, and the arguments one JSON object. T-15 to T-17 are in test_answer.py, T-20 in test_toolhead.py.
"""
import json
import sys

import pytest

from qwentin.server.toolcall import ToolCallParser
from qwentin.server.toolevents import ArgumentsDelta, CallEnd, CallStart, Text
from tool_texts import STRING, TOOLS, call, counter, declare, every_way, fed, parsed

LS = ("bash", {"command": "ls"})


# ---- the rows of the acceptance list

@pytest.mark.parametrize("bad", ["<parameter=\necho $X; echo\n</parameter>", "<parameter=ids: [1, 2]\n</parameter>",
                                 "<parameter=note=\n</parameter>", "<parameter=note=>\nx\n</parameter>"])
def test_T1_malformed_parameter_is_dropped_from_the_arguments(bad):
    before = f"<tool_call>\n<function=bash>\n{bad}\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
    after = f"<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n{bad}\n</function>\n</tool_call>"
    assert parsed(before) == [LS, bad] == parsed(after)         # not lost: it is text behind the call
    assert parsed(f"<tool_call>\n<function=list_tasks>\n{bad}\n</function>\n</tool_call>") == [("list_tasks", {}), bad]


@pytest.mark.parametrize("extra", ["\n</function>", "\n</function_invocation>", "\n</function>\n</function_invocation>",
                                   "\n</parameter>", "</function></function>"])
def test_T2_surplus_closing_tags(extra):
    text = call("bash", command="ls")
    inside, behind = text.replace("\n</tool_call>", extra + "\n</tool_call>"), text + extra
    assert parsed(inside) == [LS] == parsed(behind)
    assert parsed(inside + "\n" + text) == [LS, LS]


def test_T3_shell_syntax_is_kept_byte_for_byte():
    command = "pwd && ls -la <x> 2>&1 | grep '</' > \"a&amp;b\""
    assert parsed(call("bash", command=command)) == [("bash", {"command": command})]


@pytest.mark.parametrize("text", [
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</function>\n</tool_call>",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</tool_call>",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</tool_call>",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</function>\n</parameter>\n</tool_call>",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter/>\n</function>\n</tool_call>",
    "<tool_call>\n<function=bash>\n</parameter>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
])
def test_T5_missing_and_crossed_closing_tags(text):
    assert parsed(text) == [LS]
    if "</" in text:
        assert parsed(text + "\n" + call("bash", command="ls")) == [LS, LS]


def test_T5_missing_closing_tag_before_the_next_parameter():
    text = call("write", file_path="a", content="b").replace("a\n</parameter>", "a")
    assert parsed(text) == [("write", {"file_path": "a", "content": "b"})]


@pytest.mark.parametrize("value", ['[{"multiSelect":true,"x":null}]', "[{'multiSelect': True, 'x': None}]",
                                   '[{"multiSelect": True, "x": None}]'])
def test_T7_arrays_are_native(value):
    assert parsed(call("ask", questions=value)) == [("ask", {"questions": [{"multiSelect": True, "x": None}]})]


@pytest.mark.parametrize("text, value", [("True", True), ("FALSE", False), ("true", True), ("maybe", "maybe")])
def test_T8_booleans_in_any_spelling(text, value):
    tools = [declare("f", {"flag": {"type": "boolean"}})]
    assert parsed(call("f", flag=text), tools) == [("f", {"flag": value})]


def test_T9_types_from_unions_and_references():
    integer, null = {"type": "integer"}, {"type": "null"}
    tools = [declare("f", {"a": {"anyOf": [integer, null]}, "b": {"anyOf": [STRING, null]}, "c": {"$ref": "#/$defs/N"},
                           "d": {"anyOf": [{"type": "array", "items": STRING}, null]}, "e": {"type": ["number", "null"]},
                           "f": {"oneOf": [{"type": "boolean"}, integer]}}, **{"$defs": {"N": integer}})]
    text = call("f", a="5", b="5", c="5", d='["x"]', e="None", f="True")
    assert parsed(text, tools) == [("f", {"a": 5, "b": "5", "c": 5, "d": ["x"], "e": None, "f": True})]


def test_T11_one_line_parameter_then_a_second_call():
    text = "<tool_call>\n<function=bash>\n<parameter=command>ls</parameter>\n</function>\n</tool_call>\n"
    assert parsed(text + text.rstrip()) == [LS, LS]
    tight = text.replace("\n", "")
    assert parsed(tight + tight) == [LS, LS]


CALLS = call("bash", command="ls"), call("get_weather", city="Oslo", days=3)
SHAPES = {      # what one chunk can hold when several tokens come at once
    "thought end, text, call start": (["Hm.</think> xxx<tool_call>", CALLS[0][11:]], 1),
    "call start inside": (["Look: ", "<tool_call>\n<function=bash>\n<param", CALLS[0][34:]], 1),
    "call end and line break": ([CALLS[0][:-20], CALLS[0][-20:] + "\n"], 1),
    "call end and text": ([CALLS[0][:-13], "\n</tool_call>yyy"], 1),
    "one whole call": (CALLS[:1], 1),
    "several calls": (["..", CALLS[0] + CALLS[1][:40], CALLS[1][40:]], 2),
    "boundary of two calls": ([CALLS[0][:-12], "</tool_call><tool_call>", CALLS[1][11:]], 2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_T12_chunks_of_several_tokens(name):
    pieces, count = SHAPES[name]
    expected = [("bash", {"command": "ls"}), ("get_weather", {"city": "Oslo", "days": 3})][:count]
    events = parsed("".join(pieces))
    assert [event for event in events if isinstance(event, tuple)] == expected
    assert fed(pieces) == fed(["".join(pieces)])


LITERAL = [
    "The model opens a call with <tool_call> and closes it with </tool_call>.",
    "Write `<tool_call>` first, then `<function=bash>`, then ``<parameter=command>``.",
    "One line: `<tool_call><function=bash><parameter=command>ls</parameter></function></tool_call>`.",
    "Like this:\n\n```xml\n" + CALLS[0] + "\n```\n\nThat is all.",
    "~~~\n" + CALLS[0] + "\n~~~",
    "1. In a list:\n   ```\n" + CALLS[0] + "\n   ```\n2. Done.",
    "Indented:\n\n    <tool_call>\n    <function=bash>\n    <parameter=command>\n    ls\n    </parameter>\n",
    "<tool_call>",
    "<tool_call>\n",
    "text <tool_call>\n<function=",
    "a < b, <b>bold</b>, <function=bash> is how it starts, and <parameter=command> follows",
    "\n\n",
    "  {\"name\": \"Ann\", \"city\": \"Oslo\"}",
    "{\n  \"type\": \"object\"\n}\n",
    "<name>foo is a placeholder\n<tool> is a tag\n",
]


@pytest.mark.parametrize("text", LITERAL)
def test_T14_tags_in_prose_and_code_are_text(text):
    assert "".join(parsed(text)) == text
    assert "".join(parsed(text, tools=None)) == text


@pytest.mark.parametrize("text", [*CALLS, "Hi.\n\n" + CALLS[0], '{"name": "bash", "arguments": {"command": "ls"}}'])
def test_T14_without_tools_everything_is_text(text):
    assert parsed(text, tools=[]) == [text]


def test_T14_a_call_after_shown_examples():
    shown = "`<tool_call>` and\n```\n" + CALLS[0] + "\n```\nNow:\n\n"
    assert parsed(shown + CALLS[1]) == [shown, ("get_weather", {"city": "Oslo", "days": 3})]
    assert parsed("It's `odd.\n" + CALLS[0]) == ["It's `odd.\n", LS]
    assert parsed("It's `odd " + CALLS[0]) == ["It's `odd ", LS]
    assert parsed("It's `odd " + CALLS[0] + '{"name": "bash", "arguments": {"command": "ls"}}') == ["It's `odd ", LS, LS]


@pytest.mark.parametrize("behind", ["Done.", "\nDone.", "\n\nDone.\n", " Done <b>"])
def test_T18_text_behind_a_call(behind):
    assert parsed(CALLS[0] + behind) == [LS, behind]
    assert parsed("Before.\n\n" + CALLS[0] + behind + CALLS[0]) == ["Before.\n\n", LS, behind, LS]


def test_T18_text_behind_the_function_inside_the_tags():
    text = CALLS[0].replace("</function>\n", "</function>\nI wait.\n")
    assert parsed(text) == [LS, "\nI wait.\n"]
    assert parsed(text.replace("I wait.\n", "I wait.\n\n</parameter>\n</function>\n")) == [LS, "\nI wait.\n\n"]


def test_T22_one_index_a_call_and_its_name_once():
    pieces = list("".join(CALLS))
    parser = ToolCallParser(TOOLS, counter())
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    starts = [event for event in events if isinstance(event, CallStart)]
    assert starts == [CallStart(0, "call_1", "bash"), CallStart(1, "call_2", "get_weather")]
    for start in starts:
        own = [event for event in events if event.index == start.index]
        assert own[0] == start and own[-1] == CallEnd(start.index)
        assert all(isinstance(event, ArgumentsDelta) for event in own[1:-1])


PATCH = "*** Begin Patch\n*** Update File: a.py\n@@\n-x = \"1\"\n+x = '2' < 3\n*** End Patch"


@pytest.mark.parametrize("text", [
    call("apply_patch", input=PATCH),
    "<tool_call>\n<function=apply_patch>\n" + PATCH + "\n</function>\n</tool_call>",
    "<tool_call>\n" + json.dumps({"name": "apply_patch", "arguments": {"input": PATCH}}) + "\n</tool_call>",
    "<tool_call>\n" + json.dumps({"arguments": {"input": PATCH}, "name": "apply_patch"}) + "\n</tool_call>",
])
def test_T23_custom_tools_get_raw_text(text):
    tools = [*TOOLS, {"type": "custom", "name": "apply_patch"}]
    whole = fed([text], tools)
    assert whole == [CallStart(0, "call_1", "apply_patch"), ArgumentsDelta(0, PATCH), CallEnd(0)]
    for pieces in ([text[:at], text[at:]] for at in range(len(text))):
        assert fed(pieces, tools) == whole
    assert fed(list(text), tools) == whole


@pytest.mark.parametrize("text", [
    call("list_tasks"), "<tool_call>\n<function=list_tasks></function>\n</tool_call>", "<tool_call><function=list_tasks>",
    '<tool_call>\n{"name": "list_tasks"}\n</tool_call>',
    '<tool_call>\n{"name": "list_tasks", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "list_tasks", "arguments": null}\n</tool_call>', "<function=list_tasks>\n</function>",
])
def test_T24_a_tool_without_arguments(text):
    assert parsed(text) == [("list_tasks", {})]


def test_T25_calls_work_with_nothing_but_the_tools():
    start, delta, end = ToolCallParser(TOOLS).push(CALLS[0])
    assert start.name == "bash" and start.id.startswith("call_") and len(start.id) == 29
    assert (delta, end) == (ArgumentsDelta(0, '{"command": "ls"}'), CallEnd(0))
    assert ToolCallParser(TOOLS).push(CALLS[0])[0].id != start.id


# ---- the 28 XML cases: types, drift, escaping

WRITE = "<tool_call>\n<function=write>\n<parameter=file_path>\na.py\n</parameter>\n<parameter=content>\n"
CLOSED = "\n</parameter>\n</function>\n</tool_call>"
KINDS = {"s": STRING, "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"}, "a": {"type": "array"},
         "o": {"type": "object"}, "u": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "x": {}}
VALUES = [      # parameter of `kinds`, its text, its value
    ("string", "s", "Oslo", "Oslo"), ("string of digits", "s", "42", "42"), ("string of JSON", "s", '{"a": 1}', '{"a": 1}'),
    ("empty string", "s", "", ""), ("integer", "i", "42", 42), ("number", "n", "-2.5", -2.5), ("boolean", "b", "true", True),
    ("Python boolean", "b", "False", False), ("array", "a", '["x", 1]', ["x", 1]),
    ("object", "o", '{"k": null}', {"k": None}),
    ("Python array", "a", "['x', None]", ["x", None]), ("null in a union", "u", "null", None), ("untyped", "x", "7", 7),
    ("unicode", "s", "😀 👨‍👩‍👧 漢字", "😀 👨‍👩‍👧 漢字"), ("quotes and backslashes", "s", 'a "b" \\n \\', 'a "b" \\n \\'),
    ("entities", "s", "&lt;b&gt; &amp;", "&lt;b&gt; &amp;"), ("HTML", "s", "<p>a</p>\n<br/>", "<p>a</p>\n<br/>"),
    ("indentation", "s", "    if x:\n        y\n\n", "    if x:\n        y\n\n"),
    ("leading line break", "s", "\n\nx", "\n\nx"),
]
TEXTS = [       # texts of calls, and the arguments
    ("no line breaks", "<tool_call><function=bash><parameter=command>ls</parameter></function></tool_call>", LS[1]),
    ("no wrapper", CALLS[0][12:-13], LS[1]),
    ("no </tool_call>", CALLS[0][:-13], LS[1]),
    ("no last </parameter>", CALLS[0].replace("</parameter>\n", ""), LS[1]),
    ("</parameter/>", CALLS[0].replace("</parameter>", "</parameter/>"), LS[1]),
    ('<function name="f">', CALLS[0].replace("<function=bash>", '<function name="bash">'), LS[1]),
    ("closing tag in a value", WRITE + 'x = "</parameter>"' + CLOSED,
     {"file_path": "a.py", "content": 'x = "</parameter>"'}),
    ("tags in a value", WRITE + CALLS[1] + CLOSED, {"file_path": "a.py", "content": CALLS[1]}),
    ("wrapper in a value", WRITE + "a <tool_call> b\n</tool_call>\nc" + CLOSED,
     {"file_path": "a.py", "content": "a <tool_call> b\n</tool_call>\nc"}),
]


def test_there_are_28_cases():
    assert len(VALUES) + len(TEXTS) == 28


@pytest.mark.parametrize("name, key, text, value", VALUES, ids=[case[0] for case in VALUES])
def test_28_values(name, key, text, value):
    assert parsed(call("kinds", **{key: text}), [declare("kinds", KINDS)]) == [("kinds", {key: value})]


@pytest.mark.parametrize("name, text, arguments", TEXTS, ids=[case[0] for case in TEXTS])
def test_28_texts(name, text, arguments):
    (_, made), = parsed(text)
    assert made == arguments


# ---- what a value may hold

@pytest.mark.parametrize("content", [
    "a </parameter> b", "b </function>", "b </tool_call>", "b <parameter=file_path>",
    'x = "</parameter></function></tool_call>"', "a\n</parameter>\nb", "</function>\nx",
    "x\n</tool_call>\ny", "<parameter=x>", "<parameter name=\"x\">\n1\n</parameter>\n<parameter name=\"y\">2</parameter>",
    CALLS[0], "Example:\n" + CALLS[0] + "\nand\n" + CALLS[1] + "\nend", "<tool_call>\n{\"name\": 1}\n</tool_call>\nx",
    "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>",
    "print('<function=f><parameter=a>1</parameter></function>')",
    "<tool_call", "</", "<", "a\n<", "\n", "\n\n", " ", "```\n" + CALLS[0] + "\n```", "<think>\nx\n</think>\n\n",
])
def test_values_keep_tags(content):
    assert parsed(WRITE + content + CLOSED) == [("write", {"file_path": "a.py", "content": content})]
    assert parsed(WRITE + content + CLOSED + "\nDone.") == [("write", {"file_path": "a.py", "content": content}), "\nDone."]


def test_names_that_only_the_declaration_knows():
    tools = [declare("f.g:h/i", {"a b": STRING, "x=y": STRING, "é": {"type": "integer"}, 'q"': STRING})]
    given = {"a b": "1", "x=y": "2", "é": 3, 'q"': "4"}
    assert parsed(call("f.g:h/i", **given), tools) == [("f.g:h/i", given)]


def test_values_keep_a_parameter_in_the_middle_of_a_line():
    for command in ("a <parameter=description> b", "a\n<parameter=nobody> b"):
        assert parsed(call("bash", command=command)) == [("bash", {"command": command})]


# ---- declared tools only

@pytest.mark.parametrize("text", [
    call("unknown", city="Oslo"), call("Bash", command="rm"), call("unknown", text=CALLS[0]), call("unknown") + "\nok",
    "<function=unknown>\n<parameter=command>\nls\n</parameter>\n</function>",
    '<tool_call>\n{"name": "unknown"}\n</tool_call>',
    '<tool_call>\n{"name": "unknown", "arguments": {"command": "ls"}}\n</tool_call>',
    '{"name": "unknown", "arguments": {"command": "ls"}}', "<tool_call>\n[1, 2]\n</tool_call>",
    "<tool_call>\n<function=>\n<parameter=where>\nls\n</parameter>\n</function>\n</tool_call>",
])
def test_undeclared_calls_are_text_in_full(text):
    assert "".join(parsed(text)) == text
    *shown, last = parsed(text + "\n\n" + CALLS[0])
    assert "".join(shown) == text + "\n\n" and last == LS


# ---- several calls

def test_white_space_around_calls_is_syntax():
    assert parsed("\n\n" + CALLS[0] + "\n" + CALLS[0] + "\n\n") == [LS, LS]
    assert parsed("  \n" + CALLS[0] + "\n x") == [LS, "\n x"]


def test_only_the_first_call_where_one_is_allowed():
    text = "A\n" + CALLS[0] + "\n" + CALLS[1] + '\n{"name": "read", "arguments": {"file_path": "x"}}\nB'
    assert parsed(text, parallel=False) == ["A\n", LS, "\nB"]
    parser = ToolCallParser(TOOLS, counter(), parallel=False)
    parser.push(text)
    weather, read = parser.dropped
    assert CALLS[1].startswith(weather) and "\n3\n" in weather and '"file_path": "x"' in read


def test_a_call_that_the_text_cut_off_is_marked():
    def end(text):
        return [event.complete for event in fed([text]) if isinstance(event, CallEnd)]
    assert end(CALLS[0]) == [True] == end(CALLS[0][:-13]) == end('{"name": "bash", "arguments": {"command": "ls"}}')
    assert end(CALLS[0][:-40]) == [False] == end('{"name": "bash", "arguments": {"command": "l')
    assert end(CALLS[0][:-40] + "\n" + CALLS[0]) == [False]         # an open value takes a call for an example


# ---- JSON arguments

@pytest.mark.parametrize("text, arguments", [
    ('{"name": "bash", "arguments": {"command": "a \\"b\\" \\\\ \\u00e9\\n"}}', {"command": 'a "b" \\ é\n'}),
    ('{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}', LS[1]),
    ('{"name": "bash", "parameters": {"command": "ls"}}', LS[1]),
    ('{"arguments": {"command": "ls"}, "name": "bash"}', LS[1]),
    ('{"id": "1", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}', LS[1]),
    ('{"name": "bash", "command": "ls"}', LS[1]),
    ('{"name": "bash", "arguments": {"command": "ls"}', LS[1]),
    ('{"name": "bash", "arguments": {"command": "ls"', LS[1]),
    ('{"name": "ask", "arguments": {"questions": [{"a": [1, 2, {"b": null}]}], "options": {}}}',
     {"questions": [{"a": [1, 2, {"b": None}]}], "options": {}}),
])
def test_json_form(text, arguments):
    for wrapped in (f"<tool_call>\n{text}\n</tool_call>", f"<tool_call>{text}</tool_call>", f"<tool_call>\n{text}"):
        (_, made), = parsed(wrapped)
        assert made == arguments
    assert parsed(f"<tool_call>\n{text}\n</tool_call>\nDone.")[1:] == ["\nDone."]


def test_json_form_keeps_what_stands_beside_the_arguments():
    assert parsed('{"name": "bash", "arguments": {"command": "ls"}, "why": "x"}') == [LS, ', "why": "x"}']
    assert parsed('{"name": "bash", "why": "x", "arguments": {"command": "ls"}}') == [LS, '{"why": "x"}']


def test_json_arguments_inside_a_function():
    assert parsed('<tool_call>\n<function=bash>\n{"command": "ls"}\n</function>\n</tool_call>') == [LS]
    assert parsed('<tool_call>\n<function=bash>\n{"command": "ls"}}\n</function>\n</tool_call>ok') == [LS, "ok"]
    assert parsed('<tool_call>\n<function=bash>\n{"name": "bash", "arguments": {"command": "ls"}}\n</function>') == [LS]
    assert parsed('<function=bash>{"command": "ls"</parameter>{"command": "x"}') == [LS, '{"command": "x"}']
    more = "<parameter=description>\nx\n</parameter>"
    assert parsed('<function=bash>\n{"command": "ls"}\n' + more + "\n</function>") == [LS, more]


@pytest.mark.parametrize("given", [{"input": "x"}, {"input": {"a": 1}}, {"name": "x", "input": "y"}])
def test_arguments_that_are_called_like_the_form(given):
    tools = [declare("f", {"input": {}, "name": STRING})]
    assert parsed(json.dumps({"function": "f", **given}), tools)[0][0] == "f"
    assert parsed(json.dumps({"name": "f", "arguments": given}), tools) == [("f", given)]
    assert parsed(call("f", **given), tools) == [("f", given)]


def test_a_parameter_that_is_called_arguments():
    text = call("f", arguments='{"a": 1}')
    assert parsed(text, [declare("f", {"a": {}})]) == [("f", {"a": 1})]
    assert parsed(text, [declare("f", {"arguments": {"type": "object"}})]) == [("f", {"arguments": {"a": 1}})]
    assert parsed(text, [declare("f", {"arguments": STRING})]) == [("f", {"arguments": '{"a": 1}'})]


# ---- streaming: nothing waits longer than it must

def test_strings_leave_while_they_grow():
    parser = ToolCallParser(TOOLS, counter())
    assert parser.push("Look.\n\n<tool") == [Text("Look.\n\n")]
    assert parser.push("_call>\n<function=write>") == [CallStart(0, "call_1", "write")]
    assert parser.push("\n<parameter=content>\nx = ") == [ArgumentsDelta(0, '{"content": "x = ')]
    assert parser.push('"a"\n') == [ArgumentsDelta(0, '\\"a\\"')]
    assert parser.push("y") == [ArgumentsDelta(0, "\\ny")]
    assert parser.push("\n</parameter>\n<parameter=file_path>\na") == [ArgumentsDelta(0, '", "file_path": "a')]
    assert parser.push("\n</parameter>\n</function>") == [ArgumentsDelta(0, '"}'), CallEnd(0)]
    assert parser.push("\n</tool_call>") == [] == parser.finish()


def test_other_types_leave_whole():
    parser = ToolCallParser(TOOLS, counter())
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=days>\n")
    assert parser.push("1") == [] == parser.push("2\n</para")
    assert parser.push("meter>\n") == []
    assert parser.push("<parameter=") == [ArgumentsDelta(0, '{"days": 12')]


def test_json_leaves_while_it_grows():
    parser = ToolCallParser(TOOLS, counter())
    assert parser.push('<tool_call>\n{"name": "bash", "arguments": {"com')[0] == CallStart(0, "call_1", "bash")
    assert parser.push('mand": "l') == [ArgumentsDelta(0, 'mand": "l')]
    assert parser.push('s -l"') == [ArgumentsDelta(0, "s -l")]
    assert parser.push("}}") == [ArgumentsDelta(0, '"}'), CallEnd(0)]


def test_plain_text_never_waits():
    parser = ToolCallParser(TOOLS, counter())
    for piece in ("Hello", " wor", "ld:\n", "```py\n", "x = {1: `2`}\n", "a <", " b", "\n- item"):
        assert sum(len(event.text) for event in parser.push(piece)) >= len(piece) - 1


# ---- cost: a text twice as long takes twice the steps, and what waits stays short

def steps(text, **tools):
    """Lines of the server's code that a text takes, fed by characters, and the most text that ever waited."""
    count, waiting = 0, 0
    parser = ToolCallParser(TOOLS, counter())

    def trace(frame, event, _):
        nonlocal count
        count += event == "line"
        return trace if "/server/" in frame.f_code.co_filename else None
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for c in text:
            parser.push(c)
            waiting = max(waiting, len(parser.buffer))
        parser.finish()
    finally:
        sys.settrace(before)
    return count, waiting


GROWING = {
    "prose": ("", "All is well, said <b>he</b>. `x`\n"),
    "white space": ("", " \n"),
    "angles": ("", "<"),
    "openers": ("", "<tool_call>\n"),
    "openers in code": ("`", "<tool_call>"),
    "parameters of nobody": ("\n", "<parameter=x>\n"),
    "braces": ("", "{\n"),
    "dangling names": ("", '{"name":\n'),
    "string value": (WRITE, "x = '<a>' + \"b\"\n"),
    "closing tags in a value": (WRITE, "</parameter>\n"),
    "white space in a value": (WRITE + "</parameter>", " \n"),
    "openers in a value": (WRITE, "<tool_call>\n<function=f>\n<parameter=a>\n"),
    "array value": ("<tool_call>\n<function=ask>\n<parameter=questions>\n[", '{"a": "b"},\n'),
    "undeclared call": ("<tool_call>\n<function=nobody>\n<parameter=a>\n", "text </b>\n"),
    "nameless call": ("<tool_call>\n<parameter=command>\n", "ls\n"),
    "closing tags behind a call": (CALLS[0], "\n</function>"),
    "JSON string": ('{"name": "bash", "arguments": {"command": "', "a 'b' \\n\n"),
    "JSON quotes": ('{"name": "bash", "arguments": {"command": "', '", "a'),
    "JSON depth": ('{"name": "ask", "arguments": {"options": ', '{"a": ['),
    "JSON object": ('<tool_call>\n{"a": "', "text, "),
}


@pytest.mark.parametrize("name", GROWING)
def test_cost_is_linear(name):
    head, unit = GROWING[name]
    times = max(1, 400 // len(unit))
    (once, wait), (thrice, wait_more) = (steps(head + unit * times * n) for n in (1, 3))
    base, _ = steps(head)
    assert thrice - base <= 3.3 * (once - base) + 2000
    assert max(wait, wait_more) <= 1100


def test_every_way_notices_a_difference():
    """The check itself: a feed that depends on the pieces fails."""
    with pytest.raises(AssertionError):
        every_way("abc", lambda pieces: [Text("|".join(pieces))])
