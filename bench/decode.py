"""Decode speed of the numpy tower: tokens per second of one sequence, and of several at once, at a few depths.

    python bench/decode.py [--model DIR] [--tokens 128]
    python bench/decode.py --shape 27b --synthetic          on a GPU, the CUDA tower: decode_cuda.py, which has more options

Times `forward` alone (no sampling, no HTTP). Prints a table, then one JSON line. The floor printed beside it is the time
to read every float32 weight of a step once at the machine's own streaming rate, measured in the same run.
"""
import argparse
import json
import statistics
import sys
import time

import numpy as np

from machine import describe, streaming_rate
from qwentin import nano
from qwentin.kvpool import pages_for
from qwentin.model.cpu import CpuTower, tune_process
from qwentin.model.weights import open_checkpoint
from qwentin.step import Rows, pack

CASES = [(1, 0), (1, 512), (1, 4096), (4, 512), (16, 512)]       # sequences, depth


def rows(ids, slot, pages, length, outputs):
    return Rows(np.asarray(ids, np.int32), slot, pages, length, np.asarray(outputs, np.int32))


def decode(tower, ids, sequences, depth, tokens):
    """Median seconds of a step of `sequences` rows, each `depth` tokens deep."""
    each = pages_for(depth + tokens)
    tables = [np.arange(s * each, (s + 1) * each, dtype=np.int32) for s in range(sequences)]
    for s in range(sequences):
        tower.clear_slot(s)
        for at in range(0, depth, 512):
            tower.forward(pack([rows(ids[at:min(at + 512, depth)], s, tables[s], at, [])]))
    times = []
    for t in range(tokens):
        step = pack([rows(ids[depth + t:depth + t + 1], s, tables[s], depth + t, [0]) for s in range(sequences)])
        start = time.perf_counter()
        tower.forward(step)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(nano.DIRECTORY))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0)
    if "--synthetic" in sys.argv[1:]:
        import decode_cuda          # with numba and a GPU
        decode_cuda.main()
        return
    options = parser.parse_args()
    tune_process(options.threads)
    checkpoint = open_checkpoint(options.model)
    tower = CpuTower(checkpoint, pages=16 * pages_for(4096 + options.tokens) + 1, slots=16)
    ids = np.random.default_rng(0).integers(0, checkpoint.config.vocab_size, 8192)
    read = tower.weight_bytes() - tower.embed.nbytes
    rate = streaming_rate()
    print(describe())
    print(f"weights read by a step: {read / 1e6:.1f} MB float32; streaming read {rate / 1e9:.1f} GB/s; "
          f"floor {read / rate * 1e3:.2f} ms")
    print(f"{'sequences':>9} {'depth':>6} {'ms/step':>8} {'tok/s':>8}")
    result = []
    for sequences, depth in CASES:
        seconds = decode(tower, ids, sequences, depth, options.tokens)
        print(f"{sequences:9d} {depth:6d} {seconds * 1e3:8.2f} {sequences / seconds:8.1f}")
        result.append(dict(sequences=sequences, depth=depth, ms=seconds * 1e3, tok_s=sequences / seconds))
    print(json.dumps(dict(bench="decode", device=describe(), floor_ms=read / rate * 1e3, rows=result)))


if __name__ == "__main__":
    main()
