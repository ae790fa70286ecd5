r"""Text of an answer in, text and tool calls out, while the text arrives.

    "Let me look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nOs" ...

    Text("Let me look.\n\n")  CallStart(0, id, "weather")  ArgumentsDelta(0, '{"city": "Os')  ...  CallEnd(0)

What holds of every text and every way of cutting it into pieces:
- the events, joined, are the same; the whole answer is the same machine fed once;
- a call's fragments, joined, are one JSON object;
- a call goes to a declared tool, and everything else is text: tags in prose and in code, calls to undeclared tools;
- nothing is lost: a character is text, or part of a call, or syntax of one (tags, the white space between them, and
  white space around calls where no text is).
Where a call begins is toolhead.py's matter, how its inside is read toolxml.py's and toolobject.py's. Pure: no I/O, no
clock; identifiers come from `new_id`. Proven by tests/test_toolcall.py and tests/test_toolcall_fuzz.py.
"""
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from .lookahead import Lookahead, More
from .markdown import CodeTracker
from .toolarguments import Arguments, Pairs
from .toolevents import ArgumentsDelta, CallEnd, CallStart, Event, Text, joined
from .toolhead import JSON, OBJECT, WRAPPER, Head, head, opens_form
from .toolobject import JsonBody, ObjectBody
from .toolschema import Tool, Toolbox
from .toolxml import CALL, XmlBody, closer

PLAIN = re.compile(r"[ \t]+|[^<\n]*\n?")
LINE = 512              # characters in which inline code must close to be code
CALLED, HELD, SHOWN, DROPPED = "called", "held", "shown", "dropped"


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass
class OpenCall:
    """What stands open in the text.

    fate    CALLED: events leave as it grows; HELD: read whole before it is known to be a call; SHOWN: text, because its
            tool is undeclared; DROPPED: a further call where only one is allowed
    start   where it begins, in characters of the input
    raw     its text, where it may be wanted (HELD, DROPPED)
    """
    body: XmlBody | JsonBody | ObjectBody
    fate: str
    start: int
    wrapped: bool
    index: int = -1
    raw: list[str] = field(default_factory=list)


