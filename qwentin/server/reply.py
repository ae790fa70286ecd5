"""The engine's events as pieces of a reply: text split into thought and answer, tokens sorted to the side they belong to.

Every dialect that splits text reads these pieces, streamed or not, so the two modes cannot disagree. `Reply` is what all
dialects have in common. Proven by tests/test_chat.py.
"""
from dataclasses import dataclass
from typing import Protocol

from .. import __version__
from ..errors import EngineStopped, QwentinError
from ..request import Delta, Event, Finish, GenerateRequest, Token, Usage
from .reasoning import ReasoningSplitter

FINGERPRINT = f"qwentin-{__version__}"


class Reply(Protocol):
    """What a dialect is to the routes: made from a checked body, asked for its requests, fed with events (each with the
    number of its request), and read either chunk by chunk or once at the end.

    chunks and collect raise Failed or EngineStopped when a choice did not end on its own.
    """
    body_type: type                     # the dataclass that fields.read makes of a body; has `stream`
    prompt_field: str                   # the field to name when the prompt is too long
    body: object
    requests: list[GenerateRequest]

    def __init__(self, body, engine, model: str):
        """Render and tokenise. Raises RequestError; slow for long prompts, so it runs in a worker thread."""

    def chunks(self, number: int, event: Event) -> list[dict]:
        """What this event adds to the stream."""

    def collect(self, number: int, event: Event) -> None:
        """Keep what this event adds to the whole answer."""

    def whole(self) -> dict:
        """The answer, once every event was collected."""


class Failed(QwentinError):
    """The engine ended a request with an error of its own."""


@dataclass(frozen=True)
class Piece:
    """What one event adds to one choice. A token comes with the text that completes it, or later; `silent` ones have no
    text in the reply at all: the stop id, and what a stop string cut off."""
    index: int
    thought: str = ""
    text: str = ""
    thought_tokens: tuple[Token, ...] = ()
    tokens: tuple[Token, ...] = ()
    silent: tuple[Token, ...] = ()
    finish: str | None = None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in (*self.thought_tokens, *self.tokens, *self.silent)]


class Choice:
    """One choice while it grows."""

    def __init__(self, index: int, thinking: bool):
        self.index = index
        self.splitter = ReasoningSplitter(thinking)
        self.unsorted: list[Token] = []     # tokens whose text has not come yet
        self.thought_count = self.token_count = 0

    def push(self, event: Delta | Finish) -> Piece:
        """The piece that an event of this choice makes. Raises what `finish_reason` raises."""
        if isinstance(event, Finish):
            silent, self.unsorted = tuple(self.unsorted), []
            return Piece(self.index, self.splitter.finish(), silent=silent, finish=finish_reason(event))
        thought, text = self.splitter.push(event.text)
        self.unsorted.extend(event.tokens)
        self.token_count += len(event.tokens)
        sides = [self.splitter.is_thought(token.offset) for token in self.unsorted]
        thoughts = tuple(t for t, side in zip(self.unsorted, sides) if side is True)
        tokens = tuple(t for t, side in zip(self.unsorted, sides) if side is False)
        self.unsorted = [t for t, side in zip(self.unsorted, sides) if side is None]
        self.thought_count += len(thoughts)
        return Piece(self.index, thought, text, thoughts, tokens)


def finish_reason(event: Finish) -> str:
    """OpenAI's word for how a choice ended. Raises Failed or EngineStopped if it did not end on its own."""
    if event.reason == "error":
        raise Failed(event.message or "The engine failed on this request.")
    if event.reason == "cancel":        # a client that left reads no answer: this one is the server shutting down
        raise EngineStopped("The server is shutting down; this reply was not finished.")
    return event.reason


def usage_object(prompt: int, completion: int, cached: int = 0, thought: int | None = None) -> dict:
    """OpenAI's usage. `thought` of the completion tokens were reasoning; None leaves that part out."""
    out = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
           "prompt_tokens_details": {"cached_tokens": cached}}
    if thought is not None:
        out["completion_tokens_details"] = {"reasoning_tokens": thought}
    return out


def add_usage(a: Usage, b: Usage) -> Usage:
    """Counts of several prompts of one request together; times are the longest."""
    return Usage(a.prompt_tokens + b.prompt_tokens, a.completion_tokens + b.completion_tokens,
                 a.cached_tokens + b.cached_tokens, max(a.queue_s, b.queue_s), max(a.prefill_s, b.prefill_s),
                 max(a.decode_s, b.decode_s))
