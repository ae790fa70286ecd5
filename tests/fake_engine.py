"""A scripted engine behind the real server: the same interface as qwentin.engine.Engine, tokens and texts to the byte.

A script says for each (request, choice) which deltas come: a list of lists of byte strings, one inner list a Delta, one
byte string a token. `pieces` makes such lists from text. `serving` puts the engine behind a real socket.
"""
import asyncio
import codecs
import contextlib
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
from aiohttp import web

from qwentin import nano
from qwentin.chat_template import ChatTemplate
from qwentin.config import EngineConfig
from qwentin.constraint import Grammars
from qwentin.errors import ContextOverflow, EngineStopped, QueueFull
from qwentin.tokenizer import Tokenizer
from qwentin.request import Delta, Done, Finish, Progress, PromptScored, SamplingParams, Token, Usage
from qwentin.server.fields import read
from qwentin.server.process import make_runner
from qwentin.server.service import Service

END = b"<|im_end|>"


def pieces(text: str, size: int = 1) -> list[list[bytes]]:
    """Tokens of `size` bytes, one token a Delta."""
    raw = text.encode()
    return [[raw[at:at + size]] for at in range(0, len(raw), size)]


def ragged(text: str, seed: int, token: int = 4, delta: int = 4) -> list[list[bytes]]:
    """Tokens of 1 ... `token` bytes, 1 ... `delta` of them a Delta."""
    rng, raw, out = random.Random(seed), text.encode(), []
    while raw:
        out.append([])
        for _ in range(rng.randint(1, delta)):
            size = rng.randint(1, token)
            if raw:
                out[-1].append(raw[:size])
            raw = raw[size:]
    return out


class FakeTokenizer:
    """One id a byte; longer tokens get the next free id when they are first seen."""

    def __init__(self):
        self.table = [bytes([i]) for i in range(256)] + [END]
        self.places = {raw: i for i, raw in enumerate(self.table)}
        self.lock = threading.Lock()
        self.added: set[str] = set()        # texts that are one token each, if they are all there is to encode

    @property
    def size(self):
        return len(self.table)

    def id(self, raw: bytes) -> int:
        with self.lock:
            if raw not in self.places:
                self.places[raw] = len(self.table)
                self.table.append(raw)
            return self.places[raw]

    def encode(self, text):
        if text in self.added:
            return np.array([self.id(text.encode())], np.int32)
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids, skip_special=False):
        return b"".join(self.table[i] for i in ids).decode("utf-8", "replace")

    def token_bytes(self, i):
        return self.table[i]

    def token_text(self, i):
        return self.table[i].decode("utf-8", "replace")

    def special(self, name):
        return {"eos_token": END.decode(), "pad_token": "<pad>"}.get(name)


class Job:
    """One request: an iterator over its events that the engine's thread advances."""

    def __init__(self, engine, request, sink):
        self.request, self.sink, self.cancelled = request, sink, False
        self.open = set(range(request.n))
        self.generated = 0
        self.events = self.script(engine, request)

    def script(self, engine, request):
        for done in range(engine.prefill_steps):
            yield Progress(done, engine.prefill_steps)
        prompt = request.prompt.tolist()
        if request.prompt_logprobs is not None:
            yield PromptScored(tuple(Token(i, at, -0.25 if at else None, ((i, -0.25),) * bool(at))
                                     for at, i in enumerate(prompt)))
        streams = [self.choice(engine, request, index) for index in range(request.n)]
        while streams:                          # choices take turns
            for stream in streams[:]:
                event = next(stream, None)
                if event is None:
                    streams.remove(stream)
                else:
                    yield event

    def choice(self, engine, request, index):
        decoder, read, left = codecs.getincrementaldecoder("utf-8")("replace"), 0, request.max_tokens
        for delta in engine.script(request, index):
            if isinstance(delta, Finish):
                yield delta
                return
            text, tokens = "", []
            for raw in delta[:left]:
                i = engine.tokenizer.id(raw)
                top = ((i, -0.5), (65, -1.5))[:request.logprobs or 0]
                tokens.append(Token(i, read + len(text), None if request.logprobs is None else -0.5, top))
                text += decoder.decode(raw)
            read += len(text)
            self.generated += len(tokens)
            left = left if left is None else left - len(tokens)
            yield Delta(index, text, tuple(tokens))
            if left == 0:
                yield Finish(index, "length")
                return
        self.generated += 1
        yield Delta(index, "", (Token(engine.tokenizer.id(END), read, None if request.logprobs is None else -0.125),))
        yield Finish(index, "stop")

    def step(self) -> bool:
        """Send one event; False once Done was sent."""
        event = None if self.cancelled else next(self.events, None)
        if isinstance(event, Finish):
            self.open.discard(event.index)
        if event is not None:
            self.sink(event)
            return True
        for index in sorted(self.open):
            self.sink(Finish(index, "cancel"))
        self.sink(Done(Usage(len(self.request.prompt), self.generated, cached_tokens=2)))
        return False


