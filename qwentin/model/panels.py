"""Panels: a weight matrix cut so that a product of few rows reads it once and no row knows its company.

    w f32 [N, K]  ->  panels f32 [N / b, K, b]      b outputs side by side;  x @ w.T = x @ panels, side by side

        K |'''''|'''''|'''''|''|      the last outputs, fewer than b, in `rest`, with zeros up to a multiple of VECTOR
          |  0  |  1  |  2  |  |
          '-----'-----'-----'--'

OpenBLAS repacks a large matrix before it multiplies, which for a few rows costs more than the product; products of at most
SMALL operations it computes in place (on x86 with AVX-512), each output one chain of fused multiply-adds over K. So they are
cut to that size: 2 rows take a third of the time that one row takes in one piece, 16 rows a quarter, 512 no longer. And a
row's bits do not depend on the rows beside it; a row that is alone is computed twice, since numpy would use another routine
for it. BLAS kernels without such products keep neither promise: `independent` finds out, and a row alone stays alone there.

Who calls: model/cpu.py, model/cpu_weights.py. Proven by tests/test_panels.py.
"""
import copy
from functools import cache

import numpy as np

SMALL = 1_000_000       # OpenBLAS, sgemm_small_kernel_permit: multiply-adds of a product that is not packed
WIDTHS = (64, 32, 16)   # outputs of a panel, the widest that fits
ROWS = 16               # rows at a time, fewer where K is large
VECTOR = 16             # floats of a register: outputs that do not fill one are computed in another order
SHARE = 4               # panels that a worker takes at a time
WIDE = 128              # where nothing is computed in place: rows enough that packing is cheap


@cache
def independent() -> bool:
    """Whether a row's product has the same bits in any company of up to ROWS rows, as far as one example can tell."""
    rng = np.random.default_rng(0)
    x, panel = (rng.standard_normal(shape, np.float32) for shape in ((ROWS, 768), (768, WIDTHS[0])))
    whole = x @ panel
    return all(np.array_equal(x[:rows] @ panel, whole[:rows]) for rows in range(2, ROWS))


class Panels:
    """w f32 [N, K], as above. `panels(x)` is x @ w.T; `workers`, a thread pool, shares products of many rows."""

    def __init__(self, w: np.ndarray):
        N, K = self.shape = w.shape
        self.width = next((b for b in WIDTHS if b * ROWS * K <= SMALL), WIDTHS[-1])
        self.rows = min(ROWS, max(2, SMALL // (self.width * K))) if independent() else WIDE
        self.count = N // self.width
        self.cut = self.count * self.width
        self.panels = np.ascontiguousarray(w[:self.cut].reshape(self.count, self.width, K).swapaxes(1, 2))
        self.rest = np.ascontiguousarray(np.pad(w[self.cut:], ((0, (self.cut - N) % VECTOR), (0, 0))).T)

    def first(self, count: int) -> "Panels":
        """The first `count` outputs, whole panels; nothing is copied."""
        assert count % self.width == 0 and count <= self.shape[0], "outputs are cut off by the panel"
        part = copy.copy(self)
        part.shape, part.count, part.cut = (count, self.shape[1]), count // self.width, count
        part.panels = self.panels[:part.count]
        return part

    @property
    def nbytes(self) -> int:
        """Of the matrix; the zeros behind its last outputs are not counted."""
        return 4 * self.shape[0] * self.shape[1]

    def __call__(self, x: np.ndarray, workers=None) -> np.ndarray:
        """x f32 [T, K] -> f32 [T, N]."""
        T = len(x)
        if T == 1 and independent():
            return self(np.concatenate([x, x]))[:1]
        out = np.empty((T, self.shape[0]), np.float32)
        if T <= self.rows:
            self.multiply(x[None], out[None], None)
            return out
        whole = T // self.rows * self.rows
        cut = lambda rows: rows[:whole].reshape(-1, self.rows, rows.shape[1])
        self.multiply(cut(x), cut(out), workers)
        if whole < T:
            out[whole:] = self(x[whole:])
        return out

    def multiply(self, blocks, out, workers):
        """blocks [B, r, K] -> out [B, r, N]."""
        into = out[..., :self.cut].reshape(*out.shape[:2], self.count, self.width).transpose(2, 0, 1, 3)

        def run(some):
            np.matmul(blocks, self.panels[some, None], out=into[some])
        if workers is None or not independent():
            run(slice(None))
        else:
            list(workers.map(run, (slice(i, i + SHARE) for i in range(0, self.count, SHARE))))
        if self.cut < self.shape[0]:
            out[..., self.cut:] = (blocks @ self.rest)[..., :self.shape[0] - self.cut]
