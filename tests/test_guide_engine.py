"""Guides in a running engine: the very same tokens with speculation and without; a failed constraint ends one request."""
import pytest

from qwentin.config import EngineConfig
from qwentin.constraint import json_schema, regex
from qwentin.engine import Engine
from qwentin.errors import ConstraintFailed
from qwentin.guide import Guide
from qwentin.request import Done, Finish, GenerateRequest, SamplingParams
from test_engine import Reader

SUM = "<|im_start|>user\nPlease add 696 and 336.<|im_end|>\n<|im_start|>assistant\n<think>\n"
DIRECT = SUM + "\n</think>\n\n"
FORM = json_schema({"type": "object", "properties": {"sum": {"type": "integer"}, "words": {"type": "array", "items": {
    "enum": ["six hundred", "three hundred", "a thousand"]}, "maxItems": 4}}, "required": ["sum", "words"],
    "additionalProperties": False})


@pytest.fixture(scope="module")
def engines():
    made = {draft: Engine.load(EngineConfig(threads=1, max_seqs=5, max_model_len=512, draft=draft))
            for draft in ("auto", "off")}
    for engine in made.values():
        engine.start()
    yield made
    for engine in made.values():
        engine.stop()
        engine.scheduler.check()


def run(engine, name, prompt, guide, sampling, n=1, limit=60):
    reader = Reader()
    ids = engine.tokenizer.encode(prompt)
    engine.submit(GenerateRequest(name, ids, sampling, guide=guide, n=n, max_tokens=limit), reader)
    return reader.wait()


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0),
                                      SamplingParams(temperature=0.8, top_k=40, seed=4, repetition_penalty=1.1)])
@pytest.mark.parametrize("prompt, rules", [
    (SUM, dict(thinking=True, form=FORM)), (SUM, dict(thinking=True, form=FORM, budget=12)), (DIRECT, dict(form=FORM)),
    (SUM, dict(thinking=True, budget=7)), (DIRECT, dict(form=regex("696 [+] 336 = [0-9]{2,9}"))),
])
def test_R6_speculation_changes_no_guided_token(engines, prompt, rules, sampling):
    """Masks hold at every node that a tree's walk comes to, forced tokens too."""
    said = {}
    for draft, engine in engines.items():
        grammar = engine.grammars.compile(rules["form"], "f") if "form" in rules else None
        guide = Guide(**{k: v for k, v in rules.items() if k != "form"}, grammar=grammar)
        reader = run(engine, f"{draft}", prompt, guide, sampling)
        said[draft] = reader.ids(), reader.of(Finish)[0].closed
    assert said["auto"] == said["off"]
    assert said["auto"][1] == ("budget" if "budget" in rules else "")


def test_rounds_were_verified(engines):
    """The test above would be empty if nothing was guessed."""
    engine = engines["auto"]
    guide = Guide(thinking=True, grammar=engine.grammars.compile(FORM, "f"))
    counts = run(engine, "counted", SUM, guide, SamplingParams(temperature=0.0)).of(Done)[0].usage.speculated
    assert counts.rounds > 2 and counts.accepted > 10


def test_a_constraint_that_fails_ends_its_request_and_no_other(engines, monkeypatch):
    engine = engines["auto"]
    grammar = engine.grammars.compile(regex("[a-z]{50,60}"), "f")
    begin = grammar.begin

    def failing():
        state = begin()
        advance = state.advance

        def after_five(token):
            failing.left -= 1
            if failing.left < 0:
                raise ConstraintFailed("too much")
            advance(token)
        failing.left = 5
        state.advance = after_five
        return state
    monkeypatch.setattr(grammar, "begin", failing)
    other = Reader()
    engine.submit(GenerateRequest("other", engine.tokenizer.encode(SUM), SamplingParams(temperature=0.0)), other)
    finish, = run(engine, "failing", DIRECT, Guide(grammar=grammar), SamplingParams(temperature=0.0)).of(Finish)
    assert finish.reason == "error" and finish.message.endswith("constrained any further: too much")
    assert other.wait().of(Finish)[0].reason == "stop"


def test_choices_go_their_own_ways_under_one_grammar(engines):
    engine = engines["auto"]
    guide = Guide(grammar=engine.grammars.compile(regex("[a-z]{3,8}"), "f"))
    reader = run(engine, "many", DIRECT, guide, SamplingParams(temperature=2.0, seed=3), n=5)
    texts = [reader.text(i) for i in range(5)]
    assert len(set(texts)) > 2 and all(text.isascii() and text.isalpha() and 3 <= len(text) <= 8 for text in texts)
    assert {(f.reason, f.closed) for f in reader.of(Finish)} == {("stop", "")}
