"""Loads, stores and atomics: an address finds its space, is checked, and bytes move.

A thread's masked-off lanes get zeros from a load; nobody looks at them.
"""
import numpy as np

from .arithmetic import half
from .dtypes import i4, i8, u1, u8, word
from .races import ATOMIC, READ, STRONG_READ, STRONG_WRITE, WRITE
from .spaces import LOCAL_WINDOW, SHARED_WINDOW

WINDOWS = (("shared", SHARED_WINDOW), ("local", LOCAL_WINDOW), ("global", 0))
ALL_WRITTEN = 0x0101010101010101


class Access:
    """The load and store unit of a group."""

    def __init__(self, group, memory, races, local_bytes):
        self.threads, self.order, self.shared, self.fault = group.threads, group.order, group.shared, group.fault
        self.memory, self.races, self.writes = memory, races, 0         # writes: stores to global memory so far
        self.local_bytes, self.local_stride = local_bytes, -(-max(local_bytes, 1) // 16) * 16
        self.local = np.zeros(self.threads.count * self.local_stride, u1)
        self.local_written = np.zeros(self.local.size, u1)
        n = self.threads.count
        self.fences = np.full((n, 3), -1, i4)                            # at the last fence: time, what was known

    def route(self, space, address, nbytes, thread, at):
        """[(selection or None for all, space, buffer or None, byte offsets)] of checked addresses."""
        if (wrong := address & address.dtype.type(nbytes - 1)).any():
            j = int(np.flatnonzero(wrong)[0])
            self.fault(at, f"misaligned access: {nbytes} bytes at {int(address[j]):#x}", thread[j])
        if space == "generic":
            return self.route_generic(address, nbytes, thread, at)
        if space in ("global", "const"):
            found = self.memory.locate(address.astype(u8, copy=False), nbytes,
                                       lambda j, message: self.fault(at, message, thread[j]))
            return [(selection, "global", buffer, offset) for selection, buffer, offset in found]
        if space == "shared":
            return [(None, space, None, self.shared.offsets(address, nbytes, thread, at))]
        offset = address.astype(i8)
        if (wrong := (offset < 0) | (offset + nbytes > self.local_bytes)).any():
            j = int(np.flatnonzero(wrong)[0])
            self.fault(at, f"local access of {nbytes} bytes at offset {int(offset[j])}, outside the thread's "
                           f"{self.local_bytes}", thread[j])
        return [(None, space, None, offset + thread * self.local_stride)]

    def route_generic(self, address, nbytes, thread, at):
        """A generic address lies in the window of its space."""
        parts, high = [], address >> u8(32)
        for space, window in WINDOWS:
            inside = (high == u8(window >> 32) if window else
                      (high != u8(SHARED_WINDOW >> 32)) & (high != u8(LOCAL_WINDOW >> 32)))
            rows = np.flatnonzero(inside)
            if len(rows):
                for selection, *rest in self.route(space, address[rows] - u8(window), nbytes, thread[rows], at):
                    parts.append((rows if selection is None else rows[selection], *rest))
        return parts

    # ---- load and store
    def load(self, space, address, size, vec, how, mask, at):
        """`vec` arrays of `size`-byte words from address, address + size, ..."""
        index = self.threads.pick(mask)
        thread = self.threads.index if index is None else index
        a = address if index is None else address[index]
        if a.size == 0:
            return [np.zeros(self.threads.count, word(size))] * vec
        parts = self.route(space, a, size * vec, thread, at)
        if index is None and parts[0][0] is None:
            rows = self.read(*parts[0][1:], size, vec, thread, how, at)
            return [rows[:, j] for j in range(vec)]
        out = np.zeros((vec, self.threads.count), word(size))
        for selection, *part in parts:
            to = thread if selection is None else thread[selection]
            out[:, to] = self.read(*part, size, vec, to, how, at).T
        return list(out)

    def read(self, space, buffer, offset, size, vec, thread, how, at):
        """[n, vec] words from one space (and one buffer), after the checks of that space."""
        nbytes = size * vec
        if space == "global":
            self.races.touch(buffer, offset, nbytes, thread, at, how)
            if buffer.written is not None:
                marks = buffer.rows(size, vec, "written").take(offset // nbytes, axis=0)
                if (wrong := (marks != marks.dtype.type(ALL_WRITTEN & (1 << 8 * size) - 1)).any(1)).any():
                    j = int(np.flatnonzero(wrong)[0])
                    self.fault(at, f"read of {buffer.name} at offset {int(offset[j])}, which nothing wrote", thread[j])
            return buffer.rows(size, vec).take(offset // nbytes, axis=0)
        if space == "shared":
            self.shared.touch(offset, nbytes, thread, at, READ)
        elif not self.local_written[offset[:, None] + np.arange(nbytes)].all():
            self.fault(at, "read of local memory that nothing wrote", thread[0])
        data = self.shared.data if space == "shared" else self.local
        whole = data.size - data.size % nbytes
        return data[:whole].view(word(size)).reshape(-1, vec).take(offset // nbytes, axis=0)

    def store(self, space, address, values, size, how, mask, at):
        thread = self.threads.chosen(mask)
        if thread.size == 0:
            return
        everyone = thread is self.threads.index
        address = address if everyone else address[thread]
        for selection, *part in self.route(space, address, size * len(values), thread, at):
            who = thread if selection is None else thread[selection]
            rows = [v if everyone and selection is None or not np.ndim(v) else v[who] for v in values]
            self.write(*part, size, rows, who, how, at)

    def write(self, space, buffer, offset, size, values, thread, how, at):
        """values: one array (or number) for each word of the vector."""
        vec = len(values)
        nbytes = size * vec
        if space == "global":
            if not buffer.writable:
                self.fault(at, f"store to {buffer.name}, which is read-only", thread[0])
            self.races.touch(buffer, offset, nbytes, thread, at, how)
            rows = buffer.rows(size, vec)
            if buffer.written is not None:
                marks = buffer.rows(size, vec, "written")
                marks[offset // nbytes] = ALL_WRITTEN & (1 << 8 * size) - 1
            self.writes += 1
        else:
            if space == "shared":
                self.shared.touch(offset, nbytes, thread, at, WRITE)
            else:
                self.local_written[offset[:, None] + np.arange(nbytes)] = 1
            data = self.shared.data if space == "shared" else self.local
            rows = data[:data.size - data.size % nbytes].view(word(size)).reshape(-1, vec)
        row = offset // nbytes
        for j, value in enumerate(values):
            rows[row, j] = value

    # ---- atomics
    def atomic(self, space, address, op, values, kind, sync, mask, at):
        """The old values. values: a list of operands, each a list of vector items (one, but for vector reductions).

        Threads that hit one address take turns in thread order. sync: what it has of acquire, release, write."""
        thread, kind, vec = self.threads.chosen(mask), np.dtype(kind), len(values[0])
        out = np.zeros((vec, self.threads.count), kind)
        if thread.size == 0:
            return list(out)
        for selection, where, buffer, offset in self.route(space, address[thread], kind.itemsize * vec, thread, at):
            who = thread if selection is None else thread[selection]
            if where == "shared":
                self.shared.touch(offset, kind.itemsize * vec, who, at, ATOMIC)
                data = self.shared.data
            elif where == "global":
                self.touch_atomic(buffer, offset, kind.itemsize * vec, who, sync, at)
                data = buffer.data
            else:
                self.fault(at, "atomic on local memory", who[0])
            words = data[:data.size - data.size % kind.itemsize].view(kind)
            for j in range(vec):
                turns(words, offset // kind.itemsize + j, op, [v[j][who] for v in values], who, out[j])
        return list(out)

    def touch_atomic(self, buffer, offset, nbytes, thread, sync, at):
        if not buffer.writable:
            self.fault(at, f"atomic on {buffer.name}, which is read-only", thread[0])
        if buffer.written is not None and not buffer.written[offset[:, None] + np.arange(nbytes)].all():
            self.fault(at, f"atomic on bytes of {buffer.name} that nothing wrote", thread[0])
        self.races.touch(buffer, offset, nbytes, thread, at, ATOMIC)
        self.writes += 1
        self.tell(buffer, offset, thread, sync)

    # ---- order between blocks
    def fence(self, mask):
        """A fence of device or system scope: what is known now goes out with the thread's next strong write."""
        active = self.threads.active(mask)
        now = self.order.tick()
        self.fences[active] = np.stack([np.full(self.threads.count, now), self.order.block_until,
                                        self.order.warp_until], 1)[active]

    def tell(self, buffer, offset, thread, sync):
        """Strong accesses acquire what was published at their address, and publish what their threads know."""
        news = self.races.news
        fenced = self.fences[thread, 0] >= 0
        if not news.published and "release" not in sync and not fenced.any():
            return
        now = self.order.tick()
        for t, at, fence in zip(thread.tolist(), offset.tolist(), fenced.tolist()):
            block, address = self.races.block(t), buffer.base + at
            if "acquire" in sync:
                news.acquire(address, block)
            if "release" in sync:
                known = now, int(self.order.block_until[t]), int(self.order.warp_until[t])
                news.release(address, int(self.threads.linear(t)), block, known)
            elif fence and "write" in sync:
                news.release(address, int(self.threads.linear(t)), block, tuple(self.fences[t].tolist()))

    def strong(self, space, address, how, sync, mask):
        """The publishing half of ld.acquire, st.release and their weaker kin, once the access itself is done."""
        thread = self.threads.chosen(mask)
        if thread.size and space == "global" and how in (STRONG_READ, STRONG_WRITE):
            for selection, buffer, offset in self.memory.locate(address[thread], 1, None):
                self.tell(buffer, offset, thread if selection is None else thread[selection], sync)


def combine(op, old, values, kind):
    """The new value of an atomic operation."""
    v, one = values[0], kind.type(1)
    simple = dict(min=np.minimum, max=np.maximum)
    if op in simple:
        return simple[op](old, v)
    return {"add": lambda: old + v, "and": lambda: old & v, "or": lambda: old | v, "xor": lambda: old ^ v,
            "exch": lambda: v, "cas": lambda: np.where(old == v, values[-1], old),
            "inc": lambda: np.where(old >= v, kind.type(0), old + one),
            "dec": lambda: np.where((old == 0) | (old > v), v, old - one),
            "add.f16x2": lambda: half("add", "f16x2", old, v), "add.bf16x2": lambda: half("add", "bf16x2", old, v),
            "add.f16": lambda: half("add", "f16", old, v), "add.bf16": lambda: half("add", "bf16", old, v)}[op]()


def turns(words, where, op, values, thread, out):
    """Apply an atomic in rounds, so that each address is hit once a round; out[thread] gets the old values."""
    order = np.argsort(where, kind="stable")
    ordered, count = where[order], np.arange(len(where))
    first = np.r_[True, ordered[1:] != ordered[:-1]]
    rank = np.empty(len(where), i8)
    rank[order] = count - np.maximum.accumulate(np.where(first, count, 0))
    for r in range(int(rank.max()) + 1):
        now = np.flatnonzero(rank == r)
        old = words[where[now]]
        words[where[now]] = combine(op, old, [v[now] for v in values], words.dtype)
        out[thread[now]] = old
