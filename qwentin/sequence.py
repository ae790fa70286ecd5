"""Sequence: one choice of a request while the engine works on it: its ids, pages, slot and text so far. Job: the request.

    ids      [ prompt ................ | generated ........ ]
    table    [ rows in the KV cache ............ ] pending     pending = ids not yet run through the tower, 1 when decoding

The scheduler moves it between waiting and running; the engine feeds it sampled tokens. Neither looks inside the other.
"""
import logging
from dataclasses import dataclass, field
from time import monotonic
from typing import Callable

import numpy as np

from .guide import Steering
from .drafting import Drafting
from .kvpool import Table
from .request import Done, Event, Finish, GenerateRequest, Token
from .sampler import Sampler
from .stopping import StopMatcher
from .tokenizer import Detokenizer, Tokenizer

log = logging.getLogger("qwentin.engine")


@dataclass
class Clock:
    """Wall-clock marks of a request, in seconds of time.monotonic()."""
    arrived: float = field(default_factory=monotonic)
    started: float | None = None        # first prefill step
    answered: float | None = None       # first sampled token


class Sequence:
    """One choice. `stop_ids` end it without text; `limit` is the most tokens it may generate."""

    def __init__(self, request: GenerateRequest, index: int, tokenizer: Tokenizer, stop_ids: frozenset[int], limit: int):
        self.request, self.index = request, index
        self.stop_ids, self.limit = stop_ids, limit
        self.ids: list[int] = request.prompt.tolist()
        self.prompt_tokens = len(self.ids)
        self.table: Table | None = None         # None while waiting
        self.slot: int | None = None
        steering = Steering(request.guide, tokenizer, stop_ids) if request.guide else None
        self.sampler = Sampler(request.sampling, request.prompt, tokenizer.size, index, steering)
        self.detokenizer = Detokenizer(tokenizer)
        self.matcher = StopMatcher(request.stop, request.stop_after)
        self.characters = 0                     # text so far, held back text included
        self.cached = 0                         # ids that were known at admission and not computed
        self.kept = 0                           # ids behind the last snapshot
        self.branch = 0                         # ids that another conversation begins with too, and no state is kept there
        self.scored = 0                         # prompt rows whose log-probabilities are known
        self.drafting = Drafting()
        self.finished: str | None = None

    @property
    def generated(self) -> int:
        return len(self.ids) - self.prompt_tokens

    @property
    def closed(self) -> str:
        """Why the thought was closed for the model, "" if it was not."""
        return self.sampler.steering.closed if self.sampler.steering else ""

    @property
    def pending(self) -> int:
        """Ids that the tower has not seen."""
        return len(self.ids) - (self.table.length if self.table else 0)

    def known(self) -> np.ndarray:
        """The ids whose rows are in the cache, i32."""
        return np.array(self.ids[:self.table.length], np.int32)

    def reusable(self) -> np.ndarray:
        """The ids that need not be computed if their state is known: not the last, whose logits are wanted, and none of a
        prompt that is to be scored."""
        scored = self.request.prompt_logprobs is not None and self.index == 0 and self.scored < self.prompt_tokens
        return np.array([] if scored else self.ids[:-1], np.int32)

    def until_cut(self) -> int:
        """Pending ids up to the next place where a prefill step should end: where another conversation went another way, the
        stable end of the prompt, or the last."""
        ahead = [at for at in (self.branch, self.request.stable or 0) if at > self.table.length]
        return min(ahead) - self.table.length if ahead else self.pending

    def worth_keeping(self, span: int) -> bool:
        """Whether a snapshot should be taken here: at a branching, the stable end and the end of the prompt, and on the way
        every `span` rows, or in a long prompt as far apart as an eighth of what lies before and half of what is to come: a
        prompt that leaves this one anywhere loses no more than that, and 256k tokens are kept in tens of snapshots, not in
        hundreds."""
        length = self.table.length
        at_end = length in (self.branch, self.request.stable, self.prompt_tokens)
        gap = max(span, min(length // 8, (self.prompt_tokens - length) // 2))
        return length > self.kept and length <= self.prompt_tokens and (at_end or length - self.kept >= gap)

    def wanted_rows(self, start: int, count: int) -> np.ndarray:
        """Which of the rows start ... start+count-1 need logits, i32, counted from start: the last one if it is the last
        of all, and the prompt's rows if its tokens are to be scored (row j scores token j+1)."""
        ends = start + count == len(self.ids) and self.limit > 0
        if self.request.prompt_logprobs is None or self.index:
            return np.array([count - 1] if ends else [], np.int32)
        first = max(self.scored, start)
        scores = range(first - start, min(start + count, self.prompt_tokens - 1) - start)
        return np.array([*scores, *([count - 1] if ends else [])], np.int32)

    def append(self, token: int, logprob: float | None, top) -> tuple[str, Token]:
        """Take a sampled token: the text it releases and its record. Sets `finished` when it ends the choice."""
        record = Token(token, self.characters, logprob, top)
        self.ids.append(token)
        if token in self.stop_ids:
            self.finished = "stop"
            return self.matcher.finish(), record
        text = self.detokenizer.push(token)
        self.characters += len(text)
        shown = self.matcher.push(text)
        if self.matcher.hit is not None:
            self.finished = "stop"
        elif self.generated >= self.limit:
            self.finished = "length"
            shown += self.matcher.finish()
        return shown, record


Sink = Callable[[Event], None]


class Job:
    """A request under way: its choices so far and where its events go. `make` builds the choice of an index;
    `reader` is for the prompt's text, special tokens written out."""

    def __init__(self, request: GenerateRequest, sink: Sink, make: Callable[[int], Sequence], reader: Detokenizer):
        self.request, self.sink, self.make, self.reader = request, sink, make, reader
        self.sequences: list[Sequence] = []
        self.clock = Clock()
        self.scores: list[Token] = []           # of the prompt, if asked
        self.characters = 0                     # of the prompt's text before the token scored last
        self.abandoned = False                  # its reader has been told that it failed

    def begin_choice(self) -> Sequence:
        self.sequences.append(self.make(len(self.sequences)))
        return self.sequences[-1]

    def emit(self, event: Event) -> None:
        if self.abandoned:
            return
        try:
            self.sink(event)
        except Exception:                   # a broken reader must not stop the others
            log.exception("the reader of request %s failed", self.request.id)

    def abandon(self, message: str) -> None:
        """Tell the reader now that the request failed; nothing follows. From another thread, while a step does not end."""
        if not self.abandoned:
            for index in range(self.request.n):
                if index >= len(self.sequences) or not self.sequences[index].finished:
                    self.emit(Finish(index, "error", message))
            self.emit(Done())
            self.abandoned = True
