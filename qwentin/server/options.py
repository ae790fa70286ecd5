"""The options of a generation that dialects share, and what the engine makes of them.

Not given means the checkpoint's generation_config (sampling) or the rest of the context (length). Every dialect takes
`Sampling`; the two older OpenAI routes take `Options`. Proven by tests/test_chat.py and tests/test_completions.py.
"""
from dataclasses import dataclass, replace

from ..request import SamplingParams
from .form import Structured
from .fields import (MAX_CHOICES, StreamOptions, biases, boolean, integer, number, optional, stops, stream_options,
                     string, token_ids)

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
            "logit_bias", "seed")


@dataclass(frozen=True)
class Sampling:
    model: str | None = optional(string)            # any name is served
    temperature: float | None = optional(number)
    top_p: float | None = optional(number)
    top_k: int | None = optional(integer())
    min_p: float | None = optional(number)
    presence_penalty: float | None = optional(number)
    frequency_penalty: float | None = optional(number)
    repetition_penalty: float | None = optional(number)
    logit_bias: tuple | None = optional(biases)
    seed: int | None = optional(integer())
    stop_token_ids: tuple[int, ...] = optional(token_ids, ())
    ignore_eos: bool = optional(boolean, False)
    stream: bool = optional(boolean, False)

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The checkpoint's defaults with what this request says."""
        given = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        return replace(defaults, **given)

    def stop_ids(self, checkpoint: tuple[int, ...], constrained: bool = False) -> frozenset[int]:
        """Ids that end a choice: the checkpoint's (unless ignore_eos) and the request's own. What a grammar constrains has
        an end, so there the checkpoint's always count."""
        ignored = self.ignore_eos and not constrained
        return frozenset(self.stop_token_ids) | (frozenset() if ignored else frozenset(checkpoint))


@dataclass(frozen=True)
class Options(Structured, Sampling):
    n: int = optional(integer(1, MAX_CHOICES), 1)
    stop: tuple[str, ...] = optional(stops, ())
    stream_options: StreamOptions | None = optional(stream_options)
    return_token_ids: bool = optional(boolean, False)   # an extension: ids beside the text

    @property
    def streaming(self) -> StreamOptions:
        return self.stream_options or StreamOptions()
