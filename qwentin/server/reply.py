"""What all dialects have in common: what a reply is to the routes, how a choice ends, what a request counted.

Proven by tests/test_chat.py and tests/test_completions.py.
"""
from itertools import zip_longest
from typing import Protocol

from .. import __version__
from ..errors import EngineStopped
from ..request import Event, Finish, GenerateRequest, Speculated, Usage
from .refusals import Failed, describe

FINGERPRINT = f"qwentin-{__version__}"


class Reply(Protocol):
    """What a dialect is to the routes: made from a checked body, asked for its requests, fed with events (each with the
    number of its request), and read either chunk by chunk or once at the end.

    chunks and collect raise Failed or EngineStopped when a choice did not end on its own.
    """
    body_type: type                     # the dataclass that fields.read makes of a body; has `stream`
    prompt_field: str                   # the field to name when the prompt is too long
    named_frames: bool                  # an event's name stands before its data, and no [DONE] behind the last
    overflow_in_stream: bool            # a stream answers a prompt that is too long with 200 and `failed`
    body: object
    requests: list[GenerateRequest]
    notes: list[str]                    # what of the request was left out, for the log

    def __init__(self, body, engine, model: str):
        """Render and tokenise. Raises RequestError; slow for long prompts, so it runs in a worker thread."""

    def opening(self) -> list[dict]:
        """The chunks that go out before anything was generated."""

    def alive(self) -> dict | None:
        """A chunk that says nothing but that the request lives; None: a comment does."""

    def failed(self, error: Exception) -> dict:
        """The chunk that ends a stream which failed."""

    def chunks(self, number: int, event: Event) -> list[dict]:
        """What this event adds to the stream."""

    def collect(self, number: int, event: Event) -> None:
        """Keep what this event adds to the whole answer."""

    def whole(self) -> dict:
        """The answer, once every event was collected."""

    def extras(self) -> dict:
        """{"x_qwentin": ...} as the answer has it, for the log."""


class DataFrames:
    """The frames of the older OpenAI routes: bare data, comments to show life, [DONE] at the end."""
    named_frames = overflow_in_stream = False

    def opening(self) -> list[dict]:
        return []

    def alive(self) -> None:
        return None

    def failed(self, error: Exception) -> dict:
        return describe(error)[2]


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


def timings(usage: Usage) -> dict:
    """Counts and seconds of the engine, for `x_qwentin`."""
    out = {"cached_tokens": usage.cached_tokens, "queue_s": round(usage.queue_s, 4),
           "prefill_s": round(usage.prefill_s, 4), "decode_s": round(usage.decode_s, 4)}
    return out if usage.speculated is None else {**out, "speculation": speculation(usage.speculated)}


def speculation(s: Speculated) -> dict:
    """How guessing ahead went: tokens a round, the share of rounds in which the guess at depth 1, 2, ... was right among
    those that came so far, sizes of trees, what the watchdog did."""
    return {"rounds": s.rounds, "plain_steps": s.plain, "accept_length": round(1 + s.accepted / max(1, s.rounds), 3),
            "depth_acceptance": [round(right / tried, 3) if tried else None for right, tried in zip(s.taken, s.offered)],
            "guesses": s.guesses, "accepted": s.accepted, "accepted_lookup": s.lookup, "largest_tree": s.largest,
            "events": list(s.events)}


def add_usage(a: Usage, b: Usage) -> Usage:
    """Counts of several prompts of one request together; times are the longest."""
    return Usage(a.prompt_tokens + b.prompt_tokens, a.completion_tokens + b.completion_tokens,
                 a.cached_tokens + b.cached_tokens, max(a.queue_s, b.queue_s), max(a.prefill_s, b.prefill_s),
                 max(a.decode_s, b.decode_s), add_speculated(a.speculated, b.speculated))


def add_speculated(a: Speculated | None, b: Speculated | None) -> Speculated | None:
    if a is None or b is None:
        return a or b
    by_depth = lambda x, y: tuple(m + n for m, n in zip_longest(x, y, fillvalue=0))
    return Speculated(a.rounds + b.rounds, a.plain + b.plain, a.guesses + b.guesses, a.accepted + b.accepted,
                      a.lookup + b.lookup, max(a.largest, b.largest), by_depth(a.offered, b.offered),
                      by_depth(a.taken, b.taken), a.events + b.events)
