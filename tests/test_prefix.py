"""PrefixCache: the tree finds the longest kept prefix, the dear ones stay, nothing leaks; and on the engine, a warm
turn computes what is new (tests/test_cache_equality.py: and says the same as a cold one)."""
import random

import numpy as np
import pytest

from qwentin.config import EngineConfig
from qwentin.engine import Engine
from qwentin.kvpool import KVPool
from qwentin.prefix import PrefixCache, common
from qwentin.request import GenerateRequest, SamplingParams
from qwentin.slots import StateSlots
from test_engine import Reader

GREEDY = SamplingParams(temperature=0.0)


class Cache(PrefixCache):
    """A cache with pages and slots of its own, filled by hand."""

    def __init__(self, capacity=4, pages=64):
        super().__init__(KVPool(pages), StateSlots(capacity), capacity)

    def keep(self, ids):
        slot = self.take_slot()
        table = self.pool.open()
        self.pool.reserve(table, len(ids))
        self.pool.advance(table, len(ids))
        self.insert(np.array(ids, np.int32), table, slot)
        self.check()
        self.pool.check()
        self.slots.check()

    def length(self, ids):
        entry = self.match(np.array(ids, np.int32))
        return entry.length if entry else 0


def test_longest_prefix_wins():
    c = Cache()
    c.keep([1, 2, 3])
    c.keep([1, 2, 3, 4, 5])
    c.keep([1, 9])
    assert [c.length(x) for x in ([1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 9, 9], [2], [])] == [
        0, 3, 3, 5, 2, 0, 0]
    c.keep([1])                                         # splits an edge
    assert c.length([1, 2]) == 1 and c.length([1, 2, 3]) == 3
    assert c.holds(np.array([1, 2, 3])) and not c.holds(np.array([1, 2]))


def test_the_same_prefix_is_kept_once():
    c = Cache()
    c.keep([1, 2])
    c.keep([1, 2])
    assert len(c.entries) == 1 and len(c.slots.used) == 1


def test_random_inserts_and_drops_against_a_plain_set():
    rng, c, kept = random.Random(7), Cache(capacity=12), set()
    for _ in range(2000):
        ids = tuple(rng.choices((1, 2, 3), k=rng.randint(1, 8)))
        if rng.random() < 0.3 and c.entries:
            entry = rng.choice(sorted(c.entries, key=lambda e: e.slot))
            path, node = [], entry.node
            while node is not None:
                path, node = list(node.edge) + path, node.parent
            kept.remove(tuple(int(i) for i in path))
            c.drop(entry)
        elif len(kept) < 12:
            c.keep(ids)
            kept.add(ids)
        c.check()
        probe = tuple(rng.choices((1, 2, 3), k=9))
        assert c.length(probe) == max((len(k) for k in kept if probe[:len(k)] == k), default=0)
        assert c.shared(np.array(probe)) == max((common(np.array(probe), np.array(k)) for k in kept), default=0)
    c.clear()
    c.check()
    assert not c.root.children and len(c.slots.free) == 12 and len(c.pool.free) == 64


def test_the_cheapest_goes_first():
    c = Cache(capacity=4)
    root, turn = list(range(100)), list(range(100)) + [500] * 30
    c.keep(root)
    c.keep(turn)
    c.use(c.match(np.array(turn)))
    c.keep([7] * 60)                                    # one-offs: 15 and 12.5
    c.keep([8] * 50)
    c.keep([9] * 90)
    assert c.length([7] * 60) == 60 and c.length([8] * 50) == 0, "the cheaper of two one-offs"
    c.keep(turn + [600] * 40)
    assert c.length([7] * 60) == 0 and c.length(turn) == 130
    c.keep([11] * 90)                                   # root and turn are mere waypoints now
    assert c.length(turn + [600] * 40) == 170 and c.length(turn) == 100
    for i in range(20):
        c.keep([10 + i] * 90)
    assert c.length(root) == c.length(turn + [600] * 40) == 0, "what nobody comes back to sinks in the end"


def test_what_several_share_goes_last():
    """Three dialogues over one system prompt, taking turns; the root, used through them alone, survives 100 one-offs."""
    c = Cache(capacity=8)
    root = list(range(80))
    c.keep(root)
    dialogues = [root + [100 + i] * 10 for i in range(3)]
    for turn in range(34):
        for i, ids in enumerate(dialogues):
            if (entry := c.match(np.array(ids))) is not None:
                c.use(entry)
            dialogues[i] = ids + [200 + turn] * 10
            c.keep(dialogues[i])
            c.keep([1000 + 3 * turn + i] * 60)
        assert c.length(root) == 80, turn


