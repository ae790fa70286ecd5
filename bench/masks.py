"""What a grammar costs a token, at the vocabulary of the 27B: 248,320 made-up ids of about its lengths.

    python bench/masks.py [--vocabulary 248320] [--repeats 3]

The ids are the single bytes, words and signs from Python's standard library, pairs of them, and Chinese characters. A text
that fits is walked through each grammar, the way it goes while it is generated: mask (the library and the unpacking
to bool), choose (a sampler with top_k 20 on random logits, mask included), advance. Medians and the 99th percentile, in us,
over all tokens of all repeats; the last row is the same sampler without a grammar. Prints a table, then one JSON line.
"""
import argparse
import json
import re
import sysconfig
import time
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from machine import describe

from qwentin.constraint import Constraint, choice, json_schema, regex
from qwentin.request import SamplingParams
from qwentin.sampler import Sampler
from qwentin.server.toolgrammar import calls_source
from qwentin.server.toolschema import Toolbox

SPECIALS = ("<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
PROSE = "The quick brown fox, jumps over the lazy dog 12345 and some more text follows here. " * 6
FORM = {"type": "object", "properties": {
    "name": {"type": "string"}, "age": {"type": "integer"}, "text": {"type": "string", "maxLength": 200},
    "tags": {"type": "array", "items": {"type": "string"}}, "kind": {"enum": ["alpha", "beta"]}},
    "required": ["name", "age", "text", "tags", "kind"], "additionalProperties": False}
EDIT = {"name": "edit", "parameters": {"type": "object", "required": ["path", "text"], "properties": {
    "path": {"type": "string"}, "text": {"type": "string"}, "line": {"type": "integer"}}}}


class Vocabulary:
    """Made-up ids, as llguidance wants them; encodes by the longest id that fits."""
    bos_token_id = None

    def __init__(self, size: int):
        rng = np.random.default_rng(0)
        source = "".join(p.read_text(errors="ignore") for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
        words = sorted(set(re.findall(r" ?[A-Za-z]{2,9}| ?[0-9]{1,2}|\s+|[^\w\s]{1,3}", source)))
        found = dict.fromkeys([bytes([i]) for i in range(256)] + [w.encode() for w in words])
        found |= dict.fromkeys(chr(c).encode() for c in range(0x4e00, 0x9fa5))
        while len(found) < size - len(SPECIALS):
            a, b = rng.integers(0, len(words), 2)
            found[(words[a] + words[b].strip()[:4]).encode()] = None
        self.tokens = [*list(found)[:size - len(SPECIALS)], *(text.encode() for text in SPECIALS)]
        self.places = {token: i for i, token in enumerate(self.tokens)}
        self.special_token_ids = list(range(size - len(SPECIALS), size))
        self.eos_token_id = self.special_token_ids[0]

    def __call__(self, text) -> list[int]:
        raw, out, at = text if isinstance(text, bytes) else text.encode(), [], 0
        while at < len(raw):
            size = next(n for n in range(24, 0, -1) if raw[at:at + n] in self.places)
            out.append(self.places[raw[at:at + size]])
            at += size
        return out


class Fixed:
    """A steering that holds one constraint, for the sampler."""

    def __init__(self, constraint):
        self.constraint, self.mask = constraint, constraint.mask

    def forced(self):
        return None

    def take(self, token):
        return token


def walk(matcher, ids, row, vocabulary) -> list[tuple[float, float, float]]:
    """(mask, choose, advance) seconds of each token."""
    state, out = Constraint(matcher.deep_copy(), vocabulary), []
    sampler = Sampler(SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=1), np.zeros(1, np.int32), vocabulary, 0,
                      Fixed(state))
    for token in ids:
        start = time.perf_counter()
        mask = state.mask()
        masked = time.perf_counter()
        assert mask[token]
        sampler.choose(row)
        chosen = time.perf_counter()
        state.advance(token)
        out.append((masked - start, chosen - start, time.perf_counter() - chosen))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=248320)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    words, V = Vocabulary(options.vocabulary), options.vocabulary
    start = time.perf_counter()
    library = LLTokenizer(TokenizerWrapper(words), n_vocab=V, eos_token=words.eos_token_id)
    print(f"{describe()}; the library read {V} ids in {time.perf_counter() - start:.1f} s")
    call = "<tool_call>\n<function=edit>\n<parameter=path>\n/tmp/a.py\n</parameter>\n<parameter=text>\n" + PROSE + \
           "\n</parameter>\n</function>\n</tool_call>"
    filled = {"name": PROSE, "age": 36, "text": PROSE[:150], "tags": ["a b c", "de"], "kind": "beta"}
    cases = {"json_schema": (json_schema(FORM), json.dumps(filled)), "json_object": (json_schema({"type": "object"}),
             json.dumps(filled)), "regex": (regex("[A-Za-z ,.0-9]+"), PROSE), "choice": (choice(["yes", "no"]), "yes"),
             "tool call": (calls_source(list(Toolbox([EDIT]).tools.values())), call)}
    row = np.random.default_rng(1).normal(size=V).astype(np.float32)
    print("| grammar | compile ms | tokens | mask us | 99 % | choose us | 99 % | advance us |\n" + "|---" * 8 + "|")
    out = {}
    for name, (source, text) in cases.items():
        start = time.perf_counter()
        matcher = LLMatcher(library, source, log_level=0)
        compiled, ids = time.perf_counter() - start, words(text)
        assert not matcher.is_error(), matcher.get_error()
        times = 1e6 * np.array([t for _ in range(options.repeats) for t in walk(matcher, ids, row, V)])
        middle, late = np.median(times, 0), np.percentile(times, 99, 0)
        out[name] = [round(float(v), 1) for v in (1e3 * compiled, middle[0], late[0], middle[1], late[1], middle[2])]
        print("| {} | {} | {} | {} | {} | {} | {} | {} |".format(name, out[name][0], len(ids), *out[name][1:]))
    free = Sampler(SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=1), np.zeros(1, np.int32), V)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        free.choose(row)
        times.append(1e6 * (time.perf_counter() - start))
    print(f"| none | | | | | {np.median(times):.1f} | {np.percentile(times, 99):.1f} | |")
    print(json.dumps({"bench": "masks", "vocabulary": V, "rows": out, "free_us": round(float(np.median(times)), 1)}))


if __name__ == "__main__":
    main()
