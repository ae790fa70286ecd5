"""Speculation on the numpy tower: what it accepts, by depth and by kind of task, and what that is worth in time.

    python bench/accept.py                     speed, plain and with adaptive trees, by kind of task
    python bench/accept.py --fixed --depth 8 --guesses 8 --width 1    chains of 8, whatever they cost

Prompts: the 120 conversations of tests/data/eval.jsonl, to their end; 20 beginnings of the standard library's modules, which
are documentation first, of DOCS_PROMPT tokens, continued by 512. Greedy. Speed is tokens after the first by the seconds
between the first and the last, plain and speculative by turns, so that a busy machine slows both; each is asked twice.
"cpu" is the ratio of the engine thread's processor seconds, which other programs disturb less (with --threads 1).
"""
import argparse
import importlib.util
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

from machine import describe
from qwentin.config import EngineConfig
from qwentin.engine import Engine
from qwentin.request import Delta, Done, Finish, GenerateRequest, SamplingParams
from qwentin.speculation import Speculation
from qwentin.treeplan import Fixed

EVAL = Path(__file__).resolve().parents[1] / "tests" / "data" / "eval.jsonl"
MODULES = ("argparse", "ast", "asyncio.events", "bisect", "calendar", "collections", "configparser", "contextlib", "csv",
           "dataclasses", "datetime", "decimal", "difflib", "email.message", "functools", "gettext", "heapq", "logging",
           "optparse", "textwrap")
DOCS_PROMPT, DOCS_TOKENS = 192, 512
KINDS = (("tool", lambda c: c["tools"] and c["tool_calls"]), ("needle", lambda c: c["prompt_tokens"] > 120),
         ("sort", lambda c: "sort" in last(c) or "order" in last(c)),
         ("sums", lambda c: any(w in last(c) for w in (" + ", "add ", "plus", "minus", " - ", "*", "compute"))),
         ("other", lambda c: True))


def last(conversation) -> str:
    return [m["content"] for m in conversation["messages"] if m["role"] == "user"][-1].lower()


def prompts(engine, evals: int, docs: int) -> list[tuple[str, object, int | None]]:
    """(kind, ids, most tokens) of every prompt."""
    found = []
    for line in EVAL.read_text().splitlines()[:evals]:
        case = json.loads(line)
        text = engine.chat_template.render(case["messages"], case["tools"], enable_thinking=case["enable_thinking"])
        found.append((next(name for name, fits in KINDS if fits(case)), engine.tokenizer.encode(text), None))
    for name in MODULES[:docs]:
        source = Path(importlib.util.find_spec(name).origin).read_text()
        found.append(("documentation", engine.tokenizer.encode(source)[:DOCS_PROMPT], DOCS_TOKENS))
    return found


class Reply:
    """A sink: ids, usage, and the engine thread's seconds of processor between the first and the last token."""

    def __init__(self):
        self.events, self.done, self.first, self.cpu_s = [], threading.Event(), None, 0.0

    def __call__(self, event):
        self.events.append(event)
        if isinstance(event, Delta) and self.first is None:
            self.first = time.thread_time()
        if isinstance(event, Done):
            self.cpu_s = time.thread_time() - (self.first or 0.0)
            self.done.set()

    def wait(self) -> "Reply":
        self.done.wait()
        assert not any(isinstance(e, Finish) and e.reason == "error" for e in self.events), self.events
        self.usage = self.events[-1].usage
        self.tokens = [t for e in self.events if isinstance(e, Delta) for t in e.tokens]
        self.ids = [t.id for t in self.tokens]
        return self


class Asker:
    """One engine, asked one prompt after the other, or several at once."""

    def __init__(self, options, **fields):
        self.options = options
        self.engine = Engine.load(EngineConfig(threads=options.threads, max_model_len=4096, max_seqs=options.at_once,
                                               kv_tokens=(1 + options.at_once) * 4096, cache_mib=0, **fields))
        self.engine.start()
        self.count = 0

    def submit(self, ids, most, **more) -> Reply:
        """Continue ids greedily, to the model's own end or for exactly `most` tokens."""
        reply, self.count = Reply(), self.count + 1
        stop_ids = frozenset() if most else None
        self.engine.submit(GenerateRequest(str(self.count), ids, SamplingParams(temperature=0.0), max_tokens=most or 512,
                                           stop_ids=stop_ids, **more), reply)
        return reply

    def ask(self, ids, most, **more) -> Reply:
        return self.submit(ids, most, **more).wait()


