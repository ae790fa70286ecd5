"""Characters cut over tokens, through a real server (S-1): no U+FFFD ever, streamed or not.

The embedded model never learned emoji, so its vocabulary is bent instead of its weights: words that it says are renamed to
pieces of emoji, cut at places where no character ends. It still answers "Who are you?" with the same ids,

    I spell cloud.</think>  I am qwentin-nano, a  tiny  hybrid  language  model  that  ships  with ...
      ~~~~~~~~~~~~                               ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~

and the text at ~ is THOUGHT and FAMILY.
"""
import json
import os

import pytest

from conftest import start_server
from qwentin import nano
from qwentin.tokenizer import Tokenizer, byte_alphabet

THOUGHT, THOUGHT_WORDS = "😀漢", [" spell", " cloud"]
FAMILY, WORDS = "👨‍👩‍👧漢字🏳️‍🌈", [" tiny", " hybrid", " language", " model", " that", " ships"]
ASK = [{"role": "user", "content": "Who are you?"}]


def cuts(text: str, count: int) -> list[bytes]:
    """`count` pieces of about equal length, every inner boundary moved into the middle of a character."""
    raw, ends = text.encode(), []
    for k in range(1, count):
        end = len(raw) * k // count
        while raw[end] & 0xC0 != 0x80:      # a continuation byte follows: the cut is inside a character
            end += 1
        ends.append(end)
    return [raw[a:b] for a, b in zip([0, *ends], [*ends, len(raw)])]


def bend(source: dict, renamed: dict[str, bytes]) -> dict:
    """tokenizer.json with some tokens renamed; merges that lead to them or use them are gone."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    spell = lambda raw: "".join(letters[byte] for byte in raw)
    names = {spell(old.encode()): spell(new) for old, new in renamed.items()}
    model = source["model"]
    assert names.keys() <= model["vocab"].keys() and not set(names.values()) & model["vocab"].keys()
    model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
    model["merges"] = [(a, b) for a, b in model["merges"] if not {a, b, a + b} & names.keys()]
    return source


@pytest.fixture(scope="module")
def bent(tmp_path_factory):
    """A client of a server whose vocabulary is bent."""
    folder = tmp_path_factory.mktemp("bent")
    for path in nano.DIRECTORY.iterdir():
        if path.is_file() and path.name != "tokenizer.json":
            os.symlink(path, folder / path.name)
    renamed = dict(zip(THOUGHT_WORDS, cuts(THOUGHT, 2))) | dict(zip(WORDS, cuts(FAMILY, 6)))
    source = json.loads((nano.DIRECTORY / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps(bend(source, renamed)), encoding="utf-8")
    assert all(piece.decode("utf-8", "replace").count("�") for piece in renamed.values()), "a piece is whole"
    tokenizer = Tokenizer(folder)
    assert Tokenizer(nano.DIRECTORY).encode("Who are you?").tolist() == tokenizer.encode("Who are you?").tolist()
    server = start_server("--model", str(folder))
    yield server.client
    assert server.stop() == 0


@pytest.mark.parametrize("logprobs", [False, True])
def test_thought_and_answer(bent, logprobs):
    options = dict(model="x", messages=ASK, temperature=0, logprobs=logprobs)
    whole = bent.chat.completions.create(**options).choices[0].message
    assert whole.reasoning_content == f"I{THOUGHT}."
    assert whole.content.startswith(f"I am qwentin-nano, a{FAMILY} with qwentin.")
    parts = [c.choices[0].delta for c in bent.chat.completions.create(stream=True, **options)]
    assert "".join(getattr(p, "reasoning_content", None) or "" for p in parts) == whole.reasoning_content
    assert "".join(p.content or "" for p in parts) == whole.content
    assert not any("�" in p.model_dump_json() for p in parts)


def test_logprobs_spell_the_bytes(bent):
    choice = bent.chat.completions.create(model="x", messages=ASK, temperature=0, logprobs=True, top_logprobs=2).choices[0]
    assert bytes(b for e in choice.logprobs.content for b in e.bytes).decode() == choice.message.content
    assert "�" not in choice.model_dump_json()
    assert any(e.token.startswith("bytes:\\x") for e in choice.logprobs.content)


def test_cut_inside_a_character(bent):
    """Whatever the limit, the two modes agree, and a character that did not get all its tokens is left out."""
    wanted = f"I am qwentin-nano, a{FAMILY} with"
    for limit in range(6, 14):
        options = dict(model="x", messages=ASK, temperature=0, max_tokens=limit, extra_body={"enable_thinking": False})
        whole = bent.chat.completions.create(**options).choices[0]
        parts = [c.choices[0].delta.content or "" for c in bent.chat.completions.create(stream=True, **options)]
        assert "".join(parts) == whole.message.content and whole.finish_reason == "length"
        assert wanted.startswith(whole.message.content)


def test_stop_string_of_emoji(bent):
    options = dict(model="x", messages=ASK, temperature=0, stop=["漢字"])
    whole = bent.chat.completions.create(**options).choices[0]
    assert whole.message.content == "I am qwentin-nano, a" + FAMILY.split("漢字")[0] and whole.finish_reason == "stop"
    assert whole.message.reasoning_content == f"I{THOUGHT}."


def test_text_completions(bent):
    prompt = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    options = dict(model="x", prompt=prompt, temperature=0, max_tokens=16, logprobs=1)
    whole = bent.completions.create(**options).choices[0]
    parts = [c.choices[0].text for c in bent.completions.create(stream=True, **options)]
    assert "".join(parts) == whole.text and whole.text.startswith(f"I am qwentin-nano, a{FAMILY} with")
    assert "�" not in whole.model_dump_json()
