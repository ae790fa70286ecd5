"""Steering by hand-made logits: when a thought is closed, where a grammar holds, which tokens are settled."""
import re
from dataclasses import replace

import numpy as np
import pytest

from qwentin import nano
from qwentin.constraint import Grammars, regex
from qwentin.guide import Guide, Steering
from qwentin.request import SamplingParams
from qwentin.sampler import Sampler
from qwentin.tokenizer import Tokenizer

TOKENIZER = Tokenizer(nano.DIRECTORY)
GRAMMARS = Grammars(TOKENIZER)
END, CLOSE, OPENER = (TOKENIZER.ids[t] for t in ("<|im_end|>", "</think>", "<tool_call>"))
STOPS = frozenset({END})


def said(guide: Guide, wishes, most=200, **params) -> tuple[str, Sampler]:
    """What a model says that wants `wishes`, token by token, and then an end for ever."""
    sampler = Sampler(SamplingParams(**{"temperature": 0.0, **params}), np.zeros(1, np.int32), TOKENIZER.size, 0,
                      Steering(guide, TOKENIZER, STOPS))
    wishes = TOKENIZER.encode(wishes).tolist() if isinstance(wishes, str) else list(wishes)
    out = []
    for _ in range(most):
        logits = np.zeros(TOKENIZER.size, np.float32)
        logits[END] = 5
        if len(out) < len(wishes):
            logits[wishes[len(out)]] = 9
        out.append(sampler.choose(logits))
        if out[-1] in STOPS:
            break
    return TOKENIZER.decode(out), sampler


def grammar(pattern):
    return GRAMMARS.compile(regex(pattern), "f")


def test_no_wish_changes_nothing():
    text, sampler = said(Guide(thinking=True, loop=256), "Hm.\n</think>\n\nHello")
    assert text == "Hm.\n</think>\n\nHello<|im_end|>" and sampler.steering.closed == ""
    assert said(Guide(), "Hello")[0] == "Hello<|im_end|>"


@pytest.mark.parametrize("thought, closing", [("one two three\n", "</think>\n\n"), ("one two three", "\n</think>\n\n")])
def test_a_spent_budget_closes_the_thought_as_templates_write_it(thought, closing):
    count = len(TOKENIZER.encode(thought))
    text, sampler = said(Guide(thinking=True, budget=count), thought + " and so on")
    assert text.startswith(thought + closing) and sampler.steering.closed == "budget"
    assert said(Guide(thinking=True, budget=count + 1), thought + "</think>\n\nYes")[1].steering.closed == ""


def test_a_budget_of_nothing():
    text, sampler = said(Guide(thinking=True, budget=0), [5] * 6)
    assert text.startswith("\n</think>\n\n") and sampler.steering.closed == "budget"


def test_no_character_is_cut():
    thought = "a😀👨‍👩‍👧é漢字"
    ids = TOKENIZER.encode(thought).tolist()
    assert len(ids) > len(thought)          # several tokens a character
    ends = set()
    for budget in range(1, len(ids)):
        text, sampler = said(Guide(thinking=True, budget=budget), ids)
        cut = text.partition("\n</think>\n\n")[0]
        assert thought.startswith(cut) and sampler.steering.closed == "budget"
        assert 0 <= len(TOKENIZER.encode(cut)) - budget < 4
        ends.add(cut)
    assert len(ends) > 5


def test_a_loop_is_closed():
    text, sampler = said(Guide(thinking=True, loop=30), "la " * 200)
    assert sampler.steering.closed == "loop" and text.count("</think>\n\n") == 1


def test_the_thought_is_free_and_the_answer_is_not():
    guide = Guide(thinking=True, grammar=grammar("yes|no"))
    assert said(guide, "{ maybe }\n</think>\n\nno")[0] == "{ maybe }\n</think>\n\nno<|im_end|>"
    assert re.fullmatch(r"maybe\n</think>\n\n(yes|no)<.im_end.>", said(guide, "maybe\n</think>\n\nmaybe")[0])
    assert said(guide, "hm</think>yes")[0].startswith("hm</think>\n\n")       # the gap is settled
    assert said(Guide(grammar=grammar("yes|no")), "no")[0] == "no<|im_end|>"


def test_the_end_of_a_thought_that_owes_an_answer_closes_it():
    guide = Guide(thinking=True, grammar=grammar("yes"))
    assert said(guide, "Well")[0] == said(guide, "Well\n")[0] == "Well\n</think>\n\nyes<|im_end|>"
    assert said(replace(guide, budget=len(TOKENIZER.encode("Well\n"))), "Well")[0] == "Well\n</think>\n\nyes<|im_end|>"
    assert said(Guide(thinking=True), "Well")[0] == "Well<|im_end|>"


def test_budget_and_grammar_together():
    text, _ = said(Guide(thinking=True, budget=3, grammar=grammar("[0-9]{3}")), [7] * 50)
    assert text.endswith("<|im_end|>") and text.partition("</think>\n\n")[2].removesuffix("<|im_end|>").isdigit()


def test_behind_an_opener_only():
    guide = Guide(grammar=grammar("[0-9]{2}!"), opener="<tool_call>")
    twelve = TOKENIZER.encode("12!").tolist()
    text, _ = said(guide, [*TOKENIZER.encode("a99"), OPENER, *twelve, *TOKENIZER.encode(" b"), OPENER, *twelve])
    assert text == "a99<tool_call>12! b<tool_call>12!<|im_end|>"
    text, _ = said(guide, [OPENER, *TOKENIZER.encode("xyz")])
    assert re.fullmatch("<tool_call>[0-9]{2}!<.im_end.>", text)
    once = Guide(grammar=guide.grammar, opener="<tool_call>", repeats=False)
    assert said(once, [OPENER, *twelve, *TOKENIZER.encode(" b")])[0] == "<tool_call>12!<|im_end|>"
    assert said(Guide(thinking=True, grammar=guide.grammar, opener="<tool_call>"), [OPENER, 9])[0].endswith("<|im_end|>")


@pytest.mark.parametrize("params", [
    dict(temperature=1.0, seed=1), dict(temperature=2.0, top_k=3, top_p=0.5, min_p=0.1, seed=2),
    dict(temperature=0.7, repetition_penalty=1.5, presence_penalty=1.0, seed=3),
    dict(temperature=1.0, logit_bias=((65, 100.0),), seed=4)])
def test_no_sampling_parameter_breaks_a_grammar(params):
    for pattern in ("[a-c]{20}", "(yes|no)( (yes|no)){3}"):
        text, _ = said(Guide(grammar=grammar(pattern)), "AAAA", **params)
        assert re.fullmatch(pattern, text.removesuffix("<|im_end|>"))


def test_walks_of_one_seed_are_equal():
    texts = {said(Guide(thinking=True, budget=20, grammar=grammar("[a-z ]{10,30}")), [], temperature=1.5, seed=5)[0]
             for _ in range(3)}
    assert len(texts) == 1
