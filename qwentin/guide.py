r"""What steers a choice besides its sampling: a thought that is closed in time, an answer that a grammar constrains.

    prompt ...<think>\n | thought ... \n</think> \n\n answer ...
                          free, watched  closed by the model, or forced   in the grammar, then nothing but a stop id

A `Guide` is a request's wish, a `Steering` one choice on its way through it. The sampler asks in this order, once a token:
`forced` (the token is settled), `mask` (which may be drawn), `take` (the one that was drawn; it may be replaced). Nothing
looks ahead, so a drafted token is accepted under the very same rules as one that is drawn alone.

A grammar holds from the start of the answer on, the thought is free. With `opener` it holds behind each such token only,
for as long as its text takes: the calls of strict tools in an answer that is free otherwise. A stop id in a thought that a
grammar follows closes the thought instead: there is no answer yet. Proven by tests/test_guide.py and, with speculation,
by tests/test_guide_engine.py.
"""
import codecs
from collections import deque
from dataclasses import dataclass

import numpy as np

from .constraint import Constraint, Grammar
from .errors import ConstraintFailed
from .thought import BUDGET, Thought
from .tokenizer import Tokenizer

CLOSE = "</think>"
GAP = "\n\n"            # between a thought and its answer, as templates write it


@dataclass(frozen=True)
class Guide:
    """thinking   the prompt leaves the model inside a thought
    budget     its most tokens, None for no limit; then it is closed
    loop       tokens that repeat themselves before it is closed, 0 for never; see thought.py
    grammar    what the answer must be; None: anything
    opener     the text of one token: the grammar holds behind each of these only. "" : from the start
    repeats    may the opener come again, behind what it opened
    """
    thinking: bool = False
    budget: int | None = None
    loop: int = 0
    grammar: Grammar | None = None
    opener: str = ""
    repeats: bool = True


class Steering:
    """One choice. `closed` says why its thought was closed for it ("budget" or "loop"), "" if it was not."""

    def __init__(self, guide: Guide, tokenizer: Tokenizer, stop_ids: frozenset[int]):
        self.guide, self.tokenizer = guide, tokenizer
        self.stops = np.array(sorted(stop_ids), np.int64)
        self.stop_ids = stop_ids
        self.close = tokenizer.encode(CLOSE).tolist()
        self.opener = tokenizer.ids.get(guide.opener, -1) if guide.opener else None
        self.thought = Thought(guide.budget, guide.loop) if guide.thinking and len(self.close) == 1 else None
        self.queue: deque[int] = deque()        # tokens that come next, whatever the logits say
        self.constraint: Constraint | None = None
        self.done = False                       # only a stop id may follow
        self.closed = ""
        self.over: str | None = None            # why it will be closed
        self.new_line = False                   # does the thought stand at the start of a line?
        self.characters = codecs.getincrementaldecoder("utf-8")("replace")
        if self.thought is None:
            self.answer()
        elif self.thought.spent:
            self.closed = BUDGET
            self.close_thought()

    def forced(self) -> int | None:
        """The next token, if it is settled already."""
        return self.queue[0] if self.queue else None

    def mask(self) -> np.ndarray | None:
        """The tokens that may be drawn, bool [V]; None for all. Raises ConstraintFailed if there is none."""
        if self.done:
            mask = np.zeros(self.tokenizer.size, bool)
            mask[self.stops] = True
        elif self.constraint is None:
            return None
        else:
            mask = self.constraint.mask()
            if self.opener is None and self.constraint.complete:
                mask[self.stops] = True
        if not mask.any():
            raise ConstraintFailed("no token can follow")
        return mask

    def take(self, token: int) -> int:
        """Go on by the token that was chosen; the one to generate, which is another where a thought must not end so."""
        settled = bool(self.queue)
        if settled:
            self.queue.popleft()
        if self.thought is not None:
            return self.think(token)
        if settled:
            if not self.queue:
                self.answer()
        elif self.constraint is not None and token not in self.stop_ids:
            self.constrain(token)
        elif token == self.opener:
            self.constraint = self.guide.grammar.begin()
        return token

    def think(self, token: int) -> int:
        follows = self.guide.grammar is not None and self.opener is None
        if token in self.stop_ids and follows:
            self.close_thought()
            token = self.queue.popleft()
        if token == self.close[0]:
            self.thought = None
            if self.closed or follows:
                self.queue.extend(self.tokenizer.encode(CLOSE + GAP).tolist()[1:])
            return token
        text = self.tokenizer.token_bytes(token)
        self.new_line = text.endswith(b"\n")
        self.characters.decode(text)
        if not self.queue:
            self.over = self.thought.push(token) or self.over
            if self.over and not self.characters.getstate()[0]:         # not inside a character
                self.closed = self.over
                self.close_thought()
        return token

    def close_thought(self) -> None:
        """The next tokens close the thought, on a line of its own, as templates write it."""
        self.queue.extend(self.close if self.new_line else self.tokenizer.encode("\n" + CLOSE).tolist())

    def answer(self) -> None:
        """The answer begins."""
        if self.guide.grammar is not None and self.opener is None:
            self.constraint = self.guide.grammar.begin()

    def constrain(self, token: int) -> None:
        self.constraint.advance(token)
        if self.opener is not None and self.constraint.over:
            self.constraint = None
            self.done = not self.guide.repeats
