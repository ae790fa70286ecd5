"""One turn asked of the model, whatever the dialect: a conversation -> a GenerateRequest; its events -> Pieces.

    Delta("...</think>\\n\\nHi", tokens)  ->  Piece((Reasoning("..."), Text("Hi")), tokens by the side they belong to)

chat.py, messages.py and responses.py read Pieces, streamed or not, so neither modes nor dialects can disagree about what
the model said. Stop strings count from the answer on: they cannot cut a thought.

A token belongs to the thought, to the text, or to the calls; log-probabilities are reported for the first two. From the
first call on all tokens are the calls': they spell the form that calls are written in, not the arguments' JSON.
Proven by tests/test_chat.py and tests/test_tool_dialects.py.
"""
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..request import Delta, Done, Event, Finish, GenerateRequest, SamplingParams, Token, Usage
from .answer import AnswerParser
from .conversation import Conversation
from .form import Form
from .guidance import guide_of
from .options import Sampling
from .reasoning import CLOSE, opens_thought
from .reply import finish_reason, timings
from .toolcall import new_call_id
from .toolchoice import NONE, ToolChoice
from .toolevents import ArgumentsDelta, CallEnd, CallStart, Reasoning, Text
from .toolevents import Event as Said
from .toolhead import WRAPPER
from .toolschema import Tool, Toolbox

THOUGHT, TEXT, CALLS = "thought", "text", "calls"
BANNED = -100.0         # the logit bias that OpenAI's API means as "never"


@dataclass(frozen=True)
class Piece:
    """What one event adds to one choice. A token comes with the text that completes it, or later; `silent` ones have no
    text in the reply at all: the stop id, and what a stop string cut off.

    finish   None, or how the choice ended: "stop", "length" or "tool_calls"; stop: the stop string that ended it
    """
    index: int
    said: tuple[Said, ...] = ()
    thought_tokens: tuple[Token, ...] = ()
    tokens: tuple[Token, ...] = ()
    call_tokens: tuple[Token, ...] = ()
    silent: tuple[Token, ...] = ()
    finish: str | None = None
    stop: str | None = None

    def joined(self, kind: type) -> str:
        """All Reasoning, or all Text, of this piece."""
        return "".join(part.text for part in self.said if isinstance(part, kind))

    @property
    def thought(self) -> str:
        return self.joined(Reasoning)

    @property
    def text(self) -> str:
        return self.joined(Text)

    @property
    def calls(self) -> list[Said]:
        return [part for part in self.said if not isinstance(part, (Reasoning, Text))]


class Choice:
    """One choice while it grows."""

    def __init__(self, index: int, parser: AnswerParser):
        self.index, self.parser = index, parser
        self.unsorted: list[Token] = []     # tokens whose text has not come yet
        self.thought_count = self.token_count = 0
        self.called: Tool | None = None     # the tool of the latest call
        self.closed = ""                    # why the engine closed the thought, if it did

    def push(self, event: Delta | Finish) -> Piece:
        """The piece that an event of this choice makes. Raises what `finish_reason` raises."""
        if isinstance(event, Finish):
            return self.end(event, finish_reason(event))
        self.unsorted.extend(event.tokens)
        self.token_count += len(event.tokens)
        return self.piece(self.parser.push(event.text))

    def end(self, event: Finish, reason: str) -> Piece:
        self.closed = event.closed
        cut = reason == "length" or event.stop is not None
        piece = self.piece(self.parser.finish(cut))
        said = left_open(piece.said) if cut and self.called and not self.called.freeform else piece.said
        if self.called and not cut:
            reason = "tool_calls"
        return replace(piece, said=said, silent=tuple(self.unsorted), finish=reason, stop=event.stop)

    def piece(self, said: list[Said]) -> Piece:
        for part in said:
            if isinstance(part, CallStart):
                self.called = self.parser.tools.get(part.name)
        sides = self.sort_tokens()
        self.thought_count += len(sides[THOUGHT])
        return Piece(self.index, tuple(said), *(tuple(sides[side]) for side in (THOUGHT, TEXT, CALLS)))

    def sort_tokens(self) -> dict[str, list[Token]]:
        """The tokens that belong somewhere by now. Their offsets ascend: behind one that does not, all are open."""
        sides: dict[str, list[Token]] = {THOUGHT: [], TEXT: [], CALLS: []}
        count = 0
        for token in self.unsorted:
            side = self.side(token.offset)
            if side is None:
                break
            sides[side].append(token)
            count += 1
        del self.unsorted[:count]
        return sides

    def side(self, offset: int) -> str | None:
        """What a token whose text starts at `offset` belongs to; None while that is open."""
        parser = self.parser
        thought = parser.is_thought(offset)
        if thought or thought is None:
            return THOUGHT if thought else None
        if parser.thinking:                 # the thought never closed: a call ended it
            return CALLS
        if offset - parser.start < parser.answer.settled:
            return TEXT
        return None if parser.answer.began is None else CALLS


