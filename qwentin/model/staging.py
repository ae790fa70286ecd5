"""The integers of a round, written into a bucket's host arrays: who owns which rows, where keys go, what each row sees.

Who calls: model/cuda.py, with the spans of rounds.py and the fields of buffers.py. Proven by tests/test_cuda.py.
"""
import numpy as np

from ..kernels import plan
from ..kvpool import PAGE
from ..step import ancestors, is_chain
from .buffers import ROWS

CHAIN = (2 << np.arange(ROWS, dtype=np.uint64)) - 1       # row i of a chain sees rows 0 .. i


def gaps(step, span):
    """The (from, to) places of accepted rows that do not stand where they belong; only a tree's can."""
    accepted = () if span.done else step.accepted[span.r]
    return path_moves(step.pages[span.r], int(step.lengths[span.r]), accepted)


def path_moves(pages, length, accepted):
    """The same for the accepted rows of one tree behind `length` rows."""
    if not len(accepted) or is_chain(np.asarray(accepted) - 1):
        return []
    return [(place(pages, length + int(row)), place(pages, length + to)) for to, row in enumerate(accepted)]


def place(pages, row):
    """page * 128 + row of a sequence's token row, or of an array of them."""
    return pages[row // PAGE] * PAGE + row % PAGE


def pad(host, rows, sequences):
    """What belongs to no row and no sequence."""
    for name, value in (("tokens", 0), ("positions", 0), ("places", -1), ("parents", -1), ("ancestors", 0)):
        host[name][rows:] = value
    host["starts"][:], host["lengths"][:], host["pages"][:], host["plan"][:], host["outputs"][:] = rows, 0, 0, -1, 0
    host["plan"][:, [1, 2, 5]] = 0
    host["moves"][0] = 0


def fill(host, step, i, span, row, debt):
    """Sequence i of a round: its rows begin at `row`."""
    r, n, own = span.r, span.count, slice(row, row + span.count)
    length = int(step.lengths[r]) + len(step.accepted[r]) + span.done
    parents = step.parents[span.first:span.first + n] - span.done
    host["places"][own] = place(step.pages[r], length + np.arange(n))
    if is_chain(parents):
        host["ancestors"][own] = CHAIN[:n]
    else:
        host["ancestors"][own] = (ancestors(parents) << np.arange(n, dtype=np.uint32)).sum(1).astype(np.uint32)
    host["parents"][own] = parents
    host["starts"][i], host["lengths"][i] = row, length
    host["pages"][i, :step.pages.shape[1]] = np.maximum(step.pages[r], 0)
    if debt is not None:
        before, now, path = debt
        host["plan"][i, :6] = step.slots[r], row, n, before, now, len(path)
        host["plan"][i, plan.HEADER:plan.HEADER + len(path)] = path
