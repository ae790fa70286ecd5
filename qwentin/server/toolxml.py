r"""The inside of <function=...>: parameters, and which closing tag is one.

    <parameter=content>\n value \n</parameter>\n<parameter=...          one line break on each side is the format's, the
    ^ BETWEEN            ^ VALUE                                        rest of the value is kept character for character

A value is any text, and may well hold </parameter> or a whole example of a call. Three rules tell its end:

1. A closing tag ends a value if what follows it could follow a value: more closing tags, a parameter, a call, the end
   of the text. Prose may follow only where two tags or more close the value and its call.
2. A value that began on its own line is closed by tags on lines of their own.
3. Inside a value, a function that opens is an example: its tags are text until it closes.

A missing </parameter> is noticed by rule 1 at the next tag, or at a declared parameter that opens a line.
Used by toolcall.py; proven by tests/test_toolcall.py.
"""
import re

from .lookahead import Lookahead, More
from .toolarguments import Arguments, Pairs
from .toolhead import JSON, MALFORMED, NAME, function, json_head, opens_call, parameter
from .tooljson import SPACES, JsonRepair
from .toolschema import Toolbox

PLAIN = re.compile(r"[^<]+")
PARAMETER, FUNCTION, CALL = "parameter", "function", "call"
CLOSERS = {"</parameter>": PARAMETER, "</parameter/>": PARAMETER, "</function>": FUNCTION,
           "</function_invocation>": FUNCTION, "</function_call>": FUNCTION, "</invoke>": FUNCTION,
           "</tool_call>": CALL, "</tool_calls>": CALL, "</function_calls>": CALL}
MOST_CLOSERS = 6            # closing tags in a row that the end of a value looks across


def closer(r: Lookahead) -> str | None:
    """Step over a closing tag of the form; which kind."""
    return CLOSERS.get(r.one_of(CLOSERS) or "")


