"""Structured output of the embedded model over HTTP, with the SDKs that users have: always what was asked for."""
import json
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from conftest import start_server
from http_client import call
from spoken import DIALECTS, ask

PERSON = {"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}},
    "required": ["name", "age", "tags"], "additionalProperties": False}
SUM = {"type": "object", "properties": {"a": {"type": "integer"}, "sum": {"type": "number"}, "ok": {"type": "boolean"}},
       "required": ["a", "sum", "ok"], "additionalProperties": False}
UNION = {"type": "object", "properties": {"v": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/s"}]}}, "required": ["v"],
         "additionalProperties": False, "$defs": {"s": {"type": "string", "pattern": "^[a-z]{2,6}$"}}}
SCHEMAS = (PERSON, SUM, UNION)
PROMPTS = ("Write a JSON object with name Ada and age 36.", "Please add 696 and 336.", "Hello", "Sort the list 62, 88, 27",
           "Which number is bigger: 988 or 552?", "Write a Python function that reverses a list.", "{{", "Count to ten.")


@pytest.fixture(scope="module")
def plain():
    """The same server without speculation."""
    found = start_server("--draft", "off")
    yield found
    assert found.stop() == 0


@pytest.mark.parametrize("which", ["server", "plain"])
def test_R6_24_prompts_are_valid_json(which, request):
    """With thinking, with speculation and without: 24 of 24, at temperature 0 and above."""
    target = request.getfixturevalue(which)
    jobs = [(prompt, schema, i) for i, (prompt, schema) in enumerate((p, s) for p in PROMPTS for s in SCHEMAS)]
    assert len(jobs) == 24

    def judge(job):
        prompt, schema, i = job
        said = ask(target, "chat", i % 2 == 0, prompt, schema=schema, temperature=(0, 0.8)[i % 3 == 0], more={"seed": i},
                   budget=30)
        jsonschema.validate(json.loads(said.text), schema)
        return said.finish
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(judge, jobs)) == {"stop"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_R7_the_thought_is_free_and_the_answer_is_not(server, dialect, stream):
    free = ask(server, dialect, stream, "Please add 696 and 336.", thinking=True)
    said = ask(server, dialect, stream, "Please add 696 and 336.", thinking=True, schema=SUM)
    assert said.thought == free.thought and said.thought.startswith("696 + 336: 6+6+0=12")
    jsonschema.validate(json.loads(said.text), SUM)
    assert said.finish == "stop" and not said.text.startswith("\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_R9_without_a_thought(server, dialect, stream):
    said = ask(server, dialect, stream, "Hello", thinking=False, schema=PERSON)
    assert said.thought == "" and said.finish == "stop"
    jsonschema.validate(json.loads(said.text), PERSON)


def test_json_object_and_the_names_of_vllm(server, client):
    def text(**extra):
        whole = client.chat.completions.create(model="nano", messages=[{"role": "user", "content": "Hello"}], temperature=0,
                                               max_tokens=300, extra_body={"enable_thinking": False, **extra})
        assert whole.choices[0].finish_reason == "stop"
        return whole.choices[0].message.content
    assert isinstance(json.loads(text(response_format={"type": "json_object"})), dict)
    assert isinstance(json.loads(text(structured_outputs={"json_object": True})), dict)
    for schema in ({"type": "integer", "minimum": 0, "maximum": 9}, '{"type": "integer", "minimum": 0, "maximum": 9}'):
        assert json.loads(text(structured_outputs={"json": schema})) in range(10)
        assert json.loads(text(guided_json=schema)) in range(10)
    for name in ("regex", "guided_regex"):
        pattern = "[a-f]{3}-[0-9]{2}"
        asked = {name: pattern} if name.startswith("guided") else {"structured_outputs": {name: pattern}}
        assert re.fullmatch(pattern, text(**asked))
    assert text(structured_outputs={"choice": ["left", "right"]}) in ("left", "right")
    assert text(guided_choice=["yes", "no"]) in ("yes", "no")
    assert re.fullmatch(r"x(,x)*", text(guided_grammar='root ::= "x" ("," "x")?'))
    assert text(structured_outputs={"grammar": 'start: "a" | "b"'}) in ("a", "b")
    assert text(guided_choice=["yes"], ignore_eos=True) == "yes"        # a grammar has an end, and the stop id comes there


def test_text_completions_too(client):
    whole = client.completions.create(model="nano", prompt="1 + 1 =", max_tokens=50, n=2, temperature=1, seed=1,
                                      extra_body={"structured_outputs": {"regex": " [0-9]{1,3}!"}})
    assert all(re.fullmatch(" [0-9]{1,3}!", choice.text) for choice in whole.choices)
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}


class Point(BaseModel):
    x: int
    label: str | None


def test_parse_of_the_openai_sdk(client):
    """pydantic models, as most users ask; the stream's own parser too."""
    body = dict(model="nano", messages=[{"role": "user", "content": "Hello"}], max_tokens=300, temperature=0,
                extra_body={"enable_thinking": False})
    whole = client.chat.completions.parse(**body, response_format=Point)
    assert isinstance(whole.choices[0].message.parsed, Point)
    with client.chat.completions.stream(**body, response_format=Point) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == whole.choices[0].message.parsed
    found = client.responses.parse(model="nano", input="Hello", max_output_tokens=300, temperature=0, text_format=Point)
    assert isinstance(found.output_parsed, Point)


def test_choices_are_constrained_each(client):
    whole = client.chat.completions.create(
        model="nano", messages=[{"role": "user", "content": "Hello"}], n=4, temperature=1.5, seed=3, max_tokens=200,
        extra_body={"enable_thinking": False, "guided_regex": "[a-z]{4,9}"})
    assert all(re.fullmatch("[a-z]{4,9}", choice.message.content) for choice in whole.choices)
    assert len({choice.message.content for choice in whole.choices}) > 1


def test_a_limit_cuts_and_says_so(server):
    said = ask(server, "chat", False, "Hello", thinking=False, schema=PERSON, limit=5)
    assert said.finish == "length" and said.text.startswith("{")


@pytest.mark.parametrize("path, body, param", [
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
     "response_format.json_schema.schema"),
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {
        "strict": True, "schema": {"type": "array", "uniqueItems": True}}}}, "response_format.json_schema.schema"),
    ("/v1/chat/completions", {"guided_regex": "("}, "guided_regex"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": {"$ref": "#/x"}}}}, "text.format.schema"),
])
def test_a_bad_schema_is_one_clear_400(server, path, body, param):
    base = {"input": "Hi"} if "responses" in path else {"messages": [{"role": "user", "content": "Hi"}]}
    answer = call(server.url, path, {**base, **body})
    assert answer.status == 400 and answer.json["error"]["param"] == param
    assert answer.json["error"]["message"].startswith(param) and "\n" not in answer.json["error"]["message"]


def test_what_cannot_be_enforced_is_left_out_unless_strict(server):
    schema = {"type": "array", "items": {"enum": [1]}, "maxItems": 2, "uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        ask(server, "chat", False, "Hi", schema=schema)
    said = ask(server, "messages", False, "Hi", schema=schema)
    assert set(json.loads(said.text)) <= {1}
    assert "not enforced: Unimplemented keys: [\"uniqueItems\"]" in server.log_text()
