"""A chain of drafts that the host does not see until it is whole: each step of the draft head goes on from the one before.

    round "mtp"   rows of the text with their hiddens            -> best candidates of the last row
    link 0        embed(best id), hidden of that row    -> layer -> best candidates of guess 0
    link 1        embed(best id of link 0), its hidden  -> layer -> best candidates of guess 1       ...

Each link is a graph of its own; they are launched one after the other and waited for once. Where the guesses stand is known
beforehand and copied in by link 0: positions, places, lengths [12]; the rest of a round of one row is the same in all.

Who calls: model/cuda.py. Proven by tests/test_cuda.py.
"""
import numpy as np

from ..kernels import gather
from ..step import Row
from .buffers import ALIGN, BEST, DTYPES, Bucket, Buffers
from .staging import place

LINKS = 11                      # a chain of 12 guesses: the deepest tree that is drafted unless --draft-depth says more
ONE = Bucket(1, 1, 1, 1)
OWN = ("positions", "places", "lengths")
RECORD = 2 * BEST * 4           # bytes of a link's results


class Chain:
    """Integers and results of the links, beside the arrays of a round that all share."""

    def __init__(self, backend, scratch):
        self.backend, self.scratch, self.offsets, count = backend, scratch, {}, 0
        for name, shape in {**ONE.fields(scratch.pages), **dict.fromkeys(OWN, (LINKS,)), "last": (1,)}.items():
            self.offsets[name] = count, shape
            count += -(-int(np.prod(shape)) // ALIGN) * ALIGN
        self.staging, self.integers = backend.staging((count,), np.int32), backend.zeros((count * 4,), np.uint8)
        self.host = {name: self.staging[at:at + int(np.prod(shape))] for name, (at, shape) in self.offsets.items()}
        self.best, self.host_best = backend.zeros((LINKS * RECORD,), np.uint8), backend.staging((LINKS, 2 * BEST), np.uint32)
        self.links = [self.link(i) for i in range(LINKS)]

    @property
    def nbytes(self):
        return self.integers.nbytes + self.best.nbytes

    def link(self, i):
        """The buffers of a round of one row, with integers and results of its own."""
        b, view = self.scratch.buffers(ONE), self.backend.view
        inputs = {name: view(self.integers, (at + i * (name in OWN)) * 4, (1,) if name in OWN else shape,
                             DTYPES.get(name, np.int32)) for name, (at, shape) in self.offsets.items()}
        before, at = (self.best, (i - 1) * RECORD) if i else (self.scratch.best, 0)
        inputs.update(
            tokens=view(before, at + BEST * 4, (1,), np.uint32), pair=b.normed if i else b.pair,
            best=view(self.best, i * RECORD, (2 * BEST,), np.uint32),
            best_values=view(self.best, i * RECORD, (1, BEST), np.float32),
            best_ids=view(self.best, i * RECORD + BEST * 4, (1, BEST), np.uint32))
        integers = view(self.integers, 0, (len(self.staging),), np.int32)
        return Buffers(ONE, self.staging, integers, {**b.inputs, **inputs}, {"best": self.host_best[i]})

    def stage(self, step, last, count):
        """Where the guesses behind the one sequence of a step stand; `last`: the row of its last round that was wanted."""
        host, beyond = self.host, np.arange(count)
        at = int(step.lengths[0]) + step.rows + beyond
        host["positions"][:count] = int(step.positions[-1]) + 1 + beyond
        host["lengths"][:count], host["places"][:count] = at, place(step.pages[0], at)
        host["pages"][:step.pages.shape[1]] = step.pages[0]
        host["starts"][:], host["parents"][:], host["ancestors"][:], host["outputs"][:] = (0, 1), -1, 1, 0
        host["last"][:] = last

    def begin(self, b):
        """Queue what precedes link 0: integers, and the hidden of the wanted row."""
        self.backend.write(b.integers, b.staging)
        gather.launch(self.backend.stream, self.scratch.arrays["normed"], b.last, b.pair)

    def rows(self, host, count) -> list[Row]:
        """What the round before, whose host arrays these are, and links 0 .. count - 1 found."""
        best = np.concatenate([host["best"][None], self.host_best[:count]])
        values, ids = best[:, :BEST].view(np.float32), best[:, BEST:].astype(np.int64)
        return [Row(None, *pair) for pair in zip(ids, values)]
