"""The openai SDK against a real server process with the embedded model: every feature, streamed and not, byte for byte."""
import json
import time

import openai
import pytest

from conftest import start_server, wait_idle
from http_client import call, open_request, read_until

SUM = [{"role": "user", "content": "Please add 696 and 336."}]
STORY = [{"role": "user", "content": "Write a Python function that reverses a list."}]
REPEAT = [{"role": "system", "content": "Be brief."},
          {"role": "user", "content": "Repeat after me: apple island silver cloud"}]


def near(a, b) -> bool:
    """Equal, numbers to 1e-3: trees of guesses are as large as time allows, and their rows sum float32 in another order."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) < 1e-3
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(near, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(near(a[key], b[key]) for key in a)
    return a == b


def both(client, messages, **options):
    """The same chat whole and streamed: (whole, chunks), after comparing everything that both say."""
    whole = client.chat.completions.create(model="nano", messages=messages, **options)
    chunks = list(client.chat.completions.create(model="nano", messages=messages, stream=True,
                                                 stream_options={"include_usage": True}, **options))
    for choice in whole.choices:
        parts = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert "".join(p.delta.content or "" for p in parts) == (choice.message.content or "")
        thought = "".join(getattr(p.delta, "reasoning_content", None) or "" for p in parts)
        assert thought == (getattr(choice.message, "reasoning_content", None) or "")
        assert [p.finish_reason for p in parts if p.finish_reason] == [choice.finish_reason]
        logprobs = [e for p in parts if p.logprobs for e in p.logprobs.content]
        assert near([e.to_dict() for e in logprobs],
                    [e.to_dict() for e in choice.logprobs.content] if choice.logprobs else [])
    streamed, = [c.usage for c in chunks if c.usage]
    assert (streamed.prompt_tokens, streamed.completion_tokens, streamed.completion_tokens_details) == (
        whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.completion_tokens_details)
    return whole, chunks


def both_texts(client, prompt, **options):
    """The same for text completions."""
    whole = client.completions.create(model="nano", prompt=prompt, **options)
    chunks = list(client.completions.create(model="nano", prompt=prompt, stream=True, **options))
    for choice in whole.choices:
        parts = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert "".join(p.text for p in parts) == choice.text
        assert [p.finish_reason for p in parts if p.finish_reason] == [choice.finish_reason]
        if choice.logprobs:
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert near(sum((getattr(p.logprobs, key) for p in parts), []), getattr(choice.logprobs, key))
    return whole


# ---- chat

def test_thought_and_answer(client):
    whole, chunks = both(client, SUM, temperature=0)
    assert whole.choices[0].message.content == "696 + 336 = 1032"
    assert whole.choices[0].message.reasoning_content.startswith("696 + 336: 6+6+0=12")
    assert whole.model == "qwentin-nano" and whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens_details.reasoning_tokens > 0
    assert chunks[0].choices[0].delta.role == "assistant"


@pytest.mark.parametrize("off", [{"extra_body": {"enable_thinking": False}}, {"reasoning_effort": "none"},
                                 {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}])
def test_thinking_off(client, off):
    whole, _ = both(client, REPEAT, temperature=0, **off)
    assert whole.choices[0].message.content == "apple island silver cloud"
    assert not hasattr(whole.choices[0].message, "reasoning_content")


def test_cut_inside_the_thought(client):
    """R-1: 20 tokens are not enough to close the thought."""
    whole, _ = both(client, SUM, temperature=0, max_tokens=20)
    assert whole.choices[0].finish_reason == "length" and whole.choices[0].message.content == ""
    assert whole.choices[0].message.reasoning_content and whole.usage.completion_tokens == 20


def test_seed(client):
    """Trees of guesses round otherwise than steps of one row: these seeds' numbers keep 0.008 from the edges of their tokens
    (7 came within 2e-8 of one, and once fell on the other side)."""
    options = dict(temperature=1.5, max_completion_tokens=40, extra_body={"top_k": 0, "top_p": 1.0})
    first, _ = both(client, STORY, seed=153, **options)
    other, _ = both(client, STORY, seed=173, **options)
    text = lambda answer: answer.choices[0].message.reasoning_content + answer.choices[0].message.content
    assert text(first) != text(other)


def test_several_choices(client):
    whole, _ = both(client, STORY, n=3, seed=1, temperature=1.2, max_tokens=30, extra_body={"enable_thinking": False})
    assert [c.index for c in whole.choices] == [0, 1, 2]
    assert len({c.message.content for c in whole.choices}) == 3
    assert whole.usage.completion_tokens > 30


def test_stop_strings(client):
    """The answer is cut before the string, in both modes, and the thought is left alone though it holds it too."""
    whole, _ = both(client, SUM, temperature=0, stop=["= 10", "never"])
    assert whole.choices[0].message.content == "696 + 336 "
    assert "336" in whole.choices[0].message.reasoning_content and whole.choices[0].finish_reason == "stop"
    thought_too, _ = both(client, SUM, temperature=0, stop="+")
    assert thought_too.choices[0].message.content == "696 "
    assert "+" in thought_too.choices[0].message.reasoning_content
    assert thought_too.usage.completion_tokens < whole.usage.completion_tokens


def test_stop_ids_and_ignore_eos(client):
    plain = {"enable_thinking": False, "return_token_ids": True}
    full = client.chat.completions.create(model="nano", messages=SUM, temperature=0, extra_body=plain).choices[0]
    cut, _ = both(client, SUM, temperature=0, extra_body={**plain, "stop_token_ids": [full.token_ids[4]]})
    assert full.message.content.startswith(cut.choices[0].message.content)
    assert cut.choices[0].token_ids == full.token_ids[:5] and cut.choices[0].finish_reason == "stop"
    more, _ = both(client, SUM, temperature=0, max_tokens=60, extra_body={**plain, "ignore_eos": True})
    assert more.choices[0].finish_reason == "length" and more.usage.completion_tokens == 60


def test_logprobs(client):
    whole, _ = both(client, SUM, temperature=0, logprobs=True, top_logprobs=3)
    parts = whole.choices[0].logprobs
    assert bytes(b for e in parts.content for b in e.bytes).decode() == whole.choices[0].message.content
    assert all(len(e.top_logprobs) == 3 and e.logprob < 0 for e in parts.content)
    assert all(e.top_logprobs[0].token == e.token and e.top_logprobs[0].logprob == e.logprob for e in parts.content)
    thought = bytes(b for e in parts.reasoning_content for b in e["bytes"]).decode()
    assert thought == whole.choices[0].message.reasoning_content + "\n</think>\n\n"


def test_sampling_fields_reach_the_sampler(client):
    plain = {"enable_thinking": False}
    text = lambda **options: both(client, REPEAT, **options)[0].choices[0].message.content
    base = text(temperature=0, extra_body=plain)
    island, = call_tokens(client, " island")
    assert "island" in base and "island" not in text(temperature=0, logit_bias={str(island): -100}, extra_body=plain)
    assert text(temperature=0, max_tokens=3, logit_bias={str(island): 100}, extra_body=plain) == " island" * 3
    assert text(temperature=2, extra_body={**plain, "top_k": 1}) == base
    assert text(temperature=2, extra_body={**plain, "min_p": 1.0, "top_k": 0}) == base
    assert text(temperature=2, top_p=1e-6, extra_body={**plain, "top_k": 0}) == base
    repeats = dict(temperature=0, max_tokens=60, extra_body={**plain, "ignore_eos": True})
    before, _ = both(client, SUM, **repeats)
    after, _ = both(client, SUM, presence_penalty=2, frequency_penalty=2, **repeats)
    assert after.choices[0].message.content != before.choices[0].message.content
    strong = {**repeats["extra_body"], "repetition_penalty": 5.0}
    other, _ = both(client, SUM, temperature=0, max_tokens=60, extra_body=strong)
    assert other.choices[0].message.content != before.choices[0].message.content


def call_tokens(client, text):
    return call(str(client.base_url).removesuffix("/v1/"), "/tokenize", {"prompt": text}).json["tokens"]


def test_history_of_every_shape(client):
    tools = [{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}}}}]
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "system", "content": "Really."},
        {"role": "user", "content": [{"type": "text", "text": "The weather in "}, {"type": "text", "text": "Oslo?"}]},
        {"role": "assistant", "content": None, "reasoning": "look it up", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": '{"t": 3}'}, {"role": "system", "content": "Answer now."}]
    whole, _ = both(client, messages, temperature=0, tools=tools, max_tokens=60)
    assert whole.choices[0].message.reasoning_content or whole.choices[0].message.content


def test_T25_tool_calls_work_with_no_option_set(client):
    tools = [{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
    whole, chunks = both(client, [{"role": "user", "content": "What is the weather in Oslo?"}], temperature=0, tools=tools)
    call, = whole.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Oslo"}
    fragments = [f for c in chunks if c.choices for f in c.choices[0].delta.tool_calls or []]
    assert "".join(f.function.arguments for f in fragments) == call.function.arguments and len(fragments) > 1
    assert whole.choices[0].finish_reason == "tool_calls" and whole.choices[0].message.content is None


# ---- text completions

def test_completion(client):
    whole = both_texts(client, "def add(a, b):\n    return", temperature=0, max_tokens=12)
    assert whole.choices[0].text and whole.usage.completion_tokens <= 12
    assert whole.choices[0].text == both_texts(client, call_tokens(client, "def add(a, b):\n    return"), temperature=0,
                                               max_tokens=12).choices[0].text


def test_completion_prompt_shapes(client):
    options = dict(temperature=0, max_tokens=8)
    a, b = (both_texts(client, p, **options).choices[0].text for p in ("import os", "The list"))
    assert [c.text for c in both_texts(client, ["import os", "The list"], **options).choices] == [a, b]
    ids = [call_tokens(client, "import os"), call_tokens(client, "The list")]
    assert [c.text for c in both_texts(client, ids, **options).choices] == [a, b]
    four = both_texts(client, ["import os", "The list"], n=2, **options)
    assert [c.text for c in four.choices] == [a, a, b, b]


def test_completion_echo_and_logprobs(client):
    ids = call_tokens(client, "def add(a, b):")
    whole = both_texts(client, ids, temperature=0, max_tokens=2, echo=True, logprobs=2)
    parts = whole.choices[0].logprobs
    assert whole.choices[0].text.startswith("def add(a, b):")
    assert len(parts.tokens) == len(parts.token_logprobs) == len(parts.text_offset) == len(ids) + 2
    assert parts.token_logprobs[0] is None and parts.top_logprobs[0] is None
    assert all(p < 0 for p in parts.token_logprobs[1:])
    text = whole.choices[0].text
    assert all(text[at:at + len(token)] == token for at, token in zip(parts.text_offset, parts.tokens))
    scored = both_texts(client, ids, temperature=0, max_tokens=0, echo=True, logprobs=2).choices[0]
    assert scored.logprobs.token_logprobs == parts.token_logprobs[:len(ids)] and scored.text == "def add(a, b):"


def test_completion_stop(client):
    full = both_texts(client, "def f(x):\n    return", temperature=0, max_tokens=30).choices[0].text
    middle = full[3:6]
    cut = both_texts(client, "def f(x):\n    return", temperature=0, max_tokens=30, stop=[middle]).choices[0]
    assert cut.text == full[:full.index(middle)] and cut.finish_reason == "stop"


# ---- models, refusals

def test_models(client):
    entry, = client.models.list().data
    assert entry.id == "qwentin-nano" and entry.max_model_len == 8192
    assert client.models.retrieve("qwentin-nano").id == entry.id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


@pytest.mark.parametrize("options, param", [
    ({"temperature": 3}, "temperature"), ({"top_p": 1.5}, "top_p"), ({"presence_penalty": -3}, "presence_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"), ({"n": 0}, "n"), ({"max_tokens": 0}, "max_tokens"),
    ({"extra_body": {"min_p": 2}}, "min_p"), ({"extra_body": {"top_k": -2}}, "top_k"),
    ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"), ({"seed": 2**70}, "seed"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"), ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"stop": ["x"] * 17}, "stop"),
])
@pytest.mark.parametrize("stream", [False, True])
def test_out_of_range_values_name_the_field(client, options, param, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="nano", messages=SUM, stream=stream, **options)
    assert caught.value.param == param and param in caught.value.message
    assert caught.value.type == "invalid_request_error"


def test_context_overflow(client):
    long = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="nano", messages=long)
    assert caught.value.code == "context_length_exceeded" and "8192" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="nano", prompt="Hi", max_tokens=8192)
    assert caught.value.code == "context_length_exceeded" and "8194" in caught.value.message
    assert caught.value.param == "prompt"


def test_images_are_refused_by_name(client):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="nano", messages=[{"role": "user", "content": [part]}])
    assert caught.value.param == "messages[0].content[0]"


# ---- the process

def test_a_client_that_leaves_frees_the_engine_within_a_step(server):
    for path, body in (("/v1/completions", {"prompt": "x", "ignore_eos": True, "stream": True}),
                       ("/v1/completions", {"prompt": "x", "ignore_eos": True}),
                       ("/v1/completions", {"prompt": [9] * 8000, "max_tokens": 1})):
        sock = open_request(server.url, path, body)
        while not server.health()["running"]:
            time.sleep(0.005)
        sock.close()
        assert wait_idle(server, 5.0), f"{body} still runs"


def test_a_small_context_is_used_to_its_last_token_and_a_long_prefill_is_not_silent():
    own = start_server("--max-model-len", "1501", "--keepalive-s", "0.05", "--prefill-chunk", "32")
    entry, = own.client.models.list().data
    assert entry.max_model_len == 1501
    for body in ({"prompt": [9] * 1501}, {"prompt": [9] * 1500, "max_tokens": 2}):
        assert call(own.url, "/v1/completions", body).error["code"] == "context_length_exceeded"
    sock = open_request(own.url, "/v1/completions", {"prompt": [9] * 1500, "max_tokens": 1, "stream": True})
    raw = read_until(sock, b"[DONE]")
    sock.close()
    assert raw.count(b": prefill ") >= 2 and raw.index(b": accepted") < raw.index(b": prefill ")
    assert own.stop() == 0


def test_sigterm_finishes_short_streams_and_ends_long_ones():
    own = start_server("--shutdown-s", "1.0")
    body = {"prompt": "x", "ignore_eos": True, "stream": True, "temperature": 0}
    long, short = (open_request(own.url, "/v1/completions", {**body, "max_tokens": n}) for n in (8000, 10))
    read_until(long, b'"text"')
    started = time.monotonic()
    own.process.terminate()
    assert b'"finish_reason":"length"' in read_until(short, b"[DONE]")
    tail = read_until(long, b"[DONE]")
    assert json.loads(tail[tail.rindex(b"data: {") + 6:].split(b"\n")[0])["error"]["code"] == "server_stopping"
    assert own.process.wait(20) == 0
    assert time.monotonic() - started < 10
    assert "Traceback" not in own.log_text()


@pytest.mark.parametrize("options, said", [(["--model", "/no/such/dir"], "--model"), (["--max-seqs", "0"], "--max-seqs"),
                                           (["--host", "256.1.1.1"], "256.1.1.1")])
def test_a_server_that_cannot_start_says_why(options, said):
    with pytest.raises(RuntimeError) as caught:
        start_server(*options)
    assert said in str(caught.value) and "Traceback" not in str(caught.value)
