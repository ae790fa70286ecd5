"""The declared tools, and the JSON that a parameter's text stands for under its schema.

The Qwen form writes strings bare and everything else as JSON, so `5` is a number or a string by the schema alone:

    {"type": "string"}                               5 -> "5"
    {"anyOf": [{"type": "integer"}, {"type": "null"}]}    5 -> 5,   None -> null
    {"$ref": "#/$defs/Days"}, {"type": ["array", "null"]}, {"enum": [1, 2]}, {"allOf": [...]}   what they resolve to
    nothing said                                     JSON if it is JSON, a string otherwise

Python's spelling (True, None, 'single quotes') is read too. What does not fit its type stays the string that it is,
character for character: a client can refuse `maybe`, but nobody can restore what a parser changed.
Used by toolhead.py and toolxml.py; proven by tests/test_toolschema.py.
"""
import json
import re
from dataclasses import dataclass

from .jsontext import dumps, encodable, is_number
from .tooljson import repaired

STRING = frozenset({"string"})
TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
# JSON Schema's words (number takes integers) and what clients write in their place
WORDS = {"number": ("number", "integer"), "str": ("string",), "text": ("string",), "int": ("integer",),
         "float": ("number", "integer"), "double": ("number", "integer"), "bool": ("boolean",), "list": ("array",),
         "tuple": ("array",), "dict": ("object",), "map": ("object",), "none": ("null",)}
OF_VALUE = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array",
            dict: "object"}
INTEGRAL = re.compile(r"([+-]?)0*(\d+)(?:\.0*)?")
DECIMAL = re.compile(r"([+-]?)0*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)")
DEPTH = 32                  # of $ref and anyOf inside each other


@dataclass(frozen=True)
class Tool:
    """One declared tool.

    schema     its parameters' JSON schema
    freeform   its one argument is text without JSON around it (a `custom` tool of the Responses API)
    strict     the client wants its schema kept to
    """
    name: str
    schema: dict
    freeform: bool = False
    strict: bool = False

    @property
    def properties(self) -> dict:
        found = self.schema.get("properties")
        return found if isinstance(found, dict) else {}

    @property
    def required(self) -> set:
        found = self.schema.get("required")
        return {key for key in found if isinstance(key, str)} if isinstance(found, list) else set()

    def types(self, key: str) -> frozenset | None:
        """The types that parameter `key` may have; None if the schema does not say."""
        schema = self.properties.get(key, self.schema.get("additionalProperties"))
        return types_of(schema, self.schema)


class Toolbox:
    """The declared tools by name. Takes the three dialects' declarations: {"function": {...}}, flat, `input_schema`."""

    def __init__(self, declared: list[dict]):
        tools = [tool_of(d) for d in declared or ()]
        self.tools = {tool.name: tool for tool in tools if tool is not None}

    def __bool__(self) -> bool:
        return bool(self.tools)

    def only(self, names) -> "Toolbox":
        """Those of these names; all of them for None."""
        left = Toolbox(None)
        left.tools = {name: tool for name, tool in self.tools.items() if names is None or name in names}
        return left

    def get(self, name) -> Tool | None:
        return self.tools.get(name) if isinstance(name, str) else None

    def infer(self, keys) -> Tool | None:
        """The one tool that takes these arguments: all of them declared, all that it requires there. None on a tie."""
        keys = set(keys)
        fits = [t for t in self.tools.values() if keys and keys <= set(t.properties) and t.required <= keys]
        if len(fits) > 1:
            fits = [t for t in fits if t.required == keys]
        return fits[0] if len(fits) == 1 else None


def tool_of(declared) -> Tool | None:
    """A declaration as a Tool; None for one without a name."""
    if not isinstance(declared, dict):
        return None
    inner = declared.get("function")
    inner = inner if isinstance(inner, dict) else declared
    schema = inner.get("parameters", inner.get("input_schema"))
    name = inner.get("name")
    if not isinstance(name, str) or not name:
        return None
    strict = inner.get("strict") is True or declared.get("strict") is True
    return Tool(name, schema if isinstance(schema, dict) else {}, declared.get("type") == "custom", strict)


