"""What the CPU benches run on, and its two ceilings: streaming read and float32 matrix product. For bench scripts alone."""
import os
import platform
import time
from pathlib import Path

import numpy as np


def describe() -> str:
    """CPU model, cores, numpy version."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")]
    model = names[0] if names else platform.machine()
    return f"{model}, {os.cpu_count()} cores, numpy {np.__version__}"


def best_of(function, repeats: int) -> float:
    """Fewest seconds of `repeats` calls."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def streaming_rate() -> float:
    """Bytes per second of a matrix-vector product over 256 MiB: what a decode step does with its weights."""
    w = np.random.default_rng(1).standard_normal((16384, 4096), dtype=np.float32)
    x = np.ones(4096, np.float32)
    return w.nbytes / best_of(lambda: w @ x, 7)


def matmul_rate() -> float:
    """Floating-point operations per second of a 1024^3 float32 product."""
    a = np.random.default_rng(2).standard_normal((1024, 1024), dtype=np.float32)
    return 2 * 1024**3 / best_of(lambda: a @ a, 7)
