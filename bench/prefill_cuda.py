"""Prefill of the CUDA tower on a GPU: tokens a second of cold prompts, where a chunk's time goes, and memory as planned.

    python bench/prefill_cuda.py --shape 27b --synthetic [--weights fp6] [--format f16] [--kv e4m3] [--tokens 512 4096]

Weights are synthetic (bench/synthetic.py); states begin at zero, as they do. First a check: a short prompt wide and in
rounds of 32 on the same tower of --check layers, and a decode step behind each; products of e4m3 activations err 2.6 % of
their size in the root mean square (3 bits of mantissa, rounded: 2^-3 / sqrt 12, over 1.4 for a mean mantissa), of f16 ones
2^-7 times as much, and a layer has four of them behind one another. Then, per number of tokens, the median of cold prefills,
host time included, logits of the last row on the host. The kernel table times each kernel's launches of one chunk in a graph
of their own, beside what its bytes take at the streaming rate or its products at the peak of their format. Prints tables,
then one JSON line.
"""
import argparse
import collections
import dataclasses
import json
import multiprocessing
import statistics
import time

import numpy as np

from decode_cuda import Listing, timed
from qwentin.device import Device
from qwentin.kernels import lab, machines, stream_read
from qwentin.kvpool import pages_for
from qwentin.model.backend import GpuBackend, Replay
from qwentin.model.cuda import CudaTower
from qwentin.model.graphs import record_chunk
from qwentin.model.memory import CountingBackend
from qwentin.model.wide import SIZES, Wide, chunks
from qwentin.step import Rows, pack
from synthetic import SHAPES, SyntheticSource, config_of

PEAK = 1979e12              # products of bytes on an H200; of 16 bits half
LONG = 65536                # tokens: longer prompts come last
WORST = {"e4m3": 0.25, "f16": 0.02}     # relative error of a few layers; a wrong formula errs by 1
CARD = dict(chip="sm_90a", multiprocessors=132, shared=227 << 10)


class Imagined(CountingBackend):
    """No memory and no GPU: launches are listed."""

    def __init__(self):
        super().__init__(**CARD)
        self.stream = machines.Recorder()

    def copy(self, *_):
        pass

    write = read = clear = copy

    def staging(self, shape, dtype):
        return np.zeros(shape, dtype)

    def synchronize(self):
        pass

    def record(self, queue):
        return Replay(queue)


def compile_ahead(options):
    """Machine code of all that will be launched, made by as many processes as there are cores and kept on the disk."""
    backend = Imagined()
    config = config_of(options.shape, 4)
    tower = CudaTower(config, SyntheticSource(config, backend, options.weights), 16, 1, kv=options.kv, active=1, wide=512,
                      prefill=options.format)
    for what in (lambda: tower.forward(prompt(tower, 300, 0, hidden=True)), lambda: in_rounds(tower, prompt(tower, 300, 0)),
                 lambda: tower.forward(prompt(tower, 1, 300)), lambda: tower.forward(prompt(tower, 2, 301)),
                 lambda: tower.settle(0)):
        what()
    compile_all(backend.stream.kernels)


def compile_all(kernels):
    """Their machine code for sm_90a."""
    COMPILED[:] = kernels
    start = time.perf_counter()
    with multiprocessing.get_context("fork").Pool() as pool:
        slow = sorted(pool.map(compiled, range(len(COMPILED)), chunksize=1))[-3:]
    print(f"{len(COMPILED)} kernels compiled in {time.perf_counter() - start:.1f} s, slowest {slow}", flush=True)


COMPILED = []               # forked processes find the kernels here: they cannot be sent


def compiled(i):
    start = time.perf_counter()
    COMPILED[i].cubin("sm_90a")
    return round(time.perf_counter() - start, 1), COMPILED[i].name


def prompt(tower, rows, length, hidden=False, seed=0):
    """A step of so many rows of slot 0 behind `length`; logits of the last."""
    ids = np.random.default_rng(seed + length).integers(0, tower.config.vocab_size, rows + 1).astype(np.int32)
    table = np.arange(pages_for(length + rows), dtype=np.int32)
    return pack([Rows(ids[:-1], 0, table, length, np.array([rows - 1], np.int32), follows=ids[1:])], hidden)


def in_rounds(tower, step):
    """forward() as it is without chunks."""
    wide, tower.wide = tower.wide, None
    try:
        return tower.forward(step)
    finally:
        tower.wide = wide