def types_of(schema, root: dict, depth: int = 0) -> frozenset | None:
    """The JSON types that `schema` allows, "integer" wherever it allows "number"; None if it does not say."""
    if not isinstance(schema, dict) or depth > DEPTH:
        return None
    parts = [types_of(target(schema["$ref"], root), root, depth + 1)] if "$ref" in schema else []
    if "type" in schema:
        parts.append(types_named(schema["type"]))
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        parts.append(frozenset(OF_VALUE.get(type(value), "null") for value in values))
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            choices = [types_of(choice, root, depth + 1) for choice in schema[word]]
            parts.append(None if None in choices else frozenset().union(*choices))
    if isinstance(schema.get("allOf"), list):
        parts += [types_of(part, root, depth + 1) for part in schema["allOf"]]
    said = [part for part in parts if part]
    if not said:
        hint = {"properties": "object", "items": "array", "prefixItems": "array"}
        return next((frozenset({kind}) for word, kind in hint.items() if word in schema), None)
    common = frozenset.intersection(*said)
    return common | {"null"} if schema.get("nullable") is True and common else common or None


def types_named(names) -> frozenset | None:
    """`type`: one word or a list of words. A word that nobody knows says nothing."""
    found = set()
    for name in names if isinstance(names, list) else [names]:
        name = name.lower() if isinstance(name, str) else ""
        if name not in TYPES and name not in WORDS:
            return None
        found.update(WORDS.get(name, (name,)))
    return frozenset(found) or None


def target(ref, root: dict):
    """What a reference inside the same schema points at (JSON pointer, RFC 6901); None if nothing."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    place = root
    for step in ref[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict):
            place = place.get(step)
        elif isinstance(place, list) and step.isdecimal() and int(step) < len(place):
            place = place[int(step)]
        else:
            return None
    return place


def json_of(text: str, types: frozenset | None) -> str:
    """JSON text of a parameter's value."""
    if types == STRING:
        return dumps(text)
    allowed = TYPES if types is None else types
    bare = text.strip()
    return scalar(bare, allowed) or container(bare, allowed) or dumps(text)


def scalar(bare: str, allowed: frozenset) -> str | None:
    """null, a boolean or a number, if the text is one that may stand here."""
    if bare in ("null", "None") and "null" in allowed:
        return "null"
    if bare.lower() in ("true", "false") and "boolean" in allowed:
        return bare.lower()
    if "string" in allowed:                 # 007 and +49 are text unless only a number would do
        fits = "integer" in allowed if re.fullmatch(r"-?\d+", bare) else "number" in allowed
        return bare if fits and is_number(bare) else None
    for kind, pattern in (("integer", INTEGRAL), ("number", DECIMAL)):
        found = pattern.fullmatch(bare) if kind in allowed else None
        if found and is_number(found[2]):
            return bare if kind == "number" and is_number(bare) else found[1].replace("+", "") + found[2]
    return None


def container(bare: str, allowed: frozenset) -> str | None:
    """An array or an object: JSON as it was written, or Python's spelling of it as JSON."""
    kind = {"[": "array", "{": "object"}.get(bare[:1])
    if kind not in allowed:
        return None
    try:
        json.loads(bare, parse_constant=refuse_constant)
        return encodable(bare)
    except (ValueError, RecursionError):
        text, exact, rest = repaired(bare)
        return text if exact and not rest.strip() else None


def refuse_constant(name: str):
    raise ValueError(f"{name} is no JSON")


def members(text: str) -> dict | None:
    """A whole argument object written as one value, one closing brace too many allowed; None if it is none."""
    made, exact, rest = repaired(text.strip())
    if not text.lstrip().startswith("{") or not exact or rest.strip(" }\n"):
        return None
    try:
        return json.loads(made)
    except (ValueError, RecursionError):
        return None
