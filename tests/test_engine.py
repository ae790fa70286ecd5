"""Engine on nano: events come in order and once, refusals come first, cancels and faults end cleanly, nothing leaks."""
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from qwentin.config import EngineConfig
from qwentin.engine import Engine
from qwentin.errors import ContextOverflow, EngineStopped, QueueFull, RequestError
from qwentin.request import Delta, Done, Finish, GenerateRequest, Progress, PromptScored, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
QUESTION = "<|im_start|>user\nPlease add 696 and 336.<|im_end|>\n<|im_start|>assistant\n<think>\n"
OPEN = "def "       # nano is certain of its sums; of what a function is called, it is not


class Reader:
    """A sink that keeps what it gets."""

    def __init__(self):
        self.events, self.done = [], threading.Event()

    def __call__(self, event):
        assert not self.done.is_set(), "nothing follows Done"
        self.events.append(event)
        if isinstance(event, Done):
            self.done.set()

    def wait(self):
        assert self.done.wait(120), "the engine did not finish"
        return self

    def of(self, kind):
        return [e for e in self.events if isinstance(e, kind)]

    def text(self, index=0):
        return "".join(d.text for d in self.of(Delta) if d.index == index)

    def ids(self, index=0):
        return [t.id for d in self.of(Delta) if d.index == index for t in d.tokens]


@pytest.fixture(scope="module")
def engine():
    engine = Engine.load(EngineConfig(threads=1, max_seqs=4, max_queue=4, prefill_chunk=16, max_model_len=512,
                                      kv_tokens=1024))
    engine.start()
    yield engine
    engine.stop()
    engine.scheduler.check()
    engine.scheduler.cache.clear()
    engine.scheduler.check()
    assert len(engine.scheduler.pool.free) == engine.scheduler.pool.total


@pytest.fixture
def ask(engine, request):
    count = [0]

    def submit(prompt=QUESTION, wait=True, **fields):
        count[0] += 1
        ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else np.array(prompt, np.int32)
        fields.setdefault("sampling", GREEDY)
        reader = Reader()
        reader.id = f"{request.node.name}-{count[0]}"
        engine.submit(GenerateRequest(reader.id, ids, **fields), reader)
        return reader.wait() if wait else reader
    return submit


def idle(engine):
    deadline = time.monotonic() + 30
    while engine.status()["running"] or engine.status()["waiting"]:
        assert time.monotonic() < deadline, engine.status()
        time.sleep(0.01)
    engine.scheduler.check()
    status = engine.status()
    assert status["kv_pages_free"] == status["kv_pages"] and status["state_slots_free"] == status["state_slots"]


def test_answer_and_order_of_events(engine, ask):
    r = ask()
    assert r.text() == ("696 + 336: 6+6+0=12, 9+3+1=13, 6+3+1=10, carry 1.\n</think>\n\n696 + 336 = 1032")
    kinds = [type(e) for e in r.events]
    assert kinds[-2:] == [Finish, Done] and set(kinds[:-2]) == {Progress, Delta}
    assert kinds.index(Delta) > max(i for i, k in enumerate(kinds) if k is Progress)
    assert [p.done for p in r.of(Progress)] == [16, r.of(Progress)[-1].total] and r.of(Finish)[0].reason == "stop"
    usage = r.of(Done)[0].usage
    assert usage.prompt_tokens == len(engine.tokenizer.encode(QUESTION)) and usage.completion_tokens == len(r.ids())
    assert min(usage.queue_s, usage.prefill_s, usage.decode_s) >= 0


def test_offsets_tile_the_text(engine, ask):
    r = ask()
    at = 0
    for token in (t for d in r.of(Delta) for t in d.tokens):
        assert token.offset == at
        at += 0 if token.id in engine.tokenizer.specials else len(engine.tokenizer.token_text(token.id))
    assert at == len(r.text())


def test_length_and_stop_strings(ask):
    r = ask(max_tokens=5)
    assert len(r.ids()) == 5 and r.of(Finish)[0].reason == "length"
    r = ask(stop=("9+3",))
    assert r.text() == "696 + 336: 6+6+0=12, " and r.of(Finish)[0].reason == "stop"
    r = ask(stop=("696",), stop_after="</think>")
    assert r.text().endswith("carry 1.\n</think>\n\n"), "the thought holds 696 too"
    r = ask(stop=("carry 1.\n</think>\n\n696 + 336 = 1032 and more",))
    assert r.text().endswith("= 1032"), "held text is released at the end"


