"""Log-probabilities in OpenAI's two shapes: a list of objects for chat, four parallel lists for completions.

A token that is only part of a character has no text of its own: it is shown as `bytes:\\xf0\\x9f`, so that no two tokens
share a name and U+FFFD never appears. Proven by tests/test_chat.py and tests/test_completions.py.
"""
from collections.abc import Iterable

from ..request import Token


def token_name(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_entry(token_id: int, logprob: float | None, tokenizer) -> dict:
    raw = tokenizer.token_bytes(token_id)
    return {"token": token_name(raw), "logprob": logprob, "bytes": list(raw)}


def chat_entries(tokens: Iterable[Token], tokenizer) -> list[dict]:
    """choices[].logprobs.content"""
    return [chat_entry(token.id, token.logprob, tokenizer)
            | {"top_logprobs": [chat_entry(i, p, tokenizer) for i, p in token.top]} for token in tokens]


def chat_logprobs(thought: Iterable[Token], answer: Iterable[Token], tokenizer) -> dict:
    """The answer's tokens where OpenAI puts them; the thought's beside them, which is our extension."""
    return {"content": chat_entries(answer, tokenizer), "reasoning_content": chat_entries(thought, tokenizer),
            "refusal": None}


def legacy_logprobs(tokens: Iterable[Token], tokenizer, shift: int = 0) -> dict:
    """The object of /v1/completions; `shift` is added to every offset (text of an echoed prompt before it).

    top_logprobs always holds the token itself; None stands where there is no probability: a prompt's first token.
    """
    tokens = tuple(tokens)
    names = [token_name(tokenizer.token_bytes(token.id)) for token in tokens]
    return {"tokens": names,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [legacy_top(token, name, tokenizer) for token, name in zip(tokens, names)],
            "text_offset": [token.offset + shift for token in tokens]}


def legacy_top(token: Token, name: str, tokenizer) -> dict | None:
    if token.logprob is None:
        return None
    top = {token_name(tokenizer.token_bytes(i)): p for i, p in token.top}
    top.setdefault(name, token.logprob)
    return top


def join_legacy(parts: list[dict]) -> dict:
    """Several legacy objects, one after the other."""
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {key: [item for part in parts for item in part[key]] for key in keys}
