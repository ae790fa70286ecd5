"""200 requests over 16 connections, many of them hostile: every answer is right or the right refusal, every page and slot
comes back, memory stays flat."""
import http.client
import json
import random
import threading
from urllib.parse import urlsplit

import pytest

from conftest import start_server, wait_idle
from http_client import call, fold, open_request, parse_events, read_until

REQUESTS, CONNECTIONS = 200, 16
GROWTH = 12 * 2**20     # bytes that the second hundred requests may add to the memory of a server that is warm
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTIONS = ["Please add 6 and 3.", "Which number is bigger: 988 or 552?", "Repeat after me: apple island silver cloud",
             "Hello!"]


@pytest.fixture(scope="module")
def own():
    """A server with little room, so that the queue and the pools are really contended."""
    server = start_server("--max-seqs", "6", "--max-queue", "64", "--kv-tokens", "8192", "--prefill-chunk", "128")
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.log_text()


@pytest.fixture(scope="module")
def wanted(own):
    """What each question is answered when nothing else runs."""
    return {q: call(own.url, CHAT, chat(q)).json["choices"][0]["message"] for q in QUESTIONS}


def chat(question, **more):
    return {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 90, **more}


class Worker(threading.Thread):
    """One request after the other, of the kinds that `jobs` lists; `wrong` holds what should not have happened."""

    def __init__(self, url, wanted, jobs, seed):
        super().__init__()
        self.url, self.wanted, self.jobs, self.rng = url, wanted, jobs, random.Random(seed)
        self.counts, self.wrong = {}, []
        self.connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)

    def run(self):
        while True:
            try:
                kind = self.jobs.pop()
            except IndexError:
                return self.connection.close()
            try:
                getattr(self, kind)()
                self.counts[kind] = self.counts.get(kind, 0) + 1
            except Exception as error:
                self.wrong.append(f"{kind}: {error!r}")
                self.connection.close()

    def post(self, path, body):
        """On the kept-alive connection: (status, headers, body)."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.connection.request("POST", path, raw)
        response = self.connection.getresponse()
        return response.status, response.headers, response.read()

    def whole(self):
        question = self.rng.choice(QUESTIONS)
        status, _, raw = self.post(CHAT, chat(question))
        assert status == 200, raw
        assert json.loads(raw)["choices"][0]["message"] == self.wanted[question]

    def streamed(self):
        question = self.rng.choice(QUESTIONS)
        status, _, raw = self.post(CHAT, chat(question, stream=True))
        found = parse_events(raw)
        assert status == 200 and found.done
        assert fold(found.frames)[0]["message"] == self.wanted[question]

    def several(self):
        status, _, raw = self.post(TEXT, {"prompt": ["import os", "x = 1"], "n": 2, "max_tokens": 8, "temperature": 0})
        texts = [c["text"] for c in json.loads(raw)["choices"]]
        assert status == 200 and texts[0] == texts[1] and texts[2] == texts[3]

    def leaves_early(self):
        body = {"prompt": [9] * self.rng.choice([5, 700]), "ignore_eos": True, "stream": self.rng.random() < 0.5}
        sock = open_request(self.url, TEXT, body)
        if body["stream"] and self.rng.random() < 0.7:
            read_until(sock, b": accepted")
        threading.Event().wait(self.rng.random() * 0.3)
        sock.close()

    def leaves_mid_body(self):
        sock = open_request(self.url, TEXT, {}, missing=1000)
        sock.close()

    def bad_body(self):
        raw, field = self.rng.choice([(b"{", None), (b'{"messages": 5}', "messages"), (b"\xff", None),
                                      (json.dumps(chat("x", temperature=9)).encode(), "temperature"),
                                      (json.dumps(chat("x", stop=[""])).encode(), "stop")])
        status, _, answer = self.post(CHAT, raw)
        assert status == 400 and json.loads(answer)["error"]["param"] == field, answer

    def overflow(self):
        status, _, raw = self.post(CHAT, chat("word " * 9000, stream=self.rng.random() < 0.5))
        assert status == 400 and json.loads(raw)["error"]["code"] == "context_length_exceeded"

    def lost(self):
        status, _, _ = self.post("/v1/nothing", b"{}")
        assert status == 404


KINDS = {"whole": 25, "streamed": 25, "several": 8, "leaves_early": 17, "leaves_mid_body": 5, "bad_body": 10,
         "overflow": 6, "lost": 4}


def storm(url, wanted, kinds: dict, seed: int) -> None:
    """These many requests of each kind, shuffled, over all connections; whatever goes wrong is listed."""
    jobs = [kind for kind, count in kinds.items() for _ in range(count)]
    random.Random(seed).shuffle(jobs)
    workers = [Worker(url, wanted, jobs, seed + i) for i in range(CONNECTIONS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
    assert [line for worker in workers for line in worker.wrong] == []
    assert {kind: sum(worker.counts.get(kind, 0) for worker in workers) for kind in kinds} == kinds


def test_200_requests_over_16_connections(own, wanted):
    """Memory is looked at after a first hundred, which touches every page of the pools, and after a second."""
    assert sum(KINDS.values()) == REQUESTS // 2
    sizes = [own.resident()]
    for seed in (100, 200):
        storm(own.url, wanted, KINDS, seed)
        assert wait_idle(own), f"something is still held: {own.health()}"
        sizes.append(own.resident())
    print("resident before, after 100 and after 200 requests: " + ", ".join(f"{s / 2**20:.1f} MiB" for s in sizes))
    assert sizes[2] - sizes[1] < GROWTH, f"resident memory grew: {sizes}"
    for question in QUESTIONS:          # nothing leaked from one request into another
        assert call(own.url, CHAT, chat(question)).json["choices"][0]["message"] == wanted[question]


def test_a_full_queue_refuses_and_recovers(own):
    """More requests than may run or wait: the rest gets 503 with Retry-After, the accepted ones are all served."""
    socks = [open_request(own.url, TEXT, {"prompt": "x", "ignore_eos": True, "max_tokens": 400}) for _ in range(90)]
    refused = call(own.url, TEXT, {"prompt": "x", "max_tokens": 1})
    assert refused.status == 503 and refused.error["code"] == "queue_full" and int(refused.headers["retry-after"]) > 0
    for sock in socks:
        sock.close()
    assert wait_idle(own)
    assert call(own.url, TEXT, {"prompt": "x", "max_tokens": 1}).status == 200
