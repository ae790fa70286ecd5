"""Who knows of whose work: the happens-before relation between the threads of a block.

`now` is a clock that every synchronisation moves on. An access at time t by thread u is ordered before thread v's next
one if u is v itself, or if v's knowledge of u reaches past t. Knowledge is kept at three grains, coarsest first:

    block_until[v]   every thread of v's block, up to this time      (bar.sync of the whole block)
    warp_until[v]    every lane of v's warp                          (bar.warp.sync)
    seen[v, c]       writer c of v's block                           (named barriers, mbarriers; kept only where used)

Writers are the threads of the block, then one column for each mbarrier: data that an asynchronous copy brings is
written "by the mbarrier" that reports it, so whoever reads it must have seen that mbarrier complete.
"""
import numpy as np

from .dtypes import i4
from .spaces import WARP

MBARRIERS = 64                        # columns beyond the threads of a block


class Order:
    """partial: the kernel synchronises parts of a block, so `seen` is needed."""

    def __init__(self, threads, partial, start):
        self.threads, self.now = threads, start
        self.block_until = np.full(threads.count, start, i4)             # equal within a block; never changed in place
        self.warp_until = np.full(threads.count, start, i4)              # [threads], equal within a warp
        self.columns = threads.per + MBARRIERS
        self.seen = np.full((threads.count, self.columns), start, i4) if partial else None

    def tick(self):
        """Close the present instant: what happened so far is earlier than what comes next."""
        self.now += 1
        return self.now

    def ordered(self, thread, writer, time, block_done=False):
        """Whether accesses at `time` by `writer` (a column) are known to `thread`; arrays of one shape.

        block_done: block_until was compared already and said no."""
        known = writer == self.threads.local[thread]
        if not block_done:
            known |= time < self.block_until[thread]
        same_warp = writer // WARP == self.threads.local[thread] // WARP
        known |= same_warp & (writer < self.threads.per) & (time < self.warp_until[thread])
        if self.seen is not None:
            known |= time < self.seen[thread, writer]
        return known

    def warp_seen(self, thread, warp):
        """How far a thread knows any lane of a warp of its block (lenient: one lane stands for all)."""
        lanes = warp[..., None] * WARP + np.arange(WARP)
        known = self.block_until[thread]
        return known if self.seen is None else np.maximum(known, self.seen[thread[..., None], lanes].max(-1))

    def knowledge(self, members):
        """What a set of threads of one block knows together: [columns]. Their own work up to now is part of it."""
        rows = self.seen[members].max(0)
        known = np.maximum(rows, self.block_until[members[0]])
        for warp in np.unique(self.threads.warp[members]):
            mine = members[self.threads.warp[members] == warp]
            lanes = slice(*(int(warp) * WARP % self.threads.per + np.array([0, WARP])))
            known[lanes] = np.maximum(known[lanes], self.warp_until[mine[0]])
        known[self.threads.local[members]] = self.now + 1
        return known

    def learn(self, members, known):
        self.seen[members] = np.maximum(self.seen[members], known)

    def whole_block(self, mask=None):
        """All threads of some blocks (those with a thread in the mask) met."""
        until = self.tick()
        if mask is None:
            self.block_until = np.full(self.threads.count, until, i4)
        else:
            met = mask.reshape(self.threads.blocks, -1).any(1)
            self.block_until = np.where(met[self.threads.block], i4(until), self.block_until)

    def warps(self, mask):
        """The active lanes of each warp met (bar.warp.sync); a partial meeting counts only where `seen` is kept."""
        active = self.threads.active(mask).reshape(-1, WARP)
        alive = self.threads.active(None).reshape(-1, WARP)
        until, some = self.tick(), active.any(1)
        self.warp_until.reshape(-1, WARP)[some & (active == alive).all(1)] = until
        if self.seen is not None:
            for warp in np.flatnonzero(some):
                lanes = warp * WARP + np.flatnonzero(active[warp])
                self.seen[lanes] = self.seen[lanes].max(0)
                self.seen[np.ix_(lanes, self.threads.local[lanes])] = until

    def known_block(self, thread):
        """block_until of some threads."""
        return self.block_until if thread is self.threads.index else self.block_until[thread]

    def meeting(self, arrivers, waiters):
        """A named barrier of one block: those who wait learn what all who came know."""
        known = self.knowledge(arrivers)
        self.tick()
        self.learn(waiters, known)
