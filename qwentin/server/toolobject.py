"""Calls in the JSON form: arguments that stream behind their tool's name, and objects that must be whole to be understood.

    {"name": "F", "arguments": { ... } }        JsonBody: from the inner brace on, every piece leaves at once
    {"function": "F", "city": "Oslo"}           ObjectBody: read whole, then `call_of` says what it calls, if anything

Used by toolcall.py; proven by tests/test_toolcall.py.
"""
import json

from .jsontext import dumps
from .toolarguments import Arguments
from .toolhead import ARGUMENT_KEYS, NAME_KEYS, SHELL_KEYS
from .tooljson import JsonRepair
from .toolschema import Tool, Toolbox

SHELLS = 4          # objects around a call that are looked through
METADATA = {"id", "type"}       # keys beside a call that say nothing


class JsonBody:
    """From the opening brace of the arguments to the end of the object around them.

    extra   what stood beside the arguments
    """

    def __init__(self, arguments: Arguments):
        self.arguments, self.extra = arguments, []
        self.json = JsonRepair(outer=True)
        self.rest: JsonRepair | None = None
        self.whole: list[str] = []          # of a freeform tool
        self.done = self.complete = False

    def take(self, text: str, at: int, ended: bool) -> int:
        """Read from text[at:] as far as is certain; where reading stopped."""
        if not self.json.done:
            at = self.json.take(text, at, ended)
            self.pass_on()
        if self.json.done and not self.done:
            at = self.beside(text, at, ended)
        return at

    def pass_on(self) -> None:
        if not self.arguments.tool.freeform:
            self.arguments.out.append(self.json.drain())
        elif self.json.done:
            self.arguments.whole(loads(self.json.drain()) or {})

    def beside(self, text: str, at: int, ended: bool) -> int:
        """The rest of the object around the arguments, up to its brace."""
        if self.rest is None:
            while at < len(text) and text[at].isspace():
                at += 1
            if at == len(text) and not ended:
                return at
            self.rest = JsonRepair()
            self.rest.take('{"": 0 ', 0, False)
            if text[at:at + 1] not in (",", "}"):
                self.rest.take("}", 0, False)
        stop = at if self.rest.done else self.rest.take(text, at, ended)
        self.extra.append(text[at:stop])
        if self.rest.done:
            self.done, self.complete = True, self.json.closed or stop < len(text)
            if len(self.rest.drain()) == len('{"": 0}'):
                self.extra.clear()          # only the brace
        return stop


class ObjectBody:
    """A whole object; `prefix` is what its text should have begun with."""

    def __init__(self, prefix: str, infer: bool):
        self.json, self.infer, self.extra = JsonRepair(), infer, []
        self.json.take(prefix, 0, False)

    @property
    def done(self) -> bool:
        return self.json.done

    @property
    def complete(self) -> bool:
        return self.json.closed

    def take(self, text: str, at: int, ended: bool) -> int:
        return self.json.take(text, at, ended)

    def call(self, tools: Toolbox) -> tuple[Tool, dict] | None:
        """What the object calls; what else it says goes to `extra`."""
        found = call_of(loads(self.json.drain()), tools, self.infer and self.complete)
        if found is None:
            return None
        tool, arguments, beside = found
        self.extra = [dumps(beside)] if beside else []
        return tool, arguments


def loads(text: str):
    """The value of JSON text; None if Python cannot hold it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def call_of(value, tools: Toolbox, infer: bool) -> tuple[Tool, dict, dict] | None:
    """The tool that an object calls, its arguments, and what stands beside them: named under any of the usual keys, in
    shells or not, or (where `infer`) told by its arguments alone. None if it is no call."""
    for _ in range(SHELLS):
        if not isinstance(value, dict):
            return None
        for key in NAME_KEYS:
            if tools.get(value.get(key)):
                return named_call(tools.get(value[key]), {k: v for k, v in value.items() if k != key})
        inner = [key for key in SHELL_KEYS if isinstance(value.get(key), dict)]
        if infer and tools.infer(value):
            return tools.infer(value), value, {}
        if len(inner) != 1 or set(value) - {inner[0]} - METADATA:
            return None
        value = value[inner[0]]
    return None


def named_call(tool: Tool, rest: dict) -> tuple[Tool, dict, dict] | None:
    """Arguments under their usual key, as an object or as text of one; or spread beside the name, if all are declared."""
    for key in ARGUMENT_KEYS:
        if key not in rest or key in tool.properties and not isinstance(rest[key], dict):
            continue
        inner = rest[key]
        inner = loads(inner) if isinstance(inner, str) else {} if inner is None else inner
        beside = {k: v for k, v in rest.items() if k != key and k not in METADATA}
        return (tool, inner, beside) if isinstance(inner, dict) else None
    return (tool, rest, {}) if set(rest) <= set(tool.properties) else None
