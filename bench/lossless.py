"""Greedy decoding with speculation against plain decoding, in one process: do they generate the same ids?

    python bench/lossless.py --device cpu                             all shapes; hours on a busy machine
    python bench/lossless.py --device cuda --seconds 60               as many as fit, the most different ones first
    python bench/lossless.py --device cuda --seconds 60 --from 11     and on from there

The 120 conversations of tests/data/eval.jsonl, to their end, and 20 beginnings of the standard library's modules, continued
by 512 tokens, --at-once of them together. A shape is a depth of 0 to 8, a chain or a tree (three guesses below a row), with
prompt lookup beside the draft head or without; each always guesses as much as it may.

Ids may part only where plain decoding's best two tokens are within 0.02 in log-probability, which is how far apart their
float32 logits are: such places are counted and listed. Prints a table, then one JSON line; exits with 1 if anything else
differs.

The time on an H200, 140 prompts, 16 at once: 43 s to compile and to decode plainly, then 3 to 8 s a shape, most of it the
host's; 33 shapes.
"""
import argparse
import json
import sys
import time

from accept import Asker, prompts, speculate
from machine import describe
from qwentin.treeplan import Fixed

NEAR = 0.02
DEPTHS = (8, 1, 4, 2, 6, 3, 7, 5)
KINDS = (("auto", 3), ("head", 1), ("head", 3), ("auto", 1))        # who drafts, width


def shapes(depths):
    """(who drafts, depth, width): the most different first; a depth of 0 has no shape."""
    found = [("off", 0, 1)] if 0 in depths else []
    turns = [(KINDS[(i + turn) % 4], depth) for turn in range(4) for i, depth in enumerate(d for d in DEPTHS if d in depths)]
    return found + [(draft, depth, width) for (draft, width), depth in turns]


def run(asker, cases, **more):
    """All prompts, as many together as the engine takes: (replies, seconds)."""
    begun = time.perf_counter()
    replies = [asker.submit(ids, most, **more) for _, ids, most in cases]
    return [reply.wait() for reply in replies], time.perf_counter() - begun


def gaps(reply):
    """How far apart the best two tokens were at each place, in log-probability."""
    return [token.top[0][1] - token.top[1][1] for token in reply.tokens]


def parting(got, want):
    """Where two lists of ids part; None if they do not."""
    return next((i for i, (a, b) in enumerate(zip(got + [-1], want + [-1])) if a != b), None)


def compare(asker, cases, plain, shape):
    """One shape's row of the table."""
    draft, depth, width = shape
    guesses = depth if width == 1 else min(31, 2 * depth + 2)
    speculate(asker, asker.options, Fixed(depth, guesses, width) if depth else None, draft)
    asker.engine.speculation.hang_s = 1e6     # on a busy machine a step of 16 trees takes its time
    replies, seconds = run(asker, cases)
    row = dict(draft=draft, depth=depth, width=width, prompts=len(cases), rounds=0, accepted=0, equal=0, near=[], wrong=[],
               seconds=round(seconds, 1))
    for number, (reply, (ids, gap)) in enumerate(zip(replies, plain)):
        if reply.usage.speculated:
            row["rounds"] += reply.usage.speculated.rounds
            row["accepted"] += reply.usage.speculated.accepted
        at = parting(reply.ids, ids)
        if at is None:
            row["equal"] += 1
        else:
            close = gap[min(at, len(gap) - 1)]
            row["near" if close < NEAR else "wrong"].append((number, at, round(close, 4)))
    print(f"{draft:>6} {depth:5} {'chain' if width == 1 else 'tree':>6} {row['rounds']:7} "
          f"{1 + row['accepted'] / max(1, row['rounds']):8.2f} {row['equal']:6} {len(row['near']):5} {len(row['wrong']):6} "
          f"{seconds:8.1f}", flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "emulator"))
    parser.add_argument("--evals", type=int, default=120)
    parser.add_argument("--docs", type=int, default=20)
    parser.add_argument("--depths", type=int, nargs="+", default=range(9))
    parser.add_argument("--at-once", type=int, default=16, help="prompts that run together")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first shape's number")
    parser.add_argument("--count", type=int, default=99, help="shapes at most")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no shape after so many")
    parser.add_argument("--threads", type=int, default=1)
    options, begun = parser.parse_args(), time.perf_counter()
    asker = Asker(options, device=options.device, draft="off", max_queue=200)
    cases = prompts(asker.engine, options.evals, options.docs)
    replies, seconds = run(asker, cases, logprobs=2)
    plain = [(reply.ids, gaps(reply)) for reply in replies]
    tokens, close = sum(len(ids) for ids, _ in plain), sum(g < NEAR for _, gap in plain for g in gap)
    print(f"{describe()}, {asker.engine.placed.device}: {len(cases)} prompts, {tokens} tokens, plainly in {seconds:.1f} s; "
          f"at {close} places the best two are within {NEAR}")
    print(f"{'drafts':>6} {'depth':>5} {'shape':>6} {'rounds':>7} {'a round':>8} {'equal':>6} {'near':>5} {'differ':>6} "
          f"{'s':>8}")
    rows, left = [], shapes(options.depths)[options.first:options.first + options.count]
    while left and time.perf_counter() - begun < options.seconds:
        rows.append(compare(asker, cases, plain, left.pop(0)))
    wrong = [(row["draft"], row["depth"], row["width"], *where) for row in rows for where in row["wrong"]]
    near = sorted({where for row in rows for where in row["near"]})
    print(f"shapes {options.first} to {options.first + len(rows) - 1}, {len(left)} left; "
          f"{sum(r['rounds'] for r in rows)} rounds; near ties (prompt, token, apart): {near}; wrong: {wrong}")
    asker.engine.stop()
    print(json.dumps(dict(bench="lossless", device=asker.engine.placed.device, tokens=tokens, places=close, rows=rows)))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
