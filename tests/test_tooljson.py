"""Almost-JSON becomes JSON, the same for every way of cutting it; valid JSON keeps its meaning."""
import json

import pytest
from hypothesis import example, given, settings, strategies as st

from qwentin.server.jsontext import dumps, escape, is_number
from qwentin.server.tooljson import JsonRepair, repaired

MENDED = [
    ("{'a': True, 'b': [None, FALSE]}", {"a": True, "b": [None, False]}),
    ("{'it\\'s': \"it's\", 'q': 'say \"hi\"'}", {"it's": "it's", "q": 'say "hi"'}),
    ('{"a": "line\nline\ttab"}', {"a": "line\nline\ttab"}),
    ('{"a": "\\d+ \\. C:\\new"}', {"a": "\\d+ \\. C:\new"}),
    ('{"a": [1, 2,], "b": {},}', {"a": [1, 2], "b": {}}),
    ('{"a": 1 "b": 2}', {"a": 1, "b": 2}),
    ('{a: 1, b": 2}', {"a": 1, "b": 2}),
    ('{"name": bash, "n": -1.5e3}', {"name": "bash", "n": -1500}),
    ('{"a"}', {"a": None}),
    ('{"a":, "b": 1}', {"a": None, "b": 1}),
    ('{"a": [1, {"b": 2}', {"a": [1, {"b": 2}]}),
    ('{"a": [1, 2}', {"a": [1, 2]}),
    ('{"a": 1]}', {"a": 1}),
    ('{{"a": 1}', {"a": 1}),
    ('{"a": "cut', {"a": "cut"}),
    ('{"a": "cut\\', {"a": "cut"}),
    ('{"a": "caf\\u00', {"a": "caf"}),
    ('{"a": "caf\\u00e9', {"a": "café"}),
    ('{"a": 1e999, "b": NaN, "c": 01}', {"a": "1e999", "b": "NaN", "c": "01"}),
    ('{"a": "b"\n</tool_call>', {"a": "b"}),
    ('{"a": "b\n</tool_call>\n', {"a": "b\n"}),
    ('{"content": <content>x = "a"\n</content>, "n": 1}', {"content": 'x = "a"\n', "n": 1}),
    ('{"c": "import "fmt"\nfmt.Println("hi") }\n", "n": 1}', {"c": 'import "fmt"\nfmt.Println("hi") }\n', "n": 1}),
    ('{"x": {"c": "a := []string{"x", "y",}\ngo(a)", "n": 1}}', {"x": {"c": 'a := []string{"x", "y",}\ngo(a)', "n": 1}}),
    ("", None),
]


def in_pieces(pieces):
    machine, rest, out = JsonRepair(), "", ""
    for piece in pieces:
        rest += piece
        rest = rest[machine.take(rest, 0, False):]
        out += machine.drain()
    machine.take(rest, 0, True)
    return out + machine.drain(), machine.exact


@pytest.mark.parametrize("text, value", MENDED, ids=[text[:30] for text, _ in MENDED])
def test_mended_in_every_split(text, value):
    made, exact, _ = repaired(text)
    assert json.loads(made) == value
    for at in range(len(text) + 1):
        assert in_pieces([text[:at], text[at:]]) == (made, exact), at
    assert in_pieces(text) == (made, exact)


def test_what_follows_is_left():
    assert repaired('{"a": 1}} tail') == ('{"a": 1}', True, "} tail")
    assert repaired("[1] 2") == ("[1]", True, " 2")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    | st.sampled_from(['", "a": 1}', '"}', "</tool_call>", "</content>, ", '</content>, "k": 1', "\\", '\\"', "'", "],"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12)


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@example("</content>,", None, False, (", ", ": "))
@example({"a": "</tool_call><tool_call>"}, None, False, (", ", ": "))
@example({"a": "b", "c" * 400: "d", "e\\": "f"}, 300, False, (" " * 300 + ", ", ": "))
@example({"a</content>,": ":", "b": "</tool_call>"}, None, False, (", ", ": "))
@given(VALUES, st.sampled_from([None, 0, 2]), st.booleans(), st.sampled_from([(", ", ": "), (",", ":"), (" ,\n", "\t: ")]))
def test_valid_json_keeps_its_meaning(value, indent, ascii_only, separators):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only, separators=separators)
    made, exact, rest = repaired(text)
    assert json.loads(made) == value and rest == ""
    assert exact or not isinstance(value, (dict, list, str))        # a bare 1 or null may go on: only the end closes it
    assert in_pieces(text) == (made, exact)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(VALUES.filter(lambda value: isinstance(value, (dict, list))))
def test_python_spelling_keeps_its_meaning(value):
    """repr() of plain data; what repr escapes and JSON cannot (\\x00) is left out."""
    text = repr(value)
    if "\\x" in text or "\\U" in text or "e+" in text:
        return
    made, exact, rest = repaired(text)
    assert json.loads(made) == value and exact and rest == ""


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(["{", "}", "[", "]", '"', "'", ",", ":", "\\", "\\u00", "a", "1", " ", "\n", "<", "true",
                                 "é", "</content>", "<content>", "</tool_call>", "None", "\ud800"]), max_size=30))
def test_anything_becomes_json(fragments):
    made, exact, _ = repaired("".join(fragments))
    json.loads(made)
    made.encode()
    assert in_pieces(fragments) == (made, exact)


@pytest.mark.parametrize("text", ["plain", 'a "b" \\ \n \x00', "😀 é", "\ud83d", "\ud83d\ude00"])
def test_escape_is_the_inside_of_a_string_and_can_be_cut(text):
    assert json.loads(f'"{escape(text)}"', strict=True) == text or "\ud83d\ude00" in text
    assert escape(text).encode() and dumps([text]).encode()
    assert "".join(map(escape, text)) == escape(text)


@pytest.mark.parametrize("word, yes", [("0", 1), ("-0.5e-3", 1), ("12345678901234567890", 1), ("01", 0), ("+1", 0),
                                       (".5", 0), ("5.", 0), ("1e999", 0), ("٣", 0), ("9" * 5000, 0), ("", 0)])
def test_numbers_of_json(word, yes):
    assert is_number(word) == bool(yes)
