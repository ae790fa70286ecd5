"""Thought and calls together: every way of cutting a completion gives the same thought, text and calls."""
import json
import random
from pathlib import Path

import pytest

from qwentin.server.answer import AnswerParser
from qwentin.server.toolevents import CallStart, Reasoning, Text
from tool_texts import TOKEN, TOOLS, call, counter, drive, every_way, readable

EVAL = Path(__file__).parent / "data" / "eval.jsonl"
LS, CALL = ("bash", {"command": "ls"}), call("bash", command="ls")
WEATHER = ("get_weather", {"city": "Oslo", "days": 3})
OTHER = call("get_weather", city="Oslo", days=3)


def answered(text, thinking=True, tools=TOOLS, cut=False, **options):
    return every_way(text, lambda pieces: drive(AnswerParser(thinking, tools, counter(), **options), pieces, cut=cut))


def thought(text):
    return ("thought", text)


# ---- the rows of the acceptance list

def test_T15_a_draft_in_the_thought_is_not_a_call():
    text = f"I could run\n{CALL}\nor rather ask.\n</think>\n\n{OTHER}"
    assert answered(text) == [thought(f"I could run\n{CALL}\nor rather ask."), WEATHER]
    assert answered(f"{CALL}\n</think>\n\n{CALL}") == [thought(CALL), LS]
    assert answered(f"{CALL}\n</think>\n\nNo call.") == [thought(CALL), "No call."]


@pytest.mark.parametrize("first", ["", "I need it.\n", "I need it.\n\n"])
@pytest.mark.parametrize("last", ["", "\n"])
def test_T16_a_call_ends_a_thought_that_nothing_closes(first, last):
    before = [thought("I need it.")] if first else []
    assert answered(first + CALL + last) == [*before, LS]
    assert answered(first + CALL + "\n" + OTHER + last) == [*before, LS, WEATHER]
    assert answered(first + CALL + "\nDone." + last) == [*before, LS, "\nDone." + last]
    assert answered(first + CALL.removesuffix("\n</tool_call>") + last) == [*before, LS]
    assert answered(first + '<tool_call>\n{"name": "list_tasks"}\n</tool_call>' + last) == [*before, ("list_tasks", {})]


@pytest.mark.parametrize("text", [
    "I need it.\n" + call("unknown", city="Oslo"), "I need it.\n" + CALL[:-40], "In code:\n```\n" + CALL + "\n```",
    "The tag `<tool_call>` opens it.", "I need it. <tool_call>", "<tool_call>\n<function=bash>",
    "<parameter=command>\nls\n</parameter>\n</function>", '{"name":\n{"command": "ls"}}',
])
def test_T16_anything_less_than_a_call_is_thought(text):
    assert answered(text) == [thought(text.strip())]


def test_T16_a_thought_that_was_cut_off_decided_nothing():
    assert answered(f"Hm.\n{CALL}\nBut then", cut=True) == [thought(f"Hm.\n{CALL}\nBut then")]
    assert answered(f"Hm.\n{CALL}", cut=True) == [thought(f"Hm.\n{CALL}")]
    assert answered(f"Hm.\n</think>\n\n{CALL}", cut=True) == [thought("Hm."), LS]


def test_T17_with_tools_the_first_delta_is_thought():
    parser = AnswerParser(True, TOOLS, counter())
    assert parser.push("The") == [Reasoning("The")]
    assert parser.push(" tool `<tool_call>` ") == [Reasoning(" tool `<tool_call>`")]
    assert parser.push("</think>\n\nSo") == [Text("So")]


@pytest.mark.parametrize("character", ["😀", "👨‍👩‍👧", "漢字", "é"])
def test_S1_characters_are_whole_everywhere(character):
    text = f"a {character}\n</think>\n\nb {character}\n\n" + call("write", file_path=character, content=f"c {character}")
    written = ("write", {"file_path": character, "content": f"c {character}"})
    assert answered(text) == [thought(f"a {character}"), f"b {character}\n\n", written]


def test_T12_thought_end_text_and_call_in_one_chunk():
    assert answered(f"Hm.</think> xxx{CALL}{OTHER} yyy") == [thought("Hm."), " xxx", LS, WEATHER, " yyy"]
    assert answered(f"Hm.\n</think>{CALL}") == [thought("Hm."), LS]


