"""Asynchronous copies between global and shared memory: cp.async and cp.async.bulk.

Bytes are taken from the source at once, but are seen in shared memory only when a wait retires their group, or when
the mbarrier phase that they report to completes. Until then their destination is in flight and may not be touched.
"""
import numpy as np

from .dtypes import i4, i8, u1, u8
from .races import READ as GLOBAL_READ, WRITE as GLOBAL_WRITE
from .shared import IN_FLIGHT, READ, WRITE
from .spaces import SHARED_WINDOW

ROW = 16                              # bulk copies move rows of 16 bytes


def shared_address(address):
    """A shared address, given as such or as a generic one."""
    if address.dtype != u8:
        return address
    return np.where(address >> u8(32) == u8(SHARED_WINDOW >> 32), address - u8(SHARED_WINDOW), address)


class Copies:
    """The asynchronous copies of a group. Groups are counted a thread: `committed[t]` of them so far."""

    def __init__(self, group, access, mbarriers):
        self.threads, self.shared, self.fault, self.order = group.threads, group.shared, group.fault, group.order
        self.access, self.memory, self.races, self.mbarriers = access, access.memory, access.races, mbarriers
        self.committed, self.bulk_committed = (np.zeros(self.threads.count, i4) for _ in range(2))
        self.flying = []                                                 # (threads, their group, offsets, bytes)
        self.reading = []                                                # bulk stores: (thread, group, granules)

    def source(self, address, nbytes, thread, at):
        """[len(address), nbytes] bytes of global memory."""
        out = np.zeros((len(address), nbytes), u1)
        for selection, buffer, offset in self.memory.locate(address, nbytes, lambda j, m: self.fault(at, m, thread[j])):
            rows = np.arange(len(address)) if selection is None else selection
            piece = min(nbytes & -nbytes, ROW)                           # a power of two that divides it
            starts = (offset[:, None] + np.arange(0, nbytes, piece)).ravel()
            self.races.touch(buffer, starts, piece, np.repeat(thread[rows], nbytes // piece), at, GLOBAL_READ)
            where = offset[:, None] + np.arange(nbytes)
            if buffer.written is not None and not buffer.written[where].all():
                self.fault(at, f"copy from {buffer.name} of bytes that nothing wrote", thread[rows[0]])
            out[rows] = buffer.data[where]
        return out

    def aligned(self, address, nbytes, thread, what, at):
        if (wrong := address & address.dtype.type(nbytes - 1)).any():
            j = int(np.flatnonzero(wrong)[0])
            self.fault(at, f"misaligned {what}: {int(address[j]):#x} is no multiple of {nbytes}", thread[j])

    # ---- cp.async
    def copy(self, target, source, size, valid, mask, at):
        """cp.async of `size` bytes a thread, the first `valid` (None: all) of them read, the others zero."""
        thread = self.threads.chosen(mask)
        if not thread.size:
            return
        data = np.zeros((len(thread), size), u1)
        count = np.full(len(thread), size) if valid is None else np.minimum(valid[thread], size).astype(i8)
        self.aligned(source[thread], size, thread, "cp.async source", at)
        for n in np.unique(count[count > 0]).tolist():
            rows = np.flatnonzero(count == n)
            data[rows, :n] = self.source(source[thread[rows]], n, thread[rows], at)
        to = shared_address(target[thread])
        self.aligned(to, size, thread, "cp.async destination", at)
        offset = self.shared.offsets(to, size, thread, at)
        self.shared.touch(offset, size, thread, at, WRITE, IN_FLIGHT)
        self.flying.append((thread, self.committed[thread], offset, data))

    def commit(self, mask):
        self.committed = self.committed + self.threads.active(mask)

    def wait(self, newest, mask, at):
        """cp.async.wait_group: all but the `newest` groups have landed (-1: all, committed or not)."""
        active, still = self.threads.active(mask), []
        for thread, group, offset, data in self.flying:
            done = active[thread] & ((group < self.committed[thread] - newest) if newest >= 0 else True)
            if done.any():
                self.land(thread[done], offset[done], data[done])
            if not done.all():
                still.append((thread[~done], group[~done], offset[~done], data[~done]))
        self.flying = still

    def land(self, thread, offset, data):
        writer = np.repeat(self.threads.local[thread], max(data.shape[1] >> self.shared.shift, 1))
        self.shared.land(offset, data, writer, thread)

    def report(self, address, increment, mask, at):
        """cp.async.mbarrier.arrive: the thread's copies so far land with the mbarrier's phase, which this arrival
        completes. (Without .noinc the arrival was not counted before: it is, here.)"""
        active, still = self.threads.active(mask), []
        found = {int(t): (block, slot) for block, slot, members in self.mbarriers.members(address, mask, at)
                 for t in members}
        for thread, group, offset, data in self.flying:
            mine = active[thread]
            for t in np.unique(thread[mine]).tolist():
                rows = np.flatnonzero(thread == t)
                self.mbarriers.attach(*found[t], offset[rows], data[rows])
            if not mine.all():
                still.append((thread[~mine], group[~mine], offset[~mine], data[~mine]))
        self.flying = still
        if increment:
            for block, slot in found.values():
                self.mbarriers.pending[block, slot] += 1
        self.mbarriers.arrive(address, 1, 0, False, False, mask, at)

    # ---- cp.async.bulk
    def bulk_rows(self, source, target, size, thread, at):
        """Offsets of the 16-byte rows of a bulk copy, after the checks of its operands."""
        one = np.array([thread])
        for address, what in ((source, "source"), (target, "destination")):
            self.aligned(np.array([address]), ROW, one, f"cp.async.bulk {what}", at)
        if size % ROW:
            self.fault(at, f"cp.async.bulk of {size} bytes, wanted a multiple of {ROW}", thread)
        return np.arange(0, size, ROW)

    def bulk_load(self, target, source, size, barrier, mask, at):
        """cp.async.bulk.shared.global, reporting its bytes to an mbarrier."""
        size = np.broadcast_to(size, (self.threads.count,))
        for block, slot, members in self.mbarriers.members(barrier, mask, at):
            for t in members.tolist():
                n, to = int(size[t]), int(shared_address(target[t:t + 1])[0])
                rows = self.bulk_rows(int(source[t]), to, n, t, at)
                who = np.full(len(rows), t)
                if not n:
                    continue
                data = self.source(np.array([source[t]], u8), n, who[:1], at).reshape(-1, ROW)
                offset = self.shared.offsets(np.int64(to) + rows, ROW, who, at)
                self.shared.check_fence(*self.shared.granules(offset, ROW, who), at, "cp.async.bulk overwrites, and ")
                self.shared.touch(offset, ROW, who, at, WRITE, IN_FLIGHT)
                self.mbarriers.attach(block, slot, offset, data)
                self.mbarriers.complete_bytes(block, slot, n)

    def bulk_store(self, target, source, size, mask, at):
        """cp.async.bulk.global.shared: the shared bytes stay locked until wait_group(.read)."""
        size = np.broadcast_to(size, (self.threads.count,))
        for t in self.threads.chosen(mask).tolist():
            n, start = int(size[t]), int(shared_address(source[t:t + 1])[0])
            rows = self.bulk_rows(start, int(target[t]), n, t, at)
            if not n:
                continue
            who = np.full(len(rows), t)
            offset = self.shared.offsets(np.int64(start) + rows, ROW, who, at)
            self.shared.touch(offset, ROW, who, at, READ, who="cp.async.bulk: ")
            to = np.array([target[t]], u8)
            (_, buffer, base), = self.memory.locate(to, n, lambda j, m: self.fault(at, m, t))
            if not buffer.writable:
                self.fault(at, f"bulk store to {buffer.name}, which is read-only", t)
            self.races.touch(buffer, base[0] + rows, ROW, who, at, GLOBAL_WRITE)
            self.access.writes += 1
            buffer.data[base[0]:base[0] + n] = self.shared.data[offset[0]:offset[0] + n]
            if buffer.written is not None:
                buffer.written[base[0]:base[0] + n] = 1
            granules = np.unique(self.shared.granules(offset, ROW, who)[0])
            self.shared.locks[granules] += 1
            self.reading.append((t, int(self.bulk_committed[t]), granules))

    def bulk_commit(self, mask):
        self.bulk_committed = self.bulk_committed + self.threads.active(mask)

    def bulk_wait(self, newest, mask):
        """cp.async.bulk.wait_group: what older groups read may be overwritten."""
        active, still = self.threads.active(mask), []
        for t, group, granules in self.reading:
            if active[t] and group < self.bulk_committed[t] - newest:
                self.shared.release(granules, np.array([t]))
            else:
                still.append((t, group, granules))
        self.reading = still

    def unfinished(self):
        """A word about copies that nobody waited for, or None."""
        if self.flying:
            return "a cp.async in flight", int(self.flying[0][0][0])
        if self.reading:
            return "a cp.async.bulk still reading shared memory", int(self.reading[0][0])
        if self.mbarriers is not None and self.mbarriers.attached:
            return "a cp.async.bulk in flight", next(iter(self.mbarriers.attached))[0] * self.threads.per
        return None
