"""/v1/chat/completions: messages in, a thought and an answer out.

A body becomes one GenerateRequest; the engine's events become `Piece`s (reply.py); pieces become chunks of a stream or
one whole answer. Stop strings count from the answer on, so that they cannot cut a thought. Tool calls that the model
writes are part of the text. Proven by tests/test_chat.py (a scripted engine) and tests/test_server_openai.py.
"""
import time
import uuid
from dataclasses import dataclass

from ..errors import RequestError
from ..request import Delta, Done, Event, Finish, GenerateRequest, Usage
from .conversation import EFFORTS, conversation, template_variables, tool_list
from .fields import anything, boolean, integer, listing, mapping, one_of, optional, refuse, required
from .logprobs import chat_logprobs
from .options import Options
from .reasoning import CLOSE, opens_thought
from .reply import FINGERPRINT, Choice, Piece, usage_object

CHUNK = "chat.completion.chunk"
MAX_TOP = 20         # alternatives a token


@dataclass(frozen=True)
class ChatBody(Options):
    messages: list = required(listing)
    tools: list | None = optional(tool_list)
    tool_choice: str | dict | None = optional(anything)
    response_format: dict | None = optional(mapping)
    max_tokens: int | None = optional(integer(1))
    max_completion_tokens: int | None = optional(integer(1))
    logprobs: bool = optional(boolean, False)
    top_logprobs: int | None = optional(integer(0, MAX_TOP))
    enable_thinking: bool | None = optional(boolean)
    reasoning_effort: str | None = optional(one_of("none", *EFFORTS))
    chat_template_kwargs: dict | None = optional(mapping)

    def check(self) -> None:
        """Combinations, and what this server cannot do yet: refused, because ignoring it would change the answer."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is given without logprobs; set logprobs to true.", "top_logprobs")
        if self.tool_choice not in (None, "auto", "none"):
            refuse("tool_choice", self.tool_choice, "'auto' or 'none' (a call cannot be forced yet)", "unsupported_value")
        if self.response_format is not None and self.response_format.get("type", "text") != "text":
            refuse("response_format.type", self.response_format["type"], "'text' (output cannot be constrained yet)",
                   "unsupported_value")

    def prompt(self, chat_template) -> tuple[str, str]:
        """The prompt in two parts: what the conversation's next prompt will begin with too, and the rest."""
        variables = template_variables(self.chat_template_kwargs or {}, self.enable_thinking, self.reasoning_effort)
        messages, tools = conversation(self.messages), self.tools or None
        whole = chat_template.render(messages, tools, **variables)
        stable = chat_template.render(messages, tools, **{**variables, "add_generation_prompt": False})
        return (stable, whole[len(stable):]) if whole.startswith(stable) else ("", whole)


