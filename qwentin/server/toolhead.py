"""Where a tool call begins: the form of the template, and the forms that models drift into.

The template's form, and the JSON form that earlier Qwen models learned, inside the same tags:

    <tool_call>                          <tool_call>
    <function=get_weather>               {"name": "get_weather", "arguments": {"city": "Oslo"}}
    <parameter=city>                     </tool_call>
    Oslo
    </parameter>
    </function>
    </tool_call>

Seen besides, each with or without <tool_call> in front (without it only outside code, at the start of a line, and with
more of the form after it):

    <function name="F">  <function="F">  <invoke name="F">      the name as an attribute
    <function>{"name": "F", ...                                JSON in the other form's tag
    <tool_name>F</tool_name>  <name>F</name>  <name>F          the name in a tag of its own
    <name>F, "arguments": {  <name="F", "arguments": {         a tag that turns into JSON
    {"name": "F", <parameter=k>                                JSON that turns into tags
    <parameter=F><parameter=k>                                 the function as a parameter
    <function=><parameter=k>  <tool_name><parameter=k>  <parameter=k>       no name at all: the keys must tell
    {"tool_call": {...  {"name": {...  {"name": F, ...         JSON in a shell, without quotes, without a name
    {"function": "F", ...                                      the name under another key
    F", "k": ...                                               JSON without its beginning

Only a declared name makes a call. An undeclared one in the template's form is a call to nothing: its text is kept whole.
`head` names what stands at a place; it never consumes. Used by toolcall.py; proven by tests/test_toolcall.py.
"""
import re
from dataclasses import dataclass

from .lookahead import Lookahead
from .toolschema import Tool, Toolbox

