"""The CUDA tower on this machine's GPU against the numpy tower: nano, traces, trees, the draft head, greedy continuations.

    python bench/parity.py [--model DIR] [--kv bf16] [--prompts 20] [--tokens 48]

Prints what differs, then one JSON line. Greedy ids may part only where the float32 logits of the best two are within 0.02;
each such place is counted, and the rest of that continuation is not compared.
"""
import argparse
import json
from pathlib import Path

import numpy as np

from qwentin import nano
from qwentin.device import Device
from qwentin.model.backend import GpuBackend
from qwentin.model.cpu import CpuTower
from qwentin.model.cuda import CudaTower
from qwentin.model.matrix import Source
from qwentin.model.trace import trace_cpu
from qwentin.model.weights import open_checkpoint
from qwentin.step import Rows, pack

NEAR = 0.02
EVAL = Path(__file__).resolve().parents[1] / "tests" / "data" / "eval.jsonl"
TABLE = np.array([5, 2, 7, 1, 6, 3], np.int32)


def rows(tokens, length, **more):
    more.setdefault("outputs", np.array([len(tokens) - 1], np.int32))
    return Rows(np.asarray(tokens, np.int32), 0, TABLE, length, **more)


def traces(gpu, cpu, ids):
    """The largest relative error of a part over prompts of several lengths, and the first that is too large."""
    worst, first = 0.0, None
    for n in (1, 2, 3, 4, 8, 17, 32):
        for tower in (gpu, cpu):
            tower.clear_slot(0)
        step = pack([rows(ids[:n], 0)])
        got, want = gpu.trace(step), trace_cpu(cpu, step)
        first = first or got.first_difference(want)
        worst = max(worst, *got.errors(want).values())
    return worst, first


def greedy(gpu, cpu, prompt, count):
    """(tokens compared, near ties, wrong tokens, largest logit error) of a continuation fed to both."""
    outs = []
    for tower in (gpu, cpu):
        tower.clear_slot(0)
        outs.append(tower.forward(pack([rows(prompt, 0)])).logits[-1])
    length, worst = len(prompt), 0.0
    for i in range(count):
        got, want = outs
        worst = max(worst, float(np.abs(got - want).max()))
        token, other = int(want.argmax()), int(got.argmax())
        if token != other:
            gap = float(want[token] - want[other])
            return i, gap < NEAR, gap >= NEAR, worst
        outs = [tower.forward(pack([rows([token], length)])).logits[-1] for tower in (gpu, cpu)]
        length += 1
    return count, 0, 0, worst


def tree(gpu, cpu, ids):
    """Largest logit error over a tree, its accepted path with gaps, and a chain behind."""
    parents, worst = np.array([-1, 0, 0, 1, 2, 4, 5, 5], np.int32), 0.0
    for tower in (gpu, cpu):
        tower.clear_slot(0)
    steps = [rows(ids[:40], 0), rows(ids[40:48], 40, parents=parents, commit=False, outputs=np.arange(8, dtype=np.int32)),
             rows(ids[48:51], 40, accepted=np.array([0, 2, 4, 5, 7]), outputs=np.arange(3, dtype=np.int32)),
             rows(ids[51:52], 48)]
    for step in steps:
        got, want = (tower.forward(pack([step])).logits for tower in (gpu, cpu))
        worst = max(worst, float(np.abs(got - want).max()))
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(nano.DIRECTORY))
    parser.add_argument("--kv", default="bf16", choices=["bf16", "e4m3"])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    gpu = CudaTower(checkpoint.config, Source(checkpoint, GpuBackend(Device.open())), 8, 2, kv=options.kv, active=2)
    cpu, rng = CpuTower(checkpoint, 8, 2), np.random.default_rng(0)
    ids = rng.integers(0, 4000, 64)
    worst, first = traces(gpu, cpu, ids)
    print(f"traces: largest relative error of a part {worst:.2e}; first beyond 1e-2: {first}")
    print(f"tree, accepted path, chain: largest logit error {tree(gpu, cpu, ids):.3f}")
    texts = [json.loads(line)["reference_ids"] for line in EVAL.read_text().splitlines()]
    found = [greedy(gpu, cpu, text[:rng.integers(2, max(len(text) // 2, 3))], options.tokens)
             for text in texts[:options.prompts]]
    compared, near, wrong, errors = (list(x) for x in zip(*found))
    print(f"greedy: {sum(compared)} tokens equal, {sum(near)} near ties, {sum(wrong)} wrong; "
          f"largest logit error {max(errors):.3f}")
    print(json.dumps(dict(bench="parity", kv=options.kv, trace=worst, tokens=sum(compared), near=sum(near), wrong=sum(wrong),
                          logit_error=max(errors))))


if __name__ == "__main__":
    main()
