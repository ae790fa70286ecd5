"""Parameters get the type that their schema says, whatever way it says it; what does not fit stays the string it was."""
import json

import pytest

from qwentin.server.toolschema import Tool, Toolbox, json_of, members, types_of

ROOT = {"$defs": {"Days": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}, "a/b~c": {"type": "boolean"},
                  "Point": {"type": "object", "properties": {"x": {"type": "number"}}},
                  "Maybe": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}}}
INT, STR, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}

TYPED = [
    ("T-9 Optional[int]", {"anyOf": [INT, NULL]}, "5", 5),
    ("T-9 Optional[str]", {"anyOf": [STR, NULL]}, "5", "5"),
    ("T-9 $ref", {"$ref": "#/$defs/Days"}, "5", 5),
    ("T-9 list[str] | None", {"anyOf": [{"type": "array", "items": STR}, NULL]}, '["a", "b"]', ["a", "b"]),
    ("T-9 oneOf", {"oneOf": [{"type": "boolean"}, INT]}, "true", True),
    ("T-9 type array", {"type": ["integer", "null"]}, "null", None),
    ("T-9 list[str] | None, None", {"anyOf": [{"type": "array"}, NULL]}, "None", None),
    ("T-8 True", {"type": "boolean"}, "True", True),
    ("T-8 FALSE", {"type": "boolean"}, "FALSE", False),
    ("T-8 maybe", {"type": "boolean"}, "maybe", "maybe"),
    ("T-7 JSON", {"type": "array"}, '[{"multiSelect":true,"x":null}]', [{"multiSelect": True, "x": None}]),
    ("T-7 Python", {"type": "array"}, "[{'multiSelect': True, 'x': None}]", [{"multiSelect": True, "x": None}]),
    ("ref with escapes", {"$ref": "#/$defs/a~1b~0c"}, "true", True),
    ("ref to a union", {"$ref": "#/$defs/Maybe"}, '{"x": 1.5}', {"x": 1.5}),
    ("ref to itself", {"$ref": "#/$defs/Loop"}, "x", "x"),
    ("ref to nothing", {"$ref": "#/$defs/None"}, "5", 5),
    ("ref outside", {"$ref": "http://x/y"}, "x", "x"),
    ("allOf", {"allOf": [{"type": ["integer", "string"]}, {"type": ["integer", "null"]}]}, "5", 5),
    ("type beside anyOf", {"type": "object", "anyOf": [{"required": ["a"]}]}, '{"a": 1}', {"a": 1}),
    ("enum of numbers", {"enum": [1, 2, 3]}, "2", 2),
    ("enum of strings", {"enum": ["1", "2"]}, "2", "2"),
    ("const", {"const": True}, "true", True),
    ("nullable", {"type": "integer", "nullable": True}, "null", None),
    ("properties alone", {"properties": {"a": INT}}, '{"a": 1}', {"a": 1}),
    ("items alone", {"items": INT}, "[1]", [1]),
    ("string keeps JSON", STR, '{"a": 1}', '{"a": 1}'),
    ("string keeps null", STR, "null", "null"),
    ("string keeps white space", STR, "  x\n\n", "  x\n\n"),
    ("string keeps quotes", STR, '"Oslo"', '"Oslo"'),
    ("integer as float", INT, "5.0", 5),
    ("integer with sign", INT, "+5", 5),
    ("integer with zeros", INT, "007", 7),
    ("integer in white space", INT, "\n 5 ", 5),
    ("integer that is none", INT, "5.5", "5.5"),
    ("integer beyond all", INT, "9" * 5000, "9" * 5000),
    ("number", {"type": "number"}, "-0.50", -0.5),
    ("number without fraction", {"type": "number"}, "3", 3),
    ("number, exponent", {"type": "number"}, "1e3", 1000.0),
    ("number, infinite", {"type": "number"}, "Infinity", "Infinity"),
    ("number, NaN", {"type": "number"}, "NaN", "NaN"),
    ("number, too large", {"type": "number"}, "1e999", "1e999"),
    ("string or integer", {"type": ["string", "integer"]}, "5", 5),
    ("string or integer, leading zero", {"type": ["string", "integer"]}, "007", "007"),
    ("string or array", {"type": ["string", "array"]}, "[not an array", "[not an array"),
    ("array that is none", {"type": "array"}, "a, b", "a, b"),
    ("array unfinished", {"type": "array"}, "[1, 2", "[1, 2"),
    ("array with NaN", {"type": "array"}, "[NaN]", "[NaN]"),
    ("array too deep", {"type": "array"}, "[" * 100_000, "[" * 100_000),
    ("object that is none", {"type": "object"}, "{hello world}", "{hello world}"),
    ("object for array", {"type": "array"}, '{"a": 1}', '{"a": 1}'),
    ("nested", {"type": "object"}, '{"a": [{"b": [1, {"c": "\\u00e9"}]}]}', {"a": [{"b": [1, {"c": "é"}]}]}),
    ("nothing said, number", {}, "5", 5),
    ("nothing said, text", {}, "five", "five"),
    ("nothing said, Python", {}, "{'a': None}", {"a": None}),
    ("nothing said, title only", {"title": "X"}, "true", True),
    ("Python's word for it", {"type": "dict"}, '{"a": 1}', {"a": 1}),
    ("unknown word", {"type": "file"}, "x", "x"),
    ("no schema", True, "5", 5),
    ("broken schema", {"type": 3, "anyOf": "x", "enum": None}, "x", "x"),
]


