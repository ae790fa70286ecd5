"""/v1/messages: Anthropic's dialect, as Claude Code and the anthropic SDK speak it.

    message_start   ping
    content_block_start 0 (thinking)   content_block_delta* (thinking_delta, at last signature_delta)   content_block_stop
    content_block_start 1 (text)       content_block_delta* (text_delta)                                content_block_stop
    content_block_start 2 (tool_use)   content_block_delta* (input_json_delta)                          content_block_stop
    message_delta (stop_reason, usage)   message_stop

Blocks come in the order the model wrote them. The whole answer is made of the same blocks, so both modes agree. While
the prompt is read clients get ping events: they take comments for silence. input_tokens counts what was computed;
what came from the cache is cache_read_input_tokens, known when the prompt was read, so message_delta has the last word.

A thought's signature is a digest of its text: clients require one and send it back, nothing checks it. The reply names
the model as the request did: Claude Code sends no thought back that came under another name.
How history is read: messages_input.py. Proven by tests/test_messages.py and tests/test_tool_dialects.py.
"""
import hashlib
import json
import re
import uuid
from dataclasses import dataclass, field

from ..request import Done, Event
from .effort import Thinking
from .fields import anything, integer, listing, mapping, optional, read, required, stops
from .form import Form, format_of
from .messages_input import budget_of, conversation_of, declared, marked_strict
from .options import Sampling
from .refusals import describe_for_anthropic
from .toolchoice import anthropic_choice
from .toolevents import ArgumentsDelta, CallEnd, CallStart, Reasoning, Text
from .toolevents import Event as Said
from .turn import Piece, Turn

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text"),
          "tool_use": ("input_json_delta", "partial_json")}
SIGN = re.compile(r"\s*[:,}]\s*")


@dataclass(frozen=True)
class MessagesBody(Thinking, Sampling):
    messages: list = required(listing)
    system: str | list | None = optional(anything)
    max_tokens: int | None = optional(integer(1))       # Anthropic requires it; here the rest of the context is the default
    stop_sequences: tuple[str, ...] = optional(stops, ())
    tools: list | None = optional(listing)
    tool_choice: dict | None = optional(mapping)
    thinking: dict | None = optional(mapping)
    output_config: dict | None = optional(mapping)
    output_format: dict | None = optional(mapping)              # where older clients put output_config.format

    def form(self) -> Form | None:
        inner = (self.output_config or {}).get("format")
        return format_of("output_format", self.output_format) if inner is None else format_of("output_config.format", inner)


@dataclass
class Block:
    """One content block while it grows."""
    kind: str
    start: dict
    parts: list[str] = field(default_factory=list)

    @property
    def joined(self) -> str:
        return "".join(self.parts)

    @property
    def signature(self) -> str:
        return hashlib.sha256(self.joined.encode("utf-8", "surrogatepass")).hexdigest()

    def whole(self) -> dict:
        if self.kind == "thinking":
            return {**self.start, "thinking": self.joined, "signature": self.signature}
        if self.kind == "text":
            return {**self.start, "text": self.joined}
        return {**self.start, "input": whole_members(self.joined)}


