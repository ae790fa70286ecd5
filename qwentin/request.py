"""What goes into the engine and what comes out: the only nouns that the server and the engine share.

A `GenerateRequest` is token ids and rules; the engine answers with a stream of events for it, in this order:

    Progress*  PromptScored?  (Delta | Finish)*  Done          one Finish per choice, Done exactly once and last

Frozen data, no behaviour. The server builds requests and reads events; the engine does the opposite.
"""
from dataclasses import dataclass, field

import numpy as np

from .guide import Guide


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Defaults are neutral; a checkpoint's generation_config supplies the real ones.

    temperature 0 means argmax. top_k 0 and top_p 1 and min_p 0 switch those filters off. Penalties follow the OpenAI
    meaning (presence once, frequency per count, over generated tokens); repetition_penalty is the multiplicative one of
    the CTRL paper (arXiv 1909.05858, section 4.1), over prompt and generated tokens. seed None draws a fresh one.
    """
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt to be continued `n` times.

    prompt          i32 [T] token ids, T >= 1
    max_tokens      per choice; None means the rest of the context; 0 is allowed with prompt_logprobs
    stop            stop strings; the text before the earliest one is kept, the engine halts there
    stop_after      stop strings count only after this text was generated ("" = from the start): a thought is not cut
    stop_ids        token ids that end a choice and produce no text; None means the checkpoint's own
    stable          the first so many prompt ids will stand in the conversation's next prompt too: a good place for a
                    snapshot; None if unknown
    logprobs        None, or how many top alternatives to report for each generated token (0 = only the chosen one)
    prompt_logprobs the same for the prompt's own tokens (echo)
    guide           limits of its thought and the grammar of its answer; None for neither
    """
    id: str
    prompt: np.ndarray
    sampling: SamplingParams = SamplingParams()
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_after: str = ""
    stop_ids: frozenset[int] | None = None
    stable: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guide: Guide | None = None


@dataclass(frozen=True)
class Token:
    """One token of text: its id, where its text starts (characters of the choice's text before it), its log-probability
    under the model (natural log, before temperature and filters) and the best alternatives, best first."""
    id: int
    offset: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Progress:
    """`done` of `total` prompt tokens are prefilled; left_s: seconds that the rest will take, None if nobody knows."""
    done: int
    total: int
    left_s: float | None = None


@dataclass(frozen=True)
class PromptScored:
    """The prompt's own tokens, logprob None for the first; sent once, if prompt_logprobs was asked."""
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Delta:
    """New text of one choice, never ending inside a character or inside a possible stop string.

    `tokens` are the tokens sampled since the last Delta of this choice: their text may still be held back, or may have
    been cut by a stop string, so the texts of `tokens` and `text` need not align inside one Delta.
    """
    index: int
    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Finish:
    """A choice ended: "stop" (stop id or stop string), "length" (limit or context), "cancel" or "error".

    message says what went wrong, stop is the stop string that ended it, if one did; closed says why its thought was closed
    for it ("budget" or "loop"), if it was.
    """
    index: int
    reason: str
    message: str = ""
    stop: str | None = None
    closed: str = ""


@dataclass(frozen=True)
class Speculated:
    """How guessing ahead went, all choices together: verify rounds, plain steps, guesses verified, guesses that the text ran
    through, those of them found by lookup, the largest tree; by depth, rounds that had a guess where the text stood, and
    those in which it was right; what the watchdog did.
    """
    rounds: int = 0
    plain: int = 0
    guesses: int = 0
    accepted: int = 0
    lookup: int = 0
    largest: int = 0
    offered: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    events: tuple[str, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Counts and wall-clock seconds of a finished request. cached_tokens <= prompt_tokens were not recomputed."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    speculated: Speculated | None = None        # None when nothing could be


@dataclass(frozen=True)
class Done:
    usage: Usage = field(default_factory=Usage)


Event = Progress | PromptScored | Delta | Finish | Done
