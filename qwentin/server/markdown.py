"""Is this place of an answer code? Fences, inline code and indented lines, followed as the text arrives.

    ```xml          a fence: three or more ` or ~ first in a line, after nothing but indent, > and a list mark
    <tool_call>     in code
    ```             closed by a run of the same character, as long, alone in its line
    `<tool_call>`   inline code: a run of ` until the next run of the same length, within one line
        <function=  four columns of indent

A tag in code is text that somebody shows, never a call. Enough of CommonMark (spec 0.31, 4.4, 4.5, 6.1) for that one
question; a model's prose is not a document. Used by toolcall.py; proven by tests/test_markdown.py.
"""
import re

TOKEN = re.compile(r"\n|`+|~+|[^\n`~]+")
BEFORE_FENCE = re.compile(r"[ \t]*(?:>[ \t]*)*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?[ \t]*")
PREFIX = 64                 # characters of a line's beginning that are kept


class CodeTracker:
    """Feed it every character of the text in order; ask between characters."""

    def __init__(self):
        self.fence = ""         # the run that opened the fence
        self.new_line()
        self.run = ""           # a run of ` or ~ that the next piece may lengthen

    def new_line(self) -> None:
        """A line begins."""
        self.line = ""          # how the line begins, at most PREFIX characters
        self.inline = 0         # length of the run that opened inline code in this line
        self.opening = ""       # a run that opens a fence when the line ends without another one
        self.closing = False    # the line may be the one that closes the fence

    def feed(self, text: str) -> None:
        for token in TOKEN.findall(text):
            if self.run and token[0] != self.run[0]:
                self.settle()
            if token == "\n":
                self.fence = "" if self.closing else self.opening or self.fence
                self.new_line()
            elif token[0] in "`~":
                self.run += token
            else:
                self.closing = self.closing and token.isspace()
                self.extend(token)

    def extend(self, text: str) -> None:
        if len(self.line) < PREFIX:
            self.line += text[:PREFIX]

    def settle(self) -> None:
        """The run of ` or ~ is over: say what it does."""
        run, self.run = self.run, ""
        if not run:
            return
        first = len(run) >= 3 and BEFORE_FENCE.fullmatch(self.line) is not None
        if self.fence:
            self.closing = first and run.startswith(self.fence) and not self.closing
        elif self.opening and run[0] == "`" == self.opening[0]:         # ```inline``` after all
            self.inline = 0 if run == self.opening else len(self.opening)
            self.opening = ""
        elif first and not self.inline:
            self.opening = run
        elif run[0] == "`" and not self.opening:
            self.inline = 0 if self.inline == len(run) else self.inline or len(run)
        self.extend(run)

    @property
    def fenced(self) -> bool:
        """In a fence, in the line that opens one, or in an indented line."""
        self.settle()
        indent = self.line.expandtabs(4)
        return bool(self.fence or self.opening) or indent.isspace() and len(indent) >= 4

    @property
    def line_start(self) -> bool:
        """Nothing but a small indent stands before this place in its line."""
        self.settle()
        return not self.line.strip()
