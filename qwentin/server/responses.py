"""/v1/responses: OpenAI's newer dialect, as Codex and the openai SDK speak it.

    response.created   response.in_progress                                  again whenever there is nothing to say
    response.output_item.added         reasoning, message, function_call or custom_tool_call
      response.content_part.added        (reasoning and message only)
      ...delta*   ...done                reasoning_text, output_text, function_call_arguments or custom_tool_call_input
      response.content_part.done
    response.output_item.done
    response.completed | response.incomplete (length) | response.failed

Every event carries the next sequence_number. The whole answer is the response object of the last event. Nothing is stored:
`store` is answered with false, and a stored response cannot be referred to. A prompt that is too long ends a stream with
response.failed and context_length_exceeded, because that is where Codex looks before it compacts.
How items and tools are read: responses_input.py. Proven by tests/test_responses.py and tests/test_tool_dialects.py.
"""
import time
import uuid
from dataclasses import dataclass

from ..errors import ContextOverflow
from ..request import Done, Event, Token
from .effort import Thinking
from .fields import anything, boolean, integer, listing, mapping, optional, refuse, required, string
from .form import format_of
from .logprobs import chat_entries
from .options import Sampling
from .output_items import Events, Item
from .refusals import describe
from .responses_input import Called, conversation_of, read_tools
from .toolchoice import openai_choice
from .toolevents import ArgumentsDelta, CallEnd, CallStart, Reasoning, Text
from .toolevents import Event as Said
from .turn import Piece, Turn

LOGPROBS = "message.output_text.logprobs"
ECHOED = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "temperature", "top_p")


@dataclass(frozen=True)
class ResponsesBody(Thinking, Sampling):
    input: str | list = required(anything)
    instructions: str | None = optional(string)
    tools: list | None = optional(listing)
    tool_choice: str | dict | None = optional(anything)
    parallel_tool_calls: bool = optional(boolean, True)
    max_output_tokens: int | None = optional(integer(1))
    reasoning: dict | None = optional(mapping)
    text: dict | None = optional(mapping)
    include: list | None = optional(listing)
    top_logprobs: int | None = optional(integer(0, 20))
    store: bool | None = optional(boolean)
    background: bool | None = optional(boolean)
    previous_response_id: str | None = optional(string)
    metadata: dict | None = optional(mapping)

    def check(self) -> None:
        """What this server cannot do: refused, because ignoring it would change the answer."""
        if self.previous_response_id is not None:
            refuse("previous_response_id", self.previous_response_id,
                   "null (responses are not stored: send the whole input)", "previous_response_not_found")
        if self.background:
            refuse("background", True, "false (nothing runs in the background)", "unsupported_value")

    @property
    def logprobs(self) -> int | None:
        """Alternatives to report a token; None for no log-probabilities at all."""
        wanted = self.top_logprobs is not None or LOGPROBS in (self.include or [])
        return (self.top_logprobs or 0) if wanted else None


