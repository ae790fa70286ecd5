"""Soak: agents of three dialects at one server for as long as you like; what is said and what is held must not drift.

    python bench/soak.py [--requests 2000] [--minutes 30] [--agents 6] [--seed 1] [--device cpu]

Each agent holds conversations: turns with tools, edits, branches, retries, titles on the side, streams left in the middle,
prompts that do not fit. Requests are spread over `--minutes` of real time (0: one after the other as fast as they go).
Checked: every answer has the status and the shape that it should; the same greedy prompts are answered alike before and
after, and so is a request that is sent twice (on a GPU but for near ties, which are listed); the server's memory stays under
what its caches were configured to hold, and flat in the second half; when it stops, pages, slots and the prefix tree recount
to exact. A table, then one JSON line.
"""
import argparse
import asyncio
import collections
import copy
import http.client
import json
import logging
import random
import signal
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

from machine import describe
from qwentin.config import EngineConfig, ModelConfig
from qwentin.engine import Engine
from qwentin.server.process import serve

MIB = 2**20
SERVER = {"max_model_len": 2048, "kv_tokens": 16384, "cache_mib": 96, "prefill_chunk": 128, "max_seqs": 8, "threads": 1}
# What may come on top of the caches: modules that load late, texts and ids of 64 remembered conversations (64 x 2048 x 12
# bytes), the activations of the largest step (scores of 136 rows over 2048 keys alone are 7 MB a layer), and what malloc
# keeps of all that: the tower tells it to give nothing back.
SLACK = 96 * MIB
WARM = 1000             # requests of a run whose first half fills every cache
FLAT = 16 * MIB         # what the second half may add: once every cache is full, nothing grows but the largest step seen
NEAR = 0.02             # of two log-probabilities on a GPU: rows that share a step with others are summed in another order
MARKS = 24              # characters of <think> and the like, which are in tokens and not in texts
RARE = 20               # of so many drawn answers one may differ on a GPU: a draw falls between two sums of probabilities
SYSTEMS = ["You are a helpful assistant. Answer in one sentence.", "You are a coding assistant.", "Be brief. " * 40]
ASKS = ["Please add {a} and {b}.", "Which number is bigger: {a} or {b}?", "What is the weather in Oslo?",
        "Repeat after me: apple {a} cloud {b}", "Write a Python function that reverses a list.", "Sort: {b}, {a}, 5. 漢字 😀"]
PROBES = ["Please add 696 and 336.", "What is the weather in Oslo?", "Write a Python function that reverses a list."]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RESULT = '{"temperature": 3}'


# ---------------------------------------------------------------------- the dialects, as their clients send and read them
class Chat:
    path = "/v1/chat/completions"

    def __init__(self, system: str, tools: bool):
        self.system, self.tools, self.history = system, tools, []

    def asks(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def body(self, limit: int) -> dict:
        tools = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}] * self.tools
        return {"messages": [{"role": "system", "content": self.system}, *self.history], "tools": tools, "max_tokens": limit}

    def fold(self, frames: list[dict]) -> dict:
        """The message that a stream's frames add up to."""
        message, calls = {"role": "assistant", "content": ""}, []
        for delta in (frame["choices"][0]["delta"] for frame in frames if frame["choices"]):
            for key in ("content", "reasoning_content"):
                if delta.get(key):
                    message[key] = message.get(key, "") + delta[key]
            for part in delta.get("tool_calls", ()):
                if part["index"] == len(calls):
                    calls.append({"id": part["id"], "type": "function", "function": {**part["function"], "arguments": ""}})
                calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments", "")
        return {**message, **({"tool_calls": calls} if calls else {})}

    def read(self, answer) -> dict:
        return self.fold(answer) if isinstance(answer, list) else answer["choices"][0]["message"]

    def hears(self, message: dict) -> None:
        """The reply, and a result for each call that is in it."""
        self.history.append(message)
        self.history += [{"role": "tool", "tool_call_id": call["id"], "content": RESULT}
                         for call in message.get("tool_calls") or ()]

    @staticmethod
    def text(message: dict) -> list:
        """What was said, ids apart."""
        return [message.get("reasoning_content") or "", message.get("content") or "",
                *(call["function"]["arguments"] for call in message.get("tool_calls") or ())]


class Responses(Chat):
    path = "/v1/responses"

    def body(self, limit):
        tools = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS}] * self.tools
        return {"instructions": self.system, "input": self.history, "tools": tools, "max_output_tokens": limit}

    def read(self, answer):
        return (answer[-1]["response"] if isinstance(answer, list) else answer)["output"]

    def hears(self, output):
        # an item that the limit cut is not sent back by clients either
        self.history += [item for item in output if item.get("status") != "incomplete"]
        self.history += [{"type": "function_call_output", "call_id": item["call_id"], "output": RESULT}
                         for item in output if item["type"] == "function_call" and item.get("status") != "incomplete"]

    @staticmethod
    def text(output):
        return [item.get("arguments") or [part["text"] for part in item.get("content") or ()] for item in output]


