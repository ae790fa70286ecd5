"""The 120 conversations of tests/data/eval.jsonl, greedily over HTTP, from two servers: do they generate the same ids?

    python bench/eval_http.py --device cuda --kv bf16 [--model DIR] [--concurrent 16] [--chunks 0 1 7 64 100 512]
                              [--formats e4m3 f16]

The reference is the same server with --device cpu, run first. Ids may part only where the reference's best two tokens are
within 0.02 in log-probability (their difference is that of the float32 logits); such places are counted and listed. With
--chunks, a server for each number of prompt tokens in a step and each --prefill-format. Prints what differs and the speed,
then one JSON line.
"""
import argparse
import json
import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qwentin import nano

NEAR = 0.02
CASES = [json.loads(line) for line in
         (Path(__file__).resolve().parents[1] / "tests" / "data" / "eval.jsonl").read_text().splitlines()]


class Server:
    """`python -m qwentin.server` with these options, until the end of the block."""

    def __init__(self, *options):
        self.options = options

    def __enter__(self):
        self.process = subprocess.Popen([sys.executable, "-m", "qwentin.server", "--port", "0", *self.options],
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in self.process.stdout:
            found = re.search(r"ready: (http://[\d.]+:\d+)", line)
            if found:
                self.url = found.group(1)
                return self
        raise SystemExit(f"the server did not start: {self.options}")

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)

    def call(self, path, body=None):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode() if body else None,
                                         {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request, timeout=600))


def ask(server, case):
    """(ids, gap between the two best at each)."""
    body = dict(model="nano", messages=case["messages"], temperature=0, logprobs=True, top_logprobs=2,
                enable_thinking=case["enable_thinking"], return_token_ids=True)
    if case["tools"]:
        body["tools"] = case["tools"]
    choice = server.call("/v1/chat/completions", body)["choices"][0]
    entries = choice["logprobs"]["reasoning_content"] + choice["logprobs"]["content"]
    return choice["token_ids"], [e["top_logprobs"][0]["logprob"] - e["top_logprobs"][1]["logprob"] for e in entries]


def answers(concurrent, *options):
    """(answers, seconds, what /health says) of a server with these options."""
    with Server(*options) as server, ThreadPoolExecutor(concurrent) as pool:
        ask(server, CASES[0])
        start = time.perf_counter()
        found = list(pool.map(lambda case: ask(server, case), CASES))
        return found, time.perf_counter() - start, server.call("/health")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(nano.DIRECTORY))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--concurrent", type=int, default=16)
    parser.add_argument("--reference", type=Path, help="where the reference's answers are, or will be kept")
    parser.add_argument("--chunks", nargs="*", default=["0"])
    parser.add_argument("--formats", nargs="*", default=["e4m3"])
    options = parser.parse_args()
    if options.reference and options.reference.exists():
        wanted, seconds = json.loads(options.reference.read_text())
    else:
        wanted, seconds, _ = answers(options.concurrent, "--model", options.model, "--device", "cpu")
        if options.reference:
            options.reference.write_text(json.dumps([wanted, seconds]))
    print(f"the reference: {seconds:.1f} s", flush=True)
    rows, health = [], {"device": "cpu"}
    for chunk, format in ((c, f) for c in options.chunks for f in options.formats):
        got, faster, health = answers(options.concurrent, "--model", options.model, "--device", options.device,
                                      "--kv", options.kv, "--prefill-chunk", chunk, "--prefill-format", format)
        equal, near, wrong = compared(got, wanted)
        print(f"{health['device']}, chunk {chunk}, {format} ({health.get('prefill')}): {equal} of {len(CASES)} equal; near "
              f"ties {near}; wrong {wrong}; {faster:.1f} s", flush=True)
        rows.append(dict(chunk=chunk, format=format, equal=equal, near=len(near), wrong=len(wrong), seconds=faster))
    print(json.dumps(dict(bench="eval_http", device=health["device"], model=Path(options.model).name, kv=options.kv,
                          rows=rows, health=health)))


def compared(got, wanted):
    """(how many are equal, where others part at a near tie, where elsewhere)."""
    equal, near, wrong = 0, [], []
    for number, ((ids, _), (reference, gaps)) in enumerate(zip(got, wanted)):
        if ids == reference:
            equal += 1
            continue
        at = next(i for i, (a, b) in enumerate(zip(ids + [None], reference + [None])) if a != b)
        gap = round(gaps[at], 4) if at < len(gaps) else None
        (near if gap is not None and gap < NEAR else wrong).append((number, at, gap))
    return equal, near, wrong


if __name__ == "__main__":
    main()
