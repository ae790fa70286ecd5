"""10,000 generated answers through the tool-call parser: 5,000 whose outcome is known, 5,000 of any tags in any order.

Values hold tags, quotes, unicode, JSON and whole examples of calls; forms and drift are drawn for every call. Each answer
arrives whole, character by character, in random 1-4-token chunks and in random 2-chunk splits (all of these for the named
cases of test_toolcall.py and for 150 answers here). Wanted of every one: no crash, the same events, arguments that are
JSON, no character lost. Hypothesis draws, with a fixed seed.
"""
import json
import random

from hypothesis import given, settings, strategies as st

from qwentin.server.toolevents import ArgumentsDelta, CallStart, Reasoning, Text
from qwentin.server.answer import AnswerParser
from tool_texts import STRING, call, chunks, counter, declare, drive, every_way, fed, readable

TOOLS = [
    declare("write", {"path": STRING, "content": STRING, "mode": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
            ["path"]),
    declare("set_flags", {"flags": {"type": "array"}, "options": {"$ref": "#/$defs/O"}, "on": {"type": ["boolean", "null"]}},
            **{"$defs": {"O": {"type": "object"}}}),
    declare("ping"),
]
EXAMPLE = call("write", path="a", content="b")
FUZZ = settings(max_examples=5000, deadline=None, derandomize=True, database=None)
FEW = settings(FUZZ, max_examples=150)


def some_ways(text, feed, splits=3):
    """`every_way` with a sample of its splits."""
    rng, whole = random.Random(text), feed([text])
    assert feed(list(text)) == whole
    pieces = list(chunks(text, rng))
    assert feed(pieces) == whole, pieces
    for at in rng.choices(range(len(text) + 1), k=splits):
        assert feed([text[:at], text[at:]]) == whole, (text[:at], text[at:])
    return readable(whole)


def into(tools):
    return lambda pieces: fed(pieces, tools)


# ---- answers whose outcome is known

WORDS = ["def f(x):", "    return x", "\n", "\n\n", " ", "a", "Oslo", "\t", '"', "'", "\\", "\\n", "&amp;", "é", "😀", "漢字",
         "<b>", "</b>", "a < b", "x = {'k': [1]}", '{"k": [1, "a", null]}', "`", "```py", "<think>", "%s"]
TAGS = ['"</parameter>"', "'</function>'", "(<tool_call>)", "(</tool_call>)", '"<parameter=path>"', "</para", "<function=",
        "<", "\n" + EXAMPLE + "\n.", "'<function=f><parameter=a>1</parameter></function>'", "\n<parameter name=\"z\">\n"]
PLAIN_STRINGS = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)
STRINGS = st.lists(st.sampled_from(WORDS + TAGS), max_size=6).map("".join)
LEAVES = (st.none() | st.booleans() | st.integers(-9, 99)
          | st.sampled_from([*WORDS, "</parameter>", "\n</tool_call>"]))
DATA = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner,
                                                                                        max_size=2), max_leaves=5)
LISTS, OBJECTS = st.lists(DATA, max_size=3), st.dictionaries(st.sampled_from(["k", "é", "a b"]), DATA, max_size=2)


def arguments(strings):
    return st.one_of(
        st.fixed_dictionaries({"path": strings}, optional={"content": strings, "mode": st.integers(-5, 999) | st.none()})
        .map(lambda given: ("write", given)),
        st.fixed_dictionaries({}, optional={"flags": LISTS, "options": OBJECTS, "on": st.booleans() | st.none()})
        .map(lambda given: ("set_flags", given)),
        st.just(("ping", {})))


def spelled(value, python=False):
    """A parameter's text."""
    return value if isinstance(value, str) else repr(value) if python else json.dumps(value, ensure_ascii=False)


def xml(name, given, opener="<function={}>", python=False, inline=False):
    gap = "" if inline else "\n"
    body = "".join(f"<parameter={key}>{gap}{spelled(value, python)}{gap}</parameter>\n" for key, value in given.items())
    return f"{opener.format(name)}\n{body}</function>"