class Messages(Chat):
    path = "/v1/messages"

    def body(self, limit):
        tools = [{"name": "get_weather", "input_schema": PARAMETERS}] * self.tools
        return {"model": "any", "system": self.system, "messages": self.history, "tools": tools, "max_tokens": limit,
                "thinking": {"type": "adaptive"}}

    def fold(self, frames):
        blocks, arguments = [], {}
        for frame in frames:
            if frame["type"] == "content_block_start":
                blocks.append(dict(frame["content_block"]))
            elif frame["type"] == "content_block_delta":
                kind, block = frame["delta"]["type"].removesuffix("_delta"), blocks[frame["index"]]
                if kind == "input_json":
                    arguments[frame["index"]] = arguments.get(frame["index"], "") + frame["delta"]["partial_json"]
                else:
                    block[kind] = block.get(kind, "") + frame["delta"][kind]
        for index, written in arguments.items():
            try:
                blocks[index]["input"] = json.loads(written or "{}")
            except ValueError:              # cut by the limit
                blocks[index]["input"] = {}
        return blocks

    def read(self, answer):
        return self.fold(answer) if isinstance(answer, list) else answer["content"]

    def hears(self, blocks):
        self.history.append({"role": "assistant", "content": blocks or [{"type": "text", "text": "-"}]})
        uses = [block["id"] for block in blocks if block["type"] == "tool_use"]
        if uses:
            self.history.append({"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": use, "content": RESULT} for use in uses]})

    @staticmethod
    def text(blocks):
        return [block.get("thinking") or block.get("text") or json.dumps(block.get("input")) for block in blocks]


