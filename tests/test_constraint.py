"""Grammars and constraints: what they let through, what is refused and how; random text that they steer always fits."""
import json
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from qwentin import nano
from qwentin.constraint import KEPT, KEPT_TEXT, Grammars, choice, free_grammar, json_schema, lark, literal, regex
from qwentin.errors import ConstraintFailed, RequestError
from qwentin.guide import Guide, Steering
from qwentin.request import SamplingParams
from qwentin.sampler import Sampler
from qwentin.tokenizer import Tokenizer

TOKENIZER = Tokenizer(nano.DIRECTORY)
GRAMMARS = Grammars(TOKENIZER)
STOPS = frozenset({TOKENIZER.ids["<|im_end|>"]})
POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "name": {"type": "string", "maxLength": 9}},
         "required": ["x", "name"], "additionalProperties": False}


def fits(source: str, text: str) -> bool:
    """Does the grammar let the tokens of `text` through, and may the text end there?"""
    state = GRAMMARS.compile(source, "f").begin()
    for token in TOKENIZER.encode(text):
        if not state.mask()[token]:
            return False
        state.advance(int(token))
    return state.complete


def babble(source: str, number: int, most: int = 400) -> tuple[str, bool]:
    """What a model that knows nothing writes under the grammar, and whether it ended. It likes to end texts, so that
    they do."""
    rng = np.random.default_rng(number)
    grammar = GRAMMARS.compile(source, "f")
    sampler = Sampler(SamplingParams(seed=number), np.zeros(1, np.int32), TOKENIZER.size, 0,
                      Steering(Guide(grammar=grammar), TOKENIZER, STOPS))
    likes = np.zeros(TOKENIZER.size, np.float32)
    likes[[i for i in range(TOKENIZER.size) if set(TOKENIZER.token_bytes(i)) & set(b'"}]')]] = 3
    ids = []
    for _ in range(most):
        token = sampler.choose(likes + rng.normal(size=TOKENIZER.size).astype(np.float32))
        if token in STOPS:
            return TOKENIZER.decode(ids), True
        ids.append(token)
    return TOKENIZER.decode(ids), False


@pytest.mark.parametrize("source, good, bad", [
    (json_schema(POINT), ['{"x": 3, "name": "é"}', '{\n  "x": -1,\n  "name": ""\n}', '{"x":0,"name":"\\n"}'],
     ['{"x": 3}', '{"x": 3.5, "name": ""}', '{"name": "a", "x": 3}', '{"x": 3, "name": "0123456789"}',
      ' {"x": 3, "name": ""}', '{"x": 3, "name": "", "y": 1}', "{'x': 3}", '{"x": 3, "name": "a\nb"}',
      '{"x":' + " " * 50 + '3, "name": ""}']),
    (json_schema({"type": "object"}), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "3", '{"a"}']),
    (json_schema({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/d"}], "$defs": {"d": {"enum": ["a", 2]}}}),
     ["null", '"a"', "2"], ["a", "3", ""]),
    (regex(r"\d+\.\d{2}"), ["1.50", "123.00"], ["1.5", ".50", "1.500", "x"]),
    (choice(["yes", "no", "yes, but\n\"no\" — é"]), ["yes", "no", "yes, but\n\"no\" — é"], ["maybe", "", "yesno"]),
    (free_grammar('root ::= "a" [0-9]+ ("," root)?'), ["a1", "a12,a3"], ["a", "a1,"]),
    (free_grammar('start: WORD ("+" WORD)*\nWORD: /[a-z]+/'), ["a", "ab+c"], ["+", "a+"]),
    (lark('start: "A" @p "B"', p=json_schema({"type": "boolean"})), ["AtrueB"], ["AB", "A1B"]),
    (lark(f"start: {literal(chr(92) + 'n' + chr(34))}"), ['\\n"'], ["\n"]),
])
def test_what_fits(source, good, bad):
    assert [text for text in good if not fits(source, text)] == []
    assert [text for text in bad if fits(source, text)] == []


@pytest.mark.parametrize("source, said", [
    (json_schema({"type": "strin"}), "Invalid type: strin"),
    (json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (json_schema({"$ref": "#/nowhere"}), "nowhere"),
    (json_schema({"type": "string", "minLength": 5, "maxLength": 2}), "minLength"),
    (json_schema({"type": "string", "pattern": "("}), "unclosed group"),
    (regex("(a"), "unclosed group"),
    (lark("start: nobody"), "nobody"),
])
def test_refusals_name_the_field_in_one_line(source, said):
    with pytest.raises(RequestError, match=re.escape(said)) as caught:
        GRAMMARS.compile(source, "response_format.json_schema")
    assert caught.value.param == "response_format.json_schema"
    assert str(caught.value).startswith("response_format.json_schema cannot be used") and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 450


@pytest.mark.parametrize("source", [
    lark("start: r0\n" + "\n".join(f'r{i}: r{i + 1} | r{i + 1} "x"' for i in range(9000)) + '\nr9000: "b"'),
    json_schema({"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}}
                                                 for i in range(3000)} | {"d3000": {"type": "null"}}}),
])
def test_a_long_chain_of_rules_does_not_end_the_process(source):
    state = GRAMMARS.compile(source, "f").begin()
    assert state.mask().any()


def test_sources_have_a_size():
    with pytest.raises(RequestError, match="1048576 can be used at most") as caught:
        GRAMMARS.compile(regex("a" * 2**20), "guided_regex")
    assert caught.value.param == "guided_regex"


def test_lenient_leaves_out_what_cannot_be_enforced():
    assert fits(json_schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, lenient=True), "[1, 1]")