@pytest.mark.parametrize("name, schema, text, value", TYPED, ids=[case[0] for case in TYPED])
def test_typed(name, schema, text, value):
    made = json.loads(json_of(text, types_of(schema, ROOT)))
    assert made == value and type(made) is type(value)


def test_parameters_of_a_tool():
    schema = {"properties": {"n": {"$ref": "#/$defs/Days"}}, "additionalProperties": STR, **ROOT}
    tool = Tool("f", schema)
    assert tool.types("n") == {"integer"} and tool.types("other") == {"string"}
    assert Tool("f", {"properties": None, "required": 5}).types("n") is None


@pytest.mark.parametrize("declared", [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": INT}}}},
    {"type": "function", "name": "f", "parameters": {"properties": {"n": INT}}},
    {"name": "f", "input_schema": {"properties": {"n": INT}}},
])
def test_declarations_of_three_dialects(declared):
    assert Toolbox([declared]).get("f").types("n") == {"integer"}


@pytest.mark.parametrize("declared", [None, [], [{}], [{"name": ""}], [{"function": {"name": None}}], ["f"]])
def test_nothing_declared(declared):
    assert not Toolbox(declared) and Toolbox(declared).get("f") is None


def test_infer_wants_exactly_one_tool():
    def box(**tools):
        return Toolbox([{"name": name, "parameters": {"properties": dict.fromkeys(keys), "required": list(required)}}
                        for name, (keys, required) in tools.items()])
    twins = box(bash=("cd", "c"), monitor=("cdu", "cu"))
    assert twins.infer({"c", "d"}).name == "bash" and twins.infer({"c", "u"}).name == "monitor"
    assert twins.infer({"d"}) is None and twins.infer({"c", "z"}) is None and twins.infer(()) is None
    assert box(a=("c", "c"), b=("c", "c")).infer({"c"}) is None
    assert box(a=("cd", "c"), b=("cd", "cd")).infer({"c", "d"}).name == "b"


@pytest.mark.parametrize("text, value", [('{"a": 1}', {"a": 1}), ('\n{"a": "}"}}\n', {"a": "}"}), ('{"a": 1} x', None),
                                         ("[1]", None), ("a", None), ("{a b}", None)])
def test_members(text, value):
    assert members(text) == value
