"""StopMatcher: a pure text machine that ends a choice at a stop string, wherever the pieces of text are cut.

What might be the beginning of a stop string is held back until it is clear, so a stream never shows half of one. The stop
string that is complete first wins, the longest of those that end together: this alone does not depend on the cuts.
Proven by tests/test_stopping.py over every way of cutting the text.
"""


class StopMatcher:
    """Stop strings `stops`, looked for only behind the first `after` ("" = everywhere)."""

    def __init__(self, stops: tuple[str, ...], after: str = ""):
        self.stops = stops
        self.after = after if stops else ""
        self.passed = ""        # end of the text that went by before `after` was found
        self.held = ""          # a suffix that may yet become a stop string
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Text that may be shown now. Once `hit` is set the choice is over and later text is dropped."""
        if self.hit is not None:
            return ""
        if not self.after:
            return self.search(text)
        seen = self.passed + text
        at = seen.find(self.after)
        if at < 0:
            self.passed = seen[-(len(self.after) - 1):] if len(self.after) > 1 else ""
            return text
        behind = seen[at + len(self.after):]
        self.after = ""
        return text[:len(text) - len(behind)] + self.search(behind)

    def search(self, text: str) -> str:
        text = self.held + text
        found = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.hit = min(found, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))
            self.held = ""
            return text[:at]
        keep = max((overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep:]
        return text[:len(text) - keep]

    def finish(self) -> str:
        """The text still held back, when the choice ends for another reason."""
        rest, self.held = self.held, ""
        return rest


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