# ---------------------------------------------------------------------- the traffic
class Agent(threading.Thread):
    """Takes requests off the common count and sends them, one at a time, each when it is due."""

    def __init__(self, url: str, number: int, seed: int, jobs: "Jobs"):
        super().__init__(daemon=True)
        self.host, self.jobs, self.rng = urlsplit(url).netloc, jobs, random.Random(seed * 1000 + number)
        self.counts, self.wrong, self.apart = collections.Counter(), [], []
        self.talks = [self.new_talk() for _ in range(3)]

    def new_talk(self) -> Chat:
        talk = self.rng.choice((Chat, Responses, Messages))(self.rng.choice(SYSTEMS), self.rng.random() < 0.6)
        self.ask(talk)
        return talk

    def ask(self, talk: Chat) -> None:
        talk.asks(self.rng.choice(ASKS).format(a=self.rng.randint(1, 999), b=self.rng.randint(1, 999)))

    def run(self):
        while self.jobs.next():
            kind = self.rng.choices(("turn", "retry", "branch", "edit", "side", "leave", "overflow", "count"),
                                    (50, 10, 8, 8, 10, 8, 3, 3))[0]
            try:
                getattr(self, kind)()
            except Exception as error:
                self.wrong.append(f"{kind}: {error!r}"[:500])
            self.counts[kind] += 1

    def turn(self, talk: Chat | None = None, said=None):
        """The next answer of a conversation; one that grew long is given up for a new one."""
        talk = talk or self.rng.choice(self.talks)
        body = copy.deepcopy({**talk.body(self.rng.choice((24, 60, 100))), "temperature": self.rng.choice((0, 0, 0.7)),
                              "stream": self.rng.random() < 0.5, "seed": 1})
        reply = talk.read(self.send(talk.path, body))
        before = copy.deepcopy(talk.history)
        talk.hears(reply)
        self.ask(talk)
        talk.last = before, body, talk.text(reply)
        if len(json.dumps(talk.history)) > 3000:
            self.talks[self.talks.index(talk)] = self.new_talk()

    def retry(self):
        """The last request of a conversation once more, the other way round: it says the same."""
        talk = self.rng.choice(self.talks)
        if not hasattr(talk, "last"):
            return self.turn(talk)
        _, body, said = talk.last
        again = talk.text(talk.read(self.send(talk.path, {**body, "stream": not body["stream"]})))
        self.counts.update({"retried": 1, "retries alike": again == said})
        if again != said:
            self.apart.append((type(talk).__name__, body["temperature"], self.gap(talk, body, said, again), said, again))

    def gap(self, talk, body, said, again):
        """Between the two likeliest tokens where two greedy answers part, in log-probability; None if it cannot be told."""
        if type(talk) is not Chat or body["temperature"]:
            return None
        choice = self.send(talk.path, {**body, "stream": False, "logprobs": True, "top_logprobs": 2})["choices"][0]
        if choice["message"].get("tool_calls"):
            return None
        tokens = [*(choice["logprobs"].get("reasoning_content") or ()), *choice["logprobs"]["content"]]
        one, other = ("".join(map(str, text)) for text in (said, again))
        parted, at = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other))), 0
        tops = [t["top_logprobs"][0]["logprob"] - t["top_logprobs"][1]["logprob"] for t in tokens
                if (at := at + len(t["token"])) >= parted - MARKS and at - len(t["token"]) <= parted + MARKS]
        return round(min(tops, default=9.0), 4)

    def branch(self):
        """Back to where the last answer was asked for, another question, and both go on."""
        talk = self.rng.choice(self.talks)
        if not hasattr(talk, "last"):
            return self.turn(talk)
        other = copy.deepcopy(talk)
        other.history = other.last[0][:-1]
        self.ask(other)
        self.talks[self.rng.randrange(3)] = other
        self.turn(other)

    def edit(self):
        talk = self.rng.choice(self.talks)
        talk.history.pop()
        self.ask(talk)
        self.turn(talk)

    def side(self):
        """A title beside the conversation."""
        body = {"messages": [{"role": "system", "content": "Write a title."},
                             {"role": "user", "content": f"About {self.rng.random()}"}], "max_tokens": 12, "stream": True}
        Chat("", False).read(self.send(Chat.path, body))

    def leave(self):
        """Gone after the first bytes, or before them."""
        talk = self.rng.choice(self.talks)
        connection = http.client.HTTPConnection(self.host, timeout=120)
        connection.request("POST", talk.path, json.dumps({**talk.body(100), "stream": True}))
        if self.rng.random() < 0.7:
            connection.getresponse().read(200)
        connection.close()

    def overflow(self):
        talk = copy.deepcopy(self.rng.choice(self.talks))
        talk.asks("word " * 4000)
        self.send(talk.path, talk.body(10), status=400)

    def count(self):
        body = Messages("Be brief.", True)
        self.ask(body)
        assert self.send("/v1/messages/count_tokens", body.body(1))["input_tokens"] > 10

    def send(self, path: str, body: dict, status: int = 200):
        """The JSON answer, or the list of a stream's frames."""
        connection = http.client.HTTPConnection(self.host, timeout=120)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            raw = response.read().decode()
        finally:
            connection.close()
        assert response.status == status, f"{response.status} {raw[:300]}"
        if response.getheader("Content-Type").startswith("application/json"):
            return json.loads(raw)
        frames = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
        assert not any("error" in frame or frame.get("type") == "error" for frame in frames), raw[-300:]
        assert raw.rstrip().endswith("[DONE]") or frames[-1]["type"] in (
            "message_stop", "response.completed", "response.incomplete"), raw[-300:]
        return frames


class Jobs:
    """How many requests are to come, and when the next one is due."""

    def __init__(self, count: int, seconds: float):
        self.count, self.seconds, self.done = count, seconds, 0
        self.lock, self.begun = threading.Lock(), time.monotonic()

    def next(self) -> bool:
        with self.lock:
            if self.done == self.count:
                return False
            due = self.begun + self.seconds * self.done / self.count
            self.done += 1
        time.sleep(max(0.0, due - time.monotonic()))
        return True


# ---------------------------------------------------------------------- the server under it
def serve_and_recount(options: dict) -> None:
    """The child process: serve until a signal comes, then recount what the engine holds."""
    engines = []

    def load(config):
        engines.append(Engine.load(config))
        return engines[0]
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(serve(EngineConfig(port=0, **options), load, lambda line: print(line, flush=True)))
    scheduler = engines[0].scheduler
    scheduler.check()
    kept = len(scheduler.cache.entries)
    scheduler.cache.clear()
    scheduler.check()
    assert len(scheduler.pool.free) == scheduler.pool.total, "a page is lost"
    assert len(scheduler.slots.free) == scheduler.slots.total, "a slot is lost"
    print(json.dumps({"recount": "exact", "kept": kept, "evictions": scheduler.cache.evictions}), flush=True)


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


def configured() -> int:
    """Bytes that the caches may hold: keys and values of every row, and the states of running and kept sequences."""
    config = EngineConfig(**SERVER)
    model = ModelConfig.from_directory(config.model)
    layers = len(model.full_layers) + model.mtp_num_hidden_layers
    rows = config.kv_rows(model) * layers * 2 * model.num_key_value_heads * model.head_dim * 4
    return rows + (config.max_seqs + config.kept_states(model)) * model.state_bytes