# ---- thought and answer without calls, as reasoning.py splits them

@pytest.mark.parametrize("text, expected", [
    ("I add.\n</think>\n\n12", [thought("I add."), "12"]),
    ("short</think>answer", [thought("short"), "answer"]),
    ("</think>\n\nno thought", ["no thought"]),
    ("cut in the midd", [thought("cut in the midd")]),
    ("ends like a tag </thin", [thought("ends like a tag </thin")]),
    ("a <b> < c\n</think>\n\n</think> again", [thought("a <b> < c"), "</think> again"]),
    ("\n\n  \n</think>\n\n\n\n  x\n", ["\n\n  x\n"]),
    ("", []),
])
def test_without_calls(text, expected):
    assert answered(text) == expected
    assert answered(text, tools=None) == expected


def test_no_thought_was_opened():
    assert answered("Hi <think> x </think>\n" + CALL, thinking=False) == ["Hi <think> x </think>\n", LS]


def test_only_the_first_call_where_one_is_allowed():
    assert answered(f"Hm.\n</think>\n\n{CALL}\n{OTHER}", parallel=False) == [thought("Hm."), LS]
    assert answered(f"Hm.\n{CALL}\n{OTHER}", parallel=False) == [thought("Hm."), LS]
    parser = AnswerParser(True, TOOLS, counter(), parallel=False)
    drive(parser, [f"Hm.\n{CALL}\n{OTHER}"])
    assert "Oslo" in parser.dropped[0]


def test_completions_of_the_embedded_model():
    """Completions that were judged against the right answers elsewhere: the parser finds the same ones right."""
    rows = [json.loads(line) for line in EVAL.read_text().splitlines()]
    assert len(rows) == 120 and sum(bool(row["tool_calls"]) for row in rows) > 10
    for row in rows:
        parser = AnswerParser(row["enable_thinking"], row["tools"], counter())
        said = [part for part in readable(drive(parser, TOKEN.findall(row["reference_text"]))) if part[0] != "thought"]
        wanted = [row["answer"]] if row["answer"] else [(c["name"], c["arguments"]) for c in row["tool_calls"]]
        assert (said == wanted) is row["reference_exact"], row["reference_text"]


# ---- streaming

def test_thought_leaves_as_it_comes_and_a_call_in_it_waits():
    parser = AnswerParser(True, TOOLS, counter())
    assert parser.push("I look") == [Reasoning("I look")]
    assert parser.push(" at it.\n" + CALL) == [Reasoning(" at it.")]
    assert parser.push(" but no") == []
    assert parser.push("</think>\n\n") == [Reasoning(f"\n{CALL} but no")]
    assert parser.push("Yes") == [Text("Yes")]
    assert parser.finish() == []


def test_calls_of_the_answer_leave_as_they_come():
    parser = AnswerParser(True, TOOLS, counter())
    assert parser.push("Hm.</think>\n\n<tool_call>\n<function=bash>") == [Reasoning("Hm."), CallStart(0, "call_1", "bash")]


# ---- which side a token belongs to

@pytest.mark.parametrize("text, start", [
    ("I add.\n</think>\n\n12", 17), (f"Hm.\n{CALL}", 4), (f"Hm {CALL} no\n</think>\n\nx", None), ("only thought", None),
    (f"A draft {CALL}\n", 8),
])
def test_offsets_fall_on_the_right_side(text, start):
    start = text.find("</think>") + 10 if start is None and "</think>" in text else start
    right = [start is None or at < start for at in range(len(text))]
    rng = random.Random(text)
    for _ in range(20):
        parser, tokens, read = AnswerParser(True, TOOLS, counter()), TOKEN.findall(text), 0
        while tokens:
            size = rng.randint(1, 4)
            piece, tokens = "".join(tokens[:size]), tokens[size:]
            parser.push(piece)
            read += len(piece)
            said = [parser.is_thought(at) for at in range(read)]
            assert all(side in (None, want) for side, want in zip(said, right))
            assert parser.is_thought(read) is None
        parser.finish()
        assert [parser.is_thought(at) for at in range(len(text))] == right