class ChatReply:
    """One chat request on its way: `requests` for the engine; then every event to `chunks`, or every event to `collect`
    and `whole` at the end. Both raise what `finish_reason` raises."""

    body_type = ChatBody
    prompt_field = "messages"

    def __init__(self, body: ChatBody, engine, model: str):
        body.check()
        stable, tail = body.prompt(engine.chat_template)
        self.thinking = opens_thought(tail)
        self.body, self.tokenizer = body, engine.tokenizer
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        prompt, stable_tokens = engine.tokenizer.encode_parts(stable, tail)
        self.request = GenerateRequest(
            id=f"chatcmpl-{uuid.uuid4().hex}", prompt=prompt, stable=stable_tokens,
            sampling=body.sampling(engine.defaults), n=body.n, max_tokens=limit, stop=body.stop,
            stop_after=CLOSE if self.thinking else "", stop_ids=body.stop_ids(engine.model_config.eos_token_id),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None)
        self.requests = [self.request]
        self.choices = [Choice(i, self.thinking) for i in range(body.n)]
        self.pieces: list[list[Piece]] = [[] for _ in range(body.n)]
        self.begun: set[int] = set()        # choices that the stream has opened
        self.usage = Usage()
        self.head = {"id": self.request.id, "created": int(time.time()), "model": model,
                     "system_fingerprint": FINGERPRINT}

    def piece(self, event: Event) -> Piece | None:
        """What an event adds to a choice, if it adds to one."""
        if isinstance(event, (Delta, Finish)):
            return self.choices[event.index].push(event)
        if isinstance(event, Done):
            self.usage = event.usage
        return None

    def usage_so_far(self) -> dict:
        thoughts = sum(choice.thought_count for choice in self.choices) if self.thinking else None
        return usage_object(len(self.request.prompt), sum(choice.token_count for choice in self.choices),
                            self.usage.cached_tokens, thoughts)

    def token_parts(self, pieces: list[Piece]) -> dict:
        """What a choice says of its tokens, as far as the request asks: log-probabilities of those that have text, ids
        of all."""
        out = {"logprobs": None}
        if self.body.logprobs:
            thought = [token for p in pieces for token in p.thought_tokens]
            answer = [token for p in pieces for token in p.tokens]
            out["logprobs"] = chat_logprobs(thought, answer, self.tokenizer) if thought or answer else None
        if self.body.return_token_ids:
            out["token_ids"] = [i for p in pieces for i in p.ids]
        return out

    # ---- the whole answer

    def collect(self, number: int, event: Event) -> None:
        piece = self.piece(event)
        if piece is not None:
            self.pieces[piece.index].append(piece)

    def whole(self) -> dict:
        out = {**self.head, "object": "chat.completion", "choices": [self.choice(p) for p in self.pieces],
               "usage": self.usage_so_far()}
        return out | self.prompt_ids()

    def choice(self, pieces: list[Piece]) -> dict:
        message = {"role": "assistant", "content": "".join(p.text for p in pieces)}
        if self.thinking:
            message["reasoning_content"] = "".join(p.thought for p in pieces)
        return {"index": pieces[0].index, "message": message, **self.token_parts(pieces),
                "finish_reason": pieces[-1].finish}

    def prompt_ids(self) -> dict:
        return {"prompt_token_ids": self.request.prompt.tolist()} if self.body.return_token_ids else {}

    # ---- the stream

    def chunks(self, number: int, event: Event) -> list[dict]:
        piece = self.piece(event)
        if piece is not None:
            return self.piece_chunks(piece)
        if isinstance(event, Done) and self.body.streaming.include_usage:
            return [{**self.head, "object": CHUNK, "choices": [], "usage": self.usage_so_far()}]
        return []

    def piece_chunks(self, piece: Piece) -> list[dict]:
        """The role first, then thought and answer apart: some clients read only one of the two from a chunk."""
        out = []
        thought = Piece(piece.index, thought_tokens=piece.thought_tokens)
        answer = Piece(piece.index, tokens=piece.tokens)
        tokens_wanted = self.body.logprobs or self.body.return_token_ids
        if piece.index not in self.begun:
            self.begun.add(piece.index)
            out.append(self.chunk(Piece(piece.index), {"role": "assistant", "content": ""}) | self.prompt_ids())
        if piece.thought or (piece.thought_tokens and tokens_wanted):
            out.append(self.chunk(thought, {"reasoning_content": piece.thought} if piece.thought else {}))
        if piece.text or (piece.tokens and tokens_wanted):
            out.append(self.chunk(answer, {"content": piece.text} if piece.text else {}))
        if piece.finish:
            out.append(self.chunk(Piece(piece.index, silent=piece.silent), {}, piece.finish))
        return out

    def chunk(self, piece: Piece, delta: dict, finish: str | None = None) -> dict:
        """A chunk that says `delta`, and of tokens what `piece` holds."""
        out = {**self.head, "object": CHUNK, "choices": [
            {"index": piece.index, "delta": delta, **self.token_parts([piece]), "finish_reason": finish}]}
        if self.body.streaming.continuous_usage_stats:
            out["usage"] = self.usage_so_far()
        elif self.body.streaming.include_usage:
            out["usage"] = None
        return out
