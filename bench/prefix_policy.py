"""Which snapshots to take and which to lose: tokens computed by four agents that share one prefix cache, by policy.

    python bench/prefix_policy.py [--seeds 4]

No model runs: prompts are random ids, the cache is the real one, a request takes the snapshots that the scheduler would.
The agents have instructions of 9,400 to 26,900 tokens (as measured in tests/clients), take turns at random, start a new
session now and then, edit, and ask for titles on the side. Rows are the capacity in snapshots, what a waypoint's tokens
count, and how far apart snapshots lie within a prompt; columns the mean tokens computed by kind of request, and the share of
turns that computed more than what was new and one chunk. Prints a table, then one JSON line.
"""
import argparse
import json
import random

import numpy as np

from qwentin import prefix
from qwentin.kvpool import KVPool
from qwentin.slots import StateSlots

CHUNK, TAIL, PAGES = 512, [1, 2, 3, 4, 5], 8192
AGENTS, REQUESTS = (9400, 12200, 26900, 24300), 80
SPACINGS = {"every chunk": lambda at, end: CHUNK, "an eighth before, half to come": lambda at, end: max(
    CHUNK, min(at // 8, (end - at) // 2))}


def cache(waypoint: float, capacity: int) -> prefix.PrefixCache:
    class Weighed(prefix.PrefixCache):
        def cost(self, entry):
            whole = super().cost(entry)
            return whole * waypoint / prefix.MINOR if len(entry.node.children) == 1 else whole
    return Weighed(KVPool(PAGES), StateSlots(capacity), capacity)


class Traffic:
    """Four agents at one cache."""

    def __init__(self, kept, spacing, seed: int):
        self.cache, self.spacing, self.rng, self.ids = kept, spacing, random.Random(seed), np.random.default_rng(seed)
        self.roots = [self.some(n) for n in AGENTS]
        self.computed = {"turn": [], "new session": [], "edit": []}
        self.over = []

    def some(self, count: int) -> list[int]:
        return self.ids.integers(0, 4000, count).tolist()

    def keep(self, ids) -> None:
        ids = np.array(ids, np.int32)
        place = None if self.cache.holds(ids) else self.cache.make_place(len(ids))
        if place:
            self.cache.insert(ids, *place)

    def request(self, stable: list[int], reply: list[int]) -> int:
        """The tokens that a prompt of `stable` and a tail computes, after keeping what the scheduler would keep."""
        ids = stable + TAIL
        entry = self.cache.match(np.array(ids[:-1], np.int32))
        at = kept = known = entry.length if entry else 0
        if entry:
            self.cache.use(entry)
        while at < len(ids):
            at = min(at + CHUNK, len(stable) if at < len(stable) else len(ids))
            if at in (len(stable), len(ids)) or at - kept >= self.spacing(at, len(ids)):
                self.keep(ids[:at])
                kept = at
        self.keep((ids + reply)[:-1])
        return len(ids) - known

    def run(self) -> None:
        talks = [root + self.some(60) for root in self.roots]
        before = [len(talk) for talk in talks]
        past = [[talk] for talk in talks]
        for talk in talks:
            self.request(talk, self.some(20))
        for _ in range(REQUESTS):
            i = self.rng.randrange(len(talks))
            kind = self.rng.choices(("turn", "new session", "edit"), (80, 15, 5))[0]
            if kind == "new session":
                talks[i], past[i] = self.roots[i] + self.some(60), []
            elif kind == "edit" and past[i]:
                talks[i] = self.rng.choice(past[i]) + self.some(30)
            reply = self.some(self.rng.randint(10, 60))
            self.computed[kind].append(self.request(talks[i], reply))
            if kind == "turn":
                self.over.append(self.computed[kind][-1] > len(talks[i]) - before[i] + CHUNK)
            past[i].append(talks[i])
            before[i] = len(talks[i])
            talks[i] = talks[i] + TAIL + reply + self.some(self.rng.randint(20, 400))
            if self.rng.random() < 0.4:
                self.request(self.some(900), self.some(10))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    rows = []
    print(f"{'kept':>5} {'waypoint':>8} {'snapshots':32} {'turn':>6} {'new':>6} {'edit':>6} {'all':>6} {'over':>6}")
    for capacity in (12, 24, 40, 106):
        for waypoint in (1 / 4, 1 / 8, 1 / 16):
            for name, spacing in SPACINGS.items():
                runs = [Traffic(cache(waypoint, capacity), spacing, seed) for seed in range(options.seeds)]
                for traffic in runs:
                    traffic.run()
                kinds = {kind: round(np.mean(sum((t.computed[kind] for t in runs), []))) for kind in runs[0].computed}
                every = round(np.mean(sum((sum(t.computed.values(), []) for t in runs), [])))
                over = round(100 * np.mean(sum((t.over for t in runs), [])), 1)
                rows.append(dict(capacity=capacity, waypoint=waypoint, spacing=name, **kinds, all=every, over=over))
                print(f"{capacity:5d} {waypoint:8.4f} {name:32}", *(f"{count:6d}" for count in (*kinds.values(), every)),
                      f"{over:5.1f}%")
    print(json.dumps(dict(bench="prefix_policy", seeds=options.seeds, rows=rows)))


if __name__ == "__main__":
    main()