class MessagesReply:
    """One request on its way; see reply.Reply. `chunks` builds the blocks, `whole` shows them."""

    body_type = MessagesBody
    prompt_field = "messages"
    named_frames, overflow_in_stream = True, False

    def __init__(self, body: MessagesBody, engine, model: str):
        conversation = conversation_of(body)
        self.notes = declared(body.tools)[1]
        self.body, self.model = body, body.model or model
        tools = marked_strict(conversation.tools, body.tools)
        self.turn = Turn(engine, f"msg_{uuid.uuid4().hex}", conversation, body, tools,
                         choice=anthropic_choice(body.tool_choice), form=body.form(), budget=budget_of(body),
                         new_id=lambda: f"toolu_{uuid.uuid4().hex[:24]}", max_tokens=body.max_tokens,
                         stop=body.stop_sequences)
        self.notes += self.turn.notes
        self.requests = [self.turn.request]
        self.blocks: list[Block] = []
        self.open = False                   # does the last block still grow?
        self.ended: dict = {"stop_reason": None, "stop_sequence": None}

    def extras(self) -> dict:
        return self.turn.extras()

    # ---- the stream

    def opening(self) -> list[dict]:
        return [{"type": "message_start", "message": self.message(self.usage())}, self.alive()]

    def alive(self) -> dict:
        return {"type": "ping"}

    def failed(self, error: Exception) -> dict:
        return describe_for_anthropic(error)[2]

    def chunks(self, number: int, event: Event) -> list[dict]:
        piece = self.turn.piece(event)
        if piece is not None:
            return self.piece_chunks(piece)
        if isinstance(event, Done):
            return [{"type": "message_delta", "delta": self.ended, "usage": self.usage(), **self.extras()},
                    {"type": "message_stop"}]
        return []

    def piece_chunks(self, piece: Piece) -> list[dict]:
        out = [chunk for part in piece.said for chunk in self.part_chunks(part)]
        if piece.finish:
            out += self.close()
            self.ended = {"stop_reason": self.stop_reason(piece), "stop_sequence": piece.stop}
        return out

    def stop_reason(self, piece: Piece) -> str:
        if piece.stop is not None:
            return "stop_sequence"
        if piece.finish == "length" and self.body.max_tokens is None:
            return "model_context_window_exceeded"
        return STOP_REASONS[piece.finish]

    def part_chunks(self, part: Said) -> list[dict]:
        if isinstance(part, Reasoning):
            return self.grow(Block("thinking", {"type": "thinking", "thinking": "", "signature": ""}), part.text)
        if isinstance(part, Text):
            return self.grow(Block("text", {"type": "text", "text": ""}), part.text)
        if isinstance(part, CallStart):
            start = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            return self.begin(Block("tool_use", start))
        if isinstance(part, ArgumentsDelta):
            return self.add(part.fragment)
        assert isinstance(part, CallEnd)
        return self.close()

    def grow(self, block: Block, text: str) -> list[dict]:
        """More of the open block if it is of this kind, else a new one."""
        same = self.open and self.blocks[-1].kind == block.kind
        return ([] if same else self.begin(block)) + self.add(text)

    def begin(self, block: Block) -> list[dict]:
        before = self.close()
        self.blocks.append(block)
        self.open = True
        return before + [{"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": block.start}]

    def add(self, text: str) -> list[dict]:
        block = self.blocks[-1]
        kind, key = DELTAS[block.kind]
        block.parts.append(text)
        return [self.delta({"type": kind, key: text})] if text else []

    def delta(self, said: dict) -> dict:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": said}

    def close(self) -> list[dict]:
        if not self.open:
            return []
        self.open, block = False, self.blocks[-1]
        sign = [self.delta({"type": "signature_delta", "signature": block.signature})] if block.kind == "thinking" else []
        return sign + [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    # ---- the whole answer

    def collect(self, number: int, event: Event) -> None:
        self.chunks(number, event)

    def whole(self) -> dict:
        return self.message(self.usage()) | self.extras()

    def message(self, usage: dict) -> dict:
        return {"id": self.turn.request.id, "type": "message", "role": "assistant", "model": self.model,
                "content": [block.whole() for block in self.blocks], **self.ended, "usage": usage}

    def usage(self) -> dict:
        cached = self.turn.usage.cached_tokens
        return {"input_tokens": self.turn.prompt_count - cached, "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached, "output_tokens": self.turn.token_count,
                "output_tokens_details": {"thinking_tokens": self.turn.thought_count if self.turn.thinking else 0}}


def whole_members(arguments: str) -> dict:
    """A call's arguments; of a call that was cut off, those that are whole: half a value must not be taken for one."""
    try:
        return json.loads(arguments)
    except ValueError:
        return complete_pairs(arguments)


def complete_pairs(text: str) -> dict:
    """The pairs of a JSON object's beginning that a comma or the closing brace follows."""
    decoder, out, at = json.JSONDecoder(), {}, len(text) - len(text.lstrip(" {\n"))
    try:
        while True:
            key, at = decoder.raw_decode(text, at)
            colon = SIGN.match(text, at)
            value, at = decoder.raw_decode(text, colon.end() if colon else at)
            after = SIGN.match(text, at)
            if after is None:
                return out
            out[key], at = value, after.end()
    except ValueError:
        return out


def count_tokens(given: dict, engine) -> dict:
    """/v1/messages/count_tokens: the same body -> {"input_tokens"}, nothing generated."""
    stable, tail = conversation_of(read(MessagesBody, given)).render(engine.chat_template)
    return {"input_tokens": len(engine.encode(stable, tail)[0])}
