"""A norm of the residual stream in a round, between the product that ends a layer's part and the one that begins the next.

    in a kernel of its own    product -> b.delta;  rmsnorm: b.hidden += b.delta -> b.x f16;  product of b.x
    folded into both          gemv_residual: b.hidden += product -> b.x, b.squares;          product of b.x, rows scaled

Who calls: model/cuda.py and the files of its layers. Proven against model/cpu.py by tests/test_cuda.py.
"""
from dataclasses import dataclass

from ..kernels import rmsnorm


@dataclass(frozen=True)
class Norm:
    """`weight` f32 [D] as stored: 1 is added. folded: whether both products do it, which before and after must know."""
    weight: object
    eps: float
    folded: bool = False

    def queue(self, backend, b, first=False):
        """Between the products; first: there was none before, b.hidden is whole."""
        if not self.folded:
            rmsnorm.launch(backend.stream, b.hidden, None if first else b.delta, self.weight, b.x, self.eps)

    def before(self, backend, b, matrix, x, work):
        """Queue the product that ends what comes before this norm."""
        if self.folded:
            matrix.add(backend, x, b, self.weight, work)
        else:
            matrix.launch(backend, x, b.delta, work)

    def after(self, backend, b, matrix, out, work):
        """Queue the product that begins what comes behind it."""
        matrix.launch(backend, b.x, out, work, **(dict(squares=b.squares, eps=self.eps) if self.folded else {}))


def can_fold(before, after) -> bool:
    """Whether these two matrices can do the norm between them: packed, nothing of them in 16 bits."""
    return before is not None and before.adds and after.tiles is not None and after.plain is None
