"""A call's arguments as JSON text that grows: parameters in, fragments out whose concatenation is one JSON object.

    begin("city") text("Os") text("lo") end() begin("days") text("3") end() close()
    {"city": "     Os         lo        "   , "days":             3     }

A parameter that can only be a string leaves as it comes; any other is kept until its text is whole, since `3` and `3 km`
differ in their first character's JSON. Used by toolxml.py and toolcall.py; proven by tests/test_toolcall.py.
"""
from .jsontext import dumps, escape
from .toolhead import ARGUMENT_KEYS
from .toolschema import STRING, Tool, json_of, members


class Arguments:
    """Arguments of one call to `tool`. A freeform tool's one argument leaves as plain text instead."""

    def __init__(self, tool: Tool):
        self.tool, self.out = tool, []
        self.keys: list[str] = []       # parameters so far
        self.held: list[str] = []       # text of a parameter whose type is open
        self.types = None

    def drain(self) -> str:
        text = "".join(self.out)
        self.out.clear()
        return text

    def has(self, key: str) -> bool:
        return key in self.keys or self.tool.freeform and bool(self.keys)

    def begin(self, key: str) -> None:
        self.keys.append(key)
        self.types = self.tool.types(key)
        if self.types == STRING and not self.tool.freeform:
            self.out.append(f'{self.lead(len(self.keys))}{dumps(key)}: "')

    def lead(self, count: int) -> str:
        return "{" if count == 1 else ", "

    def text(self, piece: str) -> None:
        if self.tool.freeform:
            self.out.append(piece)
        elif self.types == STRING:
            self.out.append(escape(piece))
        else:
            self.held.append(piece)

    def end(self) -> None:
        if self.tool.freeform:
            return
        if self.types == STRING:
            self.out.append('"')
            return
        text, key = "".join(self.held), self.keys[-1]
        self.held.clear()
        inner = members(text) if key in ARGUMENT_KEYS and key not in self.tool.properties else None
        if inner is None:
            self.out.append(f"{self.lead(len(self.keys))}{dumps(key)}: {json_of(text, self.types)}")
            return
        self.keys.pop()                 # <parameter=arguments> held the whole object
        for name, value in inner.items():
            if name not in self.keys:
                self.keys.append(name)
                self.out.append(f"{self.lead(len(self.keys))}{dumps(name)}: {dumps(value)}")

    def close(self) -> None:
        if not self.tool.freeform:
            self.out.append("}" if self.keys else "{}")

    def whole(self, arguments: dict) -> None:
        """All arguments at once."""
        if not self.tool.freeform:
            self.out.append(dumps(arguments))
        elif len(arguments) == 1 and isinstance(next(iter(arguments.values())), str):
            self.out.append(next(iter(arguments.values())))
        else:
            self.out.append(dumps(arguments))


class Pairs:
    """Parameters of a call whose tool is not known yet, or never will be: their text, in order."""

    def __init__(self):
        self.pairs: list[tuple[str, list[str]]] = []

    def has(self, key: str) -> bool:
        return any(key == k for k, _ in self.pairs)

    def begin(self, key: str) -> None:
        self.pairs.append((key, []))

    def text(self, piece: str) -> None:
        self.pairs[-1][1].append(piece)

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass

    def drain(self) -> str:
        return ""

    def to(self, arguments: Arguments) -> None:
        """Write them as the arguments of a tool."""
        for key, pieces in self.pairs:
            arguments.begin(key)
            arguments.text("".join(pieces))
            arguments.end()
        arguments.close()