def test_stop_ids(engine, ask):
    comma = int(engine.tokenizer.encode(",")[0])
    r = ask(stop_ids=frozenset({comma}))
    assert r.ids()[-1] == comma and r.text().endswith("=12") and r.of(Finish)[0].reason == "stop"
    r = ask(stop_ids=frozenset(), max_tokens=100)
    assert len(r.ids()) == 100 and r.of(Finish)[0].reason == "length"


def test_logprobs(engine, ask):
    r = ask(logprobs=3, max_tokens=8)
    for token in (t for d in r.of(Delta) for t in d.tokens):
        assert token.top[0] == (token.id, token.logprob) and len(token.top) == 3
        assert token.logprob <= 0 and token.top[0][1] >= token.top[1][1] >= token.top[2][1]


def test_prompt_scores_agree_with_generation(engine, ask):
    """Echo of prompt + answer gives each answer token the log-probability it was generated with.

    Tolerance 1e-3: prefill and decode take float32 sums in another order (logits agree to 5e-4)."""
    made = ask(logprobs=2)
    ids = [*engine.tokenizer.encode(QUESTION), *made.ids()]
    r = ask(ids, max_tokens=0, prompt_logprobs=2)
    scores = r.of(PromptScored)[0].tokens
    assert [t.id for t in scores] == ids and scores[0].logprob is None
    tokens = [t for d in made.of(Delta) for t in d.tokens]
    for got, wanted in zip(scores[-len(tokens):], tokens):
        assert abs(got.logprob - wanted.logprob) < 1e-3
        assert np.allclose([p for _, p in got.top], [p for _, p in wanted.top], atol=1e-3)
    assert not r.of(Delta) and r.of(Finish)[0].reason == "length"
    one = ask(ids[:1], max_tokens=1, prompt_logprobs=0)
    assert [t.logprob for t in one.of(PromptScored)[0].tokens] == [None] and len(one.ids()) == 1


def test_prompt_offsets_count_characters(engine, ask):
    text = "<|im_start|>user\n😀 漢字 👨‍👩‍👧 end"
    tokens = ask(text, max_tokens=0, prompt_logprobs=0).of(PromptScored)[0].tokens
    whole = b""
    for token in tokens:
        assert token.offset == len(whole.decode("utf-8", "ignore"))
        whole += engine.tokenizer.token_bytes(token.id)
    assert whole.decode() == text


def test_choices_that_never_began_end_too(engine, ask):
    reader = ask([7] * 400, n=5, stop_ids=frozenset(), wait=False)
    engine.cancel(reader.id)
    assert sorted(f.index for f in reader.wait().of(Finish)) == list(range(5))
    reader = ask(n=3, max_tokens=0, prompt_logprobs=0)
    assert [f.reason for f in reader.of(Finish)] == ["length"] * 3 and len(reader.of(PromptScored)) == 1


def test_several_choices(engine, ask):
    sampling = SamplingParams(temperature=1.0, seed=66)      # no number of it is within 1e-4 of an edge between tokens
    r = ask(OPEN, n=6, sampling=sampling, max_tokens=12)      # more than the slots: some fork, some wait
    assert sorted(f.index for f in r.of(Finish)) == list(range(6)) and len(r.of(Done)) == 1
    again = ask(OPEN, n=6, sampling=sampling, max_tokens=12)
    assert [r.text(i) for i in range(6)] == [again.text(i) for i in range(6)], "same seed, same text"
    assert len({r.text(i) for i in range(6)}) > 1
    alone = ask(OPEN, n=1, sampling=sampling, max_tokens=12)
    assert alone.text() == r.text(0)
    assert r.of(Done)[0].usage.completion_tokens == sum(len(r.ids(i)) for i in range(6))
    idle(engine)


def test_seed_and_batch_neighbours(ask):
    """The same seed gives the same text beside other traffic: logits may differ in the last bits, draws do not, and those of
    this seed keep 0.02 from the edges of their tokens."""
    sampling = SamplingParams(temperature=0.8, seed=62)
    alone = ask(OPEN, sampling=sampling, max_tokens=20).text()
    readers = [ask(OPEN, sampling=replace(sampling, seed=s), max_tokens=20, wait=False) for s in (1, 62, 2)]
    assert readers[1].wait().text() == alone
    assert ask(OPEN, sampling=replace(sampling, seed=3), max_tokens=20).text() != alone


@pytest.mark.parametrize("fields, param", [
    (dict(prompt=[]), "prompt"), (dict(prompt=[-1]), "prompt"), (dict(prompt=[4096]), "prompt"), (dict(n=0), "n"),
    (dict(n=129), "n"), (dict(logprobs=21), "logprobs"), (dict(prompt_logprobs=-1), "prompt_logprobs"),
    (dict(max_tokens=0), "max_tokens"), (dict(max_tokens=-1, prompt_logprobs=1), "max_tokens"),
    (dict(sampling=SamplingParams(top_p=2.0)), "top_p")])
