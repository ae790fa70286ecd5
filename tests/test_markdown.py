"""Which places of an answer are code, the same however the text arrives."""
import pytest

from qwentin.server.markdown import CodeTracker

# § marks a place in code, ¤ one in plain text; neither is part of the text
MARKED = [
    "¤a `§b` ¤c\n¤d",
    "a `` § ` § `` ¤",
    "a ` § \n ¤ ` § ` ¤",
    "```\n§\n```\n¤",
    "¤\n```xml\n§ ` § \n§\n```\n¤",
    "~~~~ a ` b\n§\n~~~\n§\n````\n§\n~~~~~ \n¤",
    "```\n§\n``` x\n§\n  ```  \n¤",
    "``` a ``` ¤ b\n¤",
    "```a `` § b\n¤",
    "1. ```\n   §\n   ```\n¤",
    "> - ```\n> §\n> ```\n¤",
    "-```\n",
    "    § code\n\t§\n   ¤ text",
    "text\n    § code",
    "a```\n¤",
    "````\n```\n§\n````\n¤",
    "~~ a ~~ ¤ ~~~ ¤\n¤",
    "x" * 100 + " ```\n¤",
]


@pytest.mark.parametrize("marked", MARKED)
def test_code_and_text(marked):
    for size in (1, 2, 3, 1000):
        tracker, since = CodeTracker(), ""
        for c in marked:
            if c in "§¤":
                for at in range(0, len(since), size):
                    tracker.feed(since[at:at + size])
                since = ""
                assert (tracker.fenced or tracker.inline > 0) == (c == "§"), (size, marked)
            else:
                since += c


@pytest.mark.parametrize("text, start", [("", True), ("a\n", True), ("a\n  ", True), ("a", False), ("a\n- ", False),
                                         ("a ", False)])
def test_line_start(text, start):
    tracker = CodeTracker()
    tracker.feed(text)
    assert tracker.line_start is start
