"""T-20: calls in the forms that models drift into are recovered, for a declared tool and for no other.

One fixture for each of the 22 modes that public engines have catalogued on this model family, then what was seen in
between. Each goes through every split; its twin with an undeclared name, or with arguments that fit no tool or several,
is text in full.
"""
import pytest

from tool_texts import TOOLS, call, declare, parsed

READ, LS = ("read", {"file_path": "/a.ts"}), ("bash", {"command": "ls", "description": "List"})
PARAMETERS = "<parameter=file_path>\n/a.ts\n</parameter>\n"
ARGUMENTS = '{"file_path": "/a.ts"}'
CODE = 'a := []string{"x", "y"}\nfmt.Println("hi")\n'

MODES = {   # text, calls, and what stands beside them
    "1 no wrapper": ('{"name": "read", "arguments": ' + ARGUMENTS + "}", [READ]),
    "2 unfinished": ('{"name": "read", "arguments": {"file_path": "/a.ts', [READ]),
    "3 tagged value": ('{"name": "write", "arguments": {"file_path": "a", "content": <content>x = "1"\n</content>}}',
                       [("write", {"file_path": "a", "content": 'x = "1"\n'})]),
    "4 wrapper as a key": ('{"tool_call":\n{"name": "read", "arguments": ' + ARGUMENTS + "}}\n</tool_call>", [READ]),
    "5 raw line breaks": ('{"name": "write", "arguments": {"file_path": "a", "content": "1\n\t2"}}',
                          [("write", {"file_path": "a", "content": "1\n\t2"})]),
    "6 no name": ('{"name":\n' + ARGUMENTS + "}", [READ]),
    "7 no name, a shell": ('{"name":\n{"function": {"command": "ls", "description": "List"}}}', [LS]),
    "8 name under another key": ('{"function": "read", "arguments": ' + ARGUMENTS + "}", [READ]),
    "9 half-quoted key": ('{"name":"read",\narguments":' + ARGUMENTS + "}", [READ]),
    "10 no beginning": ('read", "file_path": "/a.ts"}', [READ]),
    "11 unescaped code": ('{"name": "write", "arguments": {"content": "' + CODE + '", "file_path": "m.go"}}',
                          [("write", {"content": CODE, "file_path": "m.go"})]),
    "12 unquoted name": ('{"name": read, "arguments": ' + ARGUMENTS + "}", [READ]),
    "13 cut in an escape": ('{"name": "read", "arguments": {"file_path": "/a.ts\\u00', [READ]),
    "14 tool_name tags": ("<tool_name>read</tool_name>\n<parameter=file_path>/a.ts</parameter>\n"
                          '<tool_name>bash</tool_name>\n<parameter=arguments>\n'
                          '{"command":"ls","description":"List"}}', [READ, LS]),
    "15 name tag, then JSON": ('<name>bash, "arguments": {"command":"ls","description":"List"}}', [LS]),
    "16 function tag, then JSON": ('<function>\n{"name": "read", "arguments": ' + ARGUMENTS + "}", [READ]),
    "17 JSON, then parameters": ('{"name": "read",\n' + PARAMETERS, [READ]),
    "18 name tag, stray closer": ("<name>read\n</parameter>\n" + PARAMETERS + "</function>", [READ]),
    "19 name as an attribute": ('<function name="read">\n' + PARAMETERS + "</function>", [READ]),
    "20 nameless batch": ("<tool_calls>\n<tool_name>\n" + PARAMETERS + "</function>\n<tool>\n<tool_name>\n" + PARAMETERS
                          + "</function>\n</tool_call>", [READ, READ]),
    "21 parameters alone": (PARAMETERS + "</function>", [READ]),
    "22 function as a parameter": ("<parameter=read>\n" + PARAMETERS + "</function>\n<parameter=read>\n" + PARAMETERS
                                   + "</function>\n", [READ, READ]),
    "quoted name": ('<function="read">\n' + PARAMETERS + "</function>", [READ]),
    "single-quoted attribute": ("<function name='read'>\n<parameter name='file_path'>/a.ts</parameter></function>", [READ]),
    "invoke": ('<function_calls>\n<invoke name="read">\n<parameter name="file_path">/a.ts</parameter>\n</invoke>\n'
               "</function_calls>", [READ]),
    "name on the next line": ("<name>\nread\n</parameter>\n" + PARAMETERS + "</function>", [READ]),
    "closed name tag": ("<name>read</name>\n" + PARAMETERS + "</function>", [READ]),
    "name attribute, then JSON": ('<name="read", "arguments": ' + ARGUMENTS + "}", [READ]),
    "name without its first quote": ('{"name": read", "arguments": ' + ARGUMENTS + "}", [READ]),
    "dangling beginning": ('{"name":\n{"name": "read", "arguments": ' + ARGUMENTS + "}\n</tool_call>", [READ]),
    "in the middle of a line": ("<function=read>\n" + PARAMETERS + "</function>", [READ]),
    "empty function": ("<function=>\n" + PARAMETERS + "</function>", [READ]),
    "function tag, then a function": ("<function>\n<function=read>\n" + PARAMETERS + "</function>", [READ]),
    "function twice in one wrapper": (call("read", file_path="/a.ts").replace("\n</tool_call>", "\n<function=read>\n")
                                      + PARAMETERS + "</function>\n</tool_call>", [READ, READ]),
    "mixed in one wrapper": (call("read", file_path="/a.ts").replace("\n</tool_call>", "\n<parameter=read>\n") + PARAMETERS
                             + "</function>\n</tool_call>", [READ, READ]),
    "wrapper not closed": ("<tool_call>\n<function=read>\n" + PARAMETERS + "</function>\n<tool_call>\n<parameter=read>\n"
                           + PARAMETERS + "</function>", [READ, READ]),
    "wrapper of wrappers": ("<tool_calls>\n" + call("read", file_path="/a.ts") + "\n</tool_calls>", [READ]),
}