class ToolCallParser:
    """One answer. `push` its text in any pieces, then `finish`; both return events.

    tools       the declared tools, a Toolbox or a list of declarations; with none, all is text
    parallel    False keeps the first call only; the text of further ones goes to `dropped`
    guess       False: no call without its tool's name or the form's tag (thoughts are full of half-written ones)
    began       where the first call begins, in characters of the input; None before one began
    """

    def __init__(self, tools: Toolbox | list[dict] | None, new_id: Callable[[], str] = new_call_id, parallel: bool = True,
                 guess: bool = True):
        self.tools = tools if isinstance(tools, Toolbox) else Toolbox(tools)
        self.new_id, self.parallel, self.guess = new_id, parallel, guess
        self.starts = {"<", "{", *(name[0] for name in self.tools.tools)}
        self.buffer, self.at, self.passed, self.ended = "", 0, 0, False
        self.events: list[Event] = []
        self.code = CodeTracker()
        self.call: OpenCall | None = None
        self.count, self.began = 0, None
        self.wrapped = False            # a <tool_call> is open
        self.after = False              # directly behind a call: closing tags are its own
        self.quiet = True               # nothing but white space since the beginning or the last call
        self.blank: list[str] = []      # that white space
        self.dropped: list[str] = []
        self.refused = 0                # nothing that begins before this place, in characters of the input, is held

    @property
    def settled(self) -> int:
        """Characters of the input before which all is text, whatever follows."""
        if self.began is not None:
            return self.began
        return self.call.start if self.call and self.call.fate == HELD else self.passed + self.at

    def push(self, text: str) -> list[Event]:
        if not self.tools:
            self.passed += len(text)
            return [Text(text)] if text else []
        self.buffer += text
        return self.read()

    def finish(self) -> list[Event]:
        """The events that waited for more text, now that none comes."""
        self.ended = True
        events = self.read()
        if self.blank and not self.count:
            events = joined([*events, Text("".join(self.blank))])
        return events

    def read(self) -> list[Event]:
        try:
            while self.at < len(self.buffer) or self.ended and self.call:
                if self.call:
                    self.read_call(self.call)
                elif self.after:
                    self.read_after()
                else:
                    self.read_text()
        except More:
            pass
        self.buffer, self.passed, self.at = self.buffer[self.at:], self.passed + self.at, 0
        events, self.events = joined(self.events), []
        return events

    # ---- text

    def read_text(self) -> None:
        """A call, if one begins here; else text up to the next place where one could."""
        c = self.buffer[self.at]
        if c in self.starts and (self.begin() or self.wrapped and c == "<" and self.stray_closer()):
            return
        stop = PLAIN.match(self.buffer, self.at + (c == "<")).end()
        self.say(self.buffer[self.at:stop])
        self.at = stop

    def say(self, text: str) -> None:
        if not text:
            return
        self.code.feed(text)
        if self.quiet:
            self.blank.append(text)
            if text.isspace():
                return
            text, self.quiet = "".join(self.blank), False
            self.blank.clear()
        self.events.append(Text(text))

    def begin(self) -> bool:
        """Open the call that begins here, if one does."""
        r = Lookahead(self.buffer, self.at, self.ended)
        wrapper = r.here().lit(WRAPPER)
        if self.code.fenced or not self.outside_inline(wrapper):
            return False
        if not wrapper and not self.code.line_start and not opens_form(r.here()):
            return False
        found = head(r, self.tools, self.wrapped and self.quiet)
        if found is None or self.refuses(found, wrapper):
            return False
        raw = self.buffer[self.at:found.end]
        self.call = self.open(found, wrapper or self.wrapped)
        self.at = found.end
        if self.call.fate == SHOWN:
            self.say(raw)
        elif self.call.fate != CALLED:
            self.call.raw.append(raw)
        return True

    def refuses(self, found: Head, wrapper: bool) -> bool:
        """Is it too weak a sign of a call, here, to hold the text back?"""
        if found.name is not None:
            return False
        return self.passed + self.at < self.refused or not self.guess and not (wrapper and found.form == OBJECT)

    def outside_inline(self, wrapper: bool) -> bool:
        """Does this place stand outside inline code? Before a wrapper, a run that no other closes in its line opens none."""
        length = self.code.inline
        if not length or not wrapper:
            return not length
        line, brk, _ = self.buffer[self.at:self.at + LINE].partition("\n")
        close = re.search(rf"(?<!`)`{{{length}}}(?!`)", line)
        whole = brk or self.ended or len(line) == LINE
        if not whole and (close is None or close.end() == len(line)):
            raise More
        return close is None and len(line) < LINE

    def stray_closer(self) -> bool:
        """A closing tag alone in its line, behind text that stood inside the wrapper: syntax."""
        r = Lookahead(self.buffer, self.at, self.ended)
        kind = closer(r)
        if kind is None or self.code.fenced or not self.code.line_start or r.peek() not in ("", "\n"):
            return False
        r.lit("\n")
        self.wrapped = kind != CALL
        self.at = r.at
        return True

    def read_after(self) -> None:
        """Closing tags and braces behind a call are its own, however many there are."""
        r = Lookahead(self.buffer, self.at, self.ended)
        r.space()
        kind = None if r.lit("}") else closer(r) or ""
        if kind == "":
            self.after = False
            return
        self.wrapped = self.wrapped and kind != CALL
        self.at = r.at

    # ---- calls

    def open(self, found: Head, wrapped: bool) -> OpenCall:
        """The machine for what `found` begins."""
        start = self.passed + self.at
        if found.form == OBJECT:
            return OpenCall(ObjectBody(found.prefix, found.infer), HELD, start, wrapped)
        if found.tool is None:
            return OpenCall(XmlBody(Pairs(), self.tools), SHOWN if found.name else HELD, start, wrapped)
        arguments = Arguments(found.tool)
        body = JsonBody(arguments) if found.form == JSON else XmlBody(arguments, self.tools)
        call = OpenCall(body, CALLED, start, wrapped)
        self.commit(call, found.tool)
        return call

    def commit(self, call: OpenCall, tool: Tool) -> None:
        """It is a call: say so, unless it is one too many."""
        self.blank.clear()
        self.wrapped = call.wrapped
        if self.count and not self.parallel:
            call.fate = DROPPED
            return
        call.fate, call.index = CALLED, self.count
        self.began = call.start if self.began is None else self.began
        self.count += 1
        self.events.append(CallStart(call.index, self.new_id(), tool.name))

    def read_call(self, call: OpenCall) -> None:
        stop = call.body.take(self.buffer, self.at, self.ended)
        piece, self.at = self.buffer[self.at:stop], stop
        if call.fate == CALLED:
            self.events.append(ArgumentsDelta(call.index, call.body.arguments.drain()))
        elif call.fate == SHOWN:
            self.say(piece)
        else:
            call.raw.append(piece)
        if call.body.done:
            self.call = None
            self.end(call)
        elif not piece:
            raise More

    def end(self, call: OpenCall) -> None:
        arguments = self.understood(call) if call.fate == HELD else getattr(call.body, "arguments", None)
        if call.fate in (HELD, SHOWN):
            self.show(call)
            return
        extra = "".join(call.body.extra)
        if call.fate == DROPPED:
            self.dropped.append("".join(call.raw))
            extra = ""
        else:
            if arguments.tool.freeform and not arguments.keys and isinstance(call.body, XmlBody):
                arguments.out.append(extra.removesuffix("\n"))
                extra = ""
            self.events += [ArgumentsDelta(call.index, arguments.drain()), CallEnd(call.index, call.body.complete)]
        self.after = self.quiet = True
        self.code.new_line()
        if extra:
            self.say(extra)

    def show(self, call: OpenCall) -> None:
        """It is text. What was held to no clear end is read once more, for calls that say what they are."""
        raw = "".join(call.raw)
        self.wrapped = False                # closing tags from here on are text as well
        if call.fate == HELD and not (call.body.complete and clean(call.body)):
            self.refused = call.start + len(raw)
            self.buffer, self.passed, self.at = raw + self.buffer[self.at:], call.start, 1
            raw = raw[:1]
        self.say(raw)

    def understood(self, call: OpenCall) -> Arguments | None:
        """Arguments of a held call, committed if it is one."""
        body = call.body
        if isinstance(body, ObjectBody):
            found = body.call(self.tools)
            if found is None:
                return None
            arguments = Arguments(found[0])
            arguments.whole(found[1])
        else:
            tool = self.tools.infer(key for key, _ in body.arguments.pairs)
            if tool is None or not body.complete or not clean(body):
                return None
            arguments = Arguments(tool)
            body.arguments.to(arguments)
        self.commit(call, arguments.tool)
        return arguments


def clean(body: XmlBody | ObjectBody) -> bool:
    """Nothing in a held call looks as if it had been read wrongly: no text between parameters, no tags in them."""
    return isinstance(body, ObjectBody) or not body.extra and not any(
        "</parameter>" in "".join(pieces) for _, pieces in body.arguments.pairs)
