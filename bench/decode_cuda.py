"""Decode of the CUDA tower on a GPU: milliseconds a round by rows and depth, and where they go, kernel by kernel.

    python bench/decode_cuda.py --shape 27b --synthetic [--weights fp6] [--kv e4m3] [--layers N]

Weights are synthetic (bench/synthetic.py), keys, values and states random; nothing is sampled. A round is one captured
graph, replayed: the first figure is the graph alone, the second a whole `forward` less its logits' copy. The kernel table
times each kernel's launches of one round, the same launches with the same arguments in a graph of their own; its sum is
compared with the round. Prints tables, then one JSON line.
"""
import argparse
import collections
import json
import statistics
import time

import numpy as np

from qwentin.device import Device, Event
from qwentin.kernels import lab, machines, stream_read, strips
from qwentin.kernels.build import Kernel
from qwentin.kvpool import PAGE, pages_for
from qwentin.model.backend import GpuBackend
from qwentin.model.cuda import CudaTower
from qwentin.model.rounds import split
from qwentin.step import Rows, pack
from synthetic import SHAPES, SyntheticSource, config_of

ROUNDS = ("1:0", "1:32768", "1:131072", "4:0", "8:0", "16:0", "32:0", "8:32768", "16:32768")
REPLAYS, REPEATS = 20, 5


class Listing:
    """A stream that lists launches."""

    def __init__(self):
        self.launches = []

    def launch(self, kernel, grid, *args, dependent=None):
        self.launches.append((kernel, grid, args, dependent))


def timed(backend, graph, replays=REPLAYS):
    """Median microseconds of a graph launch, back to back."""
    def once():
        start, end = Event(), Event()
        start.record(backend.stream)
        for _ in range(replays):
            graph.launch(backend.stream)
        end.record(backend.stream)
        return end.seconds_since(start) / replays * 1e6
    once()
    return statistics.median(once() for _ in range(REPEATS))


def step_of(rng, tower, rows, depth):
    """A round of `rows` rows of one sequence: a decode row, or a draft tree."""
    table = np.arange(pages_for(depth + rows + 1), dtype=np.int32)
    parents = None if rows == 1 else np.array([-1, *(max(0, i - 2) for i in range(1, rows))], np.int32)
    return pack([Rows(rng.integers(0, tower.config.vocab_size, rows).astype(np.int32), 0, table, depth,
                      np.arange(rows, dtype=np.int32), parents, commit=rows == 1)])


def fill(tower, rng):
    """Random keys, values and states: zeros would be cheap to move."""
    kv = tower.kv.reshape(tower.kv.nbytes, dtype=np.uint8)
    codes = rng.integers(0, 120, 1 << 26).astype(np.uint8)      # small positive e4m3 codes and bf16 bits
    block = tower.backend.upload(codes)
    for at in range(0, kv.nbytes, block.nbytes):
        part = kv[at:at + block.nbytes]
        tower.backend.copy(part, block[:part.nbytes])
    for pools in tower.pools:
        for array in (pools.S, pools.window):
            array.upload((rng.standard_normal(array.shape) * 0.1).astype(np.float32))
    tower.backend.synchronize()


def table(tower, b):
    """[(name, launches, us, bytes of weights, keys or state)] of a round's kernels."""
    backend, stream, listing = tower.backend, tower.backend.stream, Listing()
    backend.stream, backend.write, backend.read = listing, lambda *a: None, lambda *a: None
    try:
        tower.queue_forward(b)
    finally:
        backend.stream = stream
        del backend.write, backend.read
    groups = collections.defaultdict(list)
    for launch in listing.launches:
        kernel, grid, args, _ = launch
        sizes = [a.nbytes for a in args if hasattr(a, "nbytes")]
        groups[f"{kernel.name} {label(kernel, args)}".strip()].append((launch, max(sizes)))
    found = []
    for name, launches in groups.items():
        with stream.capture() as graph:
            for (kernel, grid, args, dependent), _ in launches:
                stream.launch(kernel, grid, *args, dependent=dependent)
        nbytes = sum(size for _, size in launches) if name.startswith(("gemv", "dense")) else 0
        found.append((name, len(launches), timed(backend, graph), nbytes))
    return found


def label(kernel, args):
    """The shape of a matrix, to tell its launches apart."""
    if kernel.name in ("gemv", "gemv_glu", "gemv_residual"):
        return f"{args[7]}x{args[9] * 128}"
    return f"{args[4]}x{args[5]}" if kernel.name == "dense" else ""


