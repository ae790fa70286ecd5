"""Which block shape and which scale a weight format should have: the study behind kernels/quantise.py.

    python bench/formats.py                  error on synthetic matrices and on nano's own
    python bench/formats.py --nano           and the KL of nano with each scheme (minutes)

A scheme is a code, a block (rows x inputs), a kind of scale, and how the scale is chosen: `max` makes the largest value
of the block fit, `least` takes the candidate of least squared error. Error is the root of sum (w - w')^2 / sum w^2, in
percent. Written with numerics alone, so that it also checks what the packers do. Prints tables, then one JSON line.
"""
import argparse
import json
from dataclasses import dataclass

import numpy as np

from machine import describe
from qwentin import nano, numerics
from qwentin.kernels import quantise
from qwentin.model.names import is_mtp
from qwentin.model.pack import UNPACKED
from qwentin.model.weights import open_checkpoint
from qwentin.numerics import E2M1, E2M3, E3M2, E4M3, Minifloat

PARAMETERS_27B = 25_621_954_560                         # in matrices that are packed, the head among them


@dataclass(frozen=True)
class Scheme:
    """How a matrix is rounded."""
    codes: Minifloat
    block: tuple[int, int]
    scale: str                                          # "ue8m0", "bf16" or "nvfp4" (e4m3 under a tensor scale)
    choice: str = "least"

    @property
    def name(self) -> str:
        return f"{self.codes.name} {self.block[0]}x{self.block[1]} {self.scale} {self.choice}"

    @property
    def bits(self) -> float:
        """A weight, scales included."""
        return self.codes.bits + {"ue8m0": 8, "bf16": 16, "nvfp4": 8}[self.scale] / (self.block[0] * self.block[1])

    def candidates(self, amax: np.ndarray, top: float) -> list[np.ndarray]:
        """Scales to try for blocks of largest magnitude amax, in a matrix of largest magnitude top."""
        amax = np.maximum(amax, np.float32(2.0 ** -100))
        if self.scale == "ue8m0":                       # the power of two that fits, and smaller ones that clip
            power = np.ceil(np.log2(amax / self.codes.max))
            tried = [np.exp2(power - d).astype(np.float32) for d in range(3)]
        elif self.scale == "bf16":
            tried = [numerics.decode_bf16(numerics.encode_bf16((amax * f / self.codes.max).astype(np.float32)))
                     for f in quantise.FACTORS[128]]
        else:
            alpha = quantise.alpha_of(top)
            tried = [np.maximum(E4M3.decode(E4M3.encode((amax * f / 6 / alpha).astype(np.float32))), 2.0 ** -9) * alpha
                     for f in quantise.FACTORS[16]]
        return tried if self.choice == "least" else tried[:1]

    def rounded(self, w: np.ndarray) -> np.ndarray:
        """f32 [N, K] -> the values that are kept."""
        (n, k), (rows, cols) = w.shape, self.block
        x = np.pad(w, ((0, -n % rows), (0, -k % cols)))
        x = x.reshape(x.shape[0] // rows, rows, x.shape[1] // cols, cols).swapaxes(1, 2)
        best = np.full(x.shape[:2] + (1, 1), np.inf)
        kept = np.zeros_like(x)
        for scale in self.candidates(np.abs(x).max((2, 3), keepdims=True), float(np.abs(w).max())):
            value = self.codes.decode(self.codes.encode(x / scale)) * scale
            error = ((value - x).astype(np.float64) ** 2).sum((2, 3), keepdims=True)
            kept, best = np.where(error < best, value, kept), np.minimum(error, best)
        kept = kept.swapaxes(1, 2)
        return kept.reshape(kept.shape[0] * rows, -1)[:n, :k]


SCHEMES = (
    Scheme(E2M3, (128, 128), "ue8m0", "max"), Scheme(E2M3, (128, 128), "ue8m0"), Scheme(E2M3, (1, 128), "ue8m0", "max"),
    Scheme(E2M3, (1, 128), "ue8m0"), Scheme(E2M3, (1, 32), "ue8m0"), Scheme(E2M3, (128, 128), "bf16"),
    Scheme(E2M3, (1, 128), "bf16", "max"), Scheme(E2M3, (1, 128), "bf16"), Scheme(E3M2, (1, 128), "bf16"),
    Scheme(E4M3, (128, 128), "bf16", "max"), Scheme(E4M3, (1, 128), "bf16"),
    Scheme(E2M1, (1, 32), "ue8m0"), Scheme(E2M1, (1, 128), "bf16"), Scheme(E2M1, (1, 16), "nvfp4", "max"),
    Scheme(E2M1, (1, 16), "nvfp4"))


def matrices(n: int = 512, k: int = 2560) -> dict[str, np.ndarray]:
    """bf16 values as weights have them: Gaussian, heavy tails, outliers in 0.5 % of the columns, rows or columns of
    different size (log-normal, half a unit)."""
    rng = np.random.default_rng(0)
    draw = lambda: 0.02 * rng.standard_normal((n, k))
    outliers = draw()
    outliers[:, rng.choice(k, k // 200, replace=False)] *= 10
    out = {"gaussian": draw(), "student-t 4": 0.02 * rng.standard_t(4, (n, k)), "outlier columns": outliers,
           "uneven rows": draw() * np.exp(rng.standard_normal((n, 1)) / 2),
           "uneven columns": draw() * np.exp(rng.standard_normal((1, k)) / 2)}
    return {name: numerics.decode_bf16(numerics.encode_bf16(w.astype(np.float32))) for name, w in out.items()}


def error(pairs) -> float:
    """Percent, over (matrix, its rounded form) pairs together."""
    lost = total = 0.0
    for w, kept in pairs:
        lost += ((w - kept).astype(np.float64) ** 2).sum()
        total += (w.astype(np.float64) ** 2).sum()
    return 100 * float(np.sqrt(lost / total))


class Rounded:
    """A checkpoint whose packed matrices are rounded by a scheme when they are read; the table is not."""

    def __init__(self, checkpoint, scheme: Scheme):
        self.checkpoint, self.scheme = checkpoint, scheme
        self.config, self.has_mtp = checkpoint.config, checkpoint.has_mtp

    def f32(self, name):
        w = self.checkpoint.f32(name)
        return self.scheme.rounded(w) if w.ndim == 2 and not name.endswith(UNPACKED) else w


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nano", action="store_true", help="run nano with each scheme and give its KL to the original")
    options = parser.parse_args()
    synthetic = matrices()
    checkpoint = open_checkpoint(nano.DIRECTORY)
    own = [checkpoint.f32(t.name) for t in checkpoint.tensors.values()
           if len(t.shape) == 2 and not t.name.endswith(UNPACKED) and not is_mtp(t.name)]
    quality = {}
    if options.nano:
        from quality import EVAL, compare, read_cases
        cases = read_cases(nano.DIRECTORY, EVAL, 400)
        quality = compare(checkpoint, {s.name: Rounded(checkpoint, s) for s in SCHEMES}, cases)
    print(describe())
    print("| scheme | bits | 27B GB | " + " | ".join([*synthetic, "nano's own"]) + " | nano KL | nano top-1 |")
    print("|---" * (len(synthetic) + 6) + "|")
    rows = []
    for scheme in SCHEMES:
        errors = {name: error([(w, scheme.rounded(w))]) for name, w in synthetic.items()}
        errors["nano's own"] = error((w, scheme.rounded(w)) for w in own)
        row = {"scheme": scheme.name, "bits": scheme.bits, "27B_GB": PARAMETERS_27B * scheme.bits / 8e9, "error": errors,
               "kl_mean": quality.get(scheme.name, {}).get("kl_mean"), "top1": quality.get(scheme.name, {}).get("top1")}
        rows.append(row)
        kl = ("", "") if row["kl_mean"] is None else (f"{row['kl_mean']:.2e}", f"{row['top1']:.4f}")
        print(f"| {scheme.name} | {scheme.bits:.3f} | {row['27B_GB']:.2f} | "
              + " | ".join(f"{value:.2f}" for value in errors.values()) + f" | {kl[0]} | {kl[1]} |", flush=True)
    print(json.dumps({"bench": "formats", "schemes": rows}))


if __name__ == "__main__":
    main()
