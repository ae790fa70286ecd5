"""The prefix cache changes nothing but the time: random conversations with edits, branches, retries, side requests and
evictions say the same as a cold engine, id by id, and afterwards every page and slot is accounted for. With speculation and
without; the cold engine chooses one token at a time.

    python tests/test_cache_equality.py [conversations] [seed] [draft]      as many as you like; a count of what happened
"""
import argparse
import collections
import random
import time

import numpy as np
import pytest

from qwentin.config import EngineConfig
from qwentin.engine import Engine
from qwentin.request import Done, GenerateRequest, SamplingParams
from test_engine import Reader

# one sixth of what all conversations would like to keep: 9 snapshots, 12 pages of 128
SMALL = {"threads": 1, "max_seqs": 4, "prefill_chunk": 64, "max_model_len": 768, "kv_tokens": 1536, "cache_mib": 22}
SYSTEMS = ["Answer in one sentence. " * 6, "You are a coding assistant. Be brief. " * 4, "Be brief."]
ASKS = ["Please add {a} and {b}.", "Which number is bigger: {a} or {b}?", "Repeat after me: apple {a} cloud {b}",
        "What is the weather in Oslo, {a} or {b}?", "Compute {a} + {b}. 漢字 😀"]
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


class Conversation:
    """Messages that end with the user's, what was said to them last, and how many requests are still to come."""

    def __init__(self, rng: random.Random):
        self.rng, self.left, self.said = rng, rng.randint(1, 5), None
        self.tools = [TOOL] if rng.random() < 0.3 else None
        self.messages = [{"role": "system", "content": rng.choice(SYSTEMS)}]
        self.ask()

    def ask(self):
        numbers = {name: self.rng.randint(1, 999) for name in "ab"}
        self.messages.append({"role": "user", "content": self.rng.choice(ASKS).format(**numbers)})

    def next(self):
        """The reply sent back, as this client does it: thought kept or dropped, called tool answered or not."""
        thought, _, text = self.said.rpartition("</think>")
        reply = {"role": "assistant", "content": text.strip()}
        if self.rng.random() < 0.5:
            reply["reasoning_content"] = thought.strip()
        self.messages.append(reply)
        if self.rng.random() < 0.3:
            reply["tool_calls"] = [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}]
            self.messages.append({"role": "tool", "content": f'{{"temperature": {self.rng.randint(-9, 30)}}}'})
        else:
            self.ask()

    def edit(self):
        """An earlier question in other words; what came after it is gone."""
        at = self.rng.choice([i for i, m in enumerate(self.messages) if m["role"] == "user"])
        del self.messages[at:]
        self.ask()

    def branch(self) -> "Conversation":
        """A second conversation that went the same way up to some question."""
        other = Conversation(self.rng)
        at = self.rng.choice([i for i, m in enumerate(self.messages) if m["role"] == "user"])
        other.tools, other.messages = self.tools, [dict(m) for m in self.messages[:at]]
        other.ask()
        return other


class Play:
    """`conversations` of them, four at a time, on two engines of which the second keeps nothing."""

    def __init__(self, warm: Engine, cold: Engine, conversations: int, seed: int):
        self.warm, self.cold, self.rng, self.to_come = warm, cold, random.Random(seed), conversations
        self.live: list[Conversation] = []
        self.counts = collections.Counter()

    def run(self) -> collections.Counter:
        while self.to_come or self.live:
            while self.to_come and len(self.live) < 4:
                self.begin()
            conversation = self.rng.choice(self.live)
            if conversation.said is not None:
                move = self.rng.choices(("next", "edit", "retry"), (6, 2, 2))[0]
                self.counts[move] += 1
                if move != "retry":
                    getattr(conversation, move)()
            self.request(conversation)
            conversation.left -= 1
            if conversation.left == 0:
                self.live.remove(conversation)
        return self.counts

    def begin(self):
        if self.live and self.rng.random() < 0.4:
            self.counts["branch"] += 1
            self.live.append(self.rng.choice(self.live).branch())
        else:
            self.live.append(Conversation(self.rng))
        self.to_come -= 1

    def request(self, conversation: Conversation):
        """One prompt to both: the same ids come, drawn or chosen greedily; a side request now and then before it."""
        if self.rng.random() < 0.15:
            self.counts["side"] += 1
            ids = self.warm.tokenizer.encode(f"<|im_start|>user\nA title for {self.rng.random()}:<|im_end|>\n")
            self.both(ids, None, SamplingParams(temperature=0.0), 2)
        thinking = {"enable_thinking": self.rng.random() < 0.7}
        stable, tail = (self.warm.chat_template.render(conversation.messages, tools=conversation.tools,
                                                       add_generation_prompt=more, **thinking) for more in (False, True))
        assert tail.startswith(stable)
        ids, known = self.warm.encode(stable, tail[len(stable):])
        sampling = SamplingParams(temperature=self.rng.choice((0.0, 0.0, 1.0)), seed=self.rng.randint(0, 9**9))
        conversation.said = self.warm.tokenizer.decode(self.both(ids, known, sampling, self.rng.randint(1, 12)))

    def both(self, ids, stable, sampling, limit) -> list[int]:
        fields = dict(prompt=np.array(ids, np.int32), stable=stable, sampling=sampling, max_tokens=limit)
        said, usage = answer(self.warm, **fields)
        wanted, none = answer(self.cold, **fields)
        assert said == wanted, f"request {self.counts['requests']}: {usage.cached_tokens} of {len(ids)} ids were cached"
        assert none.cached_tokens == 0 and usage.prompt_tokens == len(ids)
        self.counts.update(requests=1, hits=usage.cached_tokens > 0, prompt=len(ids), cached=usage.cached_tokens,
                           guessed=usage.speculated.accepted if usage.speculated else 0)
        return said


def answer(engine: Engine, **fields):
    """The ids that a request is answered with, and its Usage."""
    reader = Reader()
    engine.submit(GenerateRequest(f"r{id(reader)}", **fields), reader)
    return reader.wait().ids(), reader.of(Done)[0].usage


def play(conversations: int, seed: int, **options) -> collections.Counter:
    """Both engines from start to end; `options` are the warm one's. Everything must have been given back."""
    engines = [Engine.load(EngineConfig(**{**SMALL, **more})) for more in (options, {"cache_mib": 0, "draft": "off"})]
    for engine in engines:
        engine.start()
    try:
        counts = Play(*engines, conversations, seed).run()
    finally:
        for engine in engines:
            engine.stop()
    scheduler = engines[0].scheduler
    counts["evictions"] = scheduler.cache.evictions
    scheduler.check()
    scheduler.cache.clear()
    scheduler.check()
    assert len(scheduler.pool.free) == scheduler.pool.total and len(scheduler.slots.free) == scheduler.slots.total
    return counts


@pytest.mark.parametrize("draft", ["auto", "off"])
def test_random_conversations_equal_a_cold_engine(draft):
    counts = play(40, 1, draft=draft)
    assert min(counts[move] for move in ("next", "edit", "retry", "branch", "side", "evictions")) > 5, counts
    assert counts["cached"] > counts["prompt"] / 3 and (counts["guessed"] > 100) == (draft == "auto"), counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conversations", nargs="?", type=int, default=300)
    parser.add_argument("seed", nargs="?", type=int, default=1)
    parser.add_argument("draft", nargs="?", default="auto")
    given, begun = parser.parse_args(), time.monotonic()
    print(dict(play(given.conversations, given.seed, draft=given.draft)), f"{time.monotonic() - begun:.0f} s")
