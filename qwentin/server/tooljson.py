r"""Almost-JSON in, JSON out, one value, as it arrives: what a model writes is made valid without waiting for its end.

    {'a': True, "b": "raw
    line", "c": "say "hi"", d: [1, 2,]        ->    {"a": true, "b": "raw\nline", "c": "say \"hi\"", "d": [1, 2]}

Mended on the way: Python's literals and quotes, raw control characters, bad escapes, bare words, missing and surplus
commas, unescaped quotes in a string (a quote ends a string only if what follows it could follow a string here),
brackets that do not match, a text that ends early. Valid JSON keeps its meaning, always: the tests run arbitrary values
through. White space outside strings becomes json.dumps' own. Stack and phase are data, so depth costs no recursion.
Used by toolxml.py and toolschema.py; proven by tests/test_tooljson.py.
"""
import re

from .jsontext import LITERALS, escape, is_number
from .lookahead import Lookahead, More
from .quote import CLOSER, WORD, string_ends

KEY, COLON, VALUE = "key", "colon", "value"     # what the innermost container expects
OPENER = {"}": "{", "]": "["}
SPACES = re.compile(r"\s+")
STRING_TEXT = re.compile(r"""[^"'\\<\x00-\x1f]+""")
TAGGED = "</content>"       # a string that came as <content>...</content>


