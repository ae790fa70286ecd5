"""Text to token ids and back, through the checkpoint's tokenizer.json and the `tokenizers` library.

`Tokenizer` is shared by everybody and immutable; a `Detokenizer` belongs to one choice and turns its ids into text as
they come, never handing out half a character. Proven by tests/test_tokenizer.py.
"""
import codecs
import json
from pathlib import Path

import numpy as np
import tokenizers

from .errors import ConfigError


class Tokenizer:
    """A byte-level BPE tokenizer.

    size        ids 0 ... size-1 have text; rows of the model's head beyond it must never be sampled
    added       ids that are recognised in text before anything else, whatever stands around them
    specials    those of them that frame the conversation (im_start, endoftext, ...): not text of the answer
    """

    def __init__(self, directory):
        path = Path(directory) / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{path} is missing; a checkpoint directory needs it.")
        try:
            text = path.read_text(encoding="utf-8")
            decoder = (json.loads(text).get("decoder") or {}).get("type")
            self.backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:      # the library raises plain Exception
            raise ConfigError(f"{path} cannot be read as a tokenizer: {error}.") from None
        if decoder != "ByteLevel":
            raise ConfigError(f"{path}: the decoder is {decoder}; byte-level BPE was wanted.")
        added = self.backend.get_added_tokens_decoder()
        self.added = frozenset(added)
        self.specials = frozenset(i for i, token in added.items() if token.special)
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values()) + 1
        self.ids = {token: i for token, i in vocabulary.items()}
        self.bytes: list[bytes] = [b""] * self.size
        alphabet = byte_alphabet()
        for token, i in vocabulary.items():
            self.bytes[i] = token.encode() if i in added else bytes(alphabet[ch] for ch in token)
        config = Path(directory) / "tokenizer_config.json"
        self.config = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}

    def encode(self, text: str) -> np.ndarray:
        """i32 [T]. Special tokens written out in the text become their ids; nothing is added in front or behind."""
        return np.array(self.backend.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_parts(self, first: str, second: str, encode=None) -> tuple[np.ndarray, int | None]:
        """Ids of first + second, and how many of them are `first` alone; None if no id ends exactly there. `encode` is
        another way to get the ids of `first` (history.py)."""
        encode, tail = encode or self.encode, self.encode(second)
        if len(tail) and int(tail[0]) in self.added:
            head = encode(first)
            return np.concatenate([head, tail]), len(head)
        return encode(first + second), None

    def decode(self, ids, skip_special: bool = False) -> str:
        """The text of whole ids; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def token_bytes(self, i: int) -> bytes:
        """The exact bytes that an id stands for; b"" for an id without text."""
        return self.bytes[i] if 0 <= i < self.size else b""

    def token_text(self, i: int) -> str:
        """An id's text by itself, for people: parts of characters show as U+FFFD."""
        return self.token_bytes(i).decode("utf-8", "replace")

    def special(self, name: str) -> str | None:
        """The text of "bos_token", "eos_token" or "pad_token" by tokenizer_config.json, or None."""
        value = self.config.get(name)
        return value.get("content") if isinstance(value, dict) else value


class Detokenizer:
    """Ids of one choice in, text out: what is known to be whole characters at once, the rest when it completes.

    Special ids have no text, unless `specials` wants them written out. Bytes that can never become UTF-8 turn into U+FFFD;
    a tail that is merely incomplete when the choice ends is dropped.
    """

    def __init__(self, tokenizer: Tokenizer, specials: bool = False):
        self.tokenizer = tokenizer
        self.silent = frozenset() if specials else tokenizer.specials
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, often its own, "" while a character is still open."""
        if token in self.silent:
            return ""
        return self.decoder.decode(self.tokenizer.token_bytes(token))


def byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that byte-level BPE writes bytes as: printable Latin-1 stands for itself, every other
    byte for the next free code point from 256 on (the GPT-2 alphabet)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    other = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(other)}