def as_json(name, given):
    return json.dumps({"name": name, "arguments": given}, ensure_ascii=False)


def wrapped(body):
    return f"<tool_call>\n{body}\n</tool_call>"


FORMS = {       # any value goes through these
    "template": lambda *c: wrapped(xml(*c)),
    "Python's spelling": lambda *c: wrapped(xml(*c, python=True)),
    "name as an attribute": lambda *c: wrapped(xml(*c, opener='<function name="{}">')),
    "quoted name": lambda *c: wrapped(xml(*c, opener='<function="{}">')),
    "no wrapper": lambda *c: xml(*c),
    "name in a tag": lambda *c: wrapped(xml(*c, opener="<tool_name>{}</tool_name>")),
    "bad parameter": lambda *c: wrapped(xml(*c, opener="<function={}>\n<parameter=\nBAD\n</parameter>")),
    "surplus closers": lambda *c: wrapped(xml(*c) + "\n</function>\n</function_invocation>\n</parameter>"),
    "wrapper not closed": lambda *c: "<tool_call>\n" + xml(*c),
    "JSON": lambda *c: wrapped(as_json(*c)),
    "JSON without wrapper": lambda *c: as_json(*c),
    "JSON in a function": lambda *c: wrapped(f"<function={c[0]}>\n{json.dumps(c[1])}\n</function>"),
    "JSON, arguments as text": lambda *c: wrapped(json.dumps({"name": c[0], "arguments": json.dumps(c[1])})),
    "JSON, name last": lambda *c: wrapped(json.dumps({"arguments": c[1], "name": c[0]}, indent=1)),
    "JSON in a shell": lambda *c: '{"tool_call":\n' + as_json(*c) + "}\n</tool_call>",
    "JSON after a name": lambda *c: wrapped(f'<name>{c[0]}, "arguments": {json.dumps(c[1])}}}'),
}
PLAIN_FORMS = {     # these take values without tags
    "in one line": lambda *c: wrapped(xml(*c, inline=True)),
    "last </parameter> missing": lambda *c: wrapped("".join(xml(*c).rsplit("</parameter>\n", 1))),
    "</function> missing": lambda *c: wrapped(xml(*c).removesuffix("\n</function>")),
    "</function>, </parameter>": lambda *c: wrapped("".join(xml(*c).rsplit("</parameter>\n", 1)) + "\n</parameter>"),
    "as a parameter": lambda *c: xml(*c, opener="<parameter={}>") if c[1] else xml(*c),
    "JSON, then parameters": lambda *c: wrapped(xml(*c, opener='{{"name": "{}",')) if c[1] else wrapped(as_json(*c)),
}
NEED_PARAMETERS = {"name in a tag"}


def form_of(forms, name, drawn):
    tool, given = drawn
    if name in NEED_PARAMETERS and not given:
        name = "template"
    if name == "in one line" and any(isinstance(v, str) and v != v.strip("\n") for v in given.values()):
        name = "template"
    return forms.get(name, FORMS["template"])(tool, given), (tool, given), name == "bad parameter"


def calls(forms, strings):
    return st.tuples(st.sampled_from(sorted(forms)), arguments(strings)).map(lambda drawn: form_of(forms, *drawn))


ANY_CALL, PLAIN_CALL = calls(FORMS, STRINGS), calls(PLAIN_FORMS, PLAIN_STRINGS)
PROSE = st.sampled_from([
    "Let me look.", "Done 😀", "Use `<tool_call>` for it, or <tool_call> as such.", "a < b & \"c\" {x: [1]}",
    "- one\n- two\n",
    "```xml\n" + EXAMPLE + "\n```", "~~~~\n<function=ping>\n</function>\n```\n~~~~", "    <function=ping></function>\n",
    "I'm ` odd", "The </tool_call> ends it", '{\n  "name": "Ann",\n  "arguments": 3\n}', "x\n<parameter=path> y",
    "<name>Ann</name> and <parameter=path> are tags", wrapped(xml("nobody", {"path": "x", "content": EXAMPLE})),
    wrapped(as_json("nobody", {"path": "x"})),
])


