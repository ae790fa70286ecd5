"""Whatever JSON arrives, a request is built from it or it is refused in one sentence: 6,000 random bodies, made from values
that have hurt servers before, for every route that takes a body."""
import json
import random
from dataclasses import fields

import pytest

from fake_engine import FakeEngine
from qwentin import nano
from qwentin.errors import RequestError
from qwentin.server.app import prepare
from qwentin.server.chat import ChatBody, ChatReply
from qwentin.server.completions import CompletionBody, CompletionReply
from qwentin.server.fields import parse_json
from qwentin.server.messages import MessagesBody, MessagesReply
from qwentin.server.responses import ResponsesBody, ResponsesReply
from qwentin.server.text import DetokenizeBody, TokenizeBody, detokenize, tokenize
from qwentin.tokenizer import Tokenizer

ATOMS = [None, True, False, 0, 1, -1, 20, 0.5, 1.0, 1e308, -1e308, 2**63, 10**30, "", "a", "\x00", "\ud83d", "none", "user",
         "assistant", "tool", "text", "function", "<|im_end|>", "{}", "[1", '{"a": 1}', '{"\\ud83d": 1}', [], {}, [[]], [{}],
         [1, 2], ["a"], {"a": 1}, {"1": 1}, {"type": "text", "text": "t"}, {"type": "image_url"}, {"role": "user"}]
KEYS = ["role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "reasoning_content", "reasoning",
        "tool_call_id", "function_call", "include_usage", "enable_thinking", "\ud83d"]
BLOCKS = [{"type": "text", "text": "x"}, {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "image"},
          {"type": "tool_use", "id": "i", "name": "f", "input": {"k": 1}}, {"type": "document", "source": {"type": "text"}},
          {"type": "tool_result", "tool_use_id": "i", "content": [{"type": "text", "text": "r"}]}]
ITEMS = [{"role": "developer", "content": "d"}, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
         {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
         {"type": "function_call_output", "call_id": "c", "output": "o"}, {"type": "web_search_call"},
         {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "i"}]
TOOLS = [{"name": "f", "input_schema": {}}, {"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"},
         {"type": "custom", "name": "p"}, {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}]
CALL = {"function": {"name": "f", "arguments": '{"k": [1, null]}'}}


def value(rng, depth=0):
    kind = rng.random()
    if kind < 0.6 or depth > 3:
        return rng.choice(ATOMS)
    if kind < 0.8:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(KEYS): value(rng, depth + 1) for _ in range(rng.randint(0, 4))}


def message(rng):
    """Mostly a good message, so that what is wrong sits deep inside."""
    out = {"role": rng.choice(["user", "system", "assistant", "tool", "developer", "function"]),
           "content": rng.choice(["hi", None, [{"type": "text", "text": "x"}], value(rng)])}
    if rng.random() < 0.5:
        out[rng.choice(["tool_calls", "reasoning", "function_call", "role"])] = rng.choice([[CALL], value(rng)])
    return out


def spoilt(rng, good):
    """One of the good objects, now and then with a value gone wrong."""
    out = dict(rng.choice(good))
    if rng.random() < 0.3:
        out[rng.choice([*out, rng.choice(KEYS)])] = value(rng)
    return out


def blocks(rng):
    """A message of Anthropic's."""
    content = rng.choice(["hi", None, [spoilt(rng, BLOCKS) for _ in range(rng.randint(0, 3))]])
    return spoilt(rng, [{"role": role, "content": content} for role in ("user", "assistant", "system")])


def body(rng, kind):
    """A body of the dataclass `kind` with up to two fields gone wrong."""
    good = {ChatBody: lambda: {"messages": [message(rng) for _ in range(rng.randint(0, 4))]},
            MessagesBody: lambda: {"messages": [*(blocks(rng) for _ in range(rng.randint(0, 3))), {"role": "user"}],
                                   "tools": [spoilt(rng, TOOLS)], "thinking": {"type": "adaptive"}},
            ResponsesBody: lambda: {"input": rng.choice(["hi", [spoilt(rng, ITEMS) for _ in range(rng.randint(0, 4))]]),
                                    "tools": [spoilt(rng, TOOLS)], "reasoning": {"effort": "low"}},
            CompletionBody: lambda: {"prompt": rng.choice(["hi", [1, 2], ["a"], [[1]], value(rng)])},
            TokenizeBody: lambda: {rng.choice(["prompt", "messages"]): value(rng)},
            DetokenizeBody: lambda: {"tokens": value(rng)}}[kind]()
    for _ in range(rng.randint(0, 2)):
        good[rng.choice([f.name for f in fields(kind)])] = value(rng)
    return good


@pytest.mark.parametrize("kind, serve", [
    (ChatBody, lambda raw, engine: prepare(ChatReply, raw, engine, "m")),
    (CompletionBody, lambda raw, engine: prepare(CompletionReply, raw, engine, "m")),
    (MessagesBody, lambda raw, engine: prepare(MessagesReply, raw, engine, "m")),
    (ResponsesBody, lambda raw, engine: prepare(ResponsesReply, raw, engine, "m")),
    (TokenizeBody, lambda raw, engine: json.dumps(tokenize(parse_json(raw), engine))),
    (DetokenizeBody, lambda raw, engine: json.dumps(detokenize(parse_json(raw), engine))),
])
def test_any_body_is_served_or_refused(kind, serve):
    rng, engine, counts = random.Random(11), FakeEngine([]), {"served": 0, "refused": 0}
    engine.tokenizer = Tokenizer(nano.DIRECTORY)
    for _ in range(1000):
        raw = json.dumps(body(rng, kind)).encode()
        try:
            serve(raw, engine)
            counts["served"] += 1
        except RequestError as error:
            counts["refused"] += 1
            assert str(error).encode() and json.dumps(error.param)
    assert min(counts.values()) > 30, f"the bodies are too tame or too wild: {counts}"
