"""The requests of lm-eval 0.4.13's `local-completions` with tokenizer_backend=remote and tokenized_requests=True, replayed
as its code makes them, the answers read as its code reads them (RemoteTokenizer, parse_logprobs, parse_generations)."""
from operator import itemgetter

import pytest

from http_client import call


def get(server, path):
    answer = call(server.url, path)
    assert answer.status == 200
    return answer.json


def post(server, path, body):
    answer = call(server.url, path, body)
    assert answer.status == 200, answer.raw
    return answer.json


def encode(server, text):
    tokens = post(server, "/tokenize", {"prompt": text, "add_special_tokens": False}).get("tokens")
    assert isinstance(tokens, list)
    return tokens


def loglikelihood_payload(prompts):
    return {"model": "qwentin", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
            "echo": True}


def parse_logprobs(outputs, ctxlens):
    """lm-eval's reading: the sum over the continuation, and whether each of its tokens was the best one."""
    found = []
    for choice, ctxlen in zip(sorted(outputs["choices"], key=itemgetter("index")), ctxlens, strict=True):
        tokens = choice["logprobs"]["token_logprobs"][ctxlen:-1]
        tops = choice["logprobs"]["top_logprobs"][ctxlen:-1]
        found.append((sum(tokens), all(t == max(top.values()) for t, top in zip(tokens, tops, strict=True))))
    return found


def test_remote_tokenizer(server):
    info = get(server, "/tokenizer_info")
    assert info["eos_token"] == "<|im_end|>" and info["pad_token"] == "<|endoftext|>" and info["bos_token"] is None
    assert "<|im_start|>" in info["chat_template"]
    assert encode(server, info["eos_token"]) == [4085]
    for text in ("The capital of Italy is", " Rome", "naïve 😀 漢字\n", ""):
        assert post(server, "/detokenize", {"tokens": encode(server, text)})["prompt"] == text


def test_tokenize_extras(server):
    answer = post(server, "/tokenize", {"prompt": "import os", "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) and "".join(answer["token_strs"]) == "import os"
    assert answer["max_model_len"] == 8192
    chat = post(server, "/tokenize", {"messages": [{"role": "user", "content": "Hi"}],
                                      "chat_template_kwargs": {"enable_thinking": False}})
    text = post(server, "/detokenize", {"tokens": chat["tokens"]})["prompt"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    for path, body, param in (("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"),
                              ("/tokenize", {"prompt": "a", "messages": []}, "prompt"), ("/detokenize", {}, "tokens"),
                              ("/detokenize", {"tokens": [4096]}, "tokens"), ("/detokenize", {"tokens": "a"}, "tokens")):
        answer = call(server.url, path, body)
        assert answer.status == 400 and answer.error["param"] == param


def test_loglikelihood(server):
    """A multiple choice: the right continuation is likelier; greedy is true just where the engine would say it itself."""
    context = ("<|im_start|>user\nPlease add 6 and 3.<|im_end|>\n<|im_start|>assistant\n<think>\n"
               "6 + 3: 6+3+0=9, carry 0.\n</think>\n\n")
    scores = {}
    for continuation in ("6 + 3 = 9", "6 + 3 = 4", "banana"):
        ctx, whole = encode(server, context), encode(server, context + continuation)
        assert whole[:len(ctx)] == ctx
        out = post(server, "/v1/completions", loglikelihood_payload([whole]))
        entries = out["choices"][0]["logprobs"]
        assert all(len(entries[key]) == len(whole) + 1 for key in ("tokens", "token_logprobs", "top_logprobs"))
        assert entries["token_logprobs"][0] is None
        scores[continuation], = parse_logprobs(out, [len(ctx)])
    assert scores["6 + 3 = 9"][1] and not scores["6 + 3 = 4"][1] and not scores["banana"][1]
    assert scores["6 + 3 = 9"][0] > -0.1 > scores["6 + 3 = 4"][0]


def test_loglikelihood_agrees_with_generation(server):
    """The logprobs of an echoed text equal those of generating it, and a batch equals its parts."""
    prompt = encode(server, "def add(a, b):\n    return")
    made = post(server, "/v1/completions", {"prompt": prompt, "max_tokens": 10, "temperature": 0, "logprobs": 1,
                                            "return_token_ids": True})["choices"][0]
    whole = prompt + made["token_ids"]
    echoed = post(server, "/v1/completions", loglikelihood_payload([whole]))
    (total, greedy), = parse_logprobs(echoed, [len(prompt)])
    assert greedy and total == pytest.approx(sum(made["logprobs"]["token_logprobs"]), abs=1e-3)
    other = encode(server, "The list of numbers")
    batch = post(server, "/v1/completions", loglikelihood_payload([whole, other]))
    apart = [post(server, "/v1/completions", loglikelihood_payload([p])) for p in (whole, other)]
    for together, alone in zip(batch["choices"], apart):
        assert together["logprobs"]["token_logprobs"][1:] == pytest.approx(
            alone["choices"][0]["logprobs"]["token_logprobs"][1:], abs=1e-4)


def test_rolling_loglikelihood_of_one_token(server):
    """Windows may hold a single token: there is still one entry more than tokens."""
    out = post(server, "/v1/completions", loglikelihood_payload([[4085]]))
    assert len(out["choices"][0]["logprobs"]["token_logprobs"]) == 2


def test_generate_until(server):
    prompt = encode(server, "<|im_start|>user\nPlease add 6 and 3.<|im_end|>\n<|im_start|>assistant\n<think>\n")
    out = post(server, "/v1/completions", {
        "prompt": [prompt], "model": "qwentin", "max_tokens": 256, "temperature": 0, "stop": ["\n\n", "<|im_end|>"],
        "seed": 1234})
    assert out["choices"][0]["text"].endswith("</think>")


def test_chat_generate_until(server):
    """local-chat-completions: temperature 0, up to four stops, a seed."""
    out = post(server, "/v1/chat/completions", {
        "messages": [{"role": "user", "content": "Please add 6 and 3."}], "model": "qwentin", "max_tokens": 256,
        "temperature": 0, "stop": ["Question:", "\n\n\n", "<|im_end|>", "Q:"], "seed": 1234})
    assert out["choices"][0]["message"]["content"] == "6 + 3 = 9"