def agree(options, device, rng):
    """A prompt wide and in rounds, and a decode step behind each: relative errors of hiddens, keys, states."""
    config = config_of(options.shape, options.check)
    backend = GpuBackend(device)
    tower = CudaTower(config, SyntheticSource(config, backend, options.weights), 8, 1, kv=options.kv, active=1, wide=512,
                      prefill=options.format)
    found = []
    for run in (tower.forward, lambda step: in_rounds(tower, step)):
        tower.clear_slot(0)
        first = dataclasses.replace(prompt(tower, 300, 0, True), follows=None)
        second = dataclasses.replace(prompt(tower, 200, 300, True), follows=None)
        a, b = run(first), run(second)
        logits = b.logits                               # before the next step writes over them
        c = tower.forward(prompt(tower, 1, 500, True))
        tower.settle(0)
        state = np.stack([p.S[0].download() for p in tower.pools])
        found.append(dict(first=a.hidden, second=b.hidden, decode=c.hidden, state=state, logits=logits))
    errors = {name: float(np.linalg.norm(x - found[0][name]) / np.linalg.norm(x)) for name, x in found[1].items()}
    finite = all(np.isfinite(x).all() for each in found for x in each.values())
    print(f"wide against rounds, {config.num_hidden_layers} layers, relative errors: "
          + ", ".join(f"{name} {error:.3f}" for name, error in errors.items()), flush=True)
    if not finite or max(errors.values()) > WORST[options.format]:
        raise SystemExit("what is wrong is not timed")
    return errors


def cold(tower, tokens, chunk):
    """Seconds of a cold prefill, host and all."""
    tower.clear_slot(0)
    tower.backend.synchronize()
    start = time.perf_counter()
    for at in range(0, tokens, chunk):
        tower.forward(prompt(tower, min(chunk, tokens - at), at, hidden=True))
    return time.perf_counter() - start


def table(tower, rows, length, streaming):
    """[(kernel and shape, launches, us, floor in us)] of a chunk."""
    backend, stream, listing = tower.backend, tower.backend.stream, Listing()
    step = prompt(tower, rows, length, hidden=True)
    tower.forward(step)
    c = tower.wide.arena.stage(step, chunks(step, 0, rows)[0], step.outputs)
    backend.stream = listing
    try:
        start = time.perf_counter()
        tower.wide.queue(c)
        host = time.perf_counter() - start
    finally:
        backend.stream = stream
    groups = collections.defaultdict(list)
    for launch in listing.launches:
        groups[name_of(launch[0], launch[2])].append(launch)
    found = []
    for name, launches in groups.items():
        with stream.capture() as graph:
            for kernel, grid, args, dependent in launches:
                stream.launch(kernel, grid, *args, dependent=dependent)
        found.append((name, len(launches), timed(backend, graph, 2),
                      sum(floor(kernel, args, streaming) for kernel, _, args, _ in launches)))
    return found, host


def name_of(kernel, args):
    return f"gemm {args[6]}x{inputs(args)}" if kernel.name == "gemm_sm90a" else kernel.name


def inputs(args):
    """Of a product: tiles times the inputs of one."""
    return args[8] * args[0].shape[-1]