def left_open(said: tuple[Said, ...]) -> tuple[Said, ...]:
    """The last events of a text that was cut off: a call that stands open loses the brace that the parser closed it with,
    so that no client takes half a file for a whole one."""
    open_calls = {part.index for part in said if isinstance(part, CallEnd) and not part.complete}
    return tuple(replace(part, fragment=part.fragment.removesuffix("}"))
                 if isinstance(part, ArgumentsDelta) and part.index in open_calls else part for part in said)


class Turn:
    """One conversation to be answered by `n` choices. `rules` go into the GenerateRequest as they are.

    tools         the declared tools, as toolschema.py reads them
    choice        which of them may or must be called. With NONE, whatever the model writes is text, and the tag that opens
                  a call cannot be sampled. All tools stay in the prompt, so that its cached prefix serves
    form, budget  what the answer must be; the most tokens of the thought that the request allows
    """

    def __init__(self, engine, name: str, conversation: Conversation, options: Sampling, tools: list[dict] | None = None,
                 choice: ToolChoice = ToolChoice(), form: Form | None = None, budget: int | None = None,
                 new_id: Callable[[], str] = new_call_id, **rules):
        stable, tail = conversation.render(engine.chat_template)
        prompt, stable_tokens = engine.encode(stable, tail)
        self.thinking, self.variables = opens_thought(tail), {**engine.chat_template.variables, **conversation.variables}
        self.reads_effort = "reasoning_effort" in engine.chat_template.text
        toolbox, calls = Toolbox(tools), choice.mode != NONE
        choice.check(set(toolbox.tools))
        toolbox = toolbox.only(choice.names) if calls else Toolbox(None)
        guide = guide_of(engine, self.thinking, list(toolbox.tools.values()), choice, form, budget)
        sampling = options.sampling(engine.defaults)
        self.request = GenerateRequest(
            id=name, prompt=prompt, stable=stable_tokens, guide=guide,
            sampling=sampling if calls else without_calls(sampling, engine.tokenizer),
            stop_after=CLOSE if self.thinking else "",
            stop_ids=options.stop_ids(engine.model_config.eos_token_id, bool(guide and guide.grammar)), **rules)
        self.choices = [Choice(i, AnswerParser(self.thinking, toolbox, new_id, choice.parallel))
                        for i in range(self.request.n)]
        self.usage = Usage()

    @property
    def notes(self) -> list[str]:
        """What the grammar leaves out of what was asked, for the log."""
        guide = self.request.guide
        return [f"not enforced: {said[:120]}" for said in guide.grammar.warnings] if guide and guide.grammar else []

    def piece(self, event: Event) -> Piece | None:
        """What an event adds to a choice, if it adds to one."""
        if isinstance(event, (Delta, Finish)):
            return self.choices[event.index].push(event)
        if isinstance(event, Done):
            self.usage = event.usage
        return None

    @property
    def prompt_count(self) -> int:
        return len(self.request.prompt)

    @property
    def token_count(self) -> int:
        return sum(choice.token_count for choice in self.choices)

    @property
    def thought_count(self) -> int:
        return sum(choice.thought_count for choice in self.choices)

    def extras(self) -> dict:
        """What a reply tells beyond its dialect: how thinking was resolved, where the time went, how many calls were too
        many (parallel_tool_calls false)."""
        dropped = sum(len(choice.parser.dropped) for choice in self.choices)
        return {"x_qwentin": {"thinking": self.thinking, **self.thought(), **timings(self.usage),
                              **({"dropped_calls": dropped} if dropped else {})}}

    def thought(self) -> dict:
        """Effort and budget that count, whether the template reads the first, why thoughts were closed for the model."""
        effort = self.variables.get("reasoning_effort") if self.thinking else None
        out = {"reasoning_effort": effort}
        if effort is not None:
            out["effort_in_template"] = self.reads_effort
        if self.thinking and self.request.guide.budget is not None:
            out["thinking_budget"] = self.request.guide.budget
        closed = [choice.closed for choice in self.choices if choice.closed]
        return out | ({"thought_closed": closed} if closed else {})


def without_calls(sampling: SamplingParams, tokenizer) -> SamplingParams:
    """The same with the opening tag of a call banned, where the vocabulary has it as one token."""
    opener = tokenizer.encode(WRAPPER).tolist()
    if len(opener) != 1:
        return sampling
    kept = tuple(pair for pair in sampling.logit_bias if pair[0] != opener[0])
    return replace(sampling, logit_bias=(*kept, (opener[0], BANNED)))
