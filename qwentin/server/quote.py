"""Does a quote end its string? Asked of JSON whose strings may hold quotes that nobody escaped.

    "say "hi" to {"a", "b"}", "next": 1}        only the last quote before , "next": is followed as an end is
         ^  ^     ^^^  ^ ^^ ^

A quote ends a string if what follows could follow a string at this depth: closing brackets that match, then a comma with
an item, or the end. In valid JSON that holds of every quote that ends a string, so valid JSON is never misread.
Used by tooljson.py; proven by tests/test_tooljson.py.
"""
import re

from .lookahead import MOST, Lookahead

CLOSER = {"{": "}", "[": "]"}
WORD = re.compile(r"[^\s,:{}\[\]\"'<]{1,%d}" % MOST)
KEY_TEXT = {'"': re.compile(r'(?:[^"\\\n]|\\.){0,%d}' % MOST), "'": re.compile(r"(?:[^'\\\n]|\\.){0,%d}" % MOST)}
ENDS = ("</tool_call>", "</function>", "</parameter>")


def string_ends(look: Lookahead, stack: list[str], outer: bool) -> bool:
    """Could what follows this quote follow a string here? Closing brackets, then a comma with an item, or the end."""
    for opener in reversed(stack):
        look.space()
        c = look.peek()
        if not c or c.isspace():
            return True
        if c == ",":
            look.at += 1
            look.space()
            c = look.peek()
            if c not in ("}", "]"):
                return item_follows(look, opener)
        if c == "<":
            return look.one_of(ENDS) is not None
        if c != CLOSER[opener]:
            return False
        look.at += 1
    look.space()
    return not outer or look.peek() in ("", "}", ",", "]", "<")


def item_follows(look: Lookahead, opener: str) -> bool:
    """An item of the container, or the end of the text."""
    c = look.peek()
    if not c:
        return True
    if opener == "[":
        return c in "\"'{[-0123456789tfnTFN"
    if c in KEY_TEXT:
        look.at += 1
        if len(look.run(KEY_TEXT[c])) >= MOST:
            return True                                 # too long to judge: valid JSON must stay what it is
        end = look.peek()
        look.at += 1
        if end == "\\":
            look.peek()                                 # only a whole escape is an answer
        if end != c:
            return not end
    else:
        look.run(WORD)
        look.lit('"')
    look.space()
    return look.peek() in ("", ":")
