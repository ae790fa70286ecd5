"""gemm_sm90a on 27B's shapes beside torch's fp8 product (cuBLASLt) in the same call, and what prepares its operands.

    python bench/gemm.py [--rows 4096 2048 512]

Parity of every case first. Codes of normal numbers, so that multipliers switch as they would; TFLOP/s from the median of
graph replays, out in f16; `gated` is the form with silu(gate) * up in its epilogue. torch is asked for bf16 out, scales for
whole tensors, which is its fastest form. Prints a table, then one JSON line.
"""
import argparse
import json

import numpy as np

from qwentin import numerics
from qwentin.device import Device
from qwentin.kernels import gemm_sm90a, lab, machines, quantise_rows, unpack_e4m3

SHAPES = ((34816, 5120), (16672, 5120), (5120, 17408), (14336, 5120), (5120, 6144))
TILE = gemm_sm90a.TILE


def tiles(device, rng, rows, k):
    """Codes of normal numbers as tiles; 4 million of them, again and again."""
    codes = numerics.E4M3.encode(64 * rng.standard_normal(1 << 22).astype(np.float32))
    return device.upload(np.resize(codes, (-(-rows // TILE), k // TILE, TILE, TILE)))


def scales(device, rng, *shape):
    return device.upload(rng.uniform(0.5, 2, shape).astype(np.float32))


def ours(machine, rng, m, n, k):
    """Microseconds of gemm_sm90a plain and gated, of quantise_rows for its rows, of unpack_e4m3 for its matrix."""
    device = machine.device
    x, w = tiles(device, rng, m, k), tiles(device, rng, n, k)
    xs, ws = scales(device, rng, x.shape[0] * TILE), scales(device, rng, k // TILE, w.shape[0] * TILE)
    out, half = device.zeros((m, n), np.float16), device.zeros((m, n // 2), np.float16)
    rows = device.upload(np.resize(rng.standard_normal(1 << 22).astype(np.float16), (m, k)))
    packing = unpack_e4m3.PACKINGS["fp6"]
    packed = device.upload(np.resize(rng.integers(0, 256, 1 << 22, dtype=np.uint8), packing.shape(n, k)))
    spare, spare_s = device.zeros(w.shape, np.uint8), device.zeros(ws.shape, np.float32)
    return (lab.measured(machine, lambda i: gemm_sm90a.launch(machine.stream, x, xs, w, ws, out, device.multiprocessors), 1),
            n % TILE == 0 and lab.measured(machine, lambda i: gemm_sm90a.launch(machine.stream, x, xs, w, ws, half,
                                                                                device.multiprocessors, gated=True), 1),
            lab.measured(machine, lambda i: quantise_rows.launch(machine.stream, rows, x, xs), 1),
            lab.measured(machine, lambda i: unpack_e4m3.launch(machine.stream, packed, spare, spare_s, n, packing), 1))


def torchs(m, n, k):
    """Microseconds of torch._scaled_mm, or None without torch."""
    try:
        import torch
    except ImportError:
        return None
    x = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    w = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    run = lambda: torch._scaled_mm(x, w, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    for _ in range(5):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 20 * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[4096, 2048, 512])
    options = parser.parse_args()
    machine, rng, found = machines.Gpu(Device.open()), np.random.default_rng(1), []
    for module in (gemm_sm90a, quantise_rows, unpack_e4m3):
        report = lab.check(module, machine)
        print(report)
        if not report.ok:
            raise SystemExit("what is wrong is not timed")
    print(machine.name)
    print(f"{'rows':>5} {'N x K':>14} {'us':>8} {'TFLOP/s':>8} "
          f"{'gated':>8} {'torch':>8} {'share':>6} {'quantise':>9} {'unpack':>7}")
    for m in options.rows:
        for n, k in SHAPES:
            us, gated, quantise, unpack = ours(machine, rng, m, n, k)
            other, flops = torchs(m, n, k), 2 * m * n * k
            rate = [flops / t / 1e6 if t else 0 for t in (us, gated, other)]
            share = us and other and other / us or 0
            print(f"{m:5d} {n:6d} x {k:5d} {us:8.1f} {rate[0]:8.0f} {rate[1]:8.0f} {rate[2]:8.0f} {share:6.0%} "
                  f"{quantise:9.1f} {unpack:7.1f}", flush=True)
            found.append(dict(m=m, n=n, k=k, us=us, gated_us=gated, torch_us=other, quantise_us=quantise, unpack_us=unpack))
    print(json.dumps(dict(bench="gemm", device=machine.name, rows=found)))


if __name__ == "__main__":
    main()
