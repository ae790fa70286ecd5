"""The end of a forward pass on the device: last norm, the wanted rows, the head, each row's best candidates.

    hidden + delta -> normed f32 [T, D] -> head_x f16 [O, D] -> logits f32 [O, V] -> best 64 values and ids, to the host

Who calls: model/cuda.py. Proven against model/cpu.py by tests/test_cuda.py.
"""
from dataclasses import dataclass

from ..kernels import gather, rmsnorm, topk
from .buffers import BEST
from .matrix import Matrix


@dataclass(frozen=True)
class Head:
    matrix: Matrix
    valid: int                  # ids from here on have no text and are nobody's candidates
    eps: float

    def queue(self, backend, b, norm, work):
        """Queue it for a round with buffers b and the norm weights of the stack that ends here."""
        rmsnorm.launch(backend.stream, b.hidden, b.delta, norm, b.normed, self.eps)
        if b.bucket.outputs:
            self.choose(backend, b, b.normed, b.outputs, work)

    def choose(self, backend, b, normed, outputs, work):
        """Logits and candidates of the rows `outputs` of normed, in a round's buffers b."""
        gather.launch(backend.stream, normed, outputs, b.head_x)
        self.matrix.launch(backend, b.head_x, b.logits, work)
        topk.launch(backend.stream, b.logits, None, self.valid, b.best_values, b.best_ids, b.topk_work, BEST)
        backend.read(b.best, b.host["best"])
