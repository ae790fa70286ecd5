"""Tokenizer and Detokenizer on the embedded vocabulary: bytes are exact, characters are whole."""
import json
import random
import shutil

import pytest

from qwentin import nano
from qwentin.errors import ConfigError
from qwentin.tokenizer import Detokenizer, Tokenizer

TEXTS = ["Hello, world!", "naïve café", "😀 and 👨‍👩‍👧‍👦 and 🏳️‍🌈", "漢字かな交じり文", "नमस्ते", "a\u0301e\u0308",
         "  indented\n\tcode\r\n",
         "<think>\nhm\n</think>\n\n<tool_call>", "\x00\x01\x7f", "1234567890"]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(nano.DIRECTORY)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(int(i)) for i in ids).decode() == text
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(int(i)) for i in ids]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_every_token_agrees_with_the_library(tokenizer):
    for i in range(tokenizer.size):
        assert tokenizer.decode([i]) == tokenizer.token_text(i), i


def test_random_bytes_agree_with_one_decode(tokenizer):
    """Any ids at all: the pieces joined are what decoding at once gives, but for an incomplete tail, which is dropped."""
    rng, plain = random.Random(3), [i for i in range(tokenizer.size) if i not in tokenizer.specials]
    for _ in range(300):
        ids = rng.choices(plain[:300], k=20)            # single bytes mostly: nearly always malformed somewhere
        detokenizer = Detokenizer(tokenizer)
        got = "".join(detokenizer.push(i) for i in ids)
        whole = b"".join(tokenizer.token_bytes(i) for i in ids).decode("utf-8", "replace")
        assert whole.startswith(got) and set(whole[len(got):]) <= {"\ufffd"}


def test_an_incomplete_character_waits_and_is_dropped(tokenizer):
    ids = [int(i) for i in tokenizer.encode("😀")]
    assert len(ids) > 1, "the vocabulary spells this one in parts"
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(i) for i in ids[:-1]] == [""] * (len(ids) - 1)
    assert detokenizer.push(ids[-1]) == "😀"


def test_special_ids_have_no_text(tokenizer):
    im_end = int(tokenizer.encode("<|im_end|>")[0])
    think = int(tokenizer.encode("</think>")[0])
    assert im_end in tokenizer.specials and think not in tokenizer.specials
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(im_end) == "" and detokenizer.push(think) == "</think>"


def test_special_names(tokenizer):
    assert tokenizer.special("eos_token") == "<|im_end|>" and tokenizer.special("bos_token") is None


def test_a_directory_without_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match="tokenizer.json is missing"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer.json cannot be read"):
        Tokenizer(tmp_path)
    shutil.copy(nano.DIRECTORY / "tokenizer.json", tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="byte-level BPE was wanted"):
        Tokenizer(tmp_path)
