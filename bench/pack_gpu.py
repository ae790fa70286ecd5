"""On a GPU: are its packed bytes those of the CPU, for every matrix of two 27B layers and every format, and how fast?

    python bench/pack_gpu.py            a linear-attention and a full-attention layer, fp6, fp8 and nvfp4, bf16 and float32
    python bench/pack_gpu.py --quick    the full-attention layer in fp6 alone

Exit code 1 at the first byte that differs. Times are of whole calls (copy up, kernel, copy down) and of the kernel alone
(lab.time). Prints a table, then one JSON line.
"""
import argparse
import json
import sys
import time

import numpy as np

from qwentin import numerics
from qwentin.config import ModelConfig
from qwentin.device import Device
from qwentin.kernels import lab, pack, pack_cpu, quantise
from qwentin.kernels.packed import FP6, FP8, NVFP4
from qwentin.model import names
from qwentin.model.pack import UNPACKED
from qwentin.model.pack_gpu import packer

from convert import CONFIG_27B, LAYERS


def matrices(quick: bool):
    """(name, bf16 bits [N, K]) with uneven rows and outlier columns, another seed each."""
    shapes = names.expected(ModelConfig.from_dict(CONFIG_27B))
    for i, (name, shape) in enumerate(shapes.items()):
        if name.startswith(LAYERS[1:] if quick else LAYERS) and len(shape) == 2 and not name.endswith(UNPACKED):
            rng = np.random.default_rng(i)
            w = 0.02 * rng.standard_normal(shape, np.float32) * np.exp(rng.standard_normal((shape[0], 1), np.float32) / 2)
            w[:, rng.choice(shape[1], 16, replace=False)] *= 10
            yield name, numerics.encode_bf16(w)


def compared(on_gpu, packing, x, alpha) -> tuple[int, float, float]:
    """(bytes that differ, seconds on the GPU with both copies, seconds on one CPU core)"""
    start = time.perf_counter()
    got = on_gpu(packing, x, alpha)
    middle = time.perf_counter()
    want = pack_cpu.pack(packing, x, alpha)
    return int((got != want).sum()), middle - start, time.perf_counter() - middle


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    device = Device.open()
    on_gpu, rows = packer(device), []
    for name, words in matrices(options.quick):
        for packing in (FP6,) if options.quick else (FP6, FP8, NVFP4):
            alpha = float(quantise.alpha_of(pack_cpu.amax(words))) if packing == NVFP4 else 1.0
            for x in (words, numerics.decode_bf16(words) * np.float32(1.1)):
                wrong, gpu_s, cpu_s = compared(on_gpu, packing, x, alpha)
                rows.append({"tensor": name, "packing": packing.name, "dtype": str(x.dtype), "wrong_bytes": wrong,
                             "gpu_s": gpu_s, "cpu_s": cpu_s, "MB": x.nbytes / 1e6})
                print(f"{name:48} {packing.name:6} {x.dtype!s:8} {wrong:6} bytes differ   gpu {x.nbytes / gpu_s / 1e9:6.2f} "
                      f"GB/s   one core {x.nbytes / cpu_s / 1e9:5.2f} GB/s", flush=True)
    timings = [str(lab.time(pack, n=17408, k=5120, packing=kind)) for kind in pack.PACKINGS]
    print("\n".join(timings))
    print(json.dumps({"bench": "pack_gpu", "device": device.name, "rows": rows, "kernel": timings}))
    return int(any(row["wrong_bytes"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