class JsonRepair:
    """One value. `take` reads, `out` collects JSON text, `done` says that the value is over.

    exact   nothing was guessed: the text was JSON, or the same in Python's spelling
    closed  the value ended by itself, not with the text or at a tag
    outer   the value stands inside a JSON object that somebody else reads: a } or , must follow it
    """

    def __init__(self, outer: bool = False):
        self.outer, self.out = outer, []
        self.stack: list[str] = []      # "{" and "["
        self.filled: list[bool] = []    # has the container an item
        self.phase, self.separated = VALUE, True
        self.quote, self.is_key = "", False
        self.done, self.exact, self.closed = False, True, True

    def take(self, text: str, at: int, ended: bool) -> int:
        """Read from text[at:] as far as is certain; where reading stopped."""
        r = Lookahead(text, at, ended)
        try:
            while not self.done:
                if self.quote:
                    self.string(r)
                else:
                    self.structure(r)
                at = r.at
        except More:
            pass
        return at

    def drain(self) -> str:
        text = "".join(self.out)
        self.out.clear()
        return text

    # ---- outside strings

    def structure(self, r: Lookahead) -> None:
        space = SPACES.match(r.text, r.at)
        if space:
            r.at = space.end()
            return
        c = r.peek()
        if c == "<":
            self.angle(r)
        elif not c:
            self.close_all()
        elif c not in ",:{}[]\"'":
            self.word(r)
        else:
            r.at += 1
            self.mark(c)

    def mark(self, c: str) -> None:
        """One character of JSON's own."""
        if c == ",":
            self.complete_pair()
            self.separated = True
        elif c == ":":
            self.exact &= self.phase == COLON
            self.colon()
        elif c in CLOSER:
            if self.phase == KEY:                           # {{"a": 1}}
                self.exact = False
                return
            self.begin_value()
            self.out.append(c)
            self.stack.append(c)
            self.filled.append(False)
            self.phase, self.separated = KEY if c == "{" else VALUE, True
        elif c in OPENER:
            self.close(OPENER[c])
        else:
            self.begin_string(c)

    def colon(self) -> None:
        if self.phase == COLON:
            self.out.append(": ")
            self.phase = VALUE

    def begin_value(self) -> None:
        self.exact &= self.phase == VALUE
        self.colon()
        if self.stack and self.stack[-1] == "[":
            self.separate()

    def separate(self) -> None:
        if self.filled[-1]:
            self.exact &= self.separated
            self.out.append(", ")

    def begin_string(self, quote: str) -> None:
        self.is_key = self.phase == KEY
        if self.is_key:
            self.separate()
        else:
            self.begin_value()
        self.out.append('"')
        self.quote = quote

    def end_string(self) -> None:
        self.out.append('"')
        self.quote = ""
        if self.is_key:
            self.phase = COLON
        else:
            self.end_value()

    def end_value(self) -> None:
        if not self.stack:
            self.done = True
            return
        self.filled[-1], self.separated = True, False
        self.phase = KEY if self.stack[-1] == "{" else VALUE

    def complete_pair(self) -> None:
        """A key without a value gets null."""
        if self.stack and self.stack[-1] == "{" and self.phase != KEY:
            self.exact = False
            self.colon()
            self.out.append("null")
            self.end_value()

    def close(self, opener: str) -> None:
        """Close the innermost such container and what is open inside it."""
        if opener not in self.stack:
            self.exact = False
            return
        while True:
            self.complete_pair()
            top = self.stack.pop()
            self.filled.pop()
            self.out.append(CLOSER[top])
            self.end_value()
            if top == opener:
                return
            self.exact = False

    def close_all(self) -> None:
        """The text is over."""
        self.exact = self.closed = False
        while self.stack:
            self.close(self.stack[-1])
        if not self.done:
            self.out.append("null")
        self.done = True

    def angle(self, r: Lookahead) -> None:
        """A tag where JSON was expected: a tagged string, or the end of a value that was not closed."""
        if self.phase == VALUE and r.lit("<content>"):
            self.exact = False
            self.begin_string(TAGGED)
        else:
            self.close_all()

    def word(self, r: Lookahead) -> None:
        """A number, a literal, or a word without its quotes (or without the first of them)."""
        word = r.run(WORD)
        literal = LITERALS.get(word.lower()) or (word if is_number(word) else None)
        if self.phase == KEY or literal is None:
            self.exact = False
            if r.peek() in ('"', "'"):
                r.at += 1
            self.begin_string("word")
            self.out.append(escape(word))
            self.end_string()
        else:
            self.begin_value()
            self.out.append(literal)
            self.end_value()

    # ---- inside a string

    def string(self, r: Lookahead) -> None:
        plain = STRING_TEXT.match(r.text, r.at)
        if plain:
            r.at = plain.end()
            self.out.append(escape(plain.group()))
            return
        c = r.peek()
        if not c:
            self.exact = False
            self.end_string()
        elif c == "\\" and self.quote != TAGGED:
            self.backslash(r)
        elif c == "<":
            self.angle_in_string(r)
        else:
            look = Lookahead(r.text, r.at + 1, r.ended)
            ends = c == self.quote and (self.is_key or string_ends(look, self.stack, self.outer))
            r.at += 1
            if ends:
                self.end_string()
            else:
                self.exact &= c != self.quote
                self.out.append(escape(c))

    def backslash(self, r: Lookahead) -> None:
        r.at += 1
        c = r.peek()
        if not c:                                           # the text ended inside an escape
            self.exact = False
            return
        if c == "u":
            code = r.text[r.at + 1:r.at + 5]
            valid = all(digit in "0123456789abcdefABCDEF" for digit in code)
            if valid and len(code) < 4:
                if not r.ended:
                    raise More
                self.exact, r.at = False, len(r.text)
                return
            if valid:
                r.at += 5
                self.out.append("\\u" + code)
                return
        if c in '"\\/bfnrt':
            self.out.append("\\" + c)
            r.at += 1
        elif c == "'":
            self.out.append("'")
            r.at += 1
        else:
            self.out.append("\\\\")

    def angle_in_string(self, r: Lookahead) -> None:
        """A tag that ends a string which nothing else ends, or a plain <."""
        if self.quote == TAGGED and r.lit(TAGGED):
            self.end_string()
            return
        look = r.here()
        if look.lit("</tool_call>"):
            gap = look.space()
            if not look.peek() or "\n" in gap and look.lit("<tool_call>"):
                self.exact = False
                self.end_string()
                return
        r.at += 1
        self.out.append("<")


def repaired(text: str) -> tuple[str, bool, str]:
    """A whole text at once: (its JSON, exact, what follows the value)."""
    machine = JsonRepair()
    end = machine.take(text, 0, True)
    return machine.drain(), machine.exact, text[end:]
