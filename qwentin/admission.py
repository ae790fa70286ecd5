"""Admission: what of a request can be served at all, decided before anything is allocated.

Proven by tests/test_engine.py.
"""
from .errors import ContextOverflow, RequestError
from .request import GenerateRequest
from .sampler import ABOVE_LOW, RANGES, check

__all__ = ["ABOVE_LOW", "MOST_CHOICES", "MOST_LOGPROBS", "RANGES", "admissible"]     # ranges: for whoever describes them

MOST_LOGPROBS = 20
MOST_CHOICES = 128


def admissible(request: GenerateRequest, vocabulary: int, context: int) -> int:
    """The most tokens a choice of `request` may generate; `vocabulary` ids have text, `context` tokens are the window.

    Raises RequestError, or ContextOverflow with the counts, for what cannot be served.
    """
    prompt = request.prompt
    if not len(prompt):
        raise RequestError("the prompt is empty; at least one token was wanted.", "prompt")
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        bad = int(prompt[(prompt < 0) | (prompt >= vocabulary)][0])
        raise RequestError(f"the prompt holds token id {bad}; ids from 0 to {vocabulary - 1} exist.", "prompt")
    for name, value, low, high in (("n", request.n, 1, MOST_CHOICES), ("logprobs", request.logprobs, 0, MOST_LOGPROBS),
                                   ("prompt_logprobs", request.prompt_logprobs, 0, MOST_LOGPROBS)):
        if value is not None and not low <= value <= high:
            raise RequestError(f"{name} is {value}; {low} to {high} was wanted.", name)
    if request.max_tokens is not None and request.max_tokens < (request.prompt_logprobs is None):
        raise RequestError(f"max_tokens is {request.max_tokens}; a positive integer was wanted.", "max_tokens")
    check(request.sampling, vocabulary)
    room = context - len(prompt)
    if (1 if request.max_tokens is None else request.max_tokens) > room:
        raise ContextOverflow(len(prompt), request.max_tokens, context)
    return room if request.max_tokens is None else request.max_tokens
