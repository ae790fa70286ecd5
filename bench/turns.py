"""An agent's turns over HTTP against the 27B's shape on a GPU: cold prompts, a neighbour's stream, a cancel, warm turns.

    python bench/turns.py --synthetic [--long 100000] [--cold 4096 32768] [--suffix 300] [--layers N]

A child process serves synthetic weights (bench/synthetic.py; fp6, e4m3 keys) behind the nano tokenizer; prompts are random
ids, no two alike, so what is generated means nothing and only the clock counts. Measured by the client:

    cold       time to first token and prompt tokens a second
    neighbour  the longest gap between tokens of another stream while the long prompt is read, and without one
    cancel     seconds from hanging up in the middle of a long prompt until its pages are free again
    warm       time to first token of a turn that adds `suffix` tokens to the long conversation

Prints a table, then one JSON line. Proven by what it measures: it exits with 1 if pages leak or a warm turn is not warm.
"""
import argparse
import asyncio
import http.client
import json
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import numpy as np

HEADERS = {"Content-Type": "application/json"}
SEQUENCES = 4
KEPT = 40                 # snapshots of 147 MiB: a long prompt leaves one at each chunk's end
READY = "ready: "


# ---------------------------------------------------------------------- the server
def load(shape, layers, config):
    """An engine of a named shape with synthetic weights."""
    from qwentin.chat_template import ChatTemplate
    from qwentin.device import Device
    from qwentin.engine import Engine
    from qwentin.kvpool import pages_for
    from qwentin.model.backend import GpuBackend
    from qwentin.model.cuda import CudaTower
    from qwentin.tokenizer import Tokenizer
    from qwentin.towers import CHUNKS, Placed
    from synthetic import SyntheticSource, config_of
    tokenizer, model, backend = Tokenizer(config.model), config_of(shape, layers), GpuBackend(Device.open())
    pages, kept = pages_for(config.kv_rows(model)), config.kept_states(model)
    slots = config.max_seqs + kept
    tower = CudaTower(model, SyntheticSource(model, backend), pages, slots, kv=config.kv, active=config.max_seqs,
                      valid=tokenizer.size, wide=CHUNKS[0])
    template = ChatTemplate(config.model, {n: tokenizer.special(n) for n in ("bos_token", "eos_token", "pad_token")}, {})
    placed = Placed(tower, pages, slots, kept, backend.name, chunk=tower.wide.most if tower.wide else 0)
    return Engine(config, model, placed, tokenizer, template)


def serve_here(options):
    from qwentin.config import EngineConfig
    from qwentin.server.process import serve
    window = options.long + 8192
    config = EngineConfig(port=0, kv="e4m3", max_seqs=SEQUENCES, max_model_len=window, kv_tokens=3 * window,
                          cache_mib=KEPT * 160, prefill_chunk=options.chunk)
    asyncio.run(serve(config, lambda c: load(options.shape, options.layers, c), lambda line: print(line, flush=True)))


class Server:
    """This script as a server in a process of its own, until the end of the block."""

    def __init__(self, arguments):
        self.command = [sys.executable, __file__, "--serve", *arguments]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if READY in line:
                self.address = urlsplit(line.split(READY)[1].split()[0]).netloc.removesuffix("/v1")
                return self
        raise SystemExit("the server did not start")

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(60)

    def health(self):
        connection = http.client.HTTPConnection(self.address, timeout=60)
        connection.request("GET", "/health")
        return json.load(connection.getresponse())

    def stream(self, ids, tokens, stop=lambda: False):
        """(seconds from asking to each generated token, the usage); left in the middle once stop() is true."""
        connection = http.client.HTTPConnection(self.address, timeout=600)
        body = dict(model="x", prompt=[int(i) for i in ids], max_tokens=tokens, temperature=0, ignore_eos=True, stream=True,
                    logprobs=0, stream_options=dict(include_usage=True))
        start, times, usage = time.perf_counter(), [], {}
        connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {answer.read().decode()}")
        for line in answer:
            if stop():
                answer.close()
                break
            if not line.startswith(b"data: {"):
                continue
            now, frame = time.perf_counter() - start, json.loads(line[6:])
            if "error" in frame:
                raise SystemExit(frame)
            usage = frame.get("usage") or usage
            for choice in frame.get("choices", ()):
                times += [now] * len(choice["logprobs"]["tokens"])
        connection.close()
        return times, usage


# ---------------------------------------------------------------------- what is measured
def gaps(times):
    """Milliseconds between neighbours that are not in one frame."""
    return np.diff(np.unique(times)) * 1e3


