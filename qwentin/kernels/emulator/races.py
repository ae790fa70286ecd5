"""Races in global memory: between threads of a block, and between blocks, which run in no particular order.

A Shadow remembers, for each granule of a buffer, the last writer and the readers since. Accesses of one block are
ordered by its Order. Between blocks only a release and an acquire order anything: a thread publishes what it knows
with an atomic or a store that has .release, or with a strong one after its own device-wide fence; a block that later
takes an atomic on that address, or reads it with .acquire, has learned it. (The whole block at once: the barrier
that passes the news on inside the block is not asked for here.)

Buffers that a launch only reads cost almost nothing: reads are noted, and looked at when somebody writes.
"""
import numpy as np

from .dtypes import i4, i8
from .spaces import WARP

# How memory is accessed. Strong ones (acquire, release, relaxed, volatile; atomics) do not race with one another.
READ, NC_READ, WRITE = "read", "nc read", "write"
STRONG_READ, STRONG_WRITE, ATOMIC = "strong read", "strong write", "atomic"
STRONG = {STRONG_READ, STRONG_WRITE, ATOMIC}
READS = {READ, NC_READ, STRONG_READ}
MANY = -2
START = 16                            # bytes of a granule, before a narrower access splits them
NOTED_BYTES = 1 << 26                 # how much may be noted before it is entered


