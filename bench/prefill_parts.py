"""The gated delta rule of a wide prefill, launch by launch, on 27B's shape: parity first, then microseconds.

    python bench/prefill_parts.py [--rows 512 2048 4096] [--projected f32 f16]

Parity: the cases of each kernel, then all of them in a row against float64, row by row. "floor" is what must be moved over
4.4 TB/s, or multiplied over 989 TFLOP/s. The chain is timed whole too, since what one launch leaves in L2 serves the next.
"""
import argparse
import json

import numpy as np

from qwentin.device import Device
from qwentin.kernels import conv_wide, delta_chunk, delta_chunk_sm90a, delta_prepare, gated_norm, lab, machines

NK, NV, HEAD, CHUNK, EPS = 16, 48, 128, 64, 1e-6
BANDWIDTH, PEAK = 4.4e6, 989e6                        # bytes and flops a microsecond


def chain(device, rng, rows, projected, Nk=NK, Nv=NV, chunk=delta_chunk):
    """(name, launch, cost) of each launch for so many rows of random input, and the arrays."""
    given = conv_wide.make(rng, rows=rows, key_heads=Nk, value_heads=Nv, projected=projected)
    given["decay"] = -np.exp(rng.uniform(-4, 0, Nv)).astype(np.float32)
    given["S"] = rng.standard_normal((2, Nv, HEAD, HEAD)).astype(np.float32)
    given["norm"], N = np.ones(HEAD, np.float32), -(-rows // CHUNK)
    terms = given.pop("terms")
    a = {name: device.upload(x) for name, x in given.items()}
    a["inverse"], a["within"] = (device.zeros((N, Nv, 12, 32, 8), np.float16) for _ in range(2))
    a["decays"] = device.zeros((N, Nv, 2, CHUNK), np.float32)
    a["o"], a["out"] = (device.zeros((rows, Nv, HEAD), np.float16) for _ in range(2))
    pick = lambda *names: {name: a[name] for name in names}
    shape, column = dict(rows=rows, key_heads=Nk, value_heads=Nv), (2 * Nk + Nv) * HEAD
    return [
        ("conv_wide", lambda s: conv_wide.launch(s, **pick("span", "projected", "weight", "decay", "dt_bias", "window", "q",
                                                           "k", "v", "beta", "g"), terms=terms),
         conv_wide.cost(**shape, projected=projected)),
        ("delta_prepare", lambda s: delta_prepare.launch(s, **pick("span", "q", "k", "beta", "g", "inverse", "within",
                                                                   "decays")), delta_prepare.cost(**shape)),
        (lab.name_of(chunk), lambda s: chunk.launch(s, **pick("span", "S", "q", "k", "v", "inverse", "within", "decays",
                                                              "o")), delta_chunk.cost(**shape)),
        ("gated_norm", lambda s: gated_norm.launch(s, a["o"], a["projected"], column, a["norm"], a["out"], EPS),
         gated_norm.cost(rows, Nv, column, 0, projected, "f16", o="f16"))], a, given


def stepped(x):
    """Row by row in float64: (gated, S)."""
    Nv, C = len(x["decay"]), x["weight"].shape[1]
    Nk, rows = (C // HEAD - Nv) // 2, x["span"][1]
    p, S = x["projected"].astype(np.float64), x["S"][1].astype(np.float64)
    line = np.concatenate([x["window"][1], p[:, :C]])
    y = sum(line[j:j + rows] * x["weight"][j].astype(np.float64) for j in range(4))
    y = (y / (1 + np.exp(-y))).reshape(rows, -1, HEAD)
    unit = np.repeat(y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6), Nv // Nk, 1)
    z, b, a = np.split(p[:, C:C + Nv * HEAD + 2 * Nv], [Nv * HEAD, Nv * HEAD + Nv], 1)
    out, keep = np.empty((rows, Nv, HEAD)), np.exp(x["decay"] * np.logaddexp(0, a + x["dt_bias"]))
    for t in range(rows):
        S *= keep[t, :, None, None]
        k = unit[t, Nv:2 * Nv]
        d = (y[t, 2 * Nk:] - np.einsum("hkv,hk->hv", S, k)) / (1 + np.exp(-b[t]))[:, None]
        S += k[:, :, None] * d[:, None]
        out[t] = np.einsum("hkv,hk->hv", S, unit[t, :Nv]) / np.sqrt(HEAD)
    out /= np.sqrt((out * out).mean(-1, keepdims=True) + EPS)
    return out * (z / (1 + np.exp(-z))).reshape(out.shape), S


def parity(machine, rng, chunk, rows=300):
    """Relative errors (rel-L2) of the whole chain on nano's heads."""
    launches, arrays, given = chain(machine.device, rng, rows, "f32", 2, 6, chunk)
    for _, launch, _ in launches:
        launch(machine.stream)
    machine.stream.synchronize()
    want, S = stepped(given)
    error = lambda got, want: float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return error(arrays["out"].download().astype(np.float64), want), error(arrays["S"].download()[1], S)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[512, 2048, 4096])
    parser.add_argument("--projected", nargs="*", default=["f32", "f16"])
    parser.add_argument("--cases", type=int, default=99, help="of each kernel, at most")
    options = parser.parse_args()
    machine, rng, found = machines.Gpu(Device.open()), np.random.default_rng(1), []
    forms = [m for m in (delta_chunk, delta_chunk_sm90a) if lab.fitting(m, machine) is machine]
    for module in (conv_wide, delta_prepare, gated_norm, *forms):
        for case in module.CASES[:options.cases]:
            checked = lab.check_case(module, case, machine)
            print(lab.name_of(module), checked, flush=True)
            if any(e.used > 1 for e in checked.errors):
                raise SystemExit("what is wrong is not timed")
    for chunk in forms:
        out, S = parity(machine, rng, chunk)
        print(f"300 rows of nano's heads by {lab.name_of(chunk)}, against float64: gated {out:.1e}, S {S:.1e} (rel-L2)")
        if not max(out, S) <= 2e-3:
            raise SystemExit("what is wrong is not timed")
    print(machine.name)
    print(f"{'rows':>5} {'projected':>9} {'launch':>17} {'us':>8} {'floor':>7}")
    for rows in options.rows:
        for projected in options.projected:
            launches, *_ = chain(machine.device, rng, rows, projected, chunk=forms[-1])
            whole = [("all four", lambda s: [launch(s) for _, launch, _ in launches],
                      {key: sum(cost[key] for *_, cost in launches) for key in ("bytes", "flops")})]
            if len(forms) > 1 and projected == options.projected[0]:
                whole.append(chain(machine.device, rng, rows, projected, chunk=forms[0])[0][2])
            for name, launch, cost in launches + whole:
                us = lab.measured(machine, lambda i: launch(machine.stream), 1)
                floor = max(cost["bytes"] / BANDWIDTH, cost["flops"] / PEAK)
                print(f"{rows:5d} {projected:>9} {name:>17} {us:8.1f} {floor:7.1f}", flush=True)
                found.append(dict(rows=rows, projected=projected, launch=name, us=us, floor_us=floor))
    print(json.dumps(dict(bench="prefill_parts", device=machine.name, rows=found)))


if __name__ == "__main__":
    main()