@st.composite
def known_answers(draw):
    """(text, what it is): prose and calls in turn, at most one prose between two calls."""
    text, expected = "", []
    for item in draw(st.lists(PROSE | ANY_CALL | PLAIN_CALL, min_size=1, max_size=3)):
        gap = "" if not text else "\n" if not isinstance(item, str) else "\n\n"
        if isinstance(item, str):
            said = gap + item
            text += said
        else:
            made, called, bad = item
            text += gap + made
            said = gap
        if expected and isinstance(expected[-1], str):
            expected[-1] += said
        else:
            expected.append(said)
        if not isinstance(item, str):
            expected += [called, "<parameter=\nBAD\n</parameter>"] if bad else [called]
    return text, [e for e in expected if not isinstance(e, str) or e.strip()]


def check_known(answer, ways):
    text, expected = answer
    assert ways(text, into(TOOLS)) == expected


@FUZZ
@given(known_answers())
def test_known_answers(answer):
    check_known(answer, some_ways)


@FEW
@given(known_answers())
def test_known_answers_in_every_split(answer):
    check_known(answer, every_way)


# ---- anything

SOUP = [
    "<tool_call>", "</tool_call>", "<function=write>", "<function=set_flags>", "<function=ping>", "<function=nobody>",
    "</function>", "<parameter=path>", "<parameter=content>", "<parameter=flags>", "<parameter=options>", "<parameter=",
    "<parameter=a b>", "</parameter>", "</parameter/>", "</function_invocation>", "<function name=\"write\">", "<function>",
    "<parameter name='path'>", "<name>write", "<tool_name>", "</tool_name>", "<parameter=write>", "<parameter=arguments>",
    "<tool_calls>", "<invoke name=\"ping\">", "write\", \"", '{"name": "write", "arguments": {', '{"name":',
    '{"function": "write",', '"path": "', '"content": "', '"', "'", "{", "}", "[", "]", ",", ":", '"}}', "}}", '", "', "\\",
    "\\u00", "\n", "\n", "\n", "\n", "\n\n", " ", "    ", "`", "```", "~~~", "<", "</", ">", "=", "True", "None", "1.5",
    "<content>", "</content>", "W", "W", "W", "W", "é", "😀", "<think>", "</think>", EXAMPLE,
]


@st.composite
def soups(draw):
    """Tags, quotes and brackets in any order, every word another one."""
    parts = draw(st.lists(st.sampled_from(SOUP), min_size=1, max_size=24))
    return "".join(f"w{number}w" if part == "W" else part for number, part in enumerate(parts))


def words_of(text):
    return [word for word in text.replace("w", " w").split() if word[1:].isdigit()]


def output_of(events):
    """All that came out, as text."""
    return " ".join(event.name if isinstance(event, CallStart) else getattr(event, "fragment", getattr(event, "text", ""))
                    for event in events if isinstance(event, (Text, Reasoning, CallStart, ArgumentsDelta)))


def check_soup(text, feed, ways):
    ways(text, feed)
    missing = set(words_of(text)) - set(words_of(output_of(feed([text]))))
    assert not missing, (missing, feed([text]))


@FUZZ
@given(soups())
def test_soups(text):
    check_soup(text, into(TOOLS), some_ways)


@FEW
@given(soups())
def test_soups_in_every_split(text):
    check_soup(text, into(TOOLS), every_way)


@settings(FUZZ, max_examples=1000)
@given(soups(), st.booleans(), st.booleans())
def test_soups_with_a_thought(text, thinking, cut):
    def feed(pieces):
        return drive(AnswerParser(thinking, TOOLS, counter()), pieces, cut=cut)
    check_soup(text, feed, some_ways)