@pytest.mark.parametrize("text", ["root ::= nope", "what is this", '{"a": 1}'])
def test_a_grammar_that_is_none(text):
    with pytest.raises(ValueError, match="Failed to convert"):
        free_grammar(text)


def test_a_stop_is_allowed_where_the_text_may_end_and_nothing_else_behind_it():
    steering = Steering(Guide(grammar=GRAMMARS.compile(regex("ab?"), "f")), TOKENIZER, STOPS)
    a, b, stop = TOKENIZER.ids["a"], TOKENIZER.ids["b"], min(STOPS)
    assert not steering.mask()[stop] and steering.mask()[a]
    steering.take(a)
    assert set(np.flatnonzero(steering.mask())) == {b, stop}
    steering.take(b)
    assert set(np.flatnonzero(steering.mask())) == {stop}
    assert steering.take(stop) == stop


def test_no_stop_id_at_all_is_said_and_not_looped_over():
    steering = Steering(Guide(grammar=GRAMMARS.compile(regex("a"), "f")), TOKENIZER, frozenset())
    steering.take(TOKENIZER.ids["a"])
    steering.constraint.known = np.zeros(TOKENIZER.size, bool)      # the library itself would offer its end token
    with pytest.raises(ConstraintFailed, match="no token can follow"):
        steering.mask()


def test_a_token_against_the_grammar_is_an_error():
    state = GRAMMARS.compile(regex("a+"), "f").begin()
    with pytest.raises(ConstraintFailed, match="could not be constrained any further"):
        state.advance(TOKENIZER.ids["b"])


def test_choices_of_one_grammar_do_not_disturb_each_other():
    grammar = GRAMMARS.compile(regex("ab|cd"), "f")
    first, second = grammar.begin(), grammar.begin()
    first.advance(TOKENIZER.ids["a"])
    assert first.mask()[TOKENIZER.ids["b"]] and not first.mask()[TOKENIZER.ids["c"]]
    assert second.mask()[TOKENIZER.ids["c"]]


def test_the_last_grammars_are_kept():
    grammars = Grammars(TOKENIZER)
    first = grammars.compile(regex("first"), "f")
    for i in range(KEPT):
        assert grammars.compile(regex("first"), "f") is first       # asked for again and again: it stays
        grammars.compile(regex(f"a{i}"), "f")
    assert len(grammars.kept) == KEPT
    for i in range(KEPT):
        grammars.compile(regex(f"b{i}"), "f")
    assert grammars.compile(regex("first"), "f") is not first
    wide = choice(["a" * 1000] * (KEPT_TEXT // 1010))
    large = grammars.compile(wide, "f")
    assert len(grammars.kept) < KEPT and grammars.compile(wide, "f") is large
    assert sum(map(len, grammars.kept)) <= KEPT_TEXT


NAMES = st.sampled_from(["a", "b", "name", "ключ", 'q"uote', "x y"])
LEAVES = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "number"}, {"const": {"k": [1]}},
                     {"type": "string", "format": "date"}, {"type": "string", "pattern": "^[a-z]+$"}]),
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, st.integers(-20, 20),
              st.integers(0, 500)),
    st.builds(lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, st.integers(0, 4),
              st.integers(0, 12)),
    st.builds(lambda v: {"enum": v},
              st.lists(st.sampled_from(["x", "", "é\n", 3, None, True, 2.5]), min_size=1, max_size=4)))


def objects(inner):
    def build(properties, optional):
        return {"type": "object", "properties": properties, "additionalProperties": False,
                "required": [k for k in properties if k not in optional]}
    return st.builds(build, st.dictionaries(NAMES, inner, max_size=4), st.sets(NAMES, max_size=2))


SCHEMAS = st.recursive(LEAVES, lambda inner: st.one_of(
    objects(inner), st.builds(lambda i, n: {"type": "array", "items": i, "maxItems": n}, inner, st.integers(0, 3)),
    st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))), max_leaves=6)


@seed(1)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SCHEMAS, st.integers(0, 2**32))
def test_babble_under_any_schema_validates(schema, number):
    text, ended = babble(json_schema(schema), number)
    if ended:
        jsonschema.validate(json.loads(text), schema)


def test_babble_ends():
    """The test above would be empty if nothing ended."""
    assert sum(babble(json_schema(POINT), i)[1] for i in range(20)) == 20
