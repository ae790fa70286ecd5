"""The end of a forward pass on the device: last norm, the wanted rows, the head, each row's best candidates.

    hidden + delta -> normed f32 [T, D] -> head_x f16 [O, D] -> logits f32 [O, V] -> best 64 values and ids, to the host

Who calls: model/cuda.py. Proven against model/cpu.py by tests/test_cuda.py.
"""
from dataclasses import dataclass, replace

from ..kernels import gather, rmsnorm, topk
from .buffers import BEST
from .matrix import Matrix


@dataclass(frozen=True)
class Head:
    matrix: Matrix
    valid: int                  # ids from here on have no text and are nobody's candidates
    eps: float
    raw: bool                   # b.normed ends as the hidden before the norm

    def queue(self, backend, b, norm, work):
        """Queue it for a round with buffers b and the norm weights of the stack that ends here."""
        rmsnorm.launch(backend.stream, b.hidden, b.delta, norm, b.normed, self.eps)
        if b.bucket.outputs:
            self.choose(backend, b, b.normed, b.outputs, work)
        if self.raw:
            backend.copy(b.normed, b.hidden)

    def choose(self, backend, b, normed, outputs, work):
        """Logits and candidates of the rows `outputs` of normed, in a round's buffers b."""
        gather.launch(backend.stream, normed, outputs, b.head_x)
        self.matrix.launch(backend, b.head_x, b.logits, work)
        topk.launch(backend.stream, b.logits, None, self.valid, b.best_values, b.best_ids, b.topk_work, BEST)
        backend.read(b.best, b.host["best"])

    def first(self, rows) -> "Head":
        """One that chooses from so many ids, the lowest, in whole strips; 0 or too many: from all."""
        if not 0 < rows < self.matrix.width:
            return self
        return replace(self, matrix=self.matrix.first(rows), valid=min(self.valid, rows))


def heads(source, config, valid=None, draft_rows=0, raw_hidden=False) -> tuple[Head, Head]:
    """The main model's and the draft head's, of one matrix. draft_rows: ids that this one chooses from; raw_hidden: it goes
    on from hiddens as they are before the last norm."""
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    head = Head(source.matrix(name), valid or config.vocab_size, config.rms_norm_eps, raw_hidden)
    return head, head.first(draft_rows)