class XmlBody:
    """From behind the function's name to its closing tag, which is left standing.

    arguments   where parameters go: Arguments, or Pairs while the tool is unknown
    extra       text that is no parameter, in order
    complete    the end was a closing tag or the next call, not the end of the text
    """

    def __init__(self, arguments: Arguments | Pairs, tools: Toolbox):
        self.arguments, self.tools = arguments, tools
        self.extra: list[str] = []
        self.done = self.complete = False
        self.state = self.between
        self.json: JsonRepair | None = None

    def take(self, text: str, at: int, ended: bool) -> int:
        """Read from text[at:] as far as is certain; where reading stopped."""
        r = Lookahead(text, at, ended)
        try:
            while not self.done:
                self.state(r)
                at = r.at
        except More:
            pass
        return at

    def finish(self, complete: bool) -> None:
        self.done, self.complete = True, complete
        if self.json is None:
            self.arguments.close()

    # ---- between parameters

    def between(self, r: Lookahead) -> None:
        space = SPACES.match(r.text, r.at)
        if space:
            r.at = space.end()
            return
        c = r.peek()
        if not c:
            self.finish(False)
        elif c == "<":
            self.tag(r)
        elif c == "{" and self.empty:
            self.begin_object(r)
        else:
            self.junk(r)

    def tag(self, r: Lookahead) -> None:
        kind = closer(r.here())
        if kind == PARAMETER:
            closer(r)                               # nothing was open: only a tag
        elif kind or opens_call(r) or self.opens_function(r.here()):
            self.finish(True)
        else:
            key = parameter(look := r.here())
            if key == MALFORMED:
                key = self.odd_key(look := r.here())
            if key is None:
                self.junk(r)
            elif key == MALFORMED or self.json or self.arguments.has(key):
                self.extra.append("<")
                r.at += 1
                self.state = self.bad
            else:
                r.at = look.at
                self.begin(key)

    def odd_key(self, look: Lookahead) -> str:
        """A declared parameter whose name only the declaration tells from a malformed tag: `a b`, `x=y`."""
        keys = self.arguments.tool.properties if isinstance(self.arguments, Arguments) else ()
        return next((key for key in keys if not NAME.fullmatch(key) and look.lit(f"<parameter={key}>")), MALFORMED)

    def opens_function(self, look: Lookahead) -> bool:
        """<parameter=F> directly before <parameter=k> is the next call, to F."""
        name = parameter(look)
        if not name or not self.tools.get(name) or self.declares(name):
            return False
        look.space()
        return look.lit("<parameter")

    def junk(self, r: Lookahead) -> None:
        """Text that is no part of the form, up to the next tag."""
        self.extra.append(r.text[r.at])
        r.at += 1
        self.state = self.in_junk

    def in_junk(self, r: Lookahead) -> None:
        plain = PLAIN.match(r.text, r.at)
        if plain:
            self.extra.append(plain.group())
            r.at = plain.end()
        elif r.peek() in ("", "<"):
            self.state = self.between

    def bad(self, r: Lookahead) -> None:
        """Inside a parameter without a name, or one that came before: kept as text, up to its closing tag."""
        plain = PLAIN.match(r.text, r.at)
        if plain:
            self.extra.append(plain.group())
            r.at = plain.end()
            return
        if not r.peek():
            self.finish(False)
            return
        kind = closer(look := r.here())
        if kind == PARAMETER:
            self.extra.append(r.text[r.at:look.at])
            r.at = look.at
        if kind or opens_call(r) or self.declares(parameter(r.here())):
            self.state = self.between
        else:
            self.extra.append("<")
            r.at += 1

    def declares(self, key: str | None) -> bool:
        if isinstance(self.arguments, Arguments):
            return key in self.arguments.tool.properties
        return any(key in tool.properties for tool in self.tools.tools.values())

    @property
    def empty(self) -> bool:
        """Arguments may still come as one object."""
        return isinstance(self.arguments, Arguments) and not (
            self.json or self.extra or self.arguments.keys or self.arguments.tool.freeform)

    def begin_object(self, r: Lookahead) -> None:
        """The arguments as JSON in place of parameters; if the object names the tool once more, what it gives it."""
        inner = json_head(r.here(), self.tools, False)
        named = inner is not None and inner.form == JSON and inner.tool is self.arguments.tool
        r.at = inner.end if named else r.at
        self.json, self.state = JsonRepair(outer=named), self.in_object

    def in_object(self, r: Lookahead) -> None:
        at = self.json.take(r.text, r.at, r.ended)
        self.arguments.out.append(self.json.drain())
        stuck, r.at = at == r.at, at
        if self.json.done:
            self.state = self.behind_object
        elif stuck:
            raise More

    def behind_object(self, r: Lookahead) -> None:
        """Closing braces too many, then as between parameters."""
        if r.peek() == "}":
            r.at += 1
        else:
            self.state = self.between

    # ---- inside a value

    def begin(self, key: str) -> None:
        self.arguments.begin(key)
        self.state = self.first
        self.pending = ""           # a line break that may be the format's
        self.fresh = True           # nothing of the value has come yet
        self.functions = self.wrappers = 0      # examples of calls that are open inside the value

    def first(self, r: Lookahead) -> None:
        self.own_line = r.peek() == "\n"
        r.at += self.own_line
        self.state = self.value

    def say(self, text: str) -> None:
        text = self.pending + text
        self.pending = "\n" if text.endswith("\n") else ""
        self.fresh = False
        if len(text) > len(self.pending):
            self.arguments.text(text[:len(text) - len(self.pending)])

    def end(self) -> None:
        self.arguments.end()
        self.state = self.between

    def value(self, r: Lookahead) -> None:
        plain = PLAIN.match(r.text, r.at)
        if plain:
            r.at = plain.end()
            self.say(plain.group())
        elif not r.peek():
            self.end()
        else:
            self.tag_in_value(r)

    def tag_in_value(self, r: Lookahead) -> None:
        look = r.here()
        kind = closer(look)
        if kind is None:
            if self.next_parameter(r.here()):
                self.end()
                return
            self.functions += self.example(r.here())
            self.wrappers += r.here().lit("<tool_call>")
            look.at += 1
        elif self.functions:
            self.functions -= kind == FUNCTION
        elif kind == CALL and self.wrappers:
            self.wrappers -= 1
        elif self.closes(kind, look.here()):
            r.at = look.at if kind == PARAMETER else r.at
            self.end()
            return
        self.say(r.text[r.at:look.at])
        r.at = look.at

    def next_parameter(self, look: Lookahead) -> bool:
        """A declared parameter that opens here, though the value was not closed."""
        if self.functions or self.own_line and not self.standing:
            return False
        key = parameter(look)
        return bool(key) and self.declares(key) and not self.arguments.has(key)

    @property
    def standing(self) -> bool:
        """At the start of a line of the value."""
        return bool(self.pending) or self.fresh

    def example(self, look: Lookahead) -> bool:
        """A function opens inside the value, with a parameter or its end behind it."""
        if not function(look):
            return False
        look.space()
        return look.one_of(("<parameter", "</function>")) is not None

    def closes(self, kind: str, look: Lookahead) -> bool:
        """Does the closing tag before `look` end the value? Rules 1 and 2."""
        standing = not self.own_line or self.standing
        if kind != PARAMETER and not standing:
            return False
        gap = look.space()
        loose = standing or "\n" in gap
        for count in range(1, MOST_CLOSERS):
            if not look.peek():
                return True
            following = closer(look)
            if following is None:
                break
            if following == PARAMETER == kind and count == 1 and loose and not standing:
                return False                                # the next one stands in its own line
            if following != PARAMETER and loose:
                return True
            kind, gap = following, look.space()
        if opens_call(look) or look.here().lit("<parameter=") or self.declares(parameter(look.here())):
            return loose
        return count > 1 and kind == CALL and "\n" in gap
