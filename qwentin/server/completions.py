"""/v1/completions: plain text or token ids in, plain text out; nothing is split, no template is applied.

    prompt   one string, a list of strings, a list of token ids, or a list of such lists: one GenerateRequest each;
             the choices of prompt k are numbers k*n ... k*n + n-1
    echo     the prompt's text stands before the completion; with logprobs its tokens are scored too, which is how
             evaluation harnesses read likelihoods: one entry a prompt token (the first has none), then the generated

Proven by tests/test_completions.py (a scripted engine), tests/test_lm_eval.py and tests/test_server_openai.py.
"""
import time
import uuid
from dataclasses import dataclass
from functools import reduce

import numpy as np

from ..errors import RequestError
from ..guide import Guide
from ..request import Delta, Done, Event, Finish, GenerateRequest, PromptScored, Token, Usage
from .fields import anything, boolean, integer, optional, refuse, required, string, token_ids
from .logprobs import join_legacy, legacy_logprobs
from .options import Options
from .reply import FINGERPRINT, DataFrames, add_usage, finish_reason, timings, usage_object

MAX_PROMPTS = 256
MAX_TOP = 20        # alternatives a token


@dataclass(frozen=True)
class CompletionBody(Options):
    prompt: str | list = required(anything)
    max_tokens: int | None = optional(integer(0))
    logprobs: int | None = optional(integer(0, MAX_TOP))
    echo: bool = optional(boolean, False)
    best_of: int | None = optional(integer(1))
    suffix: str | None = optional(string)

    def check(self) -> None:
        if self.max_tokens == 0 and not self.echo:
            refuse("max_tokens", 0, "an integer of at least 1 (0 goes with echo only)", "invalid_value")
        if self.best_of is not None and self.best_of != self.n:
            refuse("best_of", self.best_of, f"the value of n ({self.n})", "unsupported_value")
        if self.suffix:
            refuse("suffix", self.suffix, "no suffix (text cannot be inserted before it)", "unsupported_value")

    @property
    def prompt_logprobs(self) -> int | None:
        """Alternatives to report for prompt tokens; a request for nothing but the echo scores the prompt too."""
        return (self.logprobs or 0) if self.echo and (self.logprobs is not None or self.max_tokens == 0) else None


@dataclass(frozen=True)
class Prompt:
    text: str
    ids: np.ndarray     # i32 [T]


def prompts(value, tokenizer) -> list[Prompt]:
    """The four shapes of `prompt`, each with its ids and its text. Raises RequestError naming the entry."""
    single = isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int)
    entries = [value] if single else value
    if not isinstance(entries, list):
        refuse("prompt", value, "a string, token ids, or an array of either")
    if not 1 <= len(entries) <= MAX_PROMPTS:
        raise RequestError(f"prompt holds {len(entries)} entries; 1 to {MAX_PROMPTS} were wanted.", "prompt")
    return [prompt("prompt" if single else f"prompt[{i}]", entry, tokenizer) for i, entry in enumerate(entries)]


def prompt(name: str, entry, tokenizer) -> Prompt:
    if not isinstance(entry, (str, list)):
        refuse(name, entry, "a string or an array of token ids")
    if not entry:
        raise RequestError(f"{name} is empty; at least one token was wanted.", name)
    if isinstance(entry, str):
        return Prompt(entry, tokenizer.encode(entry))
    ids = token_ids(name, entry)
    wrong = next((i for i in ids if i >= tokenizer.size), None)
    if wrong is not None:
        raise RequestError(f"{name} holds the token id {wrong}; ids from 0 to {tokenizer.size - 1} exist.", name)
    return Prompt(tokenizer.decode(ids), np.array(ids, np.int32))


@dataclass(frozen=True)
class Part:
    """What one event adds to one choice."""
    index: int
    text: str = ""
    scored: tuple[Token, ...] = ()      # the echoed prompt's
    tokens: tuple[Token, ...] = ()
    finish: str | None = None
    first: bool = False


