"""Shared memory of a group of blocks, and what its checks remember.

The memory is cut into granules, the narrowest access the kernel makes. Each granule knows
    state       never written, written, in flight (an asynchronous copy is on its way), or part of an mbarrier
    writer      who wrote it last and when; whether by an atomic
    readers     who read it since, and when: one thread, several lanes of one warp, or several warps
    locks       how many asynchronous operations (wgmma, bulk stores) may still be reading it
Order decides which earlier accesses a thread has synchronised with; the others are races. Reads are only noted down
until a write makes them matter: most phases of a kernel read a lot and write nothing.
"""
import numpy as np

from .dtypes import i2, i4, u1
from .spaces import SHARED_BASE, WARP

NEVER, WRITTEN, IN_FLIGHT, MBARRIER = range(4)
READ, WRITE, ATOMIC = "read", "write", "atomic"
MANY = -2                             # in a record of readers: more than one
NOTED = 512                           # how many reads are noted before they are entered all the same


class SharedMemory:
    """size: bytes a block; shift: log2 of the granule; fault(at, message, thread) raises."""

    def __init__(self, threads, order, size, shift, fault):
        self.threads, self.order, self.size, self.shift, self.fault = threads, order, size, shift, fault
        self.stride = -(-(size + 1) // 128) * 128
        self.data = np.zeros(threads.blocks * self.stride, u1)
        self.base = threads.block * self.stride - SHARED_BASE            # [threads]: address + base = offset in data
        n = self.data.size >> shift
        self.state, self.locks = np.zeros(n, u1), np.zeros(n, i2)
        self.w_time, self.w_column, self.w_atomic = np.full(n, -1, i4), np.full(n, -1, i4), np.zeros(n, bool)
        self.r_time, self.r_thread, self.r_warp = np.full(n, -1, i4), np.full(n, -1, i4), np.full(n, -1, i4)
        self.r_by_warp = None if order.seen is None else np.full((n, threads.per // WARP), -1, i4)
        self.reads = []                                                  # (time, granules, threads) not yet looked at
        self.fenced = np.zeros(threads.count, i4)                        # when a thread last executed fence.proxy.async
        self.fence_knew = np.zeros(threads.count, i4)                    # block_until as it was then

    def offsets(self, address, nbytes, thread, at):
        """Byte offsets in `data` of addresses that `thread` uses, after the bounds check."""
        address = address.astype(np.int64)
        bad = (address < SHARED_BASE) | (address + nbytes > SHARED_BASE + self.size)
        if bad.any():
            j = int(np.flatnonzero(bad)[0])
            self.fault(at, f"shared access of {nbytes} bytes at offset {int(address[j]) - SHARED_BASE} is outside the "
                           f"block's {self.size} bytes", thread[j])
        return address + self.base[thread]

    def granules(self, offset, nbytes, thread):
        """(granules, threads), one entry for each granule of each access."""
        first, n = offset >> self.shift, nbytes >> self.shift
        if n <= 1:
            return first, thread
        return (first[:, None] + np.arange(n)).ravel(), np.repeat(thread, n)

    def touch(self, offset, nbytes, thread, at, how=READ, state=WRITTEN, who=""):
        """Check and remember an access by `thread` (an array). state: what a written granule becomes.

        who: names an asynchronous reader, which needs generic writes to be fenced for it."""
        g, thread = self.granules(offset, nbytes, thread)
        self.check_state(g, thread, how, at, who)
        late = self.w_time[g] >= self.order.block_until[thread]
        if late.any():
            self.check_writer(g[late], thread[late], how, at, who)
        if how == READ:
            if who:
                self.check_fence(g, thread, at, who)
            self.reads.append((self.order.now, g, thread))
            if len(self.reads) > NOTED:
                self.digest_reads()
            return
        self.check_readers(g, thread, at, who)
        column = self.threads.local[thread]
        self.w_time[g], self.w_column[g], self.w_atomic[g], self.state[g] = self.order.now, column, how == ATOMIC, state
        if how == WRITE and (bad := self.w_column[g] != column).any():
            self.blame(bad, g, thread, at, f"{who}race: two threads write the same bytes at once")

    def blame(self, bad, g, thread, at, message):
        """Raise for the first bad granule."""
        j = int(np.flatnonzero(bad)[0])
        offset = (int(g[j]) << self.shift) % self.stride
        self.fault(at, f"{message}, shared offset {offset}", thread[j])

    def check_state(self, g, thread, how, at, who):
        state = self.state[g]
        if how == READ and (state != WRITTEN).any() or (state > WRITTEN).any():
            for wrong, message in (
                    ((state == NEVER) & (how == READ), "read of shared memory that nothing wrote"),
                    (state == IN_FLIGHT, "shared memory touched while an asynchronous copy to it is in flight"),
                    (state == MBARRIER, "an mbarrier touched as if it were data")):
                if wrong.any():
                    self.blame(wrong, g, thread, at, who + message)
        if how != READ and (bad := self.locks[g] > 0).any():
            self.blame(bad, g, thread, at,
                       f"{who}shared memory overwritten while an asynchronous operation may still read it")

    def check_writer(self, g, thread, how, at, who):
        """The last write must be ordered before this access (or both be atomic)."""
        column = self.w_column[g]
        bad = ~self.order.ordered(thread, column, self.w_time[g], block_done=True)
        if how == ATOMIC:
            bad &= ~self.w_atomic[g]
        if bad.any():
            j = int(np.flatnonzero(bad)[0])
            writer = (f"thread {int(column[j])}" if column[j] < self.threads.per else
                      "an asynchronous copy whose mbarrier this thread has not seen complete")
            deed = "read" if how == READ else "written"
            self.blame(bad, g, thread, at, f"{who}race: {deed} here, written by {writer} with no barrier in between")

    def check_fence(self, g, thread, at, who):
        """What the generic proxy wrote needs fence.proxy.async, by the writer or, once synchronised, by the reader."""
        column, time = self.w_column[g], self.w_time[g]
        writer = self.threads.block[thread] * self.threads.per + np.minimum(column, self.threads.per - 1)
        bad = (column < self.threads.per) & (time >= self.fenced[writer]) & (time >= self.fence_knew[thread])
        if bad.any():
            self.blame(bad, g, thread, at, f"{who}reads what threads wrote with no fence.proxy.async in between")

    def proxy_fence(self, mask):
        active = self.threads.active(mask)
        self.fenced[active] = self.order.tick()
        self.fence_knew[active] = self.order.block_until[active]

    # ---- readers
    def check_readers(self, g, thread, at, who):
        """Every read since the last barrier must be ordered before this write."""
        if self.reads:
            self.digest_reads()
        late = self.r_time[g] >= self.order.block_until[thread]
        if not late.any():
            return
        g, thread = g[late], thread[late]
        warp, reader_warp = self.threads.warp[thread], self.r_warp[g]
        fine = self.r_thread[g] == thread
        fine |= (reader_warp == warp) & (self.r_time[g] < self.order.warp_until[thread])
        if self.r_by_warp is not None and not fine.all():
            rest = np.flatnonzero(~fine & (reader_warp != warp))
            fine[rest] = self.known_readers(g[rest], thread[rest])
        if not fine.all():
            self.blame(~fine, g, thread, at,
                       f"{who}race: written here, read by another thread with no barrier in between")

    def known_readers(self, g, thread):
        """Whether all warps but the writer's own are known, up to their last read of the granule, to the writer."""
        warps = np.arange(self.r_by_warp.shape[1])
        known = np.stack([self.order.warp_seen(thread, np.full(thread.shape, w)) for w in warps], -1)
        own = warps == (self.threads.local[thread] // WARP)[:, None]
        return ((self.r_by_warp[g] < known) | own).all(-1)

    def digest_reads(self):
        """Enter the noted reads into the granules' records; those before everyone's last barrier are forgotten."""
        settled = int(self.order.block_until.min())
        for time, g, thread in self.reads:
            if time < settled:
                continue
            warp = self.threads.warp[thread]
            fresh = self.r_time[g] < self.order.block_until[thread]
            for record, me in ((self.r_thread, thread), (self.r_warp, warp)):
                old = record[g]
                new = np.where(fresh | (old == me), me, MANY)
                record[g] = new
                mixed = record[g] != new                                 # several threads of this very access
                record[g[mixed]] = MANY
            self.r_time[g] = time
            if self.r_by_warp is not None:
                self.r_by_warp[g, self.threads.local[thread] // WARP] = time
        self.reads = []

    # ---- asynchronous copies
    def land(self, offset, data, column, block_thread):
        """Bytes of an asynchronous copy arrive: from now on the granules are written, by `column` of that block."""
        self.data[offset[:, None] + np.arange(data.shape[1])] = data
        g, _ = self.granules(offset, data.shape[1], block_thread)
        self.state[g], self.w_time[g], self.w_column[g], self.w_atomic[g] = WRITTEN, self.order.now, column, False

    def release(self, granules, threads):
        """An asynchronous operation, waited for by `threads`, has finished reading these granules."""
        self.locks[granules] -= 1
        self.reads.append((self.order.now, np.tile(granules, len(threads)), np.repeat(threads, len(granules))))