class Shadow:
    """Who touched the granules of one buffer. Threads are numbered through the whole grid."""

    def __init__(self, size):
        self.size, self.granule = size, START
        self.written, self.reads, self.noted = False, [], 0
        self.w_thread = self.w_time = self.w_strong = self.r_thread = self.r_block = self.r_time = None

    def arrays(self):
        n = -(-self.size // self.granule)
        self.w_thread, self.w_time, self.w_strong = np.full(n, -1, i8), np.full(n, -1, i4), np.zeros(n, bool)
        self.r_thread, self.r_block, self.r_time = np.full(n, -1, i8), np.full(n, -1, i4), np.full(n, -1, i4)

    def refine(self, nbytes):
        """Granules as narrow as the narrowest access."""
        if nbytes >= self.granule:
            return
        times, self.granule = self.granule // nbytes, nbytes
        if self.w_thread is not None:
            for name in ("w_thread", "w_time", "w_strong", "r_thread", "r_block", "r_time"):
                setattr(self, name, np.repeat(getattr(self, name), times))

    def granules(self, offset, nbytes, *others):
        first, n = offset // self.granule, nbytes // self.granule
        if n <= 1:
            return first, *others
        return (first[:, None] + np.arange(n)).ravel(), *(np.repeat(o, n) for o in others)


class GlobalRaces:
    """The race check of one launch; `order` and `threads` are those of the group that runs now."""

    def __init__(self, threads, order, news, fault):
        self.threads, self.order, self.news, self.fault = threads, order, news, fault

    def touch(self, buffer, offset, nbytes, thread, at, how):
        """Check and remember an access of `nbytes` (a power of two) at each offset by `thread` (group indices)."""
        shadow = buffer.shadow
        if shadow.written or how not in READS:
            if shadow.w_thread is None:
                shadow.arrays()
            shadow.refine(nbytes)
            g, each = shadow.granules(offset, nbytes, thread)
            self.check_writer(buffer, g, each, at, how)
        if how in (READ, NC_READ):
            self.note(shadow, offset, nbytes, thread)
        if how in READS:
            return
        if shadow.reads:
            self.digest(shadow)
        self.check_readers(buffer, g, each, at)
        me = self.threads.linear(each)
        shadow.w_thread[g], shadow.w_time[g], shadow.w_strong[g] = me, self.order.now, how in STRONG
        shadow.written = True
        if how == WRITE and (bad := shadow.w_thread[g] != me).any():
            self.blame(bad, shadow, g, each, at, f"race: two threads write the same bytes of {buffer.name} at once")

    def blame(self, bad, shadow, g, thread, at, message):
        j = int(np.flatnonzero(bad)[0])
        self.fault(at, f"{message}, offset {int(g[j]) * shadow.granule}", thread[j])

    def note(self, shadow, offset, nbytes, thread):
        until = self.order.known_block(thread)
        shadow.reads.append((self.order.now, offset, nbytes, self.threads.linear(thread), until))
        shadow.noted += offset.nbytes * 2
        if shadow.noted > NOTED_BYTES:
            if shadow.w_thread is None:
                shadow.arrays()
            self.digest(shadow)

    def check_writer(self, buffer, g, thread, at, how):
        shadow = buffer.shadow
        writer = shadow.w_thread[g]
        suspect = writer >= 0
        if how == NC_READ and suspect.any():
            self.blame(suspect, shadow, g, thread, at, f"{buffer.name} is read with .nc and was written by this kernel")
        suspect = np.flatnonzero(suspect & (writer != self.threads.linear(thread)))
        if how in STRONG:
            suspect = suspect[~shadow.w_strong[g[suspect]]]
        if not len(suspect):
            return
        g, thread, writer = g[suspect], thread[suspect], writer[suspect]
        fine = self.known(thread, writer, shadow.w_time[g])
        for j in np.flatnonzero(~fine & shadow.w_strong[g]):             # after one's own atomic on the same address
            fine[j] = self.news.met(self.block(thread[j]), buffer.base + int(g[j]) * shadow.granule)
        if not fine.all():
            block, local = divmod(int(writer[np.flatnonzero(~fine)[0]]), self.threads.per)
            self.blame(~fine, shadow, g, thread, at,
                       f"race: {buffer.name} is {'read' if how in READS else 'written'} here and written by thread "
                       f"{local} of block {block} with nothing to order them")

    def block(self, thread):
        """The grid's number of a thread's block."""
        return int(self.threads.ids[self.threads.block[thread]])

    def known(self, thread, other, time):
        """Whether accesses at `time` by threads `other` (of the grid) are ordered before `thread`'s present one."""
        block = self.threads.ids[self.threads.block[thread]]
        mine = other // self.threads.per == block
        known = np.zeros(thread.shape, bool)
        if mine.any():
            known[mine] = self.order.ordered(thread[mine], other[mine] % self.threads.per, time[mine])
        for b in np.unique(block[~mine]):
            rows = np.flatnonzero(~mine & (block == b))
            known[rows] = self.news.covers(int(b), other[rows], time[rows])
        return known

    def check_readers(self, buffer, g, thread, at):
        """Reads by others: all must be ordered before this write."""
        shadow = buffer.shadow
        reader = shadow.r_thread[g]
        suspect = np.flatnonzero((reader != -1) & (reader != self.threads.linear(thread)))
        if not len(suspect):
            return
        g, thread, reader = g[suspect], thread[suspect], reader[suspect]
        time, block = shadow.r_time[g], self.threads.ids[self.threads.block[thread]]
        mine, single = shadow.r_block[g] == block, reader >= 0
        fine = mine & (time < self.order.block_until[thread])
        if self.order.seen is not None:                                  # several readers, partial barriers: let pass
            fine |= mine & ~single
        rest = np.flatnonzero(~fine & single)
        fine[rest] = self.known(thread[rest], reader[rest], time[rest])
        for j in np.flatnonzero(~fine & ~mine & ~single):
            fine[j] = self.news.covers_all(int(block[j]), int(time[j]))
        if not fine.all():
            self.blame(~fine, shadow, g, thread, at,
                       f"race: {buffer.name} is written here and read by another thread with nothing to order them")

    def digest(self, shadow):
        """Enter the noted reads into the granules' records."""
        for _, _, nbytes, _, _ in shadow.reads:
            shadow.refine(nbytes)
        for time, offset, nbytes, reader, until in shadow.reads:
            g, reader, until = shadow.granules(offset, nbytes, reader, until)
            block = reader // self.threads.per
            # earlier readers of the block that a barrier ordered before this one are covered by it
            fresh = (shadow.r_thread[g] == -1) | (shadow.r_block[g] == block) & (shadow.r_time[g] < until)
            for record, me in ((shadow.r_thread, reader), (shadow.r_block, block)):
                new = np.where(fresh | (record[g] == me), me, MANY)
                record[g] = new
                record[g[record[g] != new]] = MANY
            shadow.r_time[g] = time
        shadow.reads, shadow.noted = [], 0


class News:
    """What blocks have published through atomics and releasing stores, and which of it each block has acquired."""

    def __init__(self, per):
        self.per, self.published, self.acquired, self.summaries = per, {}, {}, {}

    def release(self, address, thread, block, fenced):
        """fenced: (time, block_until, warp_until) at the fence that stands for this release."""
        entry = (thread, block, fenced, len(self.acquired.get(block, ())))
        self.published.setdefault(address, []).append(entry)

    def acquire(self, address, block):
        if address in self.published:
            self.acquired.setdefault(block, []).append((address, len(self.published[address])))

    def met(self, block, address):
        """Whether a block has acquired this very address."""
        return any(address == known for known, _ in self.acquired.get(block, ()))

    def learned(self, block):
        """All entries that a block has acquired, directly or through others."""
        todo, done, entries = [(block, len(self.acquired.get(block, ())))], {}, []
        while todo:
            b, n = todo.pop()
            for address, count in self.acquired.get(b, ())[done.get(b, 0):n]:
                for entry in self.published[address][:count]:
                    entries.append(entry)
                    if entry[3] > done.get(entry[1], 0):
                        todo.append((entry[1], entry[3]))
            done[b] = max(n, done.get(b, 0))
        return entries

    def summary(self, block):
        """{block: time}, {warp: time}, {thread: time} up to which a block knows them; kept until it acquires more."""
        have = len(self.acquired.get(block, ()))
        if self.summaries.get(block, (None,))[0] != have:
            known = {}, {}, {}
            for thread, b, times, _ in self.learned(block):
                for which, key, time in zip(known, (b, thread // WARP, thread), (times[1], times[2], times[0])):
                    which[key] = max(which.get(key, 0), time)
            self.summaries[block] = have, known
        return self.summaries[block][1]

    def covers(self, block, other, time):
        """Whether accesses at `time` by threads `other` are known to a block."""
        blocks, warps, threads = self.summary(block)
        return np.array([t < max(blocks.get(o // self.per, 0), warps.get(o // WARP, 0), threads.get(o, 0))
                         for o, t in zip(other.tolist(), time.tolist())], bool)

    def covers_all(self, block, time):
        """Whether every block's accesses at `time` are known to a block (readers that were not told apart)."""
        blocks = self.summary(block)[0]
        return bool(blocks) and all(time < until for until in blocks.values())
