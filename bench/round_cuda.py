"""Speculative rounds of the CUDA tower on a GPU with synthetic acceptance: what a round costs, draft, verify and host apart.

    python bench/round_cuda.py --synthetic [--weights fp6] [--kv e4m3] [--chance 0.8] [--drafts 3 5 7] [--depth 0 32768]

27B's shape, weights made up (bench/synthetic.py), so nothing that is drafted would ever be accepted: whether a guess is
right is decided by a seeded draw instead, `--chance` for each depth that is reached. All work of a round is done: the draft
head runs over the rows accepted last time with their hiddens, then once for each further depth; the chain is verified in one
step that first replays what was accepted; best ids and hiddens go to the host each time. Prints a table, then one JSON line.
"""
import argparse
import json
import statistics
import time

import numpy as np

from decode_cuda import fill, timed
from qwentin.device import Device
from qwentin.kvpool import pages_for
from qwentin.model.backend import GpuBackend
from qwentin.model.cuda import CudaTower
from qwentin.model.rounds import split
from qwentin.step import Rows, pack
from synthetic import SyntheticSource, config_of

WARM, ROUNDS = 6, 60


class Speculating:
    """One sequence that is drafted and verified, round after round."""

    def __init__(self, tower, depth, drafts, chance, rng):
        self.tower, self.drafts, self.chance, self.rng = tower, drafts, chance, rng
        self.length = max(depth, 1)                 # committed rows; the head has seen one less
        self.table = np.arange(pages_for(depth + (WARM + ROUNDS) * (drafts + 1) + 64), dtype=np.int32)
        self.accepted = np.zeros(0, np.int32)       # rows of the tree verified last
        self.hidden = np.zeros((1, tower.config.hidden_size), np.float32)
        self.graphs = {}                            # what -> replay and how often a round
        self.ids = tower.backend.staging((32, 64), np.uint32)
        tower.clear_slot(0)

    def run(self, what, queue, rows, hidden=None):
        """A replay and the exchange with the host: best ids, hiddens."""
        step, tower = pack([rows], hidden=True), self.tower
        part = tower.stage(step, split(step)[0], hidden)
        tower.replay(what, part.buffers, queue)
        tower.backend.read(part.buffers.best_ids[:part.outputs], self.ids[:part.outputs])
        tower.backend.read(part.buffers.normed[:part.rows], tower.host_hidden[:part.rows])
        tower.backend.synchronize()
        self.graphs.setdefault((what, part.buffers.bucket), tower.graphs[what, part.buffers.bucket])
        return self.ids[:part.outputs, 0].astype(np.int32), tower.host_hidden[:part.rows].copy()

    def round(self):
        """(tokens, seconds of drafting, of verifying)."""
        begun, tower = time.perf_counter(), self.tower
        base = self.length + len(self.accepted) - len(self.hidden)
        tokens, hidden, guesses = np.full(len(self.hidden), 7, np.int32), self.hidden, []
        for depth in range(self.drafts):
            rows = Rows(tokens, 0, self.table, base, np.array([len(tokens) - 1], np.int32))
            ids, found = self.run("mtp", tower.queue_mtp, rows, hidden)
            base, tokens, hidden = base + len(tokens), ids, found[-1:]
            guesses.append(int(ids[0]))
        drafted = time.perf_counter()
        count = 1 + self.drafts
        rows = Rows(np.array([7, *guesses], np.int32), 0, self.table, self.length, np.arange(count, dtype=np.int32),
                    commit=False, accepted=self.accepted)
        _, hidden = self.run("forward", tower.queue_forward, rows)
        kept = 1
        while kept <= self.drafts and self.rng.random() < self.chance:
            kept += 1
        self.length += len(self.accepted)
        self.accepted, self.hidden = np.arange(kept, dtype=np.int32), hidden[:kept]
        end = time.perf_counter()
        return kept, drafted - begun, end - drafted


def measure(tower, depth, drafts, chance):
    """A row of the table, as a dict."""
    talk = Speculating(tower, depth, drafts, chance, np.random.default_rng(7))
    rounds = [talk.round() for _ in range(WARM + ROUNDS)][WARM:]
    tokens = statistics.mean(r[0] for r in rounds)
    draft, verify = (statistics.mean(r[i] for r in rounds) * 1e3 for i in (1, 2))
    device = {what: statistics.mean(timed(tower.backend, replay.graph, 10) / 1e3
                                    for (each, _), replay in talk.graphs.items() if each == what)
              for what in ("mtp", "forward")}
    busy = device["forward"] + drafts * device["mtp"]
    return dict(depth=depth, drafts=drafts, tokens=tokens, round_ms=draft + verify, draft_ms=draft, verify_ms=verify,
                draft_step_ms=device["mtp"], verify_step_ms=device["forward"], host_ms=draft + verify - busy,
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
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    device = Device.open()
    backend, config = GpuBackend(device), config_of(options.shape, options.layers)
    pages = pages_for(max(options.depth) + 2048)
    tower = CudaTower(config, SyntheticSource(config, backend, options.weights), pages, 1, kv=options.kv, active=1)
    fill(tower, np.random.default_rng(1))
    print(f"{device.name}: {options.shape}, synthetic {options.weights} weights, acceptance {options.chance} a depth")
    rows = []
    for depth in options.depth:
        for drafts in options.drafts:
            row = measure(tower, depth, drafts, options.chance)
            rows.append(row)
            print("  ".join(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
                            for name, value in row.items()), flush=True)
    print(json.dumps(dict(bench="round_cuda", device=device.name, weights=options.weights, chance=options.chance,
                          rows=rows)))


if __name__ == "__main__":
    main()
