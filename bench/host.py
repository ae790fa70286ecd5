"""What the host does between one graph's end and the next one's launch, in a served decode round of the CUDA tower, by part.

    python bench/host.py [--shape nano|27b] [--tokens 200] [--rows 1] [--draft off] [--dry]

A whole engine: scheduler, drafters if any, tower, sampler, text. Nano is real; the 27B's shapes have made-up weights and
nano's tokenizer. Each request is timed greedy and with top_k 20, top_p 0.95, temperature 0.7. `between` is measured from the
moment the host knows that a round has ended until the next graph is launched; parts are medians of each function's own time,
from a second run, in which watching them takes its time too.
--dry launches nothing, so that the host's own work can be looked at where there is no GPU. A table, then one JSON line.
"""
import argparse
import collections
import json
import statistics
import threading
import time

import numpy as np

from qwentin.config import EngineConfig
from qwentin.device import Device
from qwentin.engine import Engine
from qwentin.chat_template import ChatTemplate
from qwentin.kvpool import pages_for
from qwentin.model.backend import EmulatorBackend, GpuBackend, Replay
from qwentin.model.cuda import CudaTower
from qwentin.model.matrix import Source
from qwentin.model.results import Results
from qwentin.model.weights import open_checkpoint
from qwentin.request import Done, GenerateRequest, SamplingParams
from qwentin.sampler import Sampler
from qwentin.sequence import Job, Sequence
from qwentin.tokenizer import Tokenizer
from qwentin.towers import Placed

SAMPLING = {"greedy": SamplingParams(temperature=0.0),
            "top_k": SamplingParams(temperature=0.7, top_k=20, top_p=0.95, seed=1)}
CONTEXT, SETTLED = 1024, 20             # rounds before a median is taken


class DryBackend(EmulatorBackend):
    """Nothing runs: results are what memory happened to hold."""

    def record(self, queue):
        return Replay(lambda: None)


class Clock:
    """Own seconds of watched functions, by label."""

    def __init__(self):
        self.own, self.stack, self.ended = collections.Counter(), [], None
        self.rounds = []                # (what was launched, seconds between, own seconds by label)

    def watch(self, owner, label, *names):
        for name in names:
            setattr(owner, name, self.timed(getattr(owner, name), label))

    def timed(self, inner, label):
        def run(*args, **more):
            begun = time.perf_counter()
            self.stack.append(0.0)
            try:
                return inner(*args, **more)
            finally:
                now = time.perf_counter()
                self.own[label] += now - begun - self.stack.pop()
                if self.stack:
                    self.stack[-1] += now - begun
                if label == WAITING:
                    self.ended = now
                elif label == LAUNCH and self.ended is not None:
                    self.rounds.append((args[0], now - self.ended, dict(self.own)))
                    self.own.clear()
                    self.ended = None
        return run


WAITING, LAUNCH = "waiting for the device", "graph launch"


def build(options):
    """An engine on the GPU, or on nothing."""
    if options.shape == "27b" and not options.dry:
        from prefill_cuda import compile_ahead
        compile_ahead(argparse.Namespace(shape="27b", weights="fp6", kv="bf16"))
    backend = DryBackend() if options.dry else GpuBackend(Device.open())
    config = EngineConfig(draft=options.draft, max_model_len=CONTEXT, kv_tokens=4 * CONTEXT, max_seqs=max(options.rows, 1),
                          cache_mib=0, kv="bf16")
    tokenizer = Tokenizer(config.model)
    checkpoint = open_checkpoint(config.model)
    model, source = checkpoint.config, Source(checkpoint, backend)
    if options.shape == "27b":
        from synthetic import SyntheticSource, config_of
        model = config_of("27b", options.layers)
        source = SyntheticSource(model, backend)
    pages = pages_for(4 * CONTEXT)
    tower = CudaTower(model, source, pages, options.rows + 1, kv="bf16", active=options.rows, valid=tokenizer.size)
    free, begun = backend.free_bytes() or 0, time.perf_counter()
    if options.shape == "nano":             # else at first use: of the 27B's four are needed
        tower.capture()
    print(f"{len(tower.graphs)} graphs captured in {time.perf_counter() - begun:.1f} s, "
          f"{(free - (backend.free_bytes() or 0)) / 2**20:.0f} MiB of the device")
    template = ChatTemplate(config.model, {n: tokenizer.special(n) for n in ("bos_token", "eos_token", "pad_token")}, {})
    return Engine(config, model, Placed(tower, pages, options.rows + 1, 1, backend.name), tokenizer, template)


