"""P-1, P-6: ten questions, each answered through a tool call, in every dialect, thoughts sent back or off: a warm turn
computes no more than what is new and one chunk. And a restarted server goes on where the old one stood.

Nano calls a tool for the first question of a conversation, rarely for the tenth: which tokens it chooses is written in
advance (clients/led_server.py), everything else is real.
"""
import json

import pytest

from clients.agents import call as written
from clients.served import serve
from http_client import call

CHUNK = 128
CITIES = ["Oslo", "Paris", "Cairo", "Austin", "Denver", "Prague", "Athens", "Vienna", "Sydney", "Delhi"]
SYSTEM = "You are a helpful assistant. Answer in one sentence. " * 12
WEATHER = {"name": "get_weather", "description": "Weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
OPTIONS = ["--prefill-chunk", str(CHUNK), "--max-model-len", "4096"]
RULES = [{"asked": '"temperature"', "say": "It is 3 degrees there."},
         *({"asked": f"in {city}?", "say": written("get_weather", city=city)} for city in CITIES)]


@pytest.fixture(scope="module")
def own():
    with serve(*OPTIONS, rules=RULES) as server:
        yield server


class Chat:
    path = "/v1/chat/completions"

    def __init__(self, thinking):
        self.history = [{"role": "system", "content": SYSTEM}]
        self.body = {"tools": [{"type": "function", "function": WEATHER}], "temperature": 0, "max_tokens": 200,
                     "enable_thinking": thinking}

    def asks(self, question):
        self.history.append({"role": "user", "content": question})

    def request(self):
        return {**self.body, "messages": self.history}

    def hears(self, answer):
        """Keep the answer as it came; the prompt's tokens, those from the cache, and the city that a call named."""
        message = answer["choices"][0]["message"]
        self.history.append(message)
        usage, calls = answer["usage"], message.get("tool_calls") or []
        for made in calls:
            self.history.append({"role": "tool", "tool_call_id": made["id"], "content": '{"temperature": 3}'})
        return (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"],
                [json.loads(made["function"]["arguments"]) for made in calls])


class Responses(Chat):
    path = "/v1/responses"

    def __init__(self, thinking):
        self.history = []
        self.body = {"instructions": SYSTEM, "tools": [{"type": "function", **WEATHER}], "temperature": 0,
                     "max_output_tokens": 200, "enable_thinking": thinking}

    def request(self):
        return {**self.body, "input": self.history}

    def hears(self, answer):
        self.history += answer["output"]
        usage, calls = answer["usage"], [item for item in answer["output"] if item["type"] == "function_call"]
        for made in calls:
            self.history.append({"type": "function_call_output", "call_id": made["call_id"], "output": '{"temperature": 3}'})
        return (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"],
                [json.loads(made["arguments"]) for made in calls])


class Messages(Chat):
    path = "/v1/messages"

    def __init__(self, thinking):
        self.history = []
        tool = {"name": WEATHER["name"], "description": "Weather", "input_schema": WEATHER["parameters"]}
        self.body = {"system": SYSTEM, "tools": [tool], "temperature": 0, "max_tokens": 200, "model": "nano",
                     "thinking": {"type": "adaptive" if thinking else "disabled"}}

    def hears(self, answer):
        self.history.append({"role": "assistant", "content": answer["content"]})
        usage, calls = answer["usage"], [block for block in answer["content"] if block["type"] == "tool_use"]
        if calls:
            self.history.append({"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": made["id"], "content": '{"temperature": 3}'} for made in calls]})
        return (usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"],
                [made["input"] for made in calls])


def turn(server, client, city):
    """A question, its call and the answer to its result: (prompt, cached) of both requests."""
    client.asks(f"What is the weather in {city}?")
    *first, calls = client.hears(call(server.url, client.path, client.request()).json)
    assert calls == [{"city": city}]
    *second, calls = client.hears(call(server.url, client.path, client.request()).json)
    assert calls == []
    return [first, second]


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "no thinking"])
@pytest.mark.parametrize("dialect", [Chat, Responses, Messages])
def test_ten_turns_compute_what_is_new(own, dialect, thinking):
    client, before, computed = dialect(thinking), 0, []
    for city in CITIES:
        for prompt, cached in turn(own, client, city):
            if before:
                assert prompt - cached <= prompt - before + CHUNK, (city, prompt, cached, before)
                computed.append(prompt - cached)
            before = prompt
    assert before > 800 and sum(computed) / len(computed) < 100, "far less than the prompts' 800 and more"
    if not thinking:
        assert max(computed) < 60, "nothing is dropped from the history: only the question or the result is new"


def test_a_restarted_server_goes_on(tmp_path):
    """P-7: --cache-dir keeps the hits; a file damaged meanwhile is ignored with a line in the log, and nothing breaks."""
    kept = ["--cache-dir", str(tmp_path)]
    client, answers = Chat(False), []
    for damaged in (False, False, True):
        if damaged:
            for path in tmp_path.iterdir():
                path.write_bytes(path.read_bytes()[:-50])
        with serve(*OPTIONS, *kept, rules=RULES) as server:
            if not answers:
                turn(server, client, "Oslo")
                client.asks("What is the weather in Paris?")
            answers.append(call(server.url, client.path, client.request()).json)
            assert ("ignoring the damaged cache file" in server.log_text()) == damaged
    usage = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert usage[1] >= usage[0] > 250 and usage[2] == 0
    said = [json.dumps({**answer["choices"][0]["message"], "tool_calls": [
        made["function"] for made in answer["choices"][0]["message"]["tool_calls"]]}) for answer in answers]
    assert said[0] == said[1] == said[2]