class CompletionReply(DataFrames):
    """One completions request on its way: `requests` for the engine; then every event to `chunks`, or every event to
    `collect` and `whole` at the end. Both raise what `finish_reason` raises."""

    body_type = CompletionBody
    prompt_field = "prompt"

    def __init__(self, body: CompletionBody, engine, model: str):
        body.check()
        self.body, self.tokenizer, self.notes = body, engine.tokenizer, []
        self.prompts = prompts(body.prompt, engine.tokenizer)
        name = f"cmpl-{uuid.uuid4().hex}"
        form = body.form()
        guide = Guide(grammar=engine.grammars.compile(form.source, form.field)) if form else None
        rules = dict(sampling=body.sampling(engine.defaults), n=body.n, max_tokens=body.max_tokens, stop=body.stop,
                     stop_ids=body.stop_ids(engine.model_config.eos_token_id, guide is not None), logprobs=body.logprobs,
                     prompt_logprobs=body.prompt_logprobs, guide=guide)
        self.requests = [GenerateRequest(id=f"{name}-{k}", prompt=p.ids, **rules) for k, p in enumerate(self.prompts)]
        self.scored: list[tuple[Token, ...]] = [() for _ in self.prompts]
        self.parts: list[list[Part]] = [[] for _ in range(len(self.prompts) * body.n)]
        self.begun: set[int] = set()
        self.done: list[Usage] = []
        self.generated = 0
        self.head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": model,
                     "system_fingerprint": FINGERPRINT}

    def part(self, number: int, event: Event) -> Part | None:
        """What an event of request `number` adds to a choice, if it adds to one. The first part carries the echo."""
        if isinstance(event, PromptScored):
            self.scored[number] = event.tokens
        if isinstance(event, Done):
            self.done.append(event.usage)
        if not isinstance(event, (Delta, Finish)):
            return None
        index = number * self.body.n + event.index
        first = index not in self.begun
        self.begun.add(index)
        echo = first and self.body.echo
        scored, text = (self.scored[number], self.prompts[number].text) if echo else ((), "")
        if isinstance(event, Finish):
            return Part(index, text, scored, finish=finish_reason(event), first=first)
        self.generated += len(event.tokens)
        return Part(index, text + event.text, scored, event.tokens, first=first)

    def usage(self) -> dict:
        total = reduce(add_usage, self.done, Usage())
        return usage_object(sum(len(p.ids) for p in self.prompts), self.generated, total.cached_tokens)

    def extras(self) -> dict:
        return {"x_qwentin": timings(reduce(add_usage, self.done, Usage()))}

    def choice(self, parts: list[Part]) -> dict:
        """A choice made of some of its parts: one in a stream, all of them in a whole answer."""
        index = parts[0].index
        source = self.prompts[index // self.body.n]
        out = {"index": index, "text": "".join(p.text for p in parts), "logprobs": None,
               "finish_reason": parts[-1].finish}
        if self.body.logprobs is not None:
            shift = len(source.text) if self.body.echo else 0
            out["logprobs"] = join_legacy([legacy for p in parts for legacy in (
                legacy_logprobs(p.scored, self.tokenizer), legacy_logprobs(p.tokens, self.tokenizer, shift))])
        if self.body.return_token_ids:
            out["token_ids"] = [token.id for p in parts for token in p.tokens]
            if parts[0].first:
                out["prompt_token_ids"] = source.ids.tolist()
        return out

    def collect(self, number: int, event: Event) -> None:
        part = self.part(number, event)
        if part is not None:
            self.parts[part.index].append(part)

    def whole(self) -> dict:
        return {**self.head, "choices": [self.choice(parts) for parts in self.parts], "usage": self.usage(),
                **self.extras()}

    def chunks(self, number: int, event: Event) -> list[dict]:
        part = self.part(number, event)
        streaming = self.body.streaming
        if part is None:
            last = isinstance(event, Done) and len(self.done) == len(self.requests)
            final = {**self.head, "choices": [], "usage": self.usage(), **self.extras()}
            return [final] if last and streaming.include_usage else []
        tokens_wanted = self.body.logprobs is not None or self.body.return_token_ids
        if not (part.text or part.finish or (tokens_wanted and part.tokens)):
            return []
        out = {**self.head, "choices": [self.choice([part])]}
        if streaming.continuous_usage_stats:
            out["usage"] = self.usage()
        elif streaming.include_usage:
            out["usage"] = None
        return [out]
