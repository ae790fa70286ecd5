"""Global memory: the caller's arrays under made-up device addresses, with gaps between them and exact bounds."""
import bisect

import numpy as np

from .dtypes import i8, u1, u8, word
from .errors import PtxError
from .races import Shadow
from .spaces import FIRST_BUFFER

GAP = 4096                            # bytes between buffers: an overrun hits nothing instead of a neighbour


class Buffer:
    """One array. written: a byte of 0 or 1 for each of its bytes, or None where all of it counts as written."""

    def __init__(self, base, data, name, writable, unwritten):
        self.base, self.data, self.name, self.writable = base, data, name, writable
        self.end = base + data.size
        self.written = np.zeros(data.size, u1) if unwritten else None
        self.shadow = Shadow(data.size)
        self.views = {}

    def forget(self, offset, size):
        """Count these bytes as unwritten (again)."""
        if self.written is None:
            self.written = np.ones(self.data.size, u1)
        self.written[offset:offset + size] = 0

    def rows(self, size, vec, of=None):
        """The bytes as [n, vec] words of `size` bytes; of: "written" for the marks instead of the data."""
        key = size, vec, of
        if key not in self.views:
            raw = self.written if of else self.data
            whole = raw.size - raw.size % (size * vec)
            self.views[key] = raw[:whole].view(word(size)).reshape(-1, vec)
        return self.views[key]


class GlobalMemory:
    """Buffers by address. `add` an array, pass the address it returns to a kernel."""

    def __init__(self):
        self.buffers, self.bases, self.next, self.by_place = [], [], FIRST_BUFFER, {}

    def add(self, array, name="", unwritten=False):
        """Register an array, which is then read and written in place. Memory that is registered keeps its address.

        unwritten: reading a byte of it before a kernel wrote it is a fault."""
        if not array.flags.c_contiguous:
            raise PtxError(f"{name or 'array'} of shape {array.shape} is not C-contiguous")
        data = array.reshape(-1).view(u1) if array.size else np.zeros(0, u1)
        place = array.__array_interface__["data"][0], data.size
        for (start, size), other in self.by_place.items() if data.size else ():
            if start <= place[0] and place[0] + place[1] <= start + size:
                offset = place[0] - start
                if unwritten:
                    other.forget(offset, data.size)
                return other.base + offset
            if start < place[0] + place[1] and place[0] < start + size:
                raise PtxError(f"{name or 'array'} and {other.name} share some memory: pass the larger one first")
        buffer = Buffer(self.next, data, name or hex(self.next), array.flags.writeable, unwritten)
        self.next = -(-(buffer.end + GAP) // 256) * 256
        self.buffers.append(buffer)
        self.bases.append(buffer.base)
        if data.size:
            self.by_place[place] = buffer
        return buffer.base

    def new_launch(self):
        """Forget who touched what: launches on one stream are ordered."""
        for buffer in self.buffers:
            buffer.shadow = Shadow(buffer.data.size)

    def locate(self, address, nbytes, fault):
        """[(selection or None for all, buffer, byte offsets)] for u64 addresses; fault(index, message) raises."""
        i = bisect.bisect_right(self.bases, int(address.min())) - 1
        if i >= 0 and int(address.max()) + nbytes <= self.buffers[i].end:
            return [(None, self.buffers[i], (address - u8(self.buffers[i].base)).view(i8))]
        which = np.searchsorted(np.array(self.bases, u8), address, side="right") - 1
        ends = np.array([b.end for b in self.buffers] + [0], u8)         # the last one for which == -1
        bad = address + u8(nbytes) > ends[which]
        if bad.any():
            j = int(np.flatnonzero(bad)[0])
            fault(j, f"global access of {nbytes} bytes at {int(address[j]):#x} is out of bounds: "
                     f"{self.nearest(int(address[j]), int(which[j]))}")
        return [(selection, self.buffers[i], (address[selection] - u8(self.buffers[i].base)).view(i8))
                for i in np.unique(which) for selection in [np.flatnonzero(which == i)]]

    def nearest(self, address, which):
        if which < 0:
            return "no buffer is near"
        buffer = self.buffers[which]
        return f"offset {address - buffer.base} of {buffer.name}, which has {buffer.data.size} bytes"
