"""The splitter gives the same thought and answer for every way of cutting the text, and sorts offsets to the right side."""
import random

import pytest
from hypothesis import given, settings, strategies as st

from qwentin.server.reasoning import CLOSE, ReasoningSplitter, opens_thought

TEXTS = [
    "I add.\n</think>\n\n7 + 5 = 12",
    "short</think>answer",
    "</think>\n\nno thought at all",
    "\n\n  \n</think>\n\nblank thought",
    "cut in the middle of a thou",
    "ends in something like a tag </thin",
    "a < b, a </ b, </thin k>, <</think>\n\nthen",
    "two blank lines\n\n\nbetween\n</think>\n\n\n\n  indented answer\n",
    "thought\n</think>\n",
    "thought\n</think>",
    "thought \n</think>\n\n</think> again, and <think> too",
    "😀 👨‍👩‍👧 漢字\n</think>\n\n👨‍👩‍👧 漢字 😀",
    "<tool_call>\n<function=f>\n</function>\n</tool_call>\n</think>\n\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
    "",
]


def at_once(text, thinking=True):
    """The same split, said in another way: (thought, answer, where the answer starts or None)."""
    if not thinking:
        return "", text, 0
    before, tag, after = text.partition(CLOSE)
    if not tag:
        return text.strip(), "", None
    answer = after.removeprefix("\n").removeprefix("\n")
    return before.strip(), answer, len(text) - len(answer)


def fed(pieces, thinking=True):
    splitter = ReasoningSplitter(thinking)
    thought = answer = ""
    for piece in pieces:
        more_thought, more_answer = splitter.push(piece)
        thought, answer = thought + more_thought, answer + more_answer
    return thought + splitter.finish(), answer


def cut(text, rng, most):
    while text:
        size = rng.randint(1, most)
        yield text[:size]
        text = text[size:]


@pytest.mark.parametrize("text", TEXTS)
def test_every_split_in_two(text):
    for at in range(len(text) + 1):
        assert fed([text[:at], text[at:]]) == at_once(text)[:2], at


@pytest.mark.parametrize("text", TEXTS)
def test_every_character_and_random_chunks(text):
    assert fed(list(text)) == at_once(text)[:2]
    rng = random.Random(1)
    for most in (4, 12):
        for _ in range(50):
            assert fed(cut(text, rng, most)) == at_once(text)[:2]


@pytest.mark.parametrize("text", TEXTS)
def test_no_thought_was_opened(text):
    assert fed(list(text), thinking=False) == ("", text)


FRAGMENTS = st.lists(st.sampled_from([CLOSE, "</think", "<", "/", "think>", "\n", " ", "a", "é", "😀", "</"]), max_size=12)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(FRAGMENTS)
def test_generated_texts(fragments):
    text = "".join(fragments)
    assert fed(fragments) == at_once(text)[:2]
    assert fed(list(text)) == at_once(text)[:2]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(FRAGMENTS, st.booleans())
def test_offsets_fall_on_the_right_side(fragments, thinking):
    """Whatever is_thought says at any time agrees with the whole text, and at the end every character is decided."""
    text = "".join(fragments)
    start = at_once(text, thinking)[2]
    right = [start is None or at < start for at in range(len(text))]
    splitter, read = ReasoningSplitter(thinking), 0
    for piece in fragments:
        splitter.push(piece)
        read += len(piece)
        assert [splitter.is_thought(at) for at in range(read)] == right[:read]
        assert splitter.is_thought(read) is None


def test_held_back_no_longer_than_needed():
    splitter = ReasoningSplitter(True)
    assert splitter.push("a") == ("a", "")
    assert splitter.push(" </") == ("", "")
    assert splitter.push("b") == (" </b", "")
    assert splitter.push("\n</think>\n\nx") == ("", "x")


@pytest.mark.parametrize("prompt, opened", [
    ("<|im_start|>assistant\n<think>\n", True),
    ("<|im_start|>assistant\n<think>", True),
    ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
    ("<|im_start|>assistant\n", False),
    ("what does <think> mean?<|im_end|>\n<|im_start|>assistant\n", False),
])
def test_opens_thought(prompt, opened):
    assert opens_thought(prompt) is opened
