r"""What a text must be: a grammar compiled at the door, and the tokens that may come next while it is generated.

    grammar = grammars.compile(json_schema({"type": "integer"}), "response_format")      RequestError names the field
    state = grammar.begin()             one choice
    state.mask()                        bool [V], the tokens that may follow; never one without text
    state.advance(token)
    state.complete, state.over          the text may end here; nothing else may follow

llguidance does the work: it walks the vocabulary as a trie of bytes, so that tokens which straddle two parts of a grammar
are allowed as they should be, needs no table made beforehand, and brings no other library along. A source is text in its
own notation; the four functions below make one from what clients send. Compiled grammars are kept, the last KEPT of them:
agents send the same schema with every request. Called by server/ (compile) and guide.py (begin); proven by
tests/test_constraint.py.
"""
import json
import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher, LLTokenizer, grammar_from, regex_to_lark

from .errors import ConstraintFailed, RequestError
from .tokenizer import Tokenizer

MOST_TEXT = 2**20       # characters of a source
DEEP_STACK = 512 * 2**20        # bytes of address space: the library compiles rules that refer to rules recursively, and a
#                         chain of a thousand overflows a thread's usual 8 MiB, which ends the process
KEPT = 64               # compiled grammars
KEPT_TEXT = 2**20       # characters of their sources together: a large schema takes some 250 bytes a character
LONGEST = 300           # characters of the library's explanation in a refusal
# JSON may be indented, but white space must not go on for ever: a model that is unsure writes nothing else
SPACE = r"[ ]?|\n[ ]{0,40}"
QUIET = 0               # the library's log level: what it has to say is in the refusal


def json_schema(schema: dict, lenient: bool = False) -> str:
    """JSON that fits `schema`. `lenient` leaves out the keywords that cannot be enforced, instead of refusing them."""
    options = {"whitespace_pattern": SPACE, "lenient": lenient}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)


def regex(pattern: str) -> str:
    """Text that `pattern` matches from its beginning to its end (the syntax of Rust's regex)."""
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: list[str]) -> str:
    """One of the texts."""
    return lark("start: " + " | ".join(literal(text) for text in texts))


def lark(text: str, **parts: str) -> str:
    """A grammar in llguidance's Lark notation; @NAME in it is the source `parts[NAME]`."""
    named = [{**json.loads(source)["grammars"][0], "name": name} for name, source in parts.items()]
    return json.dumps({"grammars": [{"lark_grammar": text}, *named]})


def free_grammar(text: str) -> str:
    """A grammar as clients write them: Lark, or GBNF and EBNF (llama.cpp's). ValueError says why it is neither."""
    return grammar_from("grammar", text)


def pattern_in_lark(pattern: str) -> str:
    """A regular expression of JSON Schema as it stands between the slashes of a Lark terminal."""
    return regex_to_lark(pattern, "dw")


def literal(text: str) -> str:
    """Exactly `text`, in Lark."""
    return json.dumps(text, ensure_ascii=False)


class Constraint:
    """One text under way."""

    def __init__(self, matcher: LLMatcher, vocabulary: int):
        self.matcher, self.vocabulary = matcher, vocabulary
        self.known: np.ndarray | None = None

    def mask(self) -> np.ndarray:
        """The tokens that may follow, bool [V]. Raises ConstraintFailed when the grammar is too much for the library."""
        if self.known is None:
            bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
            self.check()
            self.known = np.unpackbits(bits, count=self.vocabulary, bitorder="little").view(bool)
        return self.known

    def advance(self, token: int) -> None:
        self.matcher.consume_token(token)
        self.check()
        self.known = None

    def check(self) -> None:
        if self.matcher.is_error():
            raise ConstraintFailed(first_line(self.matcher.get_error()))

    @property
    def complete(self) -> bool:
        return self.matcher.is_accepting()

    @property
    def over(self) -> bool:
        return self.matcher.is_stopped()


class Grammar:
    """A compiled grammar; `warnings` tell what of it is not enforced. `begin` may be called on any thread."""

    def __init__(self, matcher: LLMatcher, vocabulary: int):
        self.matcher, self.vocabulary = matcher, vocabulary
        self.warnings: list[str] = matcher.get_grammar_warnings()
        self.lock = threading.Lock()

    def begin(self) -> Constraint:
        with self.lock:
            return Constraint(self.matcher.deep_copy(), self.vocabulary)


class Grammars:
    """The grammars of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.library: LLTokenizer | None = None         # made with the first grammar: a large vocabulary takes a second
        self.kept: OrderedDict[str, Grammar] = OrderedDict()
        self.lock = threading.Lock()

    def compile(self, source: str, field: str) -> Grammar:
        """The grammar of a source. Raises RequestError naming `field` if it is none, or too large a one."""
        if len(source) > MOST_TEXT:
            raise RequestError(f"{field} makes a grammar of {len(source)} characters; {MOST_TEXT} can be used at most.",
                               field)
        found = self.kept.get(source) or self.make(source, field)       # nobody waits for somebody else's grammar
        with self.lock:
            self.kept[source] = found
            self.kept.move_to_end(source)
            while len(self.kept) > KEPT or sum(map(len, self.kept)) > KEPT_TEXT and len(self.kept) > 1:
                self.kept.popitem(last=False)
        return found

    def make(self, source: str, field: str) -> Grammar:
        with self.lock:
            if self.library is None:
                end = self.tokenizer.ids.get(self.tokenizer.special("eos_token"), 0)
                self.library = LLTokenizer(self.tokenizer.backend.to_str(), n_vocab=self.tokenizer.size, eos_token=end)
        matcher = on_deep_stack(lambda: LLMatcher(self.library, source, log_level=QUIET))
        if not matcher.is_error():
            matcher.compute_bitmask()                   # some grammars show only here that nothing fits them
        if matcher.is_error():
            raise RequestError(f"{field} cannot be used to constrain the output: {first_line(matcher.get_error())}.", field)
        return Grammar(matcher, self.tokenizer.size)


def on_deep_stack(make: Callable[[], LLMatcher]) -> LLMatcher:
    """What `make` makes, in a thread of its own."""
    made = []
    usual = threading.stack_size(DEEP_STACK)
    try:
        thread = threading.Thread(target=lambda: made.append(make()))
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join()
    return made[0]


def first_line(error: str) -> str:
    """The library's explanation without its picture of the grammar."""
    text = error.split("\n<")[0].partition("\n   1 |")[0]
    return " ".join(text.split())[:LONGEST].rstrip(". ")
