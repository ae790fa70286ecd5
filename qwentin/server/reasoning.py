"""Where the thought ends and the answer begins: a pure text machine, fed in any pieces, nothing re-read.

A thinking completion starts inside the thought, because the prompt ends in `<think>` and a line break:

    prompt ...<think>\n | thought \n</think> \n\n answer
                          ^^^^^^^   dropped    ^^^^^^

White space around the thought is dropped (the template puts it back when the turn becomes history), and up to two line
breaks before the answer; everything else is kept. A thought that never closes is all thought.
Proven by tests/test_reasoning.py: every way of cutting the text gives the same two strings.
"""
import re

CLOSE = "</think>"
OPENED = re.compile(r"<think>\s*\Z")
GAP = 2                     # line breaks of the format between </think> and the answer

THOUGHT, BREAK, ANSWER = "thought", "break", "answer"


def opens_thought(prompt: str) -> bool:
    """Does this rendered prompt leave the model inside a thought?"""
    return OPENED.search(prompt[-64:]) is not None


class ReasoningSplitter:
    """Text of one choice in, (thought, answer) pieces out.

    start   characters before the answer, None until that is known (0 if the prompt opened no thought)
    """

    def __init__(self, thinking: bool):
        self.state = THOUGHT if thinking else ANSWER
        self.start = None if thinking else 0
        self.read = 0               # characters taken in
        self.tail = ""              # a possible beginning of </think>, held back
        self.blank: list[str] = []  # white space of the thought that may turn out to be its last
        self.begun = False          # the thought has shown a visible character
        self.gap = 0                # line breaks dropped after </think>

    def push(self, text: str) -> tuple[str, str]:
        """(new thought, new answer); both may be empty while it is undecided what the text is."""
        self.read += len(text)
        thought = ""
        if self.state == THOUGHT:
            thought, text = self.think(text)
        if self.state == BREAK:
            text = self.skip(text)
        return (thought, text) if self.state == ANSWER else (thought, "")

    def think(self, text: str) -> tuple[str, str]:
        """Thought that is certain by now, and the text after </think> if it came."""
        text = self.tail + text
        end = text.find(CLOSE)
        if end >= 0:
            self.state, self.tail = BREAK, ""
            thought = self.visible(text[:end])
            self.blank.clear()
            return thought, text[end + len(CLOSE):]
        held = next((k for k in range(min(len(text), len(CLOSE) - 1), 0, -1) if CLOSE.startswith(text[-k:])), 0)
        self.tail = text[len(text) - held:]
        return self.visible(text[:len(text) - held]), ""

    def visible(self, text: str) -> str:
        """`text` less the white space at its end, which is kept for the case that more follows."""
        body = text.rstrip()
        if not body:
            if self.begun:
                self.blank.append(text)
            return ""
        before = "".join(self.blank)
        self.blank = [text[len(body):]]
        if not self.begun:
            self.begun = True
            body = body.lstrip()
        return before + body

    def skip(self, text: str) -> str:
        """Drop the format's line breaks; the answer begins with the first other character, or after GAP of them."""
        while text and self.gap < GAP and text[0] == "\n":
            text, self.gap = text[1:], self.gap + 1
        if text or self.gap == GAP:
            self.state, self.start = ANSWER, self.read - len(text)
        return text

    def finish(self) -> str:
        """The thought that was held back, now that no more text comes."""
        rest, self.tail = self.tail, ""
        return self.visible(rest) if self.state == THOUGHT else ""

    def is_thought(self, offset: int) -> bool | None:
        """Does a token whose text starts at `offset` belong to the thought (its closing tag and the break included)?
        None while that text has not been read."""
        if offset >= self.read:
            return None
        return self.start is None or offset < self.start