class ResponsesReply:
    """One request on its way; see reply.Reply. `chunks` builds the items, `whole` shows them."""

    body_type = ResponsesBody
    prompt_field = "input"
    named_frames = overflow_in_stream = True

    def __init__(self, body: ResponsesBody, engine, model: str):
        body.check()
        self.body, self.model, self.tokenizer = body, model, engine.tokenizer
        self.tools = read_tools(body.tools)
        conversation = conversation_of(body, self.tools)
        self.notes = list(self.tools.notes)
        if body.store:
            self.notes.append("store is true in a request; responses are not stored here")
        self.turn = Turn(engine, f"resp_{uuid.uuid4().hex}", conversation, body, self.tools.declared,
                         choice=openai_choice(body.tool_choice, body.parallel_tool_calls, self.tools.seen),
                         form=format_of("text.format", (body.text or {}).get("format")), budget=body.budget(),
                         max_tokens=body.max_output_tokens, logprobs=body.logprobs)
        self.notes += self.turn.notes
        self.requests = [self.turn.request]
        self.created, self.sequence = int(time.time()), 0
        self.items: list[Item] = []
        self.open = False                   # does the last item still grow?
        self.unsaid: list[Token] = []       # the answer's tokens that came without text
        self.finish: str | None = None

    def extras(self) -> dict:
        return self.turn.extras()

    # ---- the stream

    def event(self, kind: str, **said) -> dict:
        self.sequence += 1
        return {"type": kind, "sequence_number": self.sequence - 1, **said}

    def opening(self) -> list[dict]:
        return [self.event("response.created", response=self.response("in_progress", [])), self.alive()]

    def alive(self) -> dict:
        return self.event("response.in_progress", response=self.response("in_progress", []))

    def failed(self, error: Exception) -> dict:
        code = "context_length_exceeded" if isinstance(error, ContextOverflow) else "server_error"
        said = {"code": code, "message": describe(error)[2]["error"]["message"]}
        self.close("incomplete")
        return self.event("response.failed", response=self.response("failed", self.output(), error=said))

    def chunks(self, number: int, event: Event) -> list[dict]:
        piece = self.turn.piece(event)
        if piece is not None:
            return [self.event(kind, **said) for kind, said in self.piece_events(piece)]
        if isinstance(event, Done):
            whole = self.whole()
            return [self.event(f"response.{whole['status']}", response=whole)]
        return []

    def piece_events(self, piece: Piece) -> Events:
        if self.body.logprobs is not None:
            self.unsaid += piece.tokens
        ending = "incomplete" if piece.finish == "length" else "completed"
        events = [event for part in piece.said for event in self.part_events(part, ending)]
        if piece.finish:
            self.finish = piece.finish
            events += self.close(ending)
        return events

    def part_events(self, part: Said, ending: str) -> Events:
        if isinstance(part, Reasoning):
            return self.grow("reasoning") + self.items[-1].add(part.text)
        if isinstance(part, Text):
            return self.grow("message") + self.items[-1].add(part.text, self.scores())
        if isinstance(part, CallStart):
            called = self.tools.named[part.name]
            return self.begin("custom_tool_call" if called.custom else "function_call", part.id, called)
        if isinstance(part, ArgumentsDelta):
            return self.items[-1].add(part.fragment)
        assert isinstance(part, CallEnd)
        return self.close("completed" if part.complete else ending)

    def grow(self, kind: str) -> Events:
        """Have an item of this kind open."""
        return [] if self.open and self.items[-1].kind == kind else self.begin(kind)

    def begin(self, kind: str, call_id: str | None = None, called: Called | None = None) -> Events:
        before = self.close("completed")
        self.items.append(Item(kind, len(self.items), call_id, called))
        self.open = True
        return before + self.items[-1].begin()

    def close(self, status: str) -> Events:
        if not self.open:
            return []
        self.open, item = False, self.items[-1]
        late = item.add("", self.scores()) if item.kind == "message" else []
        return late + item.close(status)

    def scores(self) -> list[dict]:
        """Log-probabilities of the answer's tokens that came since the last text."""
        tokens, self.unsaid = self.unsaid, []
        return chat_entries(tokens, self.tokenizer)

    # ---- the whole answer

    def collect(self, number: int, event: Event) -> None:
        self.chunks(number, event)

    def whole(self) -> dict:
        status = "incomplete" if self.finish == "length" else "completed"
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self.response(status, self.output(), incomplete_details=details, usage=self.usage(), **self.extras())

    def output(self) -> list[dict]:
        return [item.object(item.status) for item in self.items]

    def response(self, status: str, output: list[dict], **more) -> dict:
        body = self.body
        return {"id": self.turn.request.id, "object": "response", "created_at": self.created, "status": status,
                "model": self.model, "output": output, "error": None, "incomplete_details": None, "usage": None,
                **{name: getattr(body, name) for name in ECHOED}, "tools": body.tools or [],
                "tool_choice": body.tool_choice or "auto", "text": body.text or {"format": {"type": "text"}},
                "previous_response_id": None, "store": False, "truncation": "disabled", **more}

    def usage(self) -> dict:
        prompt, generated = self.turn.prompt_count, self.turn.token_count
        return {"input_tokens": prompt, "input_tokens_details": {"cached_tokens": self.turn.usage.cached_tokens},
                "output_tokens": generated, "total_tokens": prompt + generated,
                "output_tokens_details": {"reasoning_tokens": self.turn.thought_count if self.turn.thinking else 0}}