class FakeEngine:
    """`gate` holds every step back while it is clear; `log` lists what happened to which request."""

    def __init__(self, script, context=4000, max_seqs=4, max_queue=4, prefill_steps=0, step_s=0.0):
        self.script = script if callable(script) else lambda request, index: script
        self.max_model_len, self.max_seqs, self.max_queue = context, max_seqs, max_queue
        self.prefill_steps, self.step_s = prefill_steps, step_s
        self.tokenizer = FakeTokenizer()
        self.chat_template = ChatTemplate(nano.DIRECTORY, {})
        self.config, self.grammars = EngineConfig(), Grammars(Tokenizer(nano.DIRECTORY))
        self.defaults = SamplingParams(temperature=0.7)
        self.model_config = SimpleNamespace(eos_token_id=(self.tokenizer.id(END),))
        self.gate, self.lock, self.stopping = threading.Event(), threading.Lock(), None
        self.gate.set()
        self.jobs: list[Job] = []
        self.log: list[tuple[str, str]] = []
        self.requests = []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.sleeper = SimpleNamespace(sleep=self.status, wake_up=self.status)

    def start(self):
        self.thread.start()

    def encode(self, stable, tail):
        return self.tokenizer.encode(stable + tail), len(self.tokenizer.encode(stable))

    def submit(self, request, sink):
        if len(request.prompt) + (request.max_tokens or 1) > self.max_model_len:
            raise ContextOverflow(len(request.prompt), request.max_tokens, self.max_model_len)
        with self.lock:
            if self.stopping is not None:
                raise EngineStopped("stopping")
            if len(self.jobs) >= self.max_seqs + self.max_queue:
                raise QueueFull(self.max_queue)
            self.requests.append(request)
            self.jobs.append(Job(self, request, sink))
            self.log.append(("submit", request.id))

    def cancel(self, request_id):
        with self.lock:
            for job in self.jobs:
                if job.request.id == request_id:
                    job.cancelled = True
                    self.log.append(("cancel", request_id))

    def run(self):
        while self.stopping is None or self.jobs:
            late = self.stopping is not None and time.monotonic() > self.stopping
            with self.lock:
                running = self.jobs[:self.max_seqs] if self.gate.is_set() else []
                running += [job for job in self.jobs if job.cancelled and job not in running]
                for job in self.jobs if late else ():
                    job.cancelled = True
            for job in self.jobs[:] if late else running:
                if not job.step():
                    with self.lock:
                        self.jobs.remove(job)
            time.sleep(self.step_s or (0.0 if running else 0.001))

    def stop(self, grace_s):
        self.stopping = time.monotonic() + grace_s
        self.thread.join()

    def status(self):
        return {"running": len(self.jobs), "waiting": 0}

    def slots(self):
        return {"running": [], "waiting": [], "warm": [], "max_model_len": self.max_model_len, "max_seqs": self.max_seqs,
                "asleep": False}

    def did(self, what):
        return [i for done, i in self.log if done == what]


def play(engine, dialect, body: dict):
    """A dialect's reply to `body` with every event the engine would send, no thread and no socket between:
    (chunks of the stream, whole answer, the requests that were made)."""
    streamed = dialect(read(dialect.body_type, {**body, "stream": True}), engine, "fake")
    whole = dialect(read(dialect.body_type, body), engine, "fake")
    chunks = list(streamed.opening())
    for number, request in enumerate(streamed.requests):
        job = Job(engine, request, lambda event, number=number: chunks.extend(streamed.chunks(number, event)))
        while job.step():
            pass
    for number, request in enumerate(whole.requests):
        job = Job(engine, request, lambda event, number=number: whole.collect(number, event))
        while job.step():
            pass
    return chunks, whole.whole(), whole.requests


@contextlib.contextmanager
def serving(engine, **options):
    """The real application around `engine` on a free port; yields its URL and its Service."""
    service = Service(EngineConfig(port=0, **options), engine)
    loop, opened = asyncio.new_event_loop(), threading.Event()
    found = SimpleNamespace(url=None, service=service)

    async def open_port():
        runner = make_runner(service)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.url, found.runner = "http://127.0.0.1:%d" % runner.addresses[0][1], runner
        opened.set()
        return runner

    def work():
        runner = loop.run_until_complete(open_port())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    if engine is not None:
        engine.start()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    opened.wait()
    try:
        yield found
    finally:
        if engine is not None:
            engine.gate.set()
            engine.stop(0.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def until(condition, seconds=10.0):
    """Wait for a condition; True as soon as it holds, False if it never does."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True