def watch(engine, clock):
    """What tells how long the host takes."""
    clock.watch(engine.tower.backend, WAITING, "synchronize")
    clock.watch(engine.tower, LAUNCH, "replay")


def watch_parts(engine, clock):
    """What it does meanwhile."""
    tower = engine.tower
    clock.watch(tower, "integers of the round", "stage")
    clock.watch(tower, "ledger", "begin")
    clock.watch(tower, "tower, the rest", "forward", "draft_chain", "forward_mtp")
    clock.watch(Results, "results", "add", "make_way", "output")
    clock.watch(engine.scheduler, "schedule", "pick", "build", "commit")
    clock.watch(Sampler, "choose a token", "choose")
    clock.watch(Sequence, "text", "append")
    clock.watch(Job, "emit", "emit")
    clock.watch(engine.speculation, "speculation", "plan_step", "ran", "finish_round", "walk")
    clock.watch(engine, "engine, the rest", "accept", "run_step", "read_inbox")


def generate(engine, clock, sampling, options):
    """What was launched: times, median us between, the slowest tenth's least, median own us by part."""
    done = threading.Semaphore(0)

    def sink(event):
        if isinstance(event, Done):
            done.release()
    rng = np.random.default_rng(3)
    for i in range(options.rows):
        engine.submit(GenerateRequest(f"{time.perf_counter()}-{i}", rng.integers(0, 4000, 20).astype(np.int32),
                                      max_tokens=options.tokens, sampling=sampling, stop_ids=frozenset()), sink)
    clock.rounds.clear()
    for _ in range(options.rows):
        done.acquire(timeout=120)
    found = {}
    for what in sorted({what for what, *_ in clock.rounds}):
        gaps, parts = zip(*[each[1:] for each in clock.rounds if each[0] == what][SETTLED:] or [(0.0, {})] * 2)
        middle = {label: statistics.median(each.get(label, 0.0) for each in parts) * 1e6 for label in set().union(*parts)}
        found[what] = dict(times=len(gaps), between_us=statistics.median(gaps) * 1e6,
                           slowest_tenth_us=statistics.quantiles(gaps, n=10)[-1] * 1e6,
                           parts=dict(sorted(middle.items(), key=lambda item: -item[1])))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["nano", "27b"], default="nano")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rows", type=int, default=1, help="requests at once")
    parser.add_argument("--draft", default="off", help="drafters, as the server's option")
    parser.add_argument("--dry", action="store_true", help="launch nothing")
    options = parser.parse_args()
    engine, clock = build(options), Clock()
    watch(engine, clock)
    engine.start()
    generate(engine, clock, SAMPLING["top_k"], options)         # captures, warms
    alone = {name: generate(engine, clock, sampling, options) for name, sampling in SAMPLING.items()}
    watch_parts(engine, clock)
    found = {name: generate(engine, clock, sampling, options) for name, sampling in SAMPLING.items()}
    engine.stop()
    for name, watched in found.items():
        for what, row in watched.items():
            plain = alone[name].get(what, row)
            if plain["times"] <= SETTLED:
                continue
            print(f"{options.shape}, {options.rows} rows, {name}, before {what}, {plain['times']} times: "
                  f"{plain['between_us']:.0f} us, a tenth over {plain['slowest_tenth_us']:.0f}; "
                  f"parts, watched, {row['between_us']:.0f}:")
            print("    " + ", ".join(f"{label} {us:.1f}" for label, us in row["parts"].items() if us >= 0.1))
    print(json.dumps(dict(bench="host", shape=options.shape, rows=options.rows, device=engine.placed.device, alone=alone,
                          found=found)))


if __name__ == "__main__":
    main()
