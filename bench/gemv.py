"""gemv on a GPU: bytes a second against a streaming read of the same bytes, in one call.

    python bench/gemv.py

Parity of every case first. Then each format, 27B shape and number of rows, as graphs of dependent launches over buffers
past the L2 and of plain ones; medians of event-timed replays. torch's bf16 product at 16 rows beside it, where torch is.
Prints a table, then one JSON line.
"""
import json
import sys

import numpy as np

from qwentin.device import Device
from qwentin.kernels import gemv, lab, machines, stream_read, strips

SHAPES = {"gate_up": (34816, 5120), "qkvz": (16384, 5120), "head": (248320, 5120), "down": (5120, 17408), "o": (5120, 6144)}


def pool_of(device, packing, rng, nbytes=1_030_000_000):
    """Random tiles with sane scales, repeated on the device."""
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


def main():
    device = Device.open()
    machine, rng, blocks = machines.Gpu(device), np.random.default_rng(0), device.multiprocessors
    for module in (stream_read, gemv):
        report = lab.check(module, machine)
        print(report)
        if not report.ok:
            sys.exit("a kernel that is wrong is not timed")
    x, out = device.upload(rng.standard_normal((32, 17408)).astype(np.float16)), device.empty((32, 248320), np.float32)
    work, sums, rows_of_table = device.upload(strips.workspace(32, blocks)), device.empty((32 * blocks,), np.uint32), []
    for name in ("fp6", "fp4", "fp8"):
        packing, pool = gemv.PACKINGS[name], pool_of(device, name, rng)
        for shape, (n, k) in SHAPES.items():
            nbytes = int(np.prod(packing.shape(n, k)))
            sets = max(1, pool.nbytes // nbytes)
            flat = pool.reshape(pool.nbytes)

            def weights(i):
                return flat[i % sets * nbytes:(i % sets + 1) * nbytes] if nbytes <= flat.nbytes else None
            if nbytes > flat.nbytes:
                continue
            words = [w.reshape(nbytes // 4, dtype=np.uint32) for w in map(weights, range(sets))]
            read = lab.measured(machine, lambda i: stream_read.launch(machine.stream, words[i % sets], sums, 32 * blocks),
                                min(sets, 24))
            for rows in (1, 4, 8, 16, 32):
                some = x.reshape(32 * 17408)[:rows * k].reshape(rows, k)
                to = out.reshape(out.size)[:rows * n].reshape(rows, n)
                times = [lab.measured(machine, lambda i: gemv.launch(
                    machine.stream, weights(i).reshape(*packing.shape(n, k)), some, to, work, n, packing, blocks,
                    dependent=dependent, shared=device.shared_per_block), min(sets, 24)) for dependent in (True, False)]
                rows_of_table.append(dict(format=name, shape=shape, rows=rows, bytes=nbytes, dependent_us=times[0],
                                          plain_us=times[1], read_us=read))
                print(f"{name} {shape:8} {rows:3} rows: {times[0]:7.2f} us dependent, {times[1]:7.2f} plain, "
                      f"read {read:7.2f}: {nbytes / times[0] / 1e6:.2f} TB/s, {read / times[0]:.0%} of the read", flush=True)
    try:
        print("torch bf16, 16 rows, us:", {k: round(v, 1) for k, v in torch_times().items()})
    except ImportError:
        print("torch is not here")
    print(json.dumps(dict(device=device.name, rows=rows_of_table)))


if __name__ == "__main__":
    main()