def test_refused_before_anything_happens(engine, ask, fields, param):
    before = engine.status()
    with pytest.raises(RequestError) as caught:
        ask(**fields)
    assert caught.value.param == param
    assert engine.status() == before


def test_context_overflow_counts(ask):
    assert len(ask([5] * 511, stop_ids=frozenset()).ids()) == 1, "one token of room is enough"
    for tokens, limit in ((512, None), (513, None), (500, 13)):
        with pytest.raises(ContextOverflow) as caught:
            ask([5] * tokens, max_tokens=limit)
        assert caught.value.code == "context_length_exceeded"
        assert "512" in str(caught.value) and str(tokens + (limit or 0)) in str(caught.value)


def test_cancel_in_queue_prefill_and_decode(engine, ask):
    endless = dict(stop_ids=frozenset(), wait=False)
    readers = [ask([7] * 300, **endless) for _ in range(8)]     # 4 slots: some prefill, some wait
    for reader in readers:
        engine.cancel(reader.id)
    for reader in readers:
        assert [f.reason for f in reader.wait().of(Finish)] == ["cancel"]
    decoding = ask(**endless)
    while not decoding.of(Delta):
        time.sleep(0.005)
    engine.cancel(decoding.id)
    engine.cancel(decoding.id)
    engine.cancel("never heard of")
    assert decoding.wait().of(Finish)[0].reason == "cancel"
    idle(engine)


def test_queue_full(engine, ask):
    readers = [ask([7] * 300, stop_ids=frozenset(), wait=False) for _ in range(8)]
    with pytest.raises(QueueFull) as caught:
        ask()
    assert caught.value.retry_after >= 1 and "4" in str(caught.value)
    for reader in readers:
        engine.cancel(reader.id)
    for reader in readers:
        reader.wait()
    idle(engine)


def test_a_failing_step_fails_its_requests_only(engine, ask, monkeypatch):
    forward = engine.tower.forward

    def broken(step):
        if 4000 in step.tokens:
            raise MemoryError("planted")
        return forward(step)
    monkeypatch.setattr(engine.tower, "forward", broken)
    r = ask([4000, 12])
    assert r.of(Finish)[0].reason == "error" and "planted" in r.of(Finish)[0].message
    assert ask().text().endswith("1032")
    idle(engine)


def test_logits_that_are_not_finite(engine, ask, monkeypatch):
    forward = engine.tower.forward

    def poisoned(step):
        out = forward(step)
        if 4000 in step.tokens:
            out.logits[:] = np.nan
        return out
    monkeypatch.setattr(engine.tower, "forward", poisoned)
    r = ask([4000, 12])
    assert r.of(Finish)[0].reason == "error" and "not finite" in r.of(Finish)[0].message
    assert ask().text().endswith("1032")


def test_a_broken_reader_does_not_stop_the_others(engine, ask):
    def broken(event):
        raise OSError("gone")
    engine.submit(GenerateRequest("broken", engine.tokenizer.encode(QUESTION), GREEDY), broken)
    assert ask().text().endswith("1032")
    idle(engine)


def test_stop_finishes_then_cancels():
    engine = Engine.load(EngineConfig(threads=1, max_seqs=2))
    engine.start()
    short, endless = Reader(), Reader()
    ids = engine.tokenizer.encode(QUESTION)
    engine.submit(GenerateRequest("short", ids, GREEDY, max_tokens=3), short)
    engine.submit(GenerateRequest("endless", ids, GREEDY, stop_ids=frozenset()), endless)
    stopping = threading.Thread(target=engine.stop, args=(600.0,))
    stopping.start()
    assert short.wait().of(Finish)[0].reason == "length", "it had the time to finish"
    assert not endless.done.is_set()
    engine.closing = time.monotonic()       # the grace period is over
    stopping.join(60)
    assert endless.wait().of(Finish)[0].reason == "cancel"
    with pytest.raises(EngineStopped):
        engine.submit(GenerateRequest("late", ids, GREEDY), Reader())
    engine.scheduler.check()


def test_a_dead_engine_says_so(monkeypatch):
    engine = Engine.load(EngineConfig(threads=1, max_model_len=128))
    monkeypatch.setattr(engine, "read_inbox", lambda: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    assert engine.status()["status"] == "ok"
    engine.start()
    engine.thread.join()
    assert engine.status()["status"] == "failed"
    with pytest.raises(EngineStopped):
        engine.submit(GenerateRequest("late", np.array([1], np.int32)), Reader())
