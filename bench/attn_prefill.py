"""attn_prefill on 27B's shapes beside torch's flash attention (bf16) in the same process.

    python bench/attn_prefill.py [--forms attn_prefill attn_prefill_sm90a] [--shapes 2048:0 2048:30720 300:102400]

Parity first: every case of each form, then sampled rows of each shape against float32 in torch. What is wrong is not timed.
Then the median of single launches, TFLOP/s of the causal half, and the splits used. Keys and values are made by torch, which
this needs. Prints a table, then one JSON line.
"""
import argparse
import json
import statistics

import numpy as np
import torch
from torch.nn.attention import SDPBackend, bias, sdpa_kernel

from qwentin import kernels
from qwentin.device import Device, DeviceArray, Event
from qwentin.kernels import attn_prefill, lab, machines

HEADS, GROUPS, HEAD, PAGE = 24, 4, 256, 128
CODES = {torch.bfloat16: np.uint16, torch.float16: np.float16, torch.float8_e4m3fn: np.uint8, torch.float32: np.float32,
         torch.int32: np.int32}


def lent(tensor):
    """A torch tensor's memory as a device array."""
    return DeviceArray(tensor.data_ptr(), tuple(tensor.shape), CODES[tensor.dtype], tensor)


def inputs(rows, length, format):
    """Arguments of a launch as torch tensors; pages in random order."""
    gen = torch.Generator("cuda").manual_seed(rows + length)
    used = -(-(length + rows) // PAGE)
    shape, kind = (used, PAGE, GROUPS, HEAD), torch.bfloat16 if format == "bf16" else torch.float8_e4m3fn
    k, v = (torch.randn(shape, device="cuda", generator=gen, dtype=torch.bfloat16).to(kind) for _ in range(2))
    q = torch.randn((rows, HEADS, HEAD), device="cuda", generator=gen).to(
        torch.bfloat16 if format == "bf16" else torch.float16)
    return dict(q=q, qkv=torch.randn((rows, 2 * (HEADS + GROUPS) * HEAD), device="cuda", generator=gen).to(torch.float16),
                k_pages=k, v_pages=v, pages=torch.randperm(used, device="cuda", generator=gen, dtype=torch.int32),
                span=torch.tensor([0, rows, length], device="cuda", dtype=torch.int32),
                out=torch.full((rows, HEADS, HEAD), torch.nan, device="cuda", dtype=torch.float16))


def contiguous(given, length, rows):
    """Keys and values [G, keys, 256] as float32 would be read."""
    def one(x):
        codes = x.view(torch.uint8)[given["pages"].long()]              # torch indexes no e4m3
        return codes.view(x.dtype).reshape(-1, GROUPS, HEAD)[:length + rows].transpose(0, 1)
    return one(given["k_pages"]), one(given["v_pages"])


def worst(given, length, rows):
    """Largest error of sampled rows."""
    k, v = contiguous(given, length, rows)
    found = 0.0
    for t in sorted({0, 1, rows // 3, rows // 2 + 1, rows - 2, rows - 1} & set(range(rows))):
        seen = length + t + 1
        q = given["q"][t].float().reshape(GROUPS, -1, HEAD)
        p = torch.softmax(q @ k[:, :seen].float().transpose(1, 2) / 16, -1)
        gate = given["qkv"][t].float().reshape(-1, HEAD)[1:2 * HEADS:2]
        want = (p @ v[:, :seen].float()).reshape(HEADS, HEAD) * torch.sigmoid(gate)
        found = max(found, float((given["out"][t].float() - want).abs().nan_to_num(9e9).max()))
    return found


def timed(machine, launch, count=7):
    """Median microseconds of single launches."""
    launch()
    found = []
    for _ in range(count):
        start, end = Event(), Event()
        start.record(machine.stream)
        launch()
        end.record(machine.stream)
        found.append(end.seconds_since(start) * 1e6)
    return statistics.median(found)


def torchs(given, length, rows, count=5):
    """Microseconds of torch's flash attention over the same keys in bf16, heads repeated."""
    k, v = (x.to(torch.bfloat16).repeat_interleave(HEADS // GROUPS, 0)[None] for x in contiguous(given, length, rows))
    q = given["q"].to(torch.bfloat16).transpose(0, 1)[None]
    mask = bias.causal_lower_right(rows, length + rows)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        run = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        run()
        events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)]
        for start, end in events:
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
    return statistics.median(s.elapsed_time(e) for s, e in events) * 1e3


def measure(machine, module, given, length, rows):
    """(microseconds, splits, worst error) of a form."""
    splits = module.splits_for(machine.device.multiprocessors, rows, HEADS // GROUPS, GROUPS)
    given = {**given, "out": torch.full_like(given["out"], torch.nan)}
    arrays = {n: lent(x) for n, x in given.items()}
    if splits > 1:
        shape = GROUPS, splits + 1, rows * (HEADS // GROUPS)
        arrays |= dict(partial=machine.device.zeros((*shape, HEAD), np.float32),
                       stats=machine.device.zeros((*shape, 2), np.float32))
    torch.cuda.synchronize()
    us = timed(machine, lambda: module.launch(machine.stream, k_scale=1.0, v_scale=1.0, **arrays))
    machine.stream.synchronize()
    return us, splits, worst(given, length, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="*", default=["attn_prefill", "attn_prefill_sm90a"])
    parser.add_argument("--shapes", nargs="*", default=["2048:0", "2048:30720", "2048:131072", "300:102400"])
    options = parser.parse_args()
    machine, found = machines.Gpu(Device.open()), []
    forms = [kernels.module(name) for name in options.forms]
    for module in forms:
        report = lab.check(module, machine)
        print(report, flush=True)
        if not report.ok:
            raise SystemExit("what is wrong is not timed")
    print(machine.name)
    print(f"{'rows':>5} {'length':>7} {'kv':>5} {'form':<20} {'splits':>6} {'us':>9} {'TFLOP/s':>8} {'error':>8}")
    for rows, length in (map(int, s.split(":")) for s in options.shapes):
        flops = attn_prefill.cost(rows=rows, length=length)["flops"]
        for format in ("bf16", "e4m3"):
            given = inputs(rows, length, format)
            lines = [(lab.name_of(m), *measure(machine, m, given, length, rows)) for m in forms]
            if format == "bf16":
                lines.append(("torch flash", torchs(given, length, rows), 1, 0.0))
            for name, us, splits, error in lines:
                rate = flops / us / 1e6
                print(f"{rows:5d} {length:7d} {format:>5} {name:<20} {splits:6d} {us:9.1f} {rate:8.1f} {error:8.1e}",
                      flush=True)
                found.append(dict(rows=rows, length=length, kv=format, form=name, us=us, splits=splits, error=error))
    print(json.dumps(dict(bench="attn_prefill", device=machine.name, rows=found)))


if __name__ == "__main__":
    main()