XML, JSON, OBJECT = "xml", "json", "object"     # parameters in tags; an argument object; an object that names the tool
WRAPPER = "<tool_call>"
SHELLS = ("<tool_calls>", "<function_calls>", "<tool_use>", "<tool>")       # wrappers of other formats, never needed
NAME = re.compile(r"[^\s<>=\"',{}]{0,128}")
BLANK = re.compile(r"[ \t]{0,64}")
WORD = re.compile(r"[^\s\"'\\:,{}\[\]<>]{0,128}")
NAME_KEYS = ("name", "function", "tool", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters", "input")
SHELL_KEYS = ("tool_call", *NAME_KEYS, *ARGUMENT_KEYS)


@dataclass(frozen=True)
class Head:
    """A call begins here.

    form     how the rest is read: XML, JSON or OBJECT
    name     of the tool, None if the text does not say it
    end      the place after the head
    tool     the declared tool of that name
    prefix   text that was left out before `end` (OBJECT)
    infer    the tool may be told by its arguments (OBJECT)
    """
    form: str
    name: str | None
    end: int
    tool: Tool | None = None
    prefix: str = ""
    infer: bool = False


MALFORMED = ""      # the name of a parameter tag that has none


def parameter(r: Lookahead) -> str | None:
    """Step over <parameter=name>; its name, MALFORMED (then only over its beginning), or None if it is no such tag."""
    if not r.lit("<parameter"):
        return None
    if not r.lit("="):
        return quoted_name(r) if r.lit(" name=") else None
    return quoted_name(r) if r.peek() in ('"', "'") else closed_name(r)


def closed_name(r: Lookahead) -> str:
    name = r.run(NAME)
    r.run(BLANK)
    return name if name and r.lit(">") else MALFORMED


def quoted_name(r: Lookahead) -> str:
    quote = r.peek()
    r.at += 1
    name = r.run(NAME) if quote in ('"', "'") else ""
    if not name or not r.lit(quote):
        return MALFORMED
    r.run(BLANK)
    return name if r.lit(">") else MALFORMED


def function(r: Lookahead) -> str | None:
    """Step over <function=name> or a tag of its kind; the name, MALFORMED or None."""
    if r.lit("<function="):
        return quoted_name(r) if r.peek() in ('"', "'") else closed_name(r)
    if r.lit("<function name=") or r.lit("<invoke name="):
        return quoted_name(r)
    return None


def opens_call(r: Lookahead) -> bool:
    """Does another call, or a parameter, begin here? A weak question, asked right after a closing tag."""
    return any(r.here().lit(tag) for tag in (WRAPPER, "<function=", "<function name=", "<invoke name=", "<tool_name>"))


def opens_form(r: Lookahead) -> bool:
    """Does the template's form begin here, without its wrapper: a function, and a parameter in the next line?"""
    return bool(function(r)) and r.lit("\n<parameter=")


def head(r: Lookahead, tools: Toolbox, wrapped: bool) -> Head | None:
    """The call that begins at r: the start of a line, a <tool_call>, or what opens_form says; `wrapped`: one is open."""
    for _ in range(4):
        tag = r.one_of((WRAPPER, *SHELLS))
        wrapped = wrapped or tag == WRAPPER
        if tag:
            r.space()
    start = r.peek()
    if start == "<":
        return tag_head(r, tools, wrapped)
    if start == "{":
        return json_head(r, tools, wrapped)
    return headless_json(r, tools)


def tag_head(r: Lookahead, tools: Toolbox, wrapped: bool) -> Head | None:
    if r.lit("<function>"):
        r.space()
        if r.peek() == "{":
            return json_head(r, tools, wrapped)
    name = function(r.here())
    if name:
        function(r)
        return xml_head(r, tools, name, wrapped)
    if r.lit("<function="):
        r.run(BLANK)
        r.lit(">")
        r.space()
    for tag, close in (("<tool_name>", "</tool_name>"), ("<name>", "</name>"), ("<name=", None)):
        if r.lit(tag):
            return named_head(r, tools, close)
    return parameter_head(r, tools, wrapped)


def xml_head(r: Lookahead, tools: Toolbox, name: str, sure: bool) -> Head | None:
    """A named call; one that is not `sure` must go on as a call does."""
    found = Head(XML, name, r.at, tools.get(name))
    if sure:
        return found
    r.space()
    return found if r.peek() == "{" or r.one_of(("<parameter", "</function>", "</invoke>")) else None


def named_head(r: Lookahead, tools: Toolbox, close: str | None) -> Head | None:
    """The name in a tag of its own, closed or not; or no name in it, but parameters after it."""
    r.one_of(('"', "'"))
    r.space()
    name = r.run(NAME)
    r.one_of(('"', "'"))
    r.run(BLANK)
    if r.lit(","):
        return arguments_head(r, tools, name)
    if close is None and not r.lit(">"):
        return None
    r.space()
    if close and name:
        r.one_of((close, "</parameter>"))
        r.space()
    end = r.at
    if name and tools.get(name) and r.one_of(("<parameter", "</function>")):
        return Head(XML, name, end, tools.get(name))
    return None if name or parameter(r) in (None, MALFORMED) else Head(XML, None, end)


def arguments_head(r: Lookahead, tools: Toolbox, name: str) -> Head | None:
    """`"arguments": {` after a declared name and its comma."""
    r.space()
    key = quoted_word(r)
    if key not in ARGUMENT_KEYS or not tools.get(name) or not colon(r) or r.peek() != "{":
        return None
    return Head(JSON, name, r.at, tools.get(name))


def parameter_head(r: Lookahead, tools: Toolbox, wrapped: bool) -> Head | None:
    """A parameter first: it is the function after all, or a call whose function is not named."""
    start = r.at
    name = parameter(r)
    if not name:
        return None
    after = r.here()
    after.space()
    if tools.get(name) and after.here().lit("<parameter"):
        return Head(XML, name, after.at, tools.get(name))
    return Head(XML, None, start) if wrapped or r.lit("\n") else None


def json_head(r: Lookahead, tools: Toolbox, wrapped: bool, depth: int = 0) -> Head | None:
    """An object that is a call, or may be one: {"name": "F", "arguments": { streams, other shapes are read whole."""
    whole = Head(OBJECT, None, r.at, infer=wrapped or depth > 0)
    r.at += 1
    r.space()
    key = quoted_word(r)
    if key not in SHELL_KEYS or not colon(r):
        return whole if wrapped else None
    if r.peek() == "{":
        if key in ("tool_call", "name", "function") and depth < 3:
            return json_head(r.here(), tools, wrapped, depth + 1) or Head(OBJECT, None, r.at, infer=True)
        return whole if wrapped else None
    name = quoted_word(r) if r.peek() == '"' else r.run(WORD)
    if key not in NAME_KEYS or not tools.get(name):
        return whole if wrapped else None
    r.space()
    if key == "name" and r.lit(","):
        r.space()
        if r.here().lit("<parameter"):
            return Head(XML, name, r.at, tools.get(name))
        if r.peek() == '"' and quoted_word(r) in ARGUMENT_KEYS and colon(r) and r.peek() == "{":
            return Head(JSON, name, r.at, tools.get(name))
    return whole


def headless_json(r: Lookahead, tools: Toolbox) -> Head | None:
    """`F", "key":` is an object whose beginning is missing."""
    start = r.at
    found = r.one_of([f'{name}"' for name in tools.tools])
    if found is None:
        return None
    r.space()
    if not r.lit(","):
        return None
    r.space()
    return Head(OBJECT, None, start, prefix='{"name": "') if r.peek() == '"' else None


def quoted_word(r: Lookahead) -> str | None:
    """Step over a short string in double quotes."""
    if not r.lit('"'):
        return None
    word = r.run(WORD)
    return word if r.lit('"') else None


def colon(r: Lookahead) -> bool:
    r.space()
    if not r.lit(":"):
        return False
    r.space()
    return True
