"""/v1/chat/completions: messages in; a thought, an answer and tool calls out.

A body becomes one Turn (turn.py); its Pieces become chunks of a stream or one whole answer:

    delta {"role": "assistant", "content": ""}                              once a choice, first
    delta {"reasoning_content": ...}   delta {"content": ...}               never both in one chunk
    delta {"tool_calls": [{"index": 0, "id": ..., "function": {"name": ..., "arguments": ""}}]}      a call begins
    delta {"tool_calls": [{"index": 0, "function": {"arguments": ...}}]}                             and grows
    finish_reason "stop" | "length" | "tool_calls"

The content is null when there are only calls. Proven by tests/test_chat.py and tests/test_tool_dialects.py (a scripted
engine) and tests/test_server_openai.py.
"""
import time
import uuid
from dataclasses import dataclass

from ..errors import RequestError
from ..request import Done, Event
from .conversation import Conversation, conversation, tool_list
from .effort import EFFORTS, Thinking
from .fields import anything, boolean, integer, listing, one_of, optional, required
from .logprobs import chat_logprobs
from .options import Options
from .reply import FINGERPRINT, DataFrames, usage_object
from .toolchoice import openai_choice
from .toolevents import ArgumentsDelta, CallStart, Reasoning, Text
from .toolevents import Event as Said
from .turn import Piece, Turn

CHUNK = "chat.completion.chunk"
MAX_TOP = 20         # alternatives a token


