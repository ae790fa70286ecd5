"""History: the exact ids of conversations we had, found again by their text.

A client sends our own reply back as text. Tokenising that text need not give the ids that were generated: a model may spell
a word in other pieces than the tokenizer would. One differing id, and the prefix cache holds nothing of use. So the ids of
finished conversations are remembered, and a prompt whose text begins like a remembered one takes that one's ids up to the
last place where both agree and where tokenising is known to split: in front of an added token such as <|im_end|>.

    remembered   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nhel|lo the|re<|im_end|>
    new prompt   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nhello there<|im_end|>\\n<|im_start|>user\\n...
                 '----------------------- remembered ids -----------------------'' tokenised afresh

The text is the same either way. Called from several threads. Proven by tests/test_history.py.
"""
import threading
from collections import OrderedDict

import numpy as np

from .tokenizer import Tokenizer

MOST_CONVERSATIONS = 64
LONGEST_ADDED = 64      # bytes; no added token of the family is longer


class History:
    """The latest MOST_CONVERSATIONS conversations, ids and text."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.lock = threading.Lock()
        self.ids: OrderedDict[bytes, np.ndarray] = OrderedDict()        # by their own bytes, latest last
        self.texts: dict[bytes, bytes] = {}                             # made when first asked for

    def remember(self, ids) -> None:
        """Keep the ids, prompt and reply, of a conversation that ended; those of an earlier turn of it are dropped."""
        ids = np.array(ids, np.int32)
        key = ids.tobytes()
        with self.lock:
            for old in [k for k in self.ids if key.startswith(k)]:
                self.forget(old)
            self.ids[key] = ids
            while len(self.ids) > MOST_CONVERSATIONS:
                self.forget(next(iter(self.ids)))

    def forget(self, key: bytes) -> None:
        del self.ids[key]
        self.texts.pop(key, None)

    def encode(self, text: str) -> np.ndarray:
        """Ids i32 [T] of `text`: a remembered beginning as it was generated, the rest as the tokenizer splits it."""
        wanted = text.encode("utf-8", "replace")
        best, at = np.zeros(0, np.int32), 0
        with self.lock:
            remembered = list(self.ids.items())
        for key, ids in remembered:
            shared = common_bytes(self.text_of(key, ids), wanted)
            if shared > at:
                kept, end = self.last_seam(ids, shared, wanted[shared:shared + LONGEST_ADDED])
                if end > at:
                    best, at = kept, end
        if not at:
            return self.tokenizer.encode(text)
        return np.concatenate([best, self.tokenizer.encode(wanted[at:].decode())])

    def encode_parts(self, first: str, second: str) -> tuple[np.ndarray, int | None]:
        """Tokenizer.encode_parts with remembered ids."""
        return self.tokenizer.encode_parts(first, second, self.encode)

    def text_of(self, key: bytes, ids: np.ndarray) -> bytes:
        """The bytes that the ids stand for, special tokens written out."""
        text = self.texts.get(key)
        if text is None:
            text = b"".join(self.tokenizer.token_bytes(int(i)) for i in ids)
            with self.lock:
                if key in self.ids:
                    self.texts[key] = text
        return text

    def last_seam(self, ids: np.ndarray, shared: int, follows: bytes) -> tuple[np.ndarray, int]:
        """The longest beginning of ids within the first `shared` bytes that ends in front of an added token, its own or the
        one that `follows` begins with, and its length in bytes."""
        end = count = found = 0
        for i, token in enumerate(ids.tolist()):
            size = len(self.tokenizer.token_bytes(token))
            if end + size > shared:
                return ids[:count], found
            if token in self.tokenizer.added:
                count, found = i, end
            end += size
        next_ids = self.tokenizer.encode(follows.decode("utf-8", "ignore"))
        if end == shared and len(next_ids) and int(next_ids[0]) in self.tokenizer.added:
            return ids, end
        return ids[:count], found


def common_bytes(a: bytes, b: bytes) -> int:
    """How many bytes a and b share at their beginnings."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
