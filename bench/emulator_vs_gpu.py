"""The emulator against hardware: every kernel and case on the GPU and in the emulator from the same PTX.

    python bench/emulator_vs_gpu.py [KERNEL ...] [--jobs N] [--time]

Each case runs three ways: on the GPU, in the emulator (PTX compiled for the GPU's own chip), and as the float64 reference.
Integer outputs must be equal bit for bit. Float outputs must be within the module's own derived tolerance of the reference
on both; the table gives how far the two are apart, in units in the last place of the output's format: the emulator sums an
mma in float64 and rounds once, hardware truncates inside the sum, and its approximate functions differ in the last bits. A
second number excludes values smaller than 1/1000 of the output's largest, where a sum of large terms cancels and an ulp
means little. --jobs spreads the cases over so many processes: emulating takes nearly all the time. --time adds the time of
each kernel's first case (lab.time), alone on the GPU afterwards. Prints a row a case, the table of kernels that RESULTS.md
keeps, and one JSON line.
"""
import argparse
import functools
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from qwentin.device import Device
from qwentin.kernels import ALL, lab, machines, module as kernel_module

SIGNED = {1: np.int8, 2: np.int16, 4: np.int32}
SMALL = 1e-3


def ordered(array):
    """Float bits as integers in the order of the numbers: neighbours differ by one. Both zeros are 0."""
    bits = array.view(SIGNED[array.itemsize]).astype(np.int64)
    return np.where(bits < 0, -(bits & (2 ** (8 * array.itemsize - 1) - 1)), bits)


def ulps(output, a, b):
    """(largest distance, largest among values that matter) in ulps of two arrays; NaN equals NaN."""
    if not a.size:
        return 0, 0
    x, y = output.values(a), output.values(b)
    distance = np.where(np.isnan(x) & np.isnan(y), 0, np.abs(ordered(a) - ordered(b)))
    finite = np.abs(np.where(np.isfinite(x), x, 0))
    matters = finite >= SMALL * finite.max()
    return int(distance.max()), int(distance[matters].max(initial=0))


def compare_case(module, case, gpu, emulator):
    """Rows of the table for one case: (output, elements, elements that differ, max ulp, max ulp that matters, ok)."""
    arguments = module.make(np.random.default_rng(lab.SEED), **case)
    on_gpu, emulated = lab.run(module, arguments, gpu), lab.run(module, arguments, emulator)
    checks = [lab.check_case(module, case, machine) for machine in (gpu, emulator)]
    right = all(e.used <= 1 for c in checks for e in c.errors)
    for name, output in module.OUTPUTS.items():
        a, b = on_gpu[name], emulated[name]
        differ = int((a.view(np.uint8) != b.view(np.uint8)).reshape(a.size, -1).any(-1).sum()) if a.size else 0
        far, matters = (0, 0) if output.exact else ulps(output, a, b)
        yield dict(kernel=lab.name_of(module), case=lab.spelled(case), output=name, dtype=a.dtype.name, elements=a.size,
                   differ=differ, ulp=far, ulp_that_matters=matters, ok=right and not (output.exact and differ))


@functools.cache
def both():
    """(GPU, emulator of its chip) of this process."""
    gpu = machines.Gpu(Device.open())
    return gpu, machines.Emulator(gpu.chip)


def compared(job):
    """All rows of (kernel name, number of its case)."""
    module = kernel_module(job[0])
    return list(compare_case(module, module.CASES[job[1]], *both()))


def summary(rows):
    """Markdown, one line for each kernel, output and format."""
    yield "| kernel | cases | output, format | elements | differ | max ulp | max ulp, values above 1/1000 of the largest |"
    yield "|---|---|---|---|---|---|---|"
    groups = {}
    for row in rows:
        groups.setdefault((row["kernel"], row["output"], row["dtype"]), []).append(row)
    for (kernel, output, dtype), some in groups.items():
        elements, differ = (sum(row[name] for row in some) for name in ("elements", "differ"))
        far, matters = (max(row[name] for row in some) for name in ("ulp", "ulp_that_matters"))
        cases = len({row["case"] for row in rows if row["kernel"] == kernel})
        yield f"| {kernel} | {cases} | {output}, {dtype} | {elements:,} | {differ:,} | {far:,} | {matters:,} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", default=[])
    parser.add_argument("--jobs", type=int, default=1, metavar="N")
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    chip, jobs, rows = both()[0].chip, [], []
    for name in options.kernels or ALL:
        module = kernel_module(name)
        if lab.portable(module) or chip in module.SASS:
            jobs += [(name, i) for i in range(len(module.CASES))]
        else:
            print(f"{name:<18}has no form for {chip}")
    print(f"{'kernel':<18}{'output':<10}{'dtype':<9}{'elements':>9}{'differ':>8}{'ulp':>9}{'matters':>9}  case")
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(compared, jobs):
            for row in found:
                rows.append(row)
                print(f"{row['kernel']:<18}{row['output']:<10}{row['dtype']:<9}{row['elements']:>9}{row['differ']:>8}"
                      f"{row['ulp']:>9}{row['ulp_that_matters']:>9}  {row['case']}{'' if row['ok'] else '   WRONG'}",
                      flush=True)
    names = dict.fromkeys(name for name, _ in jobs) if options.time else ()
    times = [repr(lab.time(module, both()[0], **module.CASES[0])) for module in map(kernel_module, names)]
    print("\n".join([*summary(rows), *times]))
    print(json.dumps(dict(bench="emulator_vs_gpu", device=both()[0].name, rows=rows, times=times)))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
