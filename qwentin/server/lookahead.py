"""A place in a text that may still grow: questions are answered once no later text can change the answer.

The text machines of this room ask "does a tag begin here?" of text that arrives in pieces. A question that runs into
the end of what has arrived raises `More`, the machine waits, and asks again when more is there. So an answer depends on
the whole text alone, never on how it was cut; and since every question looks at a bounded stretch, waiting costs no
rescans that grow. Used by toolcall.py, toolhead.py, toolxml.py and tooljson.py; proven by their every-split tests.
"""
import re

MOST = 256                              # characters of white space or of a name that a question looks across
SPACE = re.compile(r"\s{0,%d}" % MOST)


class More(Exception):
    """The text ends before the question can be answered."""


class Lookahead:
    """text[at:], and whether the text has `ended` (then its end is an answer too)."""

    def __init__(self, text: str, at: int = 0, ended: bool = False):
        self.text, self.at, self.ended = text, at, ended

    def here(self) -> "Lookahead":
        """Another reader of the same place."""
        return Lookahead(self.text, self.at, self.ended)

    def peek(self) -> str:
        """The next character; "" at the end of a text that has ended."""
        if self.at == len(self.text) and not self.ended:
            raise More
        return self.text[self.at:self.at + 1]

    def lit(self, word: str) -> bool:
        """Step over `word` if it stands here."""
        if self.text.startswith(word, self.at):
            self.at += len(word)
            return True
        if not self.ended and word.startswith(self.text[self.at:self.at + len(word)]):
            raise More
        return False

    def one_of(self, words) -> str | None:
        """Step over the first of `words` that stands here, and name it."""
        return next((word for word in words if self.lit(word)), None)

    def run(self, pattern: re.Pattern) -> str:
        """Step over what `pattern` (of bounded length) matches here, once it cannot grow any more."""
        found = pattern.match(self.text, self.at)
        if found is None:
            self.peek()
            return ""
        if found.end() == len(self.text) and not self.ended and len(found.group()) < MOST:
            raise More
        self.at = found.end()
        return found.group()

    def space(self) -> str:
        return self.run(SPACE)
