"""R-5: a template that keeps or drops the thoughts of earlier turns, as it is asked: what a new user turn computes again."""
from pathlib import Path

import pytest

from conftest import start_server
from http_client import call
from qwentin import nano

DROPS = "{%- if loop.index0 > ns.last_user -%}"
KEEPS = "{%- if loop.index0 > ns.last_user or preserve_thinking|default(false) -%}"
LONG = "Here is a list of words: " + "apple island silver cloud river stone paper window garden engine. " * 12
FIRST = [{"role": "user", "content": LONG + "Please add 696 and 336."}]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """nano with a template that knows preserve_thinking, as Qwen3.6's and 3.8's do; --preserve-thinking on."""
    directory = tmp_path_factory.mktemp("model")
    for path in Path(nano.DIRECTORY).iterdir():
        if path.is_file():
            (directory / path.name).symlink_to(path)
    template = (Path(nano.DIRECTORY) / "chat_template.jinja").read_text()
    assert template.count(DROPS) == 1
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.jinja").write_text(template.replace(DROPS, KEEPS))
    found = start_server("--model", str(directory), "--preserve-thinking", "on", "--prefill-chunk", "64")
    yield found
    assert found.stop() == 0


def chat(server, messages, **more):
    answer = call(server.url, "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 300, **more})
    assert answer.status == 200, answer.json
    return answer.json


def tokens(server, messages, **more):
    return call(server.url, "/tokenize", {"messages": messages, "add_generation_prompt": False, **more}).json["count"]


@pytest.mark.parametrize("preserve", [None, True, False])       # None: the server's default, on
def test_R5_a_new_turn_computes_what_follows_the_last_kept_boundary(kept, preserve):
    more = {} if preserve is None else {"preserve_thinking": preserve}
    first = chat(kept, FIRST, **more)
    said = first["choices"][0]["message"]
    assert said["reasoning_content"] and first["choices"][0]["finish_reason"] == "stop"
    messages = [*FIRST, {"role": "assistant", **{k: said[k] for k in ("content", "reasoning_content")}},
                {"role": "user", "content": "Which number is bigger: 988 or 552?"}]
    second = chat(kept, messages, **more)
    prompt, cached = second["usage"]["prompt_tokens"], second["usage"]["prompt_tokens_details"]["cached_tokens"]
    asked = first["usage"]["prompt_tokens"]
    if preserve is False:       # the thought is gone: the boundary is where the first question ends
        boundary = tokens(kept, FIRST, chat_template_kwargs={"preserve_thinking": False})
        assert boundary <= cached <= asked + 2
    else:                       # all that was generated is still there
        boundary = asked + first["usage"]["completion_tokens"] - 2
        assert cached >= boundary
    assert prompt > boundary


def test_the_thought_is_in_the_prompt_or_not(kept):
    turns = [*FIRST, {"role": "assistant", "content": "1032", "reasoning_content": "Hm. " * 40}, *FIRST]
    with_it, default, without = (tokens(kept, turns, chat_template_kwargs=kwargs) for kwargs in (
        {"preserve_thinking": True}, {}, {"preserve_thinking": False}))
    assert with_it == default > without + 40