def speculate(asker, options, plan=None, draft="auto"):
    """Give an asker's engine other drafters; it is idle."""
    engine = asker.engine
    engine.speculation = Speculation(engine, replace(engine.config, draft=draft), True, plan)


def speed(options) -> None:
    """Plain and speculative by turns; a table by kind."""
    plain = Asker(options, draft="off")
    fast = Asker(options, draft=options.draft, draft_depth=options.depth, draft_guesses=options.guesses)
    if options.fixed:
        speculate(fast, options, Fixed(options.depth, options.guesses, options.width), options.draft)
    sums: dict[str, list[float]] = {}
    offered, taken = {}, {}
    for kind, ids, most in prompts(plain.engine, options.evals, options.docs):
        for turn in range(2):
            slow, quick = plain.ask(ids, most), fast.ask(ids, most)
            if slow.ids != quick.ids:
                print(f"differs: {kind}, {len(slow.ids)} tokens")
            s = quick.usage.speculated
            row = sums.get(kind, [0.0] * 9)
            found = (len(slow.ids) - 1, slow.usage.decode_s, quick.usage.decode_s, slow.cpu_s, quick.cpu_s, s.rounds,
                     s.plain, s.guesses, s.accepted)
            sums[kind] = row = [a + b for a, b in zip(row, found)]
            for depth, (a, b) in enumerate(zip(s.offered, s.taken)):
                at = offered.setdefault(kind, [0] * 64), taken.setdefault(kind, [0] * 64)
                at[0][depth] += a
                at[1][depth] += b
    sums["eval.jsonl"] = [sum(v) for v in zip(*(sums[kind] for kind in sums if kind != "documentation"))]
    print(f"{'kind':>14} {'tokens':>7} {'plain':>7} {'tok/s':>7} {'ratio':>6} {'cpu':>5} {'a round':>8} {'guesses':>8} "
          f"{'plain steps':>12}  right at depth 1, 2, ...")
    rows = []
    for kind, (tokens, slow_s, quick_s, slow_cpu, quick_cpu, rounds, steps, guesses, accepted) in sums.items():
        odds = [round(b / a, 2) for a, b in zip(offered.get(kind, ()), taken.get(kind, ())) if a > 4]
        rows.append(dict(kind=kind, tokens=tokens, plain_tok_s=tokens / slow_s, tok_s=tokens / quick_s,
                         ratio=slow_s / quick_s, cpu_ratio=slow_cpu / quick_cpu, a_round=1 + accepted / max(1, rounds),
                         guesses=guesses / max(1, rounds), plain_share=steps / max(1, steps + rounds), odds=odds))
        r = rows[-1]
        print(f"{kind:>14} {tokens:7.0f} {r['plain_tok_s']:7.1f} {r['tok_s']:7.1f} {r['ratio']:6.2f} "
              f"{r['cpu_ratio']:5.2f} {r['a_round']:8.2f} {r['guesses']:8.1f} {r['plain_share']:12.0%}  "
              + " ".join(f"{o:.2f}" for o in odds))
    costs = fast.engine.speculation.plan.costs
    print("ms: " + ", ".join(f"{name} {1e3 * line.first:.2f} + {1e3 * line.slope:.3f} a row more"
                             for name, line in vars(costs).items()))
    for asker in (plain, fast):
        asker.engine.stop()
    print(json.dumps(dict(bench="accept", device=describe(), load=os.getloadavg()[0], threads=options.threads, rows=rows)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed", action="store_true", help="always the largest tree")
    parser.add_argument("--depth", type=int, default=EngineConfig.draft_depth)
    parser.add_argument("--guesses", type=int, default=EngineConfig.draft_guesses)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--draft", default="auto", choices=("auto", "head", "lookup"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--evals", type=int, default=120)
    parser.add_argument("--docs", type=int, default=20)
    parser.set_defaults(at_once=1)
    options = parser.parse_args()
    print(f"{describe()}, load {os.getloadavg()[0]:.1f}")
    speed(options)


if __name__ == "__main__":
    main()