@pytest.mark.parametrize("mode", MODES)
def test_T20_recovered(mode):
    text, calls = MODES[mode]
    assert parsed(text) == calls
    before = "Let me look: " if "middle" in mode else "Let me look.\n\n"
    assert parsed(before + text) == [before, *calls]


@pytest.mark.parametrize("mode", MODES)
def test_T20_recovered_inside_the_wrapper(mode):
    text, calls = MODES[mode]
    assert parsed(f"<tool_call>\n{text}") == calls
    if not mode.startswith(("2 ", "13 ", "10 ")):
        assert parsed(f"<tool_call>\n{text}\n</tool_call>") == calls


@pytest.mark.parametrize("mode", MODES)
def test_T20_undeclared_is_text(mode):
    """The same with tools that are none of these."""
    text, _ = MODES[mode]
    others = [declare("other", {"x": {"type": "string"}})]
    for full in (text, f"<tool_call>\n{text}\n</tool_call>", f"Look:\n\n{text}\nSo."):
        assert "".join(parsed(full, others)) == full


NAMELESS = {
    "fits no tool": "<parameter=where>\nx\n</parameter>\n</function>",
    "a key too many": PARAMETERS + "<parameter=where>\nx\n</parameter>\n</function>",
    "a required key missing": "<parameter=content>\nx\n</parameter>\n</function>",
    "not closed": PARAMETERS,
    "prose between": PARAMETERS + "and\n</function>",
    "JSON that fits no tool": '{"name":\n{"where": "x"}}',
    "JSON unfinished": '{"name":\n{"file_path": "x"',
}


@pytest.mark.parametrize("case", NAMELESS)
def test_T20_nameless_is_text_unless_its_arguments_tell(case):
    assert "".join(parsed(NAMELESS[case])) == NAMELESS[case]


def test_T20_a_parameter_may_be_called_like_a_tool():
    tools = [*TOOLS, declare("grep", {"read": {"type": "string"}}, ["read"])]
    assert parsed("<parameter=read>\nx\n</parameter>\n</function>", tools) == [("grep", {"read": "x"})]
    assert parsed(call("grep", read="<parameter=read>"), tools) == [("grep", {"read": "<parameter=read>"})]


def test_T20_a_tie_is_text():
    twins = [*TOOLS, declare("view", {"file_path": {"type": "string"}}, ["file_path"])]
    for mode in ("6 no name", "20 nameless batch", "21 parameters alone"):
        text, _ = MODES[mode]
        assert "".join(parsed(text, twins)) == text
    assert parsed("<parameter=command>\nls\n</parameter>\n<parameter=description>\nList\n</parameter>\n</function>") == [LS]


@pytest.mark.parametrize("text", [
    "<tool_calls>\n<result>\n<name>bash</name>\n<output>total 40\n</output>\n</result>\n</tool_calls>",
    "<tool_response>\n{\"file_path\": \"/a.ts\"}\n</tool_response>",
    "Use {\"name\": \"read\", \"arguments\": {\"file_path\": \"/a.ts\"}} for that.",
    "Then <function=unknown>\n<parameter=file_path>\n/a.ts\n</parameter>\n</function>",
    "Then <function=read> and\n<parameter=file_path> and </function>",
    "Then <function=read> <parameter=file_path>/a.ts</parameter> </function>",
    "```\n{\"name\": \"read\", \"arguments\": {\"file_path\": \"/a.ts\"}}\n```",
    "```xml\n" + PARAMETERS + "</function>\n```",
    "    <function=read><parameter=file_path>/a.ts</parameter></function>",
    "the schema uses\n<parameter=file_path> for the target",
    "<name>read the file</name>",
    "read\", he said, and left",
    "<function=read> is the form",
    "{\"name\": \"Ann\", \"function\": \"read\"}",
    "{\"name\": {\"first\": \"Ann\", \"last\": \"Lee\"}, \"age\": 3}",
])
def test_T20_what_is_no_call(text):
    assert "".join(parsed(text)) == text


@pytest.mark.parametrize("text", [
    "<tool_call>\n<parameter=where>\n", "<tool_call>\n{\"where\": \"x", "{\"name\": {\"where\": \"x", PARAMETERS + "and ",
    "<tool_call>\n<tool_name>\n<parameter=content>\nx",
])
def test_T20_what_was_held_in_vain_hides_no_call_behind_it(text):
    *shown, last = parsed(f"{text}\n\n{call('read', file_path='/a.ts')}")
    assert "".join(shown) == text + "\n\n" and last == READ