def beside(server, ids, tokens, work):
    """(gaps of a stream of up to `tokens` behind `ids`, in ms, what work() returned): only gaps while it worked count."""
    marks, done = [], threading.Event()
    found = {}

    def listen():
        found["begun"] = time.perf_counter()
        found["times"] = server.stream(ids, tokens, done.is_set)[0]
    thread = threading.Thread(target=listen)
    thread.start()
    time.sleep(1.5)
    marks.append(time.perf_counter())
    result = work()
    marks.append(time.perf_counter())
    done.set()
    thread.join()
    at = np.array(found["times"]) + found["begun"]
    return gaps(at[(at > marks[0] - 0.2) & (at < marks[1] + 0.2)]), result


def cancelled(server, ids, after):
    """Seconds from hanging up, `after` seconds into a prompt, until the server has nobody running and all pages free."""
    before = server.health()["kv_pages_free"]
    connection = http.client.HTTPConnection(server.address, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(dict(model="x", prompt=[int(i) for i in ids], max_tokens=1,
                                                                  stream=True)), HEADERS)
    time.sleep(after)
    held = server.health()["kv_pages_free"]
    connection.sock.close()
    start = time.perf_counter()
    while (now := server.health())["running"] or now["kv_pages_free"] < before:
        if time.perf_counter() - start > 60:
            raise SystemExit(f"a cancelled prompt holds on to its pages: {now}")
        time.sleep(0.002)
    return time.perf_counter() - start, before - held


def measure(server, options):
    """Rows of the table, as they come."""
    from qwentin import nano
    from qwentin.tokenizer import Tokenizer
    top, rng = Tokenizer(nano.DIRECTORY).size - 64, np.random.default_rng(7)
    prompt, most = lambda count: rng.integers(0, top, count), min(8000, options.long)
    server.stream(prompt(min(2000, options.long)), 8)                      # captures, compiles
    for count in options.cold:
        times, _ = server.stream(prompt(count), 1)
        yield dict(what="cold", tokens=count, ttft_s=times[0], tokens_per_s=count / times[0])
    alone, _ = beside(server, prompt(100), most, lambda: time.sleep(2))
    yield dict(what="neighbour alone", gap_ms=float(alone.max()), median_ms=float(np.median(alone)), tokens=len(alone))
    ids = prompt(options.long)
    shared, (times, _) = beside(server, prompt(100), most, lambda: server.stream(ids, 1))
    yield dict(what="neighbour of a long prompt", gap_ms=float(shared.max()), median_ms=float(np.median(shared)),
               tokens=len(shared), long_ttft_s=times[0])
    for _ in range(3):
        ids = np.concatenate([ids, prompt(options.suffix)])     # one token each: it is in no cache, the prompt is
        times, usage = server.stream(ids, 1)
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        if len(ids) - cached > 2 * options.suffix:
            raise SystemExit(f"a warm turn of {len(ids)} tokens found only {cached} of them")
        yield dict(what="warm", tokens=len(ids), computed=len(ids) - cached, ttft_s=times[0])
    seconds, pages = cancelled(server, prompt(options.long), 1.0)
    yield dict(what="cancel", freed_s=seconds, pages_held=pages)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--synthetic", action="store_true", help="say that the weights are made up")
    parser.add_argument("--serve", action="store_true", help="be the server (what this script starts)")
    parser.add_argument("--shape", default="27b")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--long", type=int, default=100_000)
    parser.add_argument("--cold", type=int, nargs="*", default=[4096, 32768])
    parser.add_argument("--suffix", type=int, default=300)
    parser.add_argument("--chunk", type=int, default=0, help="--prefill-chunk of the server; 0: its default")
    options = parser.parse_args()
    if options.serve:
        return serve_here(options)
    if not options.synthetic:
        parser.error("the weights are made up: say --synthetic")
    rows, begun = [], time.perf_counter()
    with Server(sys.argv[1:]) as server:
        print(f"{server.health()['device']}: started in {time.perf_counter() - begun:.1f} s", flush=True)
        for row in measure(server, options):
            rows.append(row)
            print("  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                            for name, value in row.items()), flush=True)
        health = server.health()
    if health["kv_pages_free"] != health["kv_pages"] or health["running"]:
        raise SystemExit(f"something is still held: {health}")
    print(json.dumps(dict(bench="turns", device=health["device"], synthetic=True, long=options.long, rows=rows)))


if __name__ == "__main__":
    main()
