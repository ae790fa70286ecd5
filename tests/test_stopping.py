"""StopMatcher: the same text whatever the cuts, nothing of a stop string shown, nothing else lost."""
import random

import pytest

from qwentin.stopping import StopMatcher, overlap


def run(pieces, stops, after=""):
    matcher, shown = StopMatcher(stops, after), ""
    for piece in pieces:
        shown += matcher.push(piece)
    return shown + matcher.finish(), matcher.hit


CASES = [
    ("hello world", ("wor",), "", ("hello ", "wor")),
    ("hello wo", ("wor",), "", ("hello wo", None)),
    ("aaab", ("aab",), "", ("a", "aab")),
    ("one END two STOP", ("STOP", "END"), "", ("one ", "END")),
    ("abc", ("b", "bc"), "", ("a", "b")),               # the one that is complete first
    ("abc", ("bc", "abc"), "", ("", "abc")),            # the longest of those that end together
    ("x\n\ny", ("\n\n",), "", ("x", "\n\n")),
    ("think END</t> answer END more", ("END",), "</t>", ("think END</t> answer ", "END")),
    ("think END never closed", ("END",), "</t>", ("think END never closed", None)),
    ("</t>END", ("END",), "</t>", ("</t>", "END")),
    ("no stops at all", (), "</t>", ("no stops at all", None)),
    ("漢字👨‍👩‍👧END", ("👧E",), "", ("漢字👨‍👩‍", "👧E")),
]


@pytest.mark.parametrize("text, stops, after, wanted", CASES)
def test_every_cut(text, stops, after, wanted):
    assert run([text], stops, after) == wanted
    assert run(list(text), stops, after) == wanted
    for i in range(len(text) + 1):
        assert run([text[:i], text[i:]], stops, after) == wanted


def test_random_text_agrees_with_find():
    rng = random.Random(2)
    for _ in range(3000):
        text = "".join(rng.choices("ab", k=rng.randint(0, 30)))
        stops = tuple({"".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))})
        ends = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
        pieces, rest = [], text
        while rest:
            n = rng.randint(1, 4)
            pieces, rest = pieces + [rest[:n]], rest[n:]
        wanted = (text[:min(ends)[1]], min(ends)[2]) if ends else (text, None)
        assert run(pieces, stops) == wanted


def test_held_text_is_never_a_stop():
    matcher = StopMatcher(("stop",))
    assert matcher.push("a st") == "a " and matcher.held == "st"
    assert matcher.push("ep") == "step"
    assert overlap("xxsto", "stop") == 3 and overlap("stop", "stop") == 0
