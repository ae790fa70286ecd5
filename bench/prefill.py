"""Prefill speed of the numpy tower: prompt tokens per second by prompt length, in chunks as the server cuts them.

    python bench/prefill.py [--model DIR] [--chunk 512]

Times `forward` alone; logits of the last row only. Prints a table, then one JSON line, with the multiply-adds done and the
rate of a plain float32 matrix product measured in the same run as the ceiling.
"""
import argparse
import json
import time

import numpy as np

from machine import describe, matmul_rate
from qwentin import nano
from qwentin.kvpool import pages_for
from qwentin.model.cpu import CpuTower, tune_process
from qwentin.model.weights import open_checkpoint
from qwentin.step import Rows, pack

LENGTHS = [128, 512, 2048, 4096, 8000]
REPEATS = 3


def prefill(tower, ids, chunk):
    """Best seconds of REPEATS cold prefills of ids."""
    pages, best = np.arange(pages_for(len(ids)), dtype=np.int32), float("inf")
    for _ in range(REPEATS):
        tower.clear_slot(0)
        start = time.perf_counter()
        for at in range(0, len(ids), chunk):
            part = ids[at:at + chunk]
            last = [len(part) - 1] if at + chunk >= len(ids) else []
            tower.forward(pack([Rows(part, 0, pages, at, np.array(last, np.int32))]))
        best = min(best, time.perf_counter() - start)
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(nano.DIRECTORY))
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    threads = tune_process(options.threads)
    checkpoint = open_checkpoint(options.model)
    c = checkpoint.config
    tower = CpuTower(checkpoint, pages=pages_for(max(LENGTHS)), slots=1, threads=threads)
    ids = np.random.default_rng(0).integers(0, c.vocab_size, max(LENGTHS)).astype(np.int32)
    per_token = 2 * (tower.weight_bytes() - tower.embed.nbytes - tower.head.nbytes) // 4
    rate = matmul_rate()
    print(describe())
    print(f"dense products: {per_token / 1e6:.1f} MFLOP a token; plain matrix product {rate / 1e9:.0f} GFLOP/s; "
          f"ceiling {rate / per_token:.0f} tok/s before attention and the delta rule")
    print(f"{'tokens':>7} {'ms':>9} {'tok/s':>8}")
    result = []
    for length in LENGTHS:
        seconds = prefill(tower, ids[:length], options.chunk)
        print(f"{length:7d} {seconds * 1e3:9.1f} {length / seconds:8.0f}")
        result.append(dict(tokens=length, ms=seconds * 1e3, tok_s=length / seconds))
    print(json.dumps(dict(bench="prefill", device=describe(), chunk=options.chunk, rows=result)))


if __name__ == "__main__":
    main()
