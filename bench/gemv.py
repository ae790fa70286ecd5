"""gemv on a GPU: bytes a second against a streaming read of the same bytes, in one call.

    python bench/gemv.py [FORMAT ...]        fp6, fp4, nvfp4, fp8: all of them

Parity of every case first. Then each format, 27B shape and number of rows, as graphs of dependent launches over buffers
past the L2; medians of event-timed replays. torch's bf16 product at 16 rows beside it, where torch is.
Prints a table, then one JSON line.
"""
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from qwentin.device import Device
from qwentin.kernels import gemv, lab, machines, stream_read, strips

FORMATS, ROWS = ("fp6", "fp4", "nvfp4", "fp8"), (1, 4, 8, 16, 32)
SHAPES = {"gate_up": (34816, 5120), "qkvz": (16384, 5120), "head": (248320, 5120), "down": (5120, 17408), "o": (5120, 6144)}


def compiled(name, groups, shared):
    """Have a kernel's machine code on the disk."""
    packing = gemv.PACKINGS[name]
    gemv.build(packing, groups, "f16", "f32", True, strips.depth_for(packing, groups, 2048 * groups, shared)).cubin("sm_90a")


def pool_of(device, packing, rng, nbytes):
    """Random tiles with sane scales, repeated on the device, at least so many bytes."""
    host = gemv.make(rng, n=16384, k=512, packing=packing)["w"].reshape(-1)
    pool = device.empty((-(-nbytes // host.size), host.size), np.uint8)
    for i in range(len(pool)):
        pool[i].upload(host)
    return pool


def torch_times(rows=16):
    """us of torch's bf16 product for each shape, rotating weights past the L2."""
    import torch
    out = {}
    for name, (n, k) in SHAPES.items():
        sets = max(1, min(8, 400_000_000 // (2 * n * k)) + 1)
        w = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
        x, y = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16), None
        for i in range(3):
            y = x @ w[i % sets].T
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for i in range(40):
            y = x @ w[i % sets].T
        end.record()
        torch.cuda.synchronize()
        out[name] = start.elapsed_time(end) / 40 * 1e3 + 0 * float(y[0, 0])
        del w
    return out


class Bench:
    """Activations, outputs and workspaces that all products share."""

    def __init__(self, device, rng):
        self.device, self.machine, self.rng, self.blocks = device, machines.Gpu(device), rng, device.multiprocessors
        self.x = device.upload(rng.standard_normal(max(ROWS) * 17408).astype(np.float16))
        self.out = device.empty((max(ROWS) * 248320,), np.float32)
        self.work = device.upload(strips.workspace(max(ROWS), self.blocks))
        self.sums = device.empty((32 * self.blocks,), np.uint32)
        self.alpha = device.upload(np.ones(248320 // 16, np.float32))

    def format(self, name):
        """Rows of numbers, printed as they come."""
        packing = gemv.PACKINGS[name]
        pool = pool_of(self.device, name, self.rng, max(int(np.prod(packing.shape(n, k))) for n, k in SHAPES.values()))
        return [row for shape in SHAPES for row in self.shape(name, packing, shape, pool.reshape(pool.nbytes))]

    def shape(self, name, packing, shape, pool):
        n, k = SHAPES[shape]
        nbytes = int(np.prod(packing.shape(n, k)))
        sets = min(24, pool.nbytes // nbytes)
        w = [pool[i * nbytes:(i + 1) * nbytes] for i in range(sets)]
        read = lab.measured(self.machine, lambda i: stream_read.launch(
            self.machine.stream, w[i % sets].reshape(nbytes // 4, dtype=np.uint32), self.sums, 32 * self.blocks), sets)
        times = {rows: lab.measured(self.machine, lambda i: gemv.launch(
            self.machine.stream, w[i % sets].reshape(*packing.shape(n, k)), self.x[:rows * k].reshape(rows, k),
            self.out[:rows * n].reshape(rows, n), self.work, n, packing, self.blocks,
            self.alpha[:n // 16] if packing.block == 16 else None, shared=self.device.shared_per_block), sets)
            for rows in ROWS}
        print(f"{name:5} {n:6} x {k:5} {nbytes / 1e6:7.1f} MB, read {read:6.1f} us ({nbytes / read / 1e6:.2f} TB/s):"
              + "".join(f" {us:6.1f} ({read / us:.0%})" for us in times.values())
              + f"; 16 and 32 rows {times[16] / times[1]:.2f}, {times[32] / times[1]:.2f} of 1", flush=True)
        return [dict(format=name, shape=shape, rows=rows, bytes=nbytes, us=us, read_us=read) for rows, us in times.items()]


def main():
    formats = sys.argv[1:] or FORMATS
    device = Device.open()
    wanted = [(name, groups, device.shared_per_block) for name in formats for groups in (4, 2, 1)]
    with ProcessPoolExecutor(min(16, os.cpu_count()), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compiled, *zip(*wanted)))
    bench = Bench(device, np.random.default_rng(0))
    for module in (stream_read, gemv):
        report = lab.check(module, bench.machine)
        print(report)
        if not report.ok:
            sys.exit("a kernel that is wrong is not timed")
    print("us and share of the read at", ", ".join(map(str, ROWS)), "rows")
    rows = [row for name in formats for row in bench.format(name)]
    try:
        print("torch bf16, 16 rows, us:", {k: round(v, 1) for k, v in torch_times().items()})
    except ImportError:
        print("torch is not here")
    print(json.dumps(dict(device=device.name, rows=rows)))


if __name__ == "__main__":
    main()
