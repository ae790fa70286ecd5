r"""The form of tool calls as a grammar, so that a call that must come does come, and is one that its tool can take.

    <tool_call>
    <function=NAME>                         a declared name
    <parameter=KEY>                         declared keys in their order; required ones are there, others may be
    VALUE                                   what the schema says, where that can be said of bare text
    </parameter>
    </function>
    </tool_call>

A string stands bare: any text (its length and pattern kept to) up to its closing tag. Tags of the form inside a value are
ruled out: they could be read as its end. An enum is one of its values; what cannot be a string is JSON by its schema. A
value that may be a string among others is any text, and toolschema.py finds out what it is.
Written in llguidance's Lark (constraint.lark). Used by guidance.py; proven by tests/test_toolgrammar.py: whatever babbles
under it is read by toolcall.py as exactly the calls that it is, with arguments that their schemas accept.
"""
import json

from ..constraint import SPACE, lark, literal, pattern_in_lark
from .jsontext import dumps
from .toolschema import STRING, Tool, target, types_of

MOST_CALLS = 16             # of one answer that must call
MOST_EXTRAS = 16            # parameters of a tool that takes any
DEPTH = 16                  # of $ref and anyOf inside each other
# nothing that toolxml.py could take for the end of a value, or for a call inside of one
TAGS = r"<\/?(parameter[=>\s\/]|function[=>_\s]|tool_calls?>|function_calls?>|invoke[>\s])"
BARE = rf"~/(?s:.*)({TAGS})(?s:.*)/"
END = "\n</parameter>\n"
FREE = "free"
NUMBER = frozenset({"number", "integer"})
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "allOf")
# a number that a float can hold: of 1e9999 nothing but its text would be left
FINITE = r"/-?(0|[1-9][0-9]{0,99})(\.[0-9]{1,99})?([eE][+\-]?[0-9]{1,2})?/"


def calls_source(tools: list[Tool], most: int = MOST_CALLS, opened: bool = False, loose: bool = False,
                 answer: str | None = None) -> str:
    """The source of a grammar: 1 to `most` calls of these tools. `opened`: one call whose <tool_call> is there already; to
    a tool that is not strict it may be written in any way, as if the others were not strict either. `loose`: any text for
    every value. With `answer`, a source, the calls may be that instead."""
    rules = Rules(loose)
    bodies = " | ".join(rules.tool(tool) if tool.strict or not opened else rules.untyped(tool) for tool in tools)
    again = f'("\\n" call){{0,{most - 1}}}' if most > 1 else ""
    calls = "body" if opened else f"call {again}"
    start = f"start: {calls}" + ("" if answer is None else " | @answer")
    parts = {} if answer is None else {"answer": answer}
    return lark("\n".join([start, "call: <tool_call> body", f'body: "\\n" ({bodies}) </tool_call>',
                           *rules.lines]), **parts)


class Rules:
    """Rules of the tools so far, as lines of Lark."""

    def __init__(self, loose: bool):
        self.loose = loose
        self.lines = [f"{FREE}[lazy]: FREE {literal(END)}", f"FREE: /(?s:.*)/ & {BARE}"]
        self.count = 0

    def rule(self, body: str, attributes: str = "") -> str:
        self.count += 1
        self.lines.append(f"r{self.count}{attributes}: {body}")
        return f"r{self.count}"

    def tool(self, tool: Tool) -> str:
        """A rule for the tool's call, from <function= on to before </tool_call>."""
        keys = [*tool.properties, *sorted(tool.required - set(tool.properties))]
        parts = [self.parameter(tool, key) + ("" if key in tool.required else "?") for key in keys]
        if not keys and takes_any(tool.schema):
            key = self.rule(r"/[A-Za-z_][A-Za-z0-9_.\-]{0,63}/")
            parts.append(f'("<parameter=" {key} ">\\n" {FREE}){{0,{MOST_EXTRAS}}}')
        return self.rule(" ".join([literal(f"<function={tool.name}>\n"), *parts, literal("</function>\n")]))

    def untyped(self, tool: Tool) -> str:
        return self.rule(f"{literal(f'<function={tool.name}>')} /(?s:.*)/")

    def parameter(self, tool: Tool, key: str) -> str:
        value = FREE if self.loose else self.value(tool.properties.get(key), tool.schema)
        return self.rule(f"{literal(f'<parameter={key}>{chr(10)}')} {value}")

    def value(self, schema, root: dict) -> str:
        """What stands between <parameter=...> and the next tag."""
        found = self.alternatives(schema, root)
        return FREE if FREE in found else f"({' | '.join(found)})"

    def alternatives(self, schema, root: dict, depth: int = 0) -> list[str]:
        if not isinstance(schema, dict) or depth > DEPTH:
            return [FREE]
        if isinstance(schema.get("$ref"), str):
            return self.alternatives(target(schema["$ref"], root), root, depth + 1)
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
        if values:
            return [literal((v if isinstance(v, str) else dumps(v)) + END) for v in values]
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                return [one for choice in schema[word] for one in self.alternatives(choice, root, depth + 1)]
        types = types_of(schema, root)
        if types == STRING:
            return [self.text(schema)]
        if types is None or "string" in types:
            return [FREE]
        plain = types == NUMBER and not any(word in schema for word in BOUNDS)
        return [f"{FINITE if plain else self.json(schema, root)} {literal(END)}"]

    def text(self, schema: dict) -> str:
        """A bare string of some length and pattern."""
        low, high = (schema.get(word) if type(schema.get(word)) is int else None for word in ("minLength", "maxLength"))
        pattern = searched(schema["pattern"]) if isinstance(schema.get("pattern"), str) else None
        if low is None and high is None and pattern is None:
            return FREE
        length = f"(?s:.{{{low or 0},{'' if high is None else high}}})"
        self.count += 1
        self.lines.append(f"T{self.count}: /{length}/ & {BARE}" + (f" & /{pattern}/" if pattern else ""))
        return self.rule(f"T{self.count} {literal(END)}", "[lazy]")

    def json(self, schema: dict, root: dict) -> str:
        """A value of another type, as JSON; references find their targets in the tool's own definitions."""
        shared = {word: root[word] for word in ("$defs", "definitions") if word in root}
        options = {"whitespace_pattern": SPACE, "lenient": True}
        return self.rule("%json " + json.dumps({**schema, **shared, "x-guidance": options}))


def takes_any(schema: dict) -> bool:
    """Does a schema without properties of its own still take arguments?"""
    more = schema.get("additionalProperties")
    return more is True or isinstance(more, dict) or any(word in schema for word in ("anyOf", "oneOf", "allOf", "$ref"))


def searched(pattern: str) -> str | None:
    """A regular expression that is true of a whole text where `pattern` is found in it; None if its anchors are not
    simply its two ends."""
    start, stop = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[start:len(pattern) - stop]
    if (start or stop) and "|" in inner or "^" in inner.replace("[^", "") or "$" in inner:
        return None
    return f"{'' if start else '(?s:.*)'}({pattern_in_lark(inner)}){'' if stop else '(?s:.*)'}"
