"""Text completions over a scripted engine: prompt shapes, echo, log-probabilities, several prompts, both modes alike."""
import pytest

from fake_engine import FakeEngine, pieces, play, ragged
from qwentin.errors import RequestError
from qwentin.server.completions import CompletionReply


def complete(script, prompt="ab", **body):
    return play(FakeEngine(script), CompletionReply, {"prompt": prompt, **body})


def fold(chunks):
    """The choices that a stream adds up to."""
    choices = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            whole = choices.setdefault(part["index"], {"index": part["index"], "text": "", "finish_reason": None})
            whole["text"] += part["text"]
            whole["finish_reason"] = part["finish_reason"]
            for key in ("logprobs", "token_ids", "prompt_token_ids"):
                if isinstance(part.get(key), dict):
                    before = whole.setdefault(key, {k: [] for k in part[key]})
                    for name, values in part[key].items():
                        before[name] += values
                elif part.get(key) is not None:
                    whole[key] = whole.get(key, []) + part[key]
    return [choices[i] for i in sorted(choices)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("extra", [{}, {"echo": True}, {"logprobs": 2, "return_token_ids": True},
                                   {"echo": True, "logprobs": 1}])
def test_stream_adds_up_to_the_whole(seed, extra):
    chunks, whole, _ = complete(ragged("text 😀 👨‍👩‍👧 漢字 </think> more", seed), **extra)
    streamed, = fold(chunks)
    assert {**streamed, "logprobs": streamed.get("logprobs")} == whole["choices"][0]
    assert whole["choices"][0]["text"] == "ab" * bool(extra.get("echo")) + "text 😀 👨‍👩‍👧 漢字 </think> more"


@pytest.mark.parametrize("prompt, ids", [
    ("ab", [[97, 98]]), (["ab", "c"], [[97, 98], [99]]), ([97, 98], [[97, 98]]), ([[97, 98], [99]], [[97, 98], [99]]),
    (["é"], [[195, 169]]),
])
def test_prompt_shapes(prompt, ids):
    _, whole, requests = complete([], prompt)
    assert [r.prompt.tolist() for r in requests] == ids
    assert len({r.id for r in requests}) == len(ids)
    assert len(whole["choices"]) == len(ids)
    assert whole["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_several_prompts_with_several_choices():
    chunks, whole, _ = complete(lambda request, i: pieces(f"{chr(request.prompt[0])}{i}"), ["x", "y"], n=2, echo=True,
                                stream_options={"include_usage": True})
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "xx0"), (1, "xx1"), (2, "yy0"), (3, "yy1")]
    assert [c["text"] for c in fold(chunks)] == ["xx0", "xx1", "yy0", "yy1"]
    assert [c["usage"] for c in chunks if not c["choices"]] == [whole["usage"]]
    assert whole["usage"]["completion_tokens"] == 4 * 3         # two bytes and the stop id each
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_echo_scores_the_prompt_and_goes_on():
    _, whole, (request,) = complete(pieces("cd"), [97, 98], echo=True, logprobs=1, max_tokens=1)
    assert request.prompt_logprobs == request.logprobs == 1
    choice = whole["choices"][0]
    assert choice["text"] == "abc" and choice["finish_reason"] == "length"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"], "token_logprobs": [None, -0.25, -0.5],
        "top_logprobs": [None, {"b": -0.25}, {"c": -0.5}], "text_offset": [0, 1, 2]}


def test_the_chosen_token_is_among_the_alternatives():
    _, whole, _ = complete(pieces("c"), logprobs=0)
    assert whole["choices"][0]["logprobs"]["top_logprobs"] == [{"c": -0.5}, {"<|im_end|>": -0.125}]


def test_echo_alone():
    _, whole, (request,) = complete(pieces("cd"), "ab", echo=True)
    assert request.prompt_logprobs is None and whole["choices"][0]["logprobs"] is None
    _, _, (request,) = complete(pieces("cd"), "ab", echo=True, max_tokens=0)
    assert request.prompt_logprobs == 0 and request.max_tokens == 0


def test_pieces_of_characters_have_names_of_their_own():
    _, whole, _ = complete([[b"\xf0\x9f"], [b"\x98\x80"]], logprobs=0)
    assert whole["choices"][0]["logprobs"]["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "<|im_end|>"]
    assert whole["choices"][0]["text"] == "😀"


def test_ids_on_request():
    _, whole, _ = complete([[b"c"]], "ab", return_token_ids=True)
    assert whole["choices"][0]["token_ids"] == [99, 256]
    assert whole["choices"][0]["prompt_token_ids"] == [97, 98]


def test_rules():
    _, _, (request,) = complete([], stop="x", temperature=0)
    assert request.stop == ("x",) and request.stop_after == "" and request.max_tokens is None


@pytest.mark.parametrize("body, param", [
    ({"prompt": None}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"), ({"prompt": ["a", 5]}, "prompt[1]"), ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [[1], [-1]]}, "prompt[1]"), ({"prompt": [[1], [True]]}, "prompt[1]"),
    ({"prompt": [100000]}, "prompt"), ({"prompt": [1.5]}, "prompt[0]"), ({"prompt": ["a"] * 257}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"), ({"echo": "yes"}, "echo"), ({"best_of": 2}, "best_of"), ({"suffix": "x"}, "suffix"),
])
def test_bad_values_name_the_field(body, param):
    with pytest.raises(RequestError) as caught:
        complete([], **{"prompt": "ab", **body})
    assert caught.value.param == param and param.split("[")[0] in str(caught.value)
