"""All graphs of a CUDA tower, recorded before it serves: what is captured later would take memory that nobody reckoned with.

    forward, mtp   for each bucket of a round (buffers.py)        link 0 .. 10   a chain of drafts (chain.py)
    settle, moves  one each                                       wide           for the sizes of chunks that are worth it

Who calls: model/cuda.py, before the first request; rehearsal.py, on a tower that only counts.
"""
import numpy as np
from tqdm import tqdm

from ..kvpool import pages_for
from ..step import Rows, pack
from .buffers import Bucket
from .wide import SIZES, chunks

ALONE = Bucket.of(0, 1, 0, 0)       # a plan of one sequence and no rows


def capture(tower):
    """Record them, with progress shown."""
    work = [(tower.record, what, b, queue) for what, b, queue in rounds(tower)]
    if tower.wide:
        tower.wide.settle_matrices()
        work += [(record_chunk, tower, rows) for rows in sorted({*SIZES, tower.wide.most}) if rows <= tower.wide.most]
    for record, *what in tqdm(work, desc="capturing", unit="graph", leave=False, disable=None):
        record(*what)
    tower.backend.synchronize()


def rounds(tower):
    """(what, buffers, the function that queues it) of every round."""
    buckets, buffers = Bucket.every(tower.ledger.pairs), tower.scratch.buffers
    yield "settle", buffers(ALONE), tower.queue_settle
    yield "moves", None, tower.queue_moves
    for bucket in buckets:
        yield "forward", buffers(bucket), tower.queue_forward
    for bucket in buckets if tower.mtp else ():
        yield "mtp", buffers(bucket), tower.queue_mtp
    for i, b in enumerate(tower.chain.links if tower.mtp else ()):
        yield f"link {i}", b, tower.queue_link


def record_chunk(tower, rows):
    """A chunk of so many rows, whatever they are."""
    nothing = np.zeros(0, np.int32)
    step = pack([Rows(np.zeros(rows, np.int32), 0, np.zeros(pages_for(rows), np.int32), 0, nothing)])
    span, = chunks(step, 0, tower.wide.most)
    chunk = tower.wide.arena.stage(step, span, nothing)
    tower.backend.synchronize()                     # the integers have left their place
    tower.graphs["wide", rows] = tower.backend.record(lambda: tower.wide.queue(chunk))