def test_a_lost_parent_makes_its_children_dearer():
    c = Cache(capacity=2)
    c.keep(list(range(10)))
    c.keep(list(range(50)))
    child = c.match(np.arange(50, dtype=np.int32))
    before = child.worth
    c.drop(c.match(np.arange(10, dtype=np.int32)))
    assert c.cost(child) == 50 * 0.25
    c.keep(list(range(10)))
    c.evict(keep=child)
    assert child.worth > before and c.entries == {child}


def test_side_requests_never_push_out_a_dialogue():
    c = Cache(capacity=8)
    main = list(range(40))
    c.keep(main)
    for turn in range(60):
        for side in range(3):
            c.keep([1000 + 10 * turn + side] * 30)
        assert c.length(main) == len(main), "the next turn finds the last one"
        c.use(c.match(np.array(main)))
        main = main + [2000 + turn] * 20
        c.keep(main)


def test_common():
    assert common(np.array([1, 2, 3]), np.array([1, 2, 4])) == 2
    assert common(np.array([1]), np.array([1, 2])) == 1 and common(np.array([]), np.array([1])) == 0


# ---------------------------------------------------------------------- on the engine
@pytest.fixture(scope="module")
def make_engine():
    made = []

    def make(**fields):
        small = {"threads": 1, "max_seqs": 4, "prefill_chunk": 64, "max_model_len": 1024, "kv_tokens": 2048, "cache_mib": 64}
        engine = Engine.load(EngineConfig(**{**small, **fields}))
        engine.start()
        made.append(engine)
        return engine
    yield make
    for engine in made:
        engine.stop()
        engine.scheduler.check()


def run(engine, ids, **fields):
    run.count = getattr(run, "count", 0) + 1
    reader = Reader()
    fields.setdefault("sampling", GREEDY)
    engine.submit(GenerateRequest(f"p{run.count}", np.array(ids, np.int32), **fields), reader)
    reader.wait()
    return reader.ids(), reader.events[-1].usage.cached_tokens


def chat(engine, messages, **variables):
    """Prompt ids, and how many of them are stable: they stand in the next turn's prompt too."""
    whole = engine.tokenizer.encode(engine.chat_template.render(messages, **variables))
    stable = engine.tokenizer.encode(engine.chat_template.render(messages, add_generation_prompt=False, **variables))
    return whole, common(whole, stable)


def test_a_warm_turn_computes_only_what_is_new(make_engine):
    warm, cold = make_engine(), make_engine(cache_mib=0)
    system = {"role": "system", "content": "Answer in one sentence. " * 20}
    messages, before = [system], 0
    for turn, question in enumerate(["Please add 696 and 336.", "Which number is bigger: 988 or 552?", "Compute 6 + 892."]):
        messages.append({"role": "user", "content": question})
        ids, stable = chat(warm, messages)
        got, cached = run(warm, ids, stable=stable)
        wanted, none = run(cold, ids, stable=stable)
        assert got == wanted and none == 0
        if turn:
            assert cached >= before, "at least up to the last turn's stable end"
        before = stable
        text = warm.tokenizer.decode(got, skip_special=True)
        messages.append({"role": "assistant", "content": text.split("</think>\n\n")[-1]})
    again, cached = run(warm, ids, stable=stable)
    assert again == got and cached == stable, "the same prompt once more: all but the generation prompt"


@pytest.mark.parametrize("count, cached", [(200, [0, 0, 200]), (561, [0, 512, 512]), (700, [0, 512, 700])])
def test_what_several_prompts_begin_with_is_kept_once_that_is_known(make_engine, count, cached):
    """P-3: the first does not know, the second finds out, the third goes on from there; or from a chunk's end close by."""
    warm, cold = make_engine(prefill_chunk=512), make_engine(cache_mib=0, prefill_chunk=512)
    prompts = [[300 + i % 70 for i in range(count)] + [500 + n] * 90 for n in range(3)]
    said = [run(warm, ids, stable=count + 80, max_tokens=4) for ids in prompts]
    assert said == [(run(cold, ids, max_tokens=4)[0], hit) for ids, hit in zip(prompts, cached)]


def test_two_conversations_stay_warm_and_scores_are_never_reused(make_engine):
    engine = make_engine()
    a, b = [300 + i % 50 for i in range(200)], [400 + i % 50 for i in range(200)]
    run(engine, a, max_tokens=1), run(engine, b, max_tokens=1)
    assert run(engine, a + [5], max_tokens=1)[1] == 200 and run(engine, b + [5], max_tokens=1)[1] == 200
    assert run(engine, a + [6], max_tokens=1, prompt_logprobs=0)[1] == 0