@dataclass(frozen=True)
class ChatBody(Thinking, Options):
    messages: list = required(listing)
    tools: list | None = optional(tool_list)
    tool_choice: str | dict | None = optional(anything)
    parallel_tool_calls: bool = optional(boolean, True)
    max_tokens: int | None = optional(integer(1))
    max_completion_tokens: int | None = optional(integer(1))
    logprobs: bool = optional(boolean, False)
    top_logprobs: int | None = optional(integer(0, MAX_TOP))
    reasoning_effort: str | None = optional(one_of("none", *EFFORTS))

    def check(self) -> None:
        """Combinations that make no sense."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is given without logprobs; set logprobs to true.", "top_logprobs")

    def conversation(self) -> Conversation:
        return Conversation(conversation(self.messages), self.tools or None, self.variables(self.reasoning_effort))


class ChatReply(DataFrames):
    """One chat request on its way: `requests` for the engine; then every event to `chunks`, or every event to `collect`
    and `whole` at the end. Both raise what `finish_reason` raises."""

    body_type = ChatBody
    prompt_field = "messages"

    def __init__(self, body: ChatBody, engine, model: str):
        body.check()
        self.body, self.tokenizer, self.notes = body, engine.tokenizer, []
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        self.turn = Turn(engine, f"chatcmpl-{uuid.uuid4().hex}", body.conversation(), body, body.tools,
                         choice=openai_choice(body.tool_choice, body.parallel_tool_calls), form=body.form(),
                         budget=body.budget(), n=body.n, max_tokens=limit, stop=body.stop,
                         logprobs=(body.top_logprobs or 0) if body.logprobs else None)
        self.notes += self.turn.notes
        self.request = self.turn.request
        self.requests = [self.request]
        self.pieces: list[list[Piece]] = [[] for _ in range(body.n)]
        self.begun: set[int] = set()        # choices that the stream has opened
        self.head = {"id": self.request.id, "created": int(time.time()), "model": model,
                     "system_fingerprint": FINGERPRINT}

    def usage_so_far(self) -> dict:
        turn = self.turn
        return usage_object(turn.prompt_count, turn.token_count, turn.usage.cached_tokens,
                            turn.thought_count if turn.thinking else None)

    def extras(self) -> dict:
        return self.turn.extras()

    def token_parts(self, thought=None, answer=None, others=()) -> dict:
        """What a choice says of its tokens, as far as the request asks: log-probabilities of thought and answer where
        either is given, ids of all."""
        out = {"logprobs": None}
        sides = thought or (), answer or ()
        if self.body.logprobs and (thought is not None or answer is not None):
            out["logprobs"] = chat_logprobs(*sides, self.tokenizer)
        if self.body.return_token_ids:
            out["token_ids"] = [token.id for token in (*sides[0], *sides[1], *others)]
        return out

    # ---- the whole answer

    def collect(self, number: int, event: Event) -> None:
        piece = self.turn.piece(event)
        if piece is not None:
            self.pieces[piece.index].append(piece)

    def whole(self) -> dict:
        out = {**self.head, "object": "chat.completion", "choices": [self.choice(p) for p in self.pieces],
               "usage": self.usage_so_far()}
        return out | self.prompt_ids() | self.extras()

    def choice(self, pieces: list[Piece]) -> dict:
        text, calls = "".join(p.text for p in pieces), whole_calls([part for p in pieces for part in p.calls])
        message = {"role": "assistant", "content": text or (None if calls else "")}
        if self.turn.thinking:
            message["reasoning_content"] = "".join(p.thought for p in pieces)
        if calls:
            message["tool_calls"] = calls
        tokens = self.token_parts([token for p in pieces for token in p.thought_tokens],
                                  [token for p in pieces for token in p.tokens],
                                  [token for p in pieces for token in p.call_tokens + p.silent])
        return {"index": pieces[0].index, "message": message, **tokens, "finish_reason": pieces[-1].finish}

    def prompt_ids(self) -> dict:
        return {"prompt_token_ids": self.request.prompt.tolist()} if self.body.return_token_ids else {}

    # ---- the stream

    def chunks(self, number: int, event: Event) -> list[dict]:
        piece = self.turn.piece(event)
        if piece is not None:
            return self.piece_chunks(piece)
        if isinstance(event, Done) and self.body.streaming.include_usage:
            return [{**self.head, "object": CHUNK, "choices": [], "usage": self.usage_so_far(), **self.extras()}]
        return []

    def piece_chunks(self, piece: Piece) -> list[dict]:
        """The role first, then each part apart: some clients read only one key of a delta. Tokens go with the first part
        of their side, or into a chunk of their own."""
        out = []
        if piece.index not in self.begun:
            self.begun.add(piece.index)
            out.append(self.chunk(piece.index, {"role": "assistant", "content": ""}) | self.prompt_ids())
        thought, answer, rest = sections(piece.said)
        for side, parts, tokens in (("thought", thought, piece.thought_tokens), ("answer", answer, piece.tokens),
                                    ("others", rest, piece.call_tokens)):
            alone = tokens and (self.body.logprobs or self.body.return_token_ids)
            for said in [d for d in map(delta, parts) if d] or ([{}] if alone else []):
                out.append(self.chunk(piece.index, said, **({side: tokens} if tokens else {})))
                tokens = ()
        if piece.finish:
            out.append(self.chunk(piece.index, {}, piece.finish, others=piece.silent))
        return out

    def chunk(self, index: int, said: dict, finish: str | None = None, **tokens) -> dict:
        """A chunk of one choice that says `said`, and of tokens what `token_parts` makes of the rest."""
        out = {**self.head, "object": CHUNK, "choices": [
            {"index": index, "delta": said, **self.token_parts(**tokens), "finish_reason": finish}]}
        if self.body.streaming.continuous_usage_stats:
            out["usage"] = self.usage_so_far()
        elif self.body.streaming.include_usage:
            out["usage"] = None
        return out


def sections(said: tuple[Said, ...]) -> tuple[list, list, list]:
    """Thought, text before the first part of a call, and what follows."""
    at = next((i for i, part in enumerate(said) if not isinstance(part, (Reasoning, Text))), len(said))
    head, rest = said[:at], said[at:]
    return [p for p in head if isinstance(p, Reasoning)], [p for p in head if isinstance(p, Text)], list(rest)


def delta(part: Said) -> dict | None:
    """What a chunk says of one part; None of a call's end, which has no sign of its own."""
    if isinstance(part, Reasoning):
        return {"reasoning_content": part.text}
    if isinstance(part, Text):
        return {"content": part.text}
    if isinstance(part, CallStart):
        return {"tool_calls": [{"index": part.index, **call_object(part, "")}]}
    if isinstance(part, ArgumentsDelta):
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.fragment}}]}
    return None


def call_object(start: CallStart, arguments: str) -> dict:
    return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": arguments}}


def whole_calls(parts: list[Said]) -> list[dict]:
    """message.tool_calls"""
    fragments: dict[int, list[str]] = {part.index: [] for part in parts}
    for part in parts:
        if isinstance(part, ArgumentsDelta):
            fragments[part.index].append(part.fragment)
    return [call_object(part, "".join(fragments[part.index])) for part in parts if isinstance(part, CallStart)]