def probe(agent: Agent) -> list:
    """What each dialect answers to each probe, greedily."""
    said = []
    for dialect in (Chat, Responses, Messages):
        for question in PROBES:
            talk = dialect(SYSTEMS[0], True)
            talk.asks(question)
            said.append(talk.text(talk.read(agent.send(talk.path, {**talk.body(80), "temperature": 0}))))
    return said


def counters(url: str) -> dict[str, float]:
    """Of /metrics: those without labels."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("GET", "/metrics")
    lines = [line.split() for line in connection.getresponse().read().decode().splitlines() if line.startswith("qwentin_")]
    return {line[0]: float(line[1]) for line in lines if "{" not in line[0]}


def health(url: str) -> dict:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("GET", "/health")
    return json.loads(connection.getresponse().read())


def soak(options) -> dict:
    """Everything but the recount."""
    process = options.process
    url = process.stdout.readline().split(" ready: ")[1].split("/v1")[0]
    ready, first = resident(process.pid), probe(Agent(url, 0, options.seed, None))
    jobs = Jobs(options.requests, options.minutes * 60)
    agents = [Agent(url, number, options.seed, jobs) for number in range(1, options.agents + 1)]
    for agent in agents:
        agent.start()
    memory, device = [], []
    while any(agent.is_alive() for agent in agents):
        memory.append((jobs.done, resident(process.pid)))
        device.append(health(url).get("device_free_bytes"))
        time.sleep(0.5)
    last = probe(Agent(url, 0, options.seed, None))
    memory.append((jobs.done, resident(process.pid)))
    found = counters(url)
    late = [held for done, held in memory if done >= options.requests // 2]
    return {"seconds": round(time.monotonic() - jobs.begun, 1), "alike": first == last,
            "counts": dict(sum((agent.counts for agent in agents), collections.Counter())),
            "wrong": [line for agent in agents for line in agent.wrong],
            "apart": [each for agent in agents for each in agent.apart],
            "ready_mib": ready // MIB, "limit_mib": (ready + configured() + SLACK) // MIB,
            "most_mib": max(held for _, held in memory) // MIB,
            "second_half_growth_mib": round((max(late) - late[0]) / MIB, 1),
            "device": health(url)["device"], "graphs": health(url)["graphs"],
            "device_free": [device[len(device) * i // 8 - (i == 8)] for i in range(9)],
            "memory_mib": [memory[len(memory) * i // 8 - (i == 8)][1] // MIB for i in range(9)],
            "prompt_tokens": int(found["qwentin_prompt_tokens_total"]),
            "cached_tokens": int(found["qwentin_cached_tokens_total"])}


def twice_alike(result) -> bool:
    """Whether retries said the same; on a GPU but for near ties of greedy ones and for a few draws."""
    drawn = sum(1 for _, temperature, *_ in result["apart"] if temperature)
    near = sum(1 for _, temperature, gap, *_ in result["apart"] if not temperature and gap is not None and gap < NEAR)
    if result["device"].startswith("cpu"):
        return not result["apart"]
    return drawn + near == len(result["apart"]) and drawn * RARE <= result["counts"]["retried"]


def verdicts(result: dict, warm: bool) -> dict[str, bool]:
    """What was to hold and whether it did. A run that is not `warm` by half time says nothing about flat memory."""
    return {"no error": not result["wrong"], "first and last outputs equal": result["alike"],
            "a request sent twice says the same": twice_alike(result),
            "memory under what is configured": result["most_mib"] <= result["limit_mib"],
            "memory flat in the second half": not warm or result["second_half_growth_mib"] <= FLAT / MIB,
            "pools recount to exact": result.get("recount") == "exact"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--agents", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="where the server's model runs")
    parser.add_argument("--serve", action="store_true", help="be the server (what this script starts)")
    options = parser.parse_args()
    if options.serve:
        serve_and_recount({**SERVER, "device": options.device})
        return 0
    options.process = subprocess.Popen([sys.executable, __file__, "--serve", "--device", options.device],
                                       stdout=subprocess.PIPE, text=True)
    try:
        result = soak(options)
        options.process.send_signal(signal.SIGTERM)
        result.update(json.loads(options.process.stdout.read() or "{}"), code=options.process.wait(60))
    finally:
        options.process.kill()
    print(f"{options.requests} requests by {options.agents} agents over {result['seconds'] / 60:.1f} min on {describe()}")
    for key, value in result.items():
        print(f"{key:24} {value}")
    checked = verdicts(result, warm=options.requests >= WARM)
    for name, holds in checked.items():
        print(f"{name:36} {'yes' if holds else 'NO'}")
    print(json.dumps({"bench": "soak", "device": describe(), "seed": options.seed, "minutes": options.minutes,
                      **result, "checked": checked}))
    return int(not all(checked.values()))


if __name__ == "__main__":
    sys.exit(main())