def floor(kernel, args, streaming):
    """Microseconds of its products at the peak, or of its bytes at the streaming rate; 0 for kernels of state or pages."""
    if kernel.name == "gemm_sm90a":
        return 2 * args[5] * args[6] * inputs(args) * args[0].dtype.itemsize / PEAK * 1e6
    if kernel.name in ("unpack_e4m3", "unpack_f16", "tile_rows", "quantise_rows", "rmsnorm", "rmsnorm_tiles", "swiglu",
                       "gated_norm"):
        return sum(a.nbytes for a in args if hasattr(a, "nbytes")) / streaming / 1e3
    return 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="27b")
    parser.add_argument("--synthetic", action="store_true", required=True, help="say that the weights are made up")
    parser.add_argument("--weights", default="fp6", choices=["fp6", "fp8"])
    parser.add_argument("--format", default="e4m3", choices=["e4m3", "f16"], help="of activations")
    parser.add_argument("--kv", default="e4m3", choices=["e4m3", "bf16"])
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--check", type=int, default=4, help="layers of the tower that is checked first")
    parser.add_argument("--chunk", type=int, default=4096, help="rows at once")
    parser.add_argument("--resident", action="store_true", help="measure again with the matrices kept unpacked")
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 4096, 32768, 131072])
    parser.add_argument("--tables", type=int, nargs="*", default=[4096, 512], help="rows of chunks to list")
    options = parser.parse_args()
    compile_ahead(options)
    device, rng = Device.open(), np.random.default_rng(1)
    errors = agree(options, device, rng)
    rate = lab.time(stream_read, machines.Gpu(device), words=1 << 28, parts=4 * device.multiprocessors)
    streaming, config, backend = rate.bytes / rate.us / 1e3, config_of(options.shape, options.layers), GpuBackend(device)
    empty, start = device.free_bytes(), time.perf_counter()
    tower = CudaTower(config, SyntheticSource(config, backend, options.weights), pages_for(max(options.tokens)) + 1, 1,
                      kv=options.kv, active=1, wide=options.chunk, prefill=options.format)
    print(f"{device.name}: {options.shape} synthetic, {config.num_hidden_layers} layers, {options.weights}, "
          f"{options.format} activations, {options.kv} keys, chunks of {options.chunk} rows, "
          f"{tower.wide.nbytes / 1e6:.0f} MB; built in {time.perf_counter() - start:.1f} s; "
          f"stream_read {streaming:.0f} GB/s",
          flush=True)
    capture(tower)
    rows = [measured(tower, tokens, options.chunk) for tokens in options.tokens if tokens <= LONG]
    listed = tables(tower, options.tables, streaming)
    rows += [measured(tower, tokens, options.chunk) for tokens in options.tokens if tokens > LONG]
    taken = empty - device.free_bytes()
    planned = backend_bytes(options, config)
    print(f"device memory taken {taken / 1e9:.3f} GB, counted before {planned / 1e9:.3f}; kernels' code is in the first")
    kept = with_resident(tower, options) if options.resident else []
    print(json.dumps(dict(bench="prefill_cuda", device=device.name, weights=options.weights, format=options.format,
                          kv=options.kv, errors=errors, layers=config.num_hidden_layers, chunk=options.chunk, taken=taken,
                          planned=planned, rows=rows, resident=kept, tables=listed)))


def with_resident(tower, options):
    """Rows of the table with the matrices kept unpacked."""
    tower.wide = None
    for key in [key for key in tower.graphs if key[0] == "wide"]:
        del tower.graphs[key]
    tower.wide = Wide(tower, options.chunk, pages_for(max(options.tokens)) + 1, options.format, resident=True)
    capture(tower)
    print(f"with matrices kept unpacked, {tower.wide.nbytes / 1e9:.1f} GB:", flush=True)
    return [measured(tower, tokens, options.chunk) for tokens in options.tokens if tokens <= LONG]


def capture(tower):
    """The graphs of chunks, as towers.py has them recorded before the first request."""
    tower.wide.settle_matrices()
    for rows in {*SIZES, tower.wide.most}:
        record_chunk(tower, rows)


def measured(tower, tokens, chunk):
    """A row of the table, as a dict."""
    cold(tower, min(tokens, chunk), chunk)
    seconds = statistics.median(cold(tower, tokens, chunk) for _ in range(5 if tokens <= 8192 else 1))
    print(f"{tokens:7d} tokens {seconds * 1e3:9.1f} ms {tokens / seconds:9.0f} tok/s", flush=True)
    return dict(tokens=tokens, seconds=seconds)


def tables(tower, counts, streaming):
    """Print where the time of chunks of so many rows goes."""
    listed = []
    for count in counts:
        found, host = table(tower, count, 0, streaming)
        total = sum(f[2] for f in found)
        print(f"{count} rows: kernels' sum {total / 1e3:.1f} ms ({count / total * 1e6:.0f} tok/s), listing the launches "
              f"{host * 1e3:.1f} ms")
        for name, launches, us, least in sorted(found, key=lambda f: -f[2]):
            share = f"{least / us:5.0%} of its floor's rate" if least else ""
            print(f"       {name:<24} x{launches:<5d} {us:10.1f} us {us / launches:8.2f} each {us / total:5.1%} {share}")
        listed.append(dict(rows=count, kernels=[dict(name=n, launches=c, us=u, floor=f) for n, c, u, f in found]))
    return listed


def backend_bytes(options, config):
    """What a tower on a backend that only counts adds up to."""
    backend = Imagined()
    source = SyntheticSource(config, backend, options.weights)
    CudaTower(config, source, pages_for(max(options.tokens)) + 1, 1, kv=options.kv, active=1, wide=options.chunk,
              prefill=options.format)
    return backend.bytes - source.pool.nbytes


if __name__ == "__main__":
    main()
