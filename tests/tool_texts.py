"""What the tests of tool calls share: declared tools, a parser fed in pieces, events to read, ways of cutting a text."""
import json
import random
import re

from qwentin.server.toolcall import ToolCallParser
from qwentin.server.toolevents import ArgumentsDelta, CallEnd, CallStart, Reasoning, Text, joined

STRING = {"type": "string"}
# a token of a tokenizer, near enough: the form's tags are one, words carry the space before them
TOKEN = re.compile(r"</?(?:tool_call|think)>| ?\w+|[^\w\s]|\s")


def declare(name, properties=None, required=(), **schema):
    parameters = {"type": "object", "properties": properties or {}, "required": list(required), **schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    declare("get_weather", {"city": STRING, "days": {"type": "integer"}}, ["city"]),
    declare("bash", {"command": STRING, "description": STRING}, ["command"]),
    declare("monitor", {"command": STRING, "description": STRING, "until": STRING}, ["command", "until"]),
    declare("read", {"file_path": STRING}, ["file_path"]),
    declare("write", {"file_path": STRING, "content": STRING}, ["file_path", "content"]),
    declare("ask", {"questions": {"type": "array", "items": {"type": "object"}}, "options": {"type": "object"}}),
    declare("list_tasks"),
]


def counter():
    """Identifiers call_1, call_2, ..."""
    made = []

    def new_id():
        made.append(f"call_{len(made) + 1}")
        return made[-1]
    return new_id


def call(name, /, **arguments):
    """The template's form of a call."""
    lines = "".join(f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n"
                    for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


def fed(pieces, tools=TOOLS, **options):
    """All events of a text that arrives in these pieces, neighbours joined."""
    return drive(ToolCallParser(tools, counter(), **options), pieces)


def drive(parser, pieces, **end):
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined(events + parser.finish(**end))


def readable(events):
    """Texts as strings, calls as (name, arguments), thoughts as ("thought", text). Checks what holds of all events."""
    out, open_call, count = [], None, 0
    for event in events:
        if isinstance(event, CallStart):
            assert open_call is None and event.index == count and event.id == f"call_{count + 1}"
            open_call, count = (event.name, []), count + 1
        elif isinstance(event, ArgumentsDelta):
            assert event.index == count - 1 and event.fragment
            open_call[1].append(event.fragment)
        elif isinstance(event, CallEnd):
            assert event.index == count - 1
            arguments = json.loads("".join(open_call[1]), parse_constant=not_json)
            assert isinstance(arguments, dict)
            out.append((open_call[0], arguments))
            open_call = None
        else:
            assert isinstance(event, (Text, Reasoning)) and event.text and open_call is None
            out.append(event.text if isinstance(event, Text) else ("thought", event.text))
    assert open_call is None
    return out


def not_json(name):
    raise AssertionError(f"{name} in arguments")


def chunks(text, rng, most=4):
    """The text in pieces of 1 to `most` tokens."""
    tokens = TOKEN.findall(text)
    assert "".join(tokens) == text
    while tokens:
        size = rng.randint(1, most)
        yield "".join(tokens[:size])
        tokens = tokens[size:]


def every_way(text, feed):
    """What `feed` makes of the text, the same for all 2-chunk splits, character by character, and in random chunks."""
    whole = feed([text])
    for at in range(1, len(text)):
        assert feed([text[:at], text[at:]]) == whole, (text[:at], text[at:])
    assert feed(list(text)) == whole
    rng = random.Random(text)
    for _ in range(10):
        pieces = list(chunks(text, rng))
        assert feed(pieces) == whole, pieces
    return readable(whole)


def parsed(text, tools=TOOLS, **options):
    return every_way(text, lambda pieces: fed(pieces, tools, **options))
