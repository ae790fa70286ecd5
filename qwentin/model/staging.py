"""The integers of a round, written into a bucket's host arrays: who owns which rows, where keys go, what each row sees.

Who calls: model/cuda.py, with the spans of rounds.py and the fields of buffers.py. Proven by tests/test_cuda.py.
"""
from dataclasses import dataclass

import numpy as np

from ..kernels import plan
from ..kvpool import PAGE
from ..step import ancestors, is_chain
from .buffers import ROWS, Buffers


@dataclass
class Part:
    """What one round is of a step: its buffers, how many rows and outputs, and which of the step's they are."""
    buffers: Buffers
    rows: int
    outputs: int
    at: slice | np.ndarray          # of the step's rows
    wanted: slice | np.ndarray      # of the step's outputs
    places: np.ndarray              # rows of the round that are outputs

    @classmethod
    def of(cls, step, spans, scratch):
        rows = sum(s.count for s in spans)
        at, wanted, places = slice(None), slice(None), step.outputs
        if rows < step.rows:
            at = np.concatenate([np.arange(s.first, s.first + s.count) for s in spans])
            wanted = np.flatnonzero(np.isin(step.outputs, at))
            places = np.searchsorted(at, step.outputs[wanted])
        buffers = scratch.fitting(rows, len(spans), max(s.count for s in spans), len(places))
        return cls(buffers, rows, len(places), at, wanted, places)


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


PAD = np.array([-1, 0, 0, -1, -1, 0, -1, -1], np.int32)     # a row of the plan for no sequence


def pad(host, rows, sequences):
    """What belongs to no row and no sequence."""
    if rows < len(host["tokens"]):
        for name, value in (("tokens", 0), ("positions", 0), ("places", -1), ("parents", -1), ("ancestors", 0)):
            host[name][rows:] = value
    host["starts"][:], host["lengths"][sequences:], host["pages"][sequences:], host["outputs"][:] = rows, 0, 0, 0
    host["plan"][:, :plan.HEADER] = PAD


def fill(host, step, i, span, row, debt):
    """Sequence i of a round: its rows begin at `row`."""
    r, n, own = span.r, span.count, slice(row, row + span.count)
    length = int(step.lengths[r]) + len(step.accepted[r]) + span.done
    if n == 1:                                  # plain decode: numpy's overhead would be most of the host's time
        host["places"][row], host["parents"][row], host["ancestors"][row] = place(step.pages[r], length), -1, 1
    else:
        parents = step.parents[span.first:span.first + n] - span.done
        host["places"][own], host["parents"][own] = place(step.pages[r], length + np.arange(n)), parents
        host["ancestors"][own] = CHAIN[:n] if is_chain(parents) else \
            (ancestors(parents) << np.arange(n, dtype=np.uint32)).sum(1).astype(np.uint32)
    host["starts"][i], host["lengths"][i] = row, length
    host["pages"][i, :step.pages.shape[1]] = step.pages[r]
    if debt is not None:
        before, now, path = debt
        host["plan"][i, :6] = step.slots[r], row, n, before, now, len(path)
        host["plan"][i, plan.HEADER:plan.HEADER + len(path)] = path
