"""/tokenize, /detokenize and /tokenizer_info: the tokenizer over HTTP, so that clients need no tokenizer files.

The shapes are those that vLLM serves and lm-eval reads. Proven by tests/test_lm_eval.py.
"""
from dataclasses import dataclass

from ..errors import RequestError
from .conversation import conversation, tool_list
from .effort import template_variables
from .fields import boolean, listing, mapping, optional, read, required, string, token_ids


@dataclass(frozen=True)
class TokenizeBody:
    """Either `prompt`, or `messages` to be rendered as a chat would be. No token is ever added in front or behind, so
    add_special_tokens changes nothing."""
    prompt: str | None = optional(string)
    messages: list | None = optional(listing)
    tools: list | None = optional(tool_list)
    add_generation_prompt: bool = optional(boolean, True)
    chat_template_kwargs: dict | None = optional(mapping)
    add_special_tokens: bool = optional(boolean, True)
    return_token_strs: bool = optional(boolean, False)


@dataclass(frozen=True)
class DetokenizeBody:
    tokens: tuple[int, ...] = required(token_ids)


def tokenize(given: dict, engine) -> dict:
    """{prompt} or {messages} -> {tokens, count, max_model_len}"""
    body = read(TokenizeBody, given)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Either prompt or messages was wanted.", "prompt", "missing_required_parameter")
    text = body.prompt
    if text is None:
        variables = {"add_generation_prompt": body.add_generation_prompt,
                     **template_variables(body.chat_template_kwargs or {}, None, None)}
        text = engine.chat_template.render(conversation(body.messages), body.tools or None, **variables)
    ids = engine.tokenizer.encode(text).tolist()
    out = {"tokens": ids, "count": len(ids), "max_model_len": engine.max_model_len}
    if body.return_token_strs:
        out["token_strs"] = [engine.tokenizer.token_text(i) for i in ids]
    return out


def detokenize(given: dict, engine) -> dict:
    """{tokens} -> {prompt}"""
    ids = read(DetokenizeBody, given).tokens
    wrong = next((i for i in ids if i >= engine.tokenizer.size), None)
    if wrong is not None:
        raise RequestError(f"tokens holds {wrong}; ids from 0 to {engine.tokenizer.size - 1} exist.", "tokens")
    return {"prompt": engine.tokenizer.decode(ids)}


def tokenizer_info(engine) -> dict:
    special = engine.tokenizer.special
    return {"tokenizer_class": "PreTrainedTokenizerFast", "vocab_size": engine.tokenizer.size,
            "model_max_length": engine.max_model_len, "bos_token": special("bos_token"),
            "eos_token": special("eos_token"), "pad_token": special("pad_token"), "add_bos_token": False,
            "chat_template": engine.chat_template.text}
