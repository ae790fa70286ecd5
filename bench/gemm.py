"""gemm_sm90a on 27B's shapes beside torch's product (cuBLASLt) in the same call, and what prepares its operands.

    python bench/gemm.py [--format e4m3] [--rows 4096 2048 512]

Parity of every case first. Normal numbers, so that multipliers switch as they would; TFLOP/s from the median of
graph replays, out in f16; `gated` is the form with silu(gate) * up in its epilogue. torch is asked for bf16 out and, of
e4m3, scales for whole tensors, which is its fastest form; of f16 for f16. Prints a table, then one JSON line.
"""
import argparse
import json

import numpy as np

from qwentin import numerics
from qwentin.device import Device
from qwentin.kernels import gemm_sm90a, lab, machines, quantise_rows, tile_rows, unpack_e4m3, unpack_f16

SHAPES = ((34816, 5120), (16672, 5120), (5120, 17408), (14336, 5120), (5120, 6144))
TILE = gemm_sm90a.TILE
FP6 = unpack_e4m3.PACKINGS["fp6"]


def tiles(device, rng, rows, k, format):
    """Normal numbers as tiles; 4 million of them, again and again."""
    values, width = rng.standard_normal(1 << 22).astype(np.float32), TILE if format == "e4m3" else gemm_sm90a.F16_WIDTH
    values = numerics.E4M3.encode(64 * values) if format == "e4m3" else values.astype(np.float16)
    return device.upload(np.resize(values, (-(-rows // TILE), k // width, TILE, width)))


def scales(device, rng, *shape):
    return device.upload(rng.uniform(0.5, 2, shape).astype(np.float32))


def ours(machine, rng, m, n, k, format):
    """Microseconds of gemm_sm90a plain and gated, of what tiles its rows and of what unpacks its matrix."""
    device, stream = machine.device, machine.stream
    x, w, padded = tiles(device, rng, m, k, format), tiles(device, rng, n, k, format), -(-n // TILE) * TILE
    xs = scales(device, rng, x.shape[0] * TILE) if format == "e4m3" else None
    ws = scales(device, rng, k // TILE if format == "e4m3" else 1, padded)
    out, half = device.zeros((m, n), np.float16), device.zeros((m, n // 2), np.float16)
    rows = device.upload(np.resize(rng.standard_normal(1 << 22).astype(np.float16), (m, k)))
    packed = device.upload(np.resize(rng.integers(0, 256, 1 << 22, dtype=np.uint8), FP6.shape(n, k)))
    spare, spare_s, processors = device.zeros(w.shape, w.dtype), device.zeros(ws.shape, np.float32), device.multiprocessors
    if format == "e4m3":
        tile = lambda i: quantise_rows.launch(stream, rows, x, xs)
        unpack = lambda i: unpack_e4m3.launch(stream, packed, spare, spare_s, n, FP6)
    else:
        tile = lambda i: tile_rows.launch(stream, rows, x)
        unpack = lambda i: unpack_f16.launch(stream, packed, None, spare, spare_s, n, FP6)
    return (lab.measured(machine, lambda i: gemm_sm90a.launch(stream, x, xs, w, ws, out, processors), 1),
            n % TILE == 0 and lab.measured(machine, lambda i: gemm_sm90a.launch(stream, x, xs, w, ws, half, processors,
                                                                                gated=True), 1),
            lab.measured(machine, tile, 1), lab.measured(machine, unpack, 1))


def torchs(m, n, k, format):
    """Microseconds of torch._scaled_mm or torch.mm, or None without torch."""
    try:
        import torch
    except ImportError:
        return None
    dtype = torch.float8_e4m3fn if format == "e4m3" else torch.float16
    x, w = torch.randn(m, k, device="cuda").to(dtype), torch.randn(n, k, device="cuda").to(dtype).t()
    one = torch.ones((), device="cuda")
    run = (lambda: torch._scaled_mm(x, w, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)) if format == "e4m3" \
        else lambda: torch.mm(x, w)
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
    parser.add_argument("--format", default="e4m3", choices=["e4m3", "f16"])
    parser.add_argument("--rows", type=int, nargs="*", default=[4096, 2048, 512])
    options = parser.parse_args()
    machine, rng, found = machines.Gpu(Device.open()), np.random.default_rng(1), []
    for module in (gemm_sm90a, quantise_rows, unpack_e4m3, tile_rows, unpack_f16):
        report = lab.check(module, machine)
        print(report)
        if not report.ok:
            raise SystemExit("what is wrong is not timed")
    print(f"{machine.name}, {options.format}")
    print(f"{'rows':>5} {'N x K':>14} {'us':>8} {'TFLOP/s':>8} "
          f"{'gated':>8} {'torch':>8} {'share':>6} {'tile':>9} {'unpack':>7}")
    for m in options.rows:
        for n, k in SHAPES:
            us, gated, tile, unpack = ours(machine, rng, m, n, k, options.format)
            other, flops = torchs(m, n, k, options.format), 2 * m * n * k
            rate = [flops / t / 1e6 if t else 0 for t in (us, gated, other)]
            share = us and other and other / us or 0
            print(f"{m:5d} {n:6d} x {k:5d} {us:8.1f} {rate[0]:8.0f} {rate[1]:8.0f} {rate[2]:8.0f} {share:6.0%} "
                  f"{tile:9.1f} {unpack:7.1f}", flush=True)
            found.append(dict(m=m, n=n, k=k, us=us, gated_us=gated, torch_us=other, tile_us=tile, unpack_us=unpack))
    print(json.dumps(dict(bench="gemm", device=machine.name, format=options.format, rows=found)))


if __name__ == "__main__":
    main()
