"""History: ids as generated come back for the same text, the text itself never changes, and the cache profits."""
import random
from dataclasses import replace

import pytest

from qwentin import history, nano
from qwentin.history import History, common_bytes
from qwentin.tokenizer import Tokenizer
from test_prefix import GREEDY, make_engine, run       # noqa: F401  (make_engine is a fixture)

HEAD = "<|im_start|>user\nHi 😀<|im_end|>\n<|im_start|>assistant\n"
NEXT = "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n<think>\n"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(nano.DIRECTORY)


def spelled(tokenizer, text):
    """Ids of text, one a byte: as no tokenizer would split it."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.size) if len(tokenizer.token_bytes(i)) == 1}
    return [single[bytes([b])] for b in text.encode()]


def whole(tokenizer, ids):
    return b"".join(tokenizer.token_bytes(int(i)) for i in ids).decode()


def test_ids_as_generated(tokenizer):
    end = int(tokenizer.encode("<|im_end|>")[0])
    said = [*tokenizer.encode(HEAD), *spelled(tokenizer, "hello there 漢字"), end]
    fresh = tokenizer.encode(HEAD + "hello there 漢字<|im_end|>" + NEXT)
    assert fresh[:len(said)].tolist() != said, "the reply was spelled in another way"
    h = History(tokenizer)
    h.remember(said)
    got = h.encode(HEAD + "hello there 漢字<|im_end|>" + NEXT)
    assert got[:len(said)].tolist() == said and whole(tokenizer, got) == HEAD + "hello there 漢字<|im_end|>" + NEXT
    edited = h.encode(HEAD + "hello then<|im_end|>" + NEXT)
    assert edited.tolist() == tokenizer.encode(HEAD + "hello then<|im_end|>" + NEXT).tolist()
    assert h.encode("something else").tolist() == tokenizer.encode("something else").tolist()


def test_a_prompt_that_ends_inside_a_remembered_one(tokenizer):
    h = History(tokenizer)
    h.remember(tokenizer.encode(HEAD + "hello<|im_end|>"))
    for cut in range(len(HEAD) + 5):
        text = (HEAD + "hello")[:cut]
        assert whole(tokenizer, h.encode(text)) == text


def test_random_conversations_keep_their_text(tokenizer):
    rng, h = random.Random(3), History(tokenizer)
    pieces = ["<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n", "hello", " wor", "ld", "漢", "字", "😀", "\n\n",
              "<think>\n", "</think>", "12", "3", "<|im", "_end|>"]
    texts = []
    for _ in range(300):
        start = rng.choice(texts)[:rng.randint(0, 60)] if texts and rng.random() < 0.7 else ""
        text = start + "".join(rng.choices(pieces, k=rng.randint(1, 12)))
        ids = h.encode(text)
        assert whole(tokenizer, ids) == text
        reply = spelled(tokenizer, "".join(rng.choices(["ok", "好", "x "], k=4)))
        h.remember([*ids, *reply])
        texts = texts[-30:] + [whole(tokenizer, [*ids, *reply])]


def test_encode_parts(tokenizer):
    """Two parts give the ids of the whole; the seam is only known where a token is recognised whatever stands before it."""
    h = History(tokenizer)
    for first, second, known in (("<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>assistant\n<think>\n", True),
                                 ("", "<|im_start|>x", True), ("hel", "lo", False), ("all", "", False)):
        ids, stable = h.encode_parts(first, second)
        assert ids.tolist() == tokenizer.encode(first + second).tolist()
        assert stable == (len(tokenizer.encode(first)) if known else None)


def test_only_the_latest_turn_and_so_many_conversations(tokenizer, monkeypatch):
    monkeypatch.setattr(history, "MOST_CONVERSATIONS", 3)
    h = History(tokenizer)
    h.remember([1, 2])
    h.remember([1, 2, 3])
    assert len(h.ids) == 1
    for i in range(5):
        h.remember([10 + i])
        h.encode("x")
    assert [k.tolist() for k in h.ids.values()] == [[12], [13], [14]] and set(h.texts) <= set(h.ids)


def test_common_bytes():
    rng = random.Random(1)
    for _ in range(300):
        a = bytes(rng.choices(b"ab", k=rng.randint(0, 12)))
        b = bytes(rng.choices(b"ab", k=rng.randint(0, 12)))
        wanted = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), min(len(a), len(b)))
        assert common_bytes(a, b) == wanted


def test_the_engine_remembers(make_engine, tokenizer):     # noqa: F811
    """A reply forced into odd pieces comes back as text; the next turn still goes on from all of it."""
    engine = make_engine()
    letter = next(c for c in "etaoins" if len(tokenizer.encode(c * 20)) < 20)
    odd = spelled(tokenizer, letter)[0]
    prompt = engine.encode("<|im_start|>user\nSay it.<|im_end|>\n", "<|im_start|>assistant\n")[0]
    said, _ = run(engine, prompt, sampling=replace(GREEDY, logit_bias=((odd, 100.0),)), max_tokens=20)
    assert said == [odd] * 20
    text = f"<|im_start|>user\nSay it.<|im_end|>\n<|im_start|>assistant\n{letter * 20}<|im_end|>\n"
    ids, stable = engine.encode(text + "<|im_start|>user\nAgain.<|im_end|>\n", "<|im_start|>assistant\n")
    assert ids[:len(prompt) + 20].tolist() == [*prompt, *said]
    assert ids[stable:].tolist() == tokenizer.encode("<|im_start|>assistant\n").tolist()
    assert run(engine, ids, max_tokens=1)[1] >= len(prompt) + 19
