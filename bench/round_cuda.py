"""Speculative rounds of the CUDA tower on a GPU with synthetic acceptance: what a round costs, draft, verify and host apart.

    python bench/round_cuda.py --synthetic [--weights fp6] [--kv e4m3] [--chance 0.8] [--drafts 3 5 7] [--depth 0 32768]
    python bench/round_cuda.py --synthetic --drafts 7 --vocabulary 0 131072 32768 --window 0 4096     of the draft head

27B's shape, weights made up (bench/synthetic.py), so nothing that is drafted would ever be accepted: whether a guess is
right is decided by a seeded draw instead, `--chance` for each depth that is reached. All work of a round is done: the draft
head runs over the rows accepted last time with their hiddens, then once for each further depth, in one go or, with --levels,
with an exchange with the host after each; the chain is verified in one step that first replays what was accepted; best ids
and hiddens go to the host. Prints a table, then one JSON line.
"""
import argparse
import itertools
import json
import statistics
import time

import numpy as np

from decode_cuda import fill, timed
from qwentin.device import Device
from qwentin.kvpool import PAGE, pages_for
from qwentin.model.backend import GpuBackend
from qwentin.model.buffers import Bucket
from qwentin.model.cuda import CudaTower
from qwentin.step import Rows, pack
from synthetic import SyntheticSource, config_of

WARM, ROUNDS = 6, 60


class Speculating:
    """One sequence that is drafted and verified, round after round."""

    def __init__(self, tower, depth, drafts, options, window):
        self.tower, self.drafts, self.window, self.rng = tower, drafts, window, np.random.default_rng(7)
        self.chance, self.levels = options.chance, options.levels
        self.length = max(depth, 1)                 # committed rows; the head has seen one less
        self.table = np.arange(pages_for(depth + (WARM + ROUNDS) * (drafts + 1) + 64), dtype=np.int32)
        self.accepted = np.zeros(0, np.int32)       # rows of the tree verified last
        self.hidden = np.zeros((1, tower.config.hidden_size), np.float32)
        tower.clear_slot(0)

    def draft(self):
        """The chain of guesses."""
        tower, base = self.tower, self.length + len(self.accepted) - len(self.hidden)
        tokens, hidden, guesses = np.full(len(self.hidden), 7, np.int32), self.hidden, []
        first = self.head_rows(tokens, base)
        if not self.levels:
            return [int(row.ids[0]) for row in tower.draft_chain(pack([first]), hidden, self.drafts)]
        for depth in range(self.drafts):
            out = tower.forward_mtp(pack([first], hidden=True), hidden)
            guesses.append(int(out.best[0][0, 0]))
            base, hidden = base + len(first.tokens), out.hidden[-1:]
            first = self.head_rows(np.array(guesses[-1:], np.int32), base)
        return guesses

    def head_rows(self, tokens, base):
        """The head's rows of these tokens, the last of them wanted; it reads the window."""
        start = max(0, (base - self.window) // PAGE * PAGE) if self.window else 0
        return Rows(tokens, 0, self.table[start // PAGE:], base - start, np.array([len(tokens) - 1], np.int32), shift=start)

    def round(self):
        """(tokens, seconds of drafting, of verifying)."""
        begun = time.perf_counter()
        guesses = self.draft()
        drafted = time.perf_counter()
        count = 1 + self.drafts
        rows = Rows(np.array([7, *guesses], np.int32), 0, self.table, self.length, np.arange(count, dtype=np.int32),
                    commit=False, accepted=self.accepted)
        hidden = self.tower.forward(pack([rows], hidden=True)).hidden
        kept = 1
        while kept <= self.drafts and self.rng.random() < self.chance:
            kept += 1
        self.length += len(self.accepted)
        self.accepted, self.hidden = np.arange(kept, dtype=np.int32), hidden[:kept]
        end = time.perf_counter()
        return kept, drafted - begun, end - drafted

    def graphs(self):
        """Microseconds of the graphs that a round replays: (of its draft steps, of its verify step)."""
        tower = self.tower
        took = {key: timed(tower.backend, replay.graph, 10) for key, replay in tower.graphs.items()}
        first = [us for (what, _), us in took.items() if what == "mtp"]
        links = [us for (what, _), us in took.items() if what.startswith("link")][:self.drafts - 1]
        verify = took["forward", Bucket.of(1 + self.drafts, 1, 1 + self.drafts, 1 + self.drafts)]
        mean = statistics.mean(first)
        return mean * self.drafts if self.levels else mean + sum(links), verify


def choose_from(tower, rows):
    """Give the tower's draft head so many ids to choose from, if it has not; what was captured with others goes."""
    if rows == (0 if tower.draft_head is tower.head else tower.draft_head.matrix.n):
        return
    tower.draft_head = tower.head.first(rows)
    tower.graphs = {key: graph for key, graph in tower.graphs.items() if key[0] != "mtp" and not key[0].startswith("link")}


def measure(tower, depth, drafts, options, vocabulary, window):
    """A row of the table, as a dict."""
    choose_from(tower, vocabulary)
    talk = Speculating(tower, depth, drafts, options, window)
    rounds = [talk.round() for _ in range(WARM + ROUNDS)][WARM:]
    tokens = statistics.mean(r[0] for r in rounds)
    draft, verify = (statistics.mean(r[i] for r in rounds) * 1e3 for i in (1, 2))
    steps, step = (us / 1e3 for us in talk.graphs())
    return dict(depth=depth, vocabulary=vocabulary, window=window, drafts=drafts, tokens=tokens, round_ms=draft + verify,
                draft_ms=draft, verify_ms=verify,
                draft_steps_ms=steps, verify_step_ms=step, host_ms=draft + verify - steps - step,
                tokens_s=tokens / (draft + verify) * 1e3)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--synthetic", action="store_true", required=True, help="say that both are made up")
    parser.add_argument("--shape", default="27b")
    parser.add_argument("--weights", default="fp6")
    parser.add_argument("--kv", default="e4m3", choices=["e4m3", "bf16"])
    parser.add_argument("--chance", type=float, default=0.8)
    parser.add_argument("--drafts", type=int, nargs="*", default=[3, 5, 7])
    parser.add_argument("--depth", type=int, nargs="*", default=[0, 32768])
    parser.add_argument("--vocabulary", type=int, nargs="*", default=[0], help="ids the draft head chooses from; 0: all")
    parser.add_argument("--window", type=int, nargs="*", default=[0], help="tokens it reads; 0: all")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--levels", action="store_true", help="draft level by level, to compare")
    options = parser.parse_args()
    device = Device.open()
    backend, config = GpuBackend(device), config_of(options.shape, options.layers)
    pages = pages_for(max(options.depth) + 2048)
    tower = CudaTower(config, SyntheticSource(config, backend, options.weights), pages, 1, kv=options.kv, active=1)
    fill(tower, np.random.default_rng(1))
    print(f"{device.name}: {options.shape}, synthetic {options.weights} weights, acceptance {options.chance} a depth")
    rows = []
    for case in itertools.product(options.depth, options.drafts, options.vocabulary, options.window):
        depth, drafts, vocabulary, window = case
        rows.append(measure(tower, depth, drafts, options, vocabulary, window))
        print("  ".join(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
                        for name, value in rows[-1].items()), flush=True)
    print(json.dumps(dict(bench="round_cuda", device=device.name, weights=options.weights, chance=options.chance,
                          rows=rows)))


if __name__ == "__main__":
    main()