def measure(tower, rng, rows, depth):
    """(graph us, forward us, host us) of a round."""
    tower.clear_slot(0)
    step = step_of(rng, tower, rows, depth)
    tower.forward(step)                                         # captures; the next finds rows to replay, as in a real run
    times = []
    more = pack([Rows(step.tokens, 0, step.pages[0], depth, step.outputs, step.parents, step.commit[0],
                      np.zeros(0, np.int32) if rows == 1 else np.arange(min(rows, 4), dtype=np.int32))])
    tower.forward(more)
    for _ in range(20):
        start = time.perf_counter()
        b = tower.stage(more, split(more)[0]).buffers
        tower.replay("forward", b, tower.queue_forward)
        queued = time.perf_counter()
        tower.backend.synchronize()
        times.append((time.perf_counter() - start, queued - start))
    graph = tower.graphs["forward", b.bucket]
    us = timed(tower.backend, graph.graph)
    whole, host = (statistics.median(t) * 1e6 for t in zip(*times))
    return us, whole, host, b


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="27b")
    parser.add_argument("--synthetic", action="store_true", required=True, help="say that the weights are made up")
    parser.add_argument("--weights", default="fp6", help="packing of the matrices: fp6, fp8, fp4 or nvfp4")
    parser.add_argument("--kv", default="e4m3", choices=["e4m3", "bf16"])
    parser.add_argument("--plain", action="store_true", help="start every kernel when the one before has ended, to compare")
    parser.add_argument("--depth", type=int, default=strips.DEPTH, help="stages of gemv's ring, to compare")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--context", type=int, default=131072 + 256)
    parser.add_argument("--rounds", nargs="*", default=ROUNDS, metavar="ROWS:DEPTH")
    parser.add_argument("--tables", nargs="*", default=ROUNDS[:1], metavar="ROWS:DEPTH", help="rounds to list")
    options = parser.parse_args()
    strips.DEPTH = options.depth     # more than half of the shared memory in any case
    if options.plain:
        Kernel.waits = lambda kernel, chip: False
    device = Device.open()
    backend, rng = GpuBackend(device), np.random.default_rng(1)
    rate = lab.time(stream_read, machines.Gpu(device), words=1 << 28, parts=4 * device.multiprocessors)
    streaming = rate.bytes / rate.us / 1e3
    config = config_of(options.shape, options.layers)
    start = time.perf_counter()
    tower = CudaTower(config, SyntheticSource(config, backend, options.weights), pages_for(options.context), 1,
                      kv=options.kv, active=1)
    fill(tower, rng)
    print(f"{device.name}: {options.shape} synthetic, {config.num_hidden_layers} layers, {options.weights}, {options.kv} "
          f"keys; built in {time.perf_counter() - start:.1f} s; stream_read of 1.07 GB: {streaming:.0f} GB/s; scratch "
          f"{tower.scratch.nbytes / 1e6:.0f} MB, page {PAGE}")
    print(f"{'rows':>4} {'depth':>7} {'graph ms':>9} {'forward ms':>10} {'host us':>8}")
    result = []
    for name in options.rounds:
        rows, depth = map(int, name.split(":"))
        us, whole, host, b = measure(tower, rng, rows, depth)
        print(f"{rows:4d} {depth:7d} {us / 1e3:9.3f} {whole / 1e3:10.3f} {host:8.0f}", flush=True)
        result.append(dict(rows=rows, depth=depth, graph_ms=us / 1e3, forward_ms=whole / 1e3, host_us=host))
        if name in options.tables:
            found = table(tower, b)
            for kernel, count, each, nbytes in sorted(found, key=lambda f: -f[2]):
                share = f"{nbytes / each / 1e3:7.0f} GB/s {nbytes / each / 1e3 / streaming:5.0%}" if nbytes else ""
                print(f"       {kernel:<28} x{count:<4d} {each:9.1f} us  {each / count:7.2f} each  {share}")
            total = sum(f[2] for f in found)
            print(f"       sum {total:.1f} us, {total / us:.1%} of the round")
            result[-1]["kernels"] = [dict(name=n, launches=c, us=e, bytes=s) for n, c, e, s in found]
    print(json.dumps(dict(bench="decode_cuda", context=options.context, device=device.name, weights=options.weights,
                          kv=options.kv, layers=config.num_hidden_layers, streaming_gb_s=streaming, rows=result)))


if __name__ == "__main__":
    main()
